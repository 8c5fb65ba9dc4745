//! Connected message channels.

use std::collections::VecDeque;
use std::fmt;

use millstream_quantity::Qpn;

use super::credits::CreditWindow;
use super::frame::{FrameError, FrameReader, HEADER_LEN, Header, LENGTH_LEN};
use super::options::{CREDIT_FRAMES, MessageChannelOptions, max_message};
use crate::memory::{OutOfBounds, Region};
use crate::queue::{
    Completion, CompletionQueue, PollError, PostError, QueuePair, Signal, Status, WorkError, WrId,
};

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// All send frames are in use; retry after [`MessageChannel::progress`].
    #[error("peer {peer}: all send frames are in use; retry when the peer has received some")]
    Full {
        /// The peer.
        peer: String,
    },
    /// Longer than a frame.
    #[error("message of {len} bytes exceeds the maximum of {max}")]
    TooLong {
        /// Its length.
        len: usize,
        /// The longest.
        max: usize,
    },
    /// The connection failed: the peer died or closed it.
    #[error("peer {peer}: connection lost: {error}")]
    Lost {
        /// The peer.
        peer: String,
        /// The first failed work request.
        error: WorkError,
    },
    /// The peer sent an invalid frame.
    #[error("peer {peer}: {error}")]
    Malformed {
        /// The peer.
        peer: String,
        /// The problem.
        error: FrameError,
    },
    /// The completion queue has failed.
    #[error(transparent)]
    Poll(#[from] PollError),
    /// The device rejected a work request.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A buffer access out of bounds: a bug.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
}

/// Kind of a work request, in the upper bits of its id.
const KIND: u64 = 3 << 62;
const FRAME: u64 = 0;
const RECV: u64 = 1 << 62;
const RETURN: u64 = 2 << 62;

pub(super) fn recv_id(slot: u16) -> WrId {
    WrId(RECV | u64::from(slot))
}

/// Completions per poll.
const BATCH: usize = 16;

/// Sends and receives small messages over its own reliable connection.
///
/// Outgoing messages are collected in the open frame until [`flush`](MessageChannel::flush). The frame is sent when the peer
/// has a free receive; until then further messages join it. Frame `n` is in slot `n mod send_frames`, and
/// `completed <= posted <= open`.
pub struct MessageChannel {
    pair: QueuePair,
    queue: CompletionQueue,
    outgoing: Region,
    incoming: Region,
    window: CreditWindow,
    /// Size of a slot, in bytes.
    slot_bytes: u64,
    /// Maximum size of a frame that the peer receives, in bytes.
    frame_bytes: u32,
    send_frames: u64,
    /// Frames whose slot is free again.
    completed: u64,
    /// Frames posted to the device.
    posted: u64,
    /// The frame being filled; frames before it are closed.
    open: u64,
    /// Bytes (header included) and messages of the frames in each slot.
    filled: Box<[Filled]>,
    /// Send the open frame as soon as possible.
    flushing: bool,
    /// Frames that only return credits: posted, and completed.
    returns: (u64, u64),
    /// Slots with received, unread frames, in order of arrival, and their lengths.
    arrived: VecDeque<(u16, u32)>,
    /// The frame being read.
    reading: Option<Reading>,
    failure: Option<WorkError>,
}

#[derive(Debug, Clone, Copy)]
struct Filled {
    bytes: u32,
    messages: u16,
}

const NOTHING: Filled = Filled { bytes: HEADER_LEN as u32, messages: 0 };

#[derive(Debug, Clone, Copy)]
struct Reading {
    slot: u16,
    len: u32,
    cursor: FrameReader,
}

impl MessageChannel {
    pub(super) fn new(
        pair: QueuePair,
        queue: CompletionQueue,
        options: MessageChannelOptions,
        (outgoing, incoming): (Region, Region),
        (frame_bytes, peer_window): (u32, u16),
    ) -> MessageChannel {
        MessageChannel {
            pair,
            queue,
            outgoing,
            incoming,
            window: CreditWindow::new(options.recv_frames, peer_window),
            slot_bytes: options.frame_bytes.into(),
            frame_bytes,
            send_frames: options.send_frames.into(),
            completed: 0,
            posted: 0,
            open: 0,
            filled: vec![NOTHING; options.send_frames.into()].into_boxed_slice(),
            flushing: false,
            returns: (0, 0),
            arrived: VecDeque::with_capacity(options.recv_frames.into()),
            reading: None,
            failure: None,
        }
    }

    /// Its queue pair number, which its completions carry.
    pub fn qpn(&self) -> Qpn {
        self.pair.qpn()
    }

    /// The peer, for error messages.
    pub fn peer(&self) -> &str {
        self.pair.peer()
    }

    /// Maximum length of a message, in bytes.
    pub fn max_message(&self) -> usize {
        max_message(self.frame_bytes)
    }

