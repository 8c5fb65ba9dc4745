//! `millstream card`: serve, use and monitor cards.

pub(crate) mod args;
mod names;
mod selftest;
mod session;
mod show;
mod watch;

use std::error::Error;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use millstream_card::checkpoint::{self, CheckpointSummary};
use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::info::CardInfo;
use millstream_card::{RemoteCard, RemoteError, RemoteOptions};
use millstream_card_abi::CardName;
use millstream_card_abi::codes::RegionState;
use millstream_card_server::backing::{BackingKind, DevicePaths, default_size};
use millstream_card_server::kernel::{BuiltinKernel, KernelLoader};
use millstream_card_server::{CardConfig, Lifetime, NetworkConfig, serve_with};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_rdma::loader::{self, ENV_PATH, VerbsLibrary};
use millstream_report::Replacement;
use millstream_site::Site;
use millstream_tls::Security;
use serde_json::json;

pub(crate) use self::args::CardOptions;
use self::args::{
    CardCommand, CheckpointOptions, GetOptions, LeaseOptions, LoadOptions, PutOptions, ServeOptions,
    StartOptions,
};
pub(crate) use self::names::Names;
use self::session::Session;
use crate::interrupt::Interrupt;
use crate::output::print_line;

type Outcome<T = ExitCode> = Result<T, Box<dyn Error>>;

pub(crate) fn run(options: &CardOptions, choice: Option<&DeviceSelector>) -> Outcome {
    let context = CommandContext::new(options, choice);
    match &options.command {
        CardCommand::Serve(serve) => self::serve(serve, &context),
        CardCommand::List => list(&context),
        CardCommand::Info(name) => {
            let info = CardInfo::of(&context.connect(&name.card)?.snapshot()?);
            if context.json {
                println!("{}", serde_json::to_string_pretty(&info)?);
            } else {
                print!("{}", show::whole(&info));
            }
            Ok(ExitCode::SUCCESS)
        }
        CardCommand::Lease(lease) => self::lease(lease, &context),
        CardCommand::Load(load) => self::load(load, &context),
        CardCommand::Start(start) => self::start(start, &context),
        CardCommand::Stop(name) => {
            let session = Session::resume(context.connect(&name.card.card)?)?;
            let ran = session.card().stop(name.region)?;
            let what = if ran { "stopped at a safe point" } else { "no kernel was running" };
            context
                .say(json!({ "region": name.region, "ran": ran }), format!("region {}: {what}", name.region));
            session.keep()
        }
        CardCommand::Watch(watch) => watch::run(watch, &context),
        CardCommand::Put(put) => self::put(put, &context),
        CardCommand::Get(get) => self::get(get, &context),
        CardCommand::Checkpoint(checkpoint) => save(checkpoint, &context),
        CardCommand::Restore(checkpoint) => restore(checkpoint, &context),
        CardCommand::Selftest(selftest) => selftest::run(selftest, &context),
    }
}

/// How commands find and reach cards.
struct CommandContext {
    names: Names,
    json: bool,
    choice: DeviceSelector,
}

impl CommandContext {
    fn new(options: &CardOptions, choice: Option<&DeviceSelector>) -> CommandContext {
        CommandContext {
            names: Names::new(options.site.as_deref()),
            json: options.json,
            choice: choice.cloned().unwrap_or_else(DeviceSelector::from_environment),
        }
    }

    fn site(&self) -> Outcome<Site> {
        self.names.site()
    }

    fn device(&self) -> Outcome<device::Device> {
        Ok(device::open(&self.choice)?)
    }

    fn connect(&self, card: &str) -> Outcome<RemoteCard> {
        let address = self.names.address(card)?;
        Ok(connect(&self.device()?, &address)?)
    }

    fn say(&self, json: serde_json::Value, text: impl std::fmt::Display) {
        if self.json {
            println!("{json}");
        } else {
            println!("{text}");
        }
    }
}

fn connect(device: &device::Device, address: &str) -> Result<RemoteCard, RemoteError> {
    let options = RemoteOptions { timeout: Duration::from_secs(5), ..RemoteOptions::default() };
    RemoteCard::connect(device, address, options)
}

