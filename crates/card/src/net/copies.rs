//! The copy engine of a card: moves what descriptors in BAR0 say, inside the card and between cards. Of two
//! cards the one with the descriptor is the initiator; no host takes part.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use millstream_rdma::memory::{RemoteAddress, Rkey};
use millstream_rdma::queue::Signal;
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, Prepared, QueuePair, RcOptions, Region, Status,
    WrId, connect,
};
use millstream_shm::futex;

use super::{Greeting, Visit};
use crate::command::{Cause, Fault, nanos};
use crate::hardware::Hardware;
use crate::kernel::outside;
use crate::memory::{Memory, Span};
use crate::region::codes::{MessageKind, PeerState};
use crate::region::copy::{Copy, CopyOperation, IN_DMA_WINDOW};
use crate::region::worker::{News, Outlet};
use crate::registers::{COPY_RING, COPY_SLOTS, MAX_BANKS, MAX_PEERS, PEER_BYTES, PEER_TABLE};

/// A long copy travels in pieces, so that a card that is taken away stops soon. Not smaller: what is copied at once by
/// a processor goes past its caches only if it is larger than they are.
const PIECE: u64 = 16 << 20;

/// Pieces under way.
const DEPTH: u32 = 16;

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
    heartbeat: Duration,
    /// Nothing on a card without a network.
    net: Option<Net>,
    consumer: u64,
    completed: u64,
    failed: u64,
    bytes: u64,
    busy_ns: u64,
    peer_command: u64,
}

