//! A torus of eight hosts: network namespaces that are joined only by a veth pair between neighbours. A node that talked to
//! anybody else could not be reached.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libtest_mimic::{Failed, Trial};
use millstream_health::NodeState;
use millstream_torus::launch::Launcher;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::{Dimensions, Direction, NodeNumber, Sign};
use rustix::process::Signal;

use super::returning::is_well;
use super::{LONG_PERIODS, application, await_end, await_state, kill, launcher};

type TestResult = Result<(), Box<dyn std::error::Error>>;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, run: fn() -> TestResult| Trial::test(name, move || as_root(run));
    vec![
        trial(
            "hosts_that_reach_only_their_neighbours_form_a_torus",
            hosts_that_reach_only_their_neighbours_form_a_torus,
        ),
        trial("a_cut_link_is_avoided_until_it_returns", a_cut_link_is_avoided_until_it_returns),
        trial("a_link_with_a_silent_direction_is_avoided_until_it_returns", a_link_with_a_silent_direction),
        trial(
            "a_link_that_connects_but_carries_nothing_stays_avoided",
            a_link_that_connects_but_carries_nothing,
        ),
        trial("a_node_without_a_service_network_does_not_stop_a_change", a_node_without_a_service_network),
    ]
}

fn as_root(test: fn() -> TestResult) -> Result<(), Failed> {
    // Root in a container may not create them.
    let tried = run("unshare", &["--net", "--mount", "ip", "link", "set", "lo", "up"]);
    if !tried.status.success() {
        println!("not run: network namespaces need root: {}", String::from_utf8_lossy(&tried.stderr));
        return Ok(());
    }
    test().map_err(|error| Failed::from(error.to_string()))
}

