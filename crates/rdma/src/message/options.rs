//! Setup of message channels.
#![forbid(unsafe_code)]

use super::channel::{MessageChannel, recv_id};
use super::credits::MIN_WINDOW;
use super::frame::{HEADER_LEN, LENGTH_LEN};
use crate::connect::{ConnectError, ControlStream, PreparedQueuePair, RcOptions};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::memory::{Access, MemoryError, Region};
use crate::queue::{CompletionQueue, PostError, QueueError};

/// Length of the message channel's own parameters in front of the private data, in bytes.
const PARAMETERS_LEN: usize = 8;
/// Maximum outstanding frames that only return credits.
pub(super) const CREDIT_FRAMES: u16 = 2;
/// Minimum frame size, in bytes.
const MIN_FRAME: u32 = 64;
const MAX_FRAME: u32 = 1 << 20;

/// Sizes of a message channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageChannelOptions {
    /// Frame size, in bytes, which limits a message. The smaller value of both sides is used.
    pub frame_bytes: u32,
    /// Number of send frames.
    pub send_frames: u16,
    /// Number of posted receives: the window of the peer.
    pub recv_frames: u16,
    /// Connection options; depths, elements and access are set from the above.
    pub connection: RcOptions,
}

impl Default for MessageChannelOptions {
    fn default() -> MessageChannelOptions {
        MessageChannelOptions {
            frame_bytes: 4096,
            send_frames: 16,
            recv_frames: 32,
            connection: RcOptions { max_inline: 0, ..RcOptions::default() },
        }
    }
}

impl MessageChannelOptions {
    /// Maximum outstanding completions: the required depth of its completion queue.
    pub fn completions(&self) -> u32 {
        u32::from(self.send_frames) + u32::from(CREDIT_FRAMES) + u32::from(self.recv_frames)
    }
}

/// Why a message channel could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// An option is out of range.
    #[error("message channel option {field} = {value} is out of range: must be {least} to {most}")]
    Option {
        /// The option.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The smallest valid value.
        least: u32,
        /// The largest valid value.
        most: u32,
    },
    /// The buffers could not be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The queue pair could not be created.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The receives could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The connection could not be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The peer's sizes are invalid.
    #[error(
        "peer {peer}: announced {found:?} for its messages: frame size and window, at least {MIN_FRAME} and {MIN_WINDOW}"
    )]
    Parameters {
        /// The peer.
        peer: String,
        /// The bytes received.
        found: Vec<u8>,
    },
}

/// A message channel that is not connected; its receives are posted.
#[derive(Debug)]
pub struct PreparedMessageChannel {
    prepared: PreparedQueuePair,
    queue: CompletionQueue,
    options: MessageChannelOptions,
    outgoing: Region,
    incoming: Region,
}

impl PreparedMessageChannel {
    /// Creates buffers and a queue pair, and posts the receives.
    ///
    /// `queue` gets all its completions. It may be shared with other queue pairs if it is deep enough. Then the caller
    /// passes the message channel's completions, identified by their queue pair number, to [`MessageChannel::handle`].
    ///
    /// # Errors
    /// [`PrepareError`] for an invalid option, or if the device refuses.
    pub fn new(
        device: &Device,
        queue: &CompletionQueue,
        options: &MessageChannelOptions,
    ) -> Result<PreparedMessageChannel, PrepareError> {
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
            // In bounds: the region has `recv_frames` frames.
            let Ok(to) = incoming.sge(at, options.frame_bytes) else { continue };
            prepared.post_recv(&[to], recv_id(slot))?;
        }
        Ok(PreparedMessageChannel { prepared, queue: queue.clone(), options: *options, outgoing, incoming })
    }

    /// Connects to the message channel at the other end of `stream`; see [`PreparedQueuePair::connect`]. Also returns the peer's
    /// private data.
    ///
    /// # Errors
    /// As [`PreparedQueuePair::connect`]; [`PrepareError::Parameters`] if the peer is not a
    /// message channel.
    pub fn connect(
        self,
        stream: &mut impl ControlStream,
        private_data: &[u8],
        deadline: Deadline,
    ) -> Result<(MessageChannel, Vec<u8>), PrepareError> {
        let mut parameters = Vec::with_capacity(PARAMETERS_LEN + private_data.len());
        parameters.extend_from_slice(&self.options.frame_bytes.to_be_bytes());
        parameters.extend_from_slice(&self.options.recv_frames.to_be_bytes());
        parameters.extend_from_slice(&[0; 2]);
        parameters.extend_from_slice(private_data);
        let connected = self.prepared.connect(stream, &parameters, deadline)?;
        let Some((frame_bytes, window, rest)) = decode_parameters(&connected.private_data) else {
            let found = connected.private_data[..connected.private_data.len().min(PARAMETERS_LEN)].to_vec();
            return Err(PrepareError::Parameters { peer: connected.pair.peer().to_owned(), found });
        };
        let rest = rest.to_vec();
        let sendable = frame_bytes.min(self.options.frame_bytes);
        let messages = MessageChannel::new(
            connected.pair,
            self.queue,
            self.options,
            (self.outgoing, self.incoming),
            (sendable, window),
        );
        Ok((messages, rest))
    }
}

/// The peer's frame size, its window, and its private data.
fn decode_parameters(private_data: &[u8]) -> Option<(u32, u16, &[u8])> {
    let ([f0, f1, f2, f3, w0, w1, 0, 0], rest) = private_data.split_first_chunk::<PARAMETERS_LEN>()? else {
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

/// Length of the longest message of a frame.
pub(super) fn max_message(frame_bytes: u32) -> usize {
    // `frame_bytes` is at least `MIN_FRAME`, checked on both sides.
    frame_bytes as usize - HEADER_LEN - LENGTH_LEN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_decode_or_are_refused() {
        assert_eq!(decode_parameters(&[0, 0, 16, 0, 0, 32, 0, 0, 7]), Some((4096, 32, &[7][..])));
        assert_eq!(decode_parameters(&[0, 0, 16, 0, 0, 32, 0]), None);
        assert_eq!(decode_parameters(&[0, 0, 16, 0, 0, 32, 1, 0]), None);
        assert_eq!(decode_parameters(&[0, 0, 0, 63, 0, 32, 0, 0]), None);
        assert_eq!(decode_parameters(&[0, 0, 16, 0, 0, 3, 0, 0]), None);
    }

    #[test]
    fn the_longest_message_fills_a_frame() {
        assert_eq!(max_message(MIN_FRAME), 52);
    }
}
