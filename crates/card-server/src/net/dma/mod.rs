//! The DMA engine of a card: executes the transfers of the descriptors in BAR0, inside the card and with peer
//! cards. The card with the descriptor is the initiator; no host is involved.

mod control;
mod peers;
mod transfer;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use millstream_card_abi::MemoryRange;
use millstream_card_abi::banks::add_by_bank;
use millstream_card_abi::codes::{MessageKind, PeerState};
use millstream_card_abi::command::{Cause, Fault, nanos};
use millstream_card_abi::dma::{BAR2_OFFSET, DMA_NOTIFY, DmaDescriptor, DmaOperation, RawDmaDescriptor};
use millstream_card_abi::registers::{DMA_RING, DMA_RING_SLOTS, MAX_PEERS, at};
use millstream_rdma::queue::SendList;
use millstream_rdma::{Access, CompletionQueue, Device, VerbsError};
use millstream_shm::futex;
use millstream_tls::Security;

pub(crate) use self::control::DmaControl;
use self::peers::Network;
use self::transfer::{transfer, transfer_list};
use crate::hardware::Hardware;
use crate::kernel::outside;
use crate::memory::Memory;
use crate::notification::{Notification, NotificationSink};
use crate::polling::PollPolicy;

/// Longest request (bytes). A long transfer is split, so that the end of a lease interrupts it soon. Shorter
/// pieces would be copied through the processor's caches.
const PIECE: u64 = 16 << 20;

/// Most requests in flight: pieces of a transfer, or transfers of a list.
const DEPTH: u32 = DMA_RING_SLOTS as u32;

/// Descriptors to prefetch while earlier ones complete: as many as a client writes at once.
const PREFETCH: u64 = DMA_RING_SLOTS as u64 / 2;

/// Longest time that an idle engine polls, even on a polling card: each polling thread takes a processor from the
/// kernels.
const MAX_SPIN: Duration = Duration::from_millis(1);

/// The DMA engine.
pub(crate) struct DmaEngine {
    hardware: Arc<Hardware>,
    control: Arc<DmaControl>,
    notifications: Arc<dyn NotificationSink>,
    stop: Arc<AtomicBool>,
    spin: Duration,
    heartbeat: Duration,
    memory_bytes: u64,
    bank_bytes: u64,
    /// None on a card without network interface.
    network: Option<Network>,
    consumer: u64,
    /// The latest invalid value of `dma_producer`; else the value of `consumer`.
    rejected: u64,
    completed: u64,
    failed: u64,
    bytes: u64,
    busy_ns: u64,
    peer_command: u64,
    /// Descriptors that are executed together.
    batch: Vec<DmaDescriptor>,
    /// A slot of `dma_cause` is not zero.
    has_causes: bool,
}

impl DmaEngine {
    pub(crate) fn new(
        (hardware, bank_bytes): (Arc<Hardware>, u64),
        control: Arc<DmaControl>,
        notifications: Arc<dyn NotificationSink>,
        stop: Arc<AtomicBool>,
        polling: PollPolicy,
        network: Option<(&Device, &Security)>,
    ) -> Result<DmaEngine, VerbsError> {
        let network = match network {
            None => None,
            Some((device, security)) => {
                let generation = hardware.generation();
                Some(Network {
                    device: device.clone(),
                    security: security.clone(),
                    queue: CompletionQueue::new(device, DEPTH * MAX_PEERS as u32)?,
                    list: SendList::new(DMA_RING_SLOTS, DMA_RING_SLOTS),
                    memory: hardware.memory().backing().register(device, Access::LOCAL_WRITE)?,
                    memory_generation: generation,
                    peers: Default::default(),
                    attempts: Default::default(),
                    connecting: Default::default(),
                    waiting: Default::default(),
                    attempted: 0,
                    connect_outcomes: channel(),
                })
            }
        };
        Ok(DmaEngine {
            memory_bytes: hardware.memory().size(),
            bank_bytes,
            hardware,
            control,
            notifications,
            stop,
            spin: polling.spin.min(MAX_SPIN),
            heartbeat: polling.heartbeat,
            network,
            consumer: 0,
            rejected: 0,
            completed: 0,
            failed: 0,
            bytes: 0,
            busy_ns: 0,
            peer_command: 0,
            batch: Vec::with_capacity(DMA_RING_SLOTS),
            has_causes: false,
        })
    }

    /// Serves until the card stops.
    pub(crate) fn serve(&mut self) {
        let hardware = self.hardware.clone();
        let polling = hardware.registers.dma_polling();
        while !self.stop.load(Ordering::Relaxed) {
            polling.store(1, Ordering::Relaxed);
            self.work();
            // A client writes `dma_producer` first and reads this register afterwards; this thread does it in reverse
            // order. One of the two sees the other.
            polling.store(0, Ordering::SeqCst);
            let seen = self.control.notifications.load(Ordering::SeqCst);
            if !self.control.reset_requested.load(Ordering::SeqCst) && !self.has_work() {
                let _ = futex::wait(&self.control.notifications, seen, self.heartbeat);
            }
        }
    }

