//! Which way a queue pair's requests take: through shared memory, or over the wire.
//!
//! A peer whose address is this host's is reached through shared memory, every other one by packets.
//! `MILLSTREAM_PATH` forces one of the two for all of a process: `wire` also to addresses of this host, `shm` to none
//! but these. Both ends of a connection take the same way, so both must be told the same.

use std::env;
use std::sync::OnceLock;

use crate::errno::{Errno, Result};
use crate::gid;

/// The environment variable.
pub const VARIABLE: &str = "MILLSTREAM_PATH";

/// What the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathPreference {
    /// As the peer's address says.
    #[default]
    Auto,
    /// Shared memory only.
    Shm,
    /// The wire only.
    Wire,
}

/// The way to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// Shared memory.
    Shm,
    /// RoCE v2 packets.
    Wire,
    /// None: the peer is elsewhere, and the wire is forbidden.
    Unreachable,
}

impl PathPreference {
    /// From the word that the environment or a flag has for it.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "" | "auto" => Some(Self::Auto),
            "shm" => Some(Self::Shm),
            "wire" => Some(Self::Wire),
            _ => None,
        }
    }

    /// The way to the address `gid`.
    #[must_use]
    pub fn path_to(self, gid: &[u8; 16]) -> PathKind {
        match self {
            Self::Wire => PathKind::Wire,
            Self::Auto | Self::Shm if gid::is_local(gid) => PathKind::Shm,
            Self::Auto => PathKind::Wire,
            Self::Shm => PathKind::Unreachable,
        }
    }
}

/// What the environment says, looked up once.
///
/// # Errors
/// EINVAL for a word that is none of these; the first caller is told on standard error which.
pub fn preference() -> Result<PathPreference> {
    static PREFERENCE: OnceLock<Option<PathPreference>> = OnceLock::new();
    let look_up = || {
        let word = env::var(VARIABLE).unwrap_or_default();
        let found = PathPreference::parse(&word);
        if found.is_none() {
            eprintln!("millstream: {VARIABLE}={word}: the path is one of auto, shm, wire");
        }
        found
    };
    PREFERENCE.get_or_init(look_up).ok_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_way_follows_the_address_unless_it_is_forced() {
        let here = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let elsewhere = Ipv4Addr::new(192, 0, 2, 250).to_ipv6_mapped().octets();
        let ways = |preference: PathPreference| [preference.path_to(&here), preference.path_to(&elsewhere)];
        assert_eq!(ways(PathPreference::Auto), [PathKind::Shm, PathKind::Wire]);
        assert_eq!(ways(PathPreference::Shm), [PathKind::Shm, PathKind::Unreachable]);
        assert_eq!(ways(PathPreference::Wire), [PathKind::Wire, PathKind::Wire]);
    }

    #[test]
    fn only_known_words_are_taken() {
        assert_eq!(PathPreference::parse("wire"), Some(PathPreference::Wire));
        assert_eq!(PathPreference::parse(""), Some(PathPreference::Auto));
        assert_eq!(PathPreference::parse("Wire"), None);
    }
}
