//! Getting pages ready, or finding out that they are not to be had, without touching them.

use std::io;
use std::ops::Range;

use crate::vm::{self, Direction};
use crate::{PAGE, maps};

/// Makes the pages of `range`, widened to whole pages, present for reading or writing. A touch of them
/// does not fault afterwards, unless somebody changes the mapping.
///
/// # Errors
/// What the system reports for pages that are not there or do not allow it: ENOMEM, EFAULT.
pub fn present(range: Range<usize>, write: bool) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let start = range.start & !(PAGE - 1);
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: the advice changes no contents, and the kernel checks the range.
    if unsafe { libc::syscall(libc::SYS_madvise, start, range.end - start, advice) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // Linux before 5.14 does not know the advice, and no kernel gives it for a device's memory.
        error if error.raw_os_error() == Some(libc::EINVAL) => probe(start..range.end, write),
        error => Err(error),
    }
}

/// The same by looking: a byte of each page through the kernel, and the permissions.
fn probe(range: Range<usize>, write: bool) -> io::Result<()> {
    let fault = || io::Error::from_raw_os_error(libc::EFAULT);
    let areas = maps::areas(range.clone())?;
    if !maps::covers(&areas, &range) || (write && !areas.iter().all(|area| area.rw)) {
        return Err(fault());
    }
    let mut byte = 0u8;
    for page in range.step_by(PAGE) {
        let here = vm::Piece { base: (&raw mut byte) as u64, len: 1 };
        let there = vm::Piece { base: page as u64, len: 1 };
        // SAFETY: one byte on the stack.
        unsafe { vm::copy(std::process::id(), &[here], there, Direction::Read) }?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, Memfd};
    use std::os::fd::AsFd;

    #[test]
    fn pages_are_there_or_not() {
        let file = Memfd::new("test", 2 * PAGE).unwrap();
        let writable = file.map().unwrap();
        let readable = Mapping::new(file.as_fd(), 0, 2 * PAGE, false).unwrap();
        for check in [present, probe] {
            let pages = |m: &Mapping| m.base() as usize + 1..m.base() as usize + 2 * PAGE;
            check(pages(&writable), true).unwrap();
            check(pages(&writable), false).unwrap();
            check(pages(&readable), false).unwrap();
            assert!(check(pages(&readable), true).is_err());
            assert!(check(0..PAGE, false).is_err(), "nothing is mapped at zero");
            assert!(check(usize::MAX - 2 * PAGE..usize::MAX, false).is_err(), "the kernel's");
        }
        present(7..7, true).unwrap();
    }
}
