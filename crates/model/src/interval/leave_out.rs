//! Predictions of published rows without themselves, their host or their system.
//!
//! A parameter that was fitted to rows that are left out is fitted to its other rows. Without others, the value of the device
//! that it is `like` applies, or the middle of its range. `data/leave-one-out.csv` has the results; they set the intervals.

use super::factors::{Factors, Level, factors};
use super::{Spread, response};
use crate::calibrate::{fit_one, numbers};
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::precision::Precision;
use crate::rows::{
    Answer, Category, Row, answer, answer_at, baseline, calibration, site_of, with_devices_of, write_record,
};
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::sync::LazyLock;

/// A published row that was predicted without itself.
#[derive(Clone, Debug, PartialEq)]
pub struct LeftOut {
    /// Row id.
    pub id: String,
    /// What was left out with it.
    pub level: Level,
    /// Category of the row.
    pub category: Category,
    /// Published value.
    pub published: f64,
    /// The model's value.
    pub predicted: f64,
    /// Spread of the model's value.
    pub spread: Spread,
    /// Value without model: the nearest row that was not left out, or a line rate.
    pub baseline: Option<f64>,
}

impl LeftOut {
    /// Natural logarithm of published to predicted value.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        (self.published / self.predicted).ln()
    }

    /// Whether the published value is inside the interval.
    #[must_use]
    pub fn is_inside(&self, factors: Factors) -> bool {
        let [below, above] = factors.distances(self.spread);
        (-below..=above).contains(&self.deviation())
    }
}

/// Rows that measure the model: those with one number and a category.
#[must_use]
pub fn measured_rows() -> Vec<(Row, f64)> {
    let one = |row: Row| match numbers(&row.value).as_deref() {
        Some([value]) if row.category().is_some() && !row.is_input() => Some((row, *value)),
        _ => None,
    };
    calibration().into_iter().filter_map(one).collect()
}

/// Ids of the rows that are left out with `row`.
fn group(rows: &[(Row, f64)], row: &Row, level: Level) -> BTreeSet<String> {
    let is_in = |other: &Row| match level {
        Level::Row => other.id == row.id,
        Level::Host => other.system == row.system,
        Level::System => {
            other.system == row.system || (site_of(row).is_some() && site_of(other) == site_of(row))
        }
    };
    rows.iter().map(|(other, _)| other).filter(|other| is_in(other)).map(|other| other.id.clone()).collect()
}

/// The parameters as they would be without some rows.
#[must_use]
pub fn parameters_without(p: &Parameters, rows: &[Row], left_out: &BTreeSet<String>) -> Parameters {
    let mut other = p.clone();
    let mut fits = Vec::new();
    for (name, parameter) in p.iter() {
        let rest: Vec<&str> =
            parameter.fitted_to.iter().map(String::as_str).filter(|id| !left_out.contains(*id)).collect();
        if rest.len() == parameter.fitted_to.len() {
            continue;
        }
        if rest.is_empty() {
            other = other.with_heirs(name, p.without_rows(name, left_out));
        } else {
            fits.push((name, rest));
        }
    }
    for (name, ids) in fits {
        let fitted: Vec<Row> = rows.iter().filter(|row| ids.contains(&row.id.as_str())).cloned().collect();
        other = fit_one(&other, &fitted, name);
    }
    other
}

/// The only value of an answer.
fn one_value(answer: Answer) -> Option<f64> {
    match answer {
        Answer::Values { values, .. } => values.first().copied(),
        _ => None,
    }
}

/// Spread of a row over samples of the parameters; without samples none.
#[must_use]
pub fn spread_of(row: &Row, p: &Parameters, samples: u64) -> Spread {
    if samples == 0 {
        return Spread::default();
    }
    let run = |p: &Parameters| Some(vec![one_value(answer_at(Precision::Sample, row, p))?]);
    response::spreads(&with_devices_of(row, p), samples, run).first().copied().unwrap_or_default()
}

