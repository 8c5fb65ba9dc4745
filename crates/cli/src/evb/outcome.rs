//! Converts the outcome of a run to a report.

use std::collections::HashSet;

use millstream_evb::config::{
    BuilderConfig, InputConfig, KernelConfig, LandingTarget, OutputConfig, RunConfig, StoredEvents,
};
use millstream_evb::core::summary::Counts;
use millstream_evb::core::{BuIndex, RuIndex, RunSummary, StopCause, Unit};
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::{ProcessFailure, RunProcess};
use millstream_evb::source::SourceStatistics;
use millstream_fragment::SourceId;
use millstream_fragment::stream::Stream;
use millstream_report::{
    Bytes, CorruptSource, FragmentAccounting, FragmentOutcome, LiveSource, MemcpyBaseline, OutcomeCount,
    ProgressSample, RecoveredFailure, RunReport, Seconds, SoftwareTriggerReport, StorageReport,
    TriggerComparison, UnitReport,
};

use super::usage::Usages;

/// Payload of all input files. Inputs were checked before; one that cannot be opened now counts 0 here and fails the run.
pub(super) fn input_bytes(config: &RunConfig) -> u64 {
    let payload = |stream: Stream| -> u64 {
        stream
            .sources()
            .flat_map(|source| source.entries(0..source.len()).map(|entry| u64::from(entry.len)))
            .sum()
    };
    let files = config.readouts.iter().filter_map(|readout| readout.input.file());
    files.filter_map(|input| Stream::open(input).ok()).map(payload).sum()
}

/// Expected payload of an event. For datagrams, that of the longest fragments.
pub(super) fn payload_per_event(config: &RunConfig) -> f64 {
    let live = config.readouts.iter().map(|readout| match &readout.input {
        InputConfig::File(_) => 0.0,
        InputConfig::Generator(generator) => f64::from(generator.size) * f64::from(generator.sources),
        InputConfig::Udp(udp) => f64::from(udp.max_len) * f64::from(udp.sources),
        InputConfig::Ring(ring) => f64::from(ring.max_len) * f64::from(ring.sources),
    });
    live.sum::<f64>() + input_bytes(config) as f64 / config.file_events.max(1) as f64
}

