//! A readout unit's process: writes packets out of the mapped input.
//!
//! The input is registered once and never copied: the packet of a source is one RDMA WRITE whose first
//! element is the packet's header and whose others are runs of the file. Headers are small; they are built
//! per batch in a registered pool, in which a batch keeps its place until its last write has completed.

use super::ProcessError;
use super::clock::Clock;
use super::control::{Control, Received};
use super::error::Doing;
use super::wire_up::{self, Channel, FromManager, Joined, Look, ToManager};
use crate::config::Setup;
use crate::core::message::Assignment;
use crate::core::readout::{Readout, Send, Taken};
use crate::core::report::ReadoutReport;
use crate::core::{BuIndex, RuIndex, SlotIndex, Unit};
use crate::layout::Place;
use millstream_fragment::batch::{Batcher, Replay, Run};
use millstream_fragment::stream::Stream;
use millstream_fragment::{SourceId, mfp};
use millstream_rdma::connect::RcOptions;
use millstream_rdma::message::{MessengerOptions, PreparedMessenger};
use millstream_rdma::queue::{SendList, Signal};
use millstream_rdma::wait::{WaitOptions, Waiter};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Device, PreparedQueuePair, QueuePair, Region, RemoteMemory, Sge,
    WaitFd, WrId,
};
use std::os::fd::BorrowedFd;

/// Completions taken at a time.
const POLL: usize = 32;
/// The most elements of one work request that are of use; adapters take about as many.
const MAX_ELEMENTS: u32 = 16;

/// Runs a readout unit from joining the manager to the end of the run.
///
/// While the manager is not there, the unit waits; if `lifeline` is readable or closed then, it ends.
///
/// # Errors
/// The unit could not start, or its RDMA device failed. Everything else ends with a report.
pub fn run(
    manager: &str,
    ru: RuIndex,
    lifeline: Option<BorrowedFd<'_>>,
) -> Result<ReadoutReport, ProcessError> {
    let mut joined = wire_up::join(manager, Unit::Readout(ru), None, lifeline)?;
    let local = Local::open(&joined.setup, ru);
    let local = wire_up::tell_prepared(&mut joined.channel, local)?;
    let (process, queues) = Process::connect(local, &mut joined, ru)?;
    process.work(queues, joined.channel)
}

/// What the unit needs on its host.
struct Local {
    device: Device,
    sources: Vec<Source>,
    input: Region,
    headers: Region,
    headers_per_batch: u64,
}

impl Local {
    /// Maps and registers the input, and makes the pool of headers.
    fn open(setup: &Setup, ru: RuIndex) -> Result<Local, ProcessError> {
        let device = super::open_device(setup)?;
        let stream = open_input(setup, ru)?;
        let sources = sources(setup, ru, stream)?;
        let input = Region::source(&device, stream.mapping(), false)?;
        touch(stream.mapping());
        let batch = u32::from(setup.plan.batch.get());
        let headers_per_batch =
            sources.last().map_or(0, |last| last.header_offset + last.batcher.max_header_len(batch));
        let batches = u64::from(setup.plan.window.get()) * setup.plan.builders() as u64;
        let pool = headers_per_batch * batches;
        let headers = Region::landing(&device, c"millstream-headers", pool as usize, Access::SOURCE)?;
        headers.populate().doing("populate the pool of headers")?;
        Ok(Local { device, sources, input, headers, headers_per_batch })
    }
}

/// One builder unit: the connection, its landing memory, and the requests of one batch.
struct Peer {
    pair: QueuePair,
    landing: RemoteMemory,
    list: SendList,
    /// Batches sent; where the next batch's headers go.
    batches: u64,
}

/// One source: its place in a slot, and how its packets are made.
struct Source {
    place: Place,
    batcher: Batcher<'static>,
    /// Where its header starts in a batch's part of the pool.
    header_offset: u64,
}

/// What the unit waits for.
struct Queues {
    waiter: Waiter,
    control: CompletionQueue,
    data: CompletionQueue,
}

