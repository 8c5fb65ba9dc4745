//! The limit of open files. A launcher, a manager or rank 0 of a job has several for each of its processes and connections; the usual
//! limit of 1,024 is for programs that call `select`.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::sync::OnceLock;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// Enough for thousands of processes, and not too many for a program that looks at each number.
const ENOUGH: u64 = 1 << 16;

/// The limit that this process was started with, if it was raised.
static EARLIER: OnceLock<Rlimit> = OnceLock::new();

/// Raises the limit of this process to 65,536, or to the hard limit if that is lower. Processes that it starts inherit it, but for
/// [`restore_limit`].
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(ENOUGH, |maximum| maximum.min(ENOUGH));
    if limit.current.is_some_and(|current| current < wanted)
        && setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit }).is_ok()
    {
        // A second call changes nothing.
        let _ = EARLIER.set(limit);
    }
}

/// Lets a process start with the limit that this one was started with: programs of users, and others that raise it themselves.
///
/// The command forks this process then, whose memory should be small: see [`restore_limit_of`].
pub fn restore_limit(command: &mut Command) {
    let Some(&earlier) = EARLIER.get() else { return };
    // SAFETY: between fork and exec, the closure only makes a system call.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Nofile, earlier)?)) };
}

/// As [`restore_limit`], for a process that has been started: without a fork, which copies registered memory.
pub fn restore_limit_of(process: &Child) {
    if let Some(&earlier) = EARLIER.get() {
        // It may have ended.
        let _ = prlimit(Some(Pid::from_child(process)), Resource::Nofile, earlier);
    }
}
