//! Load and store access to a remote card's memory: a cached view with explicit coherence.
//!
//! A [`RemoteMap`] is a cache of card memory in this process. The first load fetches a line of 4 KiB over RDMA, with
//! read-ahead; stores stay here until they are released. It provides release consistency:
//!
//! - A map sees its own loads and stores in program order.
//! - After [`RemoteMap::release`] returns, every store made before it is in card memory, for kernels, RDMA and
//!   other maps. A release writes only the stored bytes, so two clients may store to different bytes of one
//!   line.
//! - After [`RemoteMap::acquire`], loads see card memory of that moment or later. Local stores that are not
//!   released yet stay visible.
//! - Between two acquires a load may see any value that the byte had in that time.
//!
//! The usual pattern: one side stores, releases, and signals (by a doorbell, a message, a word in memory). The other
//! side receives the signal, acquires, and loads.
//!
//! `userfaultfd` would need no explicit calls, but the kernel does not grant it to all unprivileged processes
//! (`vm.unprivileged_userfaultfd`). It does not track stores by byte, so two clients could not share a page. The loss of
//! a card would raise SIGBUS instead of returning an error.

use millstream_rdma::{Access, Region};

use crate::remote::{RemoteCard, RemoteError, RemoteErrorKind};
use millstream_card_abi::MemoryRange;

/// Bytes of a line.
pub const LINE: u64 = 4096;

/// Lines of a read-ahead at sequential access.
const READ_AHEAD: u64 = 16;

/// Which bytes of a line were stored to.
type Stored = [u64; LINE as usize / 64];

#[derive(Default)]
struct LineState {
    /// Bytes without a local store are those of card memory at the latest acquire or later.
    valid: bool,
    stored: Option<Box<Stored>>,
}

/// A cached range of a card's memory.
pub struct RemoteMap {
    card: RemoteCard,
    span: MemoryRange,
    cache: Region,
    spare: Region,
    lines: Vec<LineState>,
    dirty: Vec<usize>,
    latest: usize,
    fetched: u64,
    written: u64,
}

impl std::fmt::Debug for RemoteMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteMap({} of {:?})", self.span, self.card)
    }
}

type Outcome<T> = Result<T, RemoteError>;

impl RemoteMap {
    /// Maps a range of card memory. Loads and releases need the card's lease.
    pub fn new(card: &RemoteCard, span: MemoryRange) -> Outcome<RemoteMap> {
        let wrong = |kind| RemoteError { card: card.address().to_owned(), kind };
        if !span.fits(card.memory_bytes()) || span.len == 0 {
            return Err(wrong(RemoteErrorKind::OutOfRange { span, memory: card.memory_bytes() }));
        }
        let landing = |len: u64| {
            Region::landing(card.device(), c"millstream-card-map", len as usize, Access::LOCAL_WRITE)
                .map_err(|error| wrong(error.into()))
        };
        let lines = span.len.div_ceil(LINE) as usize;
        Ok(RemoteMap {
            card: card.clone(),
            span,
            cache: landing(span.len)?,
            spare: landing(LINE)?,
            lines: (0..lines).map(|_| LineState::default()).collect(),
            dirty: Vec::new(),
            latest: usize::MAX,
            fetched: 0,
            written: 0,
        })
    }