struct Process {
    clock: Clock,
    core: Readout,
    control: Control,
    peers: Vec<Peer>,
    sources: Vec<Source>,
    input: Region,
    headers: Region,
    /// A batch's part of the pool of headers, in bytes.
    headers_per_batch: u64,
    /// Batches that the pool holds per builder unit.
    window: u64,
    slot_bytes: u64,
    max_elements: usize,
    // Reused from batch to batch.
    header: Vec<u8>,
    runs: Vec<Run>,
    elements: Vec<Sge>,
    completions: [Completion; POLL],
}

impl Process {
    /// Connects to all others and waits for the start of the run.
    fn connect(local: Local, joined: &mut Joined, ru: RuIndex) -> Result<(Process, Queues), ProcessError> {
        let Joined { channel, setup, builders, deadline } = joined;
        let deadline = *deadline;
        let Local { device, sources, input, headers, headers_per_batch } = local;
        let window = u64::from(setup.plan.window.get());
        let waiter = Waiter::new(&device, WaitOptions { spin: setup.spin, ..WaitOptions::default() })?;
        let options = MessengerOptions::default();
        let control_queue = waiter.completion_queue(options.completions())?;
        let messenger = PreparedMessenger::new(&device, &control_queue, &options)?;
        let (messenger, _) = messenger.connect(channel.stream().doing("use a stream")?, &[], deadline)?;

        let shape = Shape::of(&sources, setup, device.limits().sges);
        let connection = shape.connection(window);
        // When a connection fails, every request on it completes.
        let depth = (connection.send_depth + connection.recv_depth).saturating_mul(builders.len() as u32);
        let data_queue = waiter.completion_queue(depth.min(device.limits().completions))?;
        let mut peers = Vec::with_capacity(builders.len());
        for (index, address) in builders.iter().enumerate() {
            let prepared = PreparedQueuePair::new(&device, &data_queue, &data_queue, &connection)?;
            let unit = Unit::Builder(BuIndex(index as u16));
            let mut to_builder = wire_up::reach(unit, address, deadline)?;
            let connected = prepared.connect(&mut to_builder, &ru.0.to_be_bytes(), deadline)?;
            let landing = connected.private_data.as_slice().try_into().map_err(|_| ProcessError::WireUp {
                unit,
                what: format!("sent {} bytes about its landing memory", connected.private_data.len()),
            })?;
            peers.push(Peer {
                pair: connected.pair,
                landing: RemoteMemory::decode(landing),
                list: SendList::new(shape.requests, shape.elements),
                batches: 0,
            });
        }
        wire_up::await_start(channel, deadline)?;
        let clock = Clock::start();
        let process = Process {
            clock,
            core: Readout::new(ru, setup.plan.clone(), clock.now()),
            control: Control::new(messenger),
            peers,
            input,
            headers,
            headers_per_batch,
            window,
            slot_bytes: setup.layout.slot_bytes.0,
            max_elements: shape.elements_per_request,
            header: vec![0; headers_per_batch as usize],
            runs: Vec::with_capacity(shape.runs_per_packet),
            elements: Vec::with_capacity(1 + shape.runs_per_packet),
            completions: [Completion::EMPTY; POLL],
            sources,
        };
        Ok((process, Queues { waiter, control: control_queue, data: data_queue }))
    }

    /// The run, to the report.
    fn work(mut self, mut queues: Queues, mut channel: Channel) -> Result<ReadoutReport, ProcessError> {
        let mut has_manager = true;
        loop {
            let heard = self.wait(&mut queues, has_manager.then_some(&channel))?;
            if heard && matches!(channel.look::<FromManager>(), Look::Closed) {
                has_manager = false;
                self.core.handle_manager_lost(self.clock.now());
            }
            if let Some(report) = self.core.poll_report() {
                // A manager that is gone gets nothing; whoever started this process does.
                let _ = channel.send(&ToManager::Readout(report.clone()));
                return Ok(report);
            }
        }
    }

