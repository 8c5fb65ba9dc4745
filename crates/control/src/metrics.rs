//! Metrics of run control, in the text format of Prometheus.
//!
//! [`METRICS`] is the one list: the text, the table of `docs/run-control.md` and the test of the Grafana dashboard come from it.

use crate::control::RunControl;
use crate::machine::State;
use crate::power::PowerReading;
use crate::status::{Status, UnitState};
use crate::totals::Totals;
use std::fmt::Write as _;

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it counts or measures.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $id: Metric = Metric {
            name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help,
        };)*

        /// All metrics, in the order of the text.
        pub const METRICS: &[Metric] = &[$($id),*];
    };
}

metrics! {
    INFO = Gauge "millstream_control_info" ["version"] "Version of run control; always 1.";
    CLIENTS_REFUSED = Counter "millstream_control_clients_refused_total" []
        "Clients that run control has refused: without TLS, or without a valid certificate of the site.";
    STATE = Gauge "millstream_control_state" ["state"] "1 for the present state, 0 for the others.";
    RUN = Gauge "millstream_run_number" [] "Number of the present or last run.";
    RUNS = Counter "millstream_runs_total" ["result"] "Runs that have ended: complete, stopped or failed.";
    FAULTS = Counter "millstream_faults_total" [] "Faults, as the status lists them.";
    ELAPSED = Gauge "millstream_run_elapsed_seconds" [] "Time since the units of the present run were ready.";
    BUILT = Counter "millstream_events_built_total" [] "Events with all fragments.";
    ACCEPTED = Counter "millstream_events_accepted_total" [] "Built events that were accepted.";
    INCOMPLETE = Counter "millstream_events_incomplete_total" [] "Events without all fragments.";
    DISCARDED = Counter "millstream_events_discarded_total" []
        "Events with a corrupt fragment, and events lost when a run stopped.";
    RATE = Gauge "millstream_events_per_second" [] "Events of finished batches, over the last second.";
    PAYLOAD_RATE = Gauge "millstream_payload_bytes_per_second" []
        "Payload of built events over the last second, from the mean size of the inputs' events.";
    ASSIGNED = Gauge "millstream_run_batches_assigned" [] "Batches of the present run that were assigned.";
    DONE = Gauge "millstream_run_batches_done" [] "Batches of the present run that are done.";
    IN_FLIGHT = Gauge "millstream_batches_in_flight" [] "Batches that are assigned and not done.";
    UP = Gauge "millstream_unit_up" ["unit", "role"] "1 while the unit is in the run, 0 otherwise.";
    CPU = Counter "millstream_unit_cpu_seconds_total" ["unit", "role"] "User and system time of the unit.";
    MEMORY = Gauge "millstream_unit_resident_memory_bytes" ["unit", "role"]
        "Resident memory of the unit, with shared pages.";
    REFUSED = Counter "millstream_unit_connections_refused_total" ["unit", "role"]
        "Connections that the unit has refused: without TLS or a valid certificate, if the run has keys, or of no unit that may join.";
    ENERGY = Counter "millstream_host_energy_joules_total" ["package"]
        "Energy of a processor package, also after its counter has wrapped; missing if the host shows none.";
    TEMPERATURE = Gauge "millstream_host_temperature_celsius" ["sensor"] "Temperature; missing if the host shows none.";
    FREQUENCY = Gauge "millstream_host_frequency_hertz" [] "Mean frequency of the processors; missing if unknown.";
    GOVERNOR = Gauge "millstream_host_governor_info" ["governor"] "Frequency governor in use; always 1.";
    THROTTLED = Counter "millstream_host_throttle_events_total" []
        "Thermal throttling events since boot; missing if the processor counts none.";
}

/// The metrics as text.
pub fn render(control: &RunControl) -> String {
    let (status, totals) = control.status_and_totals();
    let mut text = Text::default();
    write(&mut text, &status, control.clients_refused(), &totals);
    host(&mut text, &control.power(), control.energy());
    text.0
}

