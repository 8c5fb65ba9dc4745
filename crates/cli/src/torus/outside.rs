//! `millstream torus outside`: this host is no node, and uses the regions that nodes published.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use millstream_fabric::{Fabric, Notification};
use millstream_rdma::device::DeviceSelector;
use millstream_report::{Replacement, eprint_line};
use millstream_torus::OutsideHost;
use millstream_torus::engine::OutsideAccess;
use millstream_torus::key;
use millstream_torus::seventh::directory::PublishedRegion;
use millstream_torus::seventh::host::{ENV_GATEWAY, ENV_GATEWAY_KEY};
use millstream_torus::seventh::{GatewayOptions, HostError};
use millstream_torus_core::NodeNumber;

/// Bytes that are in memory at once.
const BLOCK: usize = 4 << 20;

#[derive(Debug, Args)]
pub(crate) struct TorusOutsideOptions {
    /// Address of a node's seventh port; by default MILLSTREAM_TORUS_GATEWAY
    #[arg(long, value_name = "HOST:PORT")]
    gateway: Option<String>,
    /// File with its key, 16 hexadecimal digits; `-` is a line of standard input. By default MILLSTREAM_TORUS_GATEWAY_KEY
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    #[command(subcommand)]
    command: OutsideCommand,
}

#[derive(Debug, Subcommand)]
enum OutsideCommand {
    /// List the published regions of all nodes
    ///
    ///     millstream torus outside --gateway node0:7600 --key-file seventh.key list --json
    #[command(verbatim_doc_comment)]
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read a region to a file or to standard output
    ///
    ///     millstream torus outside get 3 histogram --offset 4096 --length 65536 --output histogram.bin
    #[command(verbatim_doc_comment)]
    Get {
        #[command(flatten)]
        place: Place,
        /// Bytes to read; by default all behind the offset
        #[arg(long, value_name = "BYTES")]
        length: Option<u64>,
        /// Where the bytes go
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Write a file or standard input to a region
    ///
    ///     millstream torus outside put 3 parameters --input parameters.bin --counter 7
    #[command(verbatim_doc_comment)]
    Put {
        #[command(flatten)]
        place: Place,
        /// Where the bytes come from
        #[arg(long, value_name = "FILE")]
        input: Option<PathBuf>,
        /// Raise this counter of the node's application by one, after the bytes are in place
        #[arg(long, value_name = "INDEX")]
        counter: Option<u16>,
    },
}

#[derive(Debug, Args)]
struct Place {
    /// Number of the node
    node: u16,
    /// Name of the region
    name: String,
    /// Start in the region
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    offset: u64,
}

impl Place {
    fn find(&self, host: &mut OutsideHost) -> Result<(NodeNumber, PublishedRegion), Box<dyn Error>> {
        let node = NodeNumber(self.node);
        let found = host.find(node, &self.name)?;
        let missing = || format!("{node} has published no region {:?}: see `torus outside list`", self.name);
        Ok((node, found.ok_or_else(missing)?))
    }
}

pub(super) fn run(
    options: &TorusOutsideOptions,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    let device = device.cloned().unwrap_or_else(DeviceSelector::from_environment);
    let gateway = options.gateway.clone().or_else(|| std::env::var(ENV_GATEWAY).ok());
    let address = gateway.ok_or(HostError::Environment { name: ENV_GATEWAY })?;
    let key = key::find(options.key_file.as_deref(), "--key-file", ENV_GATEWAY_KEY)?;
    let mut host = OutsideHost::connect(&GatewayOptions { address, key, device })?;
    match &options.command {
        OutsideCommand::List { json } => return list(&mut host, *json),
        OutsideCommand::Get { place, length, output } => get(&mut host, place, *length, output.as_deref())?,
        OutsideCommand::Put { place, input, counter } => put(&mut host, place, input.as_deref(), *counter)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if it cannot ask a node.
fn list(host: &mut OutsideHost, json: bool) -> Result<ExitCode, Box<dyn Error>> {
    let mut rows = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for node in host.dimensions().all() {
        match host.published(node) {
            Ok(regions) => rows.extend(regions.into_iter().map(|region| (node, region))),
            // The others are there all the same.
            Err(error) => {
                eprint_line!("{node}: {error}");
                code = ExitCode::FAILURE;
            }
        }
    }
    let access = |region: &PublishedRegion| match region.access {
        OutsideAccess::Read => "read",
        OutsideAccess::ReadWrite => "read-write",
    };
    if json {
        let regions: Vec<_> = (rows.iter())
            .map(|(node, region)| {
                serde_json::json!({
                    "node": node.0,
                    "name": region.name,
                    "size": region.size,
                    "access": access(region),
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&regions)?);
        return Ok(code);
    }
    for (node, region) in rows {
        println!("{node:<10} {:<62} {:>14} B  {}", region.name, region.size, access(&region));
    }
    Ok(code)
}

fn get(
    host: &mut OutsideHost,
    place: &Place,
    length: Option<u64>,
    output: Option<&Path>,
) -> Result<(), Box<dyn Error>> {
    let (node, region) = place.find(host)?;
    let mut left = length.unwrap_or_else(|| region.size.saturating_sub(place.offset));
    let mut file = output.map(Replacement::create).transpose()?;
    let mut output: Box<dyn Write> = match &mut file {
        Some(file) => Box::new(file),
        None => Box::new(io::stdout().lock()),
    };
    let (mut block, mut offset) = (vec![0; BLOCK], place.offset);
    loop {
        let part = left.min(BLOCK as u64) as usize;
        host.get(node, region.region, offset, &mut block[..part])?;
        output.write_all(&block[..part])?;
        left -= part as u64;
        offset = offset.wrapping_add(part as u64);
        if left == 0 {
            output.flush()?;
            break;
        }
    }
    drop(output);
    Ok(file.map_or(Ok(()), Replacement::commit)?)
}

fn put(
    host: &mut OutsideHost,
    place: &Place,
    input: Option<&Path>,
    counter: Option<u16>,
) -> Result<(), Box<dyn Error>> {
    let (node, region) = place.find(host)?;
    let mut input: Box<dyn Read> = match input {
        Some(path) => Box::new(File::open(path).map_err(|error| format!("{}: {error}", path.display()))?),
        None => Box::new(io::stdin().lock()),
    };
    let (mut block, mut offset) = (Vec::with_capacity(BLOCK), place.offset);
    loop {
        block.clear();
        input.by_ref().take(BLOCK as u64).read_to_end(&mut block)?;
        if block.is_empty() {
            break;
        }
        host.put(node, region.region, offset, &block, Notification::None)?;
        offset = offset.wrapping_add(block.len() as u64);
    }
    if let Some(index) = counter {
        // Behind the data of the same pair.
        let one = Notification::Counter { index, add: 1 };
        host.put(node, region.region, place.offset, &[], one)?;
    }
    host.flush(node)?;
    Ok(())
}