/// Predicts every published row without the rows of each level; spreads have `samples` samples.
#[must_use]
pub fn leave_out(p: &Parameters, samples: u64, mut progress: impl FnMut(&str)) -> Vec<LeftOut> {
    let measured = measured_rows();
    let rows: Vec<Row> = measured.iter().map(|(row, _)| row.clone()).collect();
    let mut all = Vec::new();
    for level in [Level::Row, Level::Host, Level::System] {
        let mut groups: Vec<BTreeSet<String>> = Vec::new();
        for row in &rows {
            let group = group(&measured, row, level);
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
        for left_out in groups {
            progress(&format!("{level}: {}", left_out.iter().next().map_or("", String::as_str)));
            let without = parameters_without(p, &rows, &left_out);
            let known: Vec<Row> = rows.iter().filter(|row| !left_out.contains(&row.id)).cloned().collect();
            let members: Vec<&(Row, f64)> =
                measured.iter().filter(|(row, _)| left_out.contains(&row.id)).collect();
            let predicted = parallel_map(&members, |(row, published)| {
                Some(LeftOut {
                    id: row.id.clone(),
                    level,
                    category: row.category()?,
                    published: *published,
                    predicted: one_value(answer(row, &without))?,
                    spread: spread_of(row, &without, samples),
                    baseline: baseline(row, &without, &known).map(|baseline| baseline.value),
                })
            });
            all.extend(predicted.into_iter().flatten());
        }
    }
    all
}

/// Rows as CSV.
#[must_use]
pub fn to_csv(rows: &[LeftOut]) -> String {
    let mut text = String::from("id,left out,published,predicted,below,above,baseline\n");
    for row in rows {
        let number = |value: f64| format!("{value:.5}");
        write_record(
            &mut text,
            [
                row.id.clone(),
                row.level.to_string(),
                row.published.to_string(),
                format!("{:.5}", row.predicted),
                number(row.spread.below),
                number(row.spread.above),
                row.baseline.map_or(String::new(), |value| format!("{value:.5}")),
            ],
        );
    }
    text
}

/// Reads the text of [`to_csv`].
fn parse(text: &str) -> Option<Vec<LeftOut>> {
    let rows = calibration();
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let record = |record: csv::StringRecord| {
        let number = |i: usize| record.get(i)?.parse::<f64>().ok();
        let id = record.get(0)?.to_owned();
        let level = match record.get(1)? {
            "row" => Level::Row,
            "host" => Level::Host,
            "system" => Level::System,
            _ => return None,
        };
        Some(LeftOut {
            category: rows.iter().find(|row| row.id == id)?.category()?,
            id,
            level,
            published: number(2)?,
            predicted: number(3)?,
            spread: Spread { below: number(4)?, above: number(5)? },
            baseline: number(6),
        })
    };
    reader.records().map(|line| record(line.ok()?)).collect()
}

static SHIPPED: LazyLock<Vec<LeftOut>> = LazyLock::new(|| {
    parse(include_str!("../../data/leave-one-out.csv")).expect("a test reads the shipped file")
});

/// The shipped results, which set the intervals.
#[must_use]
pub fn shipped() -> &'static [LeftOut] {
    &SHIPPED
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Errors and coverage of rows that were left out, as text.
#[derive(Debug)]
pub struct LeaveOutReport<'a>(pub &'a [LeftOut]);

impl LeaveOutReport<'_> {
    fn line(&self, f: &mut fmt::Formatter<'_>, name: &str, rows: &[&LeftOut]) -> fmt::Result {
        let error = |row: &LeftOut, value: f64| (value / row.published - 1.0).abs();
        let model = median(rows.iter().map(|row| error(row, row.predicted)).collect());
        let with_baseline: Vec<_> = rows.iter().filter_map(|row| Some((*row, row.baseline?))).collect();
        let of_baseline = median(with_baseline.iter().map(|(row, value)| error(row, *value)).collect());
        let of_model = median(with_baseline.iter().map(|(row, _)| error(row, row.predicted)).collect());
        // The factors of a row come from all others.
        let without = |row: &LeftOut| -> Factors {
            let others: Vec<LeftOut> = self.0.iter().filter(|other| other.id != row.id).cloned().collect();
            factors(&others, row.level, row.category)
        };
        let of_rows: Vec<Factors> = rows.iter().map(|row| without(row)).collect();
        let inside = rows.iter().zip(&of_rows).filter(|(row, factors)| row.is_inside(**factors)).count();
        let width =
            |(row, factors): (&&LeftOut, &Factors)| super::Interval::new(1.0, row.spread, *factors).width();
        let width = median(rows.iter().zip(&of_rows).map(width).collect());
        let mut text = String::new();
        write!(text, "{name:<28} {:>4}   {:>6.1} %", rows.len(), model * 100.0)?;
        if with_baseline.is_empty() {
            write!(text, "        -        -")?;
        } else {
            write!(text, "   {:>6.1} %   {:>5.2}", of_baseline * 100.0, of_model / of_baseline)?;
        }
        writeln!(
            f,
            "{text}     {:>4.0} %   {:>4.0} %",
            100.0 * inside as f64 / rows.len() as f64,
            width * 100.0
        )
    }
}

/// Error of every prediction of a system that was left out.
struct SystemErrors {
    system: String,
    errors: Vec<f64>,
}

