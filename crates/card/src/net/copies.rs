//! The copy engine of a card: moves what descriptors in BAR0 say, inside the card and between cards. Of two
//! cards the one with the descriptor is the initiator; no host takes part.

use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use millstream_rdma::memory::{RemoteAddress, RemoteMemory, Rkey, Sge};
use millstream_rdma::queue::{Part, SendList, Signal};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, Prepared, QueuePair, RcOptions, Region, Status,
    WrId, connect,
};
use millstream_shm::futex;

use super::{Greeting, Visit};
use crate::command::{Cause, Fault, nanos};
use crate::engine::Idle;
use crate::hardware::Hardware;
use crate::kernel::outside;
use crate::memory::{Memory, Span};
use crate::region::codes::{MessageKind, PeerState};
use crate::region::copy::{Copy, CopyOperation, IN_DMA_WINDOW, RawCopy};
use crate::region::worker::{News, Outlet};
use crate::registers::{COPY_RING, COPY_SLOTS, MAX_BANKS, MAX_PEERS, PEER_BYTES, PEER_TABLE};

/// A long copy travels in pieces, so that a card that is taken away stops soon. Not smaller: what is copied at once by
/// a processor goes past its caches only if it is larger than they are.
const PIECE: u64 = 16 << 20;

/// Pieces of a copy, or copies of a list, under way.
const DEPTH: u32 = COPY_SLOTS as u32;

/// Longest time without work after which the engine sleeps, even on a card that never does: what that is for are
/// kernels, and each thread that spins takes a processor from them.
const LONGEST_SPIN: Duration = Duration::from_millis(1);

/// Time to reach another card.
const REACH: Duration = Duration::from_secs(5);

/// What the rest of the card wants of the engine.
#[derive(Debug, Default)]
pub(crate) struct CopyDesk {
    attention: AtomicU32,
    /// Nothing may begin: what stands in the ring is of a lease that has ended.
    held: AtomicBool,
    /// Forget all peers and the ring; cleared when done.
    reset: AtomicBool,
    /// Something was done since the latest reset.
    used: AtomicBool,
}

impl CopyDesk {
    pub(crate) fn nudge(&self) {
        self.attention.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.attention);
    }

    /// From here on nothing begins, until [`CopyDesk::go_on`]. True if there is nothing to forget.
    pub(crate) fn start_reset(&self) -> bool {
        self.held.store(true, Ordering::SeqCst);
        // Either this sees that the engine began something, or the engine sees that it may not.
        if !self.used.load(Ordering::SeqCst) {
            return true;
        }
        self.reset.store(true, Ordering::SeqCst);
        self.nudge();
        false
    }

    pub(crate) fn is_reset(&self) -> bool {
        !self.reset.load(Ordering::SeqCst)
    }

    /// The registers are clear: what stands there from now on is of the next lease.
    pub(crate) fn go_on(&self) {
        self.held.store(false, Ordering::SeqCst);
    }

    /// Whether something may begin.
    fn begin(&self) -> bool {
        self.used.store(true, Ordering::SeqCst);
        !self.held.load(Ordering::SeqCst)
    }
}

struct Peer {
    pair: QueuePair,
    /// Keeps the other card from taking us for dead.
    _stream: TcpStream,
}

type Reached = (usize, u64, Result<Peer, Cause>);

/// The copy engine.
pub(crate) struct Copies {
    hardware: Arc<Hardware>,
    desk: Arc<CopyDesk>,
    outlet: Arc<dyn Outlet>,
    stop: Arc<AtomicBool>,
    spin: Duration,
    heartbeat: Duration,
    memory_bytes: u64,
    /// Nothing on a card without a network.
    net: Option<Net>,
    consumer: u64,
    completed: u64,
    failed: u64,
    bytes: u64,
    busy_ns: u64,
    peer_command: u64,
    /// Descriptors that are carried out together.
    batch: Vec<Copy>,
}

struct Net {
    device: Device,
    queue: CompletionQueue,
    list: SendList,
    /// Card memory for this engine alone: no peer has a key to it.
    memory: Region,
    /// Which of the card's memories that is.
    memory_generation: u32,
    peers: [Option<Peer>; MAX_PEERS],
    reached: (Sender<Reached>, Receiver<Reached>),
    /// Grows with each reset, so that who was reached for an earlier lease is dropped.
    generation: u64,
}

