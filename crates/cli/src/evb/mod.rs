//! `millstream evb`: runs of the event builder.

#[cfg(feature = "control")]
mod control;
#[cfg(feature = "control")]
mod ctl;
#[cfg(feature = "control")]
mod display;
mod files;
mod join;
mod outcome;
mod sink;
mod usage;

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use millstream_card_server::backing::{BackingKind, DevicePaths, check_mappable, default_size};
use millstream_card_server::kernel::gpu::check_ptx_for_events;
use millstream_card_server::{CardConfig, serve};
use millstream_evb::config::{
    CardField, ConfigError, ConfigFile, FunctionLanguage, KernelConfig, LandingCard, LandingTarget,
    RefusedCard, RunConfig,
};
use millstream_evb::core::BuIndex;
use millstream_evb::process::card::CardProcess;
use millstream_evb::process::child::Child;
use millstream_evb::process::launcher::{Launcher, RunEvent};
use millstream_evb::process::{OwnConfig, Sink, SinkError};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_rdma::loader;
use millstream_report::eprint_line;
use millstream_report::{
    Bytes, BytesPerSecond, MemcpyBaseline, Progress, RunReport, Style, save, table, throughput,
};
use millstream_shm::memcpy::{Pages, memcpy};

use crate::args::{EvbCommand, EvbRunOptions};
use crate::interrupt::Interrupt;
use crate::output::{is_standard_output, print, print_line};

pub(crate) use files::stored;
use usage::Usages;

