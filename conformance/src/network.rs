//! A network namespace for cases over packets: addresses and MTU do not depend on the machine, and no other process
//! uses the RoCE port.
//!
//! It has a veth pair with the largest path MTU. The GID table starts with link-local addresses, then an IPv4 address,
//! as on most machines.

use std::error::Error;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Replaces this process with the same command line plus `flag` in a new network namespace. Returns the reason if that
/// fails.
pub(crate) fn enter(flag: &str) -> String {
    let probe = Command::new("unshare").args(["--net", "true"]).stdin(Stdio::null()).output();
    match probe {
        Ok(output) if output.status.success() => {}
        Ok(output) => return String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(cause) => return format!("unshare: {cause}"),
    }
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(cause) => return cause.to_string(),
    };
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(program).args(std::env::args_os().skip(1)).arg(flag);
    format!("unshare: {}", command.exec())
}

/// Creates the interfaces in the new namespace.
pub(crate) fn set_up() -> Result<(), Box<dyn Error>> {
    // Makes link-local addresses usable at once. Fails without IPv6.
    for which in ["all", "default"] {
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{which}/accept_dad"), "0");
    }
    for words in [
        "link set lo up",
        "link add wire0 mtu 9000 type veth peer name wire1 mtu 9000",
        "address add 10.77.3.1/24 dev wire0",
        "link set wire0 up",
        "link set wire1 up",
    ] {
        let status = Command::new("ip").args(words.split(' ')).stdin(Stdio::null()).status();
        let status = status.map_err(|cause| format!("ip {words}: {cause}"))?;
        if !status.success() {
            return Err(format!("ip {words}: {status}").into());
        }
    }
    Ok(())
}