/// Loaders of user-written kernels.
pub(crate) fn kernel_loaders() -> Vec<Arc<dyn KernelLoader>> {
    #[cfg(feature = "wasm")]
    let loader = wasm_loader();
    #[cfg(not(feature = "wasm"))]
    let loader = crate::features::NoWasm;
    vec![Arc::new(loader)]
}

/// Modules come from others: a process of this program compiles them, within limits.
#[cfg(feature = "wasm")]
pub(crate) fn wasm_loader() -> millstream_wasm::Wasm {
    // This program, also after another one took its path.
    let (program, arguments) = ("/proc/self/exe".into(), vec!["compile-module".into()]);
    millstream_wasm::Wasm::with_compiler(millstream_wasm::Compiler::Process { program, arguments })
}

/// The process that `wasm_loader` names.
#[cfg(feature = "wasm")]
pub(crate) fn compile_module() -> Outcome {
    use millstream_wasm::{MAX_COMPILE_SECONDS, MAX_COMPILER_BYTES, compile_for_parent};
    let code = compile_for_parent(MAX_COMPILE_SECONDS, MAX_COMPILER_BYTES)?;
    Ok(ExitCode::from(code as u8))
}

/// Kernels beyond those of every card.
fn kernels() -> Vec<BuiltinKernel> {
    #[cfg(feature = "torus")]
    return millstream_application_kernels::ALL.to_vec();
    #[cfg(not(feature = "torus"))]
    Vec::new()
}

fn serve(options: &ServeOptions, context: &CommandContext) -> Outcome {
    // The kernel does not copy between processes in memory of a GPU. This process stores packets to it, and processes of
    // this host that do not choose a path themselves follow it.
    let on_gpu = matches!(options.memory_kind, BackingKind::Cuda(_));
    if on_gpu && std::env::var_os(ENV_PATH).is_none() && matches!(loader::loaded(), VerbsLibrary::Soft(_)) {
        return Err(loader::restart(&[(ENV_PATH, "wire")]).into());
    }
    let name: CardName = options.name.parse()?;
    let device_paths = DevicePaths::default();
    let memory = match options.memory {
        Some(memory) => memory,
        None => default_size(&options.memory_kind, &device_paths)?.unwrap_or(8 << 30),
    };
    if options.banks == 0 || !memory.is_multiple_of(u64::from(options.banks) * 4096) {
        return Err(format!(
            "--memory {memory} --banks {}: each bank must be a multiple of 4096 bytes",
            options.banks
        )
        .into());
    }
    let mut config = CardConfig::new(name.clone(), memory / u64::from(options.banks));
    config.memory_kind = options.memory_kind.clone();
    config.device_paths = device_paths;
    config.bank_count = options.banks;
    config.bar2_bytes = options.bar2;
    config.regions = options.regions;
    config.prefault = options.prefault;
    config.spin = options.spin;
    config.lease_duration = options.lease;
    config.command_timeout = options.command_timeout;
    config.kernels = kernels();
    config.loaders = kernel_loaders();
    config.network = Some(NetworkConfig { device: context.device()?, address: options.listen.clone() });
    config.security = Security::from_environment()?.for_nodes(&options.nodes)?;
    // The first Ctrl-C ends the card in order: clients see the end of their connections.
    let (watch, mut asked) = io::pipe()?;
    config.lifetime = Lifetime::Launcher(watch.into());
    if options.end_with_input {
        let mut ended = asked.try_clone()?;
        std::thread::spawn(move || {
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            let _ = ended.write_all(&[0]);
        });
    }
    let interrupt = Interrupt::listen()?;
    std::thread::spawn(move || {
        while interrupt.flow().is_continue() {
            std::thread::sleep(Duration::from_millis(200));
        }
        let _ = asked.write_all(&[0]);
    });
    let json = context.json;
    serve_with(config, |address| {
        let address = address.map_or_else(String::new, |address| address.to_string());
        // The parent process may wait for this line; without a reader the card serves all the same.
        let _ = match json {
            true => {
                print_line!(
                    "{}",
                    json!({ "card": name.as_str(), "address": address, "pid": std::process::id() })
                )
            }
            false => print_line!("card {name} listens at {address} (pid {})", std::process::id()),
        };
    })?;
    Ok(ExitCode::SUCCESS)
}

