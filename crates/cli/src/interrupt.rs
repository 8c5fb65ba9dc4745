//! Ctrl-C and SIGTERM: the first asks a run to stop with its account, the second ends the program.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::unregister;

/// Listens as long as it lives.
pub(crate) struct Interrupt {
    asked: Arc<AtomicBool>,
    handlers: Vec<signal_hook::SigId>,
}

impl Interrupt {
    pub(crate) fn listen() -> io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        let mut handlers = Vec::new();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal must not find the flag that it is about to set.
            handlers.push(flag::register_conditional_default(signal, Arc::clone(&asked))?);
            handlers.push(flag::register(signal, Arc::clone(&asked))?);
        }
        Ok(Self { asked, handlers })
    }

    /// Whether to go on.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if self.asked.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        self.handlers.drain(..).for_each(|handler| _ = unregister(handler));
    }
}
