//! The file behind shared memory that a program has mapped itself.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::maps::{self, FileNumber, Vma};
use crate::memfd::cannot_shrink;

/// How [`file_behind`] looks for the area of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AreaSearch {
    /// Only where that costs the same however many areas there are (Linux 6.11 and later).
    Quick,
    /// In the list of all areas.
    Full,
}

/// The sealed file that is mapped as `range`, and the offset in it of the range's first byte. `writable`: for stores, too.
/// None unless one file that can no longer shrink covers the whole range, in the order of its bytes, and a descriptor
/// of it is to be had: the program has it open, or may open `/proc/self/map_files`.
#[must_use]
pub fn file_behind(range: Range<usize>, writable: bool, search: AreaSearch) -> Option<(OwnedFd, u64)> {
    let first = match search {
        AreaSearch::Quick => maps::vma_at(range.start).ok()??,
        AreaSearch::Full => maps::vmas(range.start..range.start + 1).ok()?.into_iter().next()?,
    };
    if !first.shared || first.inode == 0 || !first.range.contains(&range.start) {
        return None;
    }
    let areas = maps::vmas(range.clone()).ok()?;
    let follows = |area: &Vma| {
        (area.device, area.inode, area.shared) == (first.device, first.inode, true)
            && area.offset.checked_sub(first.offset) == Some((area.range.start - first.range.start) as u64)
            && (area.is_writable() || !writable)
    };
    if !maps::covers(&areas, &range) || !areas.iter().all(follows) {
        return None;
    }
    let fd = open_descriptor(&first).or_else(|| map_file(&first))?;
    Some((fd, first.offset + (range.start - first.range.start) as u64))
}

/// Whether a descriptor names the mapped file.
fn is_of(fd: BorrowedFd<'_>, area: &Vma) -> bool {
    FileNumber::of(fd).is_ok_and(|file| area.is_of(file))
}

/// A copy of a descriptor of the file that the program has open.
fn open_descriptor(area: &Vma) -> Option<OwnedFd> {
    let numbers = fs::read_dir("/proc/thread-self/fd").ok()?.flatten();
    numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).find_map(|number| {
        // SAFETY: used for system calls only; another thread may close the number, and then they fail.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        if !is_of(fd, area) {
            return None;
        }
        let copy = fd.try_clone_to_owned().ok()?;
        // The number may name another file by now.
        (is_of(copy.as_fd(), area) && cannot_shrink(copy.as_fd())).then_some(copy)
    })
}

/// The file of a mapping, for a process with CAP_CHECKPOINT_RESTORE.
fn map_file(area: &Vma) -> Option<OwnedFd> {
    let path = format!("/proc/self/map_files/{:x}-{:x}", area.range.start, area.range.end);
    let file = File::options().read(true).write(area.is_writable()).open(path).ok()?;
    (is_of(file.as_fd(), area) && cannot_shrink(file.as_fd())).then(|| file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, Memfd, PAGE};

    #[test]
    fn a_mapped_sealed_file_is_found_with_its_offset() {
        let file = Memfd::sealed("test", 8 * PAGE).unwrap();
        let mapping = Mapping::new(file.as_fd(), 2 * PAGE, 4 * PAGE, true).unwrap();
        let start = mapping.base() as usize + PAGE + 8;
        for search in [AreaSearch::Quick, AreaSearch::Full] {
            let found = file_behind(start..start + PAGE, true, search);
            if search == AreaSearch::Quick && maps::vma_at(0).is_err() {
                assert!(found.is_none(), "Linux before 6.11");
                continue;
            }
            let (found, offset) = found.expect("its descriptor is open");
            assert_eq!(offset, 3 * PAGE as u64 + 8);
            let other = Memfd::from_peer(found).unwrap().map().unwrap();
            other.word32(3 * PAGE + 8).store(77, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(mapping.word32(PAGE + 8).swap(0, std::sync::atomic::Ordering::Relaxed), 77);
            assert!(file_behind(start..start + 4 * PAGE, true, search).is_none(), "beyond the mapping");
        }
    }

    #[test]
    fn other_memory_has_no_such_file() {
        let private = vec![0u8; 2 * PAGE];
        let start = private.as_ptr() as usize;
        let has_none = |start| {
            let found = |search| file_behind(start..start + PAGE, true, search);
            [AreaSearch::Quick, AreaSearch::Full].into_iter().all(|search| found(search).is_none())
        };
        assert!(has_none(start));
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
        let unsealed = Mapping::new(fd.as_fd(), 0, PAGE, true).unwrap();
        let sealed = Memfd::sealed("test", PAGE).unwrap();
        let read_only = Mapping::new(sealed.as_fd(), 0, PAGE, false).unwrap();
        for mapping in [unsealed, read_only] {
            assert!(has_none(mapping.base() as usize));
        }
    }
}