/// The report. `problems` are those of completing the event files, which fail the run.
pub(super) fn report(
    config: &RunConfig,
    outcome: &RunOutcome,
    usages: &Usages,
    (memcpy, problems): (Option<MemcpyBaseline>, Vec<String>),
) -> RunReport {
    let per_event = payload_per_event(config);
    let statistics: Vec<_> = outcome.builders.iter().flatten().collect();
    let mut report = RunReport {
        name: config.name.clone(),
        software: concat!("millstream ", env!("CARGO_PKG_VERSION")).to_owned(),
        memcpy_baseline: memcpy,
        duration_s: Seconds(outcome.elapsed.unwrap_or_default().as_secs_f64()),
        selected_events: selects_more(config).then(|| selected(config, outcome).sum()),
        not_stored_events: not_stored(config, outcome),
        samples: outcome
            .samples
            .iter()
            .map(|sample| ProgressSample {
                elapsed_s: Seconds(sample.elapsed.as_secs_f64()),
                events: sample.done.events(),
                payload_bytes: Bytes((sample.done.built.events as f64 * per_event) as u64),
            })
            .collect(),
        corrupt_sources: corrupt_sources(outcome),
        storage: storage(config, outcome),
        software_triggers: software_triggers(config, outcome),
        recovered_failures: recovered_failures(config, outcome),
        live_sources: outcome.sources.iter().map(live_source).collect(),
        units: units(config, outcome, usages),
        ..RunReport::default()
    };
    if let (Some(kernel), Some(_)) = (kernel_name(config), &config.reference_decisions) {
        report.trigger = Some(TriggerComparison {
            kernel: kernel.to_owned(),
            decisions_compared: statistics.iter().map(|s| s.comparison.compared).sum(),
            decisions_matching: statistics.iter().map(|s| s.comparison.equal).sum(),
            decisions_set: statistics.iter().map(|s| s.decisions_set).sum(),
        });
    }
    let stopped = match &outcome.summary {
        Some(summary) => add_summary(config, &mut report, summary),
        None => Some("the run did not start".to_owned()),
    };
    report.fragment_accounting.inconsistencies.extend(problems);
    report.payload_bytes = (0..config.builders.len()).map(|bu| payload_built(config, outcome, bu)).sum();
    let mut all_numbers: HashSet<u64> = HashSet::new();
    for (bu, builder) in config.builders.iter().enumerate() {
        let files = super::stored(config, BuIndex(bu as u16));
        let before = all_numbers.len() as u64;
        all_numbers.extend(&files.numbers);
        let twice = before + files.events - all_numbers.len() as u64;
        if twice > 0 {
            let problem =
                format!("builder {}: {twice} events are in files of other builder units", builder.name);
            report.fragment_accounting.inconsistencies.push(problem);
        }
        report.stored_events = all_numbers.len() as u64;
        report.event_files.extend(files.paths.iter().map(|path| path.display().to_string()));
        let inconsistencies = &mut report.fragment_accounting.inconsistencies;
        inconsistencies
            .extend(files.problems.into_iter().map(|problem| format!("builder {}: {problem}", builder.name)));
        let statistics = outcome.builders[bu].as_ref().filter(|statistics| statistics.error.is_none());
        let stored = statistics.and_then(|statistics| statistics.stored);
        if let Some(stored) = stored.filter(|&stored| stored != files.events) {
            inconsistencies.push(format!(
                "builder {}: events stored = events in its files: {stored} against {}",
                builder.name, files.events
            ));
        }
    }
    let builders = (0..).map(BuIndex).zip(&outcome.builders);
    let builders = builders.filter(|(bu, _)| !is_recovered(outcome, *bu));
    let seen = builders.filter_map(|(_, statistics)| statistics.as_ref()?.error.clone());
    let failures = outcome.failures.iter().filter(|failure| !failure.is_recovered);
    let failures =
        failures.map(|failure| format!("{}: {}", name(config, &failure.process), cause_of(failure)));
    let corrupt = outcome.too_corrupt().into_iter().map(|source| {
        format!(
            "{}: {} of {} checked fragments are corrupt, more than {} % (check.max_corrupt)",
            SourceId(source.source),
            source.corrupt,
            source.checked,
            outcome.max_corrupt * 100.0
        )
    });
    let words: Vec<String> = stopped.into_iter().chain(seen).chain(failures).chain(corrupt).collect();
    report.error = (!words.is_empty()).then(|| words.join("; "));
    report
}

/// Whether the run went on without a builder unit.
fn is_recovered(outcome: &RunOutcome, bu: BuIndex) -> bool {
    outcome.summary.as_ref().is_some_and(|summary| summary.recovered.contains(&Unit::Builder(bu)))
}

/// Exit status and error of a process.
fn cause_of(failure: &ProcessFailure) -> String {
    match failure.reason.trim() {
        "" => failure.status.to_string(),
        reason => format!("{}: {reason}", failure.status),
    }
}

/// Why processes failed that the run went on without. A builder unit's own error is in its statistics.
fn recovered_failures(config: &RunConfig, outcome: &RunOutcome) -> Vec<RecoveredFailure> {
    let failures = outcome.failures.iter().filter(|failure| failure.is_recovered);
    let failures = failures.map(|failure| {
        let own = match &failure.process {
            RunProcess::Unit(Unit::Builder(bu)) => outcome.builders[bu.index()].as_ref(),
            _ => None,
        };
        let own = own.and_then(|statistics| statistics.error.clone());
        let causes = std::iter::once(cause_of(failure)).chain(own);
        RecoveredFailure {
            unit: name(config, &failure.process),
            // One row of the table.
            cause: causes.collect::<Vec<_>>().join(": ").lines().collect::<Vec<_>>().join("; "),
        }
    });
    failures.collect()
}