/// Errors of the rows at the level of systems, by the system that was measured.
fn errors_by_system(rows: &[LeftOut]) -> Vec<SystemErrors> {
    let published = calibration();
    let mut all: Vec<SystemErrors> = Vec::new();
    for row in rows.iter().filter(|row| row.level == Level::System) {
        let known = published.iter().find(|known| known.id == row.id);
        let system = known.map_or_else(|| row.id.clone(), |known| known.system.clone());
        let error = (row.predicted / row.published - 1.0).abs();
        match all.iter_mut().find(|entry| entry.system == system) {
            Some(entry) => entry.errors.push(error),
            None => all.push(SystemErrors { system, errors: vec![error] }),
        }
    }
    all
}

impl LeaveOutReport<'_> {
    /// Median error of each system without its rows, and the mean of these medians.
    fn systems(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let systems = errors_by_system(self.0);
        if systems.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nsystem without its rows                      rows   median error   largest error")?;
        let mut sum = 0.0;
        for SystemErrors { system, errors } in &systems {
            let (middle, largest) =
                (median(errors.clone()), errors.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            sum += middle;
            let rows = errors.len();
            writeln!(f, "{system:<44} {rows:>4}   {:>10.1} %   {:>11.1} %", middle * 100.0, largest * 100.0)?;
        }
        let mean = sum / systems.len() as f64 * 100.0;
        writeln!(f, "mean of the medians of {} systems: {mean:.1} %", systems.len())
    }
}

impl fmt::Display for LeaveOutReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "left out                     rows   median error   baseline   ratio   inside   width of 90 % intervals"
        )?;
        for level in [Level::Row, Level::Host, Level::System] {
            let rows: Vec<&LeftOut> = self.0.iter().filter(|row| row.level == level).collect();
            if rows.is_empty() {
                continue;
            }
            self.line(f, &format!("one {level}"), &rows)?;
            if level != Level::System {
                continue;
            }
            let categories: BTreeSet<Category> = rows.iter().map(|row| row.category).collect();
            for category in categories {
                let own: Vec<&LeftOut> =
                    rows.iter().copied().filter(|row| row.category == category).collect();
                self.line(f, &format!("  {category}"), &own)?;
            }
        }
        self.systems(f)?;
        writeln!(f, "\nratio: median error of the model to that of the baseline, over rows with a baseline")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_results_are_of_every_measured_row_and_level() {
        let measured = measured_rows();
        for level in [Level::Row, Level::Host, Level::System] {
            let ids: Vec<&str> =
                shipped().iter().filter(|row| row.level == level).map(|row| row.id.as_str()).collect();
            assert_eq!(ids.len(), measured.len(), "{level}");
            assert!(measured.iter().all(|(row, _)| ids.contains(&row.id.as_str())), "{level}");
        }
        assert_eq!(parse(&to_csv(shipped())).as_deref(), Some(shipped()));
    }

    #[test]
    fn the_report_has_every_system_with_its_median_and_the_mean_of_all() {
        let systems = errors_by_system(shipped());
        let rows: usize = systems.iter().map(|entry| entry.errors.len()).sum();
        assert_eq!(rows, measured_rows().len());
        let text = LeaveOutReport(shipped()).to_string();
        assert!(systems.iter().all(|entry| text.contains(&entry.system)), "{text}");
        let mean: f64 = systems.iter().map(|entry| median(entry.errors.clone())).sum::<f64>();
        let mean = mean / systems.len() as f64 * 100.0;
        assert!(text.contains(&format!("{} systems: {mean:.1} %", systems.len())), "{text}");
        // What the model promises (docs/model.md).
        assert!(mean <= 8.0, "{text}");
        assert!(systems.iter().all(|entry| median(entry.errors.clone()) <= 0.1), "{text}");
    }

    #[test]
    fn a_parameter_without_rows_takes_the_value_of_a_similar_device() {
        let p = Parameters::shipped();
        let rows: Vec<Row> = measured_rows().into_iter().map(|(row, _)| row).collect();
        let left_out = ["D01".to_owned()].into();
        let without = parameters_without(&p, &rows, &left_out);
        assert_ne!(p.get("connectx-3.message.gap"), without.get("connectx-3.message.gap"));
        assert_eq!(without.get("connectx-3.message.gap"), p.get("connectx.message.gap"));
        assert_eq!(without.get("connectx-3.read.gap"), p.get("connectx-3.read.gap"));
    }

    #[test]
    fn predictions_do_not_depend_on_the_published_value_of_a_row_that_is_left_out() {
        let p = Parameters::shipped();
        let rows: Vec<Row> = measured_rows().into_iter().map(|(row, _)| row).collect();
        let left_out: BTreeSet<String> = ["H23".to_owned()].into();
        let changed: Vec<Row> = (rows.iter().cloned())
            .map(|row| if row.id == "H23" { Row { value: "1.0".to_owned(), ..row } } else { row })
            .collect();
        assert_eq!(parameters_without(&p, &rows, &left_out), parameters_without(&p, &changed, &left_out));
    }
}
