//! Parts of a site as lines and endpoints.

pub(crate) mod adapter;
pub mod completer;
pub mod pcie;
pub mod tlb;
