//! 90 % intervals, calibrated by leaving rows out.
//!
//! ```text
//!   ranges of all parameters  ─► Spread ─┐
//!   rows that were left out  ─► Factors ─┴─► Interval
//! ```
//! [`Spread`] is what the parameters' ranges do to one value ([`response`]). [`leave_out`] predicts published rows without themselves, their
//! host or their system; [`factors`] scales spreads such that nine of ten of these rows are inside their intervals.

pub mod factors;
pub mod leave_out;
pub mod response;

pub use factors::{Factors, Level};

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

impl Interval {
    /// The interval of a value from the spread of its parameters and the factors of its category.
    #[must_use]
    pub fn new(value: f64, spread: Spread, factors: Factors) -> Interval {
        let [below, above] = factors.distances(spread);
        Interval { value, low: value * (-below).exp(), high: value * above.exp() }
    }

    /// Lowers the upper end to a physical limit of at least the value.
    #[must_use]
    pub fn below(self, limit: f64) -> Interval {
        Interval { high: self.high.min(limit).max(self.value), ..self }
    }

    /// Width relative to the value.
    #[must_use]
    pub fn width(&self) -> f64 {
        (self.high - self.low) / self.value.abs().max(f64::MIN_POSITIVE)
    }
}

/// Distances of the 5 % and 95 % quantiles of samples from the value, as natural logarithms of ratios.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Distance of the 5 % quantile.
    pub below: f64,
    /// Distance of the 95 % quantile.
    pub above: f64,
}

impl Spread {
    /// The spread of samples around the value at the parameters' own values. Samples that are not positive are left out.
    #[must_use]
    pub fn new(value: f64, samples: impl IntoIterator<Item = f64>) -> Spread {
        let mut ratios: Vec<f64> = samples
            .into_iter()
            .map(|sample| (sample / value).ln())
            .filter(|ratio| ratio.is_finite())
            .collect();
        if ratios.is_empty() {
            return Spread::default();
        }
        ratios.sort_by(f64::total_cmp);
        let quantile = |share: f64| ratios[((ratios.len() - 1) as f64 * share).round() as usize];
        Spread { below: (-quantile(0.05)).max(0.0), above: quantile(0.95).max(0.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Factors, Interval, Spread};

    #[test]
    fn the_spread_is_that_of_the_middle_nine_tenths() {
        let samples = (0..=100).map(|i| 100.0 * (f64::from(i) / 100.0 - 0.5).exp());
        let spread = Spread::new(100.0, samples);
        assert!((spread.below - 0.45).abs() < 1e-9 && (spread.above - 0.45).abs() < 1e-9, "{spread:?}");
        assert_eq!(Spread::new(1.0, [f64::NAN, -1.0]), Spread::default());
    }

    #[test]
    fn an_interval_contains_its_value_and_ends_at_the_limit() {
        let factors = Factors { share: 0.5, error: 0.1 };
        let interval = Interval::new(10.0, Spread { below: 0.2, above: 0.0 }, factors);
        assert!(interval.low < 8.7 && interval.high > 11.0, "{interval:?}");
        assert_eq!(interval.below(10.5).high, 10.5);
        assert_eq!(interval.below(9.0).high, 10.0);
    }
}
