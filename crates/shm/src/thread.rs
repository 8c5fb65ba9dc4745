//! Threads of a library inside somebody else's program.

use std::io;

/// Starts a thread that takes none of the application's signals.
///
/// # Errors
/// What creating a thread reports.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: signal sets are plain data; the mask of this thread is restored below.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        // Faults of the thread itself must still be seen.
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&raw mut all, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        result.map(drop)
    }
}

/// The cores that this thread may run on, by their numbers.
///
/// # Errors
/// What `sched_getaffinity` reports.
pub fn cores() -> io::Result<Vec<usize>> {
    // SAFETY: a set is plain data that the call fills in; numbers stay below the set's size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect())
    }
}

/// Does some work on these cores only: this thread, and threads and processes that it starts meanwhile.
///
/// # Errors
/// What `sched_setaffinity` reports, EINVAL if none of the cores can be used.
pub fn on_cores<T>(cores: &[usize], work: impl FnOnce() -> T) -> io::Result<T> {
    let before = self::cores()?;
    confine(cores)?;
    let done = work();
    confine(&before)?;
    Ok(done)
}

fn confine(cores: &[usize]) -> io::Result<()> {
    // SAFETY: a set is plain data; numbers that do not fit into it are left out.
    let outcome = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|&&core| core < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn work_stays_on_the_cores_that_it_was_given() {
        let all = super::cores().unwrap();
        let one = [*all.last().unwrap()];
        let seen =
            super::on_cores(&one, || std::thread::spawn(super::cores).join().unwrap().unwrap()).unwrap();
        assert_eq!(seen, one);
        assert_eq!(super::cores().unwrap(), all);
        assert!(super::on_cores(&[], || ()).is_err());
    }

    #[test]
    fn signals_go_elsewhere() {
        let (sender, receiver) = std::sync::mpsc::channel();
        super::spawn("quiet", move || {
            // SAFETY: reads this thread's mask.
            let blocked = unsafe {
                let mut mask: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
                [libc::SIGINT, libc::SIGALRM, libc::SIGSEGV]
                    .map(|signal| libc::sigismember(&raw const mask, signal))
            };
            sender.send(blocked).unwrap();
        })
        .unwrap();
        assert_eq!(receiver.recv().unwrap(), [1, 1, 0]);
    }
}
