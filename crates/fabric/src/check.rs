//! Checks that every implementation of [`Fabric`](crate::Fabric) makes before an operation.

use millstream_torus_core::NodeNumber;

use crate::{COUNTERS, FabricError, Notification, RegionId};

/// The memory of a region of `node`, if it was found.
///
/// # Errors
/// [`FabricError::NoRegion`].
pub fn region<M>(found: Option<M>, node: NodeNumber, region: RegionId) -> Result<M, FabricError> {
    found.ok_or(FabricError::NoRegion { node, region: region.0 })
}

/// A range of a region of `size` bytes.
///
/// # Errors
/// [`FabricError::Bounds`].
pub fn range(offset: u64, length: u64, size: u64) -> Result<(), FabricError> {
    let fits = offset.checked_add(length).is_some_and(|end| end <= size);
    if fits { Ok(()) } else { Err(FabricError::Bounds { offset, length, size }) }
}

/// The word of an atomic operation.
///
/// # Errors
/// [`FabricError::Unaligned`].
pub fn word(offset: u64) -> Result<(), FabricError> {
    if offset.is_multiple_of(8) { Ok(()) } else { Err(FabricError::Unaligned { offset }) }
}

/// A counter.
///
/// # Errors
/// [`FabricError::NoCounter`].
pub fn counter(index: u16) -> Result<(), FabricError> {
    if index < COUNTERS { Ok(()) } else { Err(FabricError::NoCounter { index }) }
}

/// The notification of a put.
///
/// # Errors
/// [`FabricError::NoCounter`].
pub fn notification(notification: Notification) -> Result<(), FabricError> {
    match notification {
        Notification::Counter { index, .. } => counter(index),
        Notification::None | Notification::Event { .. } => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_in_the_region() {
        for (offset, length) in [(0, 16), (16, 0), (8, 8)] {
            assert_eq!(range(offset, length, 16), Ok(()));
        }
        for (offset, length) in [(0, 17), (16, 1), (17, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(range(offset, length, 16), Err(FabricError::Bounds { offset, length, size: 16 }));
        }
    }

    #[test]
    fn counters_and_words_are_checked() {
        assert_eq!(counter(COUNTERS - 1), Ok(()));
        let one = Notification::Counter { index: COUNTERS, add: 1 };
        assert_eq!(notification(one), Err(FabricError::NoCounter { index: COUNTERS }));
        assert_eq!(notification(Notification::Event { tag: 1 }), Ok(()));
        assert_eq!((word(8), word(12)), (Ok(()), Err(FabricError::Unaligned { offset: 12 })));
    }
}