struct Net {
    device: Device,
    queue: CompletionQueue,
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
        heartbeat: Duration,
        device: Option<&Device>,
    ) -> Result<Copies, super::port::PortError> {
        let net = match device {
            None => None,
            Some(device) => {
                let generation = hardware.generation();
                Some(Net {
                    device: device.clone(),
                    queue: CompletionQueue::new(device, DEPTH * MAX_PEERS as u32)?,
                    memory: hardware.memory().backing().register(device, Access::LOCAL_WRITE)?,
                    memory_generation: generation,
                    peers: Default::default(),
                    reached: channel(),
                    generation: 0,
                })
            }
        };
        Ok(Copies {
            hardware,
            desk,
            outlet,
            stop,
            heartbeat,
            net,
            consumer: 0,
            completed: 0,
            failed: 0,
            bytes: 0,
            busy_ns: 0,
            peer_command: 0,
        })
    }

    /// Serves until the card stops.
    pub(crate) fn serve(&mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let seen = self.desk.attention.load(Ordering::SeqCst);
            if self.desk.reset.load(Ordering::SeqCst) {
                self.reset();
            }
            if !self.step() {
                let _ = futex::wait(&self.desk.attention, seen, self.heartbeat);
            }
        }
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
        let registers = self.hardware.registers.clone();
        let command = registers.peer_command().load(Ordering::Acquire);
        if command != self.peer_command {
            if !self.desk.begin() {
                return false;
            }
            self.peer_command = command;
            self.reach(command);
            return true;
        }
        let producer = registers.copy_producer().load(Ordering::Acquire);
        if producer == self.consumer {
            return false;
        }
        if !self.desk.begin() {
            return false;
        }
        if producer.wrapping_sub(self.consumer) > COPY_SLOTS as u64 {
            let fault = Fault::new(Cause::CopyRingOverrun, producer);
            self.consumer = producer;
            registers.copy_consumer().store(producer, Ordering::Release);
            self.tell_fault(0, fault);
            return true;
        }
        let slot = (self.consumer % COPY_SLOTS as u64) as usize;
        let mut bytes = [0; 64];
        registers.read_bytes(COPY_RING + 64 * slot, &mut bytes);
        self.consumer += 1;
        registers.copy_consumer().store(self.consumer, Ordering::Release);
        let started = Instant::now();
        let copy = Copy::from_bytes(&bytes, self.hardware.memory().size(), self.hardware.dma.size());
        let outcome = copy.and_then(|copy| self.copy(&copy).map(|()| copy.local.len));
        self.busy_ns = self.busy_ns.saturating_add(nanos(started.elapsed()));
        self.completed += 1;
        let (cause, detail) = outcome.err().map_or((0, 0), |fault| (fault.cause.code(), fault.detail));
        registers.copy_cause(slot).store(cause, Ordering::Relaxed);
        registers.copy_detail(slot).store(detail, Ordering::Relaxed);
        self.bytes += outcome.unwrap_or(0);
        registers.copy_bytes().store(self.bytes, Ordering::Relaxed);
        registers.copy_busy_ns().store(self.busy_ns, Ordering::Relaxed);
        registers.copy_completed().store(self.completed, Ordering::Release);
        match outcome {
            Ok(_) if copy.is_ok_and(|copy| copy.notify) => {
                let values = [self.completed, 0, 0, 0];
                self.outlet.tell(News {
                    region: slot as u32,
                    ..News::of_card(MessageKind::CopyDone, self.completed, values)
                });
            }
            Ok(_) => {}
            Err(fault) => {
                self.failed += 1;
                registers.copies_failed().store(self.failed, Ordering::Relaxed);
                self.tell_fault(slot, fault);
            }
        }
        true
    }

    fn tell_fault(&self, slot: usize, fault: Fault) {
        self.outlet.tell(News {
            kind: MessageKind::CopyFault,
            region: slot as u32,
            cause: Some(fault.cause),
            sequence: self.completed,
            values: [slot as u64, fault.detail, 0, 0],
        });
    }

    fn copy(&mut self, copy: &Copy) -> Result<(), Fault> {
        match copy.operation {
            CopyOperation::Within => self.within(copy),
            CopyOperation::Write | CopyOperation::Read => self.between(copy),
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
        self.count(local, true);
        self.count(Span::new(remote, local.len), false);
        Ok(())
    }

    fn between(&mut self, copy: &Copy) -> Result<(), Fault> {
        let no_peer = Fault::new(Cause::CopyPeer, copy.peer.into());
        if copy.local.offset & IN_DMA_WINDOW != 0 {
            return Err(Fault::new(Cause::CopyOutsideMemory, copy.local.offset));
        }
        let net = self.net.as_mut().ok_or(no_peer)?;
        let generation = self.hardware.generation();
        if net.memory_generation != generation {
            let memory = self.hardware.memory().backing().register(&net.device, Access::LOCAL_WRITE);
            net.memory = memory.map_err(|_| Fault::new(Cause::WindowRefused, 0))?;
            net.memory_generation = generation;
        }
        let place = net.peers.get_mut(copy.peer as usize).ok_or(no_peer)?;
        let peer = place.as_ref().ok_or(no_peer)?;
        let outcome = transfer(net.queue.clone(), &net.memory, peer, copy, || {
            self.stop.load(Ordering::Relaxed) || self.desk.reset.load(Ordering::SeqCst)
        });
        if let Err(fault) = outcome {
            // A queue pair with an error takes nothing any more (IBTA volume 1, 10.3.1).
            *place = None;
            let registers = &self.hardware.registers;
            registers.peer_cause(copy.peer as usize).store(fault.cause.code(), Ordering::Relaxed);
            registers.peer_state(copy.peer as usize).store(PeerState::Failed as u32, Ordering::Release);
        }
        outcome?;
        self.count(copy.local, copy.operation == CopyOperation::Write);
        Ok(())
    }

    /// Counts bytes by bank.
    fn count(&self, span: Span, read: bool) {
        let registers = &self.hardware.registers;
        if span.offset & IN_DMA_WINDOW != 0 {
            let counter = if read { registers.dma_read() } else { registers.dma_written() };
            counter.fetch_add(span.len, Ordering::Relaxed);
            return;
        }
        let bank_bytes = registers.bank_bytes().load(Ordering::Relaxed);
        for (bank, part) in by_bank(span, bank_bytes) {
            let counter = if read { registers.bank_read(bank) } else { registers.bank_written(bank) };
            counter.fetch_add(part, Ordering::Relaxed);
        }
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

fn reach(device: &Device, queue: &CompletionQueue, address: &str) -> Option<Peer> {
    let deadline = Deadline::after(REACH);
    let options = RcOptions { send_depth: DEPTH, recv_depth: 1, ..RcOptions::default() };
    let mut stream = connect::dial(address, deadline).ok()?;
    let prepared = Prepared::new(device, queue, queue, &options).ok()?;
    let connected = prepared.connect(&mut stream, &Visit::of(true).to_bytes(), deadline).ok()?;
    Greeting::from_extra(&connected.extra)?;
    Some(Peer { pair: connected.pair, _stream: stream })
}

/// Moves the pieces of a copy, several at a time.
fn transfer(
    queue: CompletionQueue,
    memory: &Region,
    peer: &Peer,
    copy: &Copy,
    interrupted: impl Fn() -> bool,
) -> Result<(), Fault> {
    let lost = Fault::new(Cause::CopyPeerLost, 0);
    let outside = Fault::new(Cause::CopyOutsideMemory, copy.local.offset);
    let (mut posted, mut under_way) = (0, 0);
    let mut buffer = [Completion::EMPTY; DEPTH as usize];
    let mut rounds = 0u32;
    while posted < copy.local.len || under_way > 0 {
        while posted < copy.local.len && under_way < DEPTH {
            if interrupted() {
                return Err(Fault::new(Cause::Interrupted, 0));
            }
            let len = (copy.local.len - posted).min(PIECE);
            let sge = [memory.sge(copy.local.offset + posted, len as u32).map_err(|_| outside)?];
            let remote = RemoteAddress { addr: copy.remote.wrapping_add(posted), rkey: Rkey(copy.key) };
            let post = match copy.operation {
                CopyOperation::Write => peer.pair.post_write(&sge, remote, Signal::Yes, WrId(0)),
                CopyOperation::Read | CopyOperation::Within => {
                    peer.pair.post_read(&sge, remote, Signal::Yes, WrId(0))
                }
            };
            post.map_err(|_| lost)?;
            posted += len;
            under_way += 1;
        }
        for completion in queue.poll(&mut buffer).map_err(|_| lost)? {
            // What a peer that failed earlier still had under way is flushed.
            if completion.qpn() != peer.pair.number() {
                continue;
            }
            under_way -= 1;
            match completion.status() {
                Status::Success => {}
                Status::RemoteAccessError | Status::RemoteInvalidRequestError => {
                    return Err(Fault::new(Cause::CopyRefused, 0));
                }
                _ => return Err(lost),
            }
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(256) {
            std::thread::yield_now();
            if interrupted() {
                return Err(Fault::new(Cause::Interrupted, 0));
            }
        }
    }
    Ok(())
}
