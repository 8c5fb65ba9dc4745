//! The memory between an application and its node process: rings of commands, completions and events; counters.
//!
//! ```text
//!   0     64        128       192         256         320      384      448    512       576       640    704   768
//!   magic commands  commands  completions completions events   events   lost   node      app       signal card  completions
//!         taken     posted    taken       posted      taken    posted   events waits     waits            gone  awaited
//!   4096: commands (8 words) │ completions (4) │ events (5) │ counters │ lost nodes │ staging
//! ```
//! Each word has one writer, except `waits` flags. Both sides take the other's words as input.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millstream_fabric::{COUNTERS, EVENT_LIMIT, Event, Notification, RegionId};
use millstream_lockfree::word_ring::{AwaitedEntries, SleepFlag, WordRing};
use millstream_rdma::{Access, Device};
use millstream_shm::{Mapping, futex};
use millstream_torus_core::NodeNumber;

use crate::engine::{AtomicOperation, Failure, Operation, Request, Span};
use crate::memory::Memory;

/// Commands on their way, and operations without a taken completion.
pub const MAX_COMMANDS: u64 = 1024;
/// Memory for the data of puts and gets (bytes).
pub const STAGING: u64 = 4 << 20;
/// Counters, with two of the exchange behind those of the application.
pub const ALL_COUNTERS: u16 = COUNTERS + 2;

const MAGIC: u64 = u64::from_le_bytes(*b"torusct2");
const COMMANDS: Ring = Ring { taken: 64, posted: 128, at: 4096, words: 8, entries: MAX_COMMANDS };
const COMPLETIONS: Ring =
    Ring { taken: 192, posted: 256, at: COMMANDS.end(), words: 4, entries: MAX_COMMANDS };
const EVENTS: Ring =
    Ring { taken: 320, posted: 384, at: COMPLETIONS.end(), words: 5, entries: EVENT_LIMIT as u64 };
const LOST_EVENTS: usize = 448;
const NODE_WAITS: usize = 512;
const APPLICATION_WAITS: usize = 576;
const SIGNAL: usize = 640;
const CARD_GONE: usize = 704;
const AWAITED: usize = 768;
const FIRST_COUNTER: usize = EVENTS.end();
const LOST_NODES: usize = FIRST_COUNTER + 8 * ALL_COUNTERS as usize;
const STAGING_AT: usize = (LOST_NODES + (1 << 16) / 8).next_multiple_of(4096);
const SIZE: usize = STAGING_AT + STAGING as usize;

/// Where a [`WordRing`] is.
#[derive(Clone, Copy, Debug)]
struct Ring {
    taken: usize,
    posted: usize,
    at: usize,
    words: usize,
    entries: u64,
}

impl Ring {
    const fn end(self) -> usize {
        self.at + 8 * self.words * self.entries as usize
    }
}

/// The peer broke the rules of the control memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's control memory has {field} = {value}, which is impossible")]
pub struct ControlError {
    /// The word.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
}

/// What the application wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The operation.
    pub kind: CommandKind,
    /// The target.
    pub target: NodeNumber,
    /// The application's number.
    pub cookie: u32,
    /// The target's region.
    pub region: RegionId,
    /// Start in it (bytes).
    pub offset: u64,
}

/// Kinds of commands, with local memory or operands. A local region of number 0 is the staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// Writes.
    Put {
        /// Local region.
        local: RegionId,
        /// Start in it (bytes).
        at: u64,
        /// Length (bytes).
        length: u32,
        /// What the target's application learns.
        notification: Notification,
    },
    /// Reads.
    Get {
        /// Local region.
        local: RegionId,
        /// Start in it (bytes).
        at: u64,
        /// Length (bytes).
        length: u32,
    },
    /// Adds.
    FetchAdd(u64),
    /// Replaces the first value by the second.
    CompareSwap(u64, u64),
}

