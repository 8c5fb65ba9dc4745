//! Process of a readout unit: writes packets from its input ([`source`]).
//!
//! A mapped file is registered once. A long packet is one RDMA WRITE without a copy: its first scatter/gather element is the
//! packet's header, the others are extents of the file. Headers are built per batch in a registered pool; a batch owns its
//! part of the pool until its last write completes.
//!
//! Short packets (`MAX_COPIED`) are copied into the pool, which has them at the same distances as the slot. Then one
//! RDMA WRITE carries the packets of many sources: for them, a work request costs more than the copy.

use super::ProcessError;
use super::clock::MonotonicClock;
use super::control::{Control, Received};
use super::error::IoContext;
use super::manager_link::{LinkEvent, ManagerLink};
use super::own::OwnConfig;
use super::startup::{self, FromManager, JoinedRun, ToManager};
use crate::config::RunConfig;
use crate::core::message::Assignment;
use crate::core::readout::{BatchPayload, BatchSend, Readout};
use crate::core::recovery::Membership;
use crate::core::report::ReadoutReport;
use crate::core::{BuIndex, RuIndex, SlotIndex, Term, Unit};
use crate::layout::PacketArea;
use crate::source::{self, Source, SourceStatistics};
use millstream_fragment::packetize::FileExtent;
use millstream_fragment::{SourceId, mfp};
use millstream_rdma::connect::RcOptions;
use millstream_rdma::memory::RemoteAddress;
use millstream_rdma::message::{MessageChannelOptions, PreparedMessageChannel};
use millstream_rdma::queue::{ListFull, SendList, Signal};
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, Region,
    RemoteMemory, Sge, WaitFd, WrId,
};
use millstream_tls::Security;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Longest time to connect to a builder unit that joins the run. Nothing is sent meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Completions per poll.
const POLL: usize = 32;
/// Minimum interval of telling the manager which events are there.
const AVAILABLE_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum scatter/gather elements per work request; most adapters support about as many.
const MAX_SGES: u32 = 16;

/// Packet areas up to this size are copied into the pool. A work request costs as much as a copy of some KiB.
const MAX_COPIED: u32 = 4096;
/// Unused bytes between two packets that one write carries along.
const MAX_GAP: u64 = 1024;
/// Length of a write from which no further packet is added, so that the next packets are made while it is on its way.
const MAX_COALESCED: u64 = 256 << 10;

/// Runs a readout unit from joining the manager to the end of the run.
///
/// Waits for the manager, whose configuration must agree with `own`, if there is one. Gives up if `parent_pipe` becomes
/// readable or is closed.
///
/// # Errors
/// The unit could not start, or its RDMA device failed. All other ends have a report.
pub fn run(
    (manager, ru): (&str, RuIndex),
    own: Option<&OwnConfig>,
    security: &Security,
    parent_pipe: Option<BorrowedFd<'_>>,
) -> Result<(ReadoutReport, Vec<SourceStatistics>), ProcessError> {
    let mut joined = startup::join(manager, Unit::Readout(ru), None, own, security, parent_pipe)?;
    let Unit::Readout(ru) = joined.unit else { return Err(startup::unexpected_frame(Unit::Manager)) };
    let local = LocalResources::open(&joined.config, joined.config.plan.readout_role(ru));
    let local = startup::report_prepared(&mut joined.channel, local)?;
    let (process, queues) = ReadoutProcess::connect(local, &mut joined, ru)?;
    process.work(queues, ManagerLink::new(joined))
}

/// Resources on the host of the unit.
struct LocalResources {
    device: Device,
    sources: Vec<SourceArea>,
    input: Box<dyn Source>,
    mapping: Option<Region>,
    headers: Region,
    headers_per_batch: u64,
}

impl LocalResources {
    /// Maps and registers the input, and allocates the pool of headers.
    fn open(config: &RunConfig, ru: RuIndex) -> Result<LocalResources, ProcessError> {
        let device = super::open_device(config)?;
        let input = source::open(config, ru)?;
        let mapping = input.mapping().map(|bytes| Region::source(&device, bytes, false)).transpose()?;
        let (sources, headers_per_batch) = source_areas(config, ru, mapping.is_some());
        let batches = u64::from(config.plan.window.get()) * config.plan.builders() as u64;
        let pool = headers_per_batch * batches;
        let headers = Region::landing(&device, c"millstream-headers", pool as usize, Access::SOURCE)?;
        headers.populate().context("allocate the pool of packet headers")?;
        Ok(LocalResources { device, sources, input, mapping, headers, headers_per_batch })
    }
}

