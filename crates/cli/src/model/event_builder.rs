//! `millstream model event-builder`.

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use millstream_model::Parameters;
use millstream_model::engine::Picos;
use millstream_model::sites::shipped;
use millstream_model::tool::event_builder::{Level, Setup, Shape, Shown, Slow, run as simulate};
use serde_json::json;

use crate::args::ModelledEventBuilder;

/// The most memory that this process has had, as the kernel counts it.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

fn slow(text: &str) -> Result<Slow, String> {
    let parsed = text.split_once('=').and_then(|(node, factor)| {
        Some(Slow { builder: node.trim().parse().ok()?, factor: factor.trim().parse().ok()? })
    });
    parsed.ok_or_else(|| format!("--slow {text:?}: expected NODE=FACTOR, as 3=10"))
}

fn setup(options: &ModelledEventBuilder, parameters: &Parameters) -> Result<Setup, Box<dyn Error>> {
    let site = match &options.site {
        Some(path) => millstream_site::load(path)?,
        None => shipped("event-builder-500"),
    };
    let mut setup = Setup::of(&site, parameters, options.nodes)?;
    let events = options.rate * options.seconds;
    if !(1.0..=1e15).contains(&events) {
        return Err(format!(
            "--rate {} for --seconds {}: {events} events, must be 1 to 10^15",
            options.rate, options.seconds
        )
        .into());
    }
    let load = &mut setup.load;
    load.rate = (!options.at_hand).then_some(options.rate);
    load.events = events.round() as u64;
    load.batch = options.batch;
    load.deviation *= options.fragment / load.fragment;
    load.fragment = options.fragment;
    load.missing_every = options.missing_every;
    load.corrupt_every = options.corrupt_every;
    let configuration = &mut setup.configuration;
    configuration.slots = options.slots;
    configuration.window = options.window;
    configuration.under_way = options.under_way;
    configuration.shape = if options.unshaped { Shape::Assignment } else { Shape::Rotation };
    setup.slow = options.slow.iter().map(|text| slow(text)).collect::<Result<_, _>>()?;
    setup.stop_at = match options.stop_at {
        Some(at) if !(0.0..=1e6).contains(&at) => {
            return Err(format!("--stop-at {at}: must be 0 to 10^6").into());
        }
        at => at.map(Picos::from_seconds),
    };
    Ok(setup)
}

pub(super) fn run(
    options: &ModelledEventBuilder,
    parameters: &Parameters,
) -> Result<ExitCode, Box<dyn Error>> {
    let setup = setup(options, parameters)?;
    let level = if options.packets { Level::Packets } else { Level::Flows };
    let start = Instant::now();
    let outcome = simulate(&setup, level)?;
    let wall = start.elapsed().as_secs_f64();
    let peak = peak_memory();
    if options.json {
        let account = serde_json::to_value(&outcome.account)?;
        let [mean, longest] = outcome.delay;
        println!(
            "{}",
            json!({
                "nodes": setup.nodes,
                "wall_s": wall,
                "peak_bytes": peak,
                "modelled_s": outcome.end.seconds(),
                "transfers": outcome.transfers,
                "steps": outcome.steps,
                "events_per_s": outcome.event_rate(),
                "built_bits_per_s": outcome.rate().0 * 8.0,
                "network_bits_per_s": outcome.network_rate().0 * 8.0,
                "busiest": outcome.busiest,
                "delay_s": { "mean": mean.seconds(), "longest": longest.seconds() },
                "most_batches_held": outcome.most_held,
                "account": account,
            })
        );
    } else {
        println!("{}", Shown { setup: &setup, level, outcome: &outcome });
        let memory =
            peak.map_or_else(|| "unknown".to_owned(), |peak| format!("{:.2} GB", peak as f64 * 1e-9));
        println!("\ncomputed in {wall:.2} s on one core, with at most {memory} of memory");
    }
    // A run that was asked to stop, or whose builder units had to throw events away, has still done what it should.
    Ok(if outcome.account.is_closed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