impl Copies {
    pub(crate) fn new(
        hardware: Arc<Hardware>,
        desk: Arc<CopyDesk>,
        outlet: Arc<dyn Outlet>,
        stop: Arc<AtomicBool>,
        idle: Idle,
        device: Option<&Device>,
    ) -> Result<Copies, super::port::PortError> {
        let net = match device {
            None => None,
            Some(device) => {
                let generation = hardware.generation();
                Some(Net {
                    device: device.clone(),
                    queue: CompletionQueue::new(device, DEPTH * MAX_PEERS as u32)?,
                    list: SendList::new(COPY_SLOTS, COPY_SLOTS),
                    memory: hardware.memory().backing().register(device, Access::LOCAL_WRITE)?,
                    memory_generation: generation,
                    peers: Default::default(),
                    reached: channel(),
                    generation: 0,
                })
            }
        };
        Ok(Copies {
            memory_bytes: hardware.memory().size(),
            hardware,
            desk,
            outlet,
            stop,
            spin: idle.spin.min(LONGEST_SPIN),
            heartbeat: idle.heartbeat,
            net,
            consumer: 0,
            completed: 0,
            failed: 0,
            bytes: 0,
            busy_ns: 0,
            peer_command: 0,
            batch: Vec::with_capacity(COPY_SLOTS),
        })
    }

    /// Serves until the card stops.
    pub(crate) fn serve(&mut self) {
        let hardware = self.hardware.clone();
        let watching = hardware.registers.copy_watching();
        while !self.stop.load(Ordering::Relaxed) {
            watching.store(1, Ordering::Relaxed);
            self.work();
            // Who writes `copy_producer` looks at this word afterwards, we do it the other way round: one of the two
            // sees the other.
            watching.store(0, Ordering::SeqCst);
            let seen = self.desk.attention.load(Ordering::SeqCst);
            if !self.desk.reset.load(Ordering::SeqCst) && !self.is_rung() {
                let _ = futex::wait(&self.desk.attention, seen, self.heartbeat);
            }
        }
    }

    /// Works until there has been nothing to do for a while.
    fn work(&mut self) {
        let mut latest_work = None;
        while !self.stop.load(Ordering::Relaxed) {
            if self.desk.reset.load(Ordering::SeqCst) {
                self.reset();
            }
            if self.step() {
                latest_work = Some(Instant::now());
            } else if latest_work.is_some_and(|at| at.elapsed() < self.spin) {
                std::hint::spin_loop();
            } else {
                return;
            }
        }
    }

    /// Whether there is something that may begin, or a peer has been reached.
    fn is_rung(&mut self) -> bool {
        self.note_reached();
        let registers = &self.hardware.registers;
        let command = registers.peer_command().load(Ordering::SeqCst);
        let producer = registers.copy_producer().load(Ordering::SeqCst);
        (command != self.peer_command || producer != self.consumer) && !self.desk.held.load(Ordering::SeqCst)
    }

    fn reset(&mut self) {
        if let Some(net) = &mut self.net {
            net.peers = Default::default();
            net.generation += 1;
            while let Ok(dropped) = net.reached.1.try_recv() {
                drop(dropped);
            }
        }
        (self.consumer, self.completed, self.peer_command) = (0, 0, 0);
        let registers = &self.hardware.registers;
        registers.copy_consumer().store(0, Ordering::Relaxed);
        registers.copy_completed().store(0, Ordering::Relaxed);
        for peer in 0..MAX_PEERS {
            registers.peer_state(peer).store(PeerState::None as u32, Ordering::Relaxed);
            registers.peer_cause(peer).store(0, Ordering::Relaxed);
        }
        for slot in 0..COPY_SLOTS {
            registers.copy_cause(slot).store(0, Ordering::Relaxed);
            registers.copy_detail(slot).store(0, Ordering::Relaxed);
        }
        self.desk.used.store(false, Ordering::SeqCst);
        self.desk.reset.store(false, Ordering::SeqCst);
    }