/// A builder unit: connection, landing memory, and the work requests of one batch.
struct Peer {
    pair: QueuePair,
    landing: RemoteMemory,
    list: SendList,
    /// Number of batches sent; selects the part of the pool.
    batches: u64,
}

impl Peer {
    /// Connects to a builder unit.
    fn connect(
        bu: BuIndex,
        address: &str,
        ru: RuIndex,
        (device, queue, connection): (&Device, &CompletionQueue, &RcOptions),
        requests: &BatchRequests,
        security: &Security,
        deadline: Deadline,
    ) -> Result<Peer, ProcessError> {
        let prepared = PreparedQueuePair::new(device, queue, queue, connection)?;
        let unit = Unit::Builder(bu);
        let mut to_builder = startup::connect_to_unit(unit, address, security, deadline)?;
        let connected = prepared.connect(&mut to_builder, &ru.0.to_be_bytes(), deadline)?;
        let landing = connected.private_data.as_slice().try_into().map_err(|_| ProcessError::Startup {
            unit,
            what: format!(
                "sent {} bytes of private data, expected its landing memory",
                connected.private_data.len()
            ),
        })?;
        Ok(Peer {
            pair: connected.pair,
            landing: RemoteMemory::decode(landing),
            list: SendList::new(requests.requests, requests.sges),
            batches: 0,
        })
    }
}

/// A source's packet area in a slot, and its room in the pool.
struct SourceArea {
    area: PacketArea,
    /// Offset of its header, or of its packet, in a batch's part of the pool.
    header_offset: u64,
    /// Whether the pool holds the whole packet.
    is_copied: bool,
}

/// Packets that one write will carry: a range of a batch's part of the pool.
struct CoalescedWrite {
    /// Offset of its start in a batch's part of the pool.
    start: u64,
    end: u64,
    /// Offset of its start in the slot.
    to: u64,
}

impl CoalescedWrite {
    /// Whether the packet of `source` can follow, at the same distance as in the slot.
    fn accepts(&self, source: &SourceArea) -> bool {
        let distance = source.header_offset.wrapping_sub(self.start);
        source.is_copied
            && source.area.offset.wrapping_sub(self.to) == distance
            && source.header_offset.wrapping_sub(self.end) <= MAX_GAP
            && self.end - self.start < MAX_COALESCED
    }
}

/// Completion queues to wait for.
struct WaitSet {
    waiter: CompletionWaiter,
    control: CompletionQueue,
    data: CompletionQueue,
}

struct ReadoutProcess {
    ru: RuIndex,
    device: Device,
    security: Security,
    connection: RcOptions,
    requests: BatchRequests,
    clock: MonotonicClock,
    core: Readout,
    control: Control,
    control_options: MessageChannelOptions,
    /// By builder unit; `None` for those that are not there.
    peers: Vec<Option<Peer>>,
    sources: Vec<SourceArea>,
    input: Box<dyn Source>,
    mapping: Option<Region>,
    /// Events that are there, counted from the run's first.
    available: u64,
    /// What the manager was told last, and when.
    available_sent: (u64, std::time::Instant),
    /// Interval at which the manager is told without news, since it counts a silent unit as lost.
    alive_interval: Duration,
    headers: Region,
    /// Size of a batch's part of the pool, in bytes.
    headers_per_batch: u64,
    /// Batches in the pool per builder unit.
    window: u64,
    slot_bytes: u64,
    max_sges: usize,
    // Buffers reused for each batch.
    header: Vec<u8>,
    extents: Vec<FileExtent>,
    sges: Vec<Sge>,
    completions: [Completion; POLL],
}

