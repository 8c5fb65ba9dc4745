//! Messages between a process that joins the group and its members, over connections whose peer's user was checked.

/// Version of the messages, here and in [`inbox`](super::inbox).
pub(super) const VERSION: u32 = 3;

/// Messages of 16 bytes: type, socket index, QPN prefix, generation, four bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Asks for all sockets. The answer begins with the same message.
    Hello { version: u32 },
    /// Describes the socket that is attached. From a process that joins, its inbox is attached, too.
    Slot { index: u16, qpn_prefix: u16, generation: u32 },
    /// End of the list.
    End,
}

impl Message {
    pub(super) const LEN: usize = 16;

    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let words = match self {
            Self::Hello { version } => [1, version, 0, 0],
            Self::Slot { index, qpn_prefix, generation } => [2, index.into(), qpn_prefix.into(), generation],
            Self::End => [3, 0, 0, 0],
        };
        let mut bytes = [0; Self::LEN];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let word = |i: usize| u32::from_ne_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four bytes"));
        match word(0) {
            1 => Some(Self::Hello { version: word(1) }),
            2 => Some(Self::Slot {
                index: word(1).try_into().ok()?,
                qpn_prefix: word(2).try_into().ok()?,
                generation: word(3),
            }),
            3 => Some(Self::End),
            _ => None,
        }
    }
}
