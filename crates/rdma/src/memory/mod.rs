//! Registered memory: what a device may read and write, locally and for a peer.
//!
//! A [`Region`] registers memory and keeps it alive; [`Sge`] names a part of it in a work request of this
//! process, and [`RemoteMemory`] names a part of a peer's region, as the peer sent it. Addresses are checked
//! against the region's bounds where they are made, and by the device again where they are used.

mod keys;
mod region;
mod registration;

pub use keys::{Access, OutOfBounds, RemoteAddress, RemoteMemory};
pub use region::{MemoryError, Region, Sge, StableBytes};
