//! Predictions with 90 % intervals.
//!
//! An interval combines samples of all parameters from their ranges with the errors of published rows that were left out
//! ([`crate::interval`]).

use crate::interval::leave_out::{measured_rows, shipped};
use crate::interval::{Factors, Interval, Level, Spread, factors::factors, response};
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::precision::Precision;
use crate::rows::{
    Answer, Baseline, Category, Row, answer, answer_at, baseline, calibration, estimate, line_rate, site_of,
    why_no_baseline, with_devices_of, write_record,
};

/// The model's answer to one question.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Row id of the question.
    pub id: String,
    /// Unit of the values.
    pub unit: String,
    /// Values with their intervals; empty if the model has no answer.
    pub values: Vec<Interval>,
    /// Program that answered, or the reason why none did.
    pub method: String,
    /// Answer without model.
    pub baseline: Option<Baseline>,
}

/// Samples of the parameters behind an interval.
pub const SAMPLES: u64 = 1000;

/// Values of a row, scaled so that its reference row has its published value; and that scale.
///
/// The reference row is a measurement of the same adapter on the calibrated host. Its residual is a property of
/// the adapter, so it corrects every sample of the parameters.
fn scaled_by_reference(
    precision: Precision,
    row: &Row,
    reference: Option<&Row>,
    p: &Parameters,
) -> Option<(Vec<f64>, f64)> {
    let Answer::Values { mut values, .. } = answer_at(precision, row, p) else { return None };
    let scale = match (reference, reference.map(|reference| answer_at(precision, reference, p))) {
        (Some(reference), Some(Answer::Values { values, .. })) => {
            reference.value.parse::<f64>().ok()? / values[0]
        }
        _ => 1.0,
    };
    values.iter_mut().for_each(|value| *value *= scale);
    Some((values, scale))
}

/// What the model does not know about a question: a row of a known site, or a system.
fn level(row: &Row, measured: &[(Row, f64)]) -> Level {
    let is_known = |other: &Row| {
        other.system == row.system || (site_of(row).is_some() && site_of(row) == site_of(other))
    };
    if measured.iter().any(|(other, _)| is_known(other)) { Level::Row } else { Level::System }
}

/// Share of a category's error that a reference row leaves: the other part is the adapter's.
const REFERENCE_SHARE: f64 = 0.5;

/// Factors of a question's interval.
fn factors_of(row: &Row, category: Category, measured: &[(Row, f64)]) -> Factors {
    let factors = factors(shipped(), level(row, measured), category);
    if row.reference().is_none() {
        return factors;
    }
    Factors { error: (factors.error * REFERENCE_SHARE).max(0.045), ..factors }
}

/// Spreads of a row's values over samples of the parameters.
fn spreads(row: &Row, reference: Option<&Row>, p: &Parameters, samples: u64, values: usize) -> Vec<Spread> {
    let run =
        |p: &Parameters| scaled_by_reference(Precision::Sample, row, reference, p).map(|(values, _)| values);
    let mut all = response::spreads(&with_devices_of(row, p), samples, run);
    all.resize(values, Spread::default());
    all
}

/// Answers one question with `samples` samples of all parameters.
fn predict_row(
    row: &Row,
    reference: Option<&Row>,
    p: &Parameters,
    samples: u64,
    measured: &[(Row, f64)],
) -> Prediction {
    let (id, unit) = (row.id.clone(), row.unit.clone());
    let silent = |why: &str| Prediction {
        id: row.id.clone(),
        unit: row.unit.clone(),
        values: Vec::new(),
        method: why.to_owned(),
        baseline: None,
    };
    if let Some(by_hand) = estimate(&row.id) {
        let (Some(value), Some(low), Some(high)) = (by_hand.value, by_hand.low, by_hand.high) else {
            return silent(&by_hand.how);
        };
        let method = format!("by hand: {}", by_hand.how);
        let baseline = by_hand.baseline.clone();
        return Prediction { id, unit, values: vec![Interval { value, low, high }], method, baseline };
    }
    let method = match answer(row, p) {
        Answer::Values { method, .. } => method,
        Answer::Definition(source) => return silent(&format!("not modelled: {source}")),
        Answer::NotModelled(why) => return silent(&format!("not modelled: {why}")),
    };
    let Some((values, scale)) = scaled_by_reference(Precision::Full, row, reference, p) else {
        return silent("not modelled: its reference row has no value");
    };
    let category = row.category().unwrap_or(Category::System);
    let factors = factors_of(row, category, measured);
    let spreads = spreads(row, reference, p, samples, values.len());
    // No real transfer is faster than the slowest link.
    let limit = line_rate(row, p).unwrap_or(f64::INFINITY);
    let interval = |(&value, &spread)| Interval::new(value, spread, factors).below(limit);
    let values = values.iter().zip(&spreads).map(interval).collect();
    let method = match reference {
        Some(reference) => format!("{method}; scaled by {scale:.3}, the residual of row {}", reference.id),
        None => method,
    };
    let method = if row.is_tuned() { format!("{method}; tuned: not blind") } else { method };
    let known: Vec<Row> = measured.iter().map(|(row, _)| row.clone()).collect();
    Prediction { id, unit, values, method, baseline: baseline(row, p, &known) }
}

/// Answers questions with `samples` samples of the parameters.
#[must_use]
pub fn predict(questions: &[Row], p: &Parameters, samples: u64) -> Vec<Prediction> {
    let (calibrated, measured) = (calibration(), measured_rows());
    parallel_map(questions, |row| {
        let reference = row.reference().and_then(|id| calibrated.iter().find(|row| row.id == id));
        predict_row(row, reference, p, samples.max(1), &measured)
    })
}

fn four_digits(value: f64) -> String {
    let digits = (3 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 6) as usize;
    format!("{value:.digits$}")
}

/// Predictions as CSV. Several values of one row are separated by slashes; a row without answer has the value `silent`.
#[must_use]
pub fn to_csv(predictions: &[Prediction]) -> String {
    let mut text = String::from("id,value,unit,low,high,how\n");
    for p in predictions {
        let join = |f: fn(&Interval) -> f64| {
            p.values.iter().map(|v| four_digits(f(v))).collect::<Vec<_>>().join(" / ")
        };
        if p.values.is_empty() {
            write_record(&mut text, [&p.id, "silent", &p.unit, "", "", &p.method]);
            continue;
        }
        let (value, low, high) = (join(|v| v.value), join(|v| v.low), join(|v| v.high));
        write_record(&mut text, [&p.id, &value, &p.unit, &low, &high, &p.method]);
    }
    text
}

/// Predictions beside the answers without model, as CSV.
#[must_use]
pub fn baselines_to_csv(predictions: &[Prediction]) -> String {
    let mut text = String::from("id,prediction,baseline,unit,baseline from\n");
    for p in predictions.iter().filter(|p| !p.values.is_empty()) {
        let value = p.values.iter().map(|v| four_digits(v.value)).collect::<Vec<_>>().join(" / ");
        let (baseline, source) = match &p.baseline {
            Some(baseline) => (four_digits(baseline.value), baseline.source.as_str()),
            None => (String::new(), why_no_baseline(&p.id).unwrap_or("no row of this program")),
        };
        write_record(&mut text, [&p.id, &value, &baseline, &p.unit, source]);
    }
    text
}
