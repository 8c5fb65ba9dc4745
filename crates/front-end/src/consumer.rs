//! The consumer: a readout unit.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use millstream_lockfree::copy_in_order;
use millstream_shm::socket::{Connection, Listener, own_uid};
use millstream_shm::{EventFd, Mapping, Memfd};

use crate::layout::{
    self, ENTRY, FILLER, MAGIC, RECORD, RecordHeader, TABLE, VERSION, control, entry, records,
};

/// Sources and size of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Id of the first source.
    pub first_source: u32,
    /// Number of sources, with consecutive ids.
    pub sources: u32,
    /// Longest payload.
    pub max_len: u32,
    /// Bytes of the ring, rounded up to a power of two.
    pub capacity: u64,
    /// The front end is told to be busy above this fraction of the capacity.
    pub high: f64,
    /// And to go on below this one.
    pub low: f64,
}

/// Waits for front ends.
pub struct RingListener {
    listener: Listener,
    options: RingOptions,
}

/// A readout unit's end of a ring.
pub struct RingConsumer {
    memory: Mapping,
    wake: EventFd,
    connection: Connection,
    options: RingOptions,
    capacity: u64,
    records: usize,
    tail: u64,
    busy: bool,
    payload: Vec<u8>,
    /// The record that was peeked.
    peeked: Option<RecordHeader>,
}

/// A record of a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Source, event and checksum.
    pub header: RecordHeader,
    /// A private copy of the payload.
    pub payload: &'a [u8],
}

/// A record that is invalid: the front end violates the protocol, and its connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid record of source {source_id:#x} with {len} bytes")]
pub struct InvalidRecord {
    /// The source in the record.
    pub source_id: u32,
    /// The length in the record.
    pub len: u32,
}

impl RingListener {
    /// Waits for front ends of `name`.
    ///
    /// # Errors
    /// Those of `bind`; AddrInUse if another readout unit of this user waits for them.
    pub fn bind(name: &str, options: RingOptions) -> io::Result<RingListener> {
        let listener = Listener::bind(&layout::address(name, own_uid()))?;
        listener.set_nonblocking();
        Ok(RingListener { listener, options })
    }

