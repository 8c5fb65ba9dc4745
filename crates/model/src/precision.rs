//! Length of a simulated benchmark.

/// How long a benchmark runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As long as results need that are printed.
    #[default]
    Full,
    /// Short: one of many samples of an interval, of which only the ratio to another short run counts.
    Sample,
}

impl Precision {
    /// `full`, or the shorter `sample`.
    pub(crate) fn pick<T>(self, full: T, sample: T) -> T {
        match self {
            Precision::Full => full,
            Precision::Sample => sample,
        }
    }
}
