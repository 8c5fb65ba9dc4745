//! Formats of detector fragments: stream files and multi-fragment packets.
//!
//! A **fragment** is the data of one source for one event.
//!
//! - [`stream`]: a file of fragments, source by source, for mapping and sending without a copy.
//! - [`mfp`]: a multi-fragment packet, one source's fragments of one batch of events.
//! - [`packetize`]: the packet of a batch from a mapped stream file.
//! - [`unpack`]: compressed stream files in the repository.
//! - [`mod@file`]: atomic creation of files.
//!
//! Both formats align fragments by the same rule ([`Alignment`]), so consecutive fragments of a file are one scatter/gather
//! element of a packet. `docs/formats.md` is the specification; read it first.

mod bytes;
pub mod file;
mod fragment;
mod layout;
pub mod mfp;
pub mod packetize;
pub mod stream;
pub mod unpack;

pub use fragment::{Fragment, SourceId, SourceKind};
pub use layout::{Alignment, InvalidAlignment};
