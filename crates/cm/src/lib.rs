//! The kernel's RDMA connection manager, implemented inside the process.
//!
//! The system's `librdmacm.so.1` writes commands to `/dev/infiniband/rdma_cm` and reads events from it, in
//! the format of the kernel's `rdma/rdma_user_cm.h`, version 4. This crate executes those commands. Processes
//! of one user on one host connect over abstract UNIX sockets, one per connection, named after the listener's
//! port. Other hosts are reached by management datagrams on queue pair 1. [`preload`] is the library that
//! redirects programs to this crate.
//!
//! Read in this order: [`abi`] (commands), [`message`] (messages between processes), [`manager`] (states of
//! identifiers, without I/O or clock; [`system::System`] is its interface to the outside), [`command`] (parsing and
//! answering commands), [`engine`] (sockets and the thread).
//!
//! States and messages follow the InfiniBand Architecture Specification, volume 1, chapter 12 and annex A11;
//! events and error numbers follow the kernel. Departures are listed in `docs/rdma-cm.md`.

pub mod abi;
pub mod address;
pub mod command;
pub mod engine;
mod gsi;
pub mod manager;
pub mod message;
pub mod preload;
pub mod remote;
pub mod system;
mod user_memory;

/// A positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// Result of a command.
pub type Result<T> = std::result::Result<T, Errno>;

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}