/// Software triggers of the builder units.
fn software_triggers(config: &RunConfig, outcome: &RunOutcome) -> Vec<SoftwareTriggerReport> {
    let statistics = config.builders.iter().zip(&outcome.builders);
    let triggers = statistics.filter(|(builder, _)| builder.trigger.is_some());
    let triggers = triggers.filter_map(|(builder, statistics)| {
        let workers = statistics.as_ref()?.workers;
        Some(SoftwareTriggerReport {
            builder: builder.name.clone(),
            batches: workers.batches,
            events: workers.events,
            accepted: workers.accepted,
            workers_lost: workers.lost,
            longest_queue: workers.longest_queue.into(),
            all_credits_used_s: Seconds(workers.all_credits_used.as_secs_f64()),
        })
    });
    triggers.collect()
}

fn corrupt_sources(outcome: &RunOutcome) -> Vec<CorruptSource> {
    let corrupt = outcome.checksums().into_iter().filter(|source| source.corrupt > 0);
    corrupt
        .map(|source| CorruptSource {
            source: SourceId(source.source).to_string(),
            fragments: source.corrupt,
            checked: source.checked,
        })
        .collect()
}

fn live_source(statistics: &SourceStatistics) -> LiveSource {
    LiveSource {
        source: SourceId(statistics.source).to_string(),
        received: statistics.received,
        lost: statistics.lost,
        late: statistics.late,
        duplicate: statistics.duplicate,
        overflow: statistics.overflow,
        invalid: statistics.invalid,
        refused: statistics.refused,
        dead_time_s: Seconds(statistics.dead_time.as_secs_f64()),
    }
}

/// Storage of the builder units that stored events.
fn storage(config: &RunConfig, outcome: &RunOutcome) -> Vec<StorageReport> {
    let statistics = config.builders.iter().zip(&outcome.builders);
    let storage = statistics.filter_map(|(builder, statistics)| {
        let storage = statistics.as_ref()?.storage;
        (storage.batches > 0).then(|| StorageReport {
            builder: builder.name.clone(),
            batches: storage.batches,
            payload_bytes: storage.bytes,
            direct_bytes: storage.direct_bytes,
            copied_bytes: storage.copied_bytes,
            flushes: storage.flushes,
            busy_s: Seconds(storage.busy.as_secs_f64()),
            longest_queue: storage.longest_queue.into(),
            all_slots_waiting_s: Seconds(storage.all_slots_waiting.as_secs_f64()),
        })
    });
    storage.collect()
}

/// Payload of a builder unit's built events. For a lost unit, the mean payload of an event times its built events.
fn payload_built(config: &RunConfig, outcome: &RunOutcome, bu: usize) -> Bytes {
    match (&outcome.builders[bu], &outcome.totals[bu]) {
        (Some(statistics), _) => statistics.payload_built,
        (None, totals) => {
            let events = totals.map_or(0, |totals| totals.built.events);
            Bytes((events as f64 * payload_per_event(config)) as u64)
        }
    }
}

/// Why the run ended, with the units' names in the configuration.
fn cause(config: &RunConfig, cause: StopCause) -> String {
    let unit = |unit| name(config, &RunProcess::Unit(unit));
    let builder = |bu| unit(Unit::Builder(bu));
    match cause {
        StopCause::EndOfRun | StopCause::Requested => cause.to_string(),
        StopCause::Lost(lost) => format!("{} lost", unit(lost)),
        StopCause::TimedOut { by, batch } => format!("{batch} timed out at {}", unit(by)),
        StopCause::Unreachable { by, peer } => {
            format!("{} cannot reach {}", unit(Unit::Readout(by)), builder(peer))
        }
        StopCause::ReadoutLate { by, readout } => {
            format!("{} did not deliver to {} in time", unit(Unit::Readout(readout)), builder(by))
        }
        StopCause::CardLost(bu) => format!("card of {} lost", builder(bu)),
        StopCause::InvalidData(bu) => format!("{} found an invalid packet or kernel result", builder(bu)),
        StopCause::OutputFailed(bu) => format!("{} cannot store its events", builder(bu)),
        StopCause::Protocol { by, error } => format!("{} violated the protocol: {error}", unit(by)),
    }
}

