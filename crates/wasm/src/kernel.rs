//! A module, compiled, and one run of it.
//!
//! A module exports `run`, or the function for events `event` (`event`).

use std::sync::Arc;

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::kernel::events::function::{EventLoop, FLAGS};
use millstream_card_server::kernel::events::{EventRun, run_on_events};
use millstream_card_server::kernel::{Kernel, KernelRun};
use wasmtime::{
    Config, Engine, ExternType, Instance, InstancePre, Module, OptLevel, Store, Trap, UpdateDeadline,
};

use crate::compiler::Compiler;
use crate::event::{self, WasmEventFunction};
use crate::host::{self, Host, RunFault};
use crate::ticker::EpochGuard;
use crate::window::{GUARD_BYTES, WASM_PAGE, Window, WindowAllocator, bank_bytes};
use crate::{ADDRESSABLE_BYTES, ImageError, MAX_IMAGE_BYTES, MAX_OWN_BYTES, MAX_TABLE_ELEMENTS, MAX_TABLES};

/// errno values, the same on all Linux architectures.
const EFAULT: i32 = 14;
const EINVAL: i32 = 22;

/// Stack of a module (bytes).
const STACK_BYTES: usize = 512 << 10;

/// A kernel that is a WebAssembly module.
pub(crate) struct WasmKernel {
    image: Vec<u8>,
    compiler: Compiler,
    name: String,
    events: EventLoop,
    plain: Compiled,
    /// The module compiled with fuel metering; created at the first run with fuel.
    counting: Option<Compiled>,
}

/// A module, compiled with or without fuel metering.
struct Compiled {
    engine: Engine,
    allocator: Arc<WindowAllocator>,
    module: InstancePre<Host>,
    entry: EntryPoint,
    /// The memory that the module declares.
    declared: usize,
    /// That and the host's tables.
    own: usize,
    resumes: bool,
}

/// What a module exports to be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryPoint {
    /// `run`, once per run.
    Run,
    /// `event`, once per event of a batch.
    Event,
}

impl WasmKernel {
    pub(crate) fn new(image: &[u8], compiler: &Compiler) -> Result<WasmKernel, ImageError> {
        if image.len() > MAX_IMAGE_BYTES {
            return Err(ImageError::TooLarge(image.len()));
        }
        let plain = Compiled::new(image, compiler, false)?;
        let name = plain.module.module().name().unwrap_or("wasm").to_owned();
        let (image, compiler) = (image.to_vec(), compiler.clone());
        Ok(WasmKernel { image, compiler, name, events: EventLoop::default(), plain, counting: None })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the module has a function for events.
    pub(crate) fn is_for_events(&self) -> bool {
        self.plain.entry == EntryPoint::Event
    }
}

impl Kernel for WasmKernel {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let compiled = match (run.fuel(), &mut self.counting) {
            (None, _) => &self.plain,
            (Some(_), Some(compiled)) => compiled,
            (Some(_), slot) => {
                // Metering makes the code larger, so a module may be too costly only with it.
                let compiled = Compiled::new(&self.image, &self.compiler, true);
                slot.insert(compiled.map_err(|error| error.fault(&self.image))?)
            }
        };
        match compiled.entry {
            EntryPoint::Run => compiled.run(run),
            EntryPoint::Event => {
                let mut fuel_used = 0;
                let outcome = run_on_events(run, FLAGS, |events| {
                    compiled.run_events(events, &mut self.events, &mut fuel_used)
                });
                run.add_fuel(fuel_used);
                outcome
            }
        }
    }
}

