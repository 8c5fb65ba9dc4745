//! Threads of a library in a foreign program, and CPU affinity.

use std::io;

use millstream_lockfree::SpinLock;
use rustix::thread::CpuSet;

/// Starts a thread with the application's signals blocked.
///
/// # Errors
/// Those of creating a thread.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // rustix has no signal masks.
    // SAFETY: signal sets are plain data; the mask of this thread is restored below.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        // Faults of the thread itself are still delivered.
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&raw mut all, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let run = || {
            let _listed = Listed::new();
            run();
        };
        let result = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        result.map(drop)
    }
}

/// Thread ids of the running threads that [`spawn`] started.
static OWN_THREADS: SpinLock<Vec<u32>> = SpinLock::new(Vec::new());

// None of them exists in a child. The numbers need no drop, so memory that the child may not have is not accessed.
crate::lock_at_fork!(Threads, OWN_THREADS, Vec::clear);

/// A thread's entry in [`OWN_THREADS`].
struct Listed(u32);

impl Listed {
    fn new() -> Self {
        let id = id();
        OWN_THREADS.lock().push(id);
        Self(id)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        OWN_THREADS.lock().retain(|id| *id != self.0);
    }
}

/// The kernel's id of the calling thread.
#[must_use]
pub fn id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// Whether the process has no threads but this one and those that [`spawn`] started. Only this thread can start others.
/// False if that cannot be found out.
#[must_use]
pub fn is_alone() -> bool {
    let own = OWN_THREADS.lock().clone();
    let me = id();
    let Ok(mut threads) = std::fs::read_dir("/proc/self/task") else { return false };
    threads.all(|entry| {
        let id = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        id.is_some_and(|id| id == me || own.contains(&id))
    })
}

/// The CPUs that this thread may run on, by number.
///
/// # Errors
/// Those of `sched_getaffinity`.
pub fn affinity() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Runs `work` with this thread's affinity set to `cpus`. Threads and processes started by `work` inherit it.
///
/// # Errors
/// Those of `sched_setaffinity`; EINVAL if none of the CPUs can be used.
pub fn with_affinity<T>(cpus: &[usize], work: impl FnOnce() -> T) -> io::Result<T> {
    let before = affinity()?;
    set_affinity(cpus)?;
    let result = work();
    set_affinity(&before)?;
    Ok(result)
}

fn set_affinity(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn affinity_is_inherited_and_restored() {
        let all = super::affinity().unwrap();
        let one = [*all.last().unwrap()];
        let seen =
            super::with_affinity(&one, || std::thread::spawn(super::affinity).join().unwrap().unwrap());
        assert_eq!(seen.unwrap(), one);
        assert_eq!(super::affinity().unwrap(), all);
        assert!(super::with_affinity(&[], || ()).is_err());
    }

    #[test]
    fn signals_are_blocked() {
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