impl Command {
    /// The engine's operation; `span` finds or refuses local memory: region, start, length.
    pub(crate) fn operation(
        &self,
        span: impl FnOnce(RegionId, u64, u32) -> Result<Span, Failure>,
    ) -> Result<Operation, Failure> {
        let (region, offset) = (self.region, self.offset);
        let request = match self.kind {
            CommandKind::Put { local, at, length, notification } => {
                Request::Put { region, offset, source: span(local, at, length)?, length, notification }
            }
            CommandKind::Get { local, at, length } => {
                Request::Get { region, offset, into: span(local, at, length)?, length }
            }
            CommandKind::FetchAdd(add) => {
                Request::Atomic { region, offset, change: AtomicOperation::FetchAdd(add) }
            }
            CommandKind::CompareSwap(expected, new) => {
                Request::Atomic { region, offset, change: AtomicOperation::CompareSwap(expected, new) }
            }
        };
        Ok(Operation { target: self.target, request, cookie: self.cookie })
    }

    pub(crate) fn encode(&self) -> [u64; 8] {
        let (kind, notification, length, a, b) = match self.kind {
            CommandKind::Put { local, at, length, notification } => (1, notification, length, local.0, at),
            CommandKind::Get { local, at, length } => (2, Notification::None, length, local.0, at),
            CommandKind::FetchAdd(add) => (3, Notification::None, 0, add, 0),
            CommandKind::CompareSwap(expected, new) => (4, Notification::None, 0, expected, new),
        };
        let (code, value) = match notification {
            Notification::None => (0, 0),
            Notification::Counter { index, add } => (1, u32::from(index) << 16 | u32::from(add)),
            Notification::Event { tag } => (2, tag),
        };
        let first = kind | code << 8 | u64::from(self.target.0) << 16 | u64::from(self.cookie) << 32;
        [first, self.region.0, self.offset, length.into(), a, b, value.into(), 0]
    }

    pub(crate) fn decode(words: [u64; 8]) -> Result<Command, ControlError> {
        let [first, region, offset, length, a, b, value, _] = words;
        let wrong = |field, value| ControlError { field, value };
        let length = u32::try_from(length).map_err(|_| wrong("command length", length))?;
        let notification = match (first >> 8) as u8 {
            0 => Notification::None,
            1 => Notification::Counter { index: (value >> 16) as u16, add: value as u16 },
            2 => Notification::Event { tag: value as u32 },
            code => return Err(wrong("command notification", code.into())),
        };
        let kind = match first as u8 {
            1 => CommandKind::Put { local: RegionId(a), at: b, length, notification },
            2 => CommandKind::Get { local: RegionId(a), at: b, length },
            3 => CommandKind::FetchAdd(a),
            4 => CommandKind::CompareSwap(a, b),
            kind => return Err(wrong("command kind", kind.into())),
        };
        Ok(Command {
            kind,
            target: NodeNumber((first >> 16) as u16),
            cookie: (first >> 32) as u32,
            region: RegionId(region),
            offset,
        })
    }
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The application's number.
    pub cookie: u32,
    /// Previous value of an atomic operation.
    pub value: u64,
    /// Why it failed.
    pub failure: Option<Failure>,
}

impl Completion {
    pub(crate) fn encode(self) -> [u64; 4] {
        let (code, size) = self.failure.map_or((0, 0), Failure::encode);
        [u64::from(self.cookie) << 32 | u64::from(code), self.value, size, 0]
    }

    pub(crate) fn decode([first, value, size, _]: [u64; 4]) -> Completion {
        let failure = (first as u8 != 0).then(|| Failure::decode(first as u8, size));
        Completion { cookie: (first >> 32) as u32, value, failure }
    }
}

/// The control memory, as both sides see it.
#[derive(Clone, Debug)]
pub struct Control {
    memory: Arc<Memory>,
}

