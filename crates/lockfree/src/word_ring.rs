//! Rings of 64-bit words between two processes, with one writer and one reader, and how a reader sleeps.
//!
//! Each side takes the other's position as input: an impossible one is an error, and no index follows from it.

use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// A ring of entries in shared memory. Each position has one writer.
#[derive(Clone, Copy, Debug)]
pub struct WordRing<'m> {
    /// Entries ever taken, by the reader.
    pub taken: &'m AtomicU64,
    /// Entries ever posted, by the writer.
    pub posted: &'m AtomicU64,
    /// The entries' words, one entry after the other.
    pub words: &'m [AtomicU64],
    /// Words of an entry; at least one, and the ring has room for an entry.
    pub entry_words: usize,
}

impl<'m> WordRing<'m> {
    /// Number of entries.
    #[must_use]
    pub fn entries(&self) -> u64 {
        (self.words.len() / self.entry_words) as u64
    }

    /// Entries that are posted and not taken.
    ///
    /// # Errors
    /// Their number, if it is more than there are.
    pub fn waiting(&self) -> Result<u64, u64> {
        // Acquire: a reader sees the words of what is posted; a writer overwrites only what has been read.
        let posted = self.posted.load(Ordering::Acquire);
        let waiting = posted.wrapping_sub(self.taken.load(Ordering::Acquire));
        if waiting > self.entries() { Err(waiting) } else { Ok(waiting) }
    }

    fn entry(&self, number: u64) -> &'m [AtomicU64] {
        let at = (number % self.entries()) as usize * self.entry_words;
        &self.words[at..at + self.entry_words]
    }

    /// Writes an entry, for the writer. False if the ring is full.
    ///
    /// # Errors
    /// As [`WordRing::waiting`].
    pub fn push(&self, words: &[u64]) -> Result<bool, u64> {
        if self.waiting()? == self.entries() {
            return Ok(false);
        }
        let posted = self.posted.load(Ordering::Relaxed);
        for (place, &word) in self.entry(posted).iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        self.posted.store(posted.wrapping_add(1), Ordering::Release);
        Ok(true)
    }

    /// Takes an entry of `N` words, for the reader. None if the ring is empty.
    ///
    /// # Errors
    /// As [`WordRing::waiting`].
    pub fn pop<const N: usize>(&self) -> Result<Option<[u64; N]>, u64> {
        if self.waiting()? == 0 {
            return Ok(None);
        }
        let taken = self.taken.load(Ordering::Relaxed);
        let entry = self.entry(taken);
        let words = std::array::from_fn(|i| entry[i].load(Ordering::Relaxed));
        self.taken.store(taken.wrapping_add(1), Ordering::Release);
        Ok(Some(words))
    }
}

/// Whether a reader sleeps until it is woken. It announces its sleep and looks at its rings once more; a writer posts, and
/// then claims the wake-up. So either the reader sees what was posted, or the writer wakes it.
#[derive(Clone, Copy, Debug)]
pub struct SleepFlag<'m>(pub &'m AtomicU64);

impl SleepFlag<'_> {
    /// The reader is about to sleep, or is awake. It looks at its rings after the announcement.
    pub fn set(&self, sleeps: bool) {
        self.0.store(sleeps.into(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// For a writer that has posted: whether the reader sleeps, and this writer is the one that wakes it.
    #[must_use]
    pub fn claim(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::SeqCst) != 0 && self.0.swap(0, Ordering::SeqCst) != 0
    }
}

/// Up to which entry of a ring a reader waits, so that the writer wakes it once for many. Number and entries are published
/// before the other side's are read, so either the reader sees the entries, or the writer sees that they are awaited.
#[derive(Clone, Copy, Debug)]
pub struct AwaitedEntries<'m>(pub &'m AtomicU64);

impl AwaitedEntries<'_> {
    /// For the reader: it needs `count` entries that it has not taken. Whether they are there.
    pub fn set(&self, ring: &WordRing<'_>, count: u64) -> bool {
        let awaited = ring.taken.load(Ordering::Relaxed).wrapping_add(count);
        self.0.store(awaited, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        is_reached(ring.posted.load(Ordering::Acquire), awaited)
    }

    /// For a writer that has posted: whether the reader has all that it waits for.
    #[must_use]
    pub fn are_there(&self, ring: &WordRing<'_>) -> bool {
        fence(Ordering::SeqCst);
        is_reached(ring.posted.load(Ordering::Relaxed), self.0.load(Ordering::SeqCst))
    }
}

/// Positions wrap.
fn is_reached(posted: u64, awaited: u64) -> bool {
    posted.wrapping_sub(awaited) as i64 >= 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn impossible_positions_are_errors() {
        let (taken, posted) = (AtomicU64::new(5), AtomicU64::new(5));
        let words: Vec<AtomicU64> = (0..7).map(|_| AtomicU64::new(0)).collect();
        // Words that are no whole entry are not used.
        let ring = WordRing { taken: &taken, posted: &posted, words: &words, entry_words: 3 };
        assert_eq!(ring.entries(), 2);
        assert_eq!(
            (ring.push(&[1, 2, 3]), ring.push(&[4, 5, 6]), ring.push(&[7, 8, 9])),
            (Ok(true), Ok(true), Ok(false))
        );
        for wrong in [4, 8, u64::MAX] {
            posted.store(wrong, Ordering::Relaxed);
            let waiting = wrong.wrapping_sub(5);
            assert_eq!((ring.push(&[1]), ring.pop::<3>()), (Err(waiting), Err(waiting)));
        }
        posted.store(7, Ordering::Relaxed);
        assert_eq!(
            [ring.pop(), ring.pop(), ring.pop()],
            [Ok(Some([1, 2, 3])), Ok(Some([4, 5, 6])), Ok(None)]
        );
    }
}
