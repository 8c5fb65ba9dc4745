//! A card somewhere on the network, as a node uses it: everything by RDMA reads, writes and atomics on BAR0
//! and card memory, and by the messages that the card sends.
//!
//! ```text
//! connect ──► look (BAR0 is readable) ──► acquire ──► load, start, stop; read and write memory ──► release
//! ```
//!
//! A queue pair that was refused something takes nothing any more: after an error that
//! [`RemoteError::is_fatal`] the card has to be connected anew.

use std::collections::{HashMap, VecDeque};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_rdma::connect::{self, ConnectError};
use millstream_rdma::memory::{MemoryError, OutOfBounds, RemoteMemory, Rkey};
use millstream_rdma::queue::{Opcode, PostError, QueueError, Signal, WorkError};
use millstream_rdma::wait::{Wait, WaitError, WaitOptions, Waiter};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, Prepared, QueuePair, RcOptions, Region,
    RemoteAddress, WrId,
};

use super::copies::by_bank;
use super::{Greeting, IMM_CONTROL, MESSAGE_BYTES, Visit};
use crate::command::{CAPABILITY_SPINS, Cause, nanos};
use crate::lease;
use crate::memory::Span;
use crate::region::codes::MessageKind;
use crate::region::message::Message;
use crate::registers::{BAR0_BYTES, CONTROL_WINDOW, LEASE_PAGE, MAX_BANKS, at};

/// Why something could not be done with a remote card.
#[derive(Debug, thiserror::Error)]
#[error("card {card}: {kind}")]
pub struct RemoteError {
    /// Its address.
    pub card: String,
    /// Why.
    pub kind: RemoteErrorKind,
}

/// See [`RemoteError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteErrorKind {
    /// It cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// This node's device refuses a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// This node's device refuses memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// This node's device refuses a request.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A request failed.
    #[error(transparent)]
    Work(#[from] WorkError),
    /// Waiting failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Who answers there is no card, or one of another version.
    #[error("who listens there is no card of this version")]
    NotACard,
    /// It closed the connection, or died.
    #[error("has closed the connection or died")]
    Lost,
    /// It does not answer in time.
    #[error("does not answer within {0:?}: {1}")]
    TimedOut(Duration, &'static str),
    /// Another node has it.
    #[error("is leased to node {holder} (epoch {epoch})")]
    Held {
        /// The holder.
        holder: u32,
        /// Its epoch.
        epoch: u32,
    },
    /// This node has no lease of it.
    #[error("this node holds no lease of it{}", .0.map_or(String::new(), |cause| format!("; the latest one ended: {cause}")))]
    NotHeld(Option<Cause>),
    /// The card refused a command or a run failed.
    #[error("region {region}: {cause} ({detail:#x})")]
    Refused {
        /// The region.
        region: u32,
        /// Why.
        cause: Cause,
        /// The offending value.
        detail: u64,
    },
    /// It has no such kernel.
    #[error(transparent)]
    NoSuchKernel(#[from] crate::card::NoSuchKernel),
    /// A range that is not the card's.
    #[error("{span} is outside the card's memory of {memory} bytes")]
    OutOfRange {
        /// The range.
        span: Span,
        /// The memory.
        memory: u64,
    },
    /// It has no such region.
    #[error("has {regions} regions, there is no region {region}")]
    NoSuchRegion {
        /// The one asked for.
        region: u32,
        /// How many there are.
        regions: u32,
    },
}

impl RemoteError {
    /// Whether the connection is over, so that only a new one helps.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self.kind,
            RemoteErrorKind::Connect(_)
                | RemoteErrorKind::Post(_)
                | RemoteErrorKind::Work(_)
                | RemoteErrorKind::Wait(_)
                | RemoteErrorKind::Lost
        )
    }
}

impl From<OutOfBounds> for RemoteErrorKind {
    fn from(error: OutOfBounds) -> RemoteErrorKind {
        let span = Span::new(error.offset, error.length);
        RemoteErrorKind::OutOfRange { span, memory: error.size }
    }
}

/// How a node uses a card.
#[derive(Clone, Copy, Debug)]
pub struct RemoteOptions {
    /// How long to look for completions and messages before sleeping.
    pub spin: Duration,
    /// Longest time to wait for an answer of the card.
    pub patience: Duration,
    /// Bytes of registered memory through which [`RemoteCard::read`] and [`RemoteCard::write`] copy.
    pub staging_bytes: usize,
}

