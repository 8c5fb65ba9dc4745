//! The report as an aligned table for a terminal.

use std::fmt::Write as _;
use std::io::IsTerminal;

use crate::quantity::{block, count, per_cent};
use crate::run::{
    CorruptSource, FragmentOutcome, RecoveredFailure, RunReport, SoftwareTriggerReport, StorageReport,
    UnitReport,
};
use millstream_quantity::si::metric;

/// Whether the output is coloured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// No colours.
    #[default]
    Plain,
    /// ANSI colours.
    Coloured,
}

impl Style {
    /// Coloured if `out` is a terminal with colours and `NO_COLOR` is not set.
    pub fn of(out: &impl IsTerminal) -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if out.is_terminal() && !set("NO_COLOR") && !dumb { Self::Coloured } else { Self::Plain }
    }

    fn paint(self, emphasis: Emphasis, text: &str) -> String {
        let code = match emphasis {
            Emphasis::Normal => return text.to_owned(),
            Emphasis::Dim => 2,
            Emphasis::Bold => 1,
            Emphasis::Good => 32,
            Emphasis::Warning => 33,
            Emphasis::Bad => 31,
        };
        match self {
            Self::Plain => text.to_owned(),
            Self::Coloured => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }
}

/// Emphasis of a text.
#[derive(Clone, Copy)]
enum Emphasis {
    Normal,
    Dim,
    Bold,
    Good,
    Warning,
    Bad,
}

/// Renders the report.
pub fn render(report: &RunReport, style: Style) -> String {
    let derived = report.derived();
    let mut out = String::new();
    let (word, emphasis) = if derived.success { ("OK", Emphasis::Good) } else { ("FAILED", Emphasis::Bad) };
    let software = style.paint(Emphasis::Dim, &report.software);
    line(&mut out, &[&style.paint(Emphasis::Bold, &report.name), &software, &style.paint(emphasis, word)]);
    out.push('\n');

    let mut summary = Grid::new(&[Alignment::Left, Alignment::Right, Alignment::Left]);
    summary_rows(report, &mut summary);
    summary.write(&mut out, style);
    if !report.units.is_empty() {
        out.push('\n');
        units(report).write(&mut out, style);
    }
    if !derived.problems.is_empty() {
        out.push('\n');
    }
    for problem in &derived.problems {
        line(&mut out, &[&style.paint(Emphasis::Bad, "problem:"), problem]);
    }
    out
}

fn line(out: &mut String, words: &[&str]) {
    let words: Vec<&str> = words.iter().copied().filter(|word| !word.is_empty()).collect();
    out.push_str(&words.join("  "));
    out.push('\n');
}

fn summary_rows(report: &RunReport, grid: &mut Grid) {
    let derived = report.derived();
    let per_second =
        |rate: Option<f64>, what| rate.map_or(String::new(), |rate| format!("{} {what}/s", whole(rate)));
    grid.row(["events", &count(report.events), &per_second(derived.events_per_s, "events")]);
    grid.row(["fragments", &count(report.fragments), &per_second(derived.fragments_per_s, "fragments")]);
    let time = match derived.payload_bytes_per_s {
        Some(rate) => format!("{rate} in {}", report.duration_s),
        None => format!("in {}", report.duration_s),
    };
    grid.row(["payload", &report.payload_bytes.to_string(), &time]);
    if let Some(memcpy) = &report.memcpy_baseline {
        let ratio = derived.memcpy_ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let note = format!("× memcpy ({} in blocks of {})", memcpy.bytes_per_s, block(memcpy.block_bytes));
        grid.row(["", &ratio, &note]);
    }
    let files = report.event_files.len();
    let stored = match files {
        0 => format!("{} stored", count(report.stored_events)),
        1 => format!("{} stored in 1 file", count(report.stored_events)),
        _ => format!("{} stored in {files} files", count(report.stored_events)),
    };
    let known = report.stored_events.saturating_add(report.not_stored_events);
    let emphasis = if known == report.selected_events.unwrap_or(report.accepted_events) {
        Emphasis::Normal
    } else {
        Emphasis::Bad
    };
    grid.emphasised(["accepted", &count(report.accepted_events), &stored], emphasis);
    for storage in &report.storage {
        let StorageReport { builder, payload_bytes, busy_s, all_slots_waiting_s, .. } = storage;
        let note =
            format!("by {builder} in {busy_s}; all its slots waited for storage for {all_slots_waiting_s}");
        grid.row(["  storage", &payload_bytes.to_string(), &note]);
        let StorageReport { direct_bytes, copied_bytes, .. } = storage;
        if direct_bytes.0 > 0 || copied_bytes.0 > 0 {
            let note = format!("of whole batches past the page cache; {copied_bytes} copied by a processor");
            grid.row(["", &direct_bytes.to_string(), &note]);
        }
    }
    for trigger in &report.software_triggers {
        let SoftwareTriggerReport { builder, events, accepted, all_credits_used_s, workers_lost, .. } =
            trigger;
        let note = format!(
            "of {} events by the software trigger of {builder}; all its credits were in use for {all_credits_used_s}",
            count(*events)
        );
        grid.row(["  decided", &count(*accepted), &note]);
        if *workers_lost > 0 {
            let note = format!("workers of the software trigger of {builder} were lost");
            grid.emphasised(["", &count(*workers_lost), &note], Emphasis::Warning);
        }
    }
    if let Some(trigger) = &report.trigger {
        let (matching, compared) = (trigger.decisions_matching, trigger.decisions_compared);
        let note = format!(
            "of {} decisions of {} match ({}), {} set",
            count(compared),
            trigger.kernel,
            per_cent(matching, compared),
            count(trigger.decisions_set)
        );
        let emphasis = if matching == compared { Emphasis::Good } else { Emphasis::Bad };
        grid.emphasised(["trigger", &count(matching), &note], emphasis);
    }

    let accounting = &report.fragment_accounting;
    let terms = FragmentOutcome::ALL
        .map(|outcome| format!("{} {}", count(accounting.fragments(outcome)), outcome.name()));
    let (sign, emphasis) =
        if accounting.is_consistent() { ("=", Emphasis::Good) } else { ("≠", Emphasis::Bad) };
    let note = format!("{sign} {}", terms.join(" + "));
    grid.emphasised(["fragments read", &count(accounting.fragments_read), &note], emphasis);
    for outcome in [FragmentOutcome::Incomplete, FragmentOutcome::Discarded] {
        let nonzero = accounting.of(outcome).filter(|lost| lost.fragments > 0 || lost.events > 0);
        for lost in nonzero {
            let events = if lost.events == 1 { "event" } else { "events" };
            let note = format!("{} in {} {events}", lost.reason, count(lost.events));
            let label = format!("  {}", outcome.name());
            grid.emphasised([&label, &count(lost.fragments), &note], Emphasis::Warning);
        }
    }
    if accounting.fragments_rebuilt > 0 {
        let note = format!("sent again in {} events", count(accounting.events_rebuilt));
        grid.emphasised(["  rebuilt", &count(accounting.fragments_rebuilt), &note], Emphasis::Warning);
    }
    for unit in &report.recovered {
        grid.emphasised(["lost", unit, "the run went on without it"], Emphasis::Warning);
    }
    for RecoveredFailure { unit, cause } in &report.recovered_failures {
        grid.emphasised(["  cause", unit, cause], Emphasis::Warning);
    }
    for unit in &report.joined {
        grid.row(["joined", unit, "started again"]);
    }
    for live in &report.live_sources {
        for (what, fragments) in live.losses().into_iter().filter(|(_, fragments)| *fragments > 0) {
            let note = format!("{what}, of {}", live.source);
            grid.emphasised(["  source", &count(fragments), &note], Emphasis::Warning);
        }
        if live.refused > 0 {
            let note = format!("dead time, {} refused, of {}", count(live.refused), live.source);
            grid.emphasised(["  source", &live.dead_time_s.to_string(), &note], Emphasis::Warning);
        }
    }
    for CorruptSource { source, fragments, checked } in &report.corrupt_sources {
        let of = match checked {
            0 => format!("of {source}"),
            checked => format!("of {source}, {} checked", count(*checked)),
        };
        grid.emphasised(["  corrupt", &count(*fragments), &of], Emphasis::Warning);
    }
}

