//! A run's card: its name on this host, and how its process is served.

use std::time::Duration;

use millstream_card_abi::CardName;

use super::ProcessError;
use crate::config::{LandingCard, RunConfig};
use crate::core::Bytes;

/// A card to serve in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardProcess {
    /// Its name on this host.
    pub name: CardName,
    /// Size of its memory.
    pub memory: Bytes,
    /// Kind of its memory.
    pub kind: String,
    /// How long it polls for commands before it blocks.
    pub spin: Duration,
}

/// Serves a card until standard input closes. The event builder does not link the card server, so the program passes
/// this function.
pub type ServeCard<'a> = dyn Fn(&CardProcess) -> Result<(), Box<dyn std::error::Error>> + 'a;

/// Name of a run's card on its host.
///
/// # Errors
/// The name is invalid; a checked configuration has none.
pub(super) fn name(config: &RunConfig, card: &LandingCard) -> Result<CardName, ProcessError> {
    format!("{}.{}", config.instance, card.name)
        .parse()
        .map_err(|error| unfit(&card.name, format!("{error}")))
}

/// Error: a card does not meet the run's requirements.
pub(super) fn unfit(card: &str, what: impl Into<String>) -> ProcessError {
    ProcessError::CardUnfit { card: card.to_owned(), what: what.into() }
}
