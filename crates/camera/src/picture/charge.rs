//! Charge of a pixel, from its waveform.

use std::ops::Range;

/// Length of the integration window \[samples\]: that of a pulse of the camera.
pub const WINDOW: usize = 7;

/// Waveforms whose number of samples does not match the camera.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found} samples, expected {pixels} pixels × {samples}")]
pub struct WrongShape {
    /// Total number of samples found.
    pub found: usize,
    /// Pixels of the camera.
    pub pixels: usize,
    /// Samples per pixel.
    pub samples: usize,
}

/// The charge of each pixel: the sum of the samples in `window`, each less the baseline of the pixel.
///
/// The baseline is the median of all samples of the pixel. `waveforms` has `samples` samples per pixel.
pub fn charges(waveforms: &[i16], samples: usize, window: Range<usize>) -> Vec<f64> {
    if samples == 0 {
        return Vec::new();
    }
    let mut sorted = vec![0; samples];
    waveforms
        .chunks_exact(samples)
        .map(|pixel| {
            let window = pixel.get(window.clone()).unwrap_or_default();
            let sum: f64 = window.iter().copied().map(f64::from).sum();
            sum - window.len() as f64 * median(pixel, &mut sorted)
        })
        .collect()
}

/// The integration window: from one sample before the trigger, or the brightest window of all pixels.
pub fn window(waveforms: &[i16], samples: usize, trigger: Option<usize>) -> Range<usize> {
    let len = WINDOW.min(samples);
    let latest = samples - len;
    let start = trigger.map_or_else(
        || {
            let sum = |sample: usize| -> i64 {
                waveforms.iter().skip(sample).step_by(samples.max(1)).map(|&value| i64::from(value)).sum()
            };
            let sums: Vec<i64> = (0..samples).map(sum).collect();
            // `rev`, because `max_by_key` returns the last of equal windows.
            (0..=latest).rev().max_by_key(|&start| sums[start..start + len].iter().sum::<i64>()).unwrap_or(0)
        },
        |sample| sample.saturating_sub(1),
    );
    let start = start.min(latest);
    start..start + len
}

/// The median of the samples. `sorted` is a buffer of the same length.
fn median(samples: &[i16], sorted: &mut [i16]) -> f64 {
    sorted.copy_from_slice(samples);
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        len if len.is_multiple_of(2) => (f64::from(sorted[middle - 1]) + f64::from(sorted[middle])) / 2.0,
        _ => f64::from(sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn baseline_is_subtracted() {
        let mut waveforms = vec![200i16; 50];
        waveforms.extend([300; 50]);
        waveforms[10..13].copy_from_slice(&[210, 230, 205]);
        waveforms[40] = 1000;
        assert_eq!(charges(&waveforms, 50, 9..16), [45.0, 0.0]);
        assert_eq!(charges(&[1, 2, 3, 5], 4, 0..2), [3.0 - 5.0]);
    }

    #[test]
    fn window_starts_before_the_trigger_and_stays_inside() {
        assert_eq!(window(&[], 50, Some(9)), 8..15);
        assert_eq!(window(&[], 50, Some(0)), 0..7);
        assert_eq!(window(&[], 50, Some(49)), 43..50);
        assert_eq!(window(&[], 3, Some(2)), 0..3);
    }

    #[test]
    fn window_without_trigger_is_the_brightest() {
        let mut waveforms = vec![200i16; 150];
        for pixel in 0..3 {
            waveforms[50 * pixel + 20..50 * pixel + 27].fill(220);
        }
        assert_eq!(window(&waveforms, 50, None), 20..27);
        assert_eq!(window(&[5; 100], 50, None), 0..7);
    }

    proptest! {
        #[test]
        fn arbitrary_waveforms_have_charges(
            waveforms in prop::collection::vec(any::<i16>(), 0..300),
            samples in 0..20usize,
            trigger in prop::option::of(0..30usize),
        ) {
            let window = window(&waveforms, samples, trigger);
            prop_assert!(window.end <= samples && window.len() == samples.min(WINDOW));
            let found = charges(&waveforms, samples, window);
            prop_assert!(found.len() <= waveforms.len() / samples.max(1));
            prop_assert!(found.iter().all(|charge| charge.abs() <= 7.0 * 65536.0));
        }
    }
}
