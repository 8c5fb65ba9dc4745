//! Future event queue: a radix heap (Ahuja, Mehlhorn, Orlin, Tarjan, JACM 37(2), 1990).
//!
//! Simulated time never decreases, so an entry's bucket is the highest bit in which its time differs from the last
//! popped time. An entry moves only when its bucket is the lowest non-empty one, and then to a lower bucket. That is at
//! most one sequential copy per bit of its delay, without key comparisons.
//!
//! Entries of equal time leave in insertion order: they are always in the same bucket, and buckets keep their order.
//!
//! `millstream bench model` compares it with a binary heap and a four-ary heap.

use millstream_quantity::Picos;

const BUCKETS: usize = 65;

/// Entries by time; entries of equal time are in insertion order.
#[derive(Debug)]
pub struct EventQueue<T> {
    last: u64,
    len: usize,
    /// Bit `i` is set while bucket `i + 1` is not empty.
    filled: u64,
    /// Entries at time `last`; the first `popped` are removed.
    now: Vec<T>,
    popped: usize,
    buckets: Vec<Vec<(u64, T)>>,
    spare: Vec<(u64, T)>,
}

impl<T: Copy> Default for EventQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Copy> EventQueue<T> {
    /// An empty queue at time zero.
    #[must_use]
    pub fn new() -> EventQueue<T> {
        EventQueue {
            last: 0,
            len: 0,
            filled: 0,
            now: Vec::new(),
            popped: 0,
            buckets: (0..BUCKETS).map(|_| Vec::new()).collect(),
            spare: Vec::new(),
        }
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether another entry has the time of the last popped one.
    #[must_use]
    pub fn has_event_now(&self) -> bool {
        self.popped < self.now.len()
    }

    /// Adds an entry.
    ///
    /// # Panics
    /// If `at` is before the last popped time: an event cannot precede its cause. If `at` is the end of virtual time.
    #[inline]
    pub fn push(&mut self, at: Picos, entry: T) {
        assert!(at.0 >= self.last, "an event at {at} after time {}", Picos(self.last));
        assert!(at.0 < u64::MAX, "the simulated time exceeds 213 days");
        self.len += 1;
        self.insert(at.0, entry);
    }

    #[inline]
    fn insert(&mut self, at: u64, entry: T) {
        let difference = at ^ self.last;
        if difference == 0 {
            self.now.push(entry);
        } else {
            let bit = 63 - difference.leading_zeros();
            self.filled |= 1 << bit;
            self.buckets[bit as usize + 1].push((at, entry));
        }
    }

    /// Removes the earliest entry.
    #[inline]
    pub fn pop(&mut self) -> Option<(Picos, T)> {
        if self.popped == self.now.len() {
            self.refill()?;
        }
        let entry = self.now[self.popped];
        self.popped += 1;
        self.len -= 1;
        Some((Picos(self.last), entry))
    }

    /// Distributes the lowest bucket over lower buckets; entries of the earliest time go to `now`.
    fn refill(&mut self) -> Option<()> {
        self.now.clear();
        self.popped = 0;
        if self.filled == 0 {
            return None;
        }
        let bit = self.filled.trailing_zeros();
        self.filled &= !(1 << bit);
        let mut entries =
            std::mem::replace(&mut self.buckets[bit as usize + 1], std::mem::take(&mut self.spare));
        self.last = entries.iter().map(|(at, _)| *at).min()?;
        for &(at, entry) in &entries {
            self.insert(at, entry);
        }
        entries.clear();
        self.spare = entries;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any sequence of pushes and pops matches a stable sorted list.
        #[test]
        fn pops_in_stable_time_order(steps in prop::collection::vec((any::<bool>(), 0u64..1 << 20), 1..400)) {
            let mut queue = EventQueue::new();
            let mut model: Vec<(u64, usize)> = Vec::new();
            let mut now = 0;
            for (i, (push, delay)) in steps.into_iter().enumerate() {
                if push {
                    let at = now + (delay >> (delay % 20));
                    queue.push(Picos(at), i);
                    model.push((at, i));
                } else {
                    model.sort();
                    let expected = (!model.is_empty()).then(|| model.remove(0));
                    let popped = queue.pop().map(|(at, entry)| (at.0, entry));
                    prop_assert_eq!(popped, expected);
                    now = popped.map_or(now, |(at, _)| at);
                }
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }

    #[test]
    #[should_panic(expected = "an event at 5 ps after time 7 ps")]
    fn pushing_before_the_last_pop_panics() {
        let mut queue = EventQueue::new();
        queue.push(Picos(7), ());
        queue.pop();
        queue.push(Picos(5), ());
    }
}
