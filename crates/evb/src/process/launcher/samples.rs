//! Progress over time, in bounded memory: of a long run, every second sample is dropped whenever there are too many.

use crate::process::manager::ProgressSample;

/// Most samples.
const MAX_SAMPLES: usize = 4096;

/// Samples of a run at equal intervals, and the last one.
#[derive(Debug, Default)]
pub(super) struct Samples {
    kept: Vec<ProgressSample>,
    last: Option<ProgressSample>,
    /// Samples that were taken.
    taken: u64,
    /// Binary logarithm of the interval of those that are kept.
    shift: u32,
}

impl Samples {
    pub(super) fn push(&mut self, sample: ProgressSample) {
        let is_kept = |taken: u64, shift: u32| taken & ((1 << shift) - 1) == 0;
        if is_kept(self.taken, self.shift) && self.kept.len() == MAX_SAMPLES {
            let mut keep = false;
            self.kept.retain(|_| {
                keep = !keep;
                keep
            });
            self.shift += 1;
        }
        let keep = is_kept(self.taken, self.shift);
        if keep {
            self.kept.push(sample);
        }
        self.last = Some(sample).filter(|_| !keep);
        self.taken += 1;
    }

    /// The samples, in order.
    pub(super) fn into_vec(mut self) -> Vec<ProgressSample> {
        self.kept.extend(self.last);
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_long_run_has_samples_from_its_start_to_its_end_at_equal_intervals() {
        for length in [1, 2, 4096, 4097, 8192, 100_001] {
            let mut samples = Samples::default();
            for second in 0..length {
                samples.push(ProgressSample {
                    elapsed: Duration::from_secs(second),
                    ..ProgressSample::default()
                });
            }
            let seconds: Vec<u64> =
                samples.into_vec().iter().map(|sample| sample.elapsed.as_secs()).collect();
            assert_eq!((seconds[0], seconds[seconds.len() - 1]), (0, length - 1));
            assert!(seconds.len() <= MAX_SAMPLES + 1 && seconds.len() as u64 >= length.min(2048), "{length}");
            let interval = seconds.get(1).map_or(1, |second| *second);
            let regular = &seconds[..seconds.len() - 1];
            assert!(regular.windows(2).all(|pair| pair[1] - pair[0] == interval), "{length}: {interval}");
        }
    }
}
