//! Ranges of card memory, and card memory that this process has mapped.
//!
//! Other processes and network adapters write to the mapping at any time. Hence no code holds a reference
//! into it. Bytes are copied out first and checked afterwards, so that the checked bytes are the used bytes.

use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_shm::Mapping;

use crate::command::{Cause, Fault};
use crate::{IoContext as _, SyscallError};

/// A range of card memory (bytes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryRange {
    /// First byte, counted from the start of card memory.
    pub offset: u64,
    /// Length.
    pub len: u64,
}

impl MemoryRange {
    /// The range of `len` bytes at `offset`.
    #[inline]
    pub const fn new(offset: u64, len: u64) -> MemoryRange {
        MemoryRange { offset, len }
    }

    /// True if the range lies inside `bytes` bytes of memory. Cannot overflow.
    #[inline]
    pub const fn fits(self, bytes: u64) -> bool {
        self.len <= bytes && self.offset <= bytes - self.len
    }

    /// Checks that the range lies inside `memory` bytes of card memory.
    #[inline]
    pub fn check(self, memory: u64) -> Result<(), AccessError> {
        if self.fits(memory) { Ok(()) } else { Err(AccessError::OutOfRange { span: self, memory }) }
    }

    /// True if the two ranges, both inside some memory, have a byte in common.
    #[inline]
    pub const fn overlaps(self, other: MemoryRange) -> bool {
        self.len != 0
            && other.len != 0
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

impl fmt::Display for MemoryRange {
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
        /// The requested range.
        span: MemoryRange,
        /// Size of the memory (bytes).
        memory: u64,
    },
    /// The device driver failed to copy the bytes.
    #[error("cannot access card memory at {offset:#x} (driver error {code})")]
    Device {
        /// First byte of the requested range.
        offset: u64,
        /// The driver's error code.
        code: i32,
    },
}

impl AccessError {
    /// The fault of a command that this access ends; its cause is `outside` for a wrong range.
    pub fn fault(self, outside: Cause) -> Fault {
        match self {
            AccessError::OutOfRange { span, .. } => Fault::new(outside, span.offset),
            AccessError::Device { code, .. } => {
                Fault::new(Cause::MemoryFailed, u64::from(code.unsigned_abs()))
            }
        }
    }
}

/// Card memory in the address space of this process.
#[derive(Clone, Debug)]
pub struct MappedMemory {
    mapping: Arc<Mapping>,
}

impl MappedMemory {
    /// The memory behind `mapping`.
    pub fn new(mapping: Arc<Mapping>) -> MappedMemory {
        MappedMemory { mapping }
    }

    /// The mapping, to be registered with a device.
    #[inline]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Size (bytes).
    #[inline]
    pub fn size(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Address of the first byte. Valid as long as this value lives; other processes and devices write to the
    /// memory behind it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.base()
    }

    /// Checks that `span` lies inside the memory.
    #[inline]
    pub fn check(&self, span: MemoryRange) -> Result<(), AccessError> {
        span.check(self.size())
    }

    /// Copies `out.len()` bytes at `offset` out of card memory.
    ///
    /// A concurrent write can tear the bytes.
    #[inline]
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let span = MemoryRange::new(offset, out.len() as u64);
        let copied = self.mapping.copy_to_slice(offset as usize, out);
        if copied { Ok(()) } else { Err(AccessError::OutOfRange { span, memory: self.size() }) }
    }

