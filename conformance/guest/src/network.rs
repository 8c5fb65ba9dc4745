//! The network of the guests: a namespace with a bridge and one tap device per guest.
//!
//! The namespace ends with its last process and leaves nothing on the machine.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::geteuid;

use crate::error::{Error, output};

/// Environment variable set inside the namespace.
const INSIDE: &str = "MILLSTREAM_GUEST_NETWORK";

/// Ethernet MTU, large enough for a path MTU of 4096.
pub(crate) const MTU: u16 = 4500;

/// The tap device of a guest.
#[derive(Debug)]
pub(crate) struct Tap {
    pub(crate) guest: u8,
    pub(crate) name: String,
}

/// Whether this process runs inside the namespace.
pub(crate) fn is_own() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs this program again in a new namespace.
pub(crate) fn enter() -> Result<ExitCode, Error> {
    let mut unshare = Command::new("unshare");
    unshare.args(["--net", "--kill-child"]);
    if !geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    let program = std::env::current_exe().map_err(Error::file("/proc/self/exe"))?;
    unshare.arg("--").arg(program).args(std::env::args_os().skip(1)).env(INSIDE, "1");
    let status = unshare.status().map_err(|cause| Error::Start { program: "unshare".into(), cause })?;
    Ok(exit_code(status))
}

/// The exit code for a child's status, as in shells: 128 plus the signal number for signals.
pub(crate) fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Creates the bridge with the host's addresses, and the tap devices.
pub(crate) fn build(guests: u8) -> Result<Vec<Tap>, Error> {
    let ip = |words: &str| output(Command::new("ip").args(words.split(' '))).map(drop);
    ip("link set lo up")?;
    // Without a forwarding delay guests can send at once.
    ip("link add br0 type bridge forward_delay 0")?;
    let mut taps = Vec::new();
    for guest in 1..=guests {
        let name = format!("tap{guest}");
        ip(&format!("tuntap add dev {name} mode tap"))?;
        // A bridge port needs no address, and would add one to the host's GID table.
        let file = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
        fs::write(&file, "1").map_err(Error::file(file))?;
        ip(&format!("link set {name} mtu {MTU} master br0 up"))?;
        taps.push(Tap { guest, name });
    }
    ip(&format!("link set br0 mtu {MTU} up"))?;
    ip("address add 10.77.0.1/24 dev br0")?;
    ip("address add fd77::1/64 dev br0 nodad")?;
    Ok(taps)
}

/// Captures the bridge's packets to a file until the value is dropped.
pub(crate) fn capture(file: &Path) -> Result<Capture, Error> {
    let mut command = Command::new("tcpdump");
    command.args(["-i", "br0", "-s", "0", "-U", "-B", "65536", "-Z", "root", "-w"]).arg(file);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.map_err(|cause| Error::Start { program: "tcpdump".into(), cause })?;
    // tcpdump writes the file header when it starts to capture.
    let deadline = Instant::now() + Duration::from_secs(20);
    while file.metadata().map_or(0, |data| data.len()) < 24 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(Capture(child))
}

/// A running capture.
#[derive(Debug)]
pub(crate) struct Capture(Child);

impl Drop for Capture {
    fn drop(&mut self) {
        // tcpdump may not have received the last packets yet.
        std::thread::sleep(Duration::from_millis(300));
        // Fail only if tcpdump has ended.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        );
        let _ = self.0.wait();
    }
}
