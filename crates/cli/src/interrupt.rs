//! Ctrl-C and SIGTERM: the first signal requests the stop of a run, the second ends the program.
//! `timeout` and many shells send a second signal immediately after the first.
//!
//! SIGHUP requests the stop as well and never ends the program: the kernel and the shell both send one when a terminal goes
//! away, and systemd sends one after SIGTERM. A program that was started with SIGHUP ignored (`nohup`) goes on.

use std::io;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::{register, unregister};

/// Handles signals while it lives.
pub(crate) struct Interrupt {
    asked: Arc<AtomicBool>,
    handlers: Vec<signal_hook::SigId>,
}

impl Interrupt {
    pub(crate) fn listen() -> io::Result<Self> {
        Self::listen_and_leave(b"")
    }

    /// On the second signal, writes `words` to standard output before the program ends.
    pub(crate) fn listen_and_leave(words: &'static [u8]) -> io::Result<Self> {
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot install signal handlers: {error}"))
        };
        let asked = Arc::new(AtomicBool::new(false));
        let mut handlers = Vec::new();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal must not see the flag that it sets.
            let again = Arc::clone(&asked);
            let leave = move || {
                if again.load(Ordering::Relaxed) {
                    let _ = rustix::io::write(rustix::stdio::stdout(), words);
                }
            };
            // SAFETY: the handler does a load and a system call, which are async-signal-safe.
            handlers.push(unsafe { register(signal, leave) }.map_err(failed)?);
            handlers.push(flag::register_conditional_default(signal, Arc::clone(&asked)).map_err(failed)?);
            handlers.push(flag::register(signal, Arc::clone(&asked)).map_err(failed)?);
        }
        if !is_ignored(SIGHUP) {
            handlers.push(flag::register(SIGHUP, Arc::clone(&asked)).map_err(failed)?);
        }
        Ok(Self { asked, handlers })
    }

    /// True once a signal has requested the stop.
    #[cfg(feature = "torus")]
    pub(crate) fn asked(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.asked)
    }

    /// Whether to continue.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if self.asked.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Whether this process ignores a signal.
fn is_ignored(signal: i32) -> bool {
    let mut present = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, the call only writes the present one, to memory that is valid for it.
    let status = unsafe { libc::sigaction(signal, std::ptr::null(), present.as_mut_ptr()) };
    // SAFETY: all bytes are initialised, and every value of the fields is valid.
    status == 0 && unsafe { present.assume_init() }.sa_sigaction == libc::SIG_IGN
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.handlers.drain(..).for_each(|handler| _ = unregister(handler));
    }
}
