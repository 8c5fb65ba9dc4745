//! Messages between an outside host and its gateway: eight words each.

use crate::control::{Command, Completion, ControlError};

/// Size of a message.
pub(super) const MESSAGE_BYTES: usize = 64;
/// Commands of a host under way.
pub(super) const MAX_COMMANDS: usize = 64;

const READY: u64 = 1;
const COMPLETED: u64 = 2;

/// From the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FromGateway {
    /// The gateway takes commands from here on.
    Ready,
    /// A command ended.
    Completed(Completion),
}

impl FromGateway {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        let mut words = [READY, 0, 0, 0, 0, 0, 0, 0];
        if let FromGateway::Completed(completion) = self {
            words[0] = COMPLETED;
            words[1..5].copy_from_slice(&completion.encode());
        }
        bytes(words)
    }

    /// `None` if the message is malformed.
    pub(super) fn decode(bytes: &[u8]) -> Option<FromGateway> {
        let [kind, a, b, c, d, ..] = words(bytes)?;
        match kind {
            READY => Some(FromGateway::Ready),
            COMPLETED => Some(FromGateway::Completed(Completion::decode([a, b, c, d]))),
            _ => None,
        }
    }
}

pub(super) fn encode_command(command: &Command) -> [u8; MESSAGE_BYTES] {
    bytes(command.encode())
}

/// A command of a host. Every value is input.
pub(super) fn decode_command(bytes: &[u8]) -> Result<Command, ControlError> {
    let words = words(bytes).ok_or(ControlError { field: "message length", value: bytes.len() as u64 })?;
    Command::decode(words)
}

fn bytes(words: [u64; 8]) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn words(bytes: &[u8]) -> Option<[u64; 8]> {
    let (chunks, rest) = bytes.as_chunks::<8>();
    let chunks: &[[u8; 8]; 8] = chunks.try_into().ok()?;
    rest.is_empty().then(|| chunks.map(u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use millstream_fabric::{Notification, RegionId};
    use millstream_torus_core::NodeNumber;
    use proptest::prelude::*;

    use super::*;
    use crate::control::CommandKind;
    use crate::engine::Failure;

    #[test]
    fn messages_keep_their_values() {
        let failure = Some(Failure::Bounds(1 << 40));
        let completed = Completion { cookie: u32::MAX, value: u64::MAX, failure };
        for message in [FromGateway::Ready, FromGateway::Completed(completed)] {
            assert_eq!(FromGateway::decode(&message.encode()), Some(message));
            assert_eq!(FromGateway::decode(&message.encode()[1..]), None);
        }
        let notification = Notification::Event { tag: 7 };
        let kind = CommandKind::Put { local: RegionId(0), at: 64, length: 9, notification };
        let region = RegionId(u64::MAX);
        let command = Command { kind, target: NodeNumber(5), cookie: 3, region, offset: u64::MAX };
        assert_eq!(decode_command(&encode_command(&command)), Ok(command));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_refused(bytes: Vec<u8>) {
            if let Ok(command) = decode_command(&bytes) {
                prop_assert_eq!(decode_command(&encode_command(&command)), Ok(command));
            }
            let _ = FromGateway::decode(&bytes);
        }
    }
}
