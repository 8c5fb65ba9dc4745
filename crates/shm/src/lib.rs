//! Memory and messages shared between the processes of one host.
//!
//! This crate holds the operating-system mechanisms that the soft device, cards and applications
//! share, and knows nothing about verbs. Most of the project's unsafe code lives here. Read in this order:
//!
//! - [`Memfd`] and [`Mapping`]: memory without a name that dies with its last user;
//! - [`futex`]: sleeping on a word that processes share;
//! - [`EventFd`] and [`poll`]: a count, and anything else with a descriptor, that can be waited for;
//! - [`Arena`]: one process's shared objects, allocated in one memfd that peers map whole;
//! - [`socket`]: abstract UNIX sockets that carry descriptors, so nothing is left in a file system;
//! - [`relocate`]: private pages become shared pages, in place;
//! - [`ports`]: who listens on TCP;
//! - [`thread`]: threads that stay out of the application's way;
//! - [`Null`] and [`present()`]: memory that holds nothing, and pages that are made ready;
//! - [`vm`]: copies between address spaces where memory cannot be mapped;
//! - [`vfio`] and [`cuda`]: memory of PCIe devices and GPUs.

mod arena;
pub mod cuda;
mod event;
pub mod futex;
pub mod maps;
mod memfd;
mod null;
mod poll;
pub mod ports;
mod present;
pub mod relocate;
pub mod socket;
pub mod thread;
pub mod vfio;
pub mod vm;

pub use arena::{Arena, Block};
pub use event::EventFd;
pub use memfd::{Mapping, Memfd, cannot_shrink, file_len, is_sealed};
pub use null::Null;
pub use poll::{poll, poll_readable};
pub use present::present;

use std::time::Duration;

/// Bytes of a page. The device only runs where this is the base page size.
pub const PAGE: usize = 4096;

/// Rounds `n` up to a multiple of `to`, a power of two.
#[must_use]
pub const fn round_up(n: usize, to: usize) -> usize {
    (n + to - 1) & !(to - 1)
}

/// Random bytes from the kernel, for keys and numbers that a peer must not guess.
#[must_use]
pub fn random_u64() -> u64 {
    let mut value = 0u64;
    // SAFETY: the buffer is eight writable bytes.
    let n = unsafe { libc::getrandom((&raw mut value).cast(), 8, 0) };
    // getrandom of at most 256 bytes never fails or returns short once the pool is ready.
    assert_eq!(n, 8, "getrandom: {}", std::io::Error::last_os_error());
    value
}

/// A waiting time as the kernel takes it; one that does not fit is longer than any process lives.
fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}