impl Compiled {
    fn new(image: &[u8], compiler: &Compiler, counts: bool) -> Result<Compiled, ImageError> {
        // The engine needs its allocator before it has the module that says which entry point it has.
        let has_event = |module: &Module| module.get_export(event::EXPORT).is_some();
        let words = |error: wasmtime::Error| ImageError::Module(format!("{error:#}"));
        let artifact = compiler.compile(image, counts)?;
        let link = |host_bytes| -> Result<_, ImageError> {
            let allocator = Arc::new(WindowAllocator::with_host_bytes(host_bytes));
            let engine = Engine::new(&config(allocator.clone(), counts)).map_err(words)?;
            // SAFETY: the compiler made it, and nobody has changed it since.
            let module = unsafe { Module::deserialize(&engine, &artifact) }.map_err(words)?;
            Ok((allocator, engine, module))
        };
        let (mut allocator, mut engine, mut module) = link(0)?;
        let entry = if has_event(&module) { EntryPoint::Event } else { EntryPoint::Run };
        if entry == EntryPoint::Event {
            (allocator, engine, module) = link(event::HOST_BYTES)?;
        }
        let declared = own_bytes(&module)?;
        let own = declared + if entry == EntryPoint::Event { event::HOST_BYTES } else { 0 };
        check_tables(&module)?;
        check_entry(&module, entry)?;
        let imports = |import: wasmtime::ImportType<'_>| {
            import.module() == host::MODULE && import.name() == host::RESUME
        };
        let resumes = module.imports().any(imports);
        let linker = match entry {
            EntryPoint::Run => host::linker(&engine),
            EntryPoint::Event => host::event_linker(&engine),
        };
        let module = linker.and_then(|linker| linker.instantiate_pre(&module)).map_err(words)?;
        Ok(Compiled { engine, allocator, module, entry, declared, own, resumes })
    }

    /// Maps the module's memory and the banks of a run.
    fn window(&self, run: &KernelRun<'_>) -> Result<Arc<Window>, Fault> {
        let banks = run.banks();
        let total = bank_bytes(&banks).ok_or(Fault::new(Cause::NoSuchBank, banks.mask()))?;
        if total.saturating_add(self.own + WASM_PAGE) > ADDRESSABLE_BYTES {
            return Err(Fault::new(Cause::KernelTooLarge, total as u64));
        }
        let window = self.allocator.prepare(self.own, &banks);
        // The kernel refuses a second mapping of device memory.
        window.map_err(|error| match error.raw_os_error() {
            None | Some(EFAULT | EINVAL) => Fault::new(Cause::MemoryNotMapped, banks.mask()),
            Some(_) => Fault::new(Cause::KernelTooLarge, total as u64),
        })
    }

    /// A store with the limits of a run.
    fn store(&self, host: Host, fuel: Option<u64>) -> Store<Host> {
        let mut store = Store::new(&self.engine, host);
        store.limiter(|host| host.limits());
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut context| {
            context.data_mut().check_interrupt()?;
            Ok(UpdateDeadline::Continue(1))
        });
        if let Some(fuel) = fuel {
            store.set_fuel(fuel).expect("this engine meters fuel");
        }
        store
    }

    /// Calls the function for the events of a batch.
    fn run_events(
        &self,
        events: &mut EventRun<'_, '_>,
        event_loop: &mut EventLoop,
        fuel_used: &mut u64,
    ) -> Result<(), Fault> {
        let run = events.run();
        let window = self.window(run)?;
        let fuel = run.fuel();
        // SAFETY: the store, and the host in it, end before this function does. `event_linker` has no import that
        // changes the run.
        let host = unsafe { Host::reading(run, window.clone()) };
        let mut store = self.store(host, fuel);
        let ticking = EpochGuard::start(&self.engine);
        let outcome = self.instantiate(&mut store, &window).and_then(|instance| {
            WasmEventFunction::new(&mut store, &instance, &window, self.declared, run.banks())
        });
        let outcome = outcome
            .map_err(|error| fault(&error, fuel.unwrap_or(0)))
            .and_then(|mut function| event_loop.run(events, &mut function));
        drop(ticking);
        if let Some(fuel) = fuel {
            *fuel_used = fuel - store.get_fuel().unwrap_or(0);
        }
        outcome
    }

    fn run(&self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        if let Some(state) = run.resume()
            && !self.resumes
        {
            return Err(Fault::new(Cause::KernelNotResumable, state[0]));
        }
        let window = self.window(run)?;
        let fuel = run.fuel();
        // SAFETY: the store, and the host in it, end before this function does; until then `run` is not used
        // here.
        let host = unsafe { Host::new(run, window.clone()) };
        let mut store = self.store(host, fuel);
        let ticking = EpochGuard::start(&self.engine);
        let outcome = self
            .instantiate(&mut store, &window)
            .and_then(|instance| instance.get_typed_func::<(), ()>(&mut store, "run")?.call(&mut store, ()));
        drop(ticking);
        let left = fuel.map(|_| store.get_fuel().unwrap_or(0));
        drop(store);
        if let (Some(fuel), Some(left)) = (fuel, left) {
            run.add_fuel(fuel - left);
        }
        outcome.map_err(|error| fault(&error, fuel.unwrap_or(0)))
    }

    /// Instantiates the module and adds the banks to its memory.
    fn instantiate(&self, store: &mut Store<Host>, window: &Window) -> wasmtime::Result<Instance> {
        let instance = self.module.instantiate(&mut *store)?;
        let memory = instance.get_memory(&mut *store, "memory").expect("the export was checked");
        memory.grow(&mut *store, ((window.size() - self.declared) / WASM_PAGE) as u64)?;
        Ok(instance)
    }
}

