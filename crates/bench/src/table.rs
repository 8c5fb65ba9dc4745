//! Figures for people and for programs.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// One measured figure. In JSON: `{"name","value","unit","baseline","ratio"}`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// What was measured, for example `write 64 KiB`.
    pub name: String,
    /// How much.
    pub value: f64,
    /// For example `GB/s` (10^9 bytes a second) or `µs`.
    pub unit: String,
    /// The same run's baseline in the same unit, if there is one to compare with.
    pub baseline: Option<f64>,
    /// `value / baseline`.
    pub ratio: Option<f64>,
}

/// Rows that are asked for, by words in their names; without words all of them.
#[derive(Clone, Copy, Debug)]
pub struct Only<'a>(pub &'a [String]);

impl Only<'_> {
    /// Whether this row is.
    #[must_use]
    pub fn wants(self, row: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|word| row.contains(word.as_str()))
    }
}

impl Figure {
    /// A figure beside its baseline.
    #[must_use]
    pub fn against(name: impl Into<String>, value: f64, unit: &str, baseline: f64) -> Self {
        let ratio = (baseline != 0.0).then(|| value / baseline);
        Self { name: name.into(), value, unit: unit.to_owned(), baseline: Some(baseline), ratio }
    }

    /// A figure that stands alone.
    #[must_use]
    pub fn alone(name: impl Into<String>, value: f64, unit: &str) -> Self {
        Self { name: name.into(), value, unit: unit.to_owned(), baseline: None, ratio: None }
    }
}

/// A result could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {cause}")]
pub struct TableError {
    path: PathBuf,
    cause: std::io::Error,
}

/// The figures of one benchmark.
#[derive(Clone, Debug, Default)]
pub struct Table {
    title: String,
    baseline: String,
    figures: Vec<Figure>,
}

impl Table {
    /// An empty table; `baseline` says what figures are held against.
    #[must_use]
    pub fn new(title: &str, baseline: &str) -> Self {
        Self { title: title.to_owned(), baseline: baseline.to_owned(), figures: Vec::new() }
    }

    /// Adds a figure.
    pub fn push(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// The figures so far.
    #[must_use]
    pub fn figures(&self) -> &[Figure] {
        &self.figures
    }

    /// Writes one line of JSON for each figure, replacing the file whole.
    ///
    /// # Errors
    /// [`TableError`] if the file or its folder cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), TableError> {
        let fail = |cause: std::io::Error| TableError { path: path.to_owned(), cause };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(fail)?;
        }
        let partial = path.with_extension("jsonl.partial");
        let mut file = std::fs::File::create(&partial).map_err(fail)?;
        for figure in &self.figures {
            let line = serde_json::to_string(figure).map_err(|error| fail(error.into()))?;
            writeln!(file, "{line}").map_err(fail)?;
        }
        file.sync_all().map_err(fail)?;
        std::fs::rename(&partial, path).map_err(fail)
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = |value: f64| match value.abs() {
            v if v >= 1000.0 => format!("{value:.0}"),
            v if v >= 10.0 => format!("{value:.1}"),
            _ => format!("{value:.3}"),
        };
        let header = ["", "value", "unit", &self.baseline, "ratio"].map(str::to_owned);
        let mut rows = vec![header];
        rows.extend(self.figures.iter().map(|figure| {
            let optional = |value: Option<f64>| value.map_or_else(String::new, number);
            [
                figure.name.clone(),
                number(figure.value),
                figure.unit.clone(),
                optional(figure.baseline),
                figure.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            ]
        }));
        let widths: [usize; 5] =
            std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
        writeln!(f, "{}", self.title)?;
        for row in &rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
                // Names and units read from the left, numbers from the right.
                let padding = " ".repeat(width - cell.chars().count());
                let _ = if i == 0 || i == 2 {
                    write!(line, "  {cell}{padding}")
                } else {
                    write!(line, "  {padding}{cell}")
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new("copies", "memcpy");
        table.push(Figure::against("write 64 KiB", 36.0, "GB/s", 40.0));
        table.push(Figure::alone("latency", 0.18, "µs"));
        table
    }

    #[test]
    fn people_see_names_values_and_ratios() {
        let text = sample().to_string();
        assert!(text.contains("write 64 KiB"), "{text}");
        assert!(text.lines().any(|line| line.ends_with("40.0   0.90")), "{text}");
    }

    #[test]
    fn programs_read_one_object_a_line() {
        let folder = std::env::temp_dir().join(format!("millstream-bench-{}", std::process::id()));
        let path = folder.join("deep/copies.jsonl");
        sample().write(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["ratio"], 0.9);
        assert_eq!(lines[1]["baseline"], serde_json::Value::Null);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
