//! Regions: each runs one kernel, while the others keep running.
//!
//! The holder of the card's lease writes a region's control registers and then its doorbell. The region
//! loads, starts and stops kernels, and reports the outcome in its state registers and by a message.

pub(crate) mod context;
pub(crate) mod control;
pub(crate) mod slot;
pub(crate) mod worker;