    /// Adds a message to the open frame. The frame is sent by [`flush`](MessageChannel::flush), or when it is full.
    ///
    /// # Errors
    /// [`MessageError::Full`] if all frames are in use, [`MessageError::TooLong`], or [`MessageError::Lost`].
    pub fn send(&mut self, message: &[u8]) -> Result<(), MessageError> {
        self.check_alive()?;
        let max = self.max_message();
        if message.len() > max {
            return Err(MessageError::TooLong { len: message.len(), max });
        }
        let needed = (LENGTH_LEN + message.len()) as u32;
        if self.is_full() {
            return Err(self.full());
        }
        let open = self.filled[self.slot(self.open)];
        if needed > self.frame_bytes - open.bytes || open.messages == u16::MAX {
            self.open += 1;
            self.advance()?;
            if self.is_full() {
                return Err(self.full());
            }
        }
        let slot = self.slot(self.open);
        let at = slot as u64 * self.slot_bytes + u64::from(self.filled[slot].bytes);
        self.outgoing.copy_from_slice(at, &(message.len() as u32).to_be_bytes())?;
        self.outgoing.copy_from_slice(at + LENGTH_LEN as u64, message)?;
        self.filled[slot].bytes += needed;
        self.filled[slot].messages += 1;
        Ok(())
    }

    /// Sends all added messages: at once if the peer has a free receive, else from [`progress`](MessageChannel::progress).
    ///
    /// # Errors
    /// [`MessageError::Lost`], or an error of the device.
    pub fn flush(&mut self) -> Result<(), MessageError> {
        self.check_alive()?;
        self.flushing = self.has_open_messages();
        self.advance()
    }

    /// Polls the completion queue, which must not be shared. Handles received frames and send completions, and sends
    /// waiting frames. Returns whether there was a completion.
    ///
    /// # Errors
    /// [`MessageError::Lost`], [`MessageError::Malformed`], or an error of the device. Messages that arrived before can
    /// still be [received](MessageChannel::receive).
    pub fn progress(&mut self) -> Result<bool, MessageError> {
        let mut buffer = [Completion::EMPTY; BATCH];
        let mut any = false;
        let mut result = Ok(());
        loop {
            let taken = self.queue.poll(&mut buffer)?.len();
            for completion in &buffer[..taken] {
                // Frames that arrived before an error must not be lost.
                result = result.and(self.handle(completion));
            }
            any |= taken > 0;
            if taken < BATCH {
                break;
            }
        }
        result?;
        self.check_alive()?;
        self.advance()?;
        Ok(any)
    }

    /// Handles one completion of its queue pair, for users of a shared completion queue. Call
    /// [`advance`](MessageChannel::advance) after the last one.
    ///
    /// # Errors
    /// As [`progress`](MessageChannel::progress).
    pub fn handle(&mut self, completion: &Completion) -> Result<(), MessageError> {
        if let Err(error) = completion.check() {
            // The first failure is the cause; later ones are flushes.
            let first = *self.failure.get_or_insert(error);
            return Err(self.lost(first));
        }
        let id = completion.wr_id().0;
        match id & KIND {
            FRAME => {
                let frame = id & !KIND;
                let slot = self.slot(frame);
                self.filled[slot] = NOTHING;
                // Sends complete in the order of posting.
                self.completed = frame + 1;
            }
            RETURN => self.returns.1 += 1,
            _ => {
                // The id of a receive is its slot, 16 bits.
                let slot = (id & !KIND) as u16;
                Header::decode(self.frame(slot, completion.len())?)
                    .and_then(|header| self.window.returned(header.credits))
                    .map_err(|error| self.malformed(error))?;
                self.arrived.push_back((slot, completion.len()));
            }
        }
        Ok(())
    }

    /// Sends closed frames, the open frame if it is being flushed, and credits.
    ///
    /// # Errors
    /// An error of the device.
    pub fn advance(&mut self) -> Result<(), MessageError> {
        while self.window.may_send() {
            if self.posted == self.open {
                if !self.flushing || !self.has_open_messages() {
                    break;
                }
                self.open += 1;
                self.flushing = false;
            }
            self.post_frame()?;
        }
        if self.window.should_return() && self.returns.0 - self.returns.1 < u64::from(CREDIT_FRAMES) {
            self.post_return()?;
        }
        Ok(())
    }

