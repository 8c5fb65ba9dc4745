//! TCP ports of this host: which are free, and which somebody listens on. For whoever starts programs that meet
//! over TCP.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

/// A port that nobody uses now.
///
/// # Errors
/// What binding reports.
pub fn free() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Whether somebody listens on the port. Nobody is connected to: many servers serve the first who comes.
#[must_use]
pub fn is_listened_to(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        std::fs::read_to_string(table).is_ok_and(|text| text.lines().any(|line| listens(line, port)))
    })
}

/// Whether a line of the kernel's table is that of a listener on this port.
fn listens(line: &str, port: u16) -> bool {
    let mut fields = line.split_whitespace().skip(1);
    // Local address, remote address, state; 0A is LISTEN.
    let local = fields.next().and_then(|local| local.rsplit_once(':'));
    local.is_some_and(|(_, of)| u16::from_str_radix(of, 16) == Ok(port)) && fields.nth(1) == Some("0A")
}

/// Waits until somebody listens on the port; false if that took too long.
#[must_use]
pub fn wait_for_listener(port: u16, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while !is_listened_to(port) {
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
    fn listeners_are_told_from_others() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(wait_for_listener(port, Duration::from_secs(5)));
        let other = free().unwrap();
        assert_ne!(other, port);
        assert!(!is_listened_to(other));
        // Of the two ends of a connection, only the listener listens.
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_listened_to(near.local_addr().unwrap().port()));
    }
}
