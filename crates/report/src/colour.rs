//! Colours of pictures.

/// Text.
pub const TEXT: &str = "#1f2328";
/// Text beside the point, axes.
pub const FAINT: &str = "#59636e";
/// Lines of a grid.
pub const GRID: &str = "#e3e7eb";
/// What is measured.
pub const MEASURED: &str = "#0969da";
/// What it is compared with.
pub const BASELINE: &str = "#57606a";
/// What to look at.
pub const MARK: &str = "#ff3b1f";

/// The colour map viridis at equal steps, dark to bright: even to the eye, also without colour vision.
/// By S. van der Walt and N. Smith, CC0.
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

/// The colour of a position from 0 to 1 on the scale, as `#rrggbb`.
pub fn scale(position: f64) -> String {
    let last = VIRIDIS.len() - 1;
    let place = if position.is_finite() { position.clamp(0.0, 1.0) * last as f64 } else { 0.0 };
    let below = (place as usize).min(last - 1);
    let part = place - below as f64;
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
    fn the_scale_goes_from_dark_to_bright() {
        assert_eq!(scale(0.0), "#440154");
        assert_eq!(scale(1.0), "#fde725");
        assert_eq!(scale(f64::NAN), scale(-3.0));
        assert_eq!(scale(f64::INFINITY), scale(0.0));
        let light = |k: usize| {
            let [r, g, b] = VIRIDIS[k].map(f64::from);
            0.2126 * r + 0.7152 * g + 0.0722 * b
        };
        assert!((1..VIRIDIS.len()).all(|k| light(k) > light(k - 1)));
    }
}
