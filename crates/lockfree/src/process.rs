//! Whether processes have exited, or execute another program.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::CancelGuard;

/// A descriptor of the process `pid`. It is readable once the process has exited, reaped or not.
///
/// # Errors
/// What `pidfd_open` reports; ESRCH if there is no such process.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above returned a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether the process behind a descriptor of [`pidfd_open`] has exited.
#[must_use]
pub fn pidfd_has_exited(pidfd: BorrowedFd<'_>) -> bool {
    let _uncancelled = CancelGuard::new();
    let mut polled = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one element; a timeout of zero does not wait.
    unsafe { libc::poll(&raw mut polled, 1, 0) == 1 }
}

/// Whether the process `pid` runs without the file that this process has mapped at `address`. A process that has written
/// there has executed another program since. False if there is no file at `address`, or if the system does not tell.
#[must_use]
pub fn has_unmapped(pid: u32, address: usize) -> bool {
    let _uncancelled = CancelGuard::new();
    let Ok(own) = std::fs::read_to_string("/proc/thread-self/maps") else { return false };
    let Some(file) = own.lines().find_map(|line| file_at(line, address)) else { return false };
    maps_of(pid).is_some_and(|maps| !maps.lines().any(|line| file_of(line) == Some(file)))
}

/// The `maps` of a process. The file is empty for a thread that has ended, as the main thread may have (`pthread_exit`): then
/// it is that of another thread. None if the system does not tell.
fn maps_of(pid: u32) -> Option<String> {
    let of = |task: &std::path::Path| {
        std::fs::read_to_string(task.join("maps")).ok().filter(|maps| !maps.is_empty())
    };
    let process = std::path::PathBuf::from(format!("/proc/{pid}"));
    of(&process).or_else(|| {
        let tasks = std::fs::read_dir(process.join("task")).ok()?;
        tasks.flatten().find_map(|task| of(&task.path()))
    })
}

/// Device and inode of the file that a line of a process's `maps` describes.
fn file_of(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_ascii_whitespace().skip(3);
    let file = (words.next()?, words.next()?);
    (file.1 != "0").then_some(file)
}

/// The file that the line describes, if its mapping contains the address.
fn file_at(line: &str, address: usize) -> Option<(&str, &str)> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).ok());
    (start? <= address && address < end?).then(|| file_of(line)).flatten()
}

/// Whether `thread` is a thread of the process `pid` that this process may send signals to.
#[must_use]
pub fn is_thread_of(pid: u32, thread: u32) -> bool {
    // SAFETY: a plain system call; the signal zero is only checked.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, 0) == 0 }
}

/// Whether no process `pid` runs. A zombie has exited.
#[must_use]
pub fn has_exited(pid: u32) -> bool {
    // The caller may hold locks; to close the descriptor is a cancellation point.
    let _uncancelled = CancelGuard::new();
    match pidfd_open(pid) {
        Ok(pidfd) => pidfd_has_exited(pidfd.as_fd()),
        // EINVAL and ENOENT: numbers that no process can have, and those of threads.
        Err(error) => match error.raw_os_error() {
            Some(libc::ESRCH | libc::EINVAL | libc::ENOENT) => true,
            // No descriptor is free, or a system-call filter refuses the call.
            _ => has_exited_by_state(pid),
        },
    }
}

/// [`has_exited`] without a descriptor. A zombie is found in `/proc` only, for which a descriptor may be needed.
fn has_exited_by_state(pid: u32) -> bool {
    // SAFETY: a plain system call; the signal zero is only checked.
    let found = unsafe { libc::kill(pid.cast_signed(), 0) } == 0
        || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH);
    !found || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_stat_of_exited(&stat))
}

/// Whether the `stat` of a process, `PID (NAME) STATE …`, is that of one that has exited. A process whose main thread
/// alone has ended has the state of a zombie, too. The name may contain spaces and parentheses.
fn is_stat_of_exited(stat: &str) -> bool {
    let mut fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ');
    let (state, threads) = (fields.next(), fields.nth(16).and_then(|threads| threads.parse().ok()));
    matches!(state, Some("Z" | "X")) && threads.is_none_or(|threads: u32| threads <= 1)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    /// A page of a file, which a forked child has mapped, too.
    fn shared_page() -> usize {
        // SAFETY: makes a descriptor and a new mapping.
        unsafe {
            let file = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
            assert_eq!(libc::ftruncate(file, 4096), 0);
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let page = libc::mmap(std::ptr::null_mut(), 4096, protection, flags, file, 0);
            assert_ne!(page, libc::MAP_FAILED);
            page.addr()
        }
    }

    /// Its `maps` are empty.
    #[test]
    fn a_process_whose_main_thread_has_ended_has_unmapped_nothing() {
        let page = shared_page();
        // SAFETY: the child only starts a thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            std::thread::spawn(|| std::thread::sleep(std::time::Duration::from_secs(60)));
            // SAFETY: ends the main thread alone, as `pthread_exit` does.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        let pid = child as u32;
        while !std::fs::read(format!("/proc/{pid}/maps")).unwrap().is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(!has_exited(pid) && !has_exited_by_state(pid) && !has_unmapped(pid, page));
        let only_here = shared_page();
        assert!(has_unmapped(pid, only_here));
        let mut status = 0;
        // SAFETY: ends the test's child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0);
        }
        assert!(has_exited(pid) && has_exited_by_state(pid) && !has_unmapped(pid, page));
    }

    #[test]
    fn an_exited_process_is_found_without_a_descriptor() {
        assert!(!has_exited_by_state(std::process::id()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        // A zombie until it is waited for.
        while !has_exited(pid) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(has_exited_by_state(pid));
        child.wait().unwrap();
        assert!(has_exited_by_state(pid));
    }
}