impl Default for RemoteOptions {
    fn default() -> RemoteOptions {
        RemoteOptions {
            spin: Duration::from_micros(20),
            patience: Duration::from_secs(10),
            staging_bytes: 4 << 20,
        }
    }
}

/// Messages that a card may send before this node looks.
const MESSAGES: usize = 64;

/// Where things are in the scratch memory: messages, an image of BAR0, reports, one word.
const BAR0_AT: u64 = (MESSAGES * MESSAGE_BYTES) as u64;
const REPORT_AT: u64 = BAR0_AT + BAR0_BYTES as u64;
const REPORT_BYTES: u64 = 2 * 8 * MAX_BANKS as u64;
const WORD_AT: u64 = REPORT_AT + REPORT_BYTES;
const SCRATCH: u64 = WORD_AT + 4096;

/// Request numbers of receives start here.
const RECEIVE: u64 = 1 << 32;

/// The lease that this node holds.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Its epoch.
    pub epoch: u32,
    /// Card memory, BAR4, with the key of this lease.
    pub memory: RemoteMemory,
    /// The DMA window, BAR2, with the key of this lease.
    pub dma: RemoteMemory,
    control: RemoteMemory,
    duration: Duration,
}

/// A lease in a form that another process can go on with; who has it has the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseToken {
    /// `card_id`.
    pub card: u64,
    /// Epoch of the lease.
    pub epoch: u32,
    control_key: u32,
    dma_key: u32,
    memory_key: u32,
    memory_addr: u64,
    duration_ms: u64,
}

pub(super) struct Inner {
    // First: the queue pair goes before its queues and memory.
    pub(super) pair: QueuePair,
    waiter: Waiter,
    queue: CompletionQueue,
    stream: TcpStream,
    pub(super) scratch: Region,
    pub(super) staging: Region,
    finished: HashMap<u64, Completion>,
    waited_for: HashMap<u64, ()>,
    next: u64,
    pub(super) messages: VecDeque<Message>,
    pub(super) held: Option<Held>,
    ended: Option<Cause>,
    beats: u64,
    beaten: Instant,
    traffic: [[u64; MAX_BANKS as usize]; 2],
    pub(super) greeting: Greeting,
    options: RemoteOptions,
    pub(super) sequence: u64,
    lost: bool,
    /// The lease was given back and the card has not confirmed it: its keys may end at any moment.
    releasing: bool,
}

/// A connection to a card. Clones share it.
#[derive(Clone)]
pub struct RemoteCard {
    inner: Arc<Mutex<Inner>>,
    address: String,
    greeting: Greeting,
    device: Device,
}

impl std::fmt::Debug for RemoteCard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteCard({}, {:#x})", self.address, self.greeting.card)
    }
}

type Result<T, E = RemoteErrorKind> = std::result::Result<T, E>;