    /// Works until the engine has been idle for the spin time.
    fn work(&mut self) {
        let mut latest_work = None;
        while !self.stop.load(Ordering::Relaxed) {
            if self.control.reset_requested.load(Ordering::SeqCst) {
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

    /// Whether a command may begin. Handles ended attempts to connect a peer.
    fn has_work(&mut self) -> bool {
        self.handle_connect_outcomes();
        self.has_command() && !self.control.closed.load(Ordering::SeqCst)
    }

    /// Whether the registers have a command. It may be of a lease that ends.
    fn has_command(&self) -> bool {
        let registers = &self.hardware.registers;
        let command = registers.peer_command().load(Ordering::SeqCst);
        let producer = registers.dma_producer().load(Ordering::SeqCst);
        command != self.peer_command || self.has_descriptors(producer)
    }

    fn reset(&mut self) {
        if let Some(network) = &mut self.network {
            network.reset();
        }
        (self.consumer, self.rejected, self.completed, self.peer_command) = (0, 0, 0, 0);
        let registers = &self.hardware.registers;
        registers.dma_consumer().store(0, Ordering::Relaxed);
        registers.dma_completed().store(0, Ordering::Relaxed);
        for peer in 0..MAX_PEERS {
            registers.peer_state(peer).store(PeerState::None as u32, Ordering::Relaxed);
            registers.peer_cause(peer).store(0, Ordering::Relaxed);
        }
        for slot in 0..DMA_RING_SLOTS {
            registers.dma_cause(slot).store(0, Ordering::Relaxed);
            registers.dma_detail(slot).store(0, Ordering::Relaxed);
        }
        self.has_causes = false;
        self.control.used.store(false, Ordering::SeqCst);
        self.control.reset_requested.store(false, Ordering::SeqCst);
    }

    /// Executes the next command, if there is one. Returns when it ended.
    fn step(&mut self) -> Option<Instant> {
        self.handle_connect_outcomes();
        if !self.has_command() || !self.control.begin() {
            return None;
        }
        self.dispatch()
    }

    /// Executes the command in the registers after [`DmaControl::begin`]. Only now they are those of a lease that does not
    /// end before the command: the controller clears them when the engine has been reset.
    fn dispatch(&mut self) -> Option<Instant> {
        let registers = &self.hardware.registers;
        let command = registers.peer_command().load(Ordering::Acquire);
        let producer = registers.dma_producer().load(Ordering::Acquire);
        if command != self.peer_command {
            self.peer_command = command;
            self.connect_peer(command);
            return Some(Instant::now());
        }
        if !self.has_descriptors(producer) {
            return None;
        }
        if producer.wrapping_sub(self.consumer) > DMA_RING_SLOTS as u64 {
            self.rejected = producer;
            self.notify_fault(0, self.completed, Fault::new(Cause::DmaRingOverrun, producer));
            return Some(Instant::now());
        }
        let done = self.execute(producer);
        self.rejected = self.consumer;
        Some(done)
    }

    /// Whether `dma_producer` announces descriptors, or an invalid value that was not rejected yet.
    fn has_descriptors(&self, producer: u64) -> bool {
        producer != self.consumer && producer != self.rejected
    }

    /// Executes the next descriptor, and with it the following ones that fit into the same work request list. Returns
    /// when they ended.
    fn execute(&mut self, producer: u64) -> Instant {
        let started = Instant::now();
        let mut batch = std::mem::take(&mut self.batch);
        let gathered = self.gather(producer, &mut batch);
        let first = self.consumer;
        self.consumer += batch.len().max(1) as u64;
        self.hardware.registers.dma_consumer().store(self.consumer, Ordering::Release);
        let (completed, fault) = match (gathered, batch.as_slice()) {
            (Err(fault), _) => (0, Some(fault)),
            (Ok(()), [descriptor]) if descriptor.operation == DmaOperation::Local => {
                let fault = self.local(descriptor).err();
                (usize::from(fault.is_none()), fault)
            }
            (Ok(()), batch) => self.remote(batch),
        };
        let registers = &self.hardware.registers;
        // A client has written these meanwhile, or will soon; they are fetched while the completion is published.
        registers.prefetch(at::dma_producer);
        for index in (self.consumer..self.consumer + PREFETCH).step_by(64 / RawDmaDescriptor::BYTES) {
            registers.prefetch(offset_of(index));
        }
        let now = Instant::now();
        self.busy_ns = self.busy_ns.saturating_add(nanos(now - started));
        registers.dma_busy_ns().store(self.busy_ns, Ordering::Relaxed);
        let (completed, failed) = batch.split_at(completed);
        let bytes = completed.iter().map(|descriptor| descriptor.local.len).sum();
        // A failed transfer disconnects the peer, so the transfers behind it fail, too.
        let gone = failed
            .iter()
            .skip(1)
            .map(|descriptor| Fault::new(Cause::DmaPeerNotConnected, descriptor.peer.into()));
        let faults: Vec<Fault> = fault.into_iter().chain(gone).collect();
        self.complete(first..self.consumer, bytes, &faults, batch.last().is_some_and(|last| last.notify));
        self.batch = batch;
        now
    }

    /// Reads the next descriptor, and the following ones that fit into one work request list with it. They
    /// have the same direction, peer and key, and at most [`PIECE`] bytes in all. The first one with a
    /// notification ends the list.
    fn gather(&self, producer: u64, batch: &mut Vec<DmaDescriptor>) -> Result<(), Fault> {
        let registers = &self.hardware.registers;
        let read = |index| {
            let mut raw = [0; RawDmaDescriptor::BYTES];
            registers.read_bytes(offset_of(index), &mut raw);
            RawDmaDescriptor::from_bytes(&raw)
        };
        batch.clear();
        let raw = read(self.consumer);
        let first = DmaDescriptor::from_raw(raw, self.memory_bytes, self.hardware.bar2.size())?;
        batch.push(first);
        // A range beyond the end of the address space is submitted alone; the peer's device refuses it.
        let overflows = |raw: &RawDmaDescriptor| raw.remote.checked_add(raw.bytes).is_none();
        if first.operation == DmaOperation::Local || first.local.offset & BAR2_OFFSET != 0 || overflows(&raw)
        {
            return Ok(());
        }
        let (memory_bytes, mut bytes) = (self.memory_bytes, first.local.len);
        let mut notify = first.notify;
        for index in self.consumer + 1..producer {
            let raw = read(index);
            let local = MemoryRange::new(raw.local, raw.bytes);
            if notify || !raw.can_batch_with(&first) || !local.fits(memory_bytes) || overflows(&raw) {
                return Ok(());
            }
            bytes += raw.bytes;
            if bytes > PIECE {
                return Ok(());
            }
            notify = raw.flags & DMA_NOTIFY != 0;
            batch.push(DmaDescriptor { local, remote: raw.remote, notify, ..first });
        }
        Ok(())
    }

    /// Publishes completions, all at once: each store fetches a cache line that a client has just read. The last
    /// transfers failed with `faults`. Then notifies the holder of the faults, or of the completion if requested.
    fn complete(&mut self, ended: Range<u64>, bytes: u64, faults: &[Fault], notify: bool) {
        let registers = &self.hardware.registers;
        let failed_from = ended.end - faults.len() as u64;
        // Clear slots need no store.
        if self.has_causes || !faults.is_empty() {
            self.has_causes = true;
            for slot in (ended.start..failed_from).map(slot_of) {
                registers.dma_cause(slot).store(0, Ordering::Relaxed);
                registers.dma_detail(slot).store(0, Ordering::Relaxed);
            }
            for (slot, fault) in (failed_from..ended.end).map(slot_of).zip(faults) {
                registers.dma_cause(slot).store(fault.cause.code(), Ordering::Relaxed);
                registers.dma_detail(slot).store(fault.detail, Ordering::Relaxed);
            }
        }
        self.completed += ended.end - ended.start;
        self.bytes += bytes;
        self.failed += faults.len() as u64;
        registers.dma_bytes().store(self.bytes, Ordering::Relaxed);
        registers.dma_failed().store(self.failed, Ordering::Relaxed);
        registers.dma_completed().store(self.completed, Ordering::Release);
        for (index, fault) in (failed_from..).zip(faults) {
            self.notify_fault(slot_of(index), self.completed - (ended.end - 1 - index), *fault);
        }
        if notify && faults.is_empty() {
            self.notifications.notify(Notification {
                region: slot_of(ended.end - 1) as u32,
                ..Notification::of_card(MessageKind::DmaDone, self.completed, [self.completed, 0, 0, 0])
            });
        }
    }

    fn notify_fault(&self, slot: usize, sequence: u64, fault: Fault) {
        self.notifications.notify(Notification {
            kind: MessageKind::DmaFault,
            region: slot as u32,
            cause: Some(fault.cause),
            sequence,
            values: [slot as u64, fault.detail, 0, 0],
        });
    }

    fn local(&mut self, descriptor: &DmaDescriptor) -> Result<(), Fault> {
        let DmaDescriptor { local, remote, .. } = *descriptor;
        let out_of_range = |at: u64| {
            move |error| match outside(Cause::DmaOutsideMemory)(error) {
                fault if fault.cause == Cause::DmaOutsideMemory => Fault::new(fault.cause, at),
                fault => fault,
            }
        };
        let (memory, hardware) = (self.hardware.memory(), &*self.hardware);
        let window = |at: u64| -> (&Memory, u64) {
            if at & BAR2_OFFSET == 0 { (&memory, at) } else { (&hardware.bar2, at & !BAR2_OFFSET) }
        };
        let ((from, start), (to, end)) = (window(local.offset), window(remote));
        if std::ptr::eq(from, to) {
            from.copy_within(MemoryRange::new(start, local.len), end).map_err(out_of_range(local.offset))?;
        } else {
            /// Small enough for the processor's caches.
            const STEP: u64 = 256 << 10;
            let mut piece = vec![0; local.len.min(STEP) as usize];
            for at in (0..local.len).step_by(STEP as usize) {
                let len = (local.len - at).min(STEP) as usize;
                from.read(start + at, &mut piece[..len]).map_err(out_of_range(local.offset))?;
                to.write(end + at, &piece[..len]).map_err(out_of_range(remote))?;
            }
        }
        self.count(std::iter::once(local), true);
        self.count(std::iter::once(MemoryRange::new(remote, local.len)), false);
        Ok(())
    }

    /// Executes transfers with one peer: several in one list, or one of any length. Returns how many completed, and
    /// the fault of the next one.
    fn remote(&mut self, descriptors: &[DmaDescriptor]) -> (usize, Option<Fault>) {
        let peer = descriptors[0].peer;
        let no_peer = Fault::new(Cause::DmaPeerNotConnected, peer.into());
        if descriptors[0].local.offset & BAR2_OFFSET != 0 {
            return (0, Some(Fault::new(Cause::DmaOutsideMemory, descriptors[0].local.offset)));
        }
        let Some(network) = &mut self.network else { return (0, Some(no_peer)) };
        let generation = self.hardware.generation();
        if network.memory_generation != generation {
            let memory = self.hardware.memory().backing().register(&network.device, Access::LOCAL_WRITE);
            let Ok(memory) = memory else { return (0, Some(Fault::new(Cause::WindowRegistration, 0))) };
            network.memory = memory;
            network.memory_generation = generation;
        }
        let Some(slot) = network.peers.get_mut(peer as usize) else { return (0, Some(no_peer)) };
        let Some(connected) = slot else { return (0, Some(no_peer)) };
        let interrupted =
            || self.stop.load(Ordering::Relaxed) || self.control.reset_requested.load(Ordering::SeqCst);
        let (done, fault) = match descriptors {
            [descriptor] => {
                let outcome = transfer(&network.queue, &network.memory, connected, descriptor, interrupted);
                (usize::from(outcome.is_ok()), outcome.err())
            }
            _ => transfer_list(
                &network.queue,
                &mut network.list,
                &network.memory,
                connected,
                descriptors,
                interrupted,
            ),
        };
        if let Some(fault) = fault {
            // A queue pair in the error state accepts no work requests (IBTA volume 1, 10.3.1).
            *slot = None;
            let registers = &self.hardware.registers;
            registers.peer_cause(peer as usize).store(fault.cause.code(), Ordering::Relaxed);
            registers.peer_state(peer as usize).store(PeerState::Failed as u32, Ordering::Release);
        }
        let completed = descriptors[..done].iter().map(|descriptor| descriptor.local);
        self.count(completed, descriptors[0].operation == DmaOperation::Write);
        (done, fault)
    }

    /// Counts bytes by bank, or those of BAR2 if the first range is there.
    fn count(&self, spans: impl Iterator<Item = MemoryRange>, read: bool) {
        let registers = &self.hardware.registers;
        let mut spans = spans.peekable();
        if spans.peek().is_some_and(|span| span.offset & BAR2_OFFSET != 0) {
            let counter = if read { registers.bar2_read() } else { registers.bar2_written() };
            counter.fetch_add(spans.map(|span| span.len).sum(), Ordering::Relaxed);
            return;
        }
        // Not the register, which local users can write.
        add_by_bank(spans, self.bank_bytes, |bank, bytes| {
            let counter = if read { registers.bank_read(bank) } else { registers.bank_written(bank) };
            counter.fetch_add(bytes, Ordering::Relaxed);
        });
    }
}

/// Slot of a descriptor in the ring.
fn slot_of(index: u64) -> usize {
    (index % DMA_RING_SLOTS as u64) as usize
}

/// Offset of a descriptor in BAR0.
fn offset_of(index: u64) -> usize {
    DMA_RING + RawDmaDescriptor::BYTES * slot_of(index)
}

#[cfg(test)]
mod tests;
