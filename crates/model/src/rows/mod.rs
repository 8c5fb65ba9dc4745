//! Rows of published tables, and the modelled benchmark that answers each.
//!
//! `data/calibration.csv` and `data/questions.csv` have the rows; `data/rows.toml` assigns a program to each.

mod answer;
mod baseline;
mod command;
mod csv;
mod estimate;
pub mod spec;

pub use answer::{Answer, answer, answer_at};
pub use baseline::{Baseline, baseline, line_rate, site_of, why_no_baseline, with_devices_of};
pub(crate) use csv::write_record;
pub use csv::{CsvError, calibration, load, parse, questions, questions_2};
pub use estimate::{Estimate, EstimateError, estimate};
pub use spec::Category;

/// A published measurement, or a question about one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Row id, the key of `data/rows.toml`.
    pub id: String,
    /// System that was measured.
    pub system: String,
    /// Quantity that was measured.
    pub quantity: String,
    /// Published value as printed; empty in a question.
    pub value: String,
    /// Unit of the value.
    pub unit: String,
    /// Conditions of the measurement.
    pub conditions: String,
}

impl Row {
    /// Category whose residuals measure the model error of this row; none for inputs and unknown rows.
    #[must_use]
    pub fn category(&self) -> Option<Category> {
        spec::spec(&self.id)?.category
    }

    /// Whether the row is an input of the model: it is answered as itself and left out of statistics.
    #[must_use]
    pub fn is_input(&self) -> bool {
        spec::spec(&self.id).is_some_and(|spec| spec.input)
    }

    /// Whether hints about its physics preceded the answer.
    #[must_use]
    pub fn is_tuned(&self) -> bool {
        spec::spec(&self.id).is_some_and(|spec| spec.tuned)
    }

    /// Calibrated row of the same adapter on another host.
    #[must_use]
    pub fn reference(&self) -> Option<&'static str> {
        spec::spec(&self.id)?.reference.as_deref()
    }
}