    /// Makes progress until the manager's stream has something to say or the run is over; returns whether it
    /// has.
    fn wait(&mut self, queues: &mut Queues, manager: Option<&Channel>) -> Result<bool, ProcessError> {
        let Queues { waiter, control, data } = queues;
        let mut others: Vec<_> = manager.map(WaitFd::readable).into_iter().collect();
        loop {
            let deadline = self.clock.deadline(self.core.poll_timeout());
            waiter.wait(&[control, data], &mut others, deadline, || self.progress(data))?;
            let heard = others.iter().any(WaitFd::is_ready);
            // A core that has reported has no time-out.
            if heard || self.core.poll_timeout().is_none() {
                return Ok(heard);
            }
        }
    }

    /// Takes what has come, does what follows; returns whether there was anything.
    fn progress(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = self.control.progress();
        let now = self.clock.now();
        loop {
            match self.control.receive() {
                Received::Message(message) => self.core.handle_message(message, now),
                Received::Malformed => self.core.handle_malformed(),
                Received::Nothing => break,
            }
        }
        any |= self.take_completions(queue)?;
        while let Some(send) = self.core.poll_send() {
            any = true;
            self.send(send)?;
        }
        if self.core.poll_timeout().is_some_and(|at| at <= now) {
            self.core.handle_timeout(now);
        }
        while let Some(message) = self.core.poll_transmit() {
            self.control.send(message);
        }
        self.control.flush();
        Ok(any)
    }

    fn take_completions(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = false;
        loop {
            let taken = queue.poll(&mut self.completions)?;
            for completion in taken {
                let (builder, slot) = unpack(completion.wr_id());
                if completion.is_success() {
                    self.core.handle_completed(builder, slot);
                } else {
                    self.core.handle_unreachable(builder);
                }
            }
            any |= !taken.is_empty();
            if taken.len() < POLL {
                return Ok(any);
            }
        }
    }

    /// Posts the writes of a batch.
    fn send(&mut self, send: Send) -> Result<(), ProcessError> {
        let builder = send.assignment.builder;
        let taken = self.compose(&send)?;
        let peer = &mut self.peers[builder.index()];
        peer.batches += 1;
        match peer.pair.post_list(&mut peer.list) {
            Ok(()) => self.core.handle_posted(send, taken),
            Err(error) if error.posted == 0 => self.core.handle_unsent(send, taken),
            Err(_) => {
                self.core.handle_posted(send, taken);
                self.core.handle_unreachable(builder);
            }
        }
        Ok(())
    }

    /// Makes the requests that write a batch's packets.
    fn compose(&mut self, send: &Send) -> Result<Taken, ProcessError> {
        let Assignment { batch, builder, slot, .. } = send.assignment;
        let peer = &mut self.peers[builder.index()];
        let pool =
            (builder.index() as u64 * self.window + peer.batches % self.window) * self.headers_per_batch;
        let slot_offset = u64::from(slot.0) * self.slot_bytes;
        let id = pack(builder, slot);
        let mut taken = Taken::default();
        let mut left = self.sources.len();
        for source in &self.sources {
            left -= 1;
            let packet = source
                .batcher
                .batch(batch.first_event.0, batch.events.into(), &mut self.header, &mut self.runs)
                .map_err(|error| source.changed(error.to_string()))?;
            if packet.total_len > source.place.capacity {
                let (len, room) = (packet.total_len, source.place.capacity);
                return Err(source.changed(format!("a packet of {len} B for a place of {room} B")));
            }
            let header_at = pool + source.header_offset;
            self.headers.copy_from_slice(header_at, &self.header[..packet.header_len as usize])?;
            self.elements.clear();
            self.elements.push(self.headers.sge(header_at, packet.header_len)?);
            for run in &self.runs {
                self.elements.push(self.input.sge(run.offset, run.len)?);
            }
            taken.fragments += packet.n_fragments;
            taken.bytes.0 += u64::from(packet.total_len - packet.header_len);

            let mut to = slot_offset + source.place.offset;
            let mut requests = self.elements.chunks(self.max_elements).peekable();
            while let Some(elements) = requests.next() {
                let len = elements.iter().map(|element| u64::from(element.len())).sum();
                let remote = peer.landing.at(to, len)?;
                to += len;
                let added = if left == 0 && requests.peek().is_none() {
                    peer.list.write_imm(elements, remote, send.immediate.encode(), Signal::Yes, id)
                } else {
                    peer.list.write(elements, remote, Signal::No, id)
                };
                added.map_err(|full| source.changed(full.to_string()))?;
            }
        }
        Ok(taken)
    }
}

