//! `data/estimates.toml`: answers by hand, for questions about devices that the model does not simulate.
//!
//! Each has an interval and the reasoning behind it: a line rate, a number of requests in flight, a calibrated row of a similar
//! device. Predictions mark them "by hand"; a question without simulation and estimate is answered with silence and its reason.

use super::Baseline;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// An answer by hand.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// The value, in the row's unit; none if nothing can be said.
    pub value: Option<f64>,
    /// Lower end of the 90 % interval.
    pub low: Option<f64>,
    /// Upper end of the 90 % interval.
    pub high: Option<f64>,
    /// Answer without model: a line rate, or a calibrated row.
    pub baseline: Option<Baseline>,
    /// The reasoning; for a row without value, why nothing can be said.
    pub how: String,
}

/// An entry of the estimates that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {message}")]
pub struct EstimateError {
    /// The file.
    pub file: String,
    /// Row, field and error.
    pub message: String,
}

fn parse(file: &str, text: &str) -> Result<BTreeMap<String, Estimate>, EstimateError> {
    let fail = |message: String| EstimateError { file: file.to_owned(), message };
    let all: BTreeMap<String, Estimate> =
        toml::from_str(text).map_err(|error| fail(error.to_string().trim_end().to_owned()))?;
    for (row, estimate) in &all {
        let is_valid = match (estimate.value, estimate.low, estimate.high) {
            (None, None, None) => true,
            (Some(value), Some(low), Some(high)) => low < value && value < high,
            _ => false,
        };
        if !is_valid || estimate.how.is_empty() {
            return Err(fail(format!(
                "row {row}: needs `how`, and `low` < `value` < `high` or none of the three"
            )));
        }
        if let Some(baseline) = &estimate.baseline {
            baseline.check().map_err(|message| fail(format!("row {row}: {message}")))?;
        }
    }
    Ok(all)
}

static SHIPPED: LazyLock<BTreeMap<String, Estimate>> = LazyLock::new(|| {
    parse("estimates.toml", include_str!("../../data/estimates.toml"))
        .unwrap_or_else(|error| panic!("a test reads the shipped file: {error}"))
});

/// The shipped estimate of a row.
#[must_use]
pub fn estimate(row: &str) -> Option<&'static Estimate> {
    SHIPPED.get(row)
}

#[cfg(test)]
mod tests {
    use super::{SHIPPED, parse};
    use crate::rows::questions_2;
    use crate::rows::spec::spec;

    #[test]
    fn every_question_of_the_second_set_has_one_answer() {
        for row in questions_2() {
            let (simulated, by_hand) = (spec(&row.id).is_some(), SHIPPED.contains_key(&row.id));
            assert!(simulated != by_hand, "{}: simulated {simulated}, by hand {by_hand}", row.id);
        }
    }

    #[test]
    fn an_answer_has_a_baseline() {
        let without: Vec<&String> = (SHIPPED.iter())
            .filter(|(_, estimate)| estimate.value.is_some() != estimate.baseline.is_some())
            .map(|(id, _)| id)
            .collect();
        assert!(without.is_empty(), "an answer has a baseline: {without:?}");
    }

    #[test]
    fn invalid_estimates_are_refused() {
        for text in [
            "A1 = { value = 1.0, how = \"x\" }",
            "A1 = { value = 1.0, low = 2.0, high = 3.0, how = \"x\" }",
            "A1 = { how = \"\" }",
            "A1 = { how = \"x\", baseline = 2.0 }",
            "A1 = { value = 1.0, low = 0.5, high = 3.0, why = \"x\" }",
        ] {
            assert!(parse("estimates.toml", text).is_err(), "{text}");
        }
        assert!(parse("estimates.toml", "A1 = { how = \"nothing is known\" }").is_ok());
    }
}