impl RemoteCard {
    /// Connects to the card that listens at `address`, `host:port`.
    pub fn connect(
        device: &Device,
        address: &str,
        options: RemoteOptions,
    ) -> std::result::Result<RemoteCard, RemoteError> {
        let open = || {
            let deadline = Deadline::after(options.patience);
            let mut stream = connect::dial(address, deadline)?;
            let waiter = Waiter::new(device, WaitOptions { spin: Duration::ZERO, ..WaitOptions::default() })?;
            let limits = RcOptions {
                send_depth: 256,
                recv_depth: MESSAGES as u32,
                max_inline: 192,
                access: Access::SOURCE,
                ..RcOptions::default()
            };
            let queue = waiter.completion_queue(limits.send_depth + limits.recv_depth)?;
            let prepared = Prepared::new(device, &queue, &queue, &limits)?;
            let scratch = Region::landing(
                device,
                c"millstream-card-scratch",
                SCRATCH.next_multiple_of(4096) as usize,
                Access::LOCAL_WRITE,
            )?;
            let staging = Region::landing(
                device,
                c"millstream-card-staging",
                options.staging_bytes,
                Access::LOCAL_WRITE,
            )?;
            for slot in 0..MESSAGES as u64 {
                let sge = scratch.sge(slot * MESSAGE_BYTES as u64, MESSAGE_BYTES as u32)?;
                prepared.post_recv(&[sge], WrId(RECEIVE + slot))?;
            }
            let connected = prepared.connect(&mut stream, &Visit::of(false).to_bytes(), deadline)?;
            let greeting = Greeting::from_extra(&connected.extra).ok_or(RemoteErrorKind::NotACard)?;
            Ok(Inner {
                pair: connected.pair,
                waiter,
                queue,
                stream,
                scratch,
                staging,
                finished: HashMap::new(),
                waited_for: HashMap::new(),
                next: 0,
                messages: VecDeque::new(),
                held: None,
                ended: None,
                beats: 0,
                beaten: Instant::now(),
                traffic: [[0; MAX_BANKS as usize]; 2],
                greeting,
                options,
                // Numbers of commands differ from those of any earlier connection.
                sequence: u64::from(greeting.node) << 24,
                lost: false,
                releasing: false,
            })
        };
        let inner = open().map_err(|kind| RemoteError { card: address.to_owned(), kind })?;
        let greeting = inner.greeting;
        Ok(RemoteCard {
            inner: Arc::new(Mutex::new(inner)),
            address: address.to_owned(),
            greeting,
            device: device.clone(),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What it said of itself.
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// The device of this node.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Size of card memory [bytes].
    pub fn memory_bytes(&self) -> u64 {
        self.greeting.memory_bytes
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut Inner) -> Result<T>,
    ) -> std::result::Result<T, RemoteError> {
        act(&mut self.lock()).map_err(|kind| RemoteError { card: self.address.clone(), kind })
    }

    /// The lease that this node holds, as far as it knows.
    pub fn held(&self) -> Option<Held> {
        self.lock().held
    }

    /// Copies all of BAR0, as a [`Snapshot`].
    pub fn snapshot(&self) -> std::result::Result<Snapshot, RemoteError> {
        self.with(|inner| inner.snapshot())
    }

    /// Reads a register word of 64 bits (or the two of 32 bits that stand there).
    pub fn register(&self, offset: usize) -> std::result::Result<u64, RemoteError> {
        self.with(|inner| inner.register(offset))
    }

    /// Takes the lease, waiting up to `patience` while another node holds it. It lasts `duration` beyond each
    /// heartbeat, which a thread of this process sends from now on.
    ///
    /// # Errors
    /// [`RemoteErrorKind::Held`] if the card was not free in time.
    pub fn acquire(&self, duration: Duration, patience: Duration) -> std::result::Result<Held, RemoteError> {
        let held = self.with(|inner| inner.acquire(duration, Deadline::after(patience)))?;
        let inner = Arc::downgrade(&self.inner);
        // Without it the lease ends when nobody uses the connection for so long.
        let _ = std::thread::Builder::new()
            .name("card lease".to_owned())
            .spawn(move || keep(&inner, held.epoch, held.duration));
        Ok(held)
    }

    /// Makes the lease outlive this connection and says what another process needs to go on with it, by
    /// [`RemoteCard::attach`]. Without heartbeats it lasts for its duration.
    pub fn detach(&self) -> std::result::Result<LeaseToken, RemoteError> {
        self.with(|inner| {
            let held = inner.lease()?;
            let ticket = inner.control(at::lease_detached, &1u64.to_le_bytes(), Signal::Yes)?;
            inner.finish(ticket)?;
            inner.report()?;
            Ok(LeaseToken {
                card: inner.greeting.card,
                epoch: held.epoch,
                control_key: held.control.rkey.0,
                dma_key: held.dma.rkey.0,
                memory_key: held.memory.rkey.0,
                memory_addr: held.memory.addr,
                duration_ms: held.duration.as_millis() as u64,
            })
        })
    }

    /// Goes on with a lease that another process has detached: messages come here from now on.
    ///
    /// # Errors
    /// [`RemoteErrorKind::NotHeld`] if it has ended.
    pub fn attach(&self, token: &LeaseToken) -> std::result::Result<Held, RemoteError> {
        let held = self.with(|inner| inner.attach(token))?;
        let inner = Arc::downgrade(&self.inner);
        let _ = std::thread::Builder::new()
            .name("card lease".to_owned())
            .spawn(move || keep(&inner, held.epoch, held.duration));
        Ok(held)
    }

    /// Gives the lease back and waits until the card is free for others: keys invalid, memory clear.
    pub fn release(&self) -> std::result::Result<(), RemoteError> {
        self.with(Inner::release)
    }

    /// Ends the lease of whoever holds the card. Returns its epoch, or nothing if nobody did.
    pub fn revoke(&self) -> std::result::Result<Option<u32>, RemoteError> {
        self.with(Inner::revoke)
    }

    /// Waits for the next message, up to `patience`.
    pub fn message(&self, patience: Duration) -> std::result::Result<Option<Message>, RemoteError> {
        self.with(|inner| {
            let deadline = Deadline::after(patience);
            inner.wait_until(deadline, |inner| !inner.messages.is_empty())?;
            Ok(inner.messages.pop_front())
        })
    }

    /// Copies bytes into card memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in bytes.chunks(most).enumerate() {
                inner.staging.copy_from_slice(0, piece)?;
                let span = Span::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer(Direction::Write, None, 0, span)?;
            }
            Ok(())
        })
    }

    /// Copies bytes out of card memory.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let most = inner.staging.len();
            for (index, piece) in out.chunks_mut(most).enumerate() {
                let span = Span::new(offset.wrapping_add((index * most) as u64), piece.len() as u64);
                inner.transfer(Direction::Read, None, 0, span)?;
                inner.staging.copy_to_slice(0, piece)?;
            }
            Ok(())
        })
    }

    /// Copies from registered memory of this process into card memory, without another copy.
    pub fn write_from(&self, region: &Region, at: u64, to: Span) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer(Direction::Write, Some(region), at, to))
    }

    /// Copies from card memory into registered memory of this process, without another copy.
    pub fn read_into(&self, region: &Region, at: u64, from: Span) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer(Direction::Read, Some(region), at, from))
    }

    /// As [`RemoteCard::write_from`] for many ranges, given with their places in `region`: requests follow each
    /// other without waiting.
    pub fn write_many(&self, region: &Region, parts: &[(u64, Span)]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer_many(Direction::Write, region, parts))
    }

    /// As [`RemoteCard::read_into`] for many ranges.
    pub fn read_many(&self, region: &Region, parts: &[(u64, Span)]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| inner.transfer_many(Direction::Read, region, parts))
    }

    /// Writes words of the control window, whose registers have `offset` in BAR0.
    pub fn control(&self, offset: usize, bytes: &[u8]) -> std::result::Result<(), RemoteError> {
        self.with(|inner| {
            let written = inner.control(offset, bytes, Signal::Yes)?;
            inner.finish(written)
        })
    }
}

