//! `millstream site check --live`: the file against what runs.

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::time::Duration;

use millstream_card::info::CardInfo;
use millstream_card::{RemoteCard, RemoteOptions};
use millstream_quantity::Bytes;
use millstream_rdma::device::{self, DeviceSelector};
use millstream_site::{NetworkCard, Site};
use millstream_tls::Security;

use super::up::{LiveSite, state_file};

/// Longest time for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Prints a line for each card, torus and event builder. Returns whether all agree with the file.
pub(super) fn check(
    site: &Site,
    file: &Path,
    choice: Option<&DeviceSelector>,
) -> Result<bool, Box<dyn Error>> {
    let security = Security::from_environment()?;
    let mut agree = true;
    let mut line = |what: String, found: Result<String, String>| match found {
        Ok(state) => println!("  {what}: {state}"),
        Err(difference) => {
            agree = false;
            println!("  {what}: DIFFERS: {difference}");
        }
    };
    let device = match site.cards.is_empty() {
        true => None,
        false => Some(device::open(&choice.cloned().unwrap_or_else(DeviceSelector::from_environment))?),
    };
    for card in &site.cards {
        let found = match &device {
            Some(device) => {
                let options = RemoteOptions { timeout: TIMEOUT, ..RemoteOptions::default() };
                RemoteCard::connect(device, &card.address, options)
                    .and_then(|card| card.snapshot())
                    .map_err(|error| error.to_string())
                    .and_then(|bar0| compare_card(card, &CardInfo::of(&bar0)))
            }
            None => Err("no device".to_owned()),
        };
        line(format!("card {}", card.name), found);
    }
    let live = std::fs::read_to_string(state_file(file)?).ok();
    let live: Option<LiveSite> = live.and_then(|text| serde_json::from_str(&text).ok());
    for torus in &site.tori {
        line(format!("torus {}", torus.name), compare_torus(&torus.name, torus.nodes.len(), live.as_ref()));
    }
    for builder in &site.event_builders {
        let found =
            run_control(&builder.control, &security).map_err(|error| format!("{}: {error}", builder.control));
        line(format!("event builder {}", builder.name), found);
    }
    Ok(agree)
}

fn compare_card(card: &NetworkCard, info: &CardInfo) -> Result<String, String> {
    if let Some(memory) = card.memory.filter(|memory| memory.0 != info.memory_bytes) {
        return Err(format!(
            "memory: {} in the file, {} on the card",
            memory.binary(),
            Bytes(info.memory_bytes).binary()
        ));
    }
    if let Some(banks) = card.banks.filter(|banks| *banks != info.bank_count) {
        return Err(format!("banks: {banks} in the file, {} on the card", info.bank_count));
    }
    Ok(format!(
        "{} bytes in {} banks, {}, lease {}",
        info.memory_bytes, info.bank_count, info.state, info.lease.state
    ))
}

/// Only `site up` knows the processes of a torus.
fn compare_torus(name: &str, nodes: usize, live: Option<&LiveSite>) -> Result<String, String> {
    let torus = live
        .and_then(|live| live.tori.iter().find(|torus| torus.name == name))
        .ok_or("no `millstream site up` of this file runs here")?;
    let dead = torus.nodes.iter().filter(|pid| !is_node(**pid)).count();
    if torus.nodes.len() != nodes || dead > 0 {
        return Err(format!("{nodes} nodes in the file, {} run", torus.nodes.len() - dead));
    }
    Ok(format!("{nodes} nodes, {}", torus.dimensions))
}

/// Whether the process exists and is a node of a torus.
fn is_node(pid: u32) -> bool {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0);
    words.any(|word| word == b"torus") && words.next() == Some(b"node")
}

/// Whether run control answers with keys.
#[cfg(feature = "control")]
fn secured_run_control(address: &str, security: &Security) -> std::io::Result<String> {
    let client = millstream_control::client::Client::new(address, None, security);
    client.status().map_err(std::io::Error::other)?;
    Ok(format!("run control answers at {address}"))
}

#[cfg(not(feature = "control"))]
fn secured_run_control(_: &str, _: &Security) -> std::io::Result<String> {
    Err(std::io::Error::other("this build has no client of run control (feature control)"))
}

/// The first line of run control's answer.
fn run_control(address: &str, security: &Security) -> std::io::Result<String> {
    if security.is_on() {
        return secured_run_control(address, security);
    }
    let mut latest = std::io::ErrorKind::NotFound.into();
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Err(error) => latest = error,
            Ok(mut stream) => {
                stream.set_read_timeout(Some(TIMEOUT))?;
                write!(stream, "GET / HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
                let mut start = [0; 12];
                stream.read_exact(&mut start)?;
                return match &start {
                    b"HTTP/1.0 200" | b"HTTP/1.1 200" => Ok(format!("run control answers at {address}")),
                    other => {
                        Err(std::io::Error::other(format!("answers {:?}", String::from_utf8_lossy(other))))
                    }
                };
            }
        }
    }
    Err(latest)
}