    /// Does the next piece of work; false if there is none.
    fn step(&mut self) -> bool {
        self.note_reached();
        let registers = &self.hardware.registers;
        let command = registers.peer_command().load(Ordering::Acquire);
        let producer = registers.copy_producer().load(Ordering::Acquire);
        if command != self.peer_command {
            if !self.desk.begin() {
                return false;
            }
            self.peer_command = command;
            self.reach(command);
            return true;
        }
        if producer == self.consumer {
            return false;
        }
        if !self.desk.begin() {
            return false;
        }
        if producer.wrapping_sub(self.consumer) > COPY_SLOTS as u64 {
            let fault = Fault::new(Cause::CopyRingOverrun, producer);
            self.consumer = producer;
            self.hardware.registers.copy_consumer().store(producer, Ordering::Release);
            self.tell_fault(0, self.completed, fault);
            return true;
        }
        let started = Instant::now();
        self.gather(producer);
        match self.batch.len() {
            0 | 1 => self.carry_out_one(started),
            _ => self.carry_out_batch(started),
        }
        true
    }

    /// Reads the descriptor at `index` of the ring's use.
    fn descriptor(&self, index: u64) -> Result<Copy, Fault> {
        let mut bytes = [0; RawCopy::BYTES];
        self.hardware.registers.read_bytes(COPY_RING + RawCopy::BYTES * slot_of(index), &mut bytes);
        Copy::from_bytes(&bytes, self.memory_bytes, self.hardware.dma.size())
    }

    /// Takes the descriptors that can be given to the device in one list: of one direction and one window of one peer, no
    /// more bytes than a piece, and none behind one whose end somebody wants to hear of.
    fn gather(&mut self, producer: u64) {
        self.batch.clear();
        let mut bytes = 0;
        for index in self.consumer..producer {
            let Ok(copy) = self.descriptor(index) else { return };
            bytes += copy.local.len;
            let together = copy.operation != CopyOperation::Within
                && copy.local.offset & IN_DMA_WINDOW == 0
                // What goes on behind the last address of all is for the peer's device to refuse.
                && copy.remote.checked_add(copy.local.len).is_some()
                && self.batch.first().is_none_or(|first| {
                    (first.operation, first.peer, first.key) == (copy.operation, copy.peer, copy.key)
                })
                && bytes <= PIECE;
            if !together {
                return;
            }
            self.batch.push(copy);
            if copy.notify {
                return;
            }
        }
    }

    /// Carries out the next descriptor.
    fn carry_out_one(&mut self, started: Instant) {
        let index = self.consumer;
        let copy = self.descriptor(index);
        self.consumer += 1;
        self.hardware.registers.copy_consumer().store(self.consumer, Ordering::Release);
        let outcome = copy.and_then(|copy| self.copy(&copy).map(|()| copy.local.len));
        self.note_busy(started);
        self.settle(index..index + 1, |_| (outcome, copy.is_ok_and(|copy| copy.notify)));
    }

    /// Carries out the descriptors that were gathered.
    fn carry_out_batch(&mut self, started: Instant) {
        let first = self.consumer;
        let batch = std::mem::take(&mut self.batch);
        self.consumer += batch.len() as u64;
        self.hardware.registers.copy_consumer().store(self.consumer, Ordering::Release);
        let (done, fault) = self.between(&batch);
        self.note_busy(started);
        self.settle(first..self.consumer, |index| {
            let at = (index - first) as usize;
            let outcome = match fault {
                Some(fault) if at == done => Err(fault),
                // Its peer is gone with the one that failed.
                Some(_) if at > done => Err(Fault::new(Cause::CopyPeer, batch[at].peer.into())),
                _ => Ok(batch[at].local.len),
            };
            (outcome, batch[at].notify)
        });
        self.batch = batch;
    }

    fn note_busy(&mut self, started: Instant) {
        self.busy_ns = self.busy_ns.saturating_add(nanos(started.elapsed()));
        self.hardware.registers.copy_busy_ns().store(self.busy_ns, Ordering::Relaxed);
    }