fn list(context: &CommandContext) -> Outcome {
    let (site, device) = (context.site()?, context.device()?);
    let mut all = Vec::new();
    let mut reached = true;
    for entry in &site.cards {
        let info =
            connect(&device, &entry.address).and_then(|card| card.snapshot()).map(|bar0| CardInfo::of(&bar0));
        reached &= info.is_ok();
        all.push((entry, info));
    }
    if context.json {
        let list: Vec<_> = all
            .iter()
            .map(|(entry, info)| match info {
                Ok(info) => json!({ "name": entry.name, "address": entry.address, "info": info }),
                Err(error) => {
                    json!({ "name": entry.name, "address": entry.address, "error": error.to_string() })
                }
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&list)?);
    } else {
        println!("{}", show::HEAD);
        for (entry, info) in &all {
            match info {
                Ok(info) => println!("{}", show::line(&entry.name, &entry.address, info)),
                Err(error) => println!("{:<12} {:<22} {error}", entry.name, entry.address),
            }
        }
    }
    Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn lease(options: &LeaseOptions, context: &CommandContext) -> Outcome {
    let card = context.connect(&options.card.card)?;
    if options.revoke {
        let ended = card.revoke()?;
        let text = ended.map_or("the card is free".to_owned(), |epoch| format!("lease {epoch} is revoked"));
        context.say(json!({ "revoked": ended }), text);
        return Ok(ExitCode::SUCCESS);
    }
    if options.release {
        let session = Session::resume(card)?;
        let epoch = session.release()?;
        context.say(json!({ "released": epoch }), format!("lease {epoch} is released"));
        return Ok(ExitCode::SUCCESS);
    }
    let session = Session::acquire(card, options.duration, options.wait)?;
    let epoch = session.card().held().map_or(0, |held| held.epoch);
    let seconds = options.duration.as_secs_f64();
    context.say(
        json!({ "epoch": epoch, "seconds": seconds }),
        format!("lease {epoch} of card {}: expires {seconds} s after the latest command", options.card.card),
    );
    session.keep()
}

fn load(options: &LoadOptions, context: &CommandContext) -> Outcome {
    let session = Session::resume(context.connect(&options.region.card.card)?)?;
    let (card, region) = (session.card(), options.region.region);
    let file = Path::new(&options.kernel);
    let hash = if file.is_file() {
        let image = std::fs::read(file).map_err(|cause| format!("{}: {cause}", file.display()))?;
        let end = card.memory_bytes().saturating_sub(image.len() as u64) / 4096 * 4096;
        card.load(region, KernelSource::Image { image: &image, at: options.at.unwrap_or(end) })?
    } else {
        card.load(region, KernelSource::Builtin(&options.kernel))?
    };
    context.say(
        json!({ "region": region, "kernel": options.kernel, "hash": format!("{hash:016x}") }),
        format!("region {region}: {} is loaded, hash {hash:016x}", options.kernel),
    );
    session.keep()
}

fn start(options: &StartOptions, context: &CommandContext) -> Outcome {
    let session = Session::resume(context.connect(&options.region.card.card)?)?;
    let region = options.region.region;
    if let Some(problem) = cannot_start(session.card(), region)? {
        session.keep()?;
        return Err(format!("region {region}: {problem}").into());
    }
    let start = RunRequest {
        banks: options.banks,
        fuel: options.fuel,
        timeout: options.timeout,
        ..RunRequest::new(&options.arguments)
    };
    let rung = session.card().start(region, &start)?;
    match options.wait {
        None => {
            context.say(json!({ "region": region, "doorbell": rung }), format!("region {region}: started"))
        }
        Some(timeout) => match session.card().wait(rung, timeout) {
            Ok(results) => context.say(
                json!({ "region": region, "results": results }),
                format!("region {region}: done, results {results:?}"),
            ),
            Err(error) => {
                session.keep()?;
                return Err(error.into());
            }
        },
    }
    session.keep()
}

/// Why a region cannot run its kernel now. A region reads its next doorbell after a run, and a stop could not pass that.
fn cannot_start(card: &RemoteCard, region: u32) -> Result<Option<&'static str>, RemoteError> {
    if region >= card.hello().region_count {
        return Ok(None);
    }
    Ok(match card.snapshot()?.region_state(region) {
        Some(RegionState::Empty) => Some("no kernel is loaded; load one first: millstream card load"),
        Some(RegionState::Running | RegionState::Stopping | RegionState::Paused) => {
            Some("its kernel runs; end it first: millstream card stop")
        }
        _ => None,
    })
}

