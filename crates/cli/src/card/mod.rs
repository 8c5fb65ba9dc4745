//! `millstream card`: be a card, use cards, look at them.

mod args;
mod names;
mod selftest;
mod session;
mod show;
mod watch;

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use millstream_card::backing::{Roots, natural_size};
use millstream_card::kernel::Registry;
use millstream_card::net::checkpoint::{self, Summary};
use millstream_card::net::control::{KernelSource, Start};
use millstream_card::net::info::CardInfo;
use millstream_card::net::{RemoteCard, RemoteError, RemoteOptions};
use millstream_card::{Config, Lifetime, Network, serve_with};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_site::Site;
use serde_json::json;

pub(crate) use self::args::CardOptions;
use self::args::{
    CardCommand, CheckpointOptions, GetOptions, LeaseOptions, LoadOptions, PutOptions, ServeOptions,
    StartOptions,
};
pub(crate) use self::names::Names;
use self::session::Session;
use crate::interrupt::Interrupt;

type Outcome<T = ExitCode> = Result<T, Box<dyn Error>>;

pub(crate) fn run(options: &CardOptions, choice: Option<&DeviceSelector>) -> Outcome {
    let place = Place::new(options, choice);
    match &options.command {
        CardCommand::Serve(serve) => be(serve, &place),
        CardCommand::List => list(&place),
        CardCommand::Info(name) => {
            let info = CardInfo::of(&place.connect(&name.card)?.snapshot()?);
            if place.json {
                println!("{}", serde_json::to_string_pretty(&info)?);
            } else {
                print!("{}", show::whole(&info));
            }
            Ok(ExitCode::SUCCESS)
        }
        CardCommand::Lease(lease) => self::lease(lease, &place),
        CardCommand::Load(load) => self::load(load, &place),
        CardCommand::Start(start) => self::start(start, &place),
        CardCommand::Stop(name) => {
            let session = Session::go_on(place.connect(&name.card.card)?)?;
            let ran = session.card().stop(name.region)?;
            let what = if ran { "stopped at a safe point" } else { "nothing ran" };
            place
                .say(json!({ "region": name.region, "ran": ran }), format!("region {}: {what}", name.region));
            session.keep()
        }
        CardCommand::Watch(watch) => watch::run(watch, &place),
        CardCommand::Put(put) => self::put(put, &place),
        CardCommand::Get(get) => self::get(get, &place),
        CardCommand::Checkpoint(checkpoint) => save(checkpoint, &place),
        CardCommand::Restore(checkpoint) => restore(checkpoint, &place),
        CardCommand::Selftest(selftest) => selftest::run(selftest, &place),
    }
}

/// What commands need to find and reach cards.
struct Place {
    names: Names,
    json: bool,
    choice: DeviceSelector,
}

