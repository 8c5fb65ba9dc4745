//! Parts of a site as lines and endpoints.

pub mod memory;
pub mod pcie;
pub mod translation;