    /// Size of the range (bytes).
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.span.len
    }

    /// Bytes fetched from the card and written to it so far.
    pub fn traffic(&self) -> (u64, u64) {
        (self.fetched, self.written)
    }

    /// Loads bytes at `at`, counted from the start of the map.
    pub fn load(&mut self, at: u64, out: &mut [u8]) -> Outcome<()> {
        let span = self.check(at, out.len())?;
        for line in lines(span) {
            self.fetch(line)?;
        }
        self.cache.copy_to_slice(at, out).map_err(|error| self.wrong(error.into()))
    }

    /// Stores bytes at `at`.
    pub fn store(&mut self, at: u64, bytes: &[u8]) -> Outcome<()> {
        let span = self.check(at, bytes.len())?;
        self.cache.copy_from_slice(at, bytes).map_err(|error| self.wrong(error.into()))?;
        for line in lines(span) {
            let state = &mut self.lines[line];
            if state.stored.is_none() {
                self.dirty.push(line);
            }
            let stored = state.stored.get_or_insert_with(|| Box::new([0; LINE as usize / 64]));
            let start = line as u64 * LINE;
            let from = at.max(start) - start;
            let to = (at + span.len).min(start + LINE) - start;
            (from..to).for_each(|byte| stored[byte as usize / 64] |= 1 << (byte % 64));
        }
        Ok(())
    }

    /// Loads a word of 8 bytes, little-endian.
    pub fn load_u64(&mut self, at: u64) -> Outcome<u64> {
        let mut bytes = [0; 8];
        self.load(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Stores a word of 8 bytes, little-endian.
    pub fn store_u64(&mut self, at: u64, value: u64) -> Outcome<()> {
        self.store(at, &value.to_le_bytes())
    }

    /// Makes later loads see the current content of card memory.
    pub fn acquire(&mut self) {
        self.lines.iter_mut().for_each(|line| line.valid = false);
        self.latest = usize::MAX;
    }

    /// Writes all earlier stores to card memory and waits for the writes.
    ///
    /// # Errors
    /// An error of the card or the connection. The stores are kept and can be released again.
    pub fn release(&mut self) -> Outcome<()> {
        let mut parts = Vec::new();
        for &line in &self.dirty {
            let Some(stored) = &self.lines[line].stored else { continue };
            let start = line as u64 * LINE;
            let mut byte = 0;
            while byte < LINE {
                let is = |byte: u64| stored[byte as usize / 64] >> (byte % 64) & 1 == 1;
                if !is(byte) {
                    byte += 1;
                    continue;
                }
                let from = byte;
                while byte < LINE && is(byte) {
                    byte += 1;
                }
                let len = byte - from;
                parts.push((start + from, MemoryRange::new(self.span.offset + start + from, len)));
            }
        }
        self.card.write_many(&self.cache, &parts)?;
        self.written += parts.iter().map(|(_, span)| span.len).sum::<u64>();
        for line in self.dirty.drain(..) {
            self.lines[line].stored = None;
        }
        Ok(())
    }

    fn wrong(&self, kind: RemoteErrorKind) -> RemoteError {
        RemoteError { card: self.card.address().to_owned(), kind }
    }

    fn check(&self, at: u64, len: usize) -> Outcome<MemoryRange> {
        let span = MemoryRange::new(at, len as u64);
        if span.fits(self.span.len) {
            return Ok(span);
        }
        Err(self.wrong(RemoteErrorKind::OutOfRange { span, memory: self.span.len }))
    }

    /// Fetches a line, with read-ahead if the previous line was fetched last.
    fn fetch(&mut self, line: usize) -> Outcome<()> {
        if self.lines[line].valid {
            return Ok(());
        }
        let ahead = if self.latest.wrapping_add(1) == line { READ_AHEAD } else { 1 };
        let plain = (line..self.lines.len())
            .take(ahead as usize)
            .take_while(|line| !self.lines[*line].valid && self.lines[*line].stored.is_none())
            .count();
        let start = line as u64 * LINE;
        if plain > 0 {
            let len = (plain as u64 * LINE).min(self.span.len - start);
            self.card.read_into(&self.cache, start, MemoryRange::new(self.span.offset + start, len))?;
            self.fetched += len;
            self.lines[line..line + plain].iter_mut().for_each(|line| line.valid = true);
            self.latest = line + plain - 1;
            return Ok(());
        }
        // Local stores are kept; the other bytes come from the card.
        let len = LINE.min(self.span.len - start);
        self.card.read_into(&self.spare, 0, MemoryRange::new(self.span.offset + start, len))?;
        self.fetched += len;
        let (mut theirs, mut ours) = ([0; LINE as usize], [0; LINE as usize]);
        let (theirs, ours) = (&mut theirs[..len as usize], &mut ours[..len as usize]);
        let moved = self.spare.copy_to_slice(0, theirs).and_then(|()| self.cache.copy_to_slice(start, ours));
        moved.map_err(|error| self.wrong(error.into()))?;
        if let Some(stored) = &self.lines[line].stored {
            for (byte, theirs) in theirs.iter_mut().enumerate() {
                if stored[byte / 64] >> (byte % 64) & 1 == 1 {
                    *theirs = ours[byte];
                }
            }
        }
        self.cache.copy_from_slice(start, theirs).map_err(|error| self.wrong(error.into()))?;
        self.lines[line].valid = true;
        self.latest = line;
        Ok(())
    }
}

fn lines(span: MemoryRange) -> std::ops::Range<usize> {
    if span.len == 0 {
        return 0..0;
    }
    (span.offset / LINE) as usize..((span.offset + span.len - 1) / LINE + 1) as usize
}
