//! A card on the network. The client uses RDMA reads, writes and atomics on BAR0 and card memory; the card
//! answers by messages.
//!
//! ```text
//! connect ──► read BAR0 ──► acquire ──► load, start, stop; read and write memory ──► release
//! ```
//!
//! A failed work request puts the queue pair into the error state. After an error with
//! [`RemoteError::is_fatal`], connect the card again.

mod bar0;
mod error;
mod lease;
mod requests;
mod transfer;
mod waiting;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_rdma::queue::WorkError;
use millstream_rdma::wait::{CompletionWaiter, WaitError, WaitOptions};
use millstream_rdma::{
    Access, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RcOptions, Region, WrId,
};
use millstream_tls::{Security, Stream};

pub use self::bar0::Snapshot;
pub use self::error::{RemoteError, RemoteErrorKind};
pub use self::lease::{HeldLease, LeaseToken};
use self::waiting::{Delivery, Shared, Waiters, Wanted};
use millstream_card_abi::command::Cause;
use millstream_card_abi::hello::{ClientHello, MESSAGE_BYTES, ServerHello};
use millstream_card_abi::message::Message;
use millstream_card_abi::registers::{BAR0_BYTES, MAX_BANKS, MAX_REGIONS};

/// Options of a connection to a card.
#[derive(Clone, Copy, Debug)]
pub struct RemoteOptions {
    /// How long to poll for completions and messages before sleeping.
    pub spin: Duration,
    /// Longest time to wait for an answer of the card.
    pub timeout: Duration,
    /// Size of the registered buffer for [`RemoteCard::read`] and [`RemoteCard::write`] (bytes).
    pub staging_bytes: usize,
}

impl Default for RemoteOptions {
    fn default() -> RemoteOptions {
        RemoteOptions {
            spin: Duration::from_micros(20),
            timeout: Duration::from_secs(10),
            staging_bytes: 4 << 20,
        }
    }
}

/// Receives posted for messages.
const MESSAGES: usize = 64;

/// Layout of the scratch memory: messages, a copy of BAR0, traffic reports, one word.
const BAR0_AT: u64 = (MESSAGES * MESSAGE_BYTES) as u64;
const REPORT_AT: u64 = BAR0_AT + BAR0_BYTES as u64;
const REPORT_BYTES: u64 = 2 * 8 * MAX_BANKS as u64;
const WORD_AT: u64 = REPORT_AT + REPORT_BYTES;
const SCRATCH: u64 = WORD_AT + 4096;

/// First work request id of receives.
const RECEIVE: u64 = 1 << 63;

pub(crate) struct Inner {
    // First field: the queue pair is dropped before its queues and memory.
    pub(crate) queue_pair: QueuePair,
    waiter: CompletionWaiter,
    queue: CompletionQueue,
    stream: Stream,
    pub(crate) scratch: Region,
    pub(crate) staging: Region,
    /// Id of the latest work request.
    wr_id: u64,
    /// Id of the latest completed work request; they complete in order.
    finished: u64,
    pub(crate) messages: VecDeque<Message>,
    pub(crate) held: Option<HeldLease>,
    ended: Option<Cause>,
    heartbeat: u64,
    last_heartbeat: Instant,
    traffic: [[u64; MAX_BANKS as usize]; 2],
    /// Bytes written and read through BAR2.
    bar2_traffic: [u64; 2],
    pub(crate) hello: ServerHello,
    pub(crate) options: RemoteOptions,
    pub(crate) sequence: u64,
    /// By region: the latest doorbell word of this client that the region has not acknowledged.
    pub(crate) pending: [u64; MAX_REGIONS],
    is_disconnected: bool,
    /// The error of a failed heartbeat; it is more precise than the end of the connection.
    fault: Option<WorkError>,
    /// The lease was released and the card has not confirmed it: its keys may end at any moment.
    releasing: bool,
    pub(crate) waiters: Waiters,
}

/// A connection to a card. Clones share it: each operation waits for those of other threads, but not for threads in
/// [`RemoteCard::run`], [`RemoteCard::wait`] and [`RemoteCard::message`].
#[derive(Clone)]
pub struct RemoteCard {
    shared: Arc<Shared>,
    address: String,
    hello: ServerHello,
    device: Device,
}

impl std::fmt::Debug for RemoteCard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteCard({}, {:#x})", self.address, self.hello.card)
    }
}

type Result<T, E = RemoteErrorKind> = std::result::Result<T, E>;

impl RemoteCard {
    /// Connects to the card that listens at `address`, `host:port`, with the keys that the environment names
    /// ([`ENV_KEYS`](millstream_tls::ENV_KEYS)), if it does.
    pub fn connect(
        device: &Device,
        address: &str,
        options: RemoteOptions,
    ) -> std::result::Result<RemoteCard, RemoteError> {
        let security = Security::from_environment()
            .map_err(|error| RemoteError { card: address.to_owned(), kind: error.into() })?;
        RemoteCard::connect_with(device, address, options, &security)
    }