impl ReadoutProcess {
    /// Connects to the manager and the builder units, and waits for the start of the run.
    fn connect(
        local: LocalResources,
        joined: &mut JoinedRun,
        ru: RuIndex,
    ) -> Result<(ReadoutProcess, WaitSet), ProcessError> {
        let JoinedRun { channel, config, builders, deadline, security, .. } = joined;
        let deadline = *deadline;
        let LocalResources { device, sources, mut input, mapping, headers, headers_per_batch } = local;
        let window = u64::from(config.plan.window.get());
        let waiter =
            CompletionWaiter::new(&device, WaitOptions { spin: config.spin, ..WaitOptions::default() })?;
        let options = super::control_options(config);
        let control_queue = waiter.completion_queue(options.completions())?;
        let messages = PreparedMessageChannel::new(&device, &control_queue, &options)?;
        let (messages, _) =
            messages.connect(channel.stream().context("use the manager's TCP stream")?, &[], deadline)?;

        let requests_per_batch =
            BatchRequests::of(sources.len(), input.as_ref(), config, device.limits().sges);
        let connection = requests_per_batch.connection(window, super::connection_options(config));
        // When a connection fails, every request on it completes.
        let depth = (connection.send_depth + connection.recv_depth).saturating_mul(builders.len() as u32);
        let data_queue = waiter.completion_queue(depth.min(device.limits().completions))?;
        let mut peers = Vec::with_capacity(builders.len());
        for (bu, address) in (0..).map(BuIndex).zip(builders.iter()) {
            let connect = |address: &String| {
                let queue = (&device, &data_queue, &connection);
                Peer::connect(bu, address, ru, queue, &requests_per_batch, security, deadline)
            };
            peers.push(address.as_ref().map(connect).transpose()?);
        }
        let extents_per_packet = requests_per_batch.extents_per_packet;
        let membership = startup::await_start(channel, deadline)?;
        let clock = MonotonicClock::start();
        let core = match &membership {
            Some(membership) => {
                input.start_at(membership.first_event);
                Readout::join(ru, config.plan.clone(), membership, clock.now())
            }
            None => Readout::new(ru, config.plan.clone(), clock.now()),
        };
        let process = ReadoutProcess {
            ru,
            device,
            security: security.clone(),
            connection,
            clock,
            core,
            control: Control::new(messages, Term::FIRST),
            control_options: options,
            peers,
            input,
            available: 0,
            // The manager knows that all events of a file are there.
            available_sent: (if mapping.is_some() { u64::MAX } else { 0 }, std::time::Instant::now()),
            alive_interval: config.plan.timeout / 4,
            mapping,
            headers,
            headers_per_batch,
            window,
            slot_bytes: config.layout.slot_bytes.0,
            max_sges: requests_per_batch.sges_per_request,
            requests: requests_per_batch,
            header: vec![0; headers_per_batch as usize],
            extents: Vec::with_capacity(extents_per_packet),
            sges: Vec::with_capacity(1 + extents_per_packet),
            completions: [Completion::EMPTY; POLL],
            sources,
        };
        Ok((process, WaitSet { waiter, control: control_queue, data: data_queue }))
    }

    /// The run, up to the report.
    fn work(
        mut self,
        mut queues: WaitSet,
        mut link: ManagerLink,
    ) -> Result<(ReadoutReport, Vec<SourceStatistics>), ProcessError> {
        if !link.has_standby() {
            self.core.handle_standby_lost(self.clock.now());
        }
        loop {
            let is_ready = self.wait(&mut queues, &link)?;
            self.announce_available(&mut link);
            while is_ready && let Some(event) = link.poll() {
                match event {
                    LinkEvent::Frame(FromManager::Connect { builder, address }) => {
                        self.connect_joining(builder, &address, &queues.data);
                    }
                    LinkEvent::Frame(_) => self.core.handle_malformed(),
                    LinkEvent::ManagerLost => self.core.handle_manager_lost(self.clock.now()),
                    LinkEvent::StandbyJoined => self.core.handle_standby_joined(self.clock.now()),
                    LinkEvent::StandbyLost => self.core.handle_standby_lost(self.clock.now()),
                    LinkEvent::NewTerm(membership) => self.follow(&membership, &mut link, &mut queues),
                }
            }
            if let Some(report) = self.core.poll_report() {
                // The parent gets the report, too.
                link.send(&ToManager::Readout(report.clone()));
                return Ok((report, self.input.statistics()));
            }
        }
    }

    /// The standby manager takes over.
    fn follow(&mut self, membership: &Membership, link: &mut ManagerLink, queues: &mut WaitSet) {
        let Some(state) = self.core.handle_new_term(membership, self.clock.now()) else {
            return link.refuse("the run ends, or has changed");
        };
        let state = ToManager::ReadoutState(state);
        match link.follow(membership, &state, (&self.device, &queues.waiter, &self.control_options)) {
            Ok((control, queue)) => (self.control, queues.control) = (control, queue),
            Err(error) => {
                tracing::warn!(%error, "no connection to the manager of the new term");
                self.core.handle_manager_lost(self.clock.now());
            }
        }
        // The new manager does not know which events are there.
        self.available_sent.1 = std::time::Instant::now() - self.alive_interval;
    }

