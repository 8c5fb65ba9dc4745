//! Messages between a builder unit and its workers. All numbers are little-endian.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// First bytes of a [`Hello`].
pub const MAGIC: [u8; 4] = *b"MSTW";
/// Version of the messages.
pub const VERSION: u32 = 1;
/// Most events of a job.
pub const MAX_EVENTS: u32 = 4096;
/// Most packet areas of a slot.
pub const MAX_AREAS: usize = 4096;
/// Longest message.
pub const MAX_MESSAGE: usize = HELLO_BYTES + MAX_AREAS * AREA_BYTES;

const HELLO_BYTES: usize = 32;
const AREA_BYTES: usize = 24;
const JOB_BYTES: usize = 24;
const REPLY_BYTES: usize = 8;

/// The packet area of one source, at the same offset in every slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Id of the source.
    pub source: u32,
    /// Kind of its payload.
    pub kind: u32,
    /// Offset in the slot.
    pub offset: u64,
    /// Its size.
    pub capacity: u32,
    /// Length of the longest header.
    pub header_len: u32,
}

/// The first message to a worker; it carries the descriptor of landing memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Index of the worker.
    pub worker: u32,
    /// Size of a slot.
    pub slot_bytes: u64,
    /// Size of landing memory.
    pub memory_bytes: u64,
    /// The packet areas of a slot.
    pub areas: Vec<Area>,
}

/// Events to decide on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its number, returned in the reply.
    pub id: u64,
    /// First event of the batch.
    pub first_event: u64,
    /// Number of events of the batch.
    pub events: u32,
    /// Slot of the batch.
    pub slot: u32,
    /// The events to decide on.
    pub candidates: EventSet,
}

/// Decisions of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Number of the job.
    pub id: u64,
    /// The accepted events, among the candidates.
    pub accepted: EventSet,
}

/// A set of events of a batch, one bit each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventSet(Vec<u8>);

/// A message that does not decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub struct Malformed(pub &'static str);

impl EventSet {
    /// An empty set for batches of `events` events.
    pub fn of(events: u32) -> EventSet {
        EventSet(vec![0; events.div_ceil(8) as usize])
    }

    /// Adds an event, counted from the first of the batch. Events beyond the batch are ignored.
    pub fn insert(&mut self, event: u32) {
        if let Some(byte) = self.0.get_mut(event as usize / 8) {
            *byte |= 1 << (event % 8);
        }
    }

    /// Whether the event is in the set.
    pub fn contains(&self, event: u32) -> bool {
        self.0.get(event as usize / 8).is_some_and(|byte| byte >> (event % 8) & 1 == 1)
    }

    /// Whether the set has the size for batches of `events` events.
    pub fn fits(&self, events: u32) -> bool {
        self.0.len() == events.div_ceil(8) as usize
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl Hello {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.worker.to_le_bytes());
        // Bounded by MAX_AREAS.
        bytes.extend((self.areas.len() as u32).to_le_bytes());
        bytes.extend(self.slot_bytes.to_le_bytes());
        bytes.extend(self.memory_bytes.to_le_bytes());
        for area in &self.areas {
            for value in [area.source, area.kind] {
                bytes.extend(value.to_le_bytes());
            }
            bytes.extend(area.offset.to_le_bytes());
            for value in [area.capacity, area.header_len] {
                bytes.extend(value.to_le_bytes());
            }
        }
        bytes
    }

