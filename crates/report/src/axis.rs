//! Axes of charts, with tick marks at round numbers.

use millstream_quantity::si::prefix;

/// An axis with tick marks at round numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Ticks {
    /// Value at the start of the axis.
    pub low: f64,
    /// Value at the end of the axis.
    pub high: f64,
    step: f64,
    decimals: usize,
}

impl Ticks {
    /// An axis that contains `low` and `high` and ends at round numbers, with about `marks` marks.
    pub fn around(low: f64, high: f64, marks: usize) -> Self {
        let mut ticks = Self::between(low, high, marks);
        ticks.low = (ticks.low / ticks.step + 1e-9).floor() * ticks.step;
        ticks.high = (ticks.high / ticks.step - 1e-9).ceil() * ticks.step;
        ticks
    }

    /// An axis from exactly `low` to exactly `high`.
    pub fn between(low: f64, high: f64, marks: usize) -> Self {
        let finite = |value: f64| if value.is_finite() { value.clamp(-1e100, 1e100) } else { 0.0 };
        let (low, mut high) = (finite(low), finite(high));
        // The length must be resolved by the precision of the values.
        if high - low <= 1e-9 * low.abs().max(high.abs()) || high - low < 1e-100 {
            high = low + low.abs().max(1.0);
        }
        let rough = (high - low) / marks.max(1) as f64;
        let power = rough.log10().floor();
        let decade = 10f64.powf(power);
        let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| rough <= factor * decade * 1.000_001);
        let step = factor.unwrap_or(10.0) * decade;
        let decimals = (-step.log10().floor()).clamp(0.0, 12.0) as usize;
        Self { low, high, step, decimals }
    }

    /// Position of a value on the axis, from 0 at `low` to 1 at `high`.
    pub fn position(&self, value: f64) -> f64 {
        let position = (value - self.low) / (self.high - self.low);
        if position.is_finite() { position.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// The tick marks with their labels.
    pub fn marks(&self) -> impl Iterator<Item = (f64, String)> {
        let first = (self.low / self.step - 1e-9).ceil();
        let last = (self.high / self.step + 1e-9).floor();
        // The step keeps the count small; the bound covers values beyond the precision of an f64.
        let count = (last - first).clamp(0.0, 100.0) as usize;
        (0..=count).map(move |k| {
            let value = (first + k as f64) * self.step;
            let label = format!("{value:.*}", self.decimals);
            (value, if label.trim_start_matches(['-', '0', '.']).is_empty() { "0".into() } else { label })
        })
    }
}

/// The SI prefix for values up to `high`, with its factor.
pub fn si_prefix_for(high: f64) -> (f64, &'static str) {
    prefix(if high.is_finite() { high } else { 0.0 }, 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(ticks: &Ticks) -> Vec<String> {
        ticks.marks().map(|(_, label)| label).collect()
    }

    #[test]
    fn marks_are_round() {
        assert_eq!(labels(&Ticks::around(0.0, 12.1, 5)), ["0", "5", "10", "15"]);
        assert_eq!(labels(&Ticks::around(0.0, 0.83, 5)), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(&Ticks::between(0.0, 19.2, 6)), ["0", "5", "10", "15"]);
        assert_eq!(labels(&Ticks::around(-43.0, 301.0, 4)), ["-100", "0", "100", "200", "300", "400"]);
        assert_eq!(labels(&Ticks::around(0.0, 10.0, 5)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(labels(&Ticks::around(0.0, 0.0, 2)), ["0", "0.5", "1.0"]);
    }

    proptest! {
        #[test]
        fn marks_are_in_order_and_on_the_axis(low: f64, high: f64, marks in 0..12usize) {
            for ticks in [Ticks::around(low, high, marks), Ticks::between(low, high, marks)] {
                prop_assert!(ticks.low < ticks.high);
                let found: Vec<f64> = ticks.marks().map(|(value, _)| value).collect();
                prop_assert!(!found.is_empty() || marks < 2, "{ticks:?}");
                prop_assert!(found.len() <= 2 * marks + 4, "{ticks:?}");
                prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!((0.0..=1.0).contains(&ticks.position(high)));
            }
        }
    }
}
