//! Predictions with intervals, from the ranges of parameters and from how far calibration is off.

use crate::calibrate::{residuals, rms_by_category};
use crate::engine::Random;
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::rows::{Answer, Category, Row, answer};
use crate::rows::{calibration, quote};
use std::fmt::Write as _;

/// What the model says about one question.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The question.
    pub id: String,
    /// Its unit.
    pub unit: String,
    /// Values with their intervals; most questions have one, and none means that the model is silent.
    pub values: Vec<Interval>,
    /// By which measurement, or why not.
    pub how: String,
}

/// A value that should be between two others nine times of ten.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The value.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// Relative deviation of a row from the best model of its kind: what is not modelled at all.
fn floor(category: Category) -> f64 {
    match category {
        Category::Hbm => 0.04,
        Category::DmaBandwidth | Category::DmaLatency => 0.025,
        Category::Bandwidth => 0.015,
        Category::Latency => 0.03,
        Category::System => 0.05,
        Category::Peer => 0.08,
        Category::Threshold => 0.6,
    }
}

/// The row of the calibrated host that asks the same of the same adapter.
///
/// What the model does not know about the adapter shows there and is the same here, so a draw of
/// parameters is corrected by what it says about that row: prior draws become posterior ones.
fn reference<'a>(row: &Row, known: &'a [Row]) -> Option<&'a Row> {
    if !matches!(row.category(), Category::DmaBandwidth | Category::DmaLatency) {
        return None;
    }
    known.iter().find(|other| other.quantity == row.quantity && other.system.contains("HSW"))
}

/// What the model and the row's twin say together: the values, and the factor that the twin brought.
fn corrected(row: &Row, reference: Option<&Row>, p: &Parameters) -> Option<(Vec<f64>, f64)> {
    let Answer::Values { mut values, .. } = answer(row, p) else { return None };
    let factor = match (reference, reference.map(|reference| answer(reference, p))) {
        (Some(reference), Some(Answer::Values { values, .. })) => {
            reference.value.parse::<f64>().ok()? / values[0]
        }
        _ => 1.0,
    };
    values.iter_mut().for_each(|value| *value *= factor);
    Some((values, factor))
}

/// Answers one question from `samples` draws of all parameters.
fn predict_one(row: &Row, p: &Parameters, samples: u64, known: &[Row], sigma: f64) -> Prediction {
    let (id, unit) = (row.id.clone(), row.unit.clone());
    let how = match answer(row, p) {
        Answer::Values { how, .. } => how.to_owned(),
        Answer::Definition(why) | Answer::NotModelled(why) => {
            return Prediction { id, unit, values: Vec::new(), how: format!("the model is silent: {why}") };
        }
    };
    let reference = reference(row, known);
    let Some((values, factor)) = corrected(row, reference, p) else {
        return Prediction {
            id,
            unit,
            values: Vec::new(),
            how: "the model is silent: its reference has no value".to_owned(),
        };
    };
    let draws: Vec<Vec<f64>> =
        (1..=samples).filter_map(|seed| Some(corrected(row, reference, &p.sample(seed))?.0)).collect();
    let mut random = Random::new(0x6d69_6c6c);
    // A bandwidth that links limit can miss the model downwards only; half of the time it does not.
    let one_sided = matches!(row.category(), Category::Bandwidth | Category::Peer);
    let intervals = values.iter().enumerate().map(|(i, &value)| {
        let mut drawn: Vec<f64> = (draws.iter())
            .flat_map(|draw| std::iter::repeat_n(draw[i], 4))
            .map(|value| {
                let off = sigma * random.normal();
                let off = if one_sided { if random.uniform() < 0.5 { -off.abs() } else { 0.0 } } else { off };
                value * off.exp()
            })
            .collect();
        drawn.sort_by(f64::total_cmp);
        let at = |share: f64| drawn[((drawn.len() - 1) as f64 * share).round() as usize];
        // Half of a correction may be the other host's own.
        let doubt = value * (1.0 + 1.0 / factor) / 2.0;
        Interval { value, low: at(0.05).min(value).min(doubt), high: at(0.95).max(value).max(doubt) }
    });
    let values = intervals.collect();
    let how = match reference {
        Some(reference) => {
            format!("{how}; times {factor:.3}, which row {} shows of this adapter", reference.id)
        }
        None => how,
    };
    Prediction { id, unit, values, how }
}

/// Answers questions.
#[must_use]
pub fn predict(questions: &[Row], p: &Parameters, samples: u64) -> Vec<Prediction> {
    let known = calibration();
    let sigmas = rms_by_category(&residuals(&known, p));
    parallel_map(questions, |row| {
        let category = row.category();
        // A twin's residual is corrected for; what is left is how far twins differ.
        let seen = if reference(row, &known).is_some() {
            0.0
        } else {
            sigmas.get(&category).copied().unwrap_or(0.0)
        };
        predict_one(row, p, samples.max(1), &known, seen.max(floor(category)))
    })
}

fn significant(value: f64) -> String {
    let digits = (3 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 6) as usize;
    format!("{value:.digits$}")
}

/// As a table: id, value, unit, low, high, how. Several values of one row are separated by slashes.
#[must_use]
pub fn to_csv(predictions: &[Prediction]) -> String {
    let mut text = String::from("id,value,unit,low,high,how\n");
    for p in predictions {
        let join = |f: fn(&Interval) -> f64| {
            p.values.iter().map(|v| significant(f(v))).collect::<Vec<_>>().join(" / ")
        };
        let (value, low, high) = (join(|v| v.value), join(|v| v.low), join(|v| v.high));
        let _ = writeln!(text, "{},{value},{},{low},{high},{}", quote(&p.id), quote(&p.unit), quote(&p.how));
    }
    text
}