impl Source {
    /// The input does not make the packets that the plan has room for.
    fn changed(&self, what: String) -> ProcessError {
        ProcessError::InputChanged { input: SourceId(self.place.source).to_string(), what }
    }
}

/// How many requests and elements a batch takes.
struct Shape {
    runs_per_packet: usize,
    elements_per_request: usize,
    /// Of a batch.
    requests: usize,
    /// Of a batch.
    elements: usize,
}

impl Shape {
    fn of(sources: &[Source], setup: &Setup, max_elements: u32) -> Shape {
        let batch = u32::from(setup.plan.batch.get());
        let runs = sources.iter().map(|source| source.batcher.max_runs(batch)).max().unwrap_or(1);
        let runs_per_packet = usize::try_from(runs).unwrap_or(usize::MAX);
        let per_packet = 1 + runs_per_packet;
        let elements_per_request = per_packet.min(max_elements.clamp(2, MAX_ELEMENTS) as usize);
        Shape {
            runs_per_packet,
            elements_per_request,
            requests: sources.len() * per_packet.div_ceil(elements_per_request),
            elements: sources.len() * per_packet,
        }
    }

    fn connection(&self, window: u64) -> RcOptions {
        let depth = (self.requests as u64).saturating_mul(window);
        RcOptions {
            send_depth: u32::try_from(depth).unwrap_or(u32::MAX),
            recv_depth: 1,
            send_sges: self.elements_per_request as u32,
            max_inline: 0,
            access: Access::SOURCE,
            ..RcOptions::default()
        }
    }
}

/// The request's name says which batch it belongs to.
fn pack(builder: BuIndex, slot: SlotIndex) -> WrId {
    WrId(u64::from(builder.0) << 16 | u64::from(slot.0))
}

fn unpack(id: WrId) -> (BuIndex, SlotIndex) {
    (BuIndex((id.0 >> 16) as u16), SlotIndex(id.0 as u16))
}

/// Maps the unit's input for the life of the process, which is the life of the run.
fn open_input(setup: &Setup, ru: RuIndex) -> Result<&'static Stream, ProcessError> {
    let input = &setup.readouts[ru.index()].input;
    Ok(Box::leak(Box::new(Stream::open(input)?)))
}

/// The unit's sources in the order of their places, which has to be what the run was checked with.
fn sources(setup: &Setup, ru: RuIndex, stream: &'static Stream) -> Result<Vec<Source>, ProcessError> {
    let changed = |what: String| {
        let input = stream.path().display().to_string();
        ProcessError::InputChanged { input, what }
    };
    let events = stream.events();
    if events.start != setup.file_first.0 || events.end - events.start != setup.file_events {
        return Err(changed(format!("events {events:?}")));
    }
    let replay = Replay::new(events, setup.plan.first_event.0).ok_or_else(|| changed("no events".into()))?;
    let places = setup.layout.of_readout(ru);
    if places.len() != stream.sources().len() {
        return Err(changed(format!("{} sources", stream.sources().len())));
    }
    let batch = u32::from(setup.plan.batch.get());
    let mut header_offset = 0;
    let mut sources = Vec::with_capacity(places.len());
    for place in places {
        let id = SourceId(place.source);
        let source = stream.source(id).ok_or_else(|| changed(format!("no {id}")))?;
        let batcher = Batcher::new(source, replay.clone());
        if batcher.max_total_len(batch).is_none_or(|most| most > place.capacity) {
            return Err(changed(format!("longer fragments of {id}")));
        }
        let next =
            header_offset + batcher.max_header_len(batch).next_multiple_of(mfp::HEADER_ALIGNMENT.into());
        sources.push(Source { place: *place, batcher, header_offset });
        header_offset = next;
    }
    Ok(sources)
}

/// Reads a byte of every page, so that no transfer waits for the disk.
fn touch(bytes: &[u8]) {
    const PAGE: usize = 4096;
    let sum = bytes.iter().step_by(PAGE).fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    std::hint::black_box(sum);
}