/// Size of the buffer for file transfers (bytes).
const PIECE: usize = 16 << 20;

fn put(options: &PutOptions, context: &CommandContext) -> Outcome {
    use std::io::Read as _;
    let session = Session::resume(context.connect(&options.card.card)?)?;
    let failed = |cause| format!("{}: {cause}", options.file.display());
    let mut file = std::fs::File::open(&options.file).map_err(failed)?;
    // Nothing is written of a file that is too long; the length of a pipe is not known.
    let (len, memory) = (file.metadata().map_err(failed)?.len(), session.card().memory_bytes());
    if options.offset.saturating_add(len) > memory {
        let (file, at) = (options.file.display(), options.offset);
        return Err(format!("{file}: {len} bytes at {at:#x} do not fit in the card's {memory} bytes").into());
    }
    let mut buffer = vec![0; PIECE];
    let mut at = options.offset;
    loop {
        let read = file.read(&mut buffer).map_err(failed)?;
        if read == 0 {
            break;
        }
        session.card().write(at, &buffer[..read])?;
        at += read as u64;
    }
    let bytes = at - options.offset;
    context.say(json!({ "bytes": bytes }), format!("{bytes} bytes written to {:#x}", options.offset));
    session.keep()
}

fn get(options: &GetOptions, context: &CommandContext) -> Outcome {
    let session = Session::resume(context.connect(&options.card.card)?)?;
    let failed = |cause| format!("{}: {cause}", options.file.display());
    let mut file = Replacement::create(&options.file)?;
    let mut buffer = vec![0; PIECE.min(options.bytes as usize)];
    let mut done = 0;
    while done < options.bytes {
        let len = (options.bytes - done).min(PIECE as u64) as usize;
        session.card().read(options.offset + done, &mut buffer[..len])?;
        file.write_all(&buffer[..len]).map_err(failed)?;
        done += len as u64;
    }
    file.commit()?;
    context.say(json!({ "bytes": done }), format!("{done} bytes written to {}", options.file.display()));
    session.keep()
}

fn save(options: &CheckpointOptions, context: &CommandContext) -> Outcome {
    let session = Session::resume(context.connect(&options.card.card)?)?;
    let summary = checkpoint::save(session.card(), &options.file, show::progress("saving"))?;
    tell("saved", &summary, context);
    session.keep()
}

fn restore(options: &CheckpointOptions, context: &CommandContext) -> Outcome {
    let session = Session::resume(context.connect(&options.card.card)?)?;
    let summary = checkpoint::restore(session.card(), &options.file, show::progress("restoring"))?;
    tell("restored", &summary, context);
    session.keep()
}

fn tell(what: &str, summary: &CheckpointSummary, context: &CommandContext) {
    let mut text = format!("{what}: {} of memory", show::bytes(summary.memory_bytes));
    for (region, kernel, progress) in &summary.running {
        text += &format!("\n  region {region}: {kernel} runs, progress {progress}");
    }
    for (region, kernel) in &summary.loaded {
        text += &format!("\n  region {region}: {kernel} is loaded");
    }
    context.say(json!({ what: summary }), text);
}
