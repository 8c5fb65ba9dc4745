//! TCP ports of this host: unused ones and ones with a listener. For launchers of programs that connect over TCP.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

/// A port that is unused now.
///
/// # Errors
/// Those of `bind`.
pub fn unused() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Whether a socket listens on the port.
///
/// This reads the kernel's table instead of connecting: many servers serve only their first client.
#[must_use]
pub fn has_listener(port: u16) -> bool {
    has_socket(port, LISTEN)
}

/// States of sockets in the kernel's table.
const ESTABLISHED: &str = "01";
const LISTEN: &str = "0A";

/// Whether a socket on the port is in a state.
fn has_socket(port: u16, state: &str) -> bool {
    let is_one = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        // Local address, remote address, state.
        let local = fields.next().and_then(|local| local.rsplit_once(':'));
        local.is_some_and(|(_, of)| u16::from_str_radix(of, 16) == Ok(port)) && fields.nth(1) == Some(state)
    };
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .any(|table| std::fs::read_to_string(table).is_ok_and(|text| text.lines().any(is_one)))
}

/// Waits until a socket listens on the port; false after the timeout.
#[must_use]
pub fn wait_for_listener(port: u16, timeout: Duration) -> bool {
    wait_for_socket(port, LISTEN, timeout)
}

/// Waits until a socket on the port is connected; false after the timeout.
#[must_use]
pub fn wait_for_connection(port: u16, timeout: Duration) -> bool {
    wait_for_socket(port, ESTABLISHED, timeout)
}

fn wait_for_socket(port: u16, state: &str, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    while !has_socket(port, state) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listeners_are_reported() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(wait_for_listener(port, Duration::from_secs(5)));
        let other = unused().unwrap();
        assert_ne!(other, port);
        assert!(!has_listener(other));
        assert!(!wait_for_connection(port, Duration::ZERO));
        // The port of a connected client has no listener.
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!has_listener(near.local_addr().unwrap().port()));
        assert!(wait_for_connection(port, Duration::from_secs(5)));
    }
}
