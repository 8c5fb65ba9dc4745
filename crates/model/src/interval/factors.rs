//! Factors of intervals, from published rows that were left out.

use super::leave_out::LeftOut;
use super::{Interval, Spread};
use crate::rows::Category;
use serde::Deserialize;
use std::fmt;

/// What a prediction could not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The row itself: other rows of its host are known.
    Row,
    /// Its host, which may share a site with others.
    Host,
    /// Its site: nothing of the system is known.
    System,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Row => "row",
            Level::Host => "host",
            Level::System => "system",
        })
    }
}

/// How an interval follows from the spread of the parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// Share of the spread that counts: ranges of many parameters are wider than nine tenths of the truth.
    pub share: f64,
    /// Distance that no parameter explains, as natural logarithm.
    pub error: f64,
}

impl Factors {
    /// Distances of both ends from the value.
    #[must_use]
    pub fn distances(&self, spread: Spread) -> [f64; 2] {
        [spread.below, spread.above].map(|distance| (self.share * distance).hypot(self.error))
    }
}

/// Categories with few rows share those of similar ones. MPI adds software to the latency of verbs: its errors are others.
fn family(category: Category) -> u8 {
    match category {
        Category::Bandwidth | Category::PeerToPeer => 0,
        Category::MessageRate | Category::MpiBandwidth => 1,
        Category::Latency | Category::VerbsLatency => 2,
        Category::MpiLatency => 7,
        Category::DmaBandwidth | Category::DmaLatency => 3,
        Category::Hbm => 4,
        Category::PageWalk => 6,
        Category::Storage => 8,
        Category::System | Category::Threshold => 5,
    }
}

/// Smallest error of a category that rows can show: published numbers are rounded and runs differ.
fn smallest_error(category: Category) -> f64 {
    match category {
        Category::Bandwidth => 0.02,
        Category::Hbm | Category::DmaBandwidth | Category::DmaLatency | Category::Latency => 0.04,
        Category::System | Category::PeerToPeer | Category::Storage => 0.08,
        Category::Threshold => 0.7,
        _ => 0.06,
    }
}

/// Rows that a category needs for factors of its own.
const ENOUGH: usize = 20;
/// Rows that a family needs; all rows serve one that has fewer.
const FEW: usize = 4;
/// Share of rows inside their intervals.
const COVERAGE: f64 = 0.9;

/// Rows of a category, of its family if these are few, or of all.
fn similar(rows: &[LeftOut], level: Level, category: Category) -> Vec<&LeftOut> {
    let at_level = || rows.iter().filter(|row| row.level == level);
    let own: Vec<_> = at_level().filter(|row| row.category == category).collect();
    if own.len() >= ENOUGH {
        return own;
    }
    let related: Vec<_> = at_level().filter(|row| family(row.category) == family(category)).collect();
    if related.len() >= FEW { related } else { at_level().collect() }
}

/// The error that, with this share of the spreads, has [`COVERAGE`] of the rows inside their intervals.
fn error_for(rows: &[&LeftOut], share: f64) -> f64 {
    let mut missing: Vec<f64> = (rows.iter())
        .map(|row| {
            let off = row.deviation();
            let distance = share * if off < 0.0 { row.spread.below } else { row.spread.above };
            (off * off - distance * distance).max(0.0).sqrt()
        })
        .collect();
    missing.sort_by(f64::total_cmp);
    // One more row, the predicted one, counts as outside.
    let rank = ((missing.len() + 1) as f64 * COVERAGE).ceil() as usize;
    missing.get(rank.clamp(1, missing.len().max(1)) - 1).copied().unwrap_or(0.0)
}

/// Factors of a category: the share of spreads that gives the narrowest intervals with `COVERAGE`.
#[must_use]
pub fn factors(rows: &[LeftOut], level: Level, category: Category) -> Factors {
    let rows = similar(rows, level, category);
    let candidates = [0.25, 0.5, 0.75, 1.0].map(|share| {
        let error = error_for(&rows, share).max(smallest_error(category));
        let factors = Factors { share, error };
        let mut widths: Vec<f64> =
            rows.iter().map(|row| Interval::new(1.0, row.spread, factors).width()).collect();
        widths.sort_by(f64::total_cmp);
        (widths.get(widths.len() / 2).copied().unwrap_or(0.0), factors)
    });
    let narrowest = candidates.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
    narrowest.map_or(Factors { share: 1.0, error: smallest_error(category) }, |(_, factors)| factors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(off: f64, spread: f64) -> LeftOut {
        LeftOut {
            id: "X".to_owned(),
            level: Level::System,
            category: Category::MpiLatency,
            published: off.exp(),
            predicted: 1.0,
            spread: Spread { below: spread, above: spread },
            baseline: None,
        }
    }

    #[test]
    fn nine_of_ten_rows_are_inside() {
        let rows: Vec<LeftOut> =
            (1..=40).map(|i| row(f64::from(i) * if i % 2 == 0 { 0.01 } else { -0.01 }, 0.05)).collect();
        let factors = factors(&rows, Level::System, Category::MpiLatency);
        let inside = rows.iter().filter(|row| row.is_inside(factors)).count();
        assert!((36..=38).contains(&inside), "{inside} of 40 with {factors:?}");
    }

    #[test]
    fn spreads_that_explain_the_errors_count() {
        // Errors are large where spreads are.
        let rows: Vec<LeftOut> = (1..=40).map(|i| row(0.008 * f64::from(i), 0.01 * f64::from(i))).collect();
        let factors = factors(&rows, Level::System, Category::MpiLatency);
        assert!(factors.share >= 0.75 && factors.error < 0.12, "{factors:?}");
    }

    #[test]
    fn without_rows_the_smallest_error_remains() {
        let factors = factors(&[], Level::Row, Category::Hbm);
        assert_eq!(factors.error, 0.04);
    }
}