/// Sends heartbeats until the lease ends or the card is dropped.
fn keep(inner: &Weak<Mutex<Inner>>, epoch: u32, duration: Duration) {
    let pause = (duration / 4).max(Duration::from_millis(5));
    loop {
        std::thread::sleep(pause);
        let Some(inner) = inner.upgrade() else { return };
        let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.held.is_none_or(|held| held.epoch != epoch) || inner.lost {
            return;
        }
        // What is wrong shows at the next use.
        let _ = inner.drain();
        let _ = inner.beat_if_due();
    }
}

/// Which way a transfer goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Write,
    Read,
}

/// Largest request of a transfer, and how many are under way.
const PIECE: u64 = 16 << 20;
const PIECES: usize = 16;

impl Inner {
    pub(super) fn patience(&self) -> Deadline {
        Deadline::after(self.options.patience)
    }

    fn bar0(&self) -> RemoteMemory {
        let Greeting { bar0_addr, bar0_key, .. } = self.greeting;
        RemoteMemory { addr: bar0_addr, rkey: Rkey(bar0_key), len: BAR0_BYTES as u64 }
    }

    fn lease_words(&self) -> RemoteMemory {
        let addr = self.greeting.bar0_addr + LEASE_PAGE.start as u64;
        RemoteMemory { addr, rkey: Rkey(self.greeting.lease_key), len: LEASE_PAGE.len() as u64 }
    }

    /// Takes what has completed and the messages that came.
    fn drain(&mut self) -> Result<usize> {
        let mut buffer = [Completion::EMPTY; 16];
        let queue = self.queue.clone();
        let completions = queue
            .poll(&mut buffer)
            .map_err(|error| WaitError { what: "poll the completion queue", cause: error.cause })?;
        for completion in completions {
            self.note(*completion)?;
        }
        Ok(completions.len())
    }

    fn note(&mut self, completion: Completion) -> Result<()> {
        let id = completion.wr_id().0;
        if id < RECEIVE {
            if self.waited_for.remove(&id).is_some() {
                self.finished.insert(id, completion);
            } else if let Err(error) = completion.check() {
                self.lost = true;
                return Err(error.into());
            }
            return Ok(());
        }
        if !completion.is_success() {
            self.lost = true;
            return Ok(());
        }
        let slot = id - RECEIVE;
        let mut bytes = [0; MESSAGE_BYTES];
        if completion.opcode() == Opcode::Receive && completion.len() as usize == MESSAGE_BYTES {
            self.scratch.copy_to_slice(slot * MESSAGE_BYTES as u64, &mut bytes)?;
            if let Some(message) = Message::from_bytes(&bytes) {
                self.hear(message);
            }
        }
        let sge = self.scratch.sge(slot * MESSAGE_BYTES as u64, MESSAGE_BYTES as u32)?;
        self.pair.post_recv(&[sge], WrId(id))?;
        Ok(())
    }

