//! The network of the guests: a namespace with a bridge and a tap device for each guest.
//!
//! The namespace belongs to this process and is gone with its last process; nothing is left on the machine.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::geteuid;

use crate::error::{Error, output};

/// Set in a process that runs in a namespace of its own.
const INSIDE: &str = "MILLSTREAM_GUEST_NETWORK";

/// Ethernet frames' payload: room for a path MTU of 4096.
pub(crate) const MTU: u16 = 4500;

/// One guest's end of the network.
#[derive(Debug)]
pub(crate) struct Tap {
    pub(crate) guest: u8,
    pub(crate) name: String,
}

/// Whether this process is in a namespace of its own.
pub(crate) fn is_own() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs this program again in a namespace of its own.
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

/// A child's exit status as this process's, as shells have it.
pub(crate) fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Makes the bridge, with this side's addresses, and the guests' taps.
pub(crate) fn build(guests: u8) -> Result<Vec<Tap>, Error> {
    let ip = |words: &str| output(Command::new("ip").args(words.split(' '))).map(drop);
    ip("link set lo up")?;
    // Without a forwarding delay: a guest may send at once.
    ip("link add br0 type bridge forward_delay 0")?;
    let mut taps = Vec::new();
    for guest in 1..=guests {
        let name = format!("tap{guest}");
        ip(&format!("tuntap add dev {name} mode tap"))?;
        // Part of the bridge: it needs no address, and would show one in this side's GID table.
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

/// Writes the bridge's packets to a file for as long as the value lives.
pub(crate) fn capture(file: &Path) -> Result<Capture, Error> {
    let mut command = Command::new("tcpdump");
    command.args(["-i", "br0", "-s", "0", "-U", "-B", "65536", "-Z", "root", "-w"]).arg(file);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.map_err(|cause| Error::Start { program: "tcpdump".into(), cause })?;
    // It writes the file's header when it begins to listen.
    let deadline = Instant::now() + Duration::from_secs(20);
    while file.metadata().map_or(0, |data| data.len()) < 24 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(Capture(child))
}

/// A capture that goes on.
#[derive(Debug)]
pub(crate) struct Capture(Child);

impl Drop for Capture {
    fn drop(&mut self) {
        // The last packets may still be on their way to it.
        std::thread::sleep(Duration::from_millis(300));
        // Both fail only if it has ended by itself.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        );
        let _ = self.0.wait();
    }
}
