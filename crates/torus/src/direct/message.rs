//! Messages between two nodes of a mesh: a kind, then its fields, little-endian.

use millstream_fabric::RegionId;
use millstream_rdma::RemoteMemory;

/// Most bytes of an exchange in one message.
pub(super) const EXCHANGE_BYTES: usize = 1024;
/// Size of a message, at most.
pub(super) const MESSAGE_BYTES: usize = 32 + EXCHANGE_BYTES;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A region of the sender.
    Region { id: RegionId, memory: RemoteMemory },
    /// The sender has no such region, or it ends: the receiver confirms that it forgot it.
    NoRegion { id: RegionId, confirm: bool },
    /// The sender posts nothing more to a region of the receiver.
    Forgotten { id: RegionId },
    /// Asks for a region of the receiver.
    Lookup { id: RegionId },
    /// The notification of the writes before it.
    Event { tag: u32, region: RegionId, offset: u64, length: u64 },
    /// A part of the sender's bytes in a round of the exchange.
    Exchange { round: u32, total: u64, part: Vec<u8> },
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        match self {
            Message::Region { id, memory } => {
                bytes.push(0);
                bytes.extend(id.0.to_le_bytes());
                bytes.extend(memory.encode());
            }
            Message::NoRegion { id, confirm } => {
                bytes.push(1);
                bytes.extend(id.0.to_le_bytes());
                bytes.push(u8::from(*confirm));
            }
            Message::Forgotten { id } => {
                bytes.push(2);
                bytes.extend(id.0.to_le_bytes());
            }
            Message::Lookup { id } => {
                bytes.push(3);
                bytes.extend(id.0.to_le_bytes());
            }
            Message::Event { tag, region, offset, length } => {
                bytes.push(4);
                bytes.extend(tag.to_le_bytes());
                [region.0, *offset, *length].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
            }
            Message::Exchange { round, total, part } => {
                bytes.push(5);
                bytes.extend(round.to_le_bytes());
                bytes.extend(total.to_le_bytes());
                bytes.extend(part);
            }
        }
        bytes
    }

    /// `None` if the message is malformed.
    pub(super) fn decode(bytes: &[u8]) -> Option<Message> {
        let (kind, rest) = bytes.split_first()?;
        let mut fields = Fields(rest);
        let message = match kind {
            0 => Message::Region {
                id: RegionId(fields.word()?),
                memory: RemoteMemory::decode(&fields.take::<{ RemoteMemory::ENCODED_LEN }>()?),
            },
            1 => Message::NoRegion { id: RegionId(fields.word()?), confirm: fields.take::<1>()? == [1] },
            2 => Message::Forgotten { id: RegionId(fields.word()?) },
            3 => Message::Lookup { id: RegionId(fields.word()?) },
            4 => Message::Event {
                tag: u32::from_le_bytes(fields.take()?),
                region: RegionId(fields.word()?),
                offset: fields.word()?,
                length: fields.word()?,
            },
            5 => Message::Exchange {
                round: u32::from_le_bytes(fields.take()?),
                total: fields.word()?,
                part: std::mem::take(&mut fields.0).to_vec(),
            },
            _ => return None,
        };
        fields.0.is_empty().then_some(message)
    }
}

struct Fields<'m>(&'m [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn word(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_and_cut_ones_refused() {
        let id = RegionId(0x0123_4567_89ab_cdef);
        let memory = RemoteMemory::decode(&std::array::from_fn(|i| i as u8));
        for message in [
            Message::Region { id, memory },
            Message::NoRegion { id, confirm: true },
            Message::Forgotten { id },
            Message::Lookup { id },
            Message::Event { tag: 7, region: id, offset: 1, length: u64::MAX },
            Message::Exchange { round: 3, total: 9, part: vec![1; EXCHANGE_BYTES] },
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_BYTES);
            assert_eq!(Message::decode(&bytes), Some(message));
            assert_eq!(Message::decode(&bytes[..bytes.len().min(9) - 1]), None);
        }
        assert_eq!(Message::decode(&[]), None);
        assert_eq!(Message::decode(&[6; 40]), None);
        assert_eq!(Message::decode(&[2; 10]), None, "a byte too many");
    }
}