    /// Publishes the ends of copies, all at once: each store wants the line back that a node has just read. Then tells of
    /// those for which that was asked, or that failed. Of each, its bytes or what was wrong, and whether it was asked for.
    fn settle(&mut self, ended: Range<u64>, outcome: impl Fn(u64) -> (Result<u64, Fault>, bool)) {
        let registers = &self.hardware.registers;
        let before = self.completed;
        for index in ended.clone() {
            let (slot, (outcome, _)) = (slot_of(index), outcome(index));
            let (cause, detail) = outcome.err().map_or((0, 0), |fault| (fault.cause.code(), fault.detail));
            registers.copy_cause(slot).store(cause, Ordering::Relaxed);
            registers.copy_detail(slot).store(detail, Ordering::Relaxed);
            self.completed += 1;
            self.bytes += outcome.unwrap_or(0);
            self.failed += u64::from(outcome.is_err());
        }
        registers.copy_bytes().store(self.bytes, Ordering::Relaxed);
        registers.copies_failed().store(self.failed, Ordering::Relaxed);
        registers.copy_completed().store(self.completed, Ordering::Release);
        for (index, sequence) in ended.zip(before + 1..) {
            match outcome(index) {
                (Ok(_), false) => {}
                (Ok(_), true) => self.outlet.tell(News {
                    region: slot_of(index) as u32,
                    ..News::of_card(MessageKind::CopyDone, sequence, [sequence, 0, 0, 0])
                }),
                (Err(fault), _) => self.tell_fault(slot_of(index), sequence, fault),
            }
        }
    }

    fn tell_fault(&self, slot: usize, sequence: u64, fault: Fault) {
        self.outlet.tell(News {
            kind: MessageKind::CopyFault,
            region: slot as u32,
            cause: Some(fault.cause),
            sequence,
            values: [slot as u64, fault.detail, 0, 0],
        });
    }

    fn copy(&mut self, copy: &Copy) -> Result<(), Fault> {
        match copy.operation {
            CopyOperation::Within => self.within(copy),
            CopyOperation::Write | CopyOperation::Read => match self.between(&[*copy]) {
                (_, Some(fault)) => Err(fault),
                (_, None) => Ok(()),
            },
        }
    }

    fn within(&mut self, copy: &Copy) -> Result<(), Fault> {
        let Copy { local, remote, .. } = *copy;
        let refused = |at: u64| {
            move |error| match outside(Cause::CopyOutsideMemory)(error) {
                fault if fault.cause == Cause::CopyOutsideMemory => Fault::new(fault.cause, at),
                fault => fault,
            }
        };
        let (memory, hardware) = (self.hardware.memory(), &*self.hardware);
        let window = |at: u64| -> (&Memory, u64) {
            if at & IN_DMA_WINDOW == 0 { (&memory, at) } else { (&hardware.dma, at & !IN_DMA_WINDOW) }
        };
        let ((from, start), (to, end)) = (window(local.offset), window(remote));
        if std::ptr::eq(from, to) {
            from.copy_within(Span::new(start, local.len), end).map_err(refused(local.offset))?;
        } else {
            /// Small enough to stay in a cache on the way.
            const STEP: u64 = 256 << 10;
            let mut piece = vec![0; local.len.min(STEP) as usize];
            for at in (0..local.len).step_by(STEP as usize) {
                let len = (local.len - at).min(STEP) as usize;
                from.read(start + at, &mut piece[..len]).map_err(refused(local.offset))?;
                to.write(end + at, &piece[..len]).map_err(refused(remote))?;
            }
        }
        self.count(std::iter::once(local), true);
        self.count(std::iter::once(Span::new(remote, local.len)), false);
        Ok(())
    }

