//! Registered memory.
//!
//! A [`Region`] registers memory and keeps it alive. [`Sge`] is a part of a region in a local work request.
//! [`RemoteMemory`] is a part of a peer's region. Offsets are checked when an [`Sge`] or a remote address is made; the
//! device checks them again.

mod keys;
mod region;
mod registration;

pub use keys::{Access, OutOfBounds, RemoteAddress, RemoteMemory};
pub use region::{DeregisterError, MemoryError, Region, Sge, StableBytes};
