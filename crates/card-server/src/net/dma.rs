//! The copy engine of a card: moves what descriptors in BAR0 say, inside the card and between cards. Of two
//! cards the one with the descriptor is the initiator; no host takes part.

use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use millstream_rdma::Rkey;
use millstream_rdma::memory::{RemoteAddress, RemoteMemory, Sge};
use millstream_rdma::queue::{Segment, SendList, Signal};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RcOptions, Region,
    Status, WrId, connect,
};
use millstream_shm::futex;

use super::{Greeting, Visit};
use crate::command::{Cause, Fault, nanos};
use crate::engine::Idle;
use crate::hardware::Hardware;
use crate::kernel::outside;
use crate::memory::{Memory, Span};
use crate::region::codes::{MessageKind, PeerState};
use crate::region::copy::{COPY_NOTIFY, Copy, CopyOperation, IN_DMA_WINDOW, RawCopy};
use crate::region::worker::{News, Outlet};
use crate::registers::{COPY_RING, COPY_SLOTS, MAX_BANKS, MAX_PEERS, PEER_BYTES, PEER_TABLE, at};

/// A long copy travels in pieces, so that a card that is taken away stops soon. Not smaller: what is copied at once by
/// a processor goes past its caches only if it is larger than they are.
const PIECE: u64 = 16 << 20;

/// Pieces of a copy, or copies of a list, under way.
const DEPTH: u32 = COPY_SLOTS as u32;