impl Control {
    /// Creates the memory, with a descriptor for the application.
    ///
    /// # Errors
    /// The system or the device refuses.
    pub fn create(device: Option<&Device>) -> io::Result<(Control, OwnedFd)> {
        let device = device.map(|device| (device, Access::LOCAL_WRITE));
        let (memory, descriptor) = Memory::allocate("millstream-torus-control", SIZE, device)?;
        let control = Control { memory: Arc::new(memory) };
        control.word(0).store(MAGIC, Ordering::Release);
        Ok((control, descriptor))
    }

    /// Maps the memory of a node process.
    ///
    /// # Errors
    /// It is not control memory of this version, or cannot be mapped.
    pub fn open(descriptor: OwnedFd) -> io::Result<Control> {
        let control = Control { memory: Arc::new(Memory::from_peer(descriptor, None)?) };
        if control.memory.size() < SIZE as u64 || control.word(0).load(Ordering::Acquire) != MAGIC {
            let cause = "the node process has another version: its control memory is not understood";
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        Ok(control)
    }

    /// The memory, for the data of puts and gets.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Offset in the memory of a place in the staging part, if the range is inside.
    #[must_use]
    pub fn staging(at: u64, length: u32) -> Option<u64> {
        (at <= STAGING && u64::from(length) <= STAGING - at).then(|| STAGING_AT as u64 + at)
    }

    fn mapping(&self) -> &Mapping {
        self.memory.mapping()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.mapping().word64(at)
    }

    fn ring(&self, ring: Ring) -> WordRing<'_> {
        WordRing {
            taken: self.word(ring.taken),
            posted: self.word(ring.posted),
            words: self.mapping().words64(ring.at, ring.words * ring.entries as usize),
            entry_words: ring.words,
        }
    }

    /// Writes an entry if there is a place. Only the ring's writer calls it.
    fn push(&self, ring: Ring, words: &[u64]) -> Result<bool, ControlError> {
        self.ring(ring).push(words).map_err(|value| ControlError { field: "ring", value })
    }

    /// Takes an entry. Only the ring's reader calls it.
    fn pop<const N: usize>(&self, ring: Ring) -> Result<Option<[u64; N]>, ControlError> {
        self.ring(ring).pop().map_err(|value| ControlError { field: "ring", value })
    }

    /// Application: posts a command. The caller has fewer than [`MAX_COMMANDS`] operations under way. Returns whether the
    /// node process waits for its event descriptor.
    ///
    /// # Errors
    /// [`ControlError`]: the node process is faulty.
    pub fn post(&self, command: &Command) -> Result<bool, ControlError> {
        if !self.push(COMMANDS, &command.encode())? {
            return Err(ControlError { field: "commands", value: MAX_COMMANDS });
        }
        Ok(SleepFlag(self.word(NODE_WAITS)).claim())
    }

    /// Node: the next command.
    ///
    /// # Errors
    /// [`ControlError`]: the application is faulty.
    pub fn take_command(&self) -> Result<Option<Command>, ControlError> {
        self.pop::<8>(COMMANDS)?.map(Command::decode).transpose()
    }

    /// Node: whether it is about to wait for the event descriptor.
    pub fn set_node_waits(&self, waits: bool) {
        SleepFlag(self.word(NODE_WAITS)).set(waits);
    }

    /// Node: reports the end of an operation.
    ///
    /// # Errors
    /// [`ControlError`]: the application began more operations than it may.
    pub fn complete(&self, completion: Completion) -> Result<(), ControlError> {
        if self.push(COMPLETIONS, &completion.encode())? {
            return Ok(());
        }
        Err(ControlError { field: "completions", value: MAX_COMMANDS })
    }

    /// Application: the next completion.
    ///
    /// # Errors
    /// [`ControlError`]: the node process is faulty.
    pub fn take_completion(&self) -> Result<Option<Completion>, ControlError> {
        Ok(self.pop::<4>(COMPLETIONS)?.map(Completion::decode))
    }

