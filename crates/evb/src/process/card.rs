//! An emulated card's process.

use super::ProcessError;
use super::error::IoContext;
use crate::config::{CardSetup, Setup};
use crate::core::Bytes;
use millstream_card::kernel::Registry;
use millstream_card::{CardName, Config, Lifetime, serve};
use std::os::fd::AsFd;
use std::time::Duration;

/// Banks are whole pages.
const PAGE: u64 = 4096;

/// The name under which a run's card is found on its host.
///
/// # Errors
/// A name that no card can have; a checked configuration makes none.
pub(super) fn name(setup: &Setup, card: &CardSetup) -> Result<CardName, ProcessError> {
    format!("{}.{}", setup.instance, card.name).parse().map_err(|error| unfit(&card.name, format!("{error}")))
}

/// A card that is not what is needed.
pub(super) fn unfit(card: &str, what: impl Into<String>) -> ProcessError {
    ProcessError::CardUnfit { card: card.to_owned(), what: what.into() }
}

/// Serves a card until standard input ends, which is when its launcher does.
///
/// # Errors
/// The card cannot be served: its name is taken, or there is no memory.
pub fn run(name: &CardName, memory: Bytes, spin: Duration) -> Result<(), ProcessError> {
    let launcher = std::io::stdin().as_fd().try_clone_to_owned().context("watch standard input")?;
    let bytes = memory.0.next_multiple_of(PAGE);
    let mut config = Config::new(name.clone(), bytes, Registry::builtin());
    config.lifetime = Lifetime::Launcher(launcher);
    config.spin = spin;
    serve(config).map(drop).map_err(|error| unfit(name.as_str(), error.to_string()))
}
