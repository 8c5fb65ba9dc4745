//! Faulting pages in, with an error instead of a signal for pages that cannot be accessed.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use crate::process_vm::{self, Direction, IoVec};
use crate::{PAGE, fork, maps, mm, number_from_environment};

/// Faults in the pages of `range` (widened to whole pages) for reading or writing. Later accesses do not
/// fault unless the mapping changes.
///
/// # Errors
/// ENOMEM or EFAULT for pages that are not mapped or do not permit the access.
pub fn fault_in(range: Range<usize>, write: bool) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let start = range.start & !(PAGE - 1);
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: the advice keeps the contents.
    match unsafe { mm::madvise(start, range.end - start, advice) } {
        // Linux before 5.14 lacks the advice, and no kernel accepts it for device memory.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => probe(start..range.end, write),
        done => done,
    }
}

/// Bytes of a region that registration populates unless `MILLSTREAM_POPULATE` sets another number.
const POPULATION_LIMIT: usize = 256 << 20;

/// Bytes of a region that registration populates (`MILLSTREAM_POPULATE`).
#[must_use]
pub fn population_limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *fork::get_or_init(&LIMIT, || number_from_environment("MILLSTREAM_POPULATE", "bytes", POPULATION_LIMIT))
}

/// Allocates the pages of `range` (widened to whole pages) up to [`population_limit`] bytes, as an adapter that pins
/// them would. Memory that permits the access and cannot be populated is left as it is.
///
/// # Errors
/// EFAULT if some of the memory is not mapped or does not permit the access; ENOMEM if the system has no memory for it.
pub fn populate(range: Range<usize>, write: bool) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let start = range.start & !(PAGE - 1);
    let len = (range.end - start).min(population_limit());
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: the advice keeps the contents.
    let result = if len == 0 { Ok(()) } else { unsafe { mm::madvise(start, len, advice) } };
    let populated = result.is_ok();
    // The system call checks the permissions of what it populates, so few registrations look at the mappings. Without
    // /proc nothing is known.
    if populated && start + len >= range.end {
        return Ok(());
    }
    match (maps::permits(&(start..range.end), write), result) {
        // Of memory that is not mapped, the advice says the same.
        (Ok(true), Err(error)) if error.raw_os_error() == Some(libc::ENOMEM) => Err(error),
        (Ok(false), _) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        _ => Ok(()),
    }
}

/// Whether `range`, which is mapped, begins in memory of a device that its driver has mapped (`VM_PFNMAP`): a GPU's, for example.
/// Linux before 5.14 cannot tell; then true.
#[must_use]
pub fn is_device_memory(range: &Range<usize>) -> bool {
    let start = range.start & !(PAGE - 1);
    // SAFETY: the advice keeps the contents.
    let populated = unsafe { mm::madvise(start, PAGE, libc::MADV_POPULATE_READ) };
    populated.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
}

/// Checks the permissions in `/proc/self/maps` and reads one byte of each page through the kernel.
fn probe(range: Range<usize>, write: bool) -> io::Result<()> {
    if !maps::permits(&range, write)? {
        return Err(io::Error::from_raw_os_error(libc::EFAULT));
    }
    let mut byte = 0u8;
    for page in range.step_by(PAGE) {
        let local = IoVec { base: (&raw mut byte) as u64, len: 1 };
        let remote = IoVec { base: page as u64, len: 1 };
        // SAFETY: one byte on the stack.
        unsafe { process_vm::copy(std::process::id(), &[local], remote, Direction::Read) }?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, Memfd};
    use std::os::fd::AsFd;

    #[test]
    fn only_accessible_pages_are_faulted_in() {
        let file = Memfd::new("test", 2 * PAGE).unwrap();
        let writable = file.map().unwrap();
        let readable = Mapping::new(file.as_fd(), 0, 2 * PAGE, false).unwrap();
        for check in [fault_in, probe] {
            let pages = |m: &Mapping| m.base() as usize + 1..m.base() as usize + 2 * PAGE;
            check(pages(&writable), true).unwrap();
            check(pages(&writable), false).unwrap();
            check(pages(&readable), false).unwrap();
            assert!(check(pages(&readable), true).is_err());
            assert!(check(0..PAGE, false).is_err(), "nothing is mapped at zero");
            assert!(check(usize::MAX - 2 * PAGE..usize::MAX, false).is_err(), "kernel addresses");
        }
        fault_in(7..7, true).unwrap();
    }
}
