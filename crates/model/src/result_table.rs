//! Tables of results: as text, CSV and chart.

use crate::rows::write_record;
use millstream_report::chart::{Chart, Series};
use std::fmt;

/// A field of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum TableValue {
    /// A name, or a value as given.
    Text(String),
    /// A result.
    Number(f64),
}

impl TableValue {
    /// The number that the field starts with.
    fn number(&self) -> Option<f64> {
        match self {
            TableValue::Number(value) => Some(*value),
            TableValue::Text(text) => text.split(' ').next().and_then(|word| word.parse().ok()),
        }
    }
}

impl fmt::Display for TableValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TableValue::Text(text) => f.write_str(text),
            TableValue::Number(value) if value.fract() == 0.0 && value.abs() < 1e15 => write!(f, "{value}"),
            TableValue::Number(value) => {
                // Four significant digits.
                let digits = (3 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 6) as usize;
                write!(f, "{value:.digits$}")
            }
        }
    }
}

/// A table of results.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResultTable {
    /// Title.
    pub title: String,
    /// Column names with units.
    pub columns: Vec<String>,
    /// Rows; each has one value per column.
    pub rows: Vec<Vec<TableValue>>,
}

impl ResultTable {
    /// The table as CSV.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut text = String::new();
        write_record(&mut text, &self.columns);
        for row in &self.rows {
            write_record(&mut text, row.iter().map(TableValue::to_string));
        }
        text
    }

    /// A chart of column `y` over column `x`, with one series per combination of the columns `series_columns`.
    #[must_use]
    pub fn chart(&self, x: usize, y: usize, series_columns: &[usize]) -> Chart {
        let mut series: Vec<Series> = Vec::new();
        for (i, row) in self.rows.iter().enumerate() {
            let names: Vec<String> = series_columns
                .iter()
                .map(|&column| {
                    let name = self.columns[column].rsplit('.').next().unwrap_or_default();
                    format!("{name} {}", row[column])
                })
                .collect();
            let name = if names.is_empty() { self.columns[y].clone() } else { names.join(", ") };
            // Values that are not numbers are drawn in row order.
            let point = (row[x].number().unwrap_or(i as f64), row[y].number().unwrap_or(f64::NAN));
            match series.iter_mut().find(|known| known.name == name) {
                Some(known) => known.points.push(point),
                None => series.push(Series { name, points: vec![point] }),
            }
        }
        let log2_x = (self.rows.iter().filter_map(|row| row[x].number()))
            .all(|value| value >= 1.0 && value.log2().fract() == 0.0);
        Chart {
            title: self.title.clone(),
            x: self.columns[x].clone(),
            y: self.columns[y].clone(),
            log2_x: log2_x && self.rows.len() > 2,
            series,
        }
    }
}

impl fmt::Display for ResultTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(TableValue::to_string).collect()).collect();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                let cells = shown.iter().map(|row| row[i].chars().count());
                cells.chain([self.columns[i].chars().count()]).max().unwrap_or(0)
            })
            .collect();
        writeln!(f, "{}", self.title)?;
        let text = |i: usize| matches!(self.rows.first().map(|row| &row[i]), Some(TableValue::Text(_)));
        let mut line = |cells: &[String]| {
            let padded: Vec<String> = (cells.iter().enumerate())
                .map(|(i, cell)| {
                    let width = widths[i];
                    if text(i) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                })
                .collect();
            writeln!(f, "{}", padded.join("  ").trim_end())
        };
        line(&self.columns)?;
        shown.iter().try_for_each(|row| line(row))
    }
}

#[cfg(test)]
mod tests {
    use super::{ResultTable, TableValue};

    fn table() -> ResultTable {
        let row = |a: &str, x: f64, y: f64| {
            vec![TableValue::Text(a.into()), TableValue::Number(x), TableValue::Number(y)]
        };
        ResultTable {
            title: "t".into(),
            columns: vec!["a.b".into(), "bytes".into(), "GB/s".into()],
            rows: vec![row("p", 2.0, 0.123_456), row("p", 4.0, 12.3456), row("q, r", 2.0, 3.0)],
        }
    }

    #[test]
    fn text_columns_are_left_aligned() {
        let text = table().to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            ["t", "a.b   bytes    GB/s", "p         2  0.1235", "p         4   12.35", "q, r      2       3"]
        );
        assert_eq!(table().csv().lines().last(), Some("\"q, r\",2,3"));
    }

    #[test]
    fn a_chart_has_one_series_per_combination() {
        let chart = table().chart(1, 2, &[0]);
        assert_eq!(chart.series.len(), 2);
        assert_eq!((chart.series[0].name.as_str(), chart.series[0].points.len()), ("b p", 2));
        assert!(chart.log2_x);
    }
}
