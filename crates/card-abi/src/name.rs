//! Names of cards on one host, and their socket addresses.

use std::fmt;
use std::str::FromStr;

/// Name of a card, unique among the cards of one user on one host: 1 to 64 letters, digits, dots,
/// dashes and underscores.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CardName(String);

/// A string that is not a valid card name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("card name {0:?} is not 1 to 64 letters, digits, dots, dashes and underscores")]
pub struct BadCardName(String);

impl CardName {
    /// The abstract socket address at which user `uid` serves this card.
    pub fn address(&self, uid: u32) -> String {
        format!("millstream-card/{uid}/{}", self.0)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for CardName {
    type Err = BadCardName;

    fn from_str(name: &str) -> Result<CardName, BadCardName> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if (1..=64).contains(&name.len()) && name.bytes().all(legal) {
            Ok(CardName(name.to_owned()))
        } else {
            Err(BadCardName(name.to_owned()))
        }
    }
}

impl fmt::Display for CardName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_restricted_alphabet() {
        for good in ["card0", "u280.bank-3_x", &"n".repeat(64)] {
            assert_eq!(good.parse::<CardName>().unwrap().as_str(), good);
        }
        for bad in ["", "a/b", "a b", "caf\u{e9}", "\0", &"n".repeat(65)] {
            let error = bad.parse::<CardName>().unwrap_err();
            assert!(error.to_string().contains(&format!("{bad:?}")));
        }
    }
}
