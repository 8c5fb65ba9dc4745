//! Writes mapped memory to files past the page cache (`O_DIRECT`).
//!
//! The storage device reads pinned pages of the mapping: no processor copies them. File offsets, lengths and addresses are
//! multiples of a block. Read open(2), section `O_DIRECT`, and statx(2), `STATX_DIOALIGN`, first.
//!
//! Other processes can write the memory during a write, so the file may get a mixture. No reference into a mapping exists:
//! the kernel gets addresses.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{AtFlags, StatxFlags};

use crate::{Mapping, PAGE};

/// Flag of `open` for files past the page cache.
pub const OPEN_FLAG: i32 = libc::O_DIRECT;
/// Largest block that is supported, and the alignment of an [`AlignedBuffer`].
pub const MAX_BLOCK: usize = 64 << 10;
/// Segments of a `pwritev` (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;
/// `STATX_DIOALIGN` (Linux 6.1); rustix has only the fields.
const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// The block of a file: offsets, lengths and addresses of direct writes are multiples of it.
///
/// At least a page: file systems serialise direct writes to parts of their own blocks.
///
/// # Errors
/// The file system needs larger blocks than [`MAX_BLOCK`] (`Unsupported`).
pub fn block_size(file: BorrowedFd<'_>) -> io::Result<usize> {
    let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, STATX_DIOALIGN);
    let known = found.ok().filter(|found| found.stx_mask & STATX_DIOALIGN.bits() != 0);
    let needed = known.map_or(0, |found| found.stx_dio_mem_align.max(found.stx_dio_offset_align));
    let block = (needed as usize).next_power_of_two().max(PAGE);
    if block > MAX_BLOCK {
        let problem = format!("direct I/O needs blocks of {block} B, more than {MAX_BLOCK} B");
        return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
    }
    Ok(block)
}

/// Whether a write failed because pages of a mapping cannot be pinned, as those of a PCIe BAR.
#[must_use]
pub fn cannot_pin(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

/// A part of what a write takes.
#[derive(Clone, Debug)]
pub enum Part<'a> {
    /// Private bytes.
    Bytes(&'a [u8]),
    /// A range of mapped memory.
    Mapped(&'a Mapping, Range<usize>),
}

impl Part<'_> {
    fn segment(&self) -> io::Result<libc::iovec> {
        match self {
            Part::Bytes(bytes) => {
                Ok(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
            }
            Part::Mapped(mapping, range) if range.start <= range.end && range.end <= mapping.len() => {
                let base = mapping.base().wrapping_add(range.start);
                Ok(libc::iovec { iov_base: base.cast(), iov_len: range.len() })
            }
            Part::Mapped(mapping, range) => {
                let problem = format!("{range:?} is outside of a mapping of {} B", mapping.len());
                Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
            }
        }
    }
}

/// Writes all parts, one after the other, from offset `at` of the file.
///
/// # Errors
/// Those of `pwritev`, see [`cannot_pin`]; a part may have been written.
pub fn write_parts(file: BorrowedFd<'_>, parts: &[Part<'_>], mut at: u64) -> io::Result<()> {
    let mut segments: Vec<_> = parts.iter().map(Part::segment).collect::<io::Result<_>>()?;
    segments.retain(|segment| segment.iov_len > 0);
    let mut rest = segments.as_mut_slice();
    while !rest.is_empty() {
        let count = rest.len().min(MAX_SEGMENTS);
        let offset = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::FileTooLarge)?;
        // rustix takes references, which memory that others write must not have.
        // SAFETY: the kernel reads the segments, which are inside of borrowed bytes or of borrowed mappings.
        let written = unsafe { libc::pwritev(file.as_raw_fd(), rest.as_ptr(), count as i32, offset) };
        let mut written = match usize::try_from(written) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            },
        };
        at += written as u64;
        while let Some(first) = rest.first_mut()
            && written > 0
        {
            let taken = written.min(first.iov_len);
            first.iov_base = first.iov_base.wrapping_byte_add(taken);
            first.iov_len -= taken;
            written -= taken;
            if first.iov_len == 0 {
                rest = &mut rest[1..];
            }
        }
    }
    Ok(())
}

/// Private bytes at a multiple of [`MAX_BLOCK`].
#[derive(Debug)]
pub struct AlignedBuffer {
    /// Longer than the bytes by `MAX_BLOCK`; never grown, so that its bytes stay in place.
    room: Box<[u8]>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Zeros.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let room = vec![0u8; len + MAX_BLOCK].into_boxed_slice();
        let start = room.as_ptr().align_offset(MAX_BLOCK).min(MAX_BLOCK);
        Self { room, start, len }
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.room[self.start..][..self.len]
    }

    /// The bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memfd;
    use std::os::fd::AsFd;

    #[test]
    fn parts_are_written_in_order_at_their_offset() {
        let memory = Memfd::sealed("test", 3 * PAGE).unwrap().map().unwrap();
        for page in 0..3 {
            memory.word32(page * PAGE).store(page as u32 + 1, std::sync::atomic::Ordering::Relaxed);
        }
        let mut head = AlignedBuffer::zeroed(PAGE);
        head.bytes_mut()[..4].copy_from_slice(b"head");
        assert!(head.bytes().as_ptr().addr().is_multiple_of(MAX_BLOCK));
        let file = Memfd::new("file", 5 * PAGE).unwrap();
        // More segments than one system call takes.
        let many = (0..2 * MAX_SEGMENTS).map(|_| Part::Mapped(&memory, 0..0));
        let mut parts: Vec<_> = many.collect();
        parts.extend([Part::Bytes(head.bytes()), Part::Mapped(&memory, 2 * PAGE..3 * PAGE)]);
        parts.push(Part::Mapped(&memory, 0..PAGE));
        write_parts(file.as_fd(), &parts, PAGE as u64).unwrap();
        let mut bytes = vec![0; 5 * PAGE];
        assert!(file.map().unwrap().copy_to_slice(0, &mut bytes));
        let word = |page: usize| u32::from_le_bytes(bytes[page * PAGE..][..4].try_into().unwrap());
        assert_eq!([0, 1, 2, 3, 4].map(word), [0, u32::from_le_bytes(*b"head"), 3, 1, 0]);
    }

    #[test]
    fn more_segments_than_a_system_call_takes_are_written() {
        let memory = Memfd::sealed("test", PAGE).unwrap().map().unwrap();
        memory.word32(8).store(u32::MAX, std::sync::atomic::Ordering::Relaxed);
        let file = Memfd::new("file", 4 * MAX_SEGMENTS * 3).unwrap();
        let parts = vec![Part::Mapped(&memory, 8..12); 3 * MAX_SEGMENTS];
        write_parts(file.as_fd(), &parts, 0).unwrap();
        let mut bytes = vec![0; 4 * MAX_SEGMENTS * 3];
        assert!(file.map().unwrap().copy_to_slice(0, &mut bytes));
        assert!(bytes.iter().all(|byte| *byte == 255));
    }

    #[test]
    fn ranges_outside_of_a_mapping_are_refused() {
        let memory = Memfd::sealed("test", PAGE).unwrap().map().unwrap();
        let file = Memfd::new("file", PAGE).unwrap();
        for range in [0..PAGE + 1, PAGE + 1..PAGE + 1, usize::MAX..usize::MAX] {
            assert!(!memory.copy_to_slice(range.start, &mut vec![0; range.len()]), "{range:?}");
            let error = write_parts(file.as_fd(), &[Part::Mapped(&memory, range)], 0).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
        assert!(memory.copy_to_slice(PAGE, &mut []));
    }
}
