//! Card memory as both sides see it: a window of bytes that other processes, and network adapters,
//! write at any time.
//!
//! The rule that makes this sound: nobody ever holds a reference into the window. Bytes are copied
//! out first and judged afterwards, so that what was checked is what is used.

use std::fmt;
use std::ptr;

use millstream_shm::Mapping;

use crate::backing::{Backing, Emulated, Wanted};
use crate::command::{Cause, Fault};
use crate::os::{Doing, OsError};

/// A range of card memory [bytes].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First byte, counted from the start of card memory.
    pub offset: u64,
    /// Length.
    pub len: u64,
}

impl Span {
    /// The range of `len` bytes at `offset`.
    pub const fn new(offset: u64, len: u64) -> Span {
        Span { offset, len }
    }

    /// True if the range lies inside `bytes` bytes of memory. Cannot overflow.
    pub const fn fits(self, bytes: u64) -> bool {
        self.len <= bytes && self.offset <= bytes - self.len
    }

    /// True if the two ranges, both inside some memory, have a byte in common.
    pub const fn overlaps(self, other: Span) -> bool {
        self.len != 0
            && other.len != 0
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.offset)
    }
}

/// Why card memory was not read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The range is not inside card memory.
    #[error("{span} is outside the card's memory of {memory} bytes")]
    OutOfRange {
        /// The range asked for.
        span: Span,
        /// Size of the memory [bytes].
        memory: u64,
    },
    /// The device whose memory it is does not give or take the bytes.
    #[error("card memory at {offset:#x} does not answer (error {code} of its driver)")]
    Device {
        /// First byte of the range asked for.
        offset: u64,
        /// What the driver says.
        code: i32,
    },
}

impl AccessError {
    /// The fault with which an access ends a command: `outside` if the range was wrong.
    pub fn fault(self, outside: Cause) -> Fault {
        match self {
            AccessError::OutOfRange { span, .. } => Fault::new(outside, span.offset),
            AccessError::Device { code, .. } => {
                Fault::new(Cause::MemoryFailed, u64::from(code.unsigned_abs()))
            }
        }
    }
}

/// The whole memory of one card.
#[derive(Debug)]
pub struct Memory {
    backing: Box<dyn Backing>,
}

impl Memory {
    pub(crate) fn new(backing: Box<dyn Backing>) -> Memory {
        Memory { backing }
    }

    /// Card memory of `bytes` bytes without a card, for running kernels by themselves.
    pub fn anonymous(bytes: u64) -> Result<Memory, OsError> {
        let wanted = Wanted { bytes, prefault: false, huge_pages: false };
        Ok(Memory::new(Box::new(Emulated::new("millstream-card-memory", wanted)?)))
    }

    /// What it is made of.
    pub(crate) fn backing(&self) -> &dyn Backing {
        &*self.backing
    }

    /// Size [bytes].
    pub fn size(&self) -> u64 {
        self.backing.size()
    }

    /// Address of the first byte, where this process has one: for calls that take a pointer. Valid as long as
    /// this value lives; other processes and devices write behind it.
    pub fn as_ptr(&self) -> Option<*mut u8> {
        self.backing.mapping().map(Mapping::base)
    }

    /// Checks that `span` lies inside the memory.
    pub fn check(&self, span: Span) -> Result<(), AccessError> {
        if span.fits(self.size()) {
            return Ok(());
        }
        Err(AccessError::OutOfRange { span, memory: self.size() })
    }

    /// Copies `out.len()` bytes at `offset` out of card memory.
    ///
    /// Bytes that somebody writes at the same moment may arrive half old, half new.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.check(Span::new(offset, out.len() as u64))?;
        let Some(mapping) = self.backing.mapping() else { return self.backing.read(offset, out) };
        // SAFETY: the range was checked; `out` is private memory, so the two do not overlap. A
        // writer elsewhere can tear the bytes, which are plain data to the caller.
        unsafe {
            let from = mapping.base().add(offset as usize);
            ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
        Ok(())
    }

