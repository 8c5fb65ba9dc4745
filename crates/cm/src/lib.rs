//! The connection manager: what the kernel does behind `/dev/infiniband/rdma_cm`, done in the process.
//!
//! The system's `librdmacm.so.1` writes commands to that device and reads events from it; the format is the
//! kernel's `rdma/rdma_user_cm.h`, version 4, and does not change. This crate answers those commands. Two
//! processes of one user on one host reach each other over abstract UNIX sockets, one per connection, named
//! after the port that the listener bound.
//!
//! Read in this order: [`abi`] (the commands), [`message`] (what processes say to each other), [`manager`] (the
//! states of identifiers, without input, output or clock; [`wire::Wire`] is what it needs), [`command`] (bytes
//! to calls), [`engine`] (sockets and the thread).
//!
//! States and messages follow the InfiniBand Architecture Specification, volume 1, chapter 12, and its annex
//! A11 (addresses of the Internet protocols); events and error numbers follow the kernel. Departures:
//! `docs/rdma-cm.md`.

pub mod abi;
pub mod address;
pub mod command;
pub mod engine;
mod hosts;
pub mod manager;
pub mod message;
pub mod remote;
pub mod wire;

/// A positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// What a command returns.
pub type Result<T> = std::result::Result<T, Errno>;

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}
