//! The report for a terminal: one screen, aligned.

use std::fmt::Write as _;
use std::io::IsTerminal;

use crate::quantity::{block, count, per_cent};
use crate::run::{Fate, RunReport, UnitReport};
use millstream_quantity::si::metric;

/// Whether the table has colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// Text alone.
    #[default]
    Plain,
    /// With ANSI colours.
    Coloured,
}

impl Style {
    /// Colours if `out` is a terminal that can show them and the user has not set `NO_COLOR`.
    pub fn of(out: &impl IsTerminal) -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if out.is_terminal() && !set("NO_COLOR") && !dumb { Self::Coloured } else { Self::Plain }
    }

    fn paint(self, ink: Ink, text: &str) -> String {
        let code = match ink {
            Ink::Normal => return text.to_owned(),
            Ink::Faint => 2,
            Ink::Strong => 1,
            Ink::Good => 32,
            Ink::Warning => 33,
            Ink::Bad => 31,
        };
        match self {
            Self::Plain => text.to_owned(),
            Self::Coloured => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }
}

/// What a text says about itself by its colour.
#[derive(Clone, Copy)]
enum Ink {
    Normal,
    Faint,
    Strong,
    Good,
    Warning,
    Bad,
}

/// The report as a table, a line feed at the end of each line.
pub fn render(report: &RunReport, style: Style) -> String {
    let derived = report.derived();
    let mut out = String::new();
    let (word, ink) = if derived.success { ("OK", Ink::Good) } else { ("FAILED", Ink::Bad) };
    let software = style.paint(Ink::Faint, &report.software);
    line(&mut out, &[&style.paint(Ink::Strong, &report.name), &software, &style.paint(ink, word)]);
    out.push('\n');

    let mut summary = Grid::new(&[Side::Left, Side::Right, Side::Left]);
    summarise(report, &mut summary);
    summary.write(&mut out, style);
    if !report.units.is_empty() {
        out.push('\n');
        units(report).write(&mut out, style);
    }
    if !derived.problems.is_empty() {
        out.push('\n');
    }
    for problem in &derived.problems {
        line(&mut out, &[&style.paint(Ink::Bad, "wrong:"), problem]);
    }
    out
}

fn line(out: &mut String, words: &[&str]) {
    let words: Vec<&str> = words.iter().copied().filter(|word| !word.is_empty()).collect();
    out.push_str(&words.join("  "));
    out.push('\n');
}

fn summarise(report: &RunReport, grid: &mut Grid) {
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
    if let Some(memcpy) = &report.memcpy {
        let fraction = derived.fraction_of_memcpy.map_or(String::new(), |fraction| format!("{fraction:.2}"));
        let note = format!("of memcpy: {} in blocks of {}", memcpy.bytes_per_s, block(memcpy.block_bytes));
        grid.row(["", &fraction, &note]);
    }
    let files = report.event_files.len();
    let stored = match files {
        0 => format!("{} stored", count(report.stored_events)),
        1 => format!("{} stored in 1 file", count(report.stored_events)),
        _ => format!("{} stored in {files} files", count(report.stored_events)),
    };
    let known = report.stored_events.saturating_add(report.counted_only_events);
    let ink = if known == report.accepted_events { Ink::Normal } else { Ink::Bad };
    grid.inked(["accepted", &count(report.accepted_events), &stored], ink);
    if let Some(trigger) = &report.trigger {
        let note = format!(
            "of {} decisions of {} agree ({}), {} set",
            count(trigger.compared),
            trigger.kernel,
            per_cent(trigger.agreeing, trigger.compared),
            count(trigger.set)
        );
        let ink = if trigger.agreeing == trigger.compared { Ink::Good } else { Ink::Bad };
        grid.inked(["trigger", &count(trigger.agreeing), &note], ink);
    }

    let law = &report.conservation;
    let terms = Fate::ALL.map(|fate| format!("{} {}", count(law.fragments(fate)), fate.name()));
    let holds = law.fragments_gone() == law.fragments_read && law.violations.is_empty();
    let (sign, ink) = if holds { ("=", Ink::Good) } else { ("≠", Ink::Bad) };
    let note = format!("{sign} {}", terms.join(" + "));
    grid.inked(["fragments read", &count(law.fragments_read), &note], ink);
    for fate in [Fate::Incomplete, Fate::Discarded] {
        for term in law.of(fate).filter(|term| term.fragments > 0 || term.events > 0) {
            let events = if term.events == 1 { "event" } else { "events" };
            let note = format!("{} in {} {events}", term.cause, count(term.events));
            grid.inked([&format!("  {}", fate.name()), &count(term.fragments), &note], Ink::Warning);
        }
    }
}

/// A rate of things, in whole numbers where that is exact enough.
fn whole(rate: f64) -> String {
    if (100.0..1e15).contains(&rate) {
        count(rate.round() as u64)
    } else {
        metric(rate, "").trim_end().into()
    }
}

fn units(report: &RunReport) -> Grid {
    use Side::{Left, Right};
    let mut grid = Grid::new(&[Left, Right, Right, Right, Right, Right, Right, Left]);
    let head = ["unit", "events", "fragments", "payload", "rate", "memory", "cpu", "end"];
    grid.inked(head, Ink::Faint);
    for unit in &report.units {
        let UnitReport { name, events, fragments, payload_bytes, peak_memory_bytes, cpu_s, end } = unit;
        let rate = payload_bytes.per(report.duration_s).map_or(String::new(), |rate| rate.to_string());
        let memory = peak_memory_bytes.map_or(String::new(), |bytes| bytes.to_string());
        let cpu = cpu_s.map_or(String::new(), |time| time.to_string());
        let [events, fragments] = [*events, *fragments].map(count);
        grid.row([name, &events, &fragments, &payload_bytes.to_string(), &rate, &memory, &cpu, end]);
    }
    grid
}

#[derive(Clone, Copy)]
enum Side {
    Left,
    Right,
}

/// Rows of cells in columns as wide as they have to be.
struct Grid {
    sides: Vec<Side>,
    rows: Vec<(Vec<String>, Ink)>,
}

impl Grid {
    fn new(sides: &[Side]) -> Self {
        Self { sides: sides.to_vec(), rows: Vec::new() }
    }

    fn row<const N: usize>(&mut self, cells: [&str; N]) {
        self.inked(cells, Ink::Normal);
    }

    fn inked<const N: usize>(&mut self, cells: [&str; N], ink: Ink) {
        self.rows.push((cells.map(str::to_owned).to_vec(), ink));
    }

    fn write(&self, out: &mut String, style: Style) {
        let width = |column: usize| {
            self.rows.iter().map(|(cells, _)| cells[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.sides.len()).map(width).collect();
        for (cells, ink) in &self.rows {
            let mut text = String::new();
            for ((cell, side), width) in cells.iter().zip(&self.sides).zip(&widths) {
                // Writing to a string does not fail.
                let _ = match side {
                    Side::Left => write!(text, "{cell:<width$}   "),
                    Side::Right => write!(text, "{cell:>width$}   "),
                };
            }
            let text = format!("  {}", text.trim_end());
            out.push_str(&style.paint(*ink, &text));
            out.push('\n');
        }
    }
}