    /// Decodes and checks the message: all areas are inside a slot.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Hello, Malformed> {
        Hello::parse(bytes).ok_or(Malformed("hello"))
    }

    fn parse(bytes: &[u8]) -> Option<Hello> {
        if bytes.get(..4)? != MAGIC || word(bytes, 4)? != VERSION {
            return None;
        }
        let count = word(bytes, 12)? as usize;
        let (slot_bytes, memory_bytes) = (long(bytes, 16)?, long(bytes, 24)?);
        let areas = bytes.get(HELLO_BYTES..)?;
        if slot_bytes == 0 || count > MAX_AREAS || areas.len() != count * AREA_BYTES {
            return None;
        }
        let area = |bytes: &[u8]| {
            let area = Area {
                source: word(bytes, 0)?,
                kind: word(bytes, 4)?,
                offset: long(bytes, 8)?,
                capacity: word(bytes, 16)?,
                header_len: word(bytes, 20)?,
            };
            let end = area.offset.checked_add(area.capacity.into())?;
            (end <= slot_bytes && area.header_len <= area.capacity).then_some(area)
        };
        let areas = areas.chunks_exact(AREA_BYTES).map(area).collect::<Option<Vec<_>>>()?;
        Some(Hello { worker: word(bytes, 8)?, slot_bytes, memory_bytes, areas })
    }
}

impl Job {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.id.to_le_bytes().to_vec();
        bytes.extend(self.first_event.to_le_bytes());
        bytes.extend(self.events.to_le_bytes());
        bytes.extend(self.slot.to_le_bytes());
        bytes.extend(&self.candidates.0);
        bytes
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Job, Malformed> {
        let parse = || {
            let events = word(bytes, 16).filter(|events| (1..=MAX_EVENTS).contains(events))?;
            let candidates = EventSet(bytes.get(JOB_BYTES..)?.to_vec());
            let first_event = long(bytes, 8)?;
            first_event.checked_add(events.into())?;
            let job = Job { id: long(bytes, 0)?, first_event, events, slot: word(bytes, 20)?, candidates };
            job.candidates.fits(events).then_some(job)
        };
        parse().ok_or(Malformed("job"))
    }
}

impl Reply {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.id.to_le_bytes().to_vec();
        bytes.extend(&self.accepted.0);
        bytes
    }

    /// Decodes the message. The receiver checks the size of the set against its job.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Reply, Malformed> {
        let parse =
            || Some(Reply { id: long(bytes, 0)?, accepted: EventSet(bytes.get(REPLY_BYTES..)?.to_vec()) });
        parse().ok_or(Malformed("reply"))
    }
}

/// Sends a message, with a descriptor if there is one.
///
/// # Errors
/// Those of `sendmsg`; [`WouldBlock`](io::ErrorKind::WouldBlock) if a non-blocking socket is full.
pub fn send(socket: impl AsFd, message: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.into_iter().collect::<Vec<_>>();
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives a message into `buffer`. Returns its length, zero at the end of the socket, and its descriptor.
///
/// # Errors
/// Those of `recvmsg`; [`InvalidData`](io::ErrorKind::InvalidData) for a message that is longer than the buffer.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok((received.bytes, descriptor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        let area = Area { source: 7, kind: 2, offset: 128, capacity: 100, header_len: 64 };
        Hello {
            worker: 3,
            slot_bytes: 4096,
            memory_bytes: 8192,
            areas: vec![area, Area { offset: 0, ..area }],
        }
    }

    #[test]
    fn messages_come_back() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        let mut candidates = EventSet::of(9);
        candidates.insert(8);
        candidates.insert(16);
        assert_eq!(
            (candidates.contains(8), candidates.contains(7), candidates.contains(16)),
            (true, false, false)
        );
        let job = Job { id: 5, first_event: 100, events: 9, slot: 2, candidates: candidates.clone() };
        assert_eq!(Job::decode(&job.encode()), Ok(job));
        let reply = Reply { id: 5, accepted: candidates };
        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }

    #[test]
    fn an_area_outside_of_the_slot_is_refused() {
        let mut outside = hello();
        outside.areas[0].offset = 4000;
        assert_eq!(Hello::decode(&outside.encode()), Err(Malformed("hello")));
        outside.areas[0].offset = u64::MAX;
        assert_eq!(Hello::decode(&outside.encode()), Err(Malformed("hello")));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes: Vec<u8>, cut in 0usize..100) {
            let _ = (Hello::decode(&bytes), Job::decode(&bytes), Reply::decode(&bytes));
            let valid = hello().encode();
            let cut = cut.min(valid.len());
            prop_assert_eq!(Hello::decode(&valid[..cut]).is_ok(), cut == valid.len());
        }
    }
}
