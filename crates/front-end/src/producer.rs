//! The producer: a front-end process.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use millstream_lockfree::copy_in_order;
use millstream_shm::socket::{Connection, own_uid};
use millstream_shm::{EventFd, Mapping, Memfd, is_sealed};
use std::os::fd::AsFd;

use crate::layout::{
    self, ENTRY, FILLER, MAGIC, RECORD, RecordHeader, TABLE, VERSION, control, entry, records,
};

/// Interval of attempts to connect to a readout unit that does not wait yet.
const RETRY_PERIOD: Duration = Duration::from_millis(10);

/// The answer of a readout unit takes some time, also if none of the timeout is left.
const LEAST_ANSWER_TIMEOUT: Duration = Duration::from_millis(100);

/// Why a front end cannot be connected, or a fragment cannot be pushed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No readout unit waits for this name.
    #[error("no readout unit of this user waits for front ends of {0:?} (readout.ring.name)")]
    NotFound(String),
    /// The readout unit does not answer.
    #[error("the readout unit of {0:?} does not answer: it is stopped, or has 64 front ends, the most")]
    TimedOut(String),
    /// The readout unit speaks another version, or sent something else.
    #[error("the readout unit of {0:?} has another version")]
    Version(String),
    /// A system call failed.
    #[error("cannot {operation}: {cause}")]
    Os {
        /// The operation.
        operation: &'static str,
        /// The cause.
        cause: io::Error,
    },
}

/// Result of [`FrontEnd::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a refused fragment is not in the ring"]
pub enum Push {
    /// The fragment is in the ring.
    Accepted,
    /// The readout unit is busy; the fragment is not in the ring, and is counted as refused.
    Busy,
    /// The source or the length is not one of the readout unit's.
    Invalid,
}

/// A front end's end of a ring.
pub struct FrontEnd {
    memory: Mapping,
    wake: EventFd,
    connection: Connection,
    capacity: u64,
    max_len: u32,
    first_source: u32,
    records: usize,
    head: u64,
    /// When each source was refused first, since its last accepted fragment.
    refused_since: Vec<Option<Instant>>,
}

impl FrontEnd {
    /// Connects to the readout unit that waits for front ends of `name`. Waits up to `timeout` for it, and for its answer at
    /// least 100 ms.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(name: &str, timeout: Duration) -> Result<FrontEnd, ConnectError> {
        let address = layout::address(name, own_uid());
        let os = |operation| move |cause| ConnectError::Os { operation, cause };
        let deadline = Instant::now() + timeout;
        let connection = loop {
            match Connection::open(&address, Duration::from_secs(5)) {
                Err(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => {}
                opened => break opened.map_err(os("connect to the readout unit"))?,
            }
            if Instant::now() >= deadline {
                return Err(ConnectError::NotFound(name.to_owned()));
            }
            std::thread::sleep(RETRY_PERIOD);
        };
        let wrong = || ConnectError::Version(name.to_owned());
        let left = deadline.saturating_duration_since(Instant::now()).max(LEAST_ANSWER_TIMEOUT);
        connection.set_timeout(left).map_err(os("receive the ring"))?;
        let (_, descriptors) = connection.receive(&mut [0; 4]).map_err(|cause| match cause.kind() {
            io::ErrorKind::WouldBlock => ConnectError::TimedOut(name.to_owned()),
            _ => os("receive the ring")(cause),
        })?;
        let [memory, wake] = <[_; 2]>::try_from(descriptors).map_err(|_| wrong())?;
        if !is_sealed(memory.as_fd()) {
            return Err(wrong());
        }
        let memory = Memfd::from_peer(memory).and_then(|memory| memory.map()).map_err(os("map the ring"))?;
        let word = |at: usize| memory.word32(at).load(Ordering::Acquire);
        if memory.len() < TABLE || word(control::MAGIC) != MAGIC || word(control::VERSION) != VERSION {
            return Err(wrong());
        }
        let sources = word(control::SOURCES);
        let capacity = memory.word64(control::CAPACITY).load(Ordering::Relaxed);
        let records = records(sources);
        let max_len = word(control::MAX_LEN);
        let longest = RecordHeader { source: 0, len: max_len, event: 0, crc: 0 }.record_len();
        let fits = capacity.is_power_of_two() && longest <= capacity && capacity <= memory.len() as u64;
        if !fits || records as u64 + capacity > memory.len() as u64 {
            return Err(wrong());
        }
        Ok(FrontEnd {
            max_len,
            first_source: word(control::FIRST_SOURCE),
            refused_since: vec![None; sources as usize],
            wake: EventFd::from_fd(wake),
            capacity,
            records,
            head: 0,
            connection,
            memory,
        })
    }

