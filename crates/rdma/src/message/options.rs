//! Setting a messenger up.
#![forbid(unsafe_code)]

use std::net::TcpStream;

use super::credits::MIN_WINDOW;
use super::frame::{HEADER_LEN, LENGTH_LEN};
use super::messenger::{Messenger, recv_id};
use crate::connect::{ConnectError, PreparedQueuePair, RcOptions};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::memory::{Access, MemoryError, Region};
use crate::queue::{CompletionQueue, PostError, QueueError};

/// The size of what messengers tell each other in front of the program's own bytes of private data.
const GREETING_LEN: usize = 8;
/// Frames that only return credits and have not completed.
pub(super) const CREDIT_FRAMES: u16 = 2;
/// A frame must hold a message worth sending.
const MIN_FRAME: u32 = 64;
const MAX_FRAME: u32 = 1 << 20;

/// The sizes of a messenger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessengerOptions {
    /// Bytes of a frame; also bounds a message. The smaller one of both sides counts.
    pub frame_bytes: u32,
    /// Frames filled or being sent.
    pub send_frames: u16,
    /// Frames received and not yet worked off: how far ahead the peer may be.
    pub recv_frames: u16,
    /// The connection; depths, elements and access are set from the above.
    pub connection: RcOptions,
}

impl Default for MessengerOptions {
    fn default() -> MessengerOptions {
        MessengerOptions {
            frame_bytes: 4096,
            send_frames: 16,
            recv_frames: 32,
            connection: RcOptions { max_inline: 0, ..RcOptions::default() },
        }
    }
}

impl MessengerOptions {
    /// The completions that can be outstanding: what its completion queue must hold at least.
    pub fn completions(&self) -> u32 {
        u32::from(self.send_frames) + u32::from(CREDIT_FRAMES) + u32::from(self.recv_frames)
    }
}

/// Why a messenger could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// A size that cannot work.
    #[error("messenger option {field} = {value} is not within {least}..={most}")]
    Option {
        /// Which.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The least that works.
        least: u32,
        /// The most that works.
        most: u32,
    },
    /// The buffers.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The queue pair.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The receives.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The peer announced sizes that cannot work.
    #[error(
        "peer {peer}: announced {found:?} for its messages: frame size and window, at least {MIN_FRAME} and {MIN_WINDOW}"
    )]
    Greeting {
        /// The peer.
        peer: String,
        /// What it sent.
        found: Vec<u8>,
    },
}

/// A messenger that waits to be connected; its receives are posted.
#[derive(Debug)]
pub struct PreparedMessenger {
    prepared: PreparedQueuePair,
    queue: CompletionQueue,
    options: MessengerOptions,
    outgoing: Region,
    incoming: Region,
}