/// Adds the run summary to the report. Returns why the run stopped early, if it did.
fn add_summary(config: &RunConfig, report: &mut RunReport, summary: &RunSummary) -> Option<String> {
    report.events = summary.built.events;
    report.fragments = summary.built.fragments;
    report.accepted_events = summary.accepted;
    let count = |outcome, reason: &str, counts: Counts| OutcomeCount {
        outcome,
        reason: reason.to_owned(),
        events: counts.events,
        fragments: counts.fragments,
    };
    let mut outcomes = vec![count(FragmentOutcome::Built, "whole", summary.built)];
    let lost = summary
        .incomplete
        .by_cause()
        .map(|(cause, counts)| count(FragmentOutcome::Incomplete, cause, counts));
    outcomes.extend(lost.into_iter().filter(|count| count.events != 0 || count.fragments != 0));
    let thrown =
        summary.discarded.by_cause().map(|(cause, counts)| count(FragmentOutcome::Discarded, cause, counts));
    outcomes.extend(thrown.into_iter().filter(|count| count.events != 0 || count.fragments != 0));
    report.fragment_accounting = FragmentAccounting {
        fragments_read: summary.fragments_read(),
        fragments_rebuilt: summary.rebuilt.fragments,
        fragments_duplicate: summary.duplicate.fragments,
        events_rebuilt: summary.rebuilt.events,
        outcomes,
        inconsistencies: summary.violations.iter().map(ToString::to_string).collect(),
    };
    let unit_name = |unit: &Unit| name(config, &RunProcess::Unit(*unit));
    report.joined = summary.joined.iter().map(unit_name).collect();
    report.recovered = summary.recovered_with(unit_name).collect();
    let lost: Vec<&Unit> = summary.lost.iter().filter(|unit| !summary.recovered.contains(unit)).collect();
    (!summary.cause.is_success() || !lost.is_empty()).then(|| {
        let lost: Vec<String> = lost.into_iter().map(unit_name).collect();
        let lost = if lost.is_empty() { String::new() } else { format!(" (lost: {})", lost.join(", ")) };
        format!("the run was stopped: {}{lost}", cause(config, summary.cause))
    })
}

/// Events of each builder unit that the output selects. Without an output, the accepted ones.
fn selected<'a>(config: &'a RunConfig, outcome: &'a RunOutcome) -> impl Iterator<Item = u64> + 'a {
    let totals = outcome.totals.iter().flatten();
    totals.map(|totals| if config.output.is_some() { totals.selected } else { totals.accepted })
}

/// Whether the output selects other events than accepted ones that are built.
fn selects_more(config: &RunConfig) -> bool {
    let all = |output: &OutputConfig| output.events == StoredEvents::All;
    config
        .output
        .as_ref()
        .is_some_and(|output| all(output) || config.builders.iter().any(BuilderConfig::accepts_incomplete))
}

/// Selected events beyond the configured maximum to store.
fn not_stored(config: &RunConfig, outcome: &RunOutcome) -> u64 {
    let most = config.output.as_ref().map_or(0, |output| output.max_events);
    selected(config, outcome).map(|events| events.saturating_sub(most)).sum()
}

