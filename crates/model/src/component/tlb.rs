//! Address translation cache of an adapter's receive path, with least-recently-used replacement.

use std::collections::VecDeque;

/// Translation lookaside buffer.
#[derive(Clone, Debug)]
pub struct Tlb {
    entries: usize,
    page: u64,
    /// Most recently used first.
    pages: VecDeque<u64>,
}

impl Tlb {
    /// An empty buffer of `entries` pages of `page` bytes.
    #[must_use]
    pub fn new(entries: u32, page: u32) -> Tlb {
        Tlb { entries: entries as usize, page: u64::from(page.max(1)), pages: VecDeque::new() }
    }

    /// Whether the address hits; a miss loads its page.
    pub fn lookup(&mut self, address: u64) -> bool {
        let page = address / self.page;
        let found = self.pages.iter().position(|&known| known == page);
        if let Some(place) = found {
            self.pages.remove(place);
        } else if self.pages.len() >= self.entries {
            self.pages.pop_back();
        }
        if self.entries > 0 {
            self.pages.push_front(page);
        }
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::Tlb;

    #[test]
    fn least_recently_used_page_is_evicted() {
        let mut table = Tlb::new(2, 4096);
        let found: Vec<bool> = [0, 100, 4096, 4000, 8192, 0, 4096].map(|a| table.lookup(a)).to_vec();
        assert_eq!(found, [false, true, false, true, false, true, false]);
    }

    #[test]
    fn cycling_over_more_pages_than_entries_always_misses() {
        let mut table = Tlb::new(8, 4096);
        let hits = (0..90).filter(|i| table.lookup(i % 9 * 4096)).count();
        assert_eq!(hits, 0);
        let mut none = Tlb::new(0, 4096);
        assert!((0..9).all(|_| !none.lookup(0)));
    }
}
