//! The imports of a module.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::kernel::KernelRun;
use wasmtime::{Caller, Engine, Linker, StoreLimits, StoreLimitsBuilder};

use crate::window::Window;
use crate::{MAX_TABLE_ELEMENTS, MAX_TABLES};

/// The import module; an incompatible change of an import increments the number.
pub(crate) const MODULE: &str = "millstream_1";

/// The import of kernels that can resume from another run's state.
pub(crate) const RESUME: &str = "resume";

/// Time for an interrupted module to reach a safe point; then it is ended or paused where it is.
const GRACE: Duration = Duration::from_millis(100);

/// The region's side of one run.
pub(crate) struct Host {
    /// The run that the store was made for; it outlives the store.
    run: *mut KernelRun<'static>,
    /// The argument words that the module sees.
    arguments: KernelWords,
    window: Arc<Window>,
    /// State words of the latest safe point.
    state: KernelWords,
    interrupted_since: Option<Instant>,
    limits: StoreLimits,
}

/// A fault that ends a run, other than a trap.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct RunFault(pub(crate) Fault);

impl Host {
    /// The host of a run.
    ///
    /// # Safety
    /// The run outlives the host, and has no other user meanwhile.
    pub(crate) unsafe fn new(run: &mut KernelRun<'_>, window: Arc<Window>) -> Host {
        let arguments = *run.arguments();
        // SAFETY: the caller's promise includes the reading half.
        unsafe { Host::with(std::ptr::from_mut(run).cast(), arguments, window) }
    }

    /// The host of a run that is shared: for modules whose imports only read the run ([`event_linker`]).
    ///
    /// # Safety
    /// The run outlives the host, and the module has no import that changes it.
    pub(crate) unsafe fn reading(run: &KernelRun<'_>, window: Arc<Window>) -> Host {
        // SAFETY: as the caller promises; nothing is written through the pointer.
        unsafe { Host::with(std::ptr::from_ref(run).cast_mut().cast(), *run.arguments(), window) }
    }

    /// # Safety
    /// The run outlives the host, and may be used as the module's imports do.
    unsafe fn with(run: *mut KernelRun<'static>, arguments: KernelWords, window: Arc<Window>) -> Host {
        let limits = StoreLimitsBuilder::new()
            .instances(1)
            .memories(1)
            .memory_size(window.size())
            .tables(MAX_TABLES)
            .table_elements(MAX_TABLE_ELEMENTS)
            .build();
        Host { run, arguments, window, state: KernelWords::default(), interrupted_since: None, limits }
    }

    /// Sets the argument words that the module sees.
    pub(crate) fn set_arguments(&mut self, arguments: &KernelWords) {
        self.arguments = *arguments;
    }

    /// Bounds of what one instance of the module may allocate.
    pub(crate) fn limits(&mut self) -> &mut StoreLimits {
        &mut self.limits
    }

    fn run(&self) -> &KernelRun<'static> {
        // SAFETY: see `new`.
        unsafe { &*self.run }
    }

    fn run_mut(&mut self) -> &mut KernelRun<'static> {
        // SAFETY: see `new`.
        unsafe { &mut *self.run }
    }

    /// The address of sixteen words at `pointer`.
    fn words_at(&self, pointer: u32) -> Result<*mut u8, RunFault> {
        let (start, bytes) = (pointer as usize, size_of::<KernelWords>());
        if start + bytes > self.window.size() {
            return Err(RunFault(Fault::new(Cause::AccessViolation, u64::from(pointer))));
        }
        Ok(self.window.base().wrapping_add(start))
    }

    fn read_words(&self, pointer: u32) -> Result<KernelWords, RunFault> {
        let from = self.words_at(pointer)?;
        let mut bytes = [0u8; size_of::<KernelWords>()];
        // SAFETY: the range is in the window.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        let (words, _) = bytes.as_chunks::<8>();
        Ok(std::array::from_fn(|index| u64::from_le_bytes(words[index])))
    }

    fn write_words(&self, pointer: u32, words: &KernelWords) -> Result<(), RunFault> {
        let to = self.words_at(pointer)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // SAFETY: the range is in the window.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn safe_point(&mut self, state: KernelWords) -> Result<(), RunFault> {
        self.state = state;
        self.interrupted_since = None;
        self.run().safe_point(&state).map_err(RunFault)
    }

    /// Checks, every millisecond, whether the module may continue.
    pub(crate) fn check_interrupt(&mut self) -> Result<(), RunFault> {
        if self.run().deadline().is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(RunFault(Fault::new(Cause::DeadlineExceeded, 0)));
        }
        if !self.run().interrupt_requested().load(Ordering::Relaxed) {
            self.interrupted_since = None;
            return Ok(());
        }
        let since = *self.interrupted_since.get_or_insert_with(Instant::now);
        if since.elapsed() < GRACE {
            return Ok(());
        }
        self.safe_point(self.state)
    }
}

/// Checks the index of a word.
fn word(index: u32) -> Result<usize, RunFault> {
    let index = index as usize;
    if index < KernelWords::default().len() {
        Ok(index)
    } else {
        Err(RunFault(Fault::new(Cause::InvalidArgument, index as u64)))
    }
}

/// The imports of a module with a function for events. They only read the run.
pub(crate) fn event_linker(engine: &Engine) -> wasmtime::Result<Linker<Host>> {
    let mut linker = Linker::new(engine);
    linker.func_wrap(
        MODULE,
        "argument",
        |caller: Caller<'_, Host>, index: u32| -> wasmtime::Result<u64> {
            Ok(caller.data().arguments[word(index)?])
        },
    )?;
    linker.func_wrap(MODULE, "refuse", |_: Caller<'_, Host>, argument: u32| -> wasmtime::Result<()> {
        Err(RunFault(Fault::new(Cause::InvalidArgument, u64::from(argument))).into())
    })?;
    Ok(linker)
}

/// The imports of a module that is run as a whole.
pub(crate) fn linker(engine: &Engine) -> wasmtime::Result<Linker<Host>> {
    let mut linker = event_linker(engine)?;
    linker.func_wrap(
        MODULE,
        "address",
        |caller: Caller<'_, Host>, offset: u64, bytes: u64| -> wasmtime::Result<u32> {
            let host = caller.data();
            let banks = host.run().banks();
            banks.check(MemoryRange::new(offset, bytes)).map_err(RunFault)?;
            // An empty range has no address.
            if bytes == 0 {
                return Ok(0);
            }
            let address = host.window.address(&banks, offset);
            Ok(u32::try_from(address).map_err(|_| RunFault(Fault::new(Cause::AccessViolation, offset)))?)
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
        caller.data().run().set_progress(done);
    })?;
    linker.func_wrap(MODULE, "traffic", |mut caller: Caller<'_, Host>, read: u64, written: u64| {
        caller.data_mut().run_mut().add_traffic(read, written);
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
    Ok(linker)
}
