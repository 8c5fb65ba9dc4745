//! Two hosts on one machine, whose link fails: network namespaces on a switch. The last unit of a kind runs on the second
//! host and everything else on the first one, so all that the unit exchanges with others crosses the link.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{Fault, Victim};
use crate::netns::{self, ip};

/// Address of the first host, where the manager listens.
pub(super) const ADDRESS: &str = "10.83.0.1";

/// The hosts. Dropping this value deletes them.
pub(super) struct Hosts {
    name: String,
}

impl Hosts {
    /// Creates both hosts.
    pub(super) fn new() -> io::Result<Hosts> {
        netns::delete_stale();
        let hosts = Hosts { name: format!("millstream-faults-{}", std::process::id()) };
        let name = &hosts.name;
        netns::add(&hosts.host(0))?;
        ip(&format!("-n {name}-0 link add switch type bridge"))?;
        ip(&format!("-n {name}-0 link set switch up"))?;
        for host in 1..=2 {
            let there = hosts.host(host);
            netns::add(&there)?;
            ip(&format!("-n {name}-0 link add port{host} type veth peer name wire0 netns {there}"))?;
            ip(&format!("-n {name}-0 link set port{host} master switch up"))?;
            ip(&format!("-n {there} address add 10.83.0.{host}/24 dev wire0"))?;
            ip(&format!("-n {there} link set wire0 up"))?;
            ip(&format!("-n {there} link set lo up"))?;
        }
        Ok(hosts)
    }

    fn host(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    /// A program on the first host.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host(1)]).arg(program);
        command
    }

    /// Writes the program through which the launcher starts each process: those of the victim on the second host, whose
    /// device has the fault if it is one of single packets.
    pub(super) fn write_launcher(
        &self,
        folder: &Path,
        victim: Victim,
        fault: Fault,
        index: usize,
    ) -> io::Result<PathBuf> {
        let unit = match victim {
            Victim::BuilderLink => format!("\"builder {index} \"* | \"card \"*\".card{index} \"*"),
            _ => format!("\"readout {index} \"*"),
        };
        let faults = fault.of_packets().map_or(String::new(), |faults| {
            format!(" {}={faults},side=both", millstream_link::config::LINK_VARIABLE)
        });
        // Its arguments: the program, `unit`, and the role with its index or name, as in `evb unit readout 0`.
        let script = format!(
            "#!/bin/sh\nwords=\"$*\"\ncase \"${{words#* unit }} \" in\n{unit})\n\
             exec ip netns exec {} env{faults} \"$@\" ;;\nesac\nexec \"$@\"\n",
            self.host(2)
        );
        let path = folder.join("launcher.sh");
        std::fs::write(&path, script)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Cuts the link of the second host.
    pub(super) fn cut(&self) -> io::Result<()> {
        ip(&format!("-n {}-0 link set port2 down", self.name))
    }

    /// Restores the link.
    pub(super) fn restore(&self) -> io::Result<()> {
        ip(&format!("-n {}-0 link set port2 up", self.name))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..=2 {
            netns::delete(&self.host(host));
        }
    }
}

/// Whether this process may create network namespaces.
pub(super) fn are_possible() -> bool {
    Hosts::new().is_ok()
}
