//! Data of CBM's first-level event selector (flesnet): microslices, and timeslices of microslices.
//!
//! [`microslice`] reads the descriptors, [`archive`] the container of archives; [`microslices`], [`msa`] and [`tsa`] are the
//! formats.

mod archive;
mod microslice;
mod microslices;
mod msa;
mod tsa;

pub(super) use microslices::Microslices;
pub(super) use msa::Msa;
pub(super) use tsa::Tsa;
