//! Predictions with 90 % intervals.
//!
//! An interval combines samples of all parameters from their ranges with the residuals of calibrated rows of the
//! same [`Category`].

use crate::calibrate::{residuals, rms_by_category};
use crate::engine::Random;
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::rows::{Answer, Category, Row, answer, calibration, estimate, write_record};

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
}

/// A value with its 90 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The value.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// Lower bound of the relative model error of a category.
fn min_model_error(category: Category) -> f64 {
    match category {
        Category::Hbm => 0.04,
        Category::DmaBandwidth | Category::DmaLatency => 0.025,
        Category::Bandwidth => 0.015,
        Category::Latency => 0.03,
        Category::VerbsLatency | Category::MpiLatency => 0.08,
        Category::MessageRate | Category::MpiBandwidth => 0.1,
        Category::System => 0.05,
        Category::PeerToPeer => 0.08,
        Category::Threshold => 0.6,
    }
}

/// Values of a row, scaled so that its reference row has its published value; and that scale.
///
/// The reference row is a measurement of the same adapter on the calibrated host. Its residual is a property of
/// the adapter, so it corrects every sample of the parameters.
fn scaled_by_reference(row: &Row, reference: Option<&Row>, p: &Parameters) -> Option<(Vec<f64>, f64)> {
    let Answer::Values { mut values, .. } = answer(row, p) else { return None };
    let scale = match (reference, reference.map(|reference| answer(reference, p))) {
        (Some(reference), Some(Answer::Values { values, .. })) => {
            reference.value.parse::<f64>().ok()? / values[0]
        }
        _ => 1.0,
    };
    values.iter_mut().for_each(|value| *value *= scale);
    Some((values, scale))
}

/// Answers one question with `samples` samples of all parameters; `sigma` is the relative model error.
fn predict_row(row: &Row, reference: Option<&Row>, p: &Parameters, samples: u64, sigma: f64) -> Prediction {
    let (id, unit) = (row.id.clone(), row.unit.clone());
    let unanswered = |why: &str| Prediction {
        id: row.id.clone(),
        unit: row.unit.clone(),
        values: Vec::new(),
        method: format!("not modelled: {why}"),
    };
    if let Some(by_hand) = estimate(&row.id) {
        let (Some(value), Some(low), Some(high)) = (by_hand.value, by_hand.low, by_hand.high) else {
            return Prediction { id, unit, values: Vec::new(), method: by_hand.how.clone() };
        };
        let method = format!("by hand: {}", by_hand.how);
        return Prediction { id, unit, values: vec![Interval { value, low, high }], method };
    }
    let method = match answer(row, p) {
        Answer::Values { method, .. } => method,
        Answer::Definition(source) => return unanswered(&source),
        Answer::NotModelled(why) => return unanswered(why),
    };
    let Some((values, scale)) = scaled_by_reference(row, reference, p) else {
        return unanswered("its reference row has no value");
    };
    let draws: Vec<Vec<f64>> = (1..=samples)
        .filter_map(|seed| Some(scaled_by_reference(row, reference, &p.sample(seed))?.0))
        .collect();
    let mut random = Random::new(0x6d69_6c6c);
    // Real bandwidth can only be below a modelled link limit; half of the samples get no error.
    let one_sided = matches!(row.category(), Some(Category::Bandwidth | Category::PeerToPeer));
    let intervals = values.iter().enumerate().map(|(i, &value)| {
        let mut drawn: Vec<f64> = (draws.iter())
            .flat_map(|draw| std::iter::repeat_n(draw[i], 4))
            .map(|value| {
                let error = sigma * random.normal();
                let error = match one_sided {
                    false => error,
                    true if random.uniform() < 0.5 => -error.abs(),
                    true => 0.0,
                };
                value * error.exp()
            })
            .collect();
        drawn.sort_by(f64::total_cmp);
        let quantile = |share: f64| drawn[((drawn.len() - 1) as f64 * share).round() as usize];
        // Half of a reference row's residual may be a property of the calibrated host.
        let half_scaled = value * (1.0 + 1.0 / scale) / 2.0;
        Interval {
            value,
            low: quantile(0.05).min(value).min(half_scaled),
            high: quantile(0.95).max(value).max(half_scaled),
        }
    });
    let values = intervals.collect();
    let method = match reference {
        Some(reference) => format!("{method}; scaled by {scale:.3}, the residual of row {}", reference.id),
        None => method,
    };
    Prediction { id, unit, values, method }
}

/// Answers questions with `samples` samples of the parameters.
#[must_use]
pub fn predict(questions: &[Row], p: &Parameters, samples: u64) -> Vec<Prediction> {
    let calibrated = calibration();
    let errors = rms_by_category(&residuals(&calibrated, p));
    parallel_map(questions, |row| {
        let reference = row.reference().and_then(|id| calibrated.iter().find(|row| row.id == id));
        let sigma = row.category().map_or(0.0, |category| {
            // The reference row's residual is corrected for, so the category's does not count again.
            let seen = if reference.is_some() { None } else { errors.get(&category).copied() };
            seen.unwrap_or(0.0).max(min_model_error(category))
        });
        predict_row(row, reference, p, samples.max(1), sigma)
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