    /// The next front end that has connected; `None` if there is none.
    ///
    /// # Errors
    /// Memory or descriptors cannot be allocated.
    pub fn accept(&self) -> io::Result<Option<RingConsumer>> {
        match self.listener.accept() {
            Ok(connection) => RingConsumer::new(connection, self.options).map(Some),
            // A stranger, or a front end that has gone.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for RingListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl RingConsumer {
    fn new(connection: Connection, options: RingOptions) -> io::Result<RingConsumer> {
        let longest = RecordHeader { source: 0, len: options.max_len, event: 0, crc: 0 }.record_len();
        let capacity = options.capacity.max(4 * longest).next_power_of_two();
        let records = records(options.sources);
        let memfd = Memfd::sealed("millstream-front-end", records + capacity as usize)?;
        let memory = memfd.map()?;
        memory.prefault(0, memory.len())?;
        let set = |at: usize, value: u32| memory.word32(at).store(value, Ordering::Relaxed);
        set(control::VERSION, VERSION);
        set(control::MAX_LEN, options.max_len);
        set(control::FIRST_SOURCE, options.first_source);
        set(control::SOURCES, options.sources);
        set(control::WAITING, 1);
        memory.word64(control::CAPACITY).store(capacity, Ordering::Relaxed);
        memory.word32(control::MAGIC).store(MAGIC, Ordering::Release);
        let wake = EventFd::latch()?;
        connection.set_timeout(Duration::from_secs(1))?;
        connection.send(b"ring", &[memfd.into_fd().as_fd(), wake.as_fd()])?;
        Ok(RingConsumer {
            memory,
            wake,
            connection,
            options,
            capacity,
            records,
            tail: 0,
            busy: false,
            payload: Vec::new(),
            peeked: None,
        })
    }

    /// Readable when the front end has pushed after [`sleep`](Self::sleep).
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Whether the front end has ended. Its records may still be unread.
    pub fn has_ended(&self) -> bool {
        self.connection.is_hung_up()
    }

    /// The header of the next record, which stays in the ring.
    ///
    /// # Errors
    /// [`InvalidRecord`].
    pub fn peek(&mut self) -> Result<Option<RecordHeader>, InvalidRecord> {
        if self.peeked.is_some() {
            return Ok(self.peeked);
        }
        loop {
            // The producer can write any value; a record is checked against what the ring can hold.
            let head = self.memory.word64(control::HEAD).load(Ordering::Acquire);
            let there = head.wrapping_sub(self.tail);
            if there == 0 {
                return Ok(None);
            }
            let mut bytes = [0; RECORD];
            self.get(self.tail, &mut bytes);
            let header = RecordHeader::decode(&bytes);
            let invalid = Err(InvalidRecord { source_id: header.source, len: header.len });
            let rest = self.capacity - self.tail % self.capacity;
            if there > self.capacity || header.record_len() > there.min(rest) {
                return invalid;
            }
            if header.source == FILLER {
                self.tail += header.record_len();
                continue;
            }
            let source = header.source.wrapping_sub(self.options.first_source);
            if header.len > self.options.max_len || source >= self.options.sources {
                return invalid;
            }
            self.peeked = Some(header);
            return Ok(self.peeked);
        }
    }

    /// Takes the record that [`peek`](Self::peek) found.
    pub fn take(&mut self) -> Option<Record<'_>> {
        let header = self.peeked.take()?;
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(header.len as usize, 0);
        self.get(self.tail + RECORD as u64, &mut payload);
        self.payload = payload;
        self.tail += header.record_len();
        Some(Record { header, payload: &self.payload })
    }

    /// Frees the room of the records that were taken, and sets or clears the busy signal.
    pub fn release(&mut self) {
        self.memory.word64(control::TAIL).store(self.tail, Ordering::Release);
        let used = self.memory.word64(control::HEAD).load(Ordering::Acquire).wrapping_sub(self.tail);
        let fraction = used as f64 / self.capacity as f64;
        let busy = if self.busy { fraction > self.options.low } else { fraction > self.options.high };
        if busy != self.busy {
            self.busy = busy;
            self.memory.word32(control::BUSY).store(busy.into(), Ordering::Release);
        }
    }

    /// Arms the wake-up. True if the ring is empty: then the front end signals its next record.
    pub fn sleep(&mut self) -> bool {
        let _ = self.wake.try_take();
        self.memory.word32(control::WAITING).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.memory.word64(control::HEAD).load(Ordering::Acquire) == self.tail
    }

    /// Fragments refused, and dead time, of the source at this position, as the front end counts them.
    pub fn refused(&self, position: usize) -> (u64, Duration) {
        let word = |field| self.memory.word64(TABLE + position * ENTRY + field).load(Ordering::Relaxed);
        (word(entry::REFUSED), Duration::from_nanos(word(entry::DEAD_NS)))
    }

    fn get(&self, at: u64, bytes: &mut [u8]) {
        let offset = self.records + (at % self.capacity) as usize;
        // SAFETY: the range is in the ring: records do not wrap, which `peek` checked. The producer may change the bytes,
        // which only changes the fragment.
        unsafe { copy_in_order(bytes.as_mut_ptr(), self.memory.base().add(offset), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrontEnd, Push};

    fn pair(name: &str) -> (FrontEnd, RingConsumer) {
        let name = format!("test-{name}-{}", std::process::id());
        let options =
            RingOptions { first_source: 10, sources: 2, max_len: 100, capacity: 1024, high: 0.75, low: 0.5 };
        let listener = RingListener::bind(&name, options).unwrap();
        let other = std::thread::spawn(move || FrontEnd::connect(&name, Duration::from_secs(5)).unwrap());
        let consumer = loop {
            if let Some(consumer) = listener.accept().unwrap() {
                break consumer;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        (other.join().unwrap(), consumer)
    }

    fn pop(consumer: &mut RingConsumer) -> Option<(u32, u64, Vec<u8>)> {
        consumer.peek().unwrap()?;
        let record = consumer.take().unwrap();
        assert_eq!(record.header.crc, crc32fast::hash(record.payload));
        Some((record.header.source, record.header.event, record.payload.to_vec()))
    }

    #[test]
    fn records_come_in_order_around_the_ring() {
        let (mut front, mut consumer) = pair("order");
        for event in 0..500u64 {
            let payload = vec![event as u8; (event % 101) as usize];
            assert_eq!(front.push(11, event, &payload), Push::Accepted);
            assert_eq!(pop(&mut consumer), Some((11, event, payload)));
            assert_eq!(pop(&mut consumer), None);
            consumer.release();
        }
        assert_eq!(front.push(12, 0, &[]), Push::Invalid);
        assert_eq!(front.push(9, 0, &[]), Push::Invalid);
        assert_eq!(front.push(10, 0, &[0; 101]), Push::Invalid);
    }

    #[test]
    fn busy_is_set_high_and_cleared_low_and_dead_time_is_counted() {
        let (mut front, mut consumer) = pair("busy");
        let mut pushed = 0;
        while front.push(10, pushed, &[7; 32]) == Push::Accepted {
            pushed += 1;
        }
        // A full ring refuses also before the consumer has set the signal.
        assert_eq!(pushed, 16);
        consumer.release();
        assert!(front.is_busy());
        // Down to 10 of 16: between the marks.
        for _ in 0..6 {
            pop(&mut consumer).unwrap();
        }
        consumer.release();
        assert_eq!((front.is_busy(), front.push(10, 99, &[])), (true, Push::Busy));
        while pop(&mut consumer).is_some() {}
        consumer.release();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!((front.is_busy(), front.push(10, 99, &[])), (false, Push::Accepted));
        let (refused, dead) = consumer.refused(0);
        assert!(refused == 2 && dead >= Duration::from_millis(5), "{refused} {dead:?}");
        assert_eq!(consumer.refused(1), (0, Duration::ZERO));
    }

    #[test]
    fn a_sleeping_consumer_is_woken_once() {
        let (mut front, mut consumer) = pair("wake");
        assert!(consumer.sleep());
        assert_eq!(front.push(10, 1, &[1]), Push::Accepted);
        assert_eq!(front.push(10, 2, &[1]), Push::Accepted);
        assert!(consumer.wake.try_take() && !consumer.wake.try_take());
        assert!(!consumer.sleep());
    }

    #[test]
    fn records_that_do_not_fit_are_refused() {
        let (front, mut consumer) = pair("hostile");
        let memory = &consumer.memory;
        let records = consumer.records;
        let poke = |header: RecordHeader, head: u64| {
            // SAFETY: the start of the ring.
            unsafe { copy_in_order(memory.base().add(records), header.encode().as_ptr(), RECORD) };
            memory.word64(control::HEAD).store(head, Ordering::Release);
        };
        let good = RecordHeader { source: 10, len: 20, event: 1, crc: 0 };
        poke(RecordHeader { len: 2000, ..good }, 64);
        assert!(consumer.peek().is_err());
        let memory = &consumer.memory;
        memory.word64(control::HEAD).store(u64::MAX, Ordering::Release);
        assert!(consumer.peek().is_err());
        consumer.memory.word64(control::HEAD).store(32, Ordering::Release);
        assert!(consumer.peek().is_err());
        drop(front);
        assert!(consumer.has_ended());
    }
}
