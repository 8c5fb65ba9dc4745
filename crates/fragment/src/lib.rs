//! Detector fragments at rest and in flight.
//!
//! A **fragment** is what one source has to say about one event. This crate defines the two byte
//! layouts that carry fragments through Millstream, and the steps to them and between them:
//!
//! - [`stream`]: a file of fragments, source by source, that is mapped and sent without a copy;
//! - [`mfp`]: a multi-fragment packet, one source's fragments of one batch of events;
//! - [`packetize`]: which byte runs of a mapped stream file make up the packet of a batch;
//! - [`unpack`]: stream files that the repository carries compressed;
//! - [`file`]: files that get their name when they are complete.
//!
//! Both layouts space fragments by the same rule ([`Alignment`]), so that neighbours in a file are
//! neighbours in a packet and travel as one run. Read `docs/formats.md` first: it is the
//! specification, and the numbers here follow it.

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
