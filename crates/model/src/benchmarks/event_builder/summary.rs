//! A run of the event builder as people read it.

use super::{ModelLevel, RunResult, Scenario, TrafficShaping};
use std::fmt;

/// A run with what it was a run of. [`Display`](fmt::Display) prints it.
#[derive(Clone, Copy, Debug)]
pub struct RunSummary<'a> {
    /// What was run.
    pub scenario: &'a Scenario,
    /// How finely.
    pub level: ModelLevel,
    /// How it went.
    pub outcome: &'a RunResult,
}

impl fmt::Display for RunSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunSummary { scenario, level, outcome } = self;
        let (load, configuration) = (&scenario.load, &scenario.configuration);
        let nodes = f64::from(scenario.nodes);
        let shape = match configuration.shape {
            TrafficShaping::BarrelShifter => "shaped",
            TrafficShaping::Unshaped => "not shaped",
        };
        let level = match level {
            ModelLevel::Flows => "flow level",
            ModelLevel::Packets => "packet level",
        };
        writeln!(f, "{} nodes, {shape}, {level}", scenario.nodes)?;
        writeln!(
            f,
            "batches of {} fragments of {} B; {} slots, {} batches under way from a node\n",
            load.batch, load.fragment, configuration.slots, configuration.in_flight
        )?;
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| writeln!(f, "  {name:<34} {value}");
        if let Some(rate) = load.rate {
            row(f, "events taken", format!("{:.3} MHz", rate * 1e-6))?;
        }
        row(f, "events built", format!("{:.3} MHz", outcome.event_rate() * 1e-6))?;
        let per_node = outcome.rate().as_gigabits() / nodes;
        row(
            f,
            "built",
            format!("{:.3} Tb/s, {per_node:.2} Gb/s a node", outcome.rate().as_gigabits() * 1e-3),
        )?;
        let network = outcome.network_rate().as_gigabits();
        row(
            f,
            "of it over the network",
            format!("{:.3} Tb/s, {:.2} Gb/s a node", network * 1e-3, network / nodes),
        )?;
        let takes = scenario.node.rx_payload_rate().as_gigabits();
        row(
            f,
            "a node can take",
            format!(
                "{takes:.2} Gb/s; the peak_link_utilization took {:.1} % of it",
                outcome.peak_link_utilization * 100.0
            ),
        )?;
        if load.rate.is_some() {
            let [mean, longest] = outcome.build_latency;
            row(f, "last event of a batch to its built", format!("{mean} on average, {longest} at most"))?;
            let held = outcome.max_buffered_batches as f64 * f64::from(load.batch) * load.fragment;
            row(
                f,
                "held by a readout unit",
                format!("{} batches at most, {:.1} MB", outcome.max_buffered_batches, held * 1e-6),
            )?;
        }
        let most = outcome.builders.iter().map(|builder| builder.max_slots_used).max().unwrap_or(0);
        row(f, "slots in use at a time", format!("{most} of {} at most", configuration.slots))?;
        let batches = outcome.builders.iter().map(|builder| builder.batches);
        let (least, most) = (batches.clone().min().unwrap_or(0), batches.max().unwrap_or(0));
        row(f, "batches of a builder unit", format!("{least} to {most}"))?;
        row(f, "transfers", outcome.transfers.to_string())?;
        row(f, "time modelled", format!("{}, {} steps", outcome.end, outcome.steps))?;
        write!(f, "\n{}", outcome.account)
    }
}