pub(crate) fn run(command: &EvbCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        EvbCommand::Run(options) => {
            let config = check(read(&options.config, options.replay)?, options.launcher.is_some())?;
            let report = launch(&config, &launcher(options.launcher.as_deref())?)?;
            write_results(&report, options)?;
            Ok(exit_code(&report))
        }
        EvbCommand::Join(options) => join::join(options),
        EvbCommand::Check { config } => {
            let config = load(config, None)?;
            check_device(&config)?;
            describe(&config);
            Ok(ExitCode::SUCCESS)
        }
        EvbCommand::Files { directory, recover } => files::list(directory, *recover),
        EvbCommand::Unpack { batches, out, replace } => files::unpack_batches(batches, out, *replace),
        #[cfg(feature = "control")]
        EvbCommand::Control(options) => control::run(options),
        #[cfg(feature = "control")]
        EvbCommand::Ctl(options) => ctl::run(options),
        EvbCommand::Unit { words, .. } if words.first().is_some_and(|role| role == "worker") => {
            worker(words.get(1).map_or("0", String::as_str))
        }
        EvbCommand::Unit { own, words } => {
            let own = own.as_deref().map(own_config).transpose()?;
            let good = Child::from_arguments(words)?.run_within(own.as_ref(), &make_sink, &serve_card)?;
            Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// The configuration that the agent of a rank has read.
fn own_config(path: &Path) -> Result<OwnConfig, String> {
    let read = std::fs::read(path).map_err(|error| error.to_string());
    let config = read.and_then(|json| serde_json::from_slice(&json).map_err(|error| error.to_string()));
    Ok(OwnConfig::new(config.map_err(|error| format!("the configuration of this rank: {error}"))?))
}

/// A software trigger that accepts all events and computes for some time on each: for `millstream bench evb-load`.
fn worker(busy: &str) -> Result<ExitCode, Box<dyn Error>> {
    let busy = Duration::from_micros(busy.parse().map_err(|_| format!("{busy:?} is not a time in µs"))?);
    millstream_software_trigger::serve(|event| {
        let begin = processor_time();
        let mut sum = 0u64;
        while processor_time() - begin < busy {
            for fragment in event.fragments() {
                sum += u64::from(fragment.payload().first().copied().unwrap_or(0));
            }
        }
        std::hint::black_box(sum);
        true
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Makes the sink of a builder unit, which shows its events under run control.
fn make_sink(config: &RunConfig, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let sink = sink::make(config, bu)?;
    #[cfg(feature = "control")]
    let sink = display::wrap(config, bu, sink);
    Ok(sink)
}

/// Serves a card of the run in this process.
fn serve_card(card: &CardProcess) -> Result<(), Box<dyn Error>> {
    let mut config = CardConfig::for_launcher(card.name.clone(), card.memory.0, card.spin)?;
    config.memory_kind = card.kind.parse()?;
    config.loaders = crate::card::kernel_loaders();
    serve(config)?;
    Ok(())
}

/// Checks the module of a function for events.
#[cfg(feature = "wasm")]
fn check_function(image: &[u8]) -> Result<(), String> {
    crate::card::wasm_loader().check_for_events(image).map(drop).map_err(|error| error.to_string())
}

/// Refuses the module of a function for events.
#[cfg(not(feature = "wasm"))]
fn check_function(_image: &[u8]) -> Result<(), String> {
    Err("this program was built without the feature `wasm`".to_owned())
}

/// Refuses a card whose device is absent on this host, or whose module is no function for events.
fn inspect_card(card: &LandingCard) -> Result<(), RefusedCard> {
    let refuse = |field, problem: String| Err(RefusedCard { field, problem });
    let kind: BackingKind = match card.kind.parse() {
        Ok(kind) => kind,
        Err(error) => return refuse(CardField::Kind, format!("{error}")),
    };
    // Builder units read packets' headers from mapped memory.
    if let Err(error) = check_mappable(&kind, &DevicePaths::default()) {
        return refuse(CardField::Kind, error.to_string());
    }
    match (&card.kernel, &kind) {
        (KernelConfig::Function { language: FunctionLanguage::Wasm, .. }, BackingKind::Emulated)
        | (KernelConfig::Function { language: FunctionLanguage::Ptx, .. }, BackingKind::Cuda(_)) => {}
        (KernelConfig::Function { language: FunctionLanguage::Wasm, .. }, _) => {
            let problem =
                "the system does not map device memory into a module; use a card of kind \"emulated\"";
            return refuse(CardField::Kind, format!("{kind}: {problem}"));
        }
        (KernelConfig::Function { language: FunctionLanguage::Ptx, .. }, _) => {
            let problem = "only a GPU runs PTX; use a card of kind \"cuda:N\"";
            return refuse(CardField::Kind, format!("{kind}: {problem}"));
        }
        _ => {}
    }
    match default_size(&kind, &DevicePaths::default()) {
        Err(error) => return refuse(CardField::Kind, error.to_string()),
        Ok(Some(size)) if size < card.memory.0 => {
            return refuse(
                CardField::Memory,
                format!("{} B do not fit into the {size} B of {kind}", card.memory.0),
            );
        }
        Ok(_) => {}
    }
    if let KernelConfig::Function { language, module, .. } = &card.kernel {
        let check = match language {
            FunctionLanguage::Wasm => check_function,
            FunctionLanguage::Ptx => check_ptx_for_events,
        };
        let checked =
            std::fs::read(module).map_err(|cause| cause.to_string()).and_then(|image| check(&image));
        if let Err(problem) = checked {
            return refuse(CardField::Module, format!("{}: {problem}", module.display()));
        }
    }
    Ok(())
}

/// The exit code of a run.
pub(crate) fn exit_code(report: &RunReport) -> ExitCode {
    if report.derived().success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Reads and checks a configuration. `replay` overrides its value.
pub(crate) fn load(path: &Path, replay: Option<u64>) -> Result<RunConfig, Box<dyn Error>> {
    Ok(check(read(path, replay)?, false)?)
}

/// Checks a configuration, as far as this host can: cards and addresses of a run on several hosts may be those of another one.
fn check(file: ConfigFile, is_of_several_hosts: bool) -> Result<RunConfig, ConfigError> {
    if is_of_several_hosts { file.check_on_one_of_several_hosts() } else { file.check_with(&inspect_card) }
}

/// Reads a configuration. `replay` overrides its value.
fn read(path: &Path, replay: Option<u64>) -> Result<ConfigFile, Box<dyn Error>> {
    let mut config = ConfigFile::load(path)?;
    if let Some(replay) = replay {
        config.set_replay(replay)?;
    }
    Ok(config)
}

/// Runs a checked configuration on this host and reports on it.
pub(crate) fn run_checked(config: &RunConfig) -> Result<RunReport, Box<dyn Error>> {
    launch(config, &launcher(None)?)
}

/// Runs a checked configuration with each process started by `launcher`.
fn launch(config: &RunConfig, launcher: &Launcher) -> Result<RunReport, Box<dyn Error>> {
    make_output_directory(config)?;
    for warning in config.warnings() {
        eprint_line!("warning: {warning}");
    }
    let baseline = baseline(config)?;
    let progress = Progress::new(&config.name, config.plan.events.get());
    let mut usages = Usages::default();
    let bytes_per_event = outcome::payload_per_event(config);
    let interrupt = Interrupt::listen()?;
    let result = launcher.run_while(config, &mut |event| {
        usages.watch(event);
        match event {
            RunEvent::Progress(sample) => {
                let events = sample.done.events();
                let payload = (events as f64 * bytes_per_event) as u64;
                progress.update(events, Bytes(payload), sample.elapsed);
            }
            RunEvent::SourcesSilent(unit, is_silent) => {
                let what = match (is_silent, config.source_timeout) {
                    (false, _) => "send again",
                    (true, Some(_)) => "are silent; the run goes on without them",
                    (true, None) => {
                        "are silent; the run waits for them (recovery.source_timeout_ms is not set)"
                    }
                };
                progress.print(&format!("the sources of {} {what}", config.unit_name(*unit)));
            }
            RunEvent::ErrorLine { process, line } => {
                progress.print(&format!("{}: {line}", outcome::name(config, process)));
            }
            _ => {}
        }
        interrupt.flow()
    });
    drop(progress);
    let problems = files::complete(config);
    Ok(outcome::report(config, &result?, &usages, (Some(baseline), problems)))
}

fn make_output_directory(config: &RunConfig) -> Result<(), Box<dyn Error>> {
    let Some(output) = &config.output else { return Ok(()) };
    std::fs::create_dir_all(&output.directory)
        .map_err(|error| format!("cannot create {}: {error}", output.directory.display()))?;
    // Left by an earlier run whose launcher was killed as well.
    let bases: Vec<PathBuf> = files::all_event_files(config).collect();
    files::recover_earlier(&output.directory, &bases)?;
    Ok(files::remove_earlier_run(config)?)
}

/// Starts this program for each process of a run, through `process_launcher` if there is one.
fn launcher(process_launcher: Option<&Path>) -> Result<Launcher, String> {
    let mut program =
        std::env::current_exe().map_err(|error| format!("cannot find the path of this program: {error}"))?;
    let mut arguments = ["evb", "unit"].map(OsString::from).to_vec();
    if let Some(process_launcher) = process_launcher {
        arguments.insert(0, std::mem::replace(&mut program, process_launcher.to_owned()).into());
    }
    Ok(Launcher { program, arguments })
}

/// Rate of memcpy for comparison. A block is one source's part of a batch. The source buffer is as large as
/// an input, the destination as large as the slots, both at most [`BASELINE_BYTES`].
fn baseline(config: &RunConfig) -> Result<MemcpyBaseline, Box<dyn Error>> {
    const TIME: Duration = Duration::from_millis(300);
    /// Larger than caches. The slots of other hosts may exceed this one's memory.
    const BASELINE_BYTES: usize = 1 << 30;
    let batch = u64::from(config.plan.batch.get());
    let inputs: u64 = outcome::input_bytes(config);
    let fragment = outcome::payload_per_event(config) / config.layout.packets.len().max(1) as f64;
    let block = (fragment as u64 * batch).max(64) as usize;
    let slots: u64 = (0..config.plan.initial_builders()).map(|bu| config.landing_bytes(bu).0).sum();
    let bounded = |bytes: u64| (bytes as usize).min(BASELINE_BYTES).max(block);
    let source = bounded(inputs / config.readouts.len().max(1) as u64);
    let rate = memcpy(Pages::Huge, block, source, bounded(slots), TIME)?;
    Ok(MemcpyBaseline { block_bytes: Bytes(block as u64), bytes_per_s: BytesPerSecond(rate * 1e9) })
}

/// Prints the report as a table, or as JSON if that goes to standard output, and saves it where the options say.
fn write_results(report: &RunReport, options: &EvbRunOptions) -> Result<(), Box<dyn Error>> {
    let prints_json = options.json.as_deref().is_some_and(is_standard_output);
    // An error here must not cost the files.
    let printed = match prints_json {
        true => print(format_args!("{}", report.to_json())),
        false => print(format_args!("{}", table::render(report, Style::of(&std::io::stdout())))),
    };
    if let Some(path) = options.json.as_deref().filter(|_| !prints_json) {
        save(path, &report.to_json())?;
        print_line!("JSON: {}", path.display())?;
    }
    if let Some(path) = &options.svg {
        save(path, &throughput::draw(report))?;
        print_line!("picture: {}", path.display())?;
    }
    Ok(printed?)
}

/// Opens the run's RDMA device and closes it.
fn check_device(config: &RunConfig) -> Result<(), Box<dyn Error>> {
    let selector = device_selector(config);
    // The library was loaded for the environment; the configuration may need the other one.
    loader::ensure(&selector)?;
    device::open(&selector)?;
    Ok(())
}

/// The run's RDMA device: `--device`, or `run.device` of the configuration.
fn device_selector(config: &RunConfig) -> DeviceSelector {
    match config.device.as_str() {
        "auto" => DeviceSelector::from_environment(),
        name => name.parse().unwrap_or_else(|never: std::convert::Infallible| match never {}),
    }
}

/// Prints the units and memory of a run without starting it.
fn describe(config: &RunConfig) {
    let units = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    println!(
        "{}: {}, {}, {} sources, {} events in batches of {}",
        config.name,
        units(config.readouts.len(), "readout unit"),
        units(config.initial_builders().len(), "builder unit"),
        config.layout.packets.len(),
        config.plan.events.get(),
        config.plan.batch,
    );
    for (index, builder) in config.initial_builders().iter().enumerate() {
        let place = match &builder.landing {
            LandingTarget::Host => "host memory".to_owned(),
            LandingTarget::Card(card) => format!("{} of {} B", card.name, card.memory.0),
        };
        println!(
            "  {}: {} slots of {} B, {} B of {place}",
            builder.name,
            config.plan.slots[index],
            config.layout.slot_bytes.0,
            config.landing_bytes(index).0,
        );
    }
    for warning in config.warnings() {
        println!("warning: {warning}");
    }
    if let Err(error) = files::check_earlier_run(config) {
        println!("warning: {error}");
    }
    println!("configuration is valid");
}

/// The folder of a file.
pub(crate) fn folder(path: &Path) -> PathBuf {
    path.parent().map_or_else(PathBuf::new, Path::to_owned)
}