    /// Makes copies with one peer: several in one list, or one of any length. Says how many were made, and what was
    /// wrong with the next one.
    fn between(&mut self, copies: &[Copy]) -> (usize, Option<Fault>) {
        let peer = copies[0].peer;
        let no_peer = Fault::new(Cause::CopyPeer, peer.into());
        if copies[0].local.offset & IN_DMA_WINDOW != 0 {
            return (0, Some(Fault::new(Cause::CopyOutsideMemory, copies[0].local.offset)));
        }
        let Some(net) = &mut self.net else { return (0, Some(no_peer)) };
        let generation = self.hardware.generation();
        if net.memory_generation != generation {
            let memory = self.hardware.memory().backing().register(&net.device, Access::LOCAL_WRITE);
            let Ok(memory) = memory else { return (0, Some(Fault::new(Cause::WindowRefused, 0))) };
            net.memory = memory;
            net.memory_generation = generation;
        }
        let Some(place) = net.peers.get_mut(peer as usize) else { return (0, Some(no_peer)) };
        let Some(connected) = place else { return (0, Some(no_peer)) };
        let interrupted = || self.stop.load(Ordering::Relaxed) || self.desk.reset.load(Ordering::SeqCst);
        let (done, fault) = match copies {
            [copy] => {
                let outcome = transfer(&net.queue, &net.memory, connected, copy, interrupted);
                (usize::from(outcome.is_ok()), outcome.err())
            }
            _ => transfer_list(&net.queue, &mut net.list, &net.memory, connected, copies, interrupted),
        };
        if let Some(fault) = fault {
            // A queue pair with an error takes nothing any more (IBTA volume 1, 10.3.1).
            *place = None;
            let registers = &self.hardware.registers;
            registers.peer_cause(peer as usize).store(fault.cause.code(), Ordering::Relaxed);
            registers.peer_state(peer as usize).store(PeerState::Failed as u32, Ordering::Release);
        }
        let made = copies[..done].iter().map(|copy| copy.local);
        self.count(made, copies[0].operation == CopyOperation::Write);
        (done, fault)
    }

    /// Counts bytes by bank, or those of the DMA window if the first range lies there.
    fn count(&self, spans: impl Iterator<Item = Span>, read: bool) {
        let registers = &self.hardware.registers;
        let mut spans = spans.peekable();
        if spans.peek().is_some_and(|span| span.offset & IN_DMA_WINDOW != 0) {
            let counter = if read { registers.dma_read() } else { registers.dma_written() };
            counter.fetch_add(spans.map(|span| span.len).sum(), Ordering::Relaxed);
            return;
        }
        add_by_bank(spans, registers.bank_bytes().load(Ordering::Relaxed), |bank, bytes| {
            let counter = if read { registers.bank_read(bank) } else { registers.bank_written(bank) };
            counter.fetch_add(bytes, Ordering::Relaxed);
        });
    }

    /// Connects the peer that a command names, on a thread of its own.
    fn reach(&mut self, command: u64) {
        let index = (command & 0xff) as usize;
        let registers = self.hardware.registers.clone();
        let bad = |cause: Cause| News {
            kind: MessageKind::PeerFault,
            region: index as u32,
            cause: Some(cause),
            sequence: command,
            values: [index as u64, 0, 0, 0],
        };
        if index >= MAX_PEERS {
            return self.outlet.tell(bad(Cause::CopyPeer));
        }
        let mut text = [0; PEER_BYTES];
        registers.read_bytes(PEER_TABLE + index * PEER_BYTES, &mut text);
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(PEER_BYTES);
        let address = std::str::from_utf8(&text[..end]).ok().filter(|text| text.contains(':'));
        let (Some(address), Some(net)) = (address, &mut self.net) else {
            registers.peer_cause(index).store(Cause::PeerAddress.code(), Ordering::Relaxed);
            registers.peer_state(index).store(PeerState::Failed as u32, Ordering::Release);
            return self.outlet.tell(bad(Cause::PeerAddress));
        };
        net.peers[index] = None;
        registers.peer_state(index).store(PeerState::Connecting as u32, Ordering::Release);
        let (address, device, queue) = (address.to_owned(), net.device.clone(), net.queue.clone());
        let (reached, desk, generation) = (net.reached.0.clone(), self.desk.clone(), net.generation);
        let spawned = std::thread::Builder::new().name(format!("peer {index}")).spawn(move || {
            let peer = reach(&device, &queue, &address);
            let _ = reached.send((index, generation, peer.ok_or(Cause::PeerUnreachable)));
            desk.nudge();
        });
        if spawned.is_err() {
            registers.peer_state(index).store(PeerState::Failed as u32, Ordering::Release);
            self.outlet.tell(bad(Cause::PeerUnreachable));
        }
    }

