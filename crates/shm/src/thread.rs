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

#[cfg(test)]
mod tests {
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
