//! Regions: parts of a card that take up kernels while the rest keeps running.
//!
//! A region is a place for one kernel, with control and state registers of its own. Whoever holds the
//! card's lease writes the control registers and then the doorbell; the region loads, starts and stops
//! kernels and says in its state registers, and by a [`message`], what came of it. Read first: [`kernel`]
//! (what a kernel is), then `docs/cards.md`.

pub mod builtin;
pub mod codes;
pub mod copy;
pub(crate) mod desk;
pub mod kernel;
pub mod message;
pub mod plain;
pub mod stencil;
pub(crate) mod worker;

pub use worker::{MAX_IMAGE_BYTES, image_hash};
