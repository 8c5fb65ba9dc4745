//! Two hosts on one machine: network namespaces with a cable (veth) between them.

use std::io;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Addresses of the two.
pub const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

/// Two namespaces; gone when dropped.
#[derive(Debug)]
pub struct Hosts {
    names: [String; 2],
}

fn ip(words: &str) -> io::Result<()> {
    let output = Command::new("ip").args(words.split(' ')).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("ip {words}: {said}")))
}

impl Hosts {
    /// Makes them; `mtu` is that of the cable.
    ///
    /// # Errors
    /// PermissionDenied if this process is not root; what `ip` says.
    pub fn new(mtu: u32) -> io::Result<Self> {
        let hosts =
            Self { names: ["a", "b"].map(|side| format!("millstream-{}-{side}", std::process::id())) };
        let [a, b] = &hosts.names;
        for name in &hosts.names {
            ip(&format!("netns add {name}")).map_err(|error| {
                io::Error::new(error.kind(), format!("network namespaces need root: {error}"))
            })?;
        }
        ip(&format!("-n {a} link add wire0 mtu {mtu} type veth peer name wire0 mtu {mtu} netns {b}"))?;
        for (name, address) in hosts.names.iter().zip(ADDRESSES) {
            ip(&format!("-n {name} address add {address}/24 dev wire0"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set wire0 up"))?;
        }
        Ok(hosts)
    }

    /// A program on one of the hosts, on a processor of its own, that ends after a minute at the latest; its processor
    /// time is printed at its end.
    fn command(&self, side: usize, words: &[String], environment: &[(&str, String)]) -> Command {
        let mut command = Command::new("ip");
        let core = (side % std::thread::available_parallelism().map_or(1, usize::from)).to_string();
        command.args(["netns", "exec", &self.names[side], "taskset", "-c", &core, "timeout", "60"]);
        command.args(["bash", "-c", "TIMEFORMAT='processor time %U %S'; time \"$@\"", "bash"]).args(words);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a server on the first host and, once it listens on the TCP port (if one is given), a client on the second.
    ///
    /// # Errors
    /// What starting them reports; what they say if one fails.
    pub fn run(
        &self,
        sides: [&str; 2],
        port: Option<u16>,
        environment: &[(&str, String)],
    ) -> io::Result<Ran> {
        let words = sides.map(|side| side.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let server = self.command(0, &words[0], environment).spawn()?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while port.is_some_and(|port| !self.listens(port)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let client = self.command(1, &words[1], environment).output()?;
        let server = server.wait_with_output()?;
        for (words, output) in sides.iter().zip([&server, &client]) {
            if !output.status.success() {
                return Err(io::Error::other(format!("{words}: {}\n{}", output.status, text(output))));
            }
        }
        Ok(Ran {
            output: text(&client),
            processor: [&server, &client].map(|side| processor_time(&text(side))),
        })
    }

    /// Whether somebody on the first host listens on the port: in the tables of a process of that namespace.
    fn listens(&self, port: u16) -> bool {
        let words = ["netns", "exec", &self.names[0], "cat", "/proc/net/tcp", "/proc/net/tcp6"];
        let tables = Command::new("ip").args(words).output().map(|output| text(&output)).unwrap_or_default();
        let bound = format!(":{port:04X} ");
        tables.lines().any(|line| line.contains(&bound) && line.contains(" 0A "))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "delete", name]).stderr(Stdio::null()).status();
        }
    }
}

/// What a client printed, and the processor time of server and client in seconds.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Output and errors of the client.
    pub output: String,
    /// Server's and client's, user and system.
    pub processor: [f64; 2],
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn processor_time(output: &str) -> f64 {
    let line = output.lines().rev().find_map(|line| line.strip_prefix("processor time "));
    line.map_or(0.0, |line| line.split(' ').filter_map(|word| word.parse::<f64>().ok()).sum())
}
