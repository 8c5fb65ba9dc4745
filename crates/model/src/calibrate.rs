//! Fits parameters to published rows, and reports the residual of every row.

use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::rows::{Answer, Category, Row, answer};
use std::collections::BTreeMap;
use std::fmt;

/// A published row with the model's answer.
#[derive(Clone, Debug)]
pub struct Residual {
    /// The row.
    pub row: Row,
    /// The model's answer.
    pub answer: Answer,
    /// Relative deviation: 0.05 is 5 % above the published value. The largest of several values.
    /// None for inputs and for rows without numbers.
    pub relative: Option<f64>,
}

/// The numbers of a published value: `230400 / 460800` are two.
#[must_use]
pub fn numbers(text: &str) -> Option<Vec<f64>> {
    text.split('/').map(|part| part.trim().parse().ok()).collect()
}

/// The residual of a row.
#[must_use]
pub fn residual(row: &Row, p: &Parameters) -> Residual {
    let answer = answer(row, p);
    let relative = match (&answer, numbers(&row.value)) {
        (Answer::Values { values, .. }, Some(published))
            if values.len() == published.len() && !row.is_input() =>
        {
            let each = values.iter().zip(&published).map(|(model, value)| model / value - 1.0);
            each.max_by(|a, b| a.abs().total_cmp(&b.abs()))
        }
        _ => None,
    };
    Residual { row: row.clone(), answer, relative }
}

/// The residuals of all rows, computed in parallel.
#[must_use]
pub fn residuals(rows: &[Row], p: &Parameters) -> Vec<Residual> {
    parallel_map(rows, |row| residual(row, p))
}

/// Fits every parameter that lists rows, one after the other, within its range.
#[must_use]
pub fn fit(start: &Parameters, rows: &[Row], passes: u32, mut progress: impl FnMut(&str)) -> Parameters {
    let mut best = start.clone();
    let fitted: Vec<(String, Vec<String>)> = (start.iter())
        .filter(|(_, q)| !q.fitted_to.is_empty() && q.low < q.high)
        .map(|(name, q)| (name.to_owned(), q.fitted_to.clone()))
        .collect();
    for pass in 1..=passes {
        for (name, ids) in &fitted {
            progress(&format!("pass {pass} of {passes}: {name}"));
            let fitted_rows: Vec<Row> = rows.iter().filter(|row| ids.contains(&row.id)).cloned().collect();
            best = fit_one(&best, &fitted_rows, name);
        }
    }
    best
}

/// Fits one parameter to rows, within its range.
#[must_use]
pub fn fit_one(start: &Parameters, rows: &[Row], name: &str) -> Parameters {
    let Some((_, parameter)) = start.iter().find(|(known, _)| *known == name) else { return start.clone() };
    let cost = |value: f64| {
        let trial = start.with_heirs(name, value);
        let each = parallel_map(rows, |row| residual(row, &trial).relative.unwrap_or(0.0));
        each.iter().map(|r| (1.0 + r).ln().powi(2)).sum::<f64>()
    };
    start.with_heirs(name, minimise(parameter.low, parameter.high, parameter.value, cost))
}

/// Argument of the smallest cost: a grid over the range, refined twice. `old` wins unless another value is at
/// least 2 % better, so that fitting twice changes nothing.
fn minimise(low: f64, high: f64, old: f64, cost: impl Fn(f64) -> f64) -> f64 {
    const POINTS: u32 = 6;
    let (mut best, mut best_cost) = (old, cost(old) * 0.98);
    let (mut from, mut to) = (low, high);
    for _ in 0..3 {
        let step = (to - from) / f64::from(POINTS);
        for i in 0..=POINTS {
            let value = from + step * f64::from(i);
            let now = cost(value);
            if now < best_cost {
                (best, best_cost) = (value, now);
            }
        }
        (from, to) = ((best - step).max(low), (best + step).min(high));
    }
    // Published rows do not support more than three significant digits.
    let digits = 10f64.powi(2 - best.abs().max(1e-9).log10().floor() as i32);
    let round = (best * digits).round() / digits;
    round.clamp(low, high)
}

/// Root mean square of the residuals of each category.
#[must_use]
pub fn rms_by_category(residuals: &[Residual]) -> BTreeMap<Category, f64> {
    let mut sums: BTreeMap<Category, (f64, u32)> = BTreeMap::new();
    for (category, relative) in residuals.iter().filter_map(|r| Some((r.row.category()?, r.relative?))) {
        let sum = sums.entry(category).or_default();
        *sum = (sum.0 + relative * relative, sum.1 + 1);
    }
    sums.into_iter().map(|(category, (sum, n))| (category, (sum / f64::from(n)).sqrt())).collect()
}

/// Parameters and residuals as text.
#[derive(Debug)]
pub struct CalibrationReport<'a> {
    /// The parameters.
    pub parameters: &'a Parameters,
    /// Residuals of all rows.
    pub residuals: &'a [Residual],
}

impl fmt::Display for CalibrationReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "parameter                                  value        range              unit  fitted to"
        )?;
        for (name, p) in self.parameters.iter() {
            let fitted_to = match p.fitted_to.as_slice() {
                [] => String::new(),
                [one] => format!("{one} only"),
                [first, .., last] => format!("{} rows, {first} to {last}", p.fitted_to.len()),
            };
            let range = format!("{} to {}", p.low, p.high);
            writeln!(f, "{name:<40}  {:<10}  {range:<18}  {:<4}  {fitted_to}", p.value, p.unit)?;
        }
        writeln!(f, "\nrow   published         model             residual   quantity")?;
        let mut exceptions = 0;
        for r in self.residuals {
            let shown = |v: &f64| if v.abs() >= 100.0 { format!("{v:.1}") } else { format!("{v:.3}") };
            let (model, method) = match &r.answer {
                Answer::Values { values, method } => {
                    (values.iter().map(shown).collect::<Vec<_>>().join(" / "), method.as_str())
                }
                Answer::Definition(source) => ("definition".to_owned(), source.as_str()),
                Answer::NotModelled(why) => ("not modelled".to_owned(), *why),
            };
            let residual = match r.relative {
                Some(relative) => format!("{:+.1} %", 100.0 * relative),
                None if r.row.is_input() => "input".to_owned(),
                None => String::new(),
            };
            let mark = if r.relative.is_some_and(|v| v.abs() > 0.05) { " *" } else { "" };
            exceptions += u32::from(!mark.is_empty());
            let value: String = r.row.value.chars().take(16).collect();
            writeln!(
                f,
                "{:<4}  {value:<16}  {model:<16}  {residual:>7}{mark:<2}  {} [{}]; {method}",
                r.row.id, r.row.quantity, r.row.unit
            )?;
        }
        let counted = self.residuals.iter().filter(|r| r.relative.is_some()).count();
        let inputs = self.residuals.iter().filter(|r| r.row.is_input()).count();
        writeln!(
            f,
            "\n{counted} rows with residuals, {inputs} inputs; {exceptions} residuals above 5 % (*, docs/model.md)"
        )
    }
}
