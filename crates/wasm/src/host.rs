//! What a module can import.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_card::Span;
use millstream_card::command::{Cause, Fault};
use millstream_card::region::kernel::{Run, Words};
use wasmtime::{Caller, Engine, Linker};

use crate::window::Window;

/// The module that all imports are from; the number changes when one of them does.
pub(crate) const MODULE: &str = "millstream_1";

/// Import of kernels that can go on from another run's state.
pub(crate) const RESUME: &str = "resume";

/// A module that is wanted at a safe point gets so long to reach one; then it is ended or held where it is.
const GRACE: Duration = Duration::from_millis(100);

/// The region's side of one run.
pub(crate) struct Host {
    /// The run that the store was made for; it outlives the store.
    run: *mut Run<'static>,
    window: Arc<Window>,
    /// State words of the latest safe point.
    state: Words,
    wanted_since: Option<Instant>,
}

/// The end of a run by a fault that is no trap.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct Ended(pub(crate) Fault);

impl Host {
    /// The host of a run.
    ///
    /// # Safety
    /// The run outlives the host, and nobody else uses it meanwhile.
    pub(crate) unsafe fn new(run: &mut Run<'_>, window: Arc<Window>) -> Host {
        let run = std::ptr::from_mut(run).cast::<Run<'static>>();
        Host { run, window, state: Words::default(), wanted_since: None }
    }

    fn run(&self) -> &Run<'static> {
        // SAFETY: see `new`.
        unsafe { &*self.run }
    }

    fn run_mut(&mut self) -> &mut Run<'static> {
        // SAFETY: see `new`.
        unsafe { &mut *self.run }
    }

    /// The window, for words at `pointer`.
    fn words_at(&self, pointer: u32) -> Result<*mut u8, Ended> {
        let (start, bytes) = (pointer as usize, size_of::<Words>());
        if start + bytes > self.window.size() {
            return Err(Ended(Fault::new(Cause::ForeignMemory, u64::from(pointer))));
        }
        Ok(self.window.base().wrapping_add(start))
    }

    fn read_words(&self, pointer: u32) -> Result<Words, Ended> {
        let from = self.words_at(pointer)?;
        let mut bytes = [0u8; size_of::<Words>()];
        // SAFETY: the range is in the window.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        let (words, _) = bytes.as_chunks::<8>();
        Ok(std::array::from_fn(|index| u64::from_le_bytes(words[index])))
    }

    fn write_words(&self, pointer: u32, words: &Words) -> Result<(), Ended> {
        let to = self.words_at(pointer)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // SAFETY: the range is in the window.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn safe_point(&mut self, state: Words) -> Result<(), Ended> {
        self.state = state;
        self.wanted_since = None;
        self.run().safe_point(&state).map_err(Ended)
    }

    /// Looks, every millisecond, whether the module may go on.
    pub(crate) fn look(&mut self) -> Result<(), Ended> {
        if self.run().deadline().is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Ended(Fault::new(Cause::DeadlineExceeded, 0)));
        }
        if !self.run().wanted().load(Ordering::Relaxed) {
            self.wanted_since = None;
            return Ok(());
        }
        let since = *self.wanted_since.get_or_insert_with(Instant::now);
        if since.elapsed() < GRACE {
            return Ok(());
        }
        self.safe_point(self.state)
    }
}

/// The word `index` of sixteen.
fn word(index: u32) -> Result<usize, Ended> {
    let index = index as usize;
    if index < Words::default().len() {
        Ok(index)
    } else {
        Err(Ended(Fault::new(Cause::Argument, index as u64)))
    }
}

/// All imports.
pub(crate) fn linker(engine: &Engine) -> wasmtime::Result<Linker<Host>> {
    let mut linker = Linker::new(engine);
    linker.func_wrap(
        MODULE,
        "argument",
        |caller: Caller<'_, Host>, index: u32| -> wasmtime::Result<u64> {
            Ok(caller.data().run().arguments()[word(index)?])
        },
    )?;
    linker.func_wrap(
        MODULE,
        "address",
        |caller: Caller<'_, Host>, offset: u64, bytes: u64| -> wasmtime::Result<u32> {
            let host = caller.data();
            let banks = host.run().banks();
            banks.check(Span::new(offset, bytes)).map_err(Ended)?;
            // An empty range is nowhere.
            if bytes == 0 {
                return Ok(0);
            }
            let address = host.window.address(&banks, offset);
            Ok(u32::try_from(address).map_err(|_| Ended(Fault::new(Cause::ForeignMemory, offset)))?)
        },
    )?;
    linker.func_wrap(
        MODULE,
        "result",
        |mut caller: Caller<'_, Host>, index: u32, value: u64| -> wasmtime::Result<()> {
            let index = word(index)?;
            caller.data_mut().run_mut().set_result(index, value);
            Ok(())
        },
    )?;
    linker.func_wrap(MODULE, "progress", |caller: Caller<'_, Host>, done: u64| {
        caller.data().run().progress(done);
    })?;
    linker.func_wrap(MODULE, "traffic", |mut caller: Caller<'_, Host>, read: u64, written: u64| {
        caller.data_mut().run_mut().note_traffic(read, written);
    })?;
    linker.func_wrap(
        MODULE,
        "safe_point",
        |mut caller: Caller<'_, Host>, pointer: u32| -> wasmtime::Result<()> {
            let host = caller.data_mut();
            let state = host.read_words(pointer)?;
            Ok(host.safe_point(state)?)
        },
    )?;
    linker.func_wrap(
        MODULE,
        RESUME,
        |mut caller: Caller<'_, Host>, pointer: u32| -> wasmtime::Result<u32> {
            let host = caller.data_mut();
            let Some(state) = host.run().resume().copied() else { return Ok(0) };
            host.write_words(pointer, &state)?;
            host.state = state;
            Ok(1)
        },
    )?;
    linker.func_wrap(MODULE, "refuse", |_: Caller<'_, Host>, argument: u32| -> wasmtime::Result<()> {
        Err(Ended(Fault::new(Cause::Argument, u64::from(argument))).into())
    })?;
    Ok(linker)
}
