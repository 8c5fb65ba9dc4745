//! Messages from a card to a node: interrupts that say which card, region and cause.

use crate::command::Cause;
use crate::layout::layout;
use crate::region::codes::MessageKind;

layout! {
    /// A message as it travels.
    pub struct RawMessage[64] {
        0 card: u64 = "`card_id` of the sender";
        8 epoch: u32 = "epoch of the lease that it concerns";
        12 kind: u32 = "see Kinds of messages";
        16 region: u32 = "region, or slot of a copy, or number of a peer";
        20 cause: u32 = "zero, or what is wrong; see Causes";
        24 sequence: u64 = "doorbell or command that it answers";
        32 values: [u64; 4] = "depend on the kind";
    }
}

/// A message from a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The card that sent it.
    pub card: u64,
    /// Epoch of the lease that it concerns.
    pub epoch: u32,
    /// What it is about.
    pub kind: MessageKind,
    /// The region, slot or peer.
    pub region: u32,
    /// What is wrong, if anything is.
    pub cause: Option<Cause>,
    /// The doorbell or command that it answers.
    pub sequence: u64,
    /// Depend on the kind; see `docs/registers.md`.
    pub values: [u64; 4],
}

impl Message {
    /// The message as it travels.
    pub fn to_bytes(self) -> [u8; RawMessage::BYTES] {
        RawMessage {
            card: self.card,
            epoch: self.epoch,
            kind: self.kind as u32,
            region: self.region,
            cause: self.cause.map_or(0, Cause::code),
            sequence: self.sequence,
            values: self.values,
        }
        .to_bytes()
    }

    /// Reads a message; nothing if its kind is not known to this version.
    pub fn from_bytes(bytes: &[u8; RawMessage::BYTES]) -> Option<Message> {
        let raw = RawMessage::from_bytes(bytes);
        Some(Message {
            card: raw.card,
            epoch: raw.epoch,
            kind: MessageKind::from_code(raw.kind)?,
            region: raw.region,
            cause: (raw.cause != 0).then(|| Cause::from_code(raw.cause)),
            sequence: raw.sequence,
            values: raw.values,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_unknown_ones_do_not() {
        let message = Message {
            card: 7,
            epoch: 3,
            kind: MessageKind::RegionFault,
            region: 1,
            cause: Some(Cause::FuelExhausted),
            sequence: 9,
            values: [1, 2, 3, 4],
        };
        let mut bytes = message.to_bytes();
        assert_eq!(Message::from_bytes(&bytes), Some(message));
        bytes[12] = 200;
        assert_eq!(Message::from_bytes(&bytes), None);
    }
}
