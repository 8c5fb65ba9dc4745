//! A card somewhere on the network, as a node uses it: everything by RDMA reads, writes and atomics on BAR0
//! and card memory, and by the messages that the card sends.
//!
//! ```text
//! connect ──► look (BAR0 is readable) ──► acquire ──► load, start, stop; read and write memory ──► release
//! ```
//!
//! A queue pair that was refused something takes nothing any more: after an error that
//! [`RemoteError::is_fatal`] the card has to be connected anew.

mod bar0;
mod error;
mod lease;
mod requests;
mod transfer;

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_rdma::connect;
use millstream_rdma::queue::WorkError;
use millstream_rdma::wait::{WaitOptions, Waiter};
use millstream_rdma::{
    Access, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RcOptions, Region, WrId,
};

pub use self::bar0::Snapshot;
pub use self::error::{RemoteError, RemoteErrorKind};
pub use self::lease::{Held, LeaseToken};
use super::{Greeting, MESSAGE_BYTES, Visit};
use crate::command::Cause;
use crate::region::message::Message;
use crate::registers::{BAR0_BYTES, MAX_BANKS, MAX_REGIONS};

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
const RECEIVE: u64 = 1 << 63;

pub(in crate::net) struct Inner {
    // First: the queue pair goes before its queues and memory.
    pub(in crate::net) pair: QueuePair,
    waiter: Waiter,
    queue: CompletionQueue,
    stream: TcpStream,
    pub(in crate::net) scratch: Region,
    pub(in crate::net) staging: Region,
    /// Number of the latest request that is waited for.
    ticket: u64,
    /// Number of the latest one that has completed: they complete in order.
    finished: u64,
    pub(in crate::net) messages: VecDeque<Message>,
    pub(in crate::net) held: Option<Held>,
    ended: Option<Cause>,
    beats: u64,
    beaten: Instant,
    traffic: [[u64; MAX_BANKS as usize]; 2],
    /// Bytes written and read through the DMA window.
    dma_traffic: [u64; 2],
    pub(in crate::net) greeting: Greeting,
    pub(in crate::net) options: RemoteOptions,
    pub(in crate::net) sequence: u64,
    /// By region: the latest word that this node has rung and not seen taken up.
    pub(in crate::net) rung: [u64; MAX_REGIONS],
    lost: bool,
    /// The heartbeat that failed, if one did: it tells more than the end of the connection.
    fault: Option<WorkError>,
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
            let connected = prepared.connect(&mut stream, &Visit::of(false).to_bytes(), deadline)?;
            let greeting = Greeting::from_extra(&connected.private_data).ok_or(RemoteErrorKind::NotACard)?;
            Ok(Inner {
                pair: connected.pair,
                waiter,
                queue,
                stream,
                scratch,
                staging,
                ticket: 0,
                finished: 0,
                messages: VecDeque::new(),
                held: None,
                ended: None,
                beats: 0,
                beaten: Instant::now(),
                traffic: [[0; MAX_BANKS as usize]; 2],
                dma_traffic: [0; 2],
                greeting,
                options,
                // Numbers of commands differ from those of any earlier connection.
                sequence: u64::from(greeting.node) << 24,
                rung: [0; MAX_REGIONS],
                lost: false,
                fault: None,
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

    pub(in crate::net) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::net) fn with<T>(
        &self,
        act: impl FnOnce(&mut Inner) -> Result<T>,
    ) -> std::result::Result<T, RemoteError> {
        act(&mut self.lock()).map_err(|kind| RemoteError { card: self.address.clone(), kind })
    }

    /// The lease that this node holds, as far as it knows.
    pub fn held(&self) -> Option<Held> {
        self.lock().held
    }

    /// Waits for the next message, up to `patience`.
    pub fn message(&self, patience: Duration) -> std::result::Result<Option<Message>, RemoteError> {
        self.with(|inner| {
            let deadline = Deadline::after(patience);
            inner.wait_until(deadline, |inner| !inner.messages.is_empty())?;
            Ok(inner.messages.pop_front())
        })
    }
}
