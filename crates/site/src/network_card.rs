//! Cards that nodes reach over the network: names and addresses.

use std::num::NonZeroU32;

use millstream_quantity::Bytes;

use crate::error::SiteError;
use crate::validate::Validator;
use crate::{Site, schema};

/// A card that nodes reach over the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkCard {
    /// Name of the card.
    pub name: String,
    /// Address of its server: `host:port`.
    pub address: String,
    /// Size of its memory, if the file has it.
    pub memory: Option<Bytes>,
    /// Number of its memory banks, if the file has it.
    pub banks: Option<u32>,
    /// Comment for users.
    pub note: String,
}

/// The site has no card with this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no card {name:?}; known cards: {}", .known.join(", "))]
pub struct UnknownCard {
    /// The given name.
    pub name: String,
    /// All names.
    pub known: Vec<String>,
}

impl Site {
    /// The card with this name.
    ///
    /// # Errors
    /// [`UnknownCard`] lists all names.
    pub fn card(&self, name: &str) -> Result<&NetworkCard, UnknownCard> {
        self.cards.iter().find(|card| card.name == name).ok_or_else(|| UnknownCard {
            name: name.to_owned(),
            known: self.cards.iter().map(|card| card.name.clone()).collect(),
        })
    }
}

/// Whether a word is `host:port`.
#[must_use]
pub fn is_address(word: &str) -> bool {
    word.rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0))
}

/// Validates a card whose name is checked.
pub(crate) fn validate(
    validator: &Validator<'_>,
    card: &schema::NetworkCard,
) -> Result<NetworkCard, SiteError> {
    let (name, address) = (card.name.get_ref(), card.address.get_ref());
    if !is_address(address) {
        let message = format!("card {name:?}: address {address:?}: expected host:port");
        return validator.fail(&card.address.span(), message);
    }
    Ok(NetworkCard {
        name: name.clone(),
        address: address.clone(),
        memory: card.memory,
        banks: card.banks.map(NonZeroU32::get),
        note: card.note.clone(),
    })
}