pub(crate) fn config(allocator: Arc<WindowAllocator>, counts: bool) -> Config {
    let mut config = Config::new();
    config
        .with_host_memory(allocator)
        .memory_reservation(ADDRESSABLE_BYTES as u64)
        .memory_guard_size(GUARD_BYTES as u64)
        .guard_before_linear_memory(false)
        .memory_may_move(false)
        .memory_init_cow(false)
        .max_wasm_stack(STACK_BYTES)
        .epoch_interruption(true)
        .consume_fuel(counts)
        .cranelift_opt_level(OptLevel::Speed)
        .wasm_multi_memory(false)
        .wasm_memory64(false)
        // Its results depend on the processor.
        .wasm_relaxed_simd(false);
    config
}

/// The size of the module's only memory.
fn own_bytes(module: &Module) -> Result<usize, ImageError> {
    let problem = |text: &str| Err(ImageError::Module(text.to_owned()));
    let Some(ExternType::Memory(memory)) = module.get_export("memory") else {
        return problem("module exports no memory `memory`");
    };
    if module.imports().any(|import| matches!(import.ty(), ExternType::Memory(_))) {
        return problem("module imports its memory; it must define and export it");
    }
    if memory.maximum().is_some() {
        return problem("memory has a maximum, so the banks cannot be added");
    }
    let bytes = memory.minimum().saturating_mul(WASM_PAGE as u64);
    if bytes > MAX_OWN_BYTES as u64 {
        return Err(ImageError::MemoryTooLarge(bytes));
    }
    Ok(bytes as usize)
}

/// Checks the function that is called.
fn check_entry(module: &Module, entry: EntryPoint) -> Result<(), ImageError> {
    let problem = |text: &str| Err(ImageError::Module(text.to_owned()));
    match (entry, module.get_export("run"), module.get_export(event::EXPORT)) {
        (EntryPoint::Event, Some(_), _) => {
            problem("module exports both `run` and `event`; it must export one")
        }
        (EntryPoint::Event, None, Some(ExternType::Func(function))) if event::has_signature(&function) => {
            Ok(())
        }
        (EntryPoint::Event, ..) => problem("export `event` is no function (i64, i32, i32) -> i32"),
        (EntryPoint::Run, Some(ExternType::Func(run)), _)
            if run.params().len() == 0 && run.results().len() == 0 =>
        {
            Ok(())
        }
        (EntryPoint::Run, ..) => problem(
            "module exports no function `run` without parameters and results, and no function `event` for events",
        ),
    }
}

/// Checks the tables that the module starts with. The store's limits bound their growth.
fn check_tables(module: &Module) -> Result<(), ImageError> {
    let required = module.resources_required();
    if required.num_tables as usize > MAX_TABLES {
        return Err(ImageError::TooManyTables(required.num_tables));
    }
    match required.max_initial_table_size {
        Some(elements) if elements > MAX_TABLE_ELEMENTS as u64 => Err(ImageError::TableTooLarge(elements)),
        _ => Ok(()),
    }
}

/// The fault of a failed run.
pub(crate) fn fault(error: &wasmtime::Error, fuel: u64) -> Fault {
    if let Some(RunFault(fault)) = error.downcast_ref() {
        return *fault;
    }
    let number = match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => return Fault::new(Cause::FuelExhausted, fuel),
        Some(Trap::MemoryOutOfBounds) => return Fault::new(Cause::AccessViolation, 0),
        Some(Trap::UnreachableCodeReached) => 1,
        Some(Trap::StackOverflow) => 2,
        Some(Trap::IntegerDivisionByZero) => 3,
        Some(Trap::IntegerOverflow) => 4,
        Some(Trap::BadConversionToInteger) => 5,
        Some(Trap::TableOutOfBounds) => 6,
        Some(Trap::IndirectCallToNull) => 7,
        Some(Trap::BadSignature) => 8,
        _ => 0,
    };
    Fault::new(Cause::KernelTrapped, number)
}
