//! What the processes of one host say to each other, over a socket named after the owner's number.
//!
//! A client connects, says hello, and gets the server's arena. Later it asks for memory to map and
//! for completion channels to signal, and reports faults that it caused in the server's queue
//! pairs. Requests and answers have one fixed size.

use std::time::Duration;

use crate::layout;

/// How long to wait for another process's answer. It is given by a thread that does nothing else,
/// so only a stopped process takes longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Version of these messages.
const MESSAGES: u32 = 2;

/// Version of these messages and of the arena's layout together.
pub(crate) const VERSION: u32 = (layout::MAGIC ^ layout::MAGIC >> 32) as u32 ^ MESSAGES;

/// Socket name of the process that owns queue pair numbers starting with `block`.
pub(crate) fn name(block: u32) -> String {
    format!("{}{block:03x}", name_prefix())
}

/// What the socket names of all this user's processes start with.
pub(crate) fn name_prefix() -> String {
    format!("millstream/{}/", millstream_shm::socket::own_uid())
}

pub(crate) const LEN: usize = 24;

/// A message: an operation and five words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) op: Op,
    pub(crate) words: [u32; 5],
}

#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Words: version, process id, whether asymmetric fences work. Answered alike, with the arena.
    Hello = 1,
    /// Words: slot, generation. Answered with the file, or refused.
    File = 2,
    /// Words: channel. Answered with its event descriptor, or refused.
    Channel = 3,
    /// Words: your queue pair, mine, event. Not answered.
    Fault = 4,
    /// Words: your queue pair: its peer has posted receives again. Not answered.
    Refilled = 5,
    /// The answer "no such thing", with the words of the request.
    Refused = 6,
    /// Words: your queue pair: its shared receive queue fell below its limit. Not answered.
    LimitReached = 7,
    /// Words: channel, to be signalled by its owner. Not answered.
    Signal = 8,
    /// Words: your queue pair, mine: our first request found yours in RTR. Not answered.
    Contact = 9,
    /// Words: your queue pair: a datagram found its completion queue full. Not answered.
    Overrun = 10,
    /// Words: your XRC shared receive queue, what happened to it ([`shared`]). Not answered.
    Shared = 11,
    /// Words: my number: I have queue pairs in multicast groups. Answered alike.
    Member = 12,
    /// Words: your queue pair: a datagram's sender died that had taken a request. Not answered.
    Abandoned = 13,
}

/// What can happen to an XRC shared receive queue.
pub(crate) mod shared {
    /// It fell below its limit.
    pub(crate) const LIMIT: u32 = 1;
    /// Its completion queue was full.
    pub(crate) const OVERRUN: u32 = 2;
    /// An initiator died that had taken a request, whose note waits in the entry.
    pub(crate) const ABANDONED: u32 = 3;
}

impl Message {
    pub(crate) fn new<const N: usize>(op: Op, words: [u32; N]) -> Self {
        let mut all = [0; 5];
        all[..N].copy_from_slice(&words);
        Self { op, words: all }
    }

    pub(crate) fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let words = [self.op as u32].into_iter().chain(self.words);
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; LEN] = bytes.try_into().ok()?;
        let word = |i: usize| {
            u32::from_ne_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
        };
        let op = match word(0) {
            1 => Op::Hello,
            2 => Op::File,
            3 => Op::Channel,
            4 => Op::Fault,
            5 => Op::Refilled,
            6 => Op::Refused,
            7 => Op::LimitReached,
            8 => Op::Signal,
            9 => Op::Contact,
            10 => Op::Overrun,
            11 => Op::Shared,
            12 => Op::Member,
            13 => Op::Abandoned,
            _ => return None,
        };
        Some(Self { op, words: [word(1), word(2), word(3), word(4), word(5)] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way() {
        for op in [
            Op::Hello,
            Op::File,
            Op::Channel,
            Op::Fault,
            Op::Refilled,
            Op::Refused,
            Op::LimitReached,
            Op::Signal,
            Op::Contact,
            Op::Overrun,
            Op::Shared,
            Op::Member,
            Op::Abandoned,
        ] {
            let message = Message::new(op, [1, 2, u32::MAX]);
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        assert_eq!(Message::decode(&[0; LEN]), None);
        assert_eq!(Message::decode(&[1, 0, 0, 0]), None);
    }
}
