//! Two hosts on one machine: network namespaces joined by a veth pair.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::netns::{self, ip};

/// IP addresses of the two namespaces.
pub const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

/// Two network namespaces; dropping this value deletes them.
#[derive(Debug)]
pub struct NamespacePair {
    names: [String; 2],
}

impl NamespacePair {
    /// Creates both namespaces and the veth pair with this MTU.
    ///
    /// # Errors
    /// The message of `ip`; creating namespaces needs root.
    pub fn new(mtu: u32) -> io::Result<Self> {
        netns::delete_stale();
        let pair = Self { names: ["a", "b"].map(|side| format!("millstream-{}-{side}", std::process::id())) };
        let [a, b] = &pair.names;
        for name in &pair.names {
            netns::add(name)?;
        }
        ip(&format!("-n {a} link add wire0 mtu {mtu} type veth peer name wire0 mtu {mtu} netns {b}"))?;
        for (name, address) in pair.names.iter().zip(ADDRESSES) {
            ip(&format!("-n {name} address add {address}/24 dev wire0"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set wire0 up"))?;
        }
        Ok(pair)
    }

    /// A program in one namespace, pinned to a core, with a time limit of a minute. It prints its CPU time at the end.
    fn command(&self, side: usize, words: &[String], environment: &[(&str, String)]) -> Command {
        let mut command = Command::new("ip");
        let core = (side % std::thread::available_parallelism().map_or(1, usize::from)).to_string();
        command.args(["netns", "exec", &self.names[side], "taskset", "-c", &core]);
        // Ctrl-C does not reach the process group that `timeout` makes. It gets a signal when the benchmark has ended.
        command.args(["setpriv", "--pdeathsig", "TERM", "timeout", "-k", "5", "60"]);
        command.args(["bash", "-c", "TIMEFORMAT='cpu time %U %S'; time \"$@\"", "bash"]).args(words);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a server in the first namespace and a client in the second. With a TCP port, the client starts
    /// once the server listens on it. If the client fails, its server is ended.
    ///
    /// # Errors
    /// The error of starting a program; the output of the programs that fail, that of the client first.
    pub fn run(
        &self,
        sides: [&str; 2],
        port: Option<u16>,
        environment: &[(&str, String)],
    ) -> io::Result<RunOutput> {
        let words = sides.map(|side| side.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let server = self.command(0, &words[0], environment).spawn()?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while port.is_some_and(|port| !self.listens(port)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        finish(sides, server, self.command(1, &words[1], environment))
    }

    /// Whether a socket in the first namespace listens on the TCP port.
    fn listens(&self, port: u16) -> bool {
        let words = ["netns", "exec", &self.names[0], "cat", "/proc/net/tcp", "/proc/net/tcp6"];
        let tables = Command::new("ip").args(words).output().map(|output| text(&output)).unwrap_or_default();
        let bound = format!(":{port:04X} ");
        tables.lines().any(|line| line.contains(&bound) && line.contains(" 0A "))
    }
}

/// Runs a client beside its server, until both have ended. `names` are those of server and client.
fn finish(names: [&str; 2], server: Child, mut client: Command) -> io::Result<RunOutput> {
    let client = client.output();
    if !client.as_ref().is_ok_and(|client| client.status.success()) {
        // Without its client it would wait until its time limit. `timeout` passes the signal on.
        let _ = kill_process(Pid::from_child(&server), Signal::TERM);
    }
    let server = server.wait_with_output()?;
    let client = client?;
    let sides = [(names[1], &client), (names[0], &server)];
    let failed = sides.into_iter().filter(|(_, output)| !output.status.success());
    let failed: Vec<_> =
        failed.map(|(name, output)| format!("{name}: {}\n{}", output.status, text(output))).collect();
    if !failed.is_empty() {
        return Err(io::Error::other(failed.join("\n")));
    }
    Ok(RunOutput {
        client_output: text(&client),
        cpu_seconds: [&server, &client].map(|side| cpu_seconds(&text(side))),
    })
}

impl Drop for NamespacePair {
    fn drop(&mut self) {
        for name in &self.names {
            netns::delete(name);
        }
    }
}

/// The output of a client, and the CPU time of server and client.
#[derive(Clone, Debug)]
pub struct RunOutput {
    /// Standard output and standard error of the client.
    pub client_output: String,
    /// User and system time of server and client (s).
    pub cpu_seconds: [f64; 2],
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn cpu_seconds(output: &str) -> f64 {
    let line = output.lines().rev().find_map(|line| line.strip_prefix("cpu time "));
    line.map_or(0.0, |line| line.split(' ').filter_map(|word| word.parse::<f64>().ok()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["3600", "bash", "-c", script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    #[test]
    fn the_error_of_a_client_comes_first_and_its_server_is_ended() {
        let server = shell("sleep 3600").spawn().unwrap();
        let client = shell("echo no route >&2; exit 3");
        let error = finish(["the server", "the client"], server, client).unwrap_err().to_string();
        assert!(error.starts_with("the client: exit status: 3\nno route\n"), "{error}");
    }

    #[test]
    fn the_processor_time_of_both_sides_is_read() {
        let server = shell("echo cpu time 0.25 0.5").spawn().unwrap();
        let output = finish(["", ""], server, shell("echo result 7; echo cpu time 1.0 2.0 >&2")).unwrap();
        assert_eq!(output.cpu_seconds, [0.75, 3.0]);
        assert!(output.client_output.starts_with("result 7\n"));
    }
}