    fn hear(&mut self, message: Message) {
        if message.kind == MessageKind::LeaseEnded
            && self.held.is_some_and(|held| held.epoch == message.epoch)
        {
            self.held = None;
            self.ended = message.cause;
        }
        self.messages.push_back(message);
    }

    /// Waits until `done`; false if the deadline came first.
    pub(super) fn wait_until(
        &mut self,
        deadline: Deadline,
        mut done: impl FnMut(&mut Inner) -> bool,
    ) -> Result<bool> {
        let mut spin_until = None;
        let mut rounds = 0u32;
        loop {
            self.drain()?;
            if done(self) {
                return Ok(true);
            }
            if self.lost {
                return Err(RemoteErrorKind::Lost);
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            self.beat_if_due()?;
            if deadline.passed() {
                return Ok(false);
            }
            let now = Instant::now();
            if now < *spin_until.get_or_insert(now + self.options.spin) {
                continue;
            }
            self.sleep(deadline)?;
        }
    }

    fn sleep(&mut self, deadline: Deadline) -> Result<()> {
        let until = match self.held {
            Some(held) if !self.releasing => deadline.earlier(Deadline::at(self.beaten + held.duration / 4)),
            _ => deadline,
        };
        let mut taken = Vec::new();
        let queue = self.queue.clone();
        let mut others = [Wait::readable(&self.stream)];
        self.waiter.wait(&[&queue], &mut others, until, || {
            let mut buffer = [Completion::EMPTY; 16];
            let completions = queue
                .poll(&mut buffer)
                .map_err(|error| WaitError { what: "poll the completion queue", cause: error.cause })?;
            taken.extend_from_slice(completions);
            Ok::<_, RemoteErrorKind>(!completions.is_empty())
        })?;
        let closed = others[0].is_ready();
        for completion in taken {
            self.note(completion)?;
        }
        // Nothing is ever sent over the stream after the connection is made.
        self.lost |= closed;
        Ok(())
    }

    /// A number for a request whose completion will be waited for.
    pub(super) fn ticket(&mut self) -> WrId {
        self.next = (self.next + 1) % RECEIVE;
        self.waited_for.insert(self.next, ());
        WrId(self.next)
    }

    /// Waits for a request.
    pub(super) fn finish(&mut self, ticket: WrId) -> Result<()> {
        let deadline = self.patience();
        if !self.wait_until(deadline, |inner| inner.finished.contains_key(&ticket.0))? {
            self.waited_for.remove(&ticket.0);
            return Err(RemoteErrorKind::TimedOut(self.options.patience, "an RDMA request"));
        }
        let completion = self.finished.remove(&ticket.0).expect("just found");
        if let Err(error) = completion.check() {
            self.lost = true;
            return Err(error.into());
        }
        Ok(())
    }

    fn read_bar0(&mut self, offset: usize, len: usize) -> Result<()> {
        let from = self.bar0().at(offset as u64, len as u64)?;
        let sge = self.scratch.sge(BAR0_AT + offset as u64, len as u32)?;
        let ticket = self.ticket();
        self.pair.post_read(&[sge], from, Signal::Yes, ticket)?;
        self.finish(ticket)
    }

    pub(super) fn register(&mut self, offset: usize) -> Result<u64> {
        self.read_bar0(offset, 8)?;
        let mut word = [0; 8];
        self.scratch.copy_to_slice(BAR0_AT + offset as u64, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    pub(super) fn snapshot(&mut self) -> Result<Snapshot> {
        self.read_bar0(0, BAR0_BYTES)?;
        let mut bytes = vec![0; BAR0_BYTES].into_boxed_slice();
        self.scratch.copy_to_slice(BAR0_AT, &mut bytes)?;
        Ok(Snapshot { bytes })
    }

    /// Swaps a lease word and returns what it was.
    fn swap(&mut self, offset: usize, compare: u64, swap: u64) -> Result<u64> {
        let word = self.lease_words().at((offset - LEASE_PAGE.start) as u64, 8)?;
        let sge = self.scratch.sge(WORD_AT, 8)?;
        let ticket = self.ticket();
        self.pair.post_compare_swap(sge, word, (compare, swap), ticket)?;
        self.finish(ticket)?;
        let mut was = [0; 8];
        self.scratch.copy_to_slice(WORD_AT, &mut was)?;
        Ok(u64::from_ne_bytes(was))
    }

    /// Makes the card look at its lease words and control registers.
    pub(super) fn kick(&mut self) -> Result<()> {
        // Without bytes no key is looked at (IBTA volume 1, 9.7.4.1.5).
        let nowhere = RemoteAddress { addr: 0, rkey: Rkey(0) };
        let ticket = self.ticket();
        self.pair.post_write_imm(&[], nowhere, IMM_CONTROL, Signal::Yes, ticket)?;
        self.finish(ticket)
    }

    fn acquire(&mut self, duration: Duration, deadline: Deadline) -> Result<Held> {
        let mut guess = self.register(at::lease_word)?;
        let mut pause = Duration::from_micros(20);
        let epoch = loop {
            let (epoch, holder) = lease::unpack(guess);
            if holder == 0 {
                let mine = lease::word(epoch, self.greeting.node);
                let was = self.swap(at::lease_word, guess, mine)?;
                if was == guess {
                    break epoch;
                }
                guess = was;
                continue;
            }
            if deadline.passed() {
                return Err(RemoteErrorKind::Held { holder, epoch });
            }
            self.wait_until(Deadline::after(pause), |_| false)?;
            pause = (pause * 2).min(Duration::from_millis(20));
            guess = self.register(at::lease_word)?;
        };
        self.kick()?;
        let patience = self.patience();
        let is_answer = |message: &Message| {
            message.epoch == epoch
                && matches!(message.kind, MessageKind::LeaseGranted | MessageKind::LeaseEnded)
        };
        if !self.wait_until(patience, |inner| inner.messages.iter().any(is_answer))? {
            return Err(RemoteErrorKind::TimedOut(self.options.patience, "granting a lease"));
        }
        // What earlier leases had to say is of no use any more.
        let answer = loop {
            let message = self.messages.pop_front().expect("one is the answer");
            if is_answer(&message) {
                break message;
            }
        };
        if answer.kind == MessageKind::LeaseEnded {
            return Err(RemoteErrorKind::NotHeld(answer.cause));
        }
        let [left, keys, memory_key, memory_addr] = answer.values;
        let window = |addr, key: u64, len| RemoteMemory { addr, rkey: Rkey(key as u32), len };
        let held = Held {
            epoch,
            memory: window(memory_addr, memory_key, self.greeting.memory_bytes),
            dma: window(0, keys >> 32, self.greeting.dma_bytes),
            control: window(CONTROL_WINDOW.start as u64, keys, CONTROL_WINDOW.len() as u64),
            duration: Duration::from_nanos(left),
        };
        self.traffic = [[0; MAX_BANKS as usize]; 2];
        self.ended = None;
        self.releasing = false;
        self.held = Some(held);
        self.beaten = Instant::now();
        if duration != held.duration {
            let ticket = self.control(at::lease_duration_ns, &nanos(duration).to_le_bytes(), Signal::Yes)?;
            self.finish(ticket)?;
            self.kick()?;
        }
        let held = Held { duration, ..held };
        self.held = Some(held);
        Ok(held)
    }

    fn attach(&mut self, token: &LeaseToken) -> Result<Held> {
        let (epoch, holder) = lease::unpack(self.register(at::lease_word)?);
        if token.card != self.greeting.card || epoch != token.epoch || holder == 0 {
            return Err(RemoteErrorKind::NotHeld(None));
        }
        let window = |addr, key, len| RemoteMemory { addr, rkey: Rkey(key), len };
        let held = Held {
            epoch,
            memory: window(token.memory_addr, token.memory_key, self.greeting.memory_bytes),
            dma: window(0, token.dma_key, self.greeting.dma_bytes),
            control: window(CONTROL_WINDOW.start as u64, token.control_key, CONTROL_WINDOW.len() as u64),
            duration: Duration::from_millis(token.duration_ms),
        };
        self.held = Some(held);
        self.beaten = Instant::now();
        // Any value that differs from the latest one is a heartbeat.
        self.beats = u64::from(self.greeting.node) << 32;
        let node = u64::from(self.greeting.node);
        // What the former holder reported stays counted: go on from it.
        let bar0 = self.snapshot()?;
        for (table, offset) in self.traffic.iter_mut().zip([at::report_written, at::report_read]) {
            for (bank, count) in table.iter_mut().enumerate() {
                *count = bar0.word(offset + 8 * bank);
            }
        }
        let ticket = self.control(at::lease_hand_over, &node.to_le_bytes(), Signal::Yes)?;
        self.finish(ticket)?;
        self.kick()?;
        let deadline = self.patience();
        while self.register(at::lease_word)? != lease::word(epoch, self.greeting.node) {
            if deadline.passed() {
                return Err(RemoteErrorKind::TimedOut(self.options.patience, "handing over a lease"));
            }
            self.wait_until(Deadline::after(Duration::from_micros(50)), |_| false)?;
        }
        Ok(held)
    }

    pub(super) fn lease(&self) -> Result<Held> {
        self.held.ok_or(RemoteErrorKind::NotHeld(self.ended))
    }

    fn release(&mut self) -> Result<()> {
        let held = self.lease()?;
        self.report()?;
        self.releasing = true;
        let ticket = self.control(at::lease_release, &u64::from(held.epoch).to_le_bytes(), Signal::Yes)?;
        self.finish(ticket)?;
        self.kick()?;
        let patience = self.patience();
        if !self.wait_until(patience, |inner| inner.held.is_none())? {
            return Err(RemoteErrorKind::TimedOut(self.options.patience, "ending a lease"));
        }
        Ok(())
    }

    fn revoke(&mut self) -> Result<Option<u32>> {
        let (epoch, holder) = lease::unpack(self.register(at::lease_word)?);
        if holder == 0 {
            return Ok(None);
        }
        let mut guess = 0;
        loop {
            let was = self.swap(at::lease_revoke, guess, epoch.into())?;
            if was == guess {
                break;
            }
            guess = was;
        }
        self.kick()?;
        Ok(Some(epoch))
    }

    /// Writes to the control window. The request that does it is waited for with [`Inner::finish`] if it is
    /// signaled.
    pub(super) fn control(&mut self, offset: usize, bytes: &[u8], signal: Signal) -> Result<WrId> {
        let control = self.lease()?.control;
        let inside = offset.wrapping_sub(CONTROL_WINDOW.start) as u64;
        let to = control.at(inside, bytes.len() as u64)?;
        let ticket = if signal == Signal::Yes { self.ticket() } else { WrId(0) };
        if bytes.len() <= self.pair.max_inline() as usize {
            self.pair.post_write_inline(bytes, to, signal, ticket)?;
            return Ok(ticket);
        }
        // The image of BAR0 is free while no snapshot is taken.
        self.scratch.copy_from_slice(BAR0_AT, bytes)?;
        let sge = self.scratch.sge(BAR0_AT, bytes.len() as u32)?;
        self.pair.post_write(&[sge], to, signal, ticket)?;
        Ok(ticket)
    }

    /// Writes a doorbell: a word of the control window that the card looks at, or is told of by `imm`.
    pub(super) fn doorbell(&mut self, offset: usize, word: u64, imm: u32, always: bool) -> Result<WrId> {
        if self.greeting.capabilities & CAPABILITY_SPINS != 0 && !always {
            return self.control(offset, &word.to_le_bytes(), Signal::Yes);
        }
        let control = self.lease()?.control;
        let to = control.at((offset - CONTROL_WINDOW.start) as u64, 8)?;
        self.scratch.copy_from_slice(WORD_AT + 8, &word.to_le_bytes())?;
        let sge = self.scratch.sge(WORD_AT + 8, 8)?;
        let ticket = self.ticket();
        self.pair.post_write_imm(&[sge], to, imm, Signal::Yes, ticket)?;
        Ok(ticket)
    }

    /// Heartbeat, with the report of what this node moved, if a quarter of the lease is over.
    fn beat_if_due(&mut self) -> Result<()> {
        match self.held {
            Some(held) if !self.releasing && self.beaten.elapsed() >= held.duration / 4 => self.report(),
            _ => Ok(()),
        }
    }

    fn report(&mut self) -> Result<()> {
        self.beaten = Instant::now();
        self.beats += 1;
        let banks = (self.greeting.bank_count.min(MAX_BANKS)) as usize;
        let control = self.lease()?.control;
        for (index, (table, offset)) in
            self.traffic.iter().zip([at::report_written, at::report_read]).enumerate()
        {
            let bytes: Vec<u8> = table[..banks].iter().flat_map(|count| count.to_le_bytes()).collect();
            let at = REPORT_AT + index as u64 * REPORT_BYTES / 2;
            self.scratch.copy_from_slice(at, &bytes)?;
            let sge = self.scratch.sge(at, bytes.len() as u32)?;
            let to = control.at((offset - CONTROL_WINDOW.start) as u64, bytes.len() as u64)?;
            self.pair.post_write(&[sge], to, Signal::No, WrId(0))?;
        }
        // Signaled, so that the send queue has room again; nobody waits for it.
        let to = control.at((at::lease_heartbeat - CONTROL_WINDOW.start) as u64, 8)?;
        self.pair.post_write_inline(&self.beats.to_le_bytes(), to, Signal::Yes, WrId(0))?;
        Ok(())
    }

    /// Moves bytes between registered memory (or the staging buffer) and card memory.
    pub(super) fn transfer(
        &mut self,
        direction: Direction,
        region: Option<&Region>,
        at: u64,
        span: Span,
    ) -> Result<()> {
        let memory = self.lease()?.memory;
        memory.at(span.offset, span.len)?;
        let mut under_way = VecDeque::new();
        let mut posted = 0;
        while posted < span.len {
            if under_way.len() == PIECES {
                let oldest = under_way.pop_front().expect("full");
                self.finish(oldest)?;
            }
            let len = (span.len - posted).min(PIECE);
            let remote = memory.at(span.offset + posted, len)?;
            let local = region.unwrap_or(&self.staging).sge(at + posted, len as u32)?;
            let ticket = self.ticket();
            match direction {
                Direction::Write => self.pair.post_write(&[local], remote, Signal::Yes, ticket)?,
                Direction::Read => self.pair.post_read(&[local], remote, Signal::Yes, ticket)?,
            }
            under_way.push_back(ticket);
            posted += len;
        }
        for ticket in under_way {
            self.finish(ticket)?;
        }
        let table = &mut self.traffic[usize::from(direction == Direction::Read)];
        for (bank, part) in by_bank(span, self.greeting.bank_bytes) {
            table[bank] += part;
        }
        Ok(())
    }
}

impl Inner {
    fn transfer_many(&mut self, direction: Direction, region: &Region, parts: &[(u64, Span)]) -> Result<()> {
        /// Requests from one that is signaled to the next, and signaled ones under way.
        const EVERY: usize = 16;
        const TICKETS: usize = 8;
        let memory = self.lease()?.memory;
        let mut under_way = VecDeque::new();
        for (index, (at, span)) in parts.iter().enumerate() {
            if span.len > PIECE {
                self.transfer(direction, Some(region), *at, *span)?;
                continue;
            }
            let signaled = index % EVERY == EVERY - 1 || index + 1 == parts.len();
            let ticket = if signaled { self.ticket() } else { WrId(0) };
            let signal = if signaled { Signal::Yes } else { Signal::No };
            let remote = memory.at(span.offset, span.len)?;
            let local = [region.sge(*at, span.len as u32)?];
            match direction {
                Direction::Write => self.pair.post_write(&local, remote, signal, ticket)?,
                Direction::Read => self.pair.post_read(&local, remote, signal, ticket)?,
            }
            if signaled {
                under_way.push_back(ticket);
            }
            if under_way.len() == TICKETS {
                let oldest = under_way.pop_front().expect("full");
                self.finish(oldest)?;
            }
            let table = &mut self.traffic[usize::from(direction == Direction::Read)];
            for (bank, part) in by_bank(*span, self.greeting.bank_bytes) {
                table[bank] += part;
            }
        }
        for ticket in under_way {
            self.finish(ticket)?;
        }
        Ok(())
    }
}

/// A copy of BAR0 at one moment. Words are whole; words of different registers may be of different moments.
#[derive(Clone)]
pub struct Snapshot {
    bytes: Box<[u8]>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot({} bytes)", self.bytes.len())
    }
}

impl Snapshot {
    /// The word of 64 bits at `offset`.
    ///
    /// # Panics
    /// If it is not in BAR0.
    pub fn word(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes[offset..offset + 8].try_into().expect("8 bytes"))
    }

    /// The word of 32 bits at `offset`.
    ///
    /// # Panics
    /// If it is not in BAR0.
    pub fn half(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.bytes[offset..offset + 4].try_into().expect("4 bytes"))
    }

    /// Bytes of BAR0.
    ///
    /// # Panics
    /// If they are not in BAR0.
    pub fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        &self.bytes[offset..offset + len]
    }
}