    /// Node: adds an event, or counts it as lost.
    ///
    /// # Errors
    /// [`ControlError`]: the application is faulty.
    pub fn notify(&self, event: &Event) -> Result<(), ControlError> {
        let first = u64::from(event.source.0) | u64::from(event.tag) << 32;
        if !self.push(EVENTS, &[first, event.region.0, event.offset, event.length, 0])? {
            self.word(LOST_EVENTS).fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Application: the next event.
    ///
    /// # Errors
    /// [`ControlError`]: the node process is faulty.
    pub fn take_event(&self) -> Result<Option<Event>, ControlError> {
        let Some([first, region, offset, length, _]) = self.pop::<5>(EVENTS)? else { return Ok(None) };
        let (source, tag) = (NodeNumber(first as u16), (first >> 32) as u32);
        Ok(Some(Event { source, tag, region: RegionId(region), offset, length }))
    }

    /// Events that found the ring full.
    #[must_use]
    pub fn lost_events(&self) -> u64 {
        self.word(LOST_EVENTS).load(Ordering::Relaxed)
    }

    /// Node: raises a counter; one that does not exist is ignored.
    pub fn raise(&self, index: u16, add: u16) {
        if index < ALL_COUNTERS {
            self.word(FIRST_COUNTER + 8 * usize::from(index)).fetch_add(add.into(), Ordering::Release);
        }
    }

    /// A counter; 0 if it does not exist.
    #[must_use]
    pub fn counter(&self, index: u16) -> u64 {
        if index >= ALL_COUNTERS {
            return 0;
        }
        self.word(FIRST_COUNTER + 8 * usize::from(index)).load(Ordering::Acquire)
    }

    /// Node: a node or its application is lost, or back.
    pub fn set_lost(&self, node: NodeNumber, lost: bool) {
        let word = self.word(LOST_NODES + 8 * (node.index() / 64));
        let bit = 1 << (node.index() % 64);
        if lost {
            word.fetch_or(bit, Ordering::Release)
        } else {
            word.fetch_and(!bit, Ordering::Release)
        };
    }

    /// Whether a node or its application is lost.
    #[must_use]
    pub fn is_lost(&self, node: NodeNumber) -> bool {
        self.word(LOST_NODES + 8 * (node.index() / 64)).load(Ordering::Acquire) >> (node.index() % 64) & 1
            == 1
    }

    /// Node: the lease of its card has ended.
    pub fn set_card_gone(&self) {
        self.word(CARD_GONE).store(1, Ordering::Release);
    }

    /// Application: whether the lease of the node's card has ended.
    #[must_use]
    pub fn card_is_gone(&self) -> bool {
        self.word(CARD_GONE).load(Ordering::Acquire) != 0
    }

    /// Node: wakes the application if it waits.
    pub fn signal(&self) {
        let word = self.mapping().word32(SIGNAL);
        word.fetch_add(1, Ordering::SeqCst);
        if self.word(APPLICATION_WAITS).load(Ordering::SeqCst) != 0 {
            futex::wake_all(word);
        }
    }

    /// Node: wakes the application if it waits, and has as many completions as it waits for.
    pub fn signal_completions(&self) {
        if AwaitedEntries(self.word(AWAITED)).are_there(&self.ring(COMPLETIONS)) {
            self.signal();
        }
    }

    /// Application: fewer completions than this, not yet taken, need not wake it. Whether there are as many.
    pub fn await_completions(&self, count: u64) -> bool {
        AwaitedEntries(self.word(AWAITED)).set(&self.ring(COMPLETIONS), count)
    }

    /// Application: the count of signals, for [`Control::wait`]. Read it before looking at anything else.
    #[must_use]
    pub fn signals(&self) -> u32 {
        self.mapping().word32(SIGNAL).load(Ordering::SeqCst)
    }

    /// Application: waits until there are more than `seen` signals.
    pub fn wait(&self, seen: u32, timeout: Duration) {
        self.word(APPLICATION_WAITS).store(1, Ordering::SeqCst);
        // Any return is followed by another look.
        let _ = futex::wait(self.mapping().word32(SIGNAL), seen, timeout);
        self.word(APPLICATION_WAITS).store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(cookie: u32) -> Command {
        let notification = Notification::Counter { index: 3, add: 9 };
        let kind = CommandKind::Put { local: RegionId(0), at: 64, length: 4096, notification };
        Command { kind, target: NodeNumber(7), cookie, region: RegionId(u64::MAX), offset: 1 << 40 }
    }

    #[test]
    fn commands_completions_and_events_keep_their_order_and_values() {
        let (node, descriptor) = Control::create(None).unwrap();
        let application = Control::open(descriptor).unwrap();
        for round in 0..3000_u32 {
            assert!(!application.post(&command(round)).unwrap());
            assert_eq!(node.take_command().unwrap(), Some(command(round)));
            let failure = (round % 2 == 0).then_some(Failure::Bounds(u64::from(round)));
            let completion = Completion { cookie: round, value: u64::from(round) << 33, failure };
            node.complete(completion).unwrap();
            assert_eq!(application.take_completion().unwrap(), Some(completion));
        }
        for tag in 0..EVENT_LIMIT as u32 + 10 {
            let event = Event { source: NodeNumber(9), tag, region: RegionId(5), offset: 1, length: 2 };
            node.notify(&event).unwrap();
        }
        assert_eq!(application.lost_events(), 10);
        assert_eq!(application.take_event().unwrap().map(|event| event.tag), Some(0));
    }

    #[test]
    fn every_kind_of_command_survives() {
        for kind in [
            CommandKind::Get { local: RegionId(3), at: u64::MAX, length: u32::MAX },
            CommandKind::FetchAdd(u64::MAX),
            CommandKind::CompareSwap(1, u64::MAX),
        ] {
            let command = Command { kind, ..command(u32::MAX) };
            assert_eq!(Command::decode(command.encode()), Ok(command));
        }
    }

    #[test]
    fn garbage_is_refused() {
        let (node, descriptor) = Control::create(None).unwrap();
        let application = Control::open(descriptor).unwrap();
        application.word(COMMANDS.posted).store(MAX_COMMANDS + 1, Ordering::Relaxed);
        assert_eq!(node.take_command(), Err(ControlError { field: "ring", value: MAX_COMMANDS + 1 }));
        for words in [[9; 8], [1 | 7 << 8, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 1 << 40, 0, 0, 0, 0]] {
            assert!(Command::decode(words).is_err(), "{words:?}");
        }
        assert_eq!(Control::staging(STAGING, 1), None);
        assert_eq!(Control::staging(u64::MAX, 1), None);
        let (_, other) = Memory::allocate("other", 4096, None).unwrap();
        assert!(Control::open(other).is_err());
    }

    #[test]
    fn completions_wake_when_all_awaited_ones_are_there() {
        let (node, descriptor) = Control::create(None).unwrap();
        let application = Control::open(descriptor).unwrap();
        assert!(!application.await_completions(2));
        let before = application.signals();
        for (cookie, signals) in [(1, 0), (2, 1)] {
            node.complete(Completion { cookie, value: 0, failure: None }).unwrap();
            node.signal_completions();
            assert_eq!(application.signals() - before, signals);
        }
        assert!(application.await_completions(2));
        assert_eq!(application.take_completion().unwrap().map(|done| done.cookie), Some(1));
        assert!(!application.await_completions(2));
    }

    #[test]
    fn a_lost_node_is_seen_and_a_waiter_is_woken() {
        let (node, descriptor) = Control::create(None).unwrap();
        let application = Control::open(descriptor).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    let seen = application.signals();
                    if application.counter(257) > 0 {
                        break;
                    }
                    application.wait(seen, Duration::from_secs(60));
                }
            });
            node.raise(257, 2);
            node.raise(u16::MAX, 2);
            node.signal();
        });
        assert_eq!(application.counter(257), 2);
        node.set_lost(NodeNumber(70), true);
        assert!(application.is_lost(NodeNumber(70)) && !application.is_lost(NodeNumber(6)));
        node.set_lost(NodeNumber(70), false);
        assert!(!application.is_lost(NodeNumber(70)));
    }
}
