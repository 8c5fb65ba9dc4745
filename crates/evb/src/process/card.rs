//! Process of an emulated card.

use super::ProcessError;
use super::error::IoContext;
use crate::config::{CardSetup, Setup};
use crate::core::Bytes;
use millstream_card::kernel::Registry;
use millstream_card::{CardName, Config, Lifetime, serve};
use std::os::fd::AsFd;
use std::time::Duration;

/// Banks are multiples of a page.
const PAGE: u64 = 4096;

/// Name of a run's card on its host.
///
/// # Errors
/// The name is invalid; a checked configuration has none.
pub(super) fn name(setup: &Setup, card: &CardSetup) -> Result<CardName, ProcessError> {
    format!("{}.{}", setup.instance, card.name).parse().map_err(|error| unfit(&card.name, format!("{error}")))
}

/// Error: a card does not meet the run's requirements.
pub(super) fn unfit(card: &str, what: impl Into<String>) -> ProcessError {
    ProcessError::CardUnfit { card: card.to_owned(), what: what.into() }
}

/// Serves a card until standard input ends, which is when the launcher ends.
///
/// # Errors
/// The card cannot be served: its name is in use, or there is not enough memory.
pub fn run(name: &CardName, memory: Bytes, spin: Duration) -> Result<(), ProcessError> {
    let launcher = std::io::stdin().as_fd().try_clone_to_owned().context("watch standard input")?;
    let bytes = memory.0.next_multiple_of(PAGE);
    let mut config = Config::new(name.clone(), bytes, Registry::builtin());
    config.lifetime = Lifetime::Launcher(launcher);
    config.spin = spin;
    serve(config).map(drop).map_err(|error| unfit(name.as_str(), error.to_string()))
}
