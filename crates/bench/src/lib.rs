//! Benchmarks as commands.
//!
//! Every figure stands beside a baseline that the same run measured, taken in turns with it, because
//! machines are shared and noisy: a ratio travels, a number does not. [`Table`] prints what people
//! read and writes what programs read; [`memcpy`] measures the copies that everything is held
//! against; [`tools`] runs other people's unmodified benchmark programs over the soft device, and
//! [`verbs::raw_verbs`] one of our own that does as little as possible besides.

pub mod card;
pub mod evb;
pub mod memcpy;
pub mod model;
pub mod scale;
pub mod stencil;
mod table;
pub mod tools;
pub mod verbs;
pub mod wire;

pub use table::{Figure, Only, Table, TableError};

/// The median of some measurements; None of none.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
