//! A torus of eight hosts: network namespaces that are joined only by a veth pair between neighbours. A node that talked to
//! anybody else could not be reached.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use libtest_mimic::{Failed, Trial};
use millstream_torus::account::Account;
use millstream_torus::launch::Launcher;
use millstream_torus_core::{Dimensions, Direction, NodeNumber, Sign};

use super::{application, launcher};

pub(crate) fn trial() -> Trial {
    Trial::test("hosts_that_reach_only_their_neighbours_form_a_torus", || {
        let user = run("id", &["-u"]);
        if user.stdout != b"0\n" {
            println!("not run: network namespaces need root");
            return Ok(());
        }
        hosts_that_reach_only_their_neighbours_form_a_torus().map_err(|error| Failed::from(error.to_string()))
    })
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
}

impl Hosts {
    /// A node has one address, on all its links; the other end of a link is the only address behind it.
    fn new(torus: Dimensions) -> Hosts {
        let hosts = Hosts { name: format!("millstream-torus-{}", std::process::id()), torus };
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

    /// Whether a host has a route to a node.
    fn reaches(&self, from: NodeNumber, to: NodeNumber) -> bool {
        run("ip", &["-n", &self.host(from), "route", "get", &address(to)]).status.success()
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
            run("ip", &["netns", "delete", &self.host(node)]);
        }
    }
}

fn address(node: NodeNumber) -> String {
    format!("10.79.1.{}", node.0 + 1)
}

fn hosts_that_reach_only_their_neighbours_form_a_torus() -> Result<(), Box<dyn std::error::Error>> {
    let torus: Dimensions = "2x2x2".parse()?;
    let hosts = Hosts::new(torus);
    for from in torus.all() {
        for to in torus.all().filter(|&to| to != from) {
            let is_neighbour = Direction::ALL.iter().any(|&step| torus.neighbour(from, step) == Some(to));
            assert_eq!(hosts.reaches(from, to), is_neighbour, "{from} to {to}");
        }
    }
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("on-host");
    let text = format!("#!/bin/sh\nexec ip netns exec {}-$MILLSTREAM_TORUS_RANK \"$@\"\n", hosts.name);
    std::fs::write(&script, text)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let launcher = Launcher {
        launcher: Some(script),
        addresses: torus.all().map(|node| format!("{}:0", address(node))).collect(),
        ..launcher("2x2x2")
    };
    let mut launched = launcher.launch()?;
    launched.run(&application("conformance"))?;
    let total = Account::total(&launched.finish()?);
    // Packets went over the links, not through shared memory.
    let received: u64 = torus.all().map(|node| hosts.received(node)).sum();
    assert!(received > total.delivered_bytes && total.injected > 1000, "{received} bytes received: {total}");
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    Ok(())
}
