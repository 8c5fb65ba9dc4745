//! Messages from a card to a client: interrupts with card, region and cause.

use crate::codes::MessageKind;
use crate::command::Cause;
use crate::layout;

layout! {
    /// A message as encoded.
    pub struct RawMessage[64] {
        0 card: u64 = "`card_id` of the sender";
        8 epoch: u32 = "epoch of the lease";
        12 kind: u32 = "see Message kinds";
        16 region: u32 = "region, DMA ring slot, or number of a peer";
        20 cause: u32 = "zero, or why it failed; see Causes";
        24 sequence: u64 = "doorbell or command that the message answers";
        32 values: [u64; 4] = "depend on the kind";
    }
}

/// A message from a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// `card_id` of the sender.
    pub card: u64,
    /// Epoch of the lease.
    pub epoch: u32,
    /// Its kind.
    pub kind: MessageKind,
    /// Region, DMA ring slot or peer.
    pub region: u32,
    /// Why it failed, if it did.
    pub cause: Option<Cause>,
    /// The doorbell or command that the message answers.
    pub sequence: u64,
    /// Depend on the kind; see `docs/registers.md`.
    pub values: [u64; 4],
}

impl Message {
    /// Encodes the message.
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

    /// Decodes a message; none if this version does not know its kind.
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
    fn messages_round_trip_and_unknown_kinds_are_ignored() {
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
