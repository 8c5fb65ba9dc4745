//! Memory for the rows between the levels, which each thread has for itself.
//!
//! The rows take most of a core's second-level cache. That is indexed by physical addresses: of pages of 4 KiB, which lie
//! anywhere, some of its sets get more lines than they hold and others fewer. A huge page is in one piece.

use millstream_shm::{Mapping, Memfd};

use crate::element::Element;

/// A cache line [bytes].
const LINE: usize = 64;

/// Less than this [bytes] fits into a cache however its pages lie.
const SMALL: usize = 128 << 10;

/// A huge page [bytes].
const HUGE_PAGE: usize = 2 << 20;

/// The memory of one thread; it grows and stays between tiles.
#[derive(Debug, Default)]
pub(crate) struct Scratch<E> {
    huge: Option<Mapping>,
    /// In place of it, where little is needed or the system gives no other.
    cells: Vec<E>,
}

impl<E: Element> Scratch<E> {
    /// Memory for `cells` elements that begins at a cache line. They have any value.
    pub(crate) fn room(&mut self, cells: usize) -> *mut E {
        let bytes = cells * E::BYTES;
        if bytes >= SMALL && self.huge.as_ref().is_none_or(|huge| huge.len() < bytes) {
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
    fn room_for_few_and_for_many_begins_at_a_line_and_can_be_written() {
        let mut scratch = Scratch::<f64>::default();
        for cells in [1, 100, SMALL / 8, 3 * HUGE_PAGE / 8, 7] {
            let base = scratch.room(cells);
            assert!(base.addr().is_multiple_of(LINE));
            // SAFETY: as many elements as were asked for, of which nobody else knows.
            let room = unsafe { std::slice::from_raw_parts_mut(base, cells) };
            room.fill(1.5);
            assert!(room.iter().all(|&cell| cell == 1.5));
        }
    }
}