/// A rate without unit, as an integer if that has three digits or more.
fn whole(rate: f64) -> String {
    if (100.0..1e15).contains(&rate) {
        count(rate.round() as u64)
    } else {
        metric(rate, "").trim_end().into()
    }
}

fn units(report: &RunReport) -> Grid {
    use Alignment::{Left, Right};
    let mut grid = Grid::new(&[Left, Right, Right, Right, Right, Right, Right, Left]);
    let head = ["unit", "events", "fragments", "payload", "rate", "memory", "cpu", "exit"];
    grid.emphasised(head, Emphasis::Dim);
    for unit in &report.units {
        let UnitReport { name, events, fragments, payload_bytes, peak_memory_bytes, cpu_time_s, exit_status } =
            unit;
        let rate = payload_bytes.per(report.duration_s).map_or(String::new(), |rate| rate.to_string());
        let memory = peak_memory_bytes.map_or(String::new(), |bytes| bytes.to_string());
        let cpu = cpu_time_s.map_or(String::new(), |time| time.to_string());
        let [events, fragments] = [*events, *fragments].map(count);
        grid.row([name, &events, &fragments, &payload_bytes.to_string(), &rate, &memory, &cpu, exit_status]);
    }
    grid
}

#[derive(Clone, Copy)]
enum Alignment {
    Left,
    Right,
}

/// Rows of cells; columns are as wide as their longest cell.
struct Grid {
    alignments: Vec<Alignment>,
    rows: Vec<(Vec<String>, Emphasis)>,
}

impl Grid {
    fn new(alignments: &[Alignment]) -> Self {
        Self { alignments: alignments.to_vec(), rows: Vec::new() }
    }

    fn row<const N: usize>(&mut self, cells: [&str; N]) {
        self.emphasised(cells, Emphasis::Normal);
    }

    fn emphasised<const N: usize>(&mut self, cells: [&str; N], emphasis: Emphasis) {
        self.rows.push((cells.map(str::to_owned).to_vec(), emphasis));
    }

    fn write(&self, out: &mut String, style: Style) {
        let width = |column: usize| {
            self.rows.iter().map(|(cells, _)| cells[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.alignments.len()).map(width).collect();
        for (cells, emphasis) in &self.rows {
            let mut text = String::new();
            for ((cell, alignment), width) in cells.iter().zip(&self.alignments).zip(&widths) {
                // Writing to a string does not fail.
                let _ = match alignment {
                    Alignment::Left => write!(text, "{cell:<width$}   "),
                    Alignment::Right => write!(text, "{cell:>width$}   "),
                };
            }
            let text = format!("  {}", text.trim_end());
            out.push_str(&style.paint(*emphasis, &text));
            out.push('\n');
        }
    }
}