/// Descriptors that are brought here while the end of those before them is told of: as many as nodes write together.
const EXPECTED: u64 = COPY_SLOTS as u64 / 2;

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
    /// Something was done since the latest reset. Only the engine sets it, and takes it back.
    used: AtomicBool,
    /// Somebody has been reached, or could not be.
    reached: AtomicBool,
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
        // Not stored again where it is set: such a store waits for all those before it, the bytes of copies among them.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::SeqCst);
        }
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
    /// A value of `copy_producer` that cannot be, and waits to be corrected; that of `consumer` if there is none.
    refused: u64,
    completed: u64,
    failed: u64,
    bytes: u64,
    busy_ns: u64,
    peer_command: u64,
    /// Descriptors that are carried out together.
    batch: Vec<Copy>,
    /// Some slot says why a copy failed.
    marked: bool,
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
            refused: 0,
            completed: 0,
            failed: 0,
            bytes: 0,
            busy_ns: 0,
            peer_command: 0,
            batch: Vec::with_capacity(COPY_SLOTS),
            marked: false,
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
            if let Some(done) = self.step() {
                latest_work = Some(done);
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
        (command != self.peer_command || self.is_more(producer)) && !self.desk.held.load(Ordering::SeqCst)
    }

    fn reset(&mut self) {
        if let Some(net) = &mut self.net {
            net.peers = Default::default();
            net.generation += 1;
            while let Ok(dropped) = net.reached.1.try_recv() {
                drop(dropped);
            }
        }
        (self.consumer, self.refused, self.completed, self.peer_command) = (0, 0, 0, 0);
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
        self.marked = false;
        self.desk.used.store(false, Ordering::SeqCst);
        self.desk.reset.store(false, Ordering::SeqCst);
    }

    /// Does the next piece of work, if there is one. Returns when that was done.
    fn step(&mut self) -> Option<Instant> {
        self.note_reached();
        let registers = &self.hardware.registers;
        let command = registers.peer_command().load(Ordering::Acquire);
        let producer = registers.copy_producer().load(Ordering::Acquire);
        if command != self.peer_command {
            if !self.desk.begin() {
                return None;
            }
            self.peer_command = command;
            self.reach(command);
            return Some(Instant::now());
        }
        if !self.is_more(producer) || !self.desk.begin() {
            return None;
        }
        if producer.wrapping_sub(self.consumer) > COPY_SLOTS as u64 {
            self.refused = producer;
            self.tell_fault(0, self.completed, Fault::new(Cause::CopyRingOverrun, producer));
            return Some(Instant::now());
        }
        let done = self.carry_out(producer);
        self.refused = self.consumer;
        Some(done)
    }

    /// Whether `copy_producer` tells of descriptors, or of what has not been refused yet.
    fn is_more(&self, producer: u64) -> bool {
        producer != self.consumer && producer != self.refused
    }

    /// Carries out the next descriptor, and with it those behind it that can be given to the device in the same list.
    /// Returns when that was done.
    fn carry_out(&mut self, producer: u64) -> Instant {
        let started = Instant::now();
        let mut batch = std::mem::take(&mut self.batch);
        let gathered = self.gather(producer, &mut batch);
        let first = self.consumer;
        self.consumer += batch.len().max(1) as u64;
        self.hardware.registers.copy_consumer().store(self.consumer, Ordering::Release);
        let (made, fault) = match (gathered, batch.as_slice()) {
            (Err(fault), _) => (0, Some(fault)),
            (Ok(()), [copy]) if copy.operation == CopyOperation::Within => {
                let fault = self.within(copy).err();
                (usize::from(fault.is_none()), fault)
            }
            (Ok(()), batch) => self.between(batch),
        };
        let registers = &self.hardware.registers;
        // A node has written these meanwhile, or is about to; they come here while the end is told of.
        registers.expect_load(at::copy_producer);
        for index in (self.consumer..self.consumer + EXPECTED).step_by(64 / RawCopy::BYTES) {
            registers.expect_load(place_of(index));
        }
        let now = Instant::now();
        self.busy_ns = self.busy_ns.saturating_add(nanos(now - started));
        registers.copy_busy_ns().store(self.busy_ns, Ordering::Relaxed);
        let (made, behind) = batch.split_at(made);
        let bytes = made.iter().map(|copy| copy.local.len).sum();
        // The peer of those behind one that failed is gone with it.
        let gone = behind.iter().skip(1).map(|copy| Fault::new(Cause::CopyPeer, copy.peer.into()));
        let faults: Vec<Fault> = fault.into_iter().chain(gone).collect();
        self.settle(first..self.consumer, bytes, &faults, batch.last().is_some_and(|last| last.notify));
        self.batch = batch;
        now
    }

    /// Reads the next descriptor, and those behind it that can be given to the device in one list with it: of one
    /// direction and one window of one peer, no more bytes than a piece, and none behind one whose end somebody wants to
    /// hear of.
    fn gather(&self, producer: u64, batch: &mut Vec<Copy>) -> Result<(), Fault> {
        let registers = &self.hardware.registers;
        let read = |index| {
            let mut raw = [0; RawCopy::BYTES];
            registers.read_bytes(place_of(index), &mut raw);
            RawCopy::from_bytes(&raw)
        };
        batch.clear();
        let raw = read(self.consumer);
        let first = Copy::from_raw(raw, self.memory_bytes, self.hardware.dma.size())?;
        batch.push(first);
        // What goes on behind the last address of all is for the peer's device to refuse, alone.
        let goes_on = |raw: &RawCopy| raw.remote.checked_add(raw.bytes).is_none();
        if first.operation == CopyOperation::Within
            || first.local.offset & IN_DMA_WINDOW != 0
            || goes_on(&raw)
        {
            return Ok(());
        }
        let (memory_bytes, mut bytes) = (self.memory_bytes, first.local.len);
        let mut notify = first.notify;
        for index in self.consumer + 1..producer {
            let raw = read(index);
            let local = Span::new(raw.local, raw.bytes);
            if notify || !raw.goes_with(&first) || !local.fits(memory_bytes) || goes_on(&raw) {
                return Ok(());
            }
            bytes += raw.bytes;
            if bytes > PIECE {
                return Ok(());
            }
            notify = raw.flags & COPY_NOTIFY != 0;
            batch.push(Copy { local, remote: raw.remote, notify, ..first });
        }
        Ok(())
    }

    /// Publishes the ends of copies, all at once: each store wants the line back that a node has just read. The last ones
    /// failed, by these faults. Then tells of those, or of the last copy if that was made and it was asked for.
    fn settle(&mut self, ended: Range<u64>, bytes: u64, faults: &[Fault], notify: bool) {
        let registers = &self.hardware.registers;
        let failed_from = ended.end - faults.len() as u64;
        // Most find the slots clear, and need not store that again.
        if self.marked || !faults.is_empty() {
            self.marked = true;
            for slot in (ended.start..failed_from).map(slot_of) {
                registers.copy_cause(slot).store(0, Ordering::Relaxed);
                registers.copy_detail(slot).store(0, Ordering::Relaxed);
            }
            for (slot, fault) in (failed_from..ended.end).map(slot_of).zip(faults) {
                registers.copy_cause(slot).store(fault.cause.code(), Ordering::Relaxed);
                registers.copy_detail(slot).store(fault.detail, Ordering::Relaxed);
            }
        }
        self.completed += ended.end - ended.start;
        self.bytes += bytes;
        self.failed += faults.len() as u64;
        registers.copy_bytes().store(self.bytes, Ordering::Relaxed);
        registers.copies_failed().store(self.failed, Ordering::Relaxed);
        registers.copy_completed().store(self.completed, Ordering::Release);
        for (index, fault) in (failed_from..).zip(faults) {
            self.tell_fault(slot_of(index), self.completed - (ended.end - 1 - index), *fault);
        }
        if notify && faults.is_empty() {
            self.outlet.tell(News {
                region: slot_of(ended.end - 1) as u32,
                ..News::of_card(MessageKind::CopyDone, self.completed, [self.completed, 0, 0, 0])
            });
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
            desk.reached.store(true, Ordering::Release);
            desk.nudge();
        });
        if spawned.is_err() {
            registers.peer_state(index).store(PeerState::Failed as u32, Ordering::Release);
            self.outlet.tell(bad(Cause::PeerUnreachable));
        }
    }

    fn note_reached(&mut self) {
        let Some(net) = &mut self.net else { return };
        // Only looked at, in most rounds: a swap waits for all stores before it.
        if !self.desk.reached.load(Ordering::Relaxed) || !self.desk.reached.swap(false, Ordering::Acquire) {
            return;
        }
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
    let prepared = PreparedQueuePair::new(device, queue, queue, &options).ok()?;
    let connected = prepared.connect(&mut stream, &Visit::of(true).to_bytes(), deadline).ok()?;
    Greeting::from_extra(&connected.private_data)?;
    Some(Peer { pair: connected.pair, _stream: stream })
}

