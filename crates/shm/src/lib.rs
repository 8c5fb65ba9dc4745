//! The operating system's mechanisms: shared memory, waiting, sockets, device memory.
//!
//! The soft device, cards and applications share this crate. It is independent of verbs, and holds most of
//! the project's unsafe code. Read in this order:
//!
//! - [`Memfd`] and [`Mapping`]: anonymous shared memory and its mappings;
//! - [`MappedRef`]: a reference into a mapping that keeps it mapped;
//! - [`futex`]: threads block on a word that processes share;
//! - [`EventFd`], [`poll`] and [`poll_readable`]: event counters, and waiting for descriptors;
//! - [`polling`]: looking again for a short time before a sleep;
//! - [`Arena`]: the shared objects of one process, in one memfd that its peers map whole;
//! - [`socket`]: UNIX sockets with abstract addresses that carry descriptors;
//! - [`datagram`]: messages of fixed length over such a socket;
//! - [`relocate`]: moves private pages into shared memory, in place;
//! - [`file_behind`]: the file that a program has mapped itself;
//! - [`ports`]: listeners on TCP ports;
//! - [`fork`]: locks and descriptors at a fork;
//! - [`thread`]: threads without the application's signals, CPU affinity;
//! - [`timer`]: timers as descriptors;
//! - [`NullMemory`] and [`fault_in`]: memory that discards stores, and faulting pages in with an error
//!   instead of a signal;
//! - [`truncation`]: mapped files that another process truncates;
//! - [`direct`]: mapped memory is written to files past the page cache;
//! - [`process_vm`]: copies between address spaces by the kernel;
//! - [`mod@memcpy`]: rates of copies, the baseline of reports;
//! - [`vfio`]: memory of PCIe devices;
//! - [`number_from_environment`]: settings in environment variables.
//!
//! System calls go through rustix. Comments give the reasons for exceptions.

mod arena;
pub mod datagram;
pub mod descriptors;
pub mod direct;
mod environment;
mod event;
mod fault_in;
pub mod fork;
pub mod futex;
mod mapped;
mod mapped_file;
pub mod maps;
pub mod memcpy;
mod memfd;
mod mm;
mod null;
mod poll;
pub mod polling;
pub mod ports;
pub mod process_vm;
pub mod relocate;
pub mod socket;
pub mod thread;
pub mod timer;
pub mod truncation;
mod userfault;
pub mod vfio;
pub mod write_combining;

pub use arena::{Arena, ArenaBlock};
pub use environment::number_from_environment;
pub use event::EventFd;
pub use fault_in::{fault_in, is_device_memory, populate, population_limit};
pub use mapped::MappedRef;
pub use mapped_file::{AreaSearch, file_behind};
pub use memfd::{DriverMapping, Mapping, Memfd, cannot_shrink, file_len, is_sealed, is_sysfs};
pub use null::NullMemory;
pub use poll::{poll, poll_readable};

use std::time::Duration;

use rustix::rand::GetRandomFlags;
use rustix::time::Timespec;

/// Size of a page \[bytes\]. The device only runs where this is the base page size.
pub const PAGE: usize = 4096;

/// Rounds `n` up to a multiple of `to`, a power of two.
#[must_use]
pub const fn round_up(n: usize, to: usize) -> usize {
    (n + to - 1) & !(to - 1)
}

/// Random bits from the kernel, for keys and numbers that a peer must not guess.
#[must_use]
pub fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    let read = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty());
    // Requests of at most 256 bytes never fail once the pool is initialised.
    assert_eq!(read, Ok(8), "getrandom");
    u64::from_ne_bytes(bytes)
}

/// Whether this program runs with more rights than its caller (set-user-ID, file capabilities): the caller's environment
/// must not name files to write then.
#[must_use]
pub fn has_gained_privileges() -> bool {
    // SAFETY: reads the vector that the kernel has passed to the program.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// A timeout for the kernel. Durations beyond its range become the longest one.
fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}
