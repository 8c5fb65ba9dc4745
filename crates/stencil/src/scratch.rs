//! Memory of a thread for the intermediate levels of a tile.
//!
//! The levels take most of a core's second-level cache, which is indexed by physical addresses. Scattered 4 KiB pages overfill
//! some cache sets and leave others empty; a huge page is contiguous.

use millstream_shm::{Mapping, Memfd};

use crate::element::Element;

/// A cache line (bytes).
const LINE: usize = 64;

/// Buffers below this size (bytes) fit into the cache on any pages.
const HUGE_PAGE_THRESHOLD: usize = 128 << 10;

/// A huge page (bytes).
const HUGE_PAGE: usize = 2 << 20;

/// The memory of one thread, which grows and is kept between tiles.
#[derive(Debug, Default)]
pub(crate) struct ScratchMemory<E> {
    huge: Option<Mapping>,
    /// Used instead for small buffers, or if the system has no huge pages.
    cells: Vec<E>,
}

impl<E: Element> ScratchMemory<E> {
    /// Memory for `cells` elements with unspecified values, aligned to a cache line.
    pub(crate) fn reserve(&mut self, cells: usize) -> *mut E {
        let bytes = cells * E::BYTES;
        if bytes >= HUGE_PAGE_THRESHOLD && self.huge.as_ref().is_none_or(|huge| huge.len() < bytes) {
            self.huge = huge(bytes.next_multiple_of(HUGE_PAGE)).ok();
        }
        if let Some(huge) = self.huge.as_ref().filter(|huge| huge.len() >= bytes) {
            return huge.base().cast();
        }
        let line = LINE / E::BYTES;
        if self.cells.len() < cells + line {
            self.cells.resize(cells + line, E::default());
        }
        let base = self.cells.as_mut_ptr();
        base.wrapping_add(base.align_offset(LINE))
    }
}

fn huge(bytes: usize) -> std::io::Result<Mapping> {
    let mapping = Memfd::new("millstream-stencil", bytes)?.map()?;
    mapping.prefault(0, bytes)?;
    Ok(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_any_size_are_aligned_and_writable() {
        let mut scratch = ScratchMemory::<f64>::default();
        for cells in [1, 100, HUGE_PAGE_THRESHOLD / 8, 3 * HUGE_PAGE / 8, 7] {
            let base = scratch.reserve(cells);
            assert!(base.addr().is_multiple_of(LINE));
            // SAFETY: the reserved elements, which no other thread accesses.
            let buffer = unsafe { std::slice::from_raw_parts_mut(base, cells) };
            buffer.fill(1.5);
            assert!(buffer.iter().all(|&cell| cell == 1.5));
        }
    }
}
