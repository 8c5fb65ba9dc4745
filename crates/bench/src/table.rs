//! The figures of one benchmark, as a table for the terminal.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::Benchmark;

/// One measured figure. In JSON: `{"name","value","unit","baseline","ratio"}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The measured quantity, for example `WRITE 64 KiB, perftest`.
    pub name: String,
    /// The median over all rounds, unless [`Benchmark::values`] says otherwise.
    pub value: f64,
    /// For example `GB/s` (10^9 bytes per second) or `µs`.
    pub unit: String,
    /// The baseline in the same unit, if the figure has one.
    pub baseline: Option<f64>,
    /// `value / baseline`.
    pub ratio: Option<f64>,
}

impl Figure {
    /// A figure with its baseline.
    #[must_use]
    pub fn with_baseline(name: impl Into<String>, value: f64, unit: &str, baseline: f64) -> Self {
        let ratio = (baseline != 0.0).then(|| value / baseline);
        Self { name: name.into(), value, unit: unit.to_owned(), baseline: Some(baseline), ratio }
    }

    /// A figure without a baseline.
    #[must_use]
    pub fn without_baseline(name: impl Into<String>, value: f64, unit: &str) -> Self {
        Self { name: name.into(), value, unit: unit.to_owned(), baseline: None, ratio: None }
    }

    /// Value, baseline and ratio as a table shows them; a missing one is empty.
    pub(crate) fn cells(&self) -> [String; 3] {
        let optional = |value: Option<f64>| value.map_or_else(String::new, number);
        let ratio = self.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        [number(self.value), optional(self.baseline), ratio]
    }
}

/// About four significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

/// A figure without a value, or whose value is not over all rounds. In JSON: `{"name","reason"}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotMeasured {
    /// The figure, or what several figures have in common.
    pub name: String,
    /// Why, on one line.
    pub reason: String,
}

impl std::fmt::Display for NotMeasured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name, self.reason)
    }
}

/// Selects figures by words in their names; without words it selects all.
#[derive(Clone, Copy, Debug)]
pub struct NameFilter<'a>(pub &'a [String]);

impl NameFilter<'_> {
    /// Whether the figure of this name is selected.
    #[must_use]
    pub fn selects(self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|word| name.contains(word.as_str()))
    }
}

/// The figures of one run of a benchmark.
#[derive(Clone, Debug)]
pub struct Table {
    benchmark: Benchmark,
    rounds: usize,
    figures: Vec<Figure>,
    not_measured: Vec<NotMeasured>,
}

/// Characters of a reason; outputs of programs are longer.
const LONGEST_REASON: usize = 300;

impl Table {
    /// An empty table for a run of `rounds` rounds.
    #[must_use]
    pub fn new(benchmark: Benchmark, rounds: usize) -> Self {
        Self { benchmark, rounds, figures: Vec::new(), not_measured: Vec::new() }
    }

    /// Adds a figure.
    pub fn push(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// Records that a figure has no value, or not one over all rounds. Each figure is named once.
    pub fn not_measured(&mut self, name: impl Into<String>, reason: &str) {
        let name = name.into();
        if self.not_measured.iter().any(|known| known.name == name) {
            return;
        }
        let mut reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((end, _)) = reason.char_indices().nth(LONGEST_REASON) {
            reason.truncate(end);
            reason.push('…');
        }
        self.not_measured.push(NotMeasured { name, reason });
    }

    /// The benchmark.
    #[must_use]
    pub fn benchmark(&self) -> &Benchmark {
        &self.benchmark
    }

    /// The number of rounds.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// The figures so far.
    #[must_use]
    pub fn figures(&self) -> &[Figure] {
        &self.figures
    }

    /// Figures without a value, or whose value is not over all rounds.
    #[must_use]
    pub fn unmeasured(&self) -> &[NotMeasured] {
        &self.not_measured
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let header = ["", "value", "unit", "baseline", "ratio"].map(str::to_owned);
        let mut rows = vec![header];
        rows.extend(self.figures.iter().map(|figure| {
            let [value, baseline, ratio] = figure.cells();
            [figure.name.clone(), value, figure.unit.clone(), baseline, ratio]
        }));
        let widths: [usize; 5] =
            std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
        let plural = if self.rounds == 1 { "" } else { "s" };
        writeln!(f, "{} ({} round{plural})", self.benchmark.title, self.rounds)?;
        for row in &rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
                // Names and units are aligned left, numbers right.
                let padding = " ".repeat(width - cell.chars().count());
                let _ = if i == 0 || i == 2 {
                    write!(line, "  {cell}{padding}")
                } else {
                    write!(line, "  {padding}{cell}")
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        writeln!(f, "values: {}", self.benchmark.values)?;
        writeln!(f, "baseline: {}", self.benchmark.baseline)?;
        self.not_measured.iter().try_for_each(|figure| writeln!(f, "not measured in all rounds: {figure}"))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Table {
        let mut table = Table::new(crate::verbs::BENCHMARK, 3);
        table.push(Figure::with_baseline("WRITE 64 KiB", 36.0, "GB/s", 40.0));
        table.push(Figure::without_baseline("latency", 0.18, "µs"));
        table
    }

    #[test]
    fn the_terminal_shows_names_values_and_ratios() {
        let text = sample().to_string();
        assert!(text.contains("WRITE 64 KiB"), "{text}");
        assert!(text.lines().any(|line| line.ends_with("40.0   0.90")), "{text}");
    }

    #[test]
    fn a_figure_that_is_not_measured_has_its_reason_on_one_line() {
        let mut table = sample();
        table.not_measured("rate", "exit status: 1\n  no device\n");
        table.not_measured("rate", "again");
        table.not_measured("time", &"é".repeat(1000));
        assert!(
            table.to_string().contains("not measured in all rounds: rate: exit status: 1 no device\n"),
            "{table}"
        );
        assert_eq!(table.unmeasured().len(), 2);
        assert_eq!(table.unmeasured()[1].reason.chars().count(), LONGEST_REASON + 1);
    }
}
