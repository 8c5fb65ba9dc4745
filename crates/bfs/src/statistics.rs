//! Statistics of Graph500: quartiles of TEPS, their harmonic mean and its deviation.

use serde::{Deserialize, Serialize};

/// Traversed edges per second over all roots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Teps {
    /// Smallest.
    pub min: f64,
    /// First quartile.
    pub first_quartile: f64,
    /// Median.
    pub median: f64,
    /// Third quartile.
    pub third_quartile: f64,
    /// Largest.
    pub max: f64,
    /// Harmonic mean: the mean of a rate.
    pub harmonic_mean: f64,
    /// Standard error of the harmonic mean (Norris, Annals of Mathematical Statistics 11, 1940).
    pub harmonic_deviation: f64,
}

impl Teps {
    /// Statistics of at least one rate.
    #[must_use]
    pub fn of(rates: &[f64]) -> Option<Teps> {
        let mut sorted = rates.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let middle = |low: usize, high: usize| f64::midpoint(sorted[low], sorted[high]);
        let count = sorted.len() as f64;
        let mean = sorted.iter().map(|rate| 1.0 / rate).sum::<f64>() / count;
        let squares: f64 = sorted.iter().map(|rate| (1.0 / rate - mean).powi(2)).sum();
        let deviation = if last == 0 { 0.0 } else { (squares / last as f64).sqrt() };
        let error = deviation / (mean * mean * (last as f64).max(1.0).sqrt());
        Some(Teps {
            min: sorted[0],
            first_quartile: middle(last / 4, sorted.len() / 4),
            median: middle(last / 2, sorted.len() / 2),
            third_quartile: middle(last - sorted.len() / 4, last - last / 4),
            max: sorted[last],
            harmonic_mean: 1.0 / mean,
            harmonic_deviation: error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_known_rates() {
        assert_eq!(Teps::of(&[]), None);
        let teps = Teps::of(&[4.0, 1.0, 2.0, 8.0, 5.0]).unwrap();
        assert_eq!((teps.min, teps.first_quartile, teps.median), (1.0, 2.0, 4.0));
        assert_eq!((teps.third_quartile, teps.max), (5.0, 8.0));
        assert!((teps.harmonic_mean - 5.0 / 2.075).abs() < 1e-12);
        // By hand: deviation of 1, 0.5, 0.25, 0.2, 0.125 is 0.356; divided by 0.415² · 2.
        assert!((teps.harmonic_deviation - 0.356_019_662 / (0.415 * 0.415 * 2.0)).abs() < 1e-6, "{teps:?}");
        let one = Teps::of(&[3.0]).unwrap();
        assert_eq!((one.min, one.median, one.harmonic_deviation), (3.0, 3.0, 0.0));
    }
}