    /// Copies an array of `N` bytes out of card memory.
    pub fn read_array<const N: usize>(&self, offset: u64) -> Result<[u8; N], AccessError> {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies `bytes` into card memory at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.check(Span::new(offset, bytes.len() as u64))?;
        let Some(mapping) = self.backing.mapping() else { return self.backing.write(offset, bytes) };
        // SAFETY: the range was checked; `bytes` cannot overlap the window, to which no reference
        // exists.
        unsafe {
            let to = mapping.base().add(offset as usize);
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        self.backing.flush();
        Ok(())
    }

    /// Copies inside the memory; both ranges may overlap.
    pub(crate) fn copy_within(&self, from: Span, to: u64) -> Result<(), AccessError> {
        self.check(from)?;
        self.check(Span::new(to, from.len))?;
        let Some(mapping) = self.backing.mapping() else { return self.backing.copy_within(from, to) };
        // SAFETY: both ranges were checked, and no reference to the mapping exists.
        unsafe {
            let base = mapping.base();
            ptr::copy(base.add(from.offset as usize), base.add(to as usize), from.len as usize);
        }
        self.backing.flush();
        Ok(())
    }

    /// Gives memory to the pages of `span` and maps them here, keeping what they hold; memory that is not
    /// mapped has no pages.
    ///
    /// The first touch of a page costs far more than copying it (0.3 GB/s was seen on a virtual
    /// machine), so do this for landing memory before a run.
    pub fn prefault(&self, span: Span) -> Result<(), PrefaultError> {
        self.check(span)?;
        let Some(mapping) = self.backing.mapping() else { return Ok(()) };
        let populated = mapping.prefault(span.offset as usize, span.len as usize);
        Ok(populated.doing("give memory to the pages of a card")?)
    }
}

/// Writes zeros to a range, which is cut to the mapping.
pub(crate) fn zero(mapping: &Mapping, span: Span) {
    let size = mapping.len() as u64;
    let start = span.offset.min(size);
    let len = span.len.min(size - start);
    // SAFETY: the range was cut to the mapping, to which no reference exists.
    unsafe { ptr::write_bytes(mapping.base().add(start as usize), 0, len as usize) };
}

/// Why memory could not be prefaulted.
#[derive(Debug, thiserror::Error)]
pub enum PrefaultError {
    /// The range is not card memory.
    #[error(transparent)]
    OutOfRange(#[from] AccessError),
    /// The system refused, usually for lack of memory.
    #[error(transparent)]
    Os(#[from] OsError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_come_back_and_the_rest_stays_zero() {
        let memory = Memory::anonymous(8192).unwrap();
        memory.write(4090, b"over the page").unwrap();
        assert_eq!(&memory.read_array::<15>(4089).unwrap(), b"\0over the page\0");
    }

    proptest! {
        #[test]
        fn a_span_fits_exactly_if_its_end_does(offset: u64, len: u64, bytes: u64) {
            let end = u128::from(offset) + u128::from(len);
            prop_assert_eq!(Span::new(offset, len).fits(bytes), end <= u128::from(bytes));
        }

        #[test]
        fn spans_overlap_exactly_if_they_share_a_byte(
            a in (0u64..40, 0u64..10), b in (0u64..40, 0u64..10),
        ) {
            let shared = (a.0..a.0 + a.1).any(|byte| (b.0..b.0 + b.1).contains(&byte));
            prop_assert_eq!(Span::new(a.0, a.1).overlaps(Span::new(b.0, b.1)), shared);
        }

        #[test]
        fn access_outside_is_refused(offset in 8000u64..9000, len in 0usize..300) {
            let memory = Memory::anonymous(8192).unwrap();
            let inside = offset + len as u64 <= 8192;
            prop_assert_eq!(memory.read(offset, &mut vec![0; len]).is_ok(), inside);
            prop_assert_eq!(memory.write(offset, &vec![1; len]).is_ok(), inside);
        }
    }
}
