//! Colours of charts.

/// Text.
pub const TEXT: &str = "#1f2328";
/// Secondary text, axes.
pub const SECONDARY: &str = "#59636e";
/// Grid lines.
pub const GRID: &str = "#e3e7eb";
/// Measured values.
pub const MEASURED: &str = "#0969da";
/// Baselines.
pub const BASELINE: &str = "#57606a";
/// Highlighted parts.
pub const HIGHLIGHT: &str = "#ff3b1f";

/// The colour map viridis at equal steps, dark to bright, by S. van der Walt and N. Smith (CC0).
const VIRIDIS: [[u8; 3]; 17] = [
    [68, 1, 84],
    [72, 24, 106],
    [71, 45, 123],
    [66, 64, 134],
    [59, 82, 139],
    [51, 99, 141],
    [44, 114, 142],
    [38, 130, 142],
    [33, 145, 140],
    [31, 160, 136],
    [40, 174, 128],
    [63, 188, 115],
    [94, 201, 98],
    [132, 212, 75],
    [173, 220, 48],
    [216, 226, 25],
    [253, 231, 37],
];

/// The viridis colour of a position from 0 to 1, as `#rrggbb`.
pub fn viridis(position: f64) -> String {
    let last = VIRIDIS.len() - 1;
    let index = if position.is_finite() { position.clamp(0.0, 1.0) * last as f64 } else { 0.0 };
    let below = (index as usize).min(last - 1);
    let part = index - below as f64;
    let mix = |channel: usize| {
        let (from, to) = (f64::from(VIRIDIS[below][channel]), f64::from(VIRIDIS[below + 1][channel]));
        (from + part * (to - from)).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn viridis_goes_from_dark_to_bright() {
        assert_eq!(viridis(0.0), "#440154");
        assert_eq!(viridis(1.0), "#fde725");
        assert_eq!(viridis(f64::NAN), viridis(-3.0));
        assert_eq!(viridis(f64::INFINITY), viridis(0.0));
        let light = |k: usize| {
            let [r, g, b] = VIRIDIS[k].map(f64::from);
            0.2126 * r + 0.7152 * g + 0.0722 * b
        };
        assert!((1..VIRIDIS.len()).all(|k| light(k) > light(k - 1)));
    }
}