fn run(program: &str, words: &[&str]) -> Output {
    Command::new(program).args(words).output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn ip(words: &str) {
    let output = run("ip", &words.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// One namespace for each node. Dropping it deletes them.
struct Hosts {
    name: String,
    torus: Dimensions,
    /// Held while there is a service network.
    service: Option<MutexGuard<'static, ()>>,
}

/// Service networks of two tests would have the same addresses on this host.
static SERVICE_NETWORK: Mutex<()> = Mutex::new(());

impl Hosts {
    /// A node has one address, on all its links; the other end of a link is the only address behind it.
    fn new(test: &str, torus: Dimensions) -> Hosts {
        let hosts = Hosts { name: format!("millstream-{test}-{}", std::process::id()), torus, service: None };
        for node in torus.all() {
            ip(&format!("netns add {}", hosts.host(node)));
            ip(&format!("-n {} link set lo up", hosts.host(node)));
        }
        for node in torus.all() {
            for direction in Direction::ALL.into_iter().filter(|direction| direction.sign == Sign::Plus) {
                let Some(neighbour) = torus.neighbour(node, direction) else { continue };
                let (here, there) = (hosts.host(node), hosts.host(neighbour));
                let (near, far) = (format!("to{}", neighbour.0), format!("to{}", node.0));
                ip(&format!("-n {here} link add {near} type veth peer name {far} netns {there}"));
                hosts.join(node, &near, neighbour);
                hosts.join(neighbour, &far, node);
            }
        }
        hosts
    }

    fn join(&self, node: NodeNumber, link: &str, neighbour: NodeNumber) {
        let (host, own, other) = (self.host(node), address(node), address(neighbour));
        ip(&format!("-n {host} address add {own} peer {other}/32 dev {link}"));
        ip(&format!("-n {host} link set {link} up"));
    }

    fn host(&self, node: NodeNumber) -> String {
        format!("{}-{}", self.name, node.0)
    }

    /// A service network: every host reaches this one, for supervisors. Returns the address here. It has IPv6 addresses,
    /// because the device takes an IPv4 address for its packets if there is one.
    fn serve(&mut self) -> String {
        self.service = Some(SERVICE_NETWORK.lock().unwrap_or_else(PoisonError::into_inner));
        for node in self.torus.all() {
            let (host, link) = (self.host(node), service_link(node));
            let there = format!("fd79::{}", node.0 + 1);
            ip(&format!("link add {link} type veth peer name service netns {host}"));
            ip(&format!("-6 address add {SERVICE}/128 dev {link} nodad"));
            ip(&format!("link set {link} up"));
            ip(&format!("-6 route replace {there}/128 dev {link}"));
            ip(&format!("-n {host} -6 address add {there}/128 dev service nodad"));
            ip(&format!("-n {host} link set service up"));
            ip(&format!("-n {host} -6 route replace {SERVICE}/128 dev service"));
        }
        SERVICE.to_owned()
    }

    /// A program that starts processes on the hosts.
    fn launcher(&self, folder: &Path) -> Result<PathBuf, std::io::Error> {
        let script = folder.join("on-host");
        let text = format!("#!/bin/sh\nexec ip netns exec {}-$MILLSTREAM_TORUS_RANK \"$@\"\n", self.name);
        std::fs::write(&script, text)?;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
        Ok(script)
    }

    fn addresses(&self) -> Vec<String> {
        self.torus.all().map(|node| format!("{}:0", address(node))).collect()
    }

    /// Whether a host has a route to a node.
    fn reaches(&self, from: NodeNumber, to: NodeNumber) -> bool {
        run("ip", &["-n", &self.host(from), "route", "get", &address(to)]).status.success()
    }

    /// Bytes that a host received over a link.
    fn received_over(&self, node: NodeNumber, link: &str) -> u64 {
        let links = run("ip", &["-n", &self.host(node), "-s", "-j", "link", "show", link]).stdout;
        let links: serde_json::Value = serde_json::from_slice(&links).expect("a list of links");
        links[0]["stats64"]["rx"]["bytes"].as_u64().expect("a count")
    }

    /// Bytes that a host received from its neighbours.
    fn received(&self, node: NodeNumber) -> u64 {
        let links = run("ip", &["-n", &self.host(node), "-s", "-j", "link", "show"]).stdout;
        let links: serde_json::Value = serde_json::from_slice(&links).expect("a list of links");
        let of_wire = links.as_array().into_iter().flatten().filter(|link| link["ifname"] != "lo");
        of_wire.filter_map(|link| link["stats64"]["rx"]["bytes"].as_u64()).sum()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for node in self.torus.all() {
            // Those of a namespace go some time after it.
            if self.service.is_some() {
                run("ip", &["link", "delete", &service_link(node)]);
            }
            run("ip", &["netns", "delete", &self.host(node)]);
        }
    }
}

const SERVICE: &str = "fd79::fe";

fn service_link(node: NodeNumber) -> String {
    format!("ms{}-{}", std::process::id() % 100_000, node.0)
}

fn address(node: NodeNumber) -> String {
    format!("10.79.1.{}", node.0 + 1)
}

fn hosts_that_reach_only_their_neighbours_form_a_torus() -> TestResult {
    let torus: Dimensions = "2x2x2".parse()?;
    let hosts = Hosts::new("hosts", torus);
    for from in torus.all() {
        for to in torus.all().filter(|&to| to != from) {
            let is_neighbour = Direction::ALL.iter().any(|&step| torus.neighbour(from, step) == Some(to));
            assert_eq!(hosts.reaches(from, to), is_neighbour, "{from} to {to}");
        }
    }
    let folder = tempfile::tempdir()?;
    let launcher = Launcher {
        launcher: Some(hosts.launcher(folder.path())?),
        addresses: hosts.addresses(),
        ..launcher("2x2x2")
    };
    let mut launched = launcher.launch()?;
    launched.run(&application("conformance"))?;
    let total = TrafficCounters::total(&launched.finish()?);
    // Packets went over the links, not through shared memory.
    let received: u64 = torus.all().map(|node| hosts.received(node)).sum();
    assert!(received > total.delivered_bytes && total.injected > 1000, "{received} bytes received: {total}");
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    Ok(())
}

/// The link between nodes 0 and 1 loses its carrier.
fn a_cut_link_is_avoided_until_it_returns() -> TestResult {
    fn set(hosts: &Hosts, state: &str) {
        ip(&format!("-n {} link set to1 {state}", hosts.host(NodeNumber(0))));
    }
    a_link_is_avoided_until_it_returns("cut", |hosts| set(hosts, "down"), |hosts| set(hosts, "up"))
}

/// What node 0 sends to node 1 does not arrive, because its host has a wrong hardware address of that of node 1. The other
/// direction works.
fn a_link_with_a_silent_direction() -> TestResult {
    fn neighbour(hosts: &Hosts, words: &str) {
        let (host, there) = (hosts.host(NodeNumber(0)), address(NodeNumber(1)));
        ip(&format!("-n {host} neigh {}", words.replace("THERE", &there)));
    }
    a_link_is_avoided_until_it_returns(
        "silent",
        |hosts| neighbour(hosts, "replace THERE lladdr 02:00:00:00:00:01 nud permanent dev to1"),
        |hosts| neighbour(hosts, "delete THERE dev to1"),
    )
}

/// The packets between nodes 0 and 1 are dropped, and their other connections work: the link connects, and carries nothing.
fn a_link_that_connects_but_carries_nothing() -> TestResult {
    fn rule(hosts: &Hosts, verb: &str) {
        let (host, there) = (hosts.host(NodeNumber(0)), address(NodeNumber(1)));
        ip(&format!("-n {host} rule {verb} to {there} ipproto udp dport 4791 blackhole"));
    }
    a_link_is_avoided_until_it_returns("mute", |hosts| rule(hosts, "add"), |hosts| rule(hosts, "del"))
}

/// A launcher of a torus on the hosts, with a supervisor on their service network.
fn supervised(hosts: &mut Hosts, folder: &Path, dimensions: &str) -> std::io::Result<Launcher> {
    let service = hosts.serve();
    Ok(Launcher {
        launcher: Some(hosts.launcher(folder)?),
        addresses: hosts.addresses(),
        supervisor_address: Some(format!("[{service}]:0")),
        supervisors: 1,
        ..launcher(dimensions)
    })
}

/// All nodes go on around a link that fails, and over it when it is back.
fn a_link_is_avoided_until_it_returns(test: &str, cut: fn(&Hosts), restore: fn(&Hosts)) -> TestResult {
    let torus: Dimensions = "2x2x1".parse()?;
    let mut hosts = Hosts::new(test, torus);
    let folder = tempfile::tempdir()?;
    let launcher = supervised(&mut hosts, folder.path(), "2x2x1")?;
    // One change of routes at the cut, and one when the link is back, also on a busy machine.
    let mut launched = Launcher { period_factor: LONG_PERIODS, ..launcher }.launch()?;
    await_state(&launched, "all nodes are well", is_well);
    launched.run(&application("conformance"))?;
    cut(&hosts);
    await_state(&launched, "the link is avoided", |state| {
        let ends =
            state.nodes[..2].iter().all(|row| matches!(row.state, NodeState::LinkFailed(_)) && !row.avoided);
        state.settled && state.epoch > 0 && ends
    });
    // Around the link.
    launched.run(&application("conformance"))?;
    let around = hosts.received_over(NodeNumber(1), "to0");
    restore(&hosts);
    await_state(&launched, "the link is back", |state| is_well(state) && state.epoch == 2);
    launched.run(&application("conformance"))?;
    let back = hosts.received_over(NodeNumber(1), "to0");
    assert!(back > around + 1_000_000, "{} bytes over the link that is back", back - around);
    launched.finish()?;
    Ok(())
}

/// Nothing from the service network reaches node 2: a dead node is avoided nevertheless, and so is node 2. Its connections
/// end by themselves, and with new ones it takes part again.
fn a_node_without_a_service_network() -> TestResult {
    let torus: Dimensions = "3x2x1".parse()?;
    let mut hosts = Hosts::new("orders", torus);
    let folder = tempfile::tempdir()?;
    let launcher = Launcher { period_factor: 8, ..supervised(&mut hosts, folder.path(), "3x2x1")? };
    let mut launched = launcher.launch()?;
    await_state(&launched, "all nodes are well", is_well);
    let (cut_off, dead) = (NodeNumber(2), NodeNumber(3));
    let (there, link) = (format!("fd79::{}", cut_off.0 + 1), service_link(cut_off));
    ip(&format!("-6 neigh replace {there} lladdr 02:00:00:00:00:01 nud permanent dev {link}"));
    kill(launched.pid(dead).expect("exists"), Signal::KILL);
    await_end(&mut launched, dead);
    await_state(&launched, "both nodes are avoided", |state| {
        let avoided = state.nodes.iter().filter(|row| row.avoided).map(|row| row.node);
        state.settled && avoided.eq([cut_off, dead])
    });
    ip(&format!("-6 neigh delete {there} dev {link}"));
    await_state(&launched, "node 2 is back", |state| state.settled && !state.nodes[2].avoided);
    launched.restart_node(dead)?;
    await_state(&launched, "all nodes are well again", is_well);
    launched.run(&application("conformance"))?;
    launched.finish()?;
    Ok(())
}