    /// Connects to a builder unit that joins the run. It does not join if a readout unit cannot reach it.
    fn connect_joining(&mut self, bu: BuIndex, address: &str, queue: &CompletionQueue) {
        let deadline = Deadline::after(CONNECT_TIMEOUT.min(self.alive_interval));
        let queue = (&self.device, queue, &self.connection);
        match Peer::connect(bu, address, self.ru, queue, &self.requests, &self.security, deadline) {
            Ok(peer) => {
                if let Some(place) = self.peers.get_mut(bu.index()) {
                    *place = Some(peer);
                }
            }
            Err(error) => tracing::warn!(%bu, %error, "no connection to a builder unit that joins"),
        }
    }

    /// Makes progress until a manager's stream is readable or the run is over. Returns whether one is.
    fn wait(&mut self, queues: &mut WaitSet, link: &ManagerLink) -> Result<bool, ProcessError> {
        let WaitSet { waiter, control, data } = queues;
        let descriptor = self.input.descriptor().map(|input| input.try_clone_to_owned());
        let descriptor = descriptor.transpose().context("wait for the input")?;
        let mut others = link.descriptors();
        let streams = others.len();
        others.extend(descriptor.as_ref().map(WaitFd::readable));
        loop {
            let core = self.clock.deadline(self.core.poll_timeout());
            let input = Deadline::at(self.input_timeout());
            waiter.wait(&[control, data], &mut others, core.earlier(input), || self.progress(data))?;
            let is_ready = others[..streams].iter().any(WaitFd::is_ready);
            // A core that has reported has no timeout.
            if is_ready || self.core.poll_timeout().is_none() || self.is_news_due() {
                return Ok(is_ready);
            }
        }
    }

    /// When the input or the manager's knowledge of it has to be looked at next.
    fn input_timeout(&self) -> std::time::Instant {
        let news = self.news_due();
        self.input.poll_timeout().map_or(news, |input| input.min(news))
    }

    /// When the manager has to be told which events are there.
    fn news_due(&self) -> std::time::Instant {
        let (told, at) = self.available_sent;
        at + if self.available > told { AVAILABLE_INTERVAL } else { self.alive_interval }
    }

    /// Whether the manager has to be told which events are there.
    fn is_news_due(&self) -> bool {
        self.news_due() <= std::time::Instant::now()
    }

    /// Tells the manager which events are there.
    fn announce_available(&mut self, link: &mut ManagerLink) {
        if self.is_news_due() {
            let events = self.available.max(self.available_sent.0);
            self.available_sent = (events, std::time::Instant::now());
            link.send(&ToManager::Available { events });
        }
    }