/// Where in the ring a descriptor stands.
fn slot_of(index: u64) -> usize {
    (index % COPY_SLOTS as u64) as usize
}

/// Where in BAR0 that is.
fn place_of(index: u64) -> usize {
    COPY_RING + RawCopy::BYTES * slot_of(index)
}

/// Where a copy goes on from `at`, for the device.
fn places(memory: &Region, copy: &Copy, at: u64, len: u64) -> Result<(Sge, RemoteAddress), Fault> {
    let outside = Fault::new(Cause::CopyOutsideMemory, copy.local.offset);
    let here = memory.sge(copy.local.offset + at, len as u32).map_err(|_| outside)?;
    Ok((here, RemoteAddress { addr: copy.remote.wrapping_add(at), rkey: Rkey::new(copy.key) }))
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
    let mut buffer = [Completion::EMPTY; 4];
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
            if completion.qpn() != peer.pair.qpn() {
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
    let there = RemoteMemory { addr: 0, rkey: Rkey::new(key), len: u64::MAX };
    let parts = copies.iter().map(|copy| Segment {
        local: copy.local.offset,
        remote: copy.remote,
        length: copy.local.len as u32,
    });
    let added = match operation {
        CopyOperation::Write => list.write_segments(memory, &there, parts),
        CopyOperation::Read | CopyOperation::Within => list.read_segments(memory, &there, parts),
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
            if completion.qpn() != peer.pair.qpn() {
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