fn kernel_name(config: &RunConfig) -> Option<&'static str> {
    config.builders.iter().find_map(|builder| match &builder.landing {
        LandingTarget::Card(card) => Some(card.kernel.name()).filter(|_| card.kernel != KernelConfig::None),
        LandingTarget::Host => None,
    })
}

/// The name of a process in reports and messages.
pub(super) fn name(config: &RunConfig, process: &RunProcess) -> String {
    match process {
        RunProcess::Unit(Unit::Manager) => "event manager".to_owned(),
        RunProcess::Standby(0) => "standby manager".to_owned(),
        RunProcess::Standby(restart) => format!("standby manager+{restart}"),
        RunProcess::Unit(unit @ Unit::Readout(_)) => format!("readout {}", config.unit_name(*unit)),
        RunProcess::Unit(unit @ Unit::Builder(_)) => format!("builder {}", config.unit_name(*unit)),
        RunProcess::Card(card) => format!("card {card}"),
    }
}

fn units(config: &RunConfig, outcome: &RunOutcome, usages: &Usages) -> Vec<UnitReport> {
    let joined = outcome.summary.as_ref().map_or(&[][..], |summary| &summary.joined);
    let is_there = |unit: &Unit| !config.plan.is_restart(*unit) || joined.contains(unit);
    let readouts = (0..config.plan.readout_members()).map(|i| Unit::Readout(RuIndex(i as u16)));
    let readouts = readouts.filter(is_there).map(RunProcess::Unit);
    let builders = (0..config.builders.len()).map(|i| Unit::Builder(BuIndex(i as u16)));
    let builders = builders.filter(is_there).map(RunProcess::Unit);
    let cards = config.initial_builders().iter().filter_map(|builder| match &builder.landing {
        LandingTarget::Card(card) => Some(RunProcess::Card(card.name.clone())),
        LandingTarget::Host => None,
    });
    let managers = std::iter::once(RunProcess::Unit(Unit::Manager));
    let managers = managers.chain((0..outcome.standbys).map(RunProcess::Standby));
    let parts: Vec<RunProcess> = managers.chain(readouts).chain(builders).chain(cards).collect();
    parts
        .iter()
        .map(|process| {
            let failure = outcome.failures.iter().find(|failure| failure.process == *process);
            let [events, fragments, bytes] = handled(config, outcome, process);
            UnitReport {
                name: name(config, process),
                events,
                fragments,
                payload_bytes: Bytes(bytes),
                peak_memory_bytes: usages.of(process).map(|usage| usage.peak),
                cpu_time_s: usages.of(process).map(|usage| usage.cpu),
                exit_status: failure.map_or_else(|| "done".to_owned(), |failure| failure.status.to_string()),
            }
        })
        .collect()
}

/// Events, fragments and payload bytes of one unit.
fn handled(config: &RunConfig, outcome: &RunOutcome, process: &RunProcess) -> [u64; 3] {
    let builder = |bu: usize| {
        let done = outcome.totals.get(bu).copied().flatten().unwrap_or_default();
        [done.events(), done.fragments(), payload_built(config, outcome, bu).0]
    };
    match process {
        RunProcess::Unit(Unit::Readout(ru)) => match outcome.readouts.get(ru.index()) {
            Some(Some(report)) => {
                let events = report.sent.iter().map(|sent| sent.events).sum();
                [events, report.fragments_read, report.bytes_read.0]
            }
            _ => [0; 3],
        },
        RunProcess::Unit(Unit::Builder(bu)) => builder(bu.index()),
        RunProcess::Standby(_) => [0; 3],
        // The manager handles no payload; a card handles its builder unit's.
        RunProcess::Unit(Unit::Manager) => [outcome.summary.as_ref().map_or(0, |a| a.built.events), 0, 0],
        RunProcess::Card(name) => {
            let of =
                |b: &BuilderConfig| matches!(&b.landing, LandingTarget::Card(card) if card.name == *name);
            config.builders.iter().position(of).map_or([0; 3], builder)
        }
    }
}