fn write(text: &mut Text, status: &Status, clients_refused: u64, totals: &Totals) {
    text.one(INFO, &[env!("CARGO_PKG_VERSION")], 1.0);
    text.one(CLIENTS_REFUSED, &[], clients_refused as f64);
    text.family(STATE, State::ALL.map(|state| (vec![state.to_string()], is(state == status.state))));
    text.one(RUN, &[], status.run_number.0 as f64);
    let results = ["complete", "stopped", "failed"].iter().zip(totals.runs);
    text.family(RUNS, results.map(|(result, runs)| (vec![(*result).to_owned()], runs as f64)));
    text.one(FAULTS, &[], totals.faults as f64);
    let run = status.run.as_ref();
    let progress = run.map(|run| run.progress).unwrap_or_default();
    text.one(ELAPSED, &[], run.map_or(0.0, |run| run.elapsed_s.0));
    text.one(BUILT, &[], (totals.events_built + progress.events_built) as f64);
    text.one(ACCEPTED, &[], (totals.events_accepted + progress.events_accepted) as f64);
    text.one(INCOMPLETE, &[], (totals.events_incomplete + progress.events_incomplete) as f64);
    text.one(DISCARDED, &[], (totals.events_discarded + progress.events_corrupt) as f64);
    text.one(RATE, &[], run.map_or(0.0, |run| run.events_per_s));
    text.one(PAYLOAD_RATE, &[], run.map_or(0.0, |run| run.payload_bytes_per_s.0));
    text.one(ASSIGNED, &[], progress.batches_assigned as f64);
    text.one(DONE, &[], progress.batches_done as f64);
    text.one(IN_FLIGHT, &[], progress.batches_assigned.saturating_sub(progress.batches_done) as f64);
    units(text, status);
}

fn units(text: &mut Text, status: &Status) {
    let family = |value: fn(&crate::status::UnitStatus) -> Option<f64>| {
        status
            .units
            .iter()
            .filter_map(move |unit| Some((vec![unit.name.clone(), unit.role.clone()], value(unit)?)))
    };
    text.family(UP, family(|unit| Some(is(unit.state == UnitState::Running))));
    text.family(CPU, family(|unit| unit.cpu_s.map(|time| time.0)));
    text.family(MEMORY, family(|unit| unit.memory_bytes.map(|bytes| bytes.0 as f64)));
    text.family(REFUSED, family(|unit| unit.connections_refused.map(|connections| connections as f64)));
}

fn host(text: &mut Text, power: &PowerReading, energy: Vec<(String, f64)>) {
    text.family(ENERGY, energy.into_iter().map(|(package, joules)| (vec![package], joules)));
    let sensors = power.temperatures.value().into_iter().flatten();
    text.family(TEMPERATURE, sensors.map(|sensor| (vec![sensor.name.clone()], sensor.celsius)));
    text.family(FREQUENCY, power.frequency_hz.value().map(|hertz| (Vec::new(), *hertz)));
    let governors = power.governors.value().into_iter().flatten();
    text.family(GOVERNOR, governors.map(|governor| (vec![governor.clone()], 1.0)));
    text.family(THROTTLED, power.throttle_events.value().map(|events| (Vec::new(), *events as f64)));
}

fn is(condition: bool) -> f64 {
    f64::from(u8::from(condition))
}

/// The text of the exposition format.
#[derive(Default)]
struct Text(String);

impl Text {
    fn one(&mut self, metric: Metric, labels: &[&str], value: f64) {
        self.family(metric, [(labels.iter().map(|label| (*label).to_owned()).collect(), value)]);
    }

    /// Writes a metric with its samples: label values and value. Without samples, nothing.
    fn family(&mut self, metric: Metric, samples: impl IntoIterator<Item = (Vec<String>, f64)>) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {} {}", metric.name, metric.help);
        let _ = writeln!(self.0, "# TYPE {} {kind}", metric.name);
        for (values, value) in samples {
            self.0.push_str(metric.name);
            let labels = metric.labels.iter().zip(&values);
            let labels: Vec<_> =
                labels.map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
            if !labels.is_empty() {
                let _ = write!(self.0, "{{{}}}", labels.join(","));
            }
            let _ = writeln!(self.0, " {value}");
        }
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The table of `docs/run-control.md`.
pub fn table() -> String {
    let mut table = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for Metric { name, kind, labels, help } in METRICS {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = if labels.is_empty() { "–".to_owned() } else { labels.join(", ") };
        let kind = format!("{kind:?}").to_lowercase();
        let _ = writeln!(table, "| `{name}` | {kind} | {labels} | {help} |");
    }
    table
}
