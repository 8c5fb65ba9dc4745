//! The two messages that open a card: a request from the user, an answer with the card's memory.

use crate::command::{u32_at, u64_at};
use crate::registers::{MAGIC, VERSION};

/// Size of a request [bytes].
pub(crate) const REQUEST_BYTES: usize = 16;

/// Size of an answer [bytes].
pub(crate) const ANSWER_BYTES: usize = 32;

/// What a connection is to the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Uses the card.
    User = 0,
    /// Uses the card, and the card ends when this connection does.
    Owner = 1,
}

/// Why a card refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Cards serve their own user only.
    #[error("card belongs to another user")]
    OtherUser,
    /// The other side speaks another version of the protocol.
    #[error("card speaks another version, this one is {VERSION}")]
    Version,
    /// The card is not owned by a connection, or by another one already.
    #[error("card cannot be owned by this connection")]
    NotForOwning,
    /// The card serves as many connections as it can.
    #[error("card has too many connections")]
    TooMany,
}

/// `magic u64, version u32, role u32`
pub(crate) fn request(role: Role) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&(role as u32).to_le_bytes());
    bytes
}

pub(crate) fn parse_request(bytes: &[u8; REQUEST_BYTES]) -> Result<Role, Refusal> {
    if u64_at(bytes, 0) != MAGIC || u32_at(bytes, 8) != VERSION {
        return Err(Refusal::Version);
    }
    match u32_at(bytes, 12) {
        0 => Ok(Role::User),
        1 => Ok(Role::Owner),
        _ => Err(Refusal::Version),
    }
}

/// `magic u64, version u32, refusal u32 (0: none), memory bytes u64, reserved u64`; an answer that
/// is no refusal carries BAR0, memory and interrupt descriptor.
pub(crate) fn answer(answer: Result<u64, Refusal>) -> [u8; ANSWER_BYTES] {
    let (refusal, memory_bytes) = match answer {
        Ok(memory_bytes) => (0, memory_bytes),
        Err(Refusal::OtherUser) => (1, 0),
        Err(Refusal::Version) => (2, 0),
        Err(Refusal::NotForOwning) => (3, 0),
        Err(Refusal::TooMany) => (4, 0),
    };
    let mut bytes = [0; ANSWER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&u32::to_le_bytes(refusal));
    bytes[16..24].copy_from_slice(&memory_bytes.to_le_bytes());
    bytes
}

pub(crate) fn parse_answer(bytes: &[u8; ANSWER_BYTES]) -> Result<u64, Refusal> {
    if u64_at(bytes, 0) != MAGIC || u32_at(bytes, 8) != VERSION {
        return Err(Refusal::Version);
    }
    match u32_at(bytes, 12) {
        0 => Ok(u64_at(bytes, 16)),
        1 => Err(Refusal::OtherUser),
        3 => Err(Refusal::NotForOwning),
        4 => Err(Refusal::TooMany),
        _ => Err(Refusal::Version),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_come_back() {
        for role in [Role::User, Role::Owner] {
            assert_eq!(parse_request(&request(role)), Ok(role));
        }
        for outcome in [
            Ok(1 << 33),
            Err(Refusal::OtherUser),
            Err(Refusal::Version),
            Err(Refusal::NotForOwning),
            Err(Refusal::TooMany),
        ] {
            assert_eq!(parse_answer(&answer(outcome)), outcome);
        }
    }

    #[test]
    fn strangers_are_refused() {
        for at in [0, 7, 8, 11, 12, 15] {
            let mut bytes = request(Role::User);
            bytes[at] ^= 0x80;
            assert_eq!(parse_request(&bytes), Err(Refusal::Version));
            let mut bytes = answer(Ok(4096));
            bytes[at] ^= 0x80;
            assert_eq!(parse_answer(&bytes), Err(Refusal::Version));
        }
    }
}