    /// Copies an array of `N` bytes out of card memory.
    pub fn read_array<const N: usize>(&self, offset: u64) -> Result<[u8; N], AccessError> {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies `bytes` into card memory at `offset`.
    #[inline]
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.check(MemoryRange::new(offset, bytes.len() as u64))?;
        // SAFETY: the range was checked; `bytes` cannot overlap the mapping, to which no reference exists.
        unsafe {
            let to = self.mapping.base().add(offset as usize);
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        self.flush();
        Ok(())
    }

    /// Makes earlier stores visible to devices, and to other processes before later stores.
    #[inline]
    fn flush(&self) {
        // Stores to write-combining memory wait in the processor's buffers until a fence.
        if self.mapping.is_write_combining() {
            fence(Ordering::SeqCst);
        }
    }

    /// Copies inside the memory; the ranges may overlap.
    #[inline]
    pub fn copy_within(&self, from: MemoryRange, to: u64) -> Result<(), AccessError> {
        self.check(from)?;
        self.check(MemoryRange::new(to, from.len))?;
        if self.mapping.is_write_combining() {
            let mut bytes = vec![0; from.len as usize];
            self.read(from.offset, &mut bytes)?;
            return self.write(to, &bytes);
        }
        // SAFETY: both ranges were checked, and no reference to the mapping exists.
        unsafe {
            let base = self.mapping.base();
            ptr::copy(base.add(from.offset as usize), base.add(to as usize), from.len as usize);
        }
        Ok(())
    }

    /// Writes zeros to a range, which is cut to the memory.
    pub fn zero(&self, span: MemoryRange) {
        let start = span.offset.min(self.size());
        let len = span.len.min(self.size() - start);
        // SAFETY: the range was cut to the mapping, to which no reference exists.
        unsafe { ptr::write_bytes(self.mapping.base().add(start as usize), 0, len as usize) };
        self.flush();
    }

    /// Allocates the pages of `span` and maps them here; their content stays.
    ///
    /// A page fault costs far more than copying the page, so prefault receive memory before a run.
    pub fn prefault(&self, span: MemoryRange) -> Result<(), PrefaultError> {
        self.check(span)?;
        let populated = self.mapping.prefault(span.offset as usize, span.len as usize);
        Ok(populated.context("prefault the pages of a card")?)
    }
}

/// Why memory could not be prefaulted.
#[derive(Debug, thiserror::Error)]
pub enum PrefaultError {
    /// The range is not card memory.
    #[error(transparent)]
    OutOfRange(#[from] AccessError),
    /// The system refused, usually for lack of memory.
    #[error(transparent)]
    Os(#[from] SyscallError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_shm::Memfd;
    use proptest::prelude::*;

    fn memory() -> MappedMemory {
        let fd = Memfd::sealed("millstream-card-test", 8192).unwrap();
        MappedMemory::new(Arc::new(fd.map().unwrap()))
    }

    #[test]
    fn written_bytes_are_read_back_and_all_others_stay_zero() {
        let memory = memory();
        memory.write(4090, b"over the page").unwrap();
        assert_eq!(&memory.read_array::<15>(4089).unwrap(), b"\0over the page\0");
        memory.zero(MemoryRange::new(4090, u64::MAX));
        assert_eq!(memory.read_array::<15>(4089).unwrap(), [0; 15]);
    }

    #[derive(Debug)]
    struct Driver(#[expect(dead_code, reason = "keeps the memory")] Mapping);

    impl millstream_shm::DriverMapping for Driver {}

    #[test]
    fn memory_that_a_driver_maps_reads_and_writes_the_same_bytes() {
        let memory = Memfd::sealed("millstream-card-test", 8192).unwrap();
        let plain = MappedMemory::new(Arc::new(memory.map().unwrap()));
        let again = memory.map().unwrap();
        // SAFETY: the driver keeps the mapping.
        let mapping = unsafe { Mapping::of_driver(again.base(), 8192, Box::new(Driver(again))) };
        let combining = MappedMemory::new(Arc::new(mapping));
        let bytes: Vec<u8> = (0..300u32).map(|at| (at * 7) as u8).collect();
        for (offset, len) in [(0, 300), (1, 63), (60, 9), (64, 64), (8192 - 70, 70), (5, 0), (4095, 2)] {
            combining.write(offset, &bytes[..len]).unwrap();
            let (mut by_line, mut by_byte) = (vec![0; len], vec![1; len]);
            combining.read(offset, &mut by_line).unwrap();
            plain.read(offset, &mut by_byte).unwrap();
            assert_eq!((&by_line, &by_byte), (&bytes[..len].to_vec(), &by_line), "{len} bytes at {offset}");
        }
        combining.write(0, &bytes).unwrap();
        combining.copy_within(MemoryRange::new(0, 300), 100).unwrap();
        assert_eq!(&plain.read_array::<300>(100).unwrap()[..], &bytes[..]);
        combining.prefault(MemoryRange::new(0, 8192)).unwrap();
        combining.zero(MemoryRange::new(0, 8192));
        assert_eq!(plain.read_array::<300>(100).unwrap(), [0; 300]);
    }

    proptest! {
        #[test]
        fn a_span_fits_exactly_if_its_end_does(offset: u64, len: u64, bytes: u64) {
            let end = u128::from(offset) + u128::from(len);
            prop_assert_eq!(MemoryRange::new(offset, len).fits(bytes), end <= u128::from(bytes));
        }

        #[test]
        fn spans_overlap_exactly_if_they_share_a_byte(
            a in (0u64..40, 0u64..10), b in (0u64..40, 0u64..10),
        ) {
            let shared = (a.0..a.0 + a.1).any(|byte| (b.0..b.0 + b.1).contains(&byte));
            prop_assert_eq!(MemoryRange::new(a.0, a.1).overlaps(MemoryRange::new(b.0, b.1)), shared);
        }

        #[test]
        fn access_out_of_range_is_refused(offset in 8000u64..9000, len in 0usize..300) {
            let memory = memory();
            let inside = offset + len as u64 <= 8192;
            prop_assert_eq!(memory.read(offset, &mut vec![0; len]).is_ok(), inside);
            prop_assert_eq!(memory.write(offset, &vec![1; len]).is_ok(), inside);
        }
    }
}
