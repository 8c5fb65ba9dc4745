//! Text report of a simulated run.

use super::{ModelLevel, RunResult, Scenario, TrafficShaping};
use std::fmt;

/// A scenario and its result; [`Display`](fmt::Display) prints the report.
#[derive(Clone, Copy, Debug)]
pub struct ScenarioReport<'a> {
    /// The scenario.
    pub scenario: &'a Scenario,
    /// Level of detail.
    pub level: ModelLevel,
    /// The result.
    pub outcome: &'a RunResult,
}

impl fmt::Display for ScenarioReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScenarioReport { scenario, level, outcome } = self;
        let (load, configuration) = (&scenario.load, &scenario.configuration);
        let nodes = f64::from(scenario.nodes);
        let shape = match configuration.traffic_shaping {
            TrafficShaping::BarrelShifter => "shaped",
            TrafficShaping::Unshaped => "unshaped",
        };
        let level = match level {
            ModelLevel::Flows => "flow level",
            ModelLevel::Packets => "packet level",
        };
        writeln!(f, "{} nodes, {shape}, {level}", scenario.nodes)?;
        writeln!(
            f,
            "batches of {} fragments of {} B; {} slots, {} batches in flight per readout unit\n",
            load.batch, load.fragment, configuration.slots, configuration.in_flight
        )?;
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| writeln!(f, "  {name:<34} {value}");
        if let Some(rate) = load.rate {
            row(f, "input event rate", format!("{:.3} MHz", rate * 1e-6))?;
        }
        row(f, "built event rate", format!("{:.3} MHz", outcome.event_rate() * 1e-6))?;
        let per_node = outcome.rate().as_gigabits() / nodes;
        row(
            f,
            "built payload",
            format!("{:.3} Tb/s, {per_node:.2} Gb/s per node", outcome.rate().as_gigabits() * 1e-3),
        )?;
        let network = outcome.network_rate().as_gigabits();
        row(
            f,
            "network payload",
            format!("{:.3} Tb/s, {:.2} Gb/s per node", network * 1e-3, network / nodes),
        )?;
        let limit = scenario.node.rx_payload_rate().as_gigabits();
        row(
            f,
            "receive limit of a node",
            format!("{limit:.2} Gb/s; peak utilization {:.1} %", outcome.peak_link_utilization * 100.0),
        )?;
        if let (Some(storage), Some(used)) = (&scenario.storage, &outcome.storage) {
            let stored = used.bytes / outcome.span.seconds() / nodes * 1e-9;
            let accepted = storage.accepted * 100.0;
            row(f, "stored", format!("{stored:.3} GB/s per node: {accepted:.1} % of the built events"))?;
            let limit = storage.rate().as_gigabytes();
            let busy = used.busy * 100.0;
            row(
                f,
                "storage limit of a node",
                format!("{limit:.3} GB/s ({}); busy {busy:.1} %", storage.name),
            )?;
            if used.is_limit() {
                row(f, "limit", format!("storage: {}", storage.name))?;
            }
        }
        if load.rate.is_some() {
            let [mean, max] = outcome.build_latency;
            row(f, "build latency", format!("mean {mean}, maximum {max}"))?;
            let buffered = outcome.max_buffered_batches as f64 * f64::from(load.batch) * load.fragment;
            row(
                f,
                "buffered by a readout unit",
                format!("at most {} batches, {:.1} MB", outcome.max_buffered_batches, buffered * 1e-6),
            )?;
        }
        let most = outcome.builders.iter().map(|builder| builder.max_slots_used).max().unwrap_or(0);
        row(f, "slots in use", format!("at most {most} of {}", configuration.slots))?;
        let batches = outcome.builders.iter().map(|builder| builder.batches);
        let (least, most) = (batches.clone().min().unwrap_or(0), batches.max().unwrap_or(0));
        row(f, "batches per builder unit", format!("{least} to {most}"))?;
        row(f, "transfers", outcome.transfers.to_string())?;
        row(f, "simulated", format!("{}, {} events", outcome.end, outcome.steps))?;
        write!(f, "\n{}", outcome.summary)
    }
}
