//! A libfabric provider over the torus: `libmillstream-fi.so` on `FI_PROVIDER_PATH`.
//!
//! ```text
//!   program ── libfabric ── abi ── endpoint ── ring ── Fabric (put, counters) ── node process
//! ```
//! Endpoints are reliable datagrams (`FI_EP_RDM`) with messages, tagged messages, remote memory and atomic operations.
//! Read [`ring`] (slots in each other's memory), [`endpoint`] (operations as messages), [`matching`] (receives), [`abi`]
//! (objects and functions that libfabric calls).

pub mod abi;
pub mod atomic;
pub mod endpoint;
pub mod header;
pub mod matching;
pub mod memory;
pub mod ring;
pub mod sys;