    /// Number of sources, with consecutive ids from [`first_source`](Self::first_source).
    pub fn sources(&self) -> u32 {
        self.refused_since.len() as u32
    }

    /// Id of the first source.
    pub fn first_source(&self) -> u32 {
        self.first_source
    }

    /// Whether the readout unit asks to hold events back.
    pub fn is_busy(&self) -> bool {
        self.memory.word32(control::BUSY).load(Ordering::Acquire) != 0
    }

    /// Whether the readout unit has ended.
    pub fn has_ended(&self) -> bool {
        self.connection.is_hung_up()
    }

    /// Puts a fragment into the ring, unless the readout unit is busy. Events of a source ascend.
    pub fn push(&mut self, source: u32, event: u64, payload: &[u8]) -> Push {
        let Some(index) = source.checked_sub(self.first_source).filter(|index| *index < self.sources())
        else {
            return Push::Invalid;
        };
        let index = index as usize;
        let Some(len) = u32::try_from(payload.len()).ok().filter(|len| *len <= self.max_len) else {
            return Push::Invalid;
        };
        let record = RecordHeader { source, len, event, crc: 0 };
        let Some(start) = self.reserve(record.record_len()) else {
            self.refused_since[index].get_or_insert_with(Instant::now);
            self.counter(index, entry::REFUSED).fetch_add(1, Ordering::Relaxed);
            return Push::Busy;
        };
        self.put(start + RECORD as u64, payload);
        let record = RecordHeader { crc: crc32fast::hash(payload), ..record };
        self.put(start, &record.encode());
        self.counter(index, entry::PUSHED).fetch_add(1, Ordering::Relaxed);
        if let Some(since) = self.refused_since[index].take() {
            let dead = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.counter(index, entry::DEAD_NS).fetch_add(dead, Ordering::Relaxed);
        }
        self.publish(start + record.record_len());
        Push::Accepted
    }

    /// Puts a fragment into the ring as [`push`](Self::push) does; waits while the readout unit is busy. The wait counts as
    /// dead time. Returns [`Push::Busy`] if it has ended.
    pub fn push_waiting(&mut self, source: u32, event: u64, payload: &[u8]) -> Push {
        loop {
            match self.push(source, event, payload) {
                Push::Busy if !self.has_ended() => std::thread::sleep(Duration::from_micros(50)),
                pushed => return pushed,
            }
        }
    }

    /// Finds room for a record that does not wrap. Returns its start.
    fn reserve(&mut self, len: u64) -> Option<u64> {
        if self.is_busy() {
            return None;
        }
        let tail = self.memory.word64(control::TAIL).load(Ordering::Acquire);
        let rest = self.capacity - self.head % self.capacity;
        let start = if rest < len { self.head + rest } else { self.head };
        if (start + len).wrapping_sub(tail) > self.capacity {
            return None;
        }
        if start != self.head {
            // At most the capacity, which fits for any ring that exists.
            let filler =
                RecordHeader { source: FILLER, len: (rest - RECORD as u64) as u32, event: 0, crc: 0 };
            self.put(self.head, &filler.encode());
        }
        Some(start)
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let offset = self.records + (at % self.capacity) as usize;
        // SAFETY: a record does not wrap, and `connect` checked that the ring is inside the mapping and holds the longest record.
        // The consumer reads it after `publish`.
        unsafe { copy_in_order(self.memory.base().add(offset), bytes.as_ptr(), bytes.len()) };
    }

    fn publish(&mut self, head: u64) {
        self.head = head;
        self.memory.word64(control::HEAD).store(head, Ordering::Release);
        // The consumer sets `waiting` first and reads `head` afterwards; here it is the reverse. One sees the other.
        fence(Ordering::SeqCst);
        let waiting = self.memory.word32(control::WAITING);
        if waiting.load(Ordering::Relaxed) != 0 && waiting.swap(0, Ordering::AcqRel) != 0 {
            self.wake.signal();
        }
    }

    fn counter(&self, index: usize, field: usize) -> &AtomicU64 {
        self.memory.word64(TABLE + index * ENTRY + field)
    }
}
