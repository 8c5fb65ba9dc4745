//! Components of a site as channels and endpoints.

pub(crate) mod adapter;
pub mod completer;
pub mod pcie;
pub mod tlb;
