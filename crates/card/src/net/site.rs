//! Where the cards of a site are: a small file that names them.
//!
//! ```toml
//! [[card]]
//! name = "u280-0"
//! address = "node3:7480"
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One card of a site.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Where it listens: `host:port`.
    pub address: String,
    /// Anything that people should know.
    #[serde(default)]
    pub note: String,
}

/// The cards of a site.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Site {
    /// In the order of the file.
    #[serde(default, rename = "card")]
    pub cards: Vec<Entry>,
}

/// What is wrong with a site file.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    /// It cannot be read.
    #[error("site file {file}: {cause}")]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// It is no site file.
    #[error("site file {file}: {cause}")]
    Parse {
        /// The file.
        file: PathBuf,
        /// Where and why.
        cause: Box<toml::de::Error>,
    },
    /// A card's field has a bad value.
    #[error("site file {file}: card {card:?}: {field} = {value:?}: {must}")]
    Field {
        /// The file.
        file: PathBuf,
        /// The card.
        card: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// There is no such card.
    #[error("site file {file}: no card {card:?}; there are: {}", .known.join(", "))]
    NoSuchCard {
        /// The file.
        file: PathBuf,
        /// The card.
        card: String,
        /// Those that there are.
        known: Vec<String>,
    },
}

impl Site {
    /// Reads and checks a site file. Other tables than `card` are for other programs.
    pub fn load(file: &Path) -> Result<Site, SiteError> {
        let owned = || file.to_owned();
        let text = std::fs::read_to_string(file).map_err(|cause| SiteError::Read { file: owned(), cause })?;
        let site: Site = toml::from_str(&text)
            .map_err(|cause| SiteError::Parse { file: owned(), cause: Box::new(cause) })?;
        for (index, card) in site.cards.iter().enumerate() {
            let bad = |field, value: &str, must| SiteError::Field {
                file: owned(),
                card: card.name.clone(),
                field,
                value: value.to_owned(),
                must,
            };
            if card.name.is_empty() || card.name.contains([':', '/']) {
                return Err(bad("name", &card.name, "must be a word without `:` and `/`"));
            }
            if site.cards[..index].iter().any(|other| other.name == card.name) {
                return Err(bad("name", &card.name, "another card has it"));
            }
            if !is_address(&card.address) {
                return Err(bad("address", &card.address, "must be `host:port`"));
            }
        }
        Ok(site)
    }

    /// The card with this name, or at this address if it is one.
    pub fn find(&self, file: &Path, card: &str) -> Result<Entry, SiteError> {
        if let Some(entry) = self.cards.iter().find(|entry| entry.name == card) {
            return Ok(entry.clone());
        }
        Err(SiteError::NoSuchCard {
            file: file.to_owned(),
            card: card.to_owned(),
            known: self.cards.iter().map(|entry| entry.name.clone()).collect(),
        })
    }
}

/// Whether a word is `host:port`.
pub fn is_address(word: &str) -> bool {
    word.rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Site, SiteError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("site.toml");
        std::fs::write(&file, text).unwrap();
        Site::load(&file)
    }

    #[test]
    fn a_site_names_its_cards() {
        let site =
            load("[[card]]\nname = \"a\"\naddress = \"node3:7480\"\n[[host]]\nname = \"x\"\n").unwrap();
        assert_eq!(site.find(Path::new("f"), "a").unwrap().address, "node3:7480");
        let unknown = site.find(Path::new("f"), "b").unwrap_err().to_string();
        assert_eq!(unknown, "site file f: no card \"b\"; there are: a");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let two = "[[card]]\nname = \"a\"\naddress = \"h:1\"\n[[card]]\nname = \"a\"\naddress = \"h:2\"\n";
        for (text, words) in [
            ("[[card]]\nname = \"a\"\naddress = \"node3\"\n", "address = \"node3\": must be `host:port`"),
            ("[[card]]\nname = \"a\"\naddress = \"node3:0\"\n", "must be `host:port`"),
            ("[[card]]\nname = \"a:b\"\naddress = \"h:1\"\n", "name = \"a:b\""),
            (two, "another card has it"),
            ("[[card]]\nname = \"a\"\n", "address"),
            ("[[card]]\nname = \"a\"\naddress = \"h:1\"\nbanks = 3\n", "banks"),
            ("nonsense", "site file"),
        ] {
            let error = load(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