    /// Connects to the card that listens at `address`, `host:port`, with the given keys or without.
    pub fn connect_with(
        device: &Device,
        address: &str,
        options: RemoteOptions,
        security: &Security,
    ) -> std::result::Result<RemoteCard, RemoteError> {
        let open = || {
            let deadline = Deadline::after(options.timeout);
            let mut stream = security.dial(address, deadline)?;
            let waiter = CompletionWaiter::new(
                device,
                WaitOptions { spin: Duration::ZERO, ..WaitOptions::default() },
            )?;
            let limits = RcOptions {
                send_depth: 256,
                recv_depth: MESSAGES as u32,
                max_inline: 192,
                access: Access::SOURCE,
                ..RcOptions::default()
            };
            let queue = waiter.completion_queue(limits.send_depth + limits.recv_depth)?;
            let prepared = PreparedQueuePair::new(device, &queue, &queue, &limits)?;
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
            let connected = prepared.connect(&mut stream, &ClientHello::new(false).to_bytes(), deadline)?;
            let hello =
                ServerHello::parse(&connected.private_data).ok_or(RemoteErrorKind::VersionMismatch)?;
            Ok(Inner {
                queue_pair: connected.pair,
                waiter,
                queue,
                stream,
                scratch,
                staging,
                wr_id: 0,
                finished: 0,
                messages: VecDeque::new(),
                held: None,
                ended: None,
                heartbeat: 0,
                last_heartbeat: Instant::now(),
                traffic: [[0; MAX_BANKS as usize]; 2],
                bar2_traffic: [0; 2],
                hello,
                options,
                // Sequence numbers differ from those of any earlier connection.
                sequence: u64::from(hello.client) << 24,
                pending: [0; MAX_REGIONS],
                is_disconnected: false,
                fault: None,
                releasing: false,
                waiters: Waiters::new().map_err(|cause| WaitError { what: "create an eventfd", cause })?,
            })
        };
        let inner = open().map_err(|kind| RemoteError { card: address.to_owned(), kind })?;
        let hello = inner.hello;
        Ok(RemoteCard {
            shared: Arc::new(Shared::new(inner)),
            address: address.to_owned(),
            hello,
            device: device.clone(),
        })
    }

    /// The address at which the card listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The hello of the card.
    pub fn hello(&self) -> &ServerHello {
        &self.hello
    }

    /// The local verbs device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Size of card memory (bytes).
    pub fn memory_bytes(&self) -> u64 {
        self.hello.memory_bytes
    }

    pub(crate) fn with<T>(
        &self,
        act: impl FnOnce(&mut Inner) -> Result<T>,
    ) -> std::result::Result<T, RemoteError> {
        act(&mut self.shared.lock()).map_err(|kind| self.error(kind))
    }

    fn error(&self, kind: RemoteErrorKind) -> RemoteError {
        RemoteError { card: self.address.clone(), kind }
    }

    /// The lease that this process holds, as far as it knows.
    pub fn held(&self) -> Option<HeldLease> {
        self.shared.lock().held
    }

    /// Waits for the next message, up to `timeout`. Messages at the end of runs for which another thread waits go to
    /// that thread.
    pub fn message(&self, timeout: Duration) -> std::result::Result<Option<Message>, RemoteError> {
        match self.shared.wait(Wanted::Any, Deadline::after(timeout)).map_err(|kind| self.error(kind))? {
            Some(Delivery::Message(message)) => Ok(Some(message)),
            Some(Delivery::LeaseEnded(_)) | None => Ok(None),
        }
    }

    /// Waits for the message that answers a doorbell word.
    pub(crate) fn answer(&self, word: u64, timeout: Duration) -> std::result::Result<Message, RemoteError> {
        let answer = self.wait_for_answer(Wanted::Answer { word, or_later: false }, timeout)?;
        answer.ok_or_else(|| self.error(RemoteErrorKind::TimedOut(timeout, ANSWER)))
    }

    /// As [`RemoteCard::answer`]; none if `timeout` passed first. A message that comes later is kept for the next call.
    pub(crate) fn answer_or_keep(
        &self,
        word: u64,
        timeout: Duration,
    ) -> std::result::Result<Option<Message>, RemoteError> {
        self.wait_for_answer(Wanted::Answer { word, or_later: true }, timeout)
    }

    fn wait_for_answer(
        &self,
        wanted: Wanted,
        timeout: Duration,
    ) -> std::result::Result<Option<Message>, RemoteError> {
        let answer = match self.shared.wait(wanted, Deadline::after(timeout)) {
            Ok(Some(Delivery::Message(message))) => accepted(message).map(Some),
            Ok(Some(Delivery::LeaseEnded(cause))) => Err(RemoteErrorKind::NotLeased(cause)),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        answer.map_err(|kind| self.error(kind))
    }
}

/// The message that is missing when a command times out.
pub(crate) const ANSWER: &str = "message that answers a command";

/// The answer to a command, or the error that it carries.
pub(crate) fn accepted(message: Message) -> Result<Message> {
    match message.cause {
        None => Ok(message),
        Some(cause) => {
            Err(RemoteErrorKind::Rejected { region: message.region, cause, detail: message.values[0] })
        }
    }
}
