//! Settings in environment variables.

use std::fmt::Display;
use std::str::FromStr;

/// The number in the variable, or `default` if the variable is not set. A value that is no number of `unit` is logged, and
/// `default` is used.
pub fn number_from_environment<T: FromStr + Display + Copy>(variable: &str, unit: &str, default: T) -> T {
    let Ok(text) = std::env::var(variable) else { return default };
    text.parse().unwrap_or_else(|_| {
        tracing::warn!("{variable}={text} is no number of {unit}; {default} is used");
        default
    })
}