    /// Takes the next message. It stays valid until the next call.
    ///
    /// # Errors
    /// [`MessageError::Malformed`] if the peer sent an invalid frame. [`MessageError::Lost`] if the connection failed, after
    /// all messages that had arrived were taken.
    pub fn receive(&mut self) -> Result<Option<&[u8]>, MessageError> {
        let (slot, len, range) = loop {
            if let Some(mut reading) = self.reading {
                let next = reading.cursor.next(self.frame(reading.slot, reading.len)?);
                match next {
                    Ok(Some(range)) => {
                        self.reading = Some(reading);
                        break (reading.slot, reading.len, range);
                    }
                    Ok(None) => {
                        self.reading = None;
                        self.give_back(reading.slot)?;
                    }
                    Err(error) => return Err(self.malformed(error)),
                }
            }
            let Some((slot, len)) = self.arrived.pop_front() else {
                self.check_alive()?;
                return Ok(None);
            };
            let header = Header::decode(self.frame(slot, len)?);
            let cursor = FrameReader::new(header.map_err(|error| self.malformed(error))?);
            self.reading = Some(Reading { slot, len, cursor });
        };
        Ok(Some(&self.frame(slot, len)?[range]))
    }

    /// Whether all flushed messages have arrived at the peer's device.
    pub fn is_idle(&self) -> bool {
        self.completed == self.open && !self.has_open_messages()
    }

    /// Closes the connection; the peer's message channel reports [`MessageError::Lost`].
    ///
    /// # Errors
    /// The error of the device.
    pub fn shut_down(&self) -> std::io::Result<()> {
        self.pair.shut_down()
    }

    fn slot(&self, frame: u64) -> usize {
        (frame % self.send_frames) as usize
    }

    /// Whether there is no free slot for the open frame.
    fn is_full(&self) -> bool {
        self.open - self.completed == self.send_frames
    }

    fn has_open_messages(&self) -> bool {
        !self.is_full() && self.filled[self.slot(self.open)].messages > 0
    }

    fn post_frame(&mut self) -> Result<(), MessageError> {
        let slot = self.slot(self.posted);
        let Filled { bytes, messages } = self.filled[slot];
        let credits = self.window.send();
        let header = Header { credits, messages, bytes: bytes - HEADER_LEN as u32 };
        let at = slot as u64 * self.slot_bytes;
        let id = WrId(FRAME | self.posted);
        self.posted += 1;
        self.post(at, header, bytes, id)
    }

    fn post_return(&mut self) -> Result<(), MessageError> {
        let slot = self.returns.0 % u64::from(CREDIT_FRAMES);
        let header = Header { credits: self.window.send(), messages: 0, bytes: 0 };
        let at = self.send_frames * self.slot_bytes + slot * HEADER_LEN as u64;
        self.returns.0 += 1;
        self.post(at, header, HEADER_LEN as u32, WrId(RETURN | slot))
    }

    fn post(&mut self, at: u64, header: Header, bytes: u32, id: WrId) -> Result<(), MessageError> {
        self.outgoing.copy_from_slice(at, &header.encode())?;
        let sge = self.outgoing.sge(at, bytes)?;
        Ok(self.pair.post_send(&[sge], Signal::Yes, id)?)
    }

    /// Posts the receive of a frame that was read.
    fn give_back(&mut self, slot: u16) -> Result<(), MessageError> {
        if self.failure.is_some() {
            return Ok(());
        }
        let to = self.incoming.sge(u64::from(slot) * self.slot_bytes, self.slot_bytes as u32)?;
        self.pair.post_recv(&[to], recv_id(slot))?;
        self.window.reposted();
        Ok(())
    }

    /// The bytes of a received frame.
    fn frame(&self, slot: u16, len: u32) -> Result<&[u8], OutOfBounds> {
        let start = u64::from(slot) * self.slot_bytes;
        // SAFETY: the region is this message channel's own, and peers have no access to it. The device writes to a slot only while
        // its receive is posted. This one has completed; `give_back` posts it again, but takes `self` exclusively, so after the
        // end of this borrow.
        unsafe { self.incoming.slice(start..start + u64::from(len)) }
    }

    fn check_alive(&self) -> Result<(), MessageError> {
        match self.failure {
            None => Ok(()),
            Some(error) => Err(self.lost(error)),
        }
    }

    #[cold]
    fn full(&self) -> MessageError {
        MessageError::Full { peer: self.peer().to_owned() }
    }

    #[cold]
    fn lost(&self, error: WorkError) -> MessageError {
        MessageError::Lost { peer: self.peer().to_owned(), error }
    }

    #[cold]
    fn malformed(&self, error: FrameError) -> MessageError {
        MessageError::Malformed { peer: self.peer().to_owned(), error }
    }
}

impl MessageError {
    /// Status of the failed work request, if the connection is lost.
    pub fn lost_with(&self) -> Option<Status> {
        match self {
            MessageError::Lost { error, .. } => Some(error.status),
            _ => None,
        }
    }
}

impl fmt::Debug for MessageChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageChannel")
            .field("peer", &self.peer())
            .field("window", &self.window)
            .field("frames", &(self.completed, self.posted, self.open))
            .field("arrived", &self.arrived.len())
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}