impl PreparedMessenger {
    /// Buffers, a queue pair, and receives posted to it.
    ///
    /// `queue` takes all its completions. It may be shared with other queue pairs if it is deep enough for
    /// all; whoever polls it hands the messenger's completions to [`Messenger::handle`] by their queue pair's
    /// number.
    ///
    /// # Errors
    /// [`PrepareError`] names the option that cannot work, or what the device refused.
    pub fn new(
        device: &Device,
        queue: &CompletionQueue,
        options: &MessengerOptions,
    ) -> Result<PreparedMessenger, PrepareError> {
        let within = |field, value: u32, least: u32, most: u32| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(PrepareError::Option { field, value, least, most }),
        };
        within("frame_bytes", options.frame_bytes, MIN_FRAME, MAX_FRAME)?;
        within("send_frames", options.send_frames.into(), 2, u16::MAX.into())?;
        within("recv_frames", options.recv_frames.into(), MIN_WINDOW.into(), u16::MAX.into())?;
        within("completion queue depth", queue.depth(), options.completions(), u32::MAX)?;
        let frame = options.frame_bytes as usize;
        let returns = usize::from(CREDIT_FRAMES) * HEADER_LEN;
        let outgoing = usize::from(options.send_frames) * frame + returns;
        let outgoing = Region::landing(device, c"millstream-messages-out", outgoing, Access::SOURCE)?;
        let incoming = usize::from(options.recv_frames) * frame;
        let incoming = Region::landing(device, c"millstream-messages-in", incoming, Access::LOCAL_WRITE)?;
        let connection = RcOptions {
            send_depth: u32::from(options.send_frames) + u32::from(CREDIT_FRAMES),
            recv_depth: options.recv_frames.into(),
            send_sges: 1,
            recv_sges: 1,
            access: Access::SOURCE,
            ..options.connection
        };
        let prepared = PreparedQueuePair::new(device, queue, queue, &connection)?;
        for slot in 0..options.recv_frames {
            let at = u64::from(slot) * u64::from(options.frame_bytes);
            // Within by construction: the region has `recv_frames` frames.
            let Ok(to) = incoming.sge(at, options.frame_bytes) else { continue };
            prepared.post_recv(&[to], recv_id(slot))?;
        }
        Ok(PreparedMessenger { prepared, queue: queue.clone(), options: *options, outgoing, incoming })
    }

    /// Connects with the messenger at the other end of `stream`; see [`PreparedQueuePair::connect`]. Also returns the
    /// peer's bytes of private data.
    ///
    /// # Errors
    /// As there, and [`PrepareError::Greeting`] if the peer is not a messenger.
    pub fn connect(
        self,
        stream: &mut TcpStream,
        private_data: &[u8],
        deadline: Deadline,
    ) -> Result<(Messenger, Vec<u8>), PrepareError> {
        let mut greeting = Vec::with_capacity(GREETING_LEN + private_data.len());
        greeting.extend_from_slice(&self.options.frame_bytes.to_be_bytes());
        greeting.extend_from_slice(&self.options.recv_frames.to_be_bytes());
        greeting.extend_from_slice(&[0; 2]);
        greeting.extend_from_slice(private_data);
        let connected = self.prepared.connect(stream, &greeting, deadline)?;
        let Some((frame_bytes, window, rest)) = read_greeting(&connected.private_data) else {
            let found = connected.private_data[..connected.private_data.len().min(GREETING_LEN)].to_vec();
            return Err(PrepareError::Greeting { peer: connected.pair.peer().to_owned(), found });
        };
        let rest = rest.to_vec();
        let sendable = frame_bytes.min(self.options.frame_bytes);
        let messenger = Messenger::new(
            connected.pair,
            self.queue,
            self.options,
            (self.outgoing, self.incoming),
            (sendable, window),
        );
        Ok((messenger, rest))
    }
}

/// The peer's frame size, its window, and the program's own bytes of private data.
fn read_greeting(private_data: &[u8]) -> Option<(u32, u16, &[u8])> {
    let ([f0, f1, f2, f3, w0, w1, 0, 0], rest) = private_data.split_first_chunk::<GREETING_LEN>()? else {
        return None;
    };
    let frame_bytes = u32::from_be_bytes([*f0, *f1, *f2, *f3]);
    let window = u16::from_be_bytes([*w0, *w1]);
    ((MIN_FRAME..=MAX_FRAME).contains(&frame_bytes) && window >= MIN_WINDOW).then_some((
        frame_bytes,
        window,
        rest,
    ))
}

/// The longest message that fits a frame.
pub(super) fn max_message(frame_bytes: u32) -> usize {
    // At least `MIN_FRAME`, checked on both sides.
    frame_bytes as usize - HEADER_LEN - LENGTH_LEN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_read_or_refused() {
        assert_eq!(read_greeting(&[0, 0, 16, 0, 0, 32, 0, 0, 7]), Some((4096, 32, &[7][..])));
        assert_eq!(read_greeting(&[0, 0, 16, 0, 0, 32, 0]), None);
        assert_eq!(read_greeting(&[0, 0, 16, 0, 0, 32, 1, 0]), None);
        assert_eq!(read_greeting(&[0, 0, 0, 63, 0, 32, 0, 0]), None);
        assert_eq!(read_greeting(&[0, 0, 16, 0, 0, 3, 0, 0]), None);
    }

    #[test]
    fn the_longest_message_fills_a_frame() {
        assert_eq!(max_message(MIN_FRAME), 52);
    }
}