    fn note_reached(&mut self) {
        let Some(net) = &mut self.net else { return };
        while let Ok((index, generation, outcome)) = net.reached.1.try_recv() {
            if generation != net.generation {
                continue;
            }
            let registers = &self.hardware.registers;
            let (kind, state, cause) = match &outcome {
                Ok(_) => (MessageKind::PeerConnected, PeerState::Connected, None),
                Err(cause) => (MessageKind::PeerFault, PeerState::Failed, Some(*cause)),
            };
            net.peers[index] = outcome.ok();
            registers.peer_cause(index).store(cause.map_or(0, Cause::code), Ordering::Relaxed);
            registers.peer_state(index).store(state as u32, Ordering::Release);
            let news = News::of_card(kind, self.peer_command, [index as u64, 0, 0, 0]);
            self.outlet.tell(News { region: index as u32, cause, ..news });
        }
    }
}

/// The parts of a range that lie in each bank, with their lengths.
pub(crate) fn by_bank(span: Span, bank_bytes: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = span.offset.saturating_add(span.len);
    let mut at = span.offset;
    std::iter::from_fn(move || {
        let bank = at / bank_bytes;
        if at >= end || bank >= MAX_BANKS.into() {
            return None;
        }
        let part = (end - at).min((bank + 1) * bank_bytes - at);
        at += part;
        Some((bank as usize, part))
    })
}

/// Adds up the bytes of ranges by the bank that they lie in. Most lie in the bank of the one before, which saves divisions
/// and additions.
pub(crate) fn add_by_bank(
    spans: impl Iterator<Item = Span>,
    bank_bytes: u64,
    mut add: impl FnMut(usize, u64),
) {
    let (mut bank, mut inside, mut bytes) = (usize::MAX, 0..0, 0);
    for span in spans {
        if inside.contains(&span.offset) && inside.end - span.offset >= span.len {
            bytes += span.len;
            continue;
        }
        for (next, part) in by_bank(span, bank_bytes) {
            if next != bank {
                if bytes > 0 {
                    add(bank, bytes);
                }
                (bank, bytes) = (next, 0);
                inside = next as u64 * bank_bytes..(next as u64 + 1) * bank_bytes;
            }
            bytes += part;
        }
    }
    if bytes > 0 {
        add(bank, bytes);
    }
}

fn reach(device: &Device, queue: &CompletionQueue, address: &str) -> Option<Peer> {
    let deadline = Deadline::after(REACH);
    let options = RcOptions { send_depth: DEPTH, recv_depth: 1, ..RcOptions::default() };
    let mut stream = connect::dial(address, deadline).ok()?;
    let prepared = Prepared::new(device, queue, queue, &options).ok()?;
    let connected = prepared.connect(&mut stream, &Visit::of(true).to_bytes(), deadline).ok()?;
    Greeting::from_extra(&connected.extra)?;
    Some(Peer { pair: connected.pair, _stream: stream })
}

/// Where in the ring a descriptor stands.
fn slot_of(index: u64) -> usize {
    (index % COPY_SLOTS as u64) as usize
}

/// Where a copy goes on from `at`, for the device.
fn places(memory: &Region, copy: &Copy, at: u64, len: u64) -> Result<(Sge, RemoteAddress), Fault> {
    let outside = Fault::new(Cause::CopyOutsideMemory, copy.local.offset);
    let here = memory.sge(copy.local.offset + at, len as u32).map_err(|_| outside)?;
    Ok((here, RemoteAddress { addr: copy.remote.wrapping_add(at), rkey: Rkey(copy.key) }))
}

/// What a request that failed says of the copy.
fn fault_of(status: Status) -> Fault {
    match status {
        Status::RemoteAccessError | Status::RemoteInvalidRequestError => Fault::new(Cause::CopyRefused, 0),
        _ => LOST,
    }
}

const LOST: Fault = Fault::new(Cause::CopyPeerLost, 0);
const INTERRUPTED: Fault = Fault::new(Cause::Interrupted, 0);

