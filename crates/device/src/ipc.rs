//! Messages between the processes of one host, over a socket named after the receiver's queue pair number prefix.
//!
//! A client connects, says hello, and gets the server's arena. Later it requests files to map and completion
//! channels to signal. It also reports errors that its requests caused in the server's queue pairs. Messages
//! have one fixed size.

use std::time::Duration;

use crate::layout;

/// Longest wait for another process's answer. A dedicated thread answers, so only a stopped process takes
/// longer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

/// Version of these messages.
const MESSAGES_VERSION: u32 = 6;

/// Version of these messages and of the arena's layout together.
pub(crate) const VERSION: u32 = (layout::MAGIC ^ layout::MAGIC >> 32) as u32 ^ MESSAGES_VERSION;

/// Socket name of the process that owns the queue pair numbers with this prefix.
pub(crate) fn socket_name(qpn_prefix: u32) -> String {
    format!("{}{qpn_prefix:03x}", socket_name_prefix())
}

/// Common start of the socket names of all this user's processes.
pub(crate) fn socket_name_prefix() -> String {
    format!("millstream/{}/", millstream_shm::socket::own_uid())
}

/// Bytes of a message.
pub(crate) const MESSAGE_LEN: usize = 24;

/// A message: an operation and five words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) op: Op,
    pub(crate) words: [u32; 5],
}

/// The operation of a message. "Your" is the receiver's, "my" the sender's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Words: version, process id, properties ([`property`]), zero, the prefix of my queue pair numbers. The answer has the same
    /// form, the arena, and in place of zero the id of a thread that does not end before the process.
    Hello = 1,
    /// Words: slot, generation. The answer has the file, or is [`Op::Refused`].
    File = 2,
    /// Words: channel. The answer has its event descriptor, or is [`Op::Refused`].
    Channel = 3,
    /// Words: your queue pair, mine, event, revision of your entry. My request broke a rule of your queue pair. No
    /// answer.
    QpError = 4,
    /// Words: your queue pair. Its peer has posted receives again. No answer.
    RecvPosted = 5,
    /// The negative answer to a request, with its words.
    Refused = 6,
    /// Words: your queue pair. Its shared receive queue fell below its limit. No answer.
    SrqLimit = 7,
    /// Words: channel, which its owner shall signal. No answer.
    Signal = 8,
    /// Words: your queue pair, mine, revision of your entry. My first request found yours in RTR. No answer.
    CommEst = 9,
    /// Words: your queue pair. A datagram found its completion queue full. No answer.
    CqOverrun = 10,
    /// Words: your XRC shared receive queue, its event ([`srq_event`]). No answer.
    XrcSrqEvent = 11,
    /// Words: my prefix. I have queue pairs in multicast groups. The answer has the same form.
    MulticastMember = 12,
    /// Words: your queue pair. A datagram's sender exited that had taken a receive request. No answer.
    RecvAbandoned = 13,
    /// Words: the key of your region or window. Copies through the kernel have cost as much as moving its pages. No answer.
    RegionBusy = 14,
}

/// Properties of a process, in its hello.
pub(crate) mod property {
    /// It registered for asymmetric fences.
    pub(crate) const ASYMMETRIC: u32 = 1 << 0;
    /// Its queue pairs use packets only.
    pub(crate) const WIRE: u32 = 1 << 1;
}

/// Events of an XRC shared receive queue that a sender reports.
pub(crate) mod srq_event {
    /// The queue fell below its limit.
    pub(crate) const LIMIT: u32 = 1;
    /// Its completion queue was full.
    pub(crate) const CQ_OVERRUN: u32 = 2;
    /// An initiator exited that had taken a request; the entry holds its record.
    pub(crate) const RECV_ABANDONED: u32 = 3;
}

impl Message {
    pub(crate) fn new<const N: usize>(op: Op, words: [u32; N]) -> Self {
        let mut all = [0; 5];
        all[..N].copy_from_slice(&words);
        Self { op, words: all }
    }

    pub(crate) fn encode(&self) -> [u8; MESSAGE_LEN] {
        let mut bytes = [0; MESSAGE_LEN];
        let words = [self.op as u32].into_iter().chain(self.words);
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_LEN] = bytes.try_into().ok()?;
        let word = |i: usize| {
            u32::from_ne_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
        };
        let op = match word(0) {
            1 => Op::Hello,
            2 => Op::File,
            3 => Op::Channel,
            4 => Op::QpError,
            5 => Op::RecvPosted,
            6 => Op::Refused,
            7 => Op::SrqLimit,
            8 => Op::Signal,
            9 => Op::CommEst,
            10 => Op::CqOverrun,
            11 => Op::XrcSrqEvent,
            12 => Op::MulticastMember,
            13 => Op::RecvAbandoned,
            14 => Op::RegionBusy,
            _ => return None,
        };
        Some(Self { op, words: [word(1), word(2), word(3), word(4), word(5)] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_decode_to_what_was_encoded() {
        for op in [
            Op::Hello,
            Op::File,
            Op::Channel,
            Op::QpError,
            Op::RecvPosted,
            Op::Refused,
            Op::SrqLimit,
            Op::Signal,
            Op::CommEst,
            Op::CqOverrun,
            Op::XrcSrqEvent,
            Op::MulticastMember,
            Op::RecvAbandoned,
            Op::RegionBusy,
        ] {
            let message = Message::new(op, [1, 2, u32::MAX]);
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        assert_eq!(Message::decode(&[0; MESSAGE_LEN]), None);
        assert_eq!(Message::decode(&[1, 0, 0, 0]), None);
    }
}
