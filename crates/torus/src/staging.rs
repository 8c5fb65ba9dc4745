//! Allocation of staging memory: a ring whose parts are freed in any order and reused in the order of allocation.

use std::collections::VecDeque;

use crate::control::STAGING;

const ALIGN: u64 = 64;

#[derive(Debug)]
struct Part {
    start: u64,
    /// Position behind it, which grows without end.
    end: u64,
    freed: bool,
}

/// Allocator of the staging memory.
#[derive(Debug)]
pub(crate) struct Staging {
    parts: VecDeque<Part>,
    /// Position behind the newest part.
    head: u64,
    /// Position of the oldest part.
    tail: u64,
}

impl Staging {
    pub(crate) fn new() -> Staging {
        Staging { parts: VecDeque::new(), head: 0, tail: 0 }
    }

    /// A place for `length` bytes; `None` until earlier ones are freed.
    pub(crate) fn allocate(&mut self, length: u64) -> Option<u64> {
        // Also empty parts have a place of their own, by which they are freed.
        let size = length.max(1).next_multiple_of(ALIGN);
        let mut start = self.head;
        if start % STAGING + size > STAGING {
            start = start.next_multiple_of(STAGING);
        }
        if self.parts.is_empty() {
            self.tail = start;
        }
        if start + size - self.tail > STAGING {
            return None;
        }
        self.head = start + size;
        self.parts.push_back(Part { start: start % STAGING, end: self.head, freed: false });
        Some(start % STAGING)
    }

    /// Frees a place.
    pub(crate) fn free(&mut self, start: u64) {
        if let Some(part) = self.parts.iter_mut().find(|part| part.start == start && !part.freed) {
            part.freed = true;
        }
        while self.parts.front().is_some_and(|part| part.freed) {
            self.tail = self.parts.pop_front().map_or(self.tail, |part| part.end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_do_not_overlap_and_are_reused() {
        let mut staging = Staging::new();
        let mut live: VecDeque<(u64, u64)> = VecDeque::new();
        let mut random = 12345_u64;
        let mut allocated = 0;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let length = (random >> 40) % 300_000;
            match staging.allocate(length) {
                Some(start) => {
                    assert!(start + length <= STAGING);
                    for &(other, len) in &live {
                        assert!(start + length.max(1) <= other || other + len.max(1) <= start);
                    }
                    live.push_back((start, length));
                    allocated += 1;
                }
                None => {
                    let at = (random >> 8) as usize % live.len();
                    let (start, _) = live.remove(at).unwrap();
                    staging.free(start);
                }
            }
        }
        assert!(allocated > 5000, "{allocated}");
    }
}