/// Moves the pieces of a copy, several at a time.
fn transfer(
    queue: &CompletionQueue,
    memory: &Region,
    peer: &Peer,
    copy: &Copy,
    interrupted: impl Fn() -> bool,
) -> Result<(), Fault> {
    let (mut posted, mut under_way) = (0, 0);
    let mut buffer = [Completion::EMPTY; DEPTH as usize];
    let mut rounds = 0u32;
    while posted < copy.local.len || under_way > 0 {
        while posted < copy.local.len && under_way < DEPTH {
            if interrupted() {
                return Err(INTERRUPTED);
            }
            let len = (copy.local.len - posted).min(PIECE);
            let (here, there) = places(memory, copy, posted, len)?;
            let post = match copy.operation {
                CopyOperation::Write => peer.pair.post_write(&[here], there, Signal::Yes, WrId(0)),
                CopyOperation::Read | CopyOperation::Within => {
                    peer.pair.post_read(&[here], there, Signal::Yes, WrId(0))
                }
            };
            post.map_err(|_| LOST)?;
            posted += len;
            under_way += 1;
        }
        for completion in queue.poll(&mut buffer).map_err(|_| LOST)? {
            // What a peer that failed earlier still had under way is flushed.
            if completion.qpn() != peer.pair.number() {
                continue;
            }
            under_way -= 1;
            if !completion.is_success() {
                return Err(fault_of(completion.status()));
            }
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(256) {
            std::thread::yield_now();
            if interrupted() {
                return Err(INTERRUPTED);
            }
        }
    }
    Ok(())
}

/// Makes several copies, each no longer than a piece, by one list of requests: of one direction, and with one window. Says
/// how many were made, and what was wrong with the next one.
fn transfer_list(
    queue: &CompletionQueue,
    list: &mut SendList,
    memory: &Region,
    peer: &Peer,
    copies: &[Copy],
    interrupted: impl Fn() -> bool,
) -> (usize, Option<Fault>) {
    list.clear();
    let Copy { operation, key, .. } = copies[0];
    // Where the peer's window lies is for its device to check.
    let there = RemoteMemory { addr: 0, rkey: Rkey(key), len: u64::MAX };
    let parts = copies.iter().map(|copy| Part {
        local: copy.local.offset,
        remote: copy.remote,
        length: copy.local.len as u32,
    });
    let added = match operation {
        CopyOperation::Write => list.write_parts(memory, &there, parts),
        CopyOperation::Read | CopyOperation::Within => list.read_parts(memory, &there, parts),
    };
    if added.is_err() {
        return (0, Some(Fault::new(Cause::CopyOutsideMemory, copies[0].local.offset)));
    }
    debug_assert_eq!(added, Ok(copies.len()), "a ring has no more descriptors than the list has room for");
    list.signal_last(WrId(copies.len() as u64 - 1));
    if peer.pair.post_list(list).is_err() {
        return (0, Some(LOST));
    }
    let mut buffer = [Completion::EMPTY; 4];
    let mut rounds = 0u32;
    loop {
        let Ok(completions) = queue.poll(&mut buffer) else { return (0, Some(LOST)) };
        for completion in completions {
            if completion.qpn() != peer.pair.number() {
                continue;
            }
            // Requests complete in order: those before it have been made.
            let index = completion.wr_id().0 as usize;
            if !completion.is_success() {
                return (index, Some(fault_of(completion.status())));
            }
            return (copies.len(), None);
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(256) {
            std::thread::yield_now();
            if interrupted() {
                return (0, Some(INTERRUPTED));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_are_added_to_the_banks_that_they_lie_in(
            spans in prop::collection::vec((0u64..1000, 0u64..500), 0..30), bank_bytes in 1u64..300,
        ) {
            let mut expected = [0; MAX_BANKS as usize];
            for at in spans.iter().flat_map(|(offset, len)| *offset..offset + len) {
                if let Some(count) = expected.get_mut((at / bank_bytes) as usize) {
                    *count += 1;
                }
            }
            let mut counted = [0; MAX_BANKS as usize];
            let spans = spans.iter().map(|(offset, len)| Span::new(*offset, *len));
            add_by_bank(spans, bank_bytes, |bank, bytes| counted[bank] += bytes);
            prop_assert_eq!(counted, expected);
        }
    }
}
