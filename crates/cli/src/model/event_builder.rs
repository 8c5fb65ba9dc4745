//! `millstream model event-builder`.

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use millstream_model::Parameters;
use millstream_model::benchmarks::event_builder::{
    BuiltCost, ModelLevel, Scenario, ScenarioReport, SlowBuilder, TrafficShaping, run as simulate,
};
use millstream_model::engine::Picos;
use millstream_model::sites::shipped;
use millstream_site::Site;
use serde_json::json;

use super::parameters_of;
use crate::args::model::ModelledEventBuilder;

/// Peak resident memory of this process in bytes (proc_pid_status(5), VmHWM).
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

fn slow_builder(text: &str) -> Result<SlowBuilder, String> {
    let parsed = text.split_once('=').and_then(|(node, factor)| {
        Some(SlowBuilder { builder: node.trim().parse().ok()?, factor: factor.trim().parse().ok()? })
    });
    parsed.ok_or_else(|| format!("--slow-builder {text:?}: expected NODE=FACTOR, for example 3=10"))
}

fn scenario(
    options: &ModelledEventBuilder,
    site: &Site,
    parameters: &Parameters,
) -> Result<Scenario, Box<dyn Error>> {
    let mut scenario = Scenario::from_site(site, parameters, options.nodes)?;
    if !(0.0..=1e6).contains(&options.seconds) {
        return Err(format!("--seconds {}: must be 0 to 10^6", options.seconds).into());
    }
    let events = options.rate * options.seconds;
    if !(1.0..=1e15).contains(&events) {
        return Err(format!(
            "--rate {} × --seconds {} gives {events} events: must be 1 to 10^15",
            options.rate, options.seconds
        )
        .into());
    }
    let load = &mut scenario.load;
    load.rate = (!options.saturated).then_some(options.rate);
    load.events = events.round() as u64;
    load.batch = options.batch;
    load.deviation *= options.fragment / load.fragment;
    load.fragment = options.fragment;
    load.missing_every = options.missing_every;
    load.corrupt_every = options.corrupt_every;
    match &mut scenario.storage {
        Some(storage) => storage.accepted = options.accepted,
        None if options.accepted != 1.0 => {
            let message = "the site has no [[host.ssd]] with write-block: builder units store nothing";
            return Err(format!("--accepted {}: {message}", options.accepted).into());
        }
        None => {}
    }
    let configuration = &mut scenario.configuration;
    configuration.slots = options.slots;
    configuration.window = options.window;
    configuration.in_flight = options.in_flight;
    configuration.traffic_shaping =
        if options.unshaped { TrafficShaping::Unshaped } else { TrafficShaping::BarrelShifter };
    scenario.slow_builders =
        options.slow_builder.iter().map(|text| slow_builder(text)).collect::<Result<_, _>>()?;
    scenario.stop_at = match options.stop_at {
        Some(at) if !(0.0..=1e6).contains(&at) => {
            return Err(format!("--stop-at {at}: must be 0 to 10^6").into());
        }
        at => at.map(Picos::from_seconds),
    };
    Ok(scenario)
}

pub(super) fn run(options: &ModelledEventBuilder) -> Result<ExitCode, Box<dyn Error>> {
    let site = match &options.site {
        Some(path) => millstream_site::load(path)?,
        None => shipped("event-builder-500"),
    };
    let parameters = parameters_of(&options.settings, &site)?;
    let scenario = scenario(options, &site, &parameters)?;
    let level = if options.packets { ModelLevel::Packets } else { ModelLevel::Flows };
    let start = Instant::now();
    let outcome = simulate(&scenario, level)?;
    let wall = start.elapsed().as_secs_f64();
    let peak = peak_memory();
    let cost = BuiltCost::new(&site, &parameters, scenario.nodes, &outcome);
    if options.json {
        let summary = serde_json::to_value(&outcome.summary)?;
        let [mean, max] = outcome.build_latency;
        let [idle, full_load] = cost.energy_per_event();
        println!(
            "{}",
            json!({
                "nodes": scenario.nodes,
                "wall_s": wall,
                "peak_bytes": peak,
                "simulated_s": outcome.end.seconds(),
                "transfers": outcome.transfers,
                "simulation_events": outcome.steps,
                "events_per_s": outcome.event_rate(),
                "built_bits_per_s": outcome.rate().0 * 8.0,
                "network_bits_per_s": outcome.network_rate().0 * 8.0,
                "peak_link_utilization": outcome.peak_link_utilization,
                "build_latency_s": { "mean": mean.seconds(), "max": max.seconds() },
                "storage": scenario.storage.as_ref().zip(outcome.storage).map(|(storage, used)| json!({
                    "stored_bytes_per_s": used.bytes / outcome.span.seconds(),
                    "limit_bytes_per_s": storage.rate().0 * f64::from(scenario.nodes),
                    "busy": used.busy,
                    "is_limit": used.is_limit(),
                })),
                "max_batches_buffered": outcome.max_buffered_batches,
                "power_w": {
                    "idle": cost.inventory.idle.0,
                    "running": cost.running.map(|power| power.0),
                    "full_load": cost.inventory.active.0,
                },
                "energy_per_event_j": {
                    "idle": idle,
                    "running": cost.energy_while_running(),
                    "full_load": full_load,
                },
                "price_per_built_gb_per_s": cost.price_per_rate(),
                "summary": summary,
            })
        );
    } else {
        println!("{}", ScenarioReport { scenario: &scenario, level, outcome: &outcome });
        print!("\n{cost}");
        let memory =
            peak.map_or_else(|| "unknown".to_owned(), |peak| format!("{:.2} GB", peak as f64 * 1e-9));
        println!("\nsimulated in {wall:.2} s on one core, peak memory {memory}");
    }
    // A stopped run and a run with discarded events succeed as long as the conservation law holds.
    Ok(if outcome.summary.is_balanced() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
