//! Components of a site as channels and endpoints.

pub(crate) mod adapter;
pub mod completer;
pub mod cxl;
pub mod pcie;
pub mod tlb;
pub mod translation;
