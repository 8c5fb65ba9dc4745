//! The data of a kernel in the memory of its card.

use millstream_fabric::{Fabric, KernelWords, RegionId};
use serde::{Deserialize, Serialize};

use crate::ApplicationError;

/// A range of values in card memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Offset in card memory (bytes).
    pub at: u64,
    /// Number of values.
    pub count: u64,
}

/// Registers memory of the node's card for an application. Returns the region and where it begins in card memory.
///
/// # Errors
/// [`ApplicationError::Parameters`] if the card has no room, or the fabric does not register memory of a card.
pub fn allocate_on_card<F: Fabric>(
    fabric: &mut F,
    size: usize,
    what: &str,
) -> Result<(RegionId, u64), ApplicationError> {
    let region = fabric.register(size);
    let here = fabric.here();
    let offset = fabric.card_offset(region).ok_or_else(|| {
        let room = format!("{here}: its card has no room for {size} bytes of {what}");
        ApplicationError::Parameters(format!("{room}: use a card with more memory, or more nodes"))
    })?;
    Ok((region, offset))
}

/// Runs a kernel that takes the description of its data, as JSON in card memory. `arguments` has the offset of the description
/// and its length.
///
/// # Errors
/// As [`allocate_on_card`]; [`ApplicationError::Fabric`] of the run.
pub fn attach<F: Fabric>(
    fabric: &mut F,
    kernel: &'static str,
    description: &impl Serialize,
    what: &str,
    arguments: impl FnOnce(u64, u64) -> KernelWords,
) -> Result<(), ApplicationError> {
    // A description is plain data.
    let text = serde_json::to_vec(description).unwrap_or_default();
    let (region, at) = allocate_on_card(fabric, text.len(), what)?;
    fabric.store(region, 0, &text)?;
    fabric.run_kernel(kernel, &arguments(at, text.len() as u64))?;
    fabric.deregister(region)?;
    Ok(())
}