    /// Handles messages and completions, and sends batches. Returns whether there was any.
    fn progress(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = self.control.progress();
        let now = self.clock.now();
        loop {
            match self.control.receive() {
                Received::Message(term, message) => self.core.handle_message(term, message, now),
                Received::Malformed => self.core.handle_malformed(),
                Received::Nothing => break,
            }
        }
        while let Some(batch) = self.core.poll_released() {
            self.input.release(&batch);
        }
        self.available = self.input.poll_available(std::time::Instant::now());
        any |= self.take_completions(queue)?;
        while let Some(send) = self.core.poll_send() {
            any = true;
            self.send(send)?;
        }
        if let Some(error) = self.input.failure() {
            return Err(error);
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
                let (builder, slot) = decode_wr_id(completion.wr_id());
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
    fn send(&mut self, send: BatchSend) -> Result<(), ProcessError> {
        let builder = send.assignment.builder;
        let payload = self.compose(&send)?;
        let Some(peer) = &mut self.peers[builder.index()] else {
            // The manager assigns batches only to builder units that are connected.
            self.core.handle_unsent(send, payload);
            return Ok(());
        };
        peer.batches += 1;
        match peer.pair.post_list(&mut peer.list) {
            Ok(()) => self.core.handle_posted(send, payload),
            Err(error) if error.posted == 0 => self.core.handle_unsent(send, payload),
            Err(_) => {
                self.core.handle_posted(send, payload);
                self.core.handle_unreachable(builder);
            }
        }
        Ok(())
    }

    /// Builds the work requests of a batch.
    fn compose(&mut self, send: &BatchSend) -> Result<BatchPayload, ProcessError> {
        let Assignment { batch, builder, slot, .. } = send.assignment;
        let mut payload = BatchPayload::default();
        let Some(peer) = &mut self.peers[builder.index()] else { return Ok(payload) };
        let pool =
            (builder.index() as u64 * self.window + peer.batches % self.window) * self.headers_per_batch;
        let slot_offset = u64::from(slot.0) * self.slot_bytes;
        let id = encode_wr_id(builder, slot);
        let immediate = send.immediate.encode();
        let full = |source: &SourceArea, full: ListFull| source.input_changed(full.to_string());
        let mut left = self.sources.len();
        let mut open: Option<CoalescedWrite> = None;
        for (position, source) in self.sources.iter().enumerate() {
            left -= 1;
            let room = &mut self.header[source.header_offset as usize..];
            let packet = self.input.packet(position, &batch, room, &mut self.extents)?;
            if packet.total_len > source.area.capacity {
                let (len, room) = (packet.total_len, source.area.capacity);
                return Err(source.input_changed(format!("a packet has {len} B, its area {room} B")));
            }
            payload.fragments += packet.n_fragments;
            payload.bytes.0 += u64::from(packet.payload_len);

            if source.is_copied {
                let bytes = self.input.mapping().unwrap_or(&[]);
                copy_extents(bytes, &self.extents, &mut room[packet.header_len as usize..]);
                let end = source.header_offset + u64::from(packet.total_len);
                match open.as_mut().filter(|write| write.accepts(source)) {
                    Some(write) => write.end = end,
                    None => {
                        let next =
                            CoalescedWrite { start: source.header_offset, end, to: source.area.offset };
                        if let Some(write) = open.replace(next) {
                            let (sge, remote) =
                                place(&self.headers, &self.header, pool, &write, peer.landing, slot_offset)?;
                            let added = peer.list.write(&[sge], remote, Signal::No, id);
                            added.map_err(|error| full(source, error))?;
                        }
                    }
                }
                continue;
            }
            if let Some(write) = open.take() {
                let (sge, remote) =
                    place(&self.headers, &self.header, pool, &write, peer.landing, slot_offset)?;
                let added = peer.list.write(&[sge], remote, Signal::No, id);
                added.map_err(|error| full(source, error))?;
            }
            let room = &self.header[source.header_offset as usize..];
            let header_at = pool + source.header_offset;
            self.headers.copy_from_slice(header_at, &room[..packet.header_len as usize])?;
            self.sges.clear();
            self.sges.push(self.headers.sge(header_at, packet.header_len)?);
            if let Some(mapping) = &self.mapping {
                for extent in &self.extents {
                    self.sges.push(mapping.sge(extent.offset, extent.len)?);
                }
            }
            let mut to = slot_offset + source.area.offset;
            let mut requests = self.sges.chunks(self.max_sges).peekable();
            while let Some(sges) = requests.next() {
                let len = sges.iter().map(|sge| u64::from(sge.len())).sum();
                let remote = peer.landing.at(to, len)?;
                to += len;
                let added = if left == 0 && requests.peek().is_none() {
                    peer.list.write_imm(sges, remote, immediate, Signal::Yes, id)
                } else {
                    peer.list.write(sges, remote, Signal::No, id)
                };
                added.map_err(|error| full(source, error))?;
            }
        }
        if let (Some(write), Some(source)) = (open, self.sources.last()) {
            let (sge, remote) = place(&self.headers, &self.header, pool, &write, peer.landing, slot_offset)?;
            let added = peer.list.write_imm(&[sge], remote, immediate, Signal::Yes, id);
            added.map_err(|error| full(source, error))?;
        }
        Ok(payload)
    }
}

/// Copies the packets of a write into the registered pool. Returns their place there and in the slot.
fn place(
    headers: &Region,
    made: &[u8],
    pool: u64,
    write: &CoalescedWrite,
    landing: RemoteMemory,
    slot_offset: u64,
) -> Result<(Sge, RemoteAddress), ProcessError> {
    let len = write.end - write.start;
    headers.copy_from_slice(pool + write.start, &made[write.start as usize..write.end as usize])?;
    // Bounded by `MAX_COALESCED` and one area.
    let sge = headers.sge(pool + write.start, len as u32)?;
    Ok((sge, landing.at(slot_offset + write.to, len)?))
}

/// Appends the extents of a packet to its header.
fn copy_extents(mapping: &[u8], extents: &[FileExtent], mut to: &mut [u8]) {
    for extent in extents {
        let from = &mapping[extent.offset as usize..][..extent.len as usize];
        let (place, rest) = std::mem::take(&mut to).split_at_mut(from.len());
        place.copy_from_slice(from);
        to = rest;
    }
}

impl SourceArea {
    /// Error: the input's packets do not match the plan.
    fn input_changed(&self, what: String) -> ProcessError {
        ProcessError::InputChanged { input: SourceId(self.area.source).to_string(), what }
    }
}

/// Work requests and scatter/gather elements of a batch.
struct BatchRequests {
    extents_per_packet: usize,
    sges_per_request: usize,
    /// Work requests of a batch.
    requests: usize,
    /// Scatter/gather elements of a batch.
    sges: usize,
}

impl BatchRequests {
    fn of(sources: usize, input: &dyn Source, config: &RunConfig, max_sges: u32) -> BatchRequests {
        let extents = input.max_extents(config.plan.batch.get().into());
        let extents_per_packet = usize::try_from(extents).unwrap_or(usize::MAX);
        let per_packet = 1 + extents_per_packet;
        let sges_per_request = per_packet.min(max_sges.clamp(2, MAX_SGES) as usize);
        BatchRequests {
            extents_per_packet,
            sges_per_request,
            requests: sources * per_packet.div_ceil(sges_per_request),
            sges: sources * per_packet,
        }
    }

    fn connection(&self, window: u64, options: RcOptions) -> RcOptions {
        let depth = (self.requests as u64).saturating_mul(window);
        RcOptions {
            send_depth: u32::try_from(depth).unwrap_or(u32::MAX),
            recv_depth: 1,
            send_sges: self.sges_per_request as u32,
            max_inline: 0,
            access: Access::SOURCE,
            ..options
        }
    }
}

/// The work request id holds the batch's destination.
fn encode_wr_id(builder: BuIndex, slot: SlotIndex) -> WrId {
    WrId(u64::from(builder.0) << 16 | u64::from(slot.0))
}

fn decode_wr_id(id: WrId) -> (BuIndex, SlotIndex) {
    (BuIndex((id.0 >> 16) as u16), SlotIndex(id.0 as u16))
}

/// The unit's packet areas, with their room in a batch's part of the pool, and the size of that part. The pool holds
/// headers of long packets that are mapped, and whole packets otherwise.
fn source_areas(config: &RunConfig, ru: RuIndex, is_mapped: bool) -> (Vec<SourceArea>, u64) {
    let mut end = 0u64;
    let mut sources: Vec<SourceArea> = Vec::new();
    for area in config.layout.of_readout(ru) {
        let is_copied = !is_mapped || area.capacity <= MAX_COPIED;
        let aligned = end.next_multiple_of(mfp::HEADER_ALIGNMENT.into());
        let header_offset = match sources.last().filter(|last| last.is_copied && is_copied) {
            // At the same distance as in the slot.
            Some(last) => last.header_offset + (area.offset - last.area.offset),
            None => aligned,
        };
        let len = if is_copied { area.capacity } else { area.header_len };
        end = header_offset + u64::from(len);
        sources.push(SourceArea { area: *area, header_offset, is_copied });
    }
    (sources, end.next_multiple_of(mfp::HEADER_ALIGNMENT.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(offset: u64, capacity: u32, header_offset: u64, is_copied: bool) -> SourceArea {
        let area = PacketArea { source: 1, kind: 1, readout: RuIndex(0), offset, capacity, header_len: 64 };
        SourceArea { area, header_offset, is_copied }
    }

    #[test]
    fn a_write_carries_packets_at_the_distances_of_the_slot() {
        let write = CoalescedWrite { start: 1000, end: 1200, to: 5000 };
        assert!(write.accepts(&source(5256, 256, 1256, true)));
        // Another distance, too large a gap, not in the pool.
        assert!(!write.accepts(&source(5320, 256, 1256, true)));
        assert!(!write.accepts(&source(6456, 256, 2456, true)));
        assert!(!write.accepts(&source(5256, 256, 1256, false)));
        let long = CoalescedWrite { end: 1000 + MAX_COALESCED, ..write };
        let next = long.end;
        assert!(!long.accepts(&source(5000 + next - 1000, 256, next, true)));
    }

    #[test]
    fn extents_follow_each_other() {
        let mapping: Vec<u8> = (0..100).collect();
        let mut to = [0; 5];
        let extents = [FileExtent { offset: 7, len: 2 }, FileExtent { offset: 90, len: 3 }];
        copy_extents(&mapping, &extents, &mut to);
        assert_eq!(to, [7, 8, 90, 91, 92]);
    }
}
