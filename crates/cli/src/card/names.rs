//! Names of cards: from a site file, or addresses.

use std::path::{Path, PathBuf};

use millstream_site::Site;
use millstream_site::network_card::is_address;

use super::Outcome;

/// The site file that names cards.
pub(crate) struct Names {
    file: PathBuf,
    is_explicit: bool,
}

impl Names {
    /// The file that the user names, by an option or by MILLSTREAM_SITE, or site.toml.
    pub(crate) fn new(option: Option<&Path>) -> Names {
        let explicit =
            option.map(Path::to_owned).or_else(|| std::env::var_os("MILLSTREAM_SITE").map(PathBuf::from));
        Names {
            is_explicit: explicit.is_some(),
            file: explicit.unwrap_or_else(|| PathBuf::from("site.toml")),
        }
    }

    pub(crate) fn site(&self) -> Outcome<Site> {
        if !self.is_explicit && !self.file.exists() {
            return Err("no site file: write one (docs/cards.md), name it with --site, or name cards as \
                        host:port"
                .into());
        }
        Ok(millstream_site::load(&self.file)?)
    }

    /// The address of a card that is given by name or address.
    pub(crate) fn address(&self, card: &str) -> Outcome<String> {
        if is_address(card) {
            return Ok(card.to_owned());
        }
        let site = self.site()?;
        let found = site.card(card).map_err(|error| format!("site file {}: {error}", self.file.display()))?;
        Ok(found.address.clone())
    }
}
