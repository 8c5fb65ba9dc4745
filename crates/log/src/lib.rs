//! Log output of Millstream's libraries and programs.
//!
//! The libraries report through `tracing`. [`init`] prints their records on standard error. The environment
//! variable `MILLSTREAM_LOG` is a filter: a level (`error`, `warn`, `info`, `debug`, `trace` or `off`), or a
//! comma-separated list of levels and `target=level`, as in `warn,millstream_link=debug`. A target is a
//! module path. The default is `warn`.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;

/// The environment variable with the filter.
pub const VARIABLE: &str = "MILLSTREAM_LOG";

/// Prints log output to standard error from now on. Only the first call has an effect. It has none if the
/// program has installed another subscriber.
pub fn init() {
    static CALLED: AtomicBool = AtomicBool::new(false);
    // A `Once` would make the child of a fork wait for a thread of its parent.
    if !CALLED.swap(true, Ordering::Relaxed) {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        let (filter, error) = match parse(&text) {
            Ok(filter) => (filter, None),
            Err(error) => (default(), Some(error)),
        };
        let output = tracing_subscriber::fmt::layer().without_time().with_writer(std::io::stderr);
        let subscriber = tracing_subscriber::registry().with(filter).with(output);
        if tracing::subscriber::set_global_default(subscriber).is_ok()
            && let Some(error) = error
        {
            tracing::warn!("{VARIABLE}={text}: {error}: expected a level or a list of target=level");
        }
    }
}

fn default() -> Targets {
    Targets::new().with_default(LevelFilter::WARN)
}

fn parse(text: &str) -> Result<Targets, String> {
    if text.is_empty() {
        return Ok(default());
    }
    // A word alone would be a target, and everything else be off.
    let is_level = |word: &str| word.contains('=') || word.parse::<LevelFilter>().is_ok();
    if let Some(word) = text.split(',').map(str::trim).find(|word| !is_level(word)) {
        return Err(format!("{word:?} is no level"));
    }
    text.parse().map_err(|error: tracing_subscriber::filter::ParseError| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn levels_and_targets_select_what_is_printed() {
        let enabled =
            |text: &str, target: &str, level: Level| parse(text).unwrap().would_enable(target, &level);
        assert!(enabled("", "millstream_device", Level::WARN));
        assert!(!enabled("", "millstream_device", Level::INFO));
        assert!(enabled("debug", "millstream_device", Level::DEBUG));
        let list = "warn,millstream_link=debug";
        assert!(enabled(list, "millstream_link::udp", Level::DEBUG));
        assert!(!enabled(list, "millstream_device", Level::INFO));
        assert!(!enabled("off", "millstream_device", Level::ERROR));
        for wrong in ["millstream_link=loud", "warning", "warn,millstream_link", "on"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
