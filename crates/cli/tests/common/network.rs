//! Hosts on one machine: network namespaces on a switch (veth and a bridge), whose links can be cut.
#![allow(dead_code, reason = "each test program uses what it needs")]

use std::process::{Command, Output};

pub(crate) fn run(program: &str, words: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(program).args(words).envs(environment.iter().copied()).output().expect("it starts")
}

/// Whether this process can create namespaces; prints a line if not. Root in a container may not.
pub(crate) fn is_root() -> bool {
    let tried = run("unshare", &["--net", "--mount", "ip", "link", "set", "lo", "up"], &[]);
    if !tried.status.success() {
        println!("not run: network namespaces need root: {}", String::from_utf8_lossy(&tried.stderr));
    }
    tried.status.success()
}

/// Hosts 1 to 3 on one switch. Dropping the value that created them deletes them.
pub(crate) struct Network {
    name: String,
    own: bool,
}

impl Network {
    /// Creates hosts with addresses [`Network::address`]. `test` distinguishes the networks of one program.
    pub(crate) fn new(test: &str) -> Self {
        let network = Self { name: format!("millstream-{}-{test}", std::process::id()), own: true };
        let name = &network.name;
        ip(&format!("netns add {name}-0"));
        ip(&format!("-n {name}-0 link add switch type bridge"));
        ip(&format!("-n {name}-0 link set switch up"));
        for host in 1..=3 {
            let there = network.host(host);
            ip(&format!("netns add {there}"));
            ip(&format!("-n {name}-0 link add port{host} type veth peer name wire0 netns {there}"));
            ip(&format!("-n {name}-0 link set port{host} master switch up"));
            ip(&format!("-n {there} address add {}/24 dev wire0", network.address(host)));
            ip(&format!("-n {there} link set wire0 up"));
            ip(&format!("-n {there} link set lo up"));
        }
        network
    }

    /// A network that another process created.
    pub(crate) fn made_by_another(name: String) -> Self {
        Self { name, own: false }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The namespace of a host.
    pub(crate) fn host(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    pub(crate) fn address(&self, host: usize) -> String {
        format!("10.79.0.{host}")
    }

    /// A program on a host.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host(host), program]);
        command
    }

    /// Cuts the link between a host and the switch.
    pub(crate) fn cut(&self, host: usize) {
        ip(&format!("-n {}-0 link set port{host} down", self.name));
    }

    /// Restores the link.
    pub(crate) fn restore(&self, host: usize) {
        ip(&format!("-n {}-0 link set port{host} up", self.name));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if self.own {
            for host in 0..=3 {
                let _ = run("ip", &["netns", "delete", &self.host(host)], &[]);
            }
        }
    }
}

fn ip(words: &str) {
    let output = run("ip", &words.split(' ').collect::<Vec<_>>(), &[]);
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}
