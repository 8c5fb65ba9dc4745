//! A table that says where virtual addresses are, as adapters have it on their receive path: the pages
//! that were used last. What is not in it, a processor has to find.

use std::collections::VecDeque;

/// Pages that were used last.
#[derive(Clone, Debug)]
pub struct Tlb {
    entries: usize,
    page: u64,
    /// Most recently used first.
    pages: VecDeque<u64>,
}

impl Tlb {
    /// An empty table of so many pages of so many bytes.
    #[must_use]
    pub fn new(entries: u32, page: u32) -> Tlb {
        Tlb { entries: entries as usize, page: u64::from(page.max(1)), pages: VecDeque::new() }
    }

    /// Whether the page of that address was in the table; it is now.
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
    fn what_was_used_last_stays() {
        let mut table = Tlb::new(2, 4096);
        let found: Vec<bool> = [0, 100, 4096, 4000, 8192, 0, 4096].map(|a| table.lookup(a)).to_vec();
        assert_eq!(found, [false, true, false, true, false, true, false]);
    }

    #[test]
    fn going_round_more_than_fits_never_hits() {
        let mut table = Tlb::new(8, 4096);
        let hits = (0..90).filter(|i| table.lookup(i % 9 * 4096)).count();
        assert_eq!(hits, 0);
        let mut none = Tlb::new(0, 4096);
        assert!((0..9).all(|_| !none.lookup(0)));
    }
}
