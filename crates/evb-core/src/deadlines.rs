//! Timers for a fixed set of indices, all with the same duration: an intrusive list, oldest first.
//!
//! Start, stop and query of the earliest are O(1) without allocation. With one duration for all timers,
//! the order of starting is the order of expiry.

use super::types::Instant;

/// End of list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Instant,
    before: u32,
    after: u32,
    running: bool,
}

/// Timers for the indices `0..len`.
#[derive(Clone, Debug)]
pub(crate) struct Deadlines {
    entries: Vec<Entry>,
    oldest: u32,
    newest: u32,
}

impl Deadlines {
    /// No timer runs.
    pub(crate) fn new(len: usize) -> Deadlines {
        let idle = Entry { at: Instant::from_nanos(0), before: NONE, after: NONE, running: false };
        Deadlines { entries: vec![idle; len], oldest: NONE, newest: NONE }
    }

    /// Starts or restarts the timer of `index`. `at` is not earlier than any running deadline.
    pub(crate) fn start(&mut self, index: usize, at: Instant) {
        self.stop(index);
        let id = index as u32;
        self.entries[index] = Entry { at, before: self.newest, after: NONE, running: true };
        match self.newest {
            NONE => self.oldest = id,
            newest => self.entries[newest as usize].after = id,
        }
        self.newest = id;
    }

    /// Stops the timer of `index` if it runs.
    pub(crate) fn stop(&mut self, index: usize) {
        let entry = self.entries[index];
        if !entry.running {
            return;
        }
        self.entries[index].running = false;
        match entry.before {
            NONE => self.oldest = entry.after,
            before => self.entries[before as usize].after = entry.after,
        }
        match entry.after {
            NONE => self.newest = entry.before,
            after => self.entries[after as usize].before = entry.before,
        }
    }

    /// Restarts all timers that run.
    pub(crate) fn restart(&mut self, at: Instant) {
        let mut next = self.oldest;
        while next != NONE {
            self.entries[next as usize].at = at;
            next = self.entries[next as usize].after;
        }
    }

    /// When the next deadline is due.
    pub(crate) fn earliest(&self) -> Option<Instant> {
        (self.oldest != NONE).then(|| self.entries[self.oldest as usize].at)
    }

    /// Stops and returns the oldest timer that has expired.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<usize> {
        let index = self.oldest as usize;
        if self.earliest()? > now {
            return None;
        }
        self.stop(index);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with a sorted list.
        #[test]
        fn behaves_like_a_sorted_list(operations in proptest::collection::vec((0usize..6, 0u8..4), 0..100)) {
            let mut deadlines = Deadlines::new(6);
            let mut model: Vec<(u64, usize)> = Vec::new();
            for (now, (index, operation)) in operations.into_iter().enumerate() {
                let now = now as u64;
                match operation {
                    0 => {
                        model.retain(|entry| entry.1 != index);
                        model.push((now + 10, index));
                        deadlines.start(index, Instant::from_nanos(now + 10));
                    }
                    1 => {
                        model.retain(|entry| entry.1 != index);
                        deadlines.stop(index);
                    }
                    3 => {
                        model.iter_mut().for_each(|entry| entry.0 = now + 10);
                        deadlines.restart(Instant::from_nanos(now + 10));
                    }
                    _ => {
                        let due = model.first().copied().filter(|entry| entry.0 <= now);
                        if due.is_some() {
                            model.remove(0);
                        }
                        prop_assert_eq!(deadlines.pop_due(Instant::from_nanos(now)), due.map(|entry| entry.1));
                    }
                }
                prop_assert_eq!(deadlines.earliest(), model.first().map(|entry| Instant::from_nanos(entry.0)));
            }
        }
    }
}
