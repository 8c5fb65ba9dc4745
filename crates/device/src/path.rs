//! The path to a peer: shared memory or RoCE v2 packets.
//!
//! A peer with an address of this host is reached through shared memory, every other one by packets.
//! `MILLSTREAM_PATH` forces one path for a whole process: `wire` uses packets even on this host, `shm` makes other
//! hosts unreachable. A process without the variable follows a peer with `wire`.

use std::env;
use std::sync::OnceLock;

use millstream_shm::fork;

use crate::errno::{Errno, Result};
use crate::gid;
use crate::gid_table::GidTable;

/// The environment variable that selects the path.
pub const VARIABLE: &str = "MILLSTREAM_PATH";

/// The setting of [`VARIABLE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathPreference {
    /// The path follows the peer's address.
    #[default]
    Auto,
    /// Shared memory only.
    Shm,
    /// Packets only.
    Wire,
}

/// The path to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// Shared memory.
    Shm,
    /// RoCE v2 packets.
    Wire,
    /// None: the peer is on another host, and packets are disabled.
    Unreachable,
}

impl PathPreference {
    /// Parses the value of [`VARIABLE`] or of a flag.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "" | "auto" => Some(Self::Auto),
            "shm" => Some(Self::Shm),
            "wire" => Some(Self::Wire),
            _ => None,
        }
    }

    /// The path to the address `gid`.
    #[must_use]
    pub fn path_to(self, gid: &[u8; 16]) -> PathKind {
        match self {
            Self::Wire => PathKind::Wire,
            Self::Auto | Self::Shm if gid::is_local(gid) => PathKind::Shm,
            Self::Auto => PathKind::Wire,
            Self::Shm => PathKind::Unreachable,
        }
    }

    /// The code of the port's active path MTU: with packets, the longest that fits all interfaces.
    #[must_use]
    pub fn active_mtu(self) -> u8 {
        if self == Self::Shm {
            return gid::MTU_4096;
        }
        let mut interfaces: Vec<u32> =
            GidTable::current().entries().map(|(_, entry)| entry.ifindex).collect();
        interfaces.dedup();
        let mtus = interfaces.into_iter().filter_map(gid::interface_mtu).filter_map(gid::path_mtu);
        mtus.min().unwrap_or(gid::MTU_4096)
    }
}

/// The setting from the environment, read once.
///
/// # Errors
/// EINVAL for an invalid value, which is logged once.
pub fn preference() -> Result<PathPreference> {
    static PREFERENCE: OnceLock<Option<PathPreference>> = OnceLock::new();
    let look_up = || {
        let word = env::var(VARIABLE).unwrap_or_default();
        let found = PathPreference::parse(&word);
        if found.is_none() {
            tracing::error!("{VARIABLE}={word} is invalid; use auto, shm or wire");
        }
        found
    };
    fork::get_or_init(&PREFERENCE, look_up).ok_or(Errno::INVAL)
}

/// Whether this process uses packets only: also to queue pairs and members of multicast groups on this host.
pub(crate) fn is_wire() -> bool {
    preference() == Ok(PathPreference::Wire)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_path_follows_the_address_unless_it_is_forced() {
        let here = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let elsewhere = Ipv4Addr::new(192, 0, 2, 250).to_ipv6_mapped().octets();
        let paths = |preference: PathPreference| [preference.path_to(&here), preference.path_to(&elsewhere)];
        assert_eq!(paths(PathPreference::Auto), [PathKind::Shm, PathKind::Wire]);
        assert_eq!(paths(PathPreference::Shm), [PathKind::Shm, PathKind::Unreachable]);
        assert_eq!(paths(PathPreference::Wire), [PathKind::Wire, PathKind::Wire]);
    }

    #[test]
    fn only_known_values_are_accepted() {
        assert_eq!(PathPreference::parse("wire"), Some(PathPreference::Wire));
        assert_eq!(PathPreference::parse(""), Some(PathPreference::Auto));
        assert_eq!(PathPreference::parse("Wire"), None);
    }
}