impl Place {
    fn new(options: &CardOptions, choice: Option<&DeviceSelector>) -> Place {
        Place {
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
    let options = RemoteOptions { patience: Duration::from_secs(5), ..RemoteOptions::default() };
    RemoteCard::connect(device, address, options)
}

fn be(options: &ServeOptions, place: &Place) -> Outcome {
    let name: millstream_card::CardName = options.name.parse()?;
    let roots = Roots::default();
    let memory = match options.memory {
        Some(memory) => memory,
        None => natural_size(&options.kind, &roots)?.unwrap_or(8 << 30),
    };
    if options.banks == 0 || !memory.is_multiple_of(u64::from(options.banks) * 4096) {
        return Err(format!(
            "--memory {memory} --banks {}: each bank must be a multiple of 4096 bytes",
            options.banks
        )
        .into());
    }
    let mut config = Config::new(name.clone(), memory / u64::from(options.banks), Registry::builtin());
    config.kind = options.kind.clone();
    config.roots = roots;
    config.bank_count = options.banks;
    config.dma_bytes = options.dma;
    config.regions = options.regions;
    config.prefault = options.prefault;
    config.spin = options.spin;
    config.lease = options.lease;
    config.command_limit = options.command_limit;
    config.loaders = vec![Arc::new(millstream_wasm::Wasm)];
    config.network = Some(Network { device: place.device()?, address: options.listen.clone() });
    // The first Ctrl-C ends the card in order: nodes see their connections end.
    let (watch, asked) = std::io::pipe()?;
    config.lifetime = Lifetime::Launcher(watch.into());
    let interrupt = Interrupt::listen()?;
    std::thread::spawn(move || {
        while interrupt.flow().is_continue() {
            std::thread::sleep(Duration::from_millis(200));
        }
        drop(asked);
    });
    let json = place.json;
    serve_with(config, |address| {
        let address = address.map_or_else(String::new, |address| address.to_string());
        if json {
            println!(
                "{}",
                json!({ "card": name.as_str(), "address": address, "process": std::process::id() })
            );
        } else {
            println!("card {name} listens at {address} (process {})", std::process::id());
        }
        // Whoever started us may be waiting for this line.
        let _ = std::io::stdout().flush();
    })?;
    Ok(ExitCode::SUCCESS)
}

fn list(place: &Place) -> Outcome {
    let (site, device) = (place.site()?, place.device()?);
    let mut all = Vec::new();
    let mut reached = true;
    for entry in &site.cards {
        let info =
            connect(&device, &entry.address).and_then(|card| card.snapshot()).map(|bar0| CardInfo::of(&bar0));
        reached &= info.is_ok();
        all.push((entry, info));
    }
    if place.json {
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

fn lease(options: &LeaseOptions, place: &Place) -> Outcome {
    let card = place.connect(&options.card.card)?;
    if options.revoke {
        let ended = card.revoke()?;
        let text =
            ended.map_or("nobody holds the card".to_owned(), |epoch| format!("lease {epoch} is ended"));
        place.say(json!({ "revoked": ended }), text);
        return Ok(ExitCode::SUCCESS);
    }
    if options.release {
        let session = Session::go_on(card)?;
        let epoch = session.end()?;
        place.say(json!({ "released": epoch }), format!("lease {epoch} is given back"));
        return Ok(ExitCode::SUCCESS);
    }
    let session = Session::take(card, options.duration, options.wait)?;
    let epoch = session.card().held().map_or(0, |held| held.epoch);
    let seconds = options.duration.as_secs_f64();
    place.say(
        json!({ "epoch": epoch, "seconds": seconds }),
        format!("lease {epoch} of card {}: {seconds} s from the latest command on", options.card.card),
    );
    session.keep()
}

fn load(options: &LoadOptions, place: &Place) -> Outcome {
    let session = Session::go_on(place.connect(&options.region.card.card)?)?;
    let (card, region) = (session.card(), options.region.region);
    let file = Path::new(&options.kernel);
    let hash = if file.is_file() {
        let image = std::fs::read(file).map_err(|cause| format!("{}: {cause}", file.display()))?;
        let end = card.memory_bytes().saturating_sub(image.len() as u64) / 4096 * 4096;
        card.load(region, KernelSource::Image { image: &image, at: options.at.unwrap_or(end) })?
    } else {
        card.load(region, KernelSource::Named(&options.kernel))?
    };
    place.say(
        json!({ "region": region, "kernel": options.kernel, "hash": format!("{hash:016x}") }),
        format!("region {region}: {} is loaded, hash {hash:016x}", options.kernel),
    );
    session.keep()
}

fn start(options: &StartOptions, place: &Place) -> Outcome {
    let session = Session::go_on(place.connect(&options.region.card.card)?)?;
    let region = options.region.region;
    let start = Start {
        banks: options.banks,
        fuel: options.fuel,
        deadline: options.deadline,
        ..Start::new(&options.arguments)
    };
    let rung = session.card().start(region, &start)?;
    match options.wait {
        None => place.say(json!({ "region": region, "doorbell": rung }), format!("region {region}: started")),
        Some(patience) => match session.card().wait(rung, patience) {
            Ok(results) => place.say(
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

/// Bytes of a file that are in memory at a time.
const PIECE: usize = 16 << 20;

fn put(options: &PutOptions, place: &Place) -> Outcome {
    use std::io::Read as _;
    let session = Session::go_on(place.connect(&options.card.card)?)?;
    let failed = |cause| format!("{}: {cause}", options.file.display());
    let mut file = std::fs::File::open(&options.file).map_err(failed)?;
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
    place.say(json!({ "bytes": bytes }), format!("{bytes} bytes written to {:#x}", options.offset));
    session.keep()
}

fn get(options: &GetOptions, place: &Place) -> Outcome {
    let session = Session::go_on(place.connect(&options.card.card)?)?;
    let failed = |cause| format!("{}: {cause}", options.file.display());
    let mut file = std::fs::File::create(&options.file).map_err(failed)?;
    let mut buffer = vec![0; PIECE.min(options.bytes as usize)];
    let mut done = 0;
    while done < options.bytes {
        let len = (options.bytes - done).min(PIECE as u64) as usize;
        session.card().read(options.offset + done, &mut buffer[..len])?;
        file.write_all(&buffer[..len]).map_err(failed)?;
        done += len as u64;
    }
    place.say(json!({ "bytes": done }), format!("{done} bytes written to {}", options.file.display()));
    session.keep()
}

fn save(options: &CheckpointOptions, place: &Place) -> Outcome {
    let session = Session::go_on(place.connect(&options.card.card)?)?;
    let summary = checkpoint::save(session.card(), &options.file, show::progress("saving"))?;
    tell("saved", &summary, place);
    session.keep()
}

fn restore(options: &CheckpointOptions, place: &Place) -> Outcome {
    let session = Session::go_on(place.connect(&options.card.card)?)?;
    let summary = checkpoint::restore(session.card(), &options.file, show::progress("restoring"))?;
    tell("restored", &summary, place);
    session.keep()
}

fn tell(what: &str, summary: &Summary, place: &Place) {
    let mut text = format!("{what}: {} of memory", show::bytes(summary.memory_bytes));
    for (region, kernel, progress) in &summary.running {
        text += &format!("\n  region {region}: {kernel} runs, progress {progress}");
    }
    for (region, kernel) in &summary.loaded {
        text += &format!("\n  region {region}: {kernel} is loaded");
    }
    place.say(json!({ what: summary }), text);
}
