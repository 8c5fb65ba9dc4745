//! Formatting of numbers with three significant digits and a metric prefix.

/// Three significant digits with a metric prefix, such as `8.43 GB/s`.
#[must_use]
pub fn metric(value: f64, unit: &str) -> String {
    let (scale, prefix) = prefix(value, 999.5);
    format!("{} {prefix}{unit}", three_digits(value / scale))
}

/// The factor and name of the metric prefix with which `value` is less than `limit`.
#[must_use]
pub fn prefix(value: f64, limit: f64) -> (f64, &'static str) {
    const UP: [(f64, &str); 7] =
        [(1e0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"), (1e18, "E")];
    const DOWN: [(f64, &str); 3] = [(1e-3, "m"), (1e-6, "µ"), (1e-9, "n")];
    let size = value.abs();
    // With this bound 0.9996 prints as "1.00", not as "1000 m".
    if size == 0.0 || !size.is_finite() || size >= limit / 1e3 {
        *UP.iter()
            .find(|(scale, _)| size < scale * limit)
            .unwrap_or(&UP[if size.is_finite() { 6 } else { 0 }])
    } else {
        *DOWN.iter().find(|(scale, _)| size >= scale * limit / 1e3).unwrap_or(&DOWN[2])
    }
}

fn three_digits(value: f64) -> String {
    let size = value.abs();
    // At these bounds rounding adds a digit.
    if value == 0.0 {
        "0".into()
    } else if size < 9.995 {
        format!("{value:.2}")
    } else if size < 99.95 {
        format!("{value:.1}")
    } else if size < 1e6 {
        format!("{value:.0}")
    } else {
        format!("{value:.2e}")
    }
}
