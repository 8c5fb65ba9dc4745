//! Links over verbs: one reliable connection to each neighbour.
//!
//! A packet is one WRITE with immediate data into a slot of the neighbour. Immediate data:
//!
//! ```text
//!   kind (2): 0 packet, 1 credits, 2 idle │ virtual channel (3) │ slot (11) │ diagnosis (16)
//! ```
//! Credits are a WRITE of five counts. A receive is posted for every slot and for every message of credits, so the
//! neighbour never waits for one. A keep-alive on a silent link is a WRITE of one word, without immediate data: it wakes nobody,
//! and the neighbour reads it when it looks at its timers.
//!
//! All connections of a direction use the same slots. A node that takes a connection into use begins its
//! slots anew and says so by an idle frame: before that, its slots may hold packets of the former connection,
//! so the neighbour sends none.

mod connect;
mod early;
mod handshake;

pub(crate) use connect::{Connected, LinkConnector, LinkStream, connect_all};
pub use connect::{LinkError, Links as Connections};
pub use handshake::{Identity, Mismatch};

use std::io;
use std::sync::Arc;

use millstream_rdma::memory::OutOfBounds;
use millstream_rdma::queue::{RecvList, Signal};
use millstream_rdma::{Access, Completion, Device, QueuePair, RemoteMemory, Sge, WrId};
use millstream_torus_core::header::{HEADER_BYTES, HeaderError};
use millstream_torus_core::route::VirtualChannel;
use millstream_torus_core::router::SlotRef;
use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{Direction, Header};

use early::EarlyCompletions;

use crate::engine::{Engine, EngineOptions, Links, Payload};
use crate::layout::{slot_offset, slots_bytes};
use crate::memory::Memory;

/// WRITEs to a neighbour whose completion has not been seen.
pub const PLACES: u16 = 64;
/// Keep-alives from one with a completion to the next. The others raise no event at their own node.
pub(crate) const KEEPALIVES: u16 = 16;
/// The place of a WRITE that needs none.
const NO_PLACE: u16 = u16::MAX;
/// Receives for credits and idle frames.
const EXTRA_RECEIVES: u32 = 96;
/// A header, and as many bytes of payload that come from the engine.
const PLACE_BYTES: usize = 2 * HEADER_BYTES;
/// Counts of one direction, and its keep-alive.
const CREDIT_BYTES: usize = 64;
const KEEPALIVE_AT: usize = 8 * VirtualChannel::COUNT;

const RECEIVE: u64 = 1 << 63;

/// Direction and incarnation of a connection in the number of a work request.
fn link_bits(direction: Direction, incarnation: u8) -> u64 {
    (direction.index() as u64) << 16 | u64::from(incarnation) << 24
}

/// What an immediate value says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A packet in a slot.
    Packet {
        /// The virtual channel.
        vc: VirtualChannel,
        /// The slot.
        slot: u16,
    },
    /// Counts of freed slots.
    Credits,
    /// Nothing but the diagnosis word.
    Idle,
}

/// A frame of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: FrameKind,
    /// The neighbour's diagnosis word.
    pub diagnosis: u16,
}

impl Frame {
    /// As immediate data.
    #[must_use]
    pub fn encode(self) -> u32 {
        let (kind, vc, slot) = match self.kind {
            FrameKind::Packet { vc, slot } => (0, vc.0, slot),
            FrameKind::Credits => (1, 0, 0),
            FrameKind::Idle => (2, 0, 0),
        };
        kind << 30 | u32::from(vc) << 27 | u32::from(slot) << 16 | u32::from(self.diagnosis)
    }

    /// From immediate data.
    #[must_use]
    pub fn decode(value: u32) -> Option<Frame> {
        let kind = match value >> 30 {
            0 => FrameKind::Packet {
                vc: VirtualChannel((value >> 27 & 7) as u8),
                slot: (value >> 16 & 0x7ff) as u16,
            },
            1 => FrameKind::Credits,
            2 => FrameKind::Idle,
            _ => return None,
        };
        Some(Frame { kind, diagnosis: value as u16 })
    }
}

/// What a place of the send queue holds until its completion.
#[derive(Debug)]
enum InFlight {
    /// Payload of a packet that was injected here.
    Memory(#[allow(dead_code, reason = "kept, not read")] Option<Arc<Memory>>),
    /// A packet in transit: its slot is released then.
    Slot(SlotRef),
}

/// One neighbour.
#[derive(Debug)]
struct Side {
    /// Distinguishes its completions from those of earlier connections of this direction.
    incarnation: u8,
    pair: QueuePair,
    slots: RemoteMemory,
    credits: RemoteMemory,
    free: Vec<u16>,
    in_flight: Vec<Option<InFlight>>,
    receives: RecvList,
    alive: bool,
    /// The neighbour has taken the connection into use: its first frame has arrived.
    ready: bool,
    frames_sent: u64,
    keepalives_sent: u64,
    /// The neighbour's last one.
    keepalive_seen: u64,
}

/// What a completion means for the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A frame arrived.
    Frame {
        /// The neighbour's direction.
        side: Direction,
        /// The frame.
        frame: Frame,
    },
    /// A link failed: its queue pair is in error, or the neighbour broke the rules.
    Failed {
        /// The neighbour's direction.
        side: Direction,
    },
}

/// Why a frame is refused.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The header is wrong.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The header names another virtual channel than the immediate data.
    #[error("packet of virtual channel {found} in a slot of virtual channel {expected}")]
    Channel {
        /// The header's.
        found: u8,
        /// That of the immediate data.
        expected: u8,
    },
    /// The slot does not exist, or is not the next one.
    #[error("{0}")]
    Slot(String),
}

/// The links of a node process.
#[derive(Debug)]
pub struct VerbsLinks {
    options: EngineOptions,
    slots: Arc<Memory>,
    credits: Arc<Memory>,
    /// Headers that leave, by direction and place; then counts that leave.
    out: Arc<Memory>,
    sides: [Option<Side>; DIRECTIONS],
    diagnosis: [u16; DIRECTIONS],
    early: EarlyCompletions<Completion>,
}

impl VerbsLinks {
    /// Memory for links that are not connected.
    ///
    /// # Errors
    /// The system or the device refuses.
    pub fn new(device: &Device, options: EngineOptions) -> io::Result<VerbsLinks> {
        let memory = |name: &str, len, access| {
            Memory::allocate(name, len, Some((device, access))).map(|(memory, _)| Arc::new(memory))
        };
        let places = DIRECTIONS * (usize::from(PLACES) * PLACE_BYTES);
        Ok(VerbsLinks {
            options,
            slots: memory("millstream-torus-slots", slots_bytes(&options), Access::REMOTE_WRITE)?,
            credits: memory("millstream-torus-credits", DIRECTIONS * CREDIT_BYTES, Access::REMOTE_WRITE)?,
            out: memory("millstream-torus-out", places, Access::LOCAL_WRITE)?,
            sides: Default::default(),
            diagnosis: [0; DIRECTIONS],
            early: EarlyCompletions::default(),
        })
    }

    /// Begins to connect a link. The new connection's completions carry the number that this returns.
    pub(crate) fn begin(&mut self, direction: Direction) -> u8 {
        self.early.begin(direction)
    }

    /// The next completion that arrived before its connection was in use.
    pub(crate) fn early(&mut self) -> Option<Completion> {
        self.early.take(|direction, incarnation| {
            self.sides[direction.index()].as_ref().is_some_and(|side| side.incarnation == incarnation)
        })
    }

    /// Releases the slots that an old connection of a link holds.
    pub(crate) fn release_slots(&mut self, direction: Direction, engine: &mut Engine) {
        let Some(side) = &mut self.sides[direction.index()] else { return };
        for held in side.in_flight.iter_mut().filter_map(Option::take) {
            if let InFlight::Slot(slot) = held {
                engine.release(slot);
            }
        }
    }

    /// Receives that a connection needs.
    fn receives(options: &EngineOptions) -> u32 {
        VirtualChannel::COUNT as u32 * u32::from(options.slots) + EXTRA_RECEIVES
    }

    /// Entries of a completion queue for all links.
    #[must_use]
    pub fn completions(options: &EngineOptions) -> u32 {
        // A failed link completes its keep-alives, too.
        DIRECTIONS as u32 * (VerbsLinks::receives(options) + u32::from(PLACES + KEEPALIVES))
    }

    /// Takes a connection into use, and tells the neighbour.
    fn connected(
        &mut self,
        direction: Direction,
        incarnation: u8,
        pair: QueuePair,
        slots: RemoteMemory,
        credits: RemoteMemory,
    ) {
        // The neighbour frees nothing before this node sends, so no count of the new connection is here yet.
        let words = self.credits.mapping().words64(direction.index() * CREDIT_BYTES, CREDIT_BYTES / 8);
        words.iter().for_each(|word| word.store(0, std::sync::atomic::Ordering::Release));
        self.sides[direction.index()] = Some(Side {
            incarnation,
            pair,
            slots,
            credits,
            free: (0..PLACES).rev().collect(),
            in_flight: (0..PLACES).map(|_| None).collect(),
            receives: RecvList::new(64, 0),
            alive: true,
            ready: false,
            frames_sent: 0,
            keepalives_sent: 0,
            keepalive_seen: 0,
        });
        self.send_idle(direction);
    }

    /// Frames sent so far over a link.
    #[must_use]
    pub fn frames_sent(&self, direction: Direction) -> u64 {
        self.sides[direction.index()].as_ref().map_or(0, |side| side.frames_sent)
    }

    /// The diagnosis word of later frames.
    pub fn set_diagnosis(&mut self, direction: Direction, word: u16) {
        self.diagnosis[direction.index()] = word;
    }

    /// Takes a link out of use. Its work requests are flushed.
    pub fn shut_down(&mut self, direction: Direction) {
        if let Some(side) = &mut self.sides[direction.index()]
            && std::mem::replace(&mut side.alive, false)
            && let Err(error) = side.pair.shut_down()
        {
            tracing::warn!("link {direction}: {error}");
        }
    }

    /// Handles a completion. A slot whose bytes have left is released.
    pub fn handle_completion(&mut self, completion: &Completion, engine: &mut Engine) -> Option<LinkEvent> {
        let id = completion.wr_id().0;
        let side = side_of(id)?;
        let incarnation = (id >> 24) as u8;
        let link = self.sides[side.index()].as_mut().filter(|link| link.incarnation == incarnation);
        let Some(link) = link else {
            self.early.keep(side, incarnation, *completion);
            return None;
        };
        if id & RECEIVE == 0 {
            let place = id as u16;
            if let Some(held) = link.in_flight.get_mut(usize::from(place)) {
                if let Some(InFlight::Slot(slot)) = held.take() {
                    engine.release(slot);
                }
                link.free.push(place);
            }
        } else if completion.is_success() {
            // A full list is posted at once; it has room again then.
            if link.receives.recv(&[], WrId(id)).is_err() {
                post_receives(link);
                let _ = link.receives.recv(&[], WrId(id));
            }
            let frame = completion.imm().and_then(Frame::decode);
            link.ready |= frame.is_some();
            return Some(match frame {
                Some(frame) if link.alive => LinkEvent::Frame { side, frame },
                Some(_) => return None,
                None => LinkEvent::Failed { side },
            });
        }
        (!completion.is_success() && link.alive).then_some(LinkEvent::Failed { side })
    }

    /// Posts the receives that completions used.
    pub fn post_receives(&mut self) {
        self.sides.iter_mut().flatten().filter(|side| !side.receives.is_empty()).for_each(post_receives);
    }

    /// Gives a frame to the engine.
    ///
    /// # Errors
    /// [`FrameError`]: the link should be taken down.
    pub fn handle_frame(
        &mut self,
        side: Direction,
        frame: Frame,
        engine: &mut Engine,
    ) -> Result<(), FrameError> {
        match frame.kind {
            FrameKind::Idle => Ok(()),
            FrameKind::Credits => {
                let words =
                    self.credits.mapping().words64(side.index() * CREDIT_BYTES, VirtualChannel::COUNT);
                let freed =
                    std::array::from_fn(|vc| words[vc].load(std::sync::atomic::Ordering::Acquire) as u32);
                engine.handle_credits(side, freed).map_err(|error| FrameError::Slot(error.to_string()))
            }
            FrameKind::Packet { vc, slot } => {
                if vc.index() >= VirtualChannel::COUNT || slot >= self.options.slots {
                    return Err(FrameError::Slot(format!("no slot {slot} of virtual channel {}", vc.0)));
                }
                let mut bytes = [0; HEADER_BYTES];
                let at = slot_offset(&self.options, SlotRef { side, vc, index: slot });
                self.slots.load(at, &mut bytes).map_err(|error| FrameError::Slot(error.to_string()))?;
                let header = Header::decode(&bytes)?;
                if header.vc != vc {
                    return Err(FrameError::Channel { found: header.vc.0, expected: vc.0 });
                }
                engine.handle_packet(side, slot, header).map_err(|error| FrameError::Slot(error.to_string()))
            }
        }
    }

    /// Sends a frame with nothing but the diagnosis word.
    pub fn send_idle(&mut self, direction: Direction) {
        let frame = Frame { kind: FrameKind::Idle, diagnosis: self.diagnosis[direction.index()] };
        let Some(link) = self.sides[direction.index()].as_mut() else { return };
        // No bytes: any valid address does.
        let Ok(nowhere) = link.credits.at(0, 0) else { return };
        self.post(direction, &[], nowhere, frame, InFlight::Memory(None));
    }

    /// Shows a neighbour that this node lives: its diagnosis word, and a count that differs from the last one.
    pub fn send_keepalive(&mut self, direction: Direction) {
        let diagnosis = u64::from(self.diagnosis[direction.index()]);
        let Some(link) = self.sides[direction.index()].as_mut().filter(|link| link.alive) else { return };
        let there = direction.reversed().index() * CREDIT_BYTES + KEEPALIVE_AT;
        let Ok(to) = link.credits.at(there as u64, 8) else { return };
        link.keepalives_sent += 1;
        let word = (link.keepalives_sent << 16 | diagnosis).to_le_bytes();
        let has_completion = link.keepalives_sent.is_multiple_of(KEEPALIVES.into());
        let signal = if has_completion { Signal::Yes } else { Signal::No };
        let id = WrId(link_bits(direction, link.incarnation) | u64::from(NO_PLACE));
        if let Err(error) = link.pair.post_write_inline(&word, to, signal, id) {
            tracing::warn!("link {direction}: {error}");
        }
    }

    /// The diagnosis word of the neighbour's newest keep-alive, once.
    pub fn take_keepalive(&mut self, side: Direction) -> Option<u16> {
        let link = self.sides[side.index()].as_mut().filter(|link| link.alive)?;
        let word = self.credits.mapping().word64(side.index() * CREDIT_BYTES + KEEPALIVE_AT);
        let word = word.load(std::sync::atomic::Ordering::Acquire);
        (std::mem::replace(&mut link.keepalive_seen, word) != word).then_some(word as u16)
    }

    /// Posts a WRITE with immediate data. A failure shows itself by the completions of the queue pair.
    fn post(
        &mut self,
        direction: Direction,
        from: &[Sge],
        to: millstream_rdma::memory::RemoteAddress,
        frame: Frame,
        holds: InFlight,
    ) -> bool {
        let Some(link) = self.sides[direction.index()].as_mut().filter(|link| link.alive) else {
            return false;
        };
        let Some(place) = link.free.pop() else { return false };
        let id = WrId(link_bits(direction, link.incarnation) | u64::from(place));
        if let Err(error) = link.pair.post_write_imm(from, to, frame.encode(), Signal::Yes, id) {
            tracing::warn!("link {direction}: {error}");
            link.free.push(place);
            return false;
        }
        link.frames_sent += 1;
        link.in_flight[usize::from(place)] = Some(holds);
        true
    }

    fn out_place(&self, direction: Direction) -> Option<u64> {
        let link = self.sides[direction.index()].as_ref()?;
        let place = usize::from(*link.free.last()?);
        Some(((direction.index() * usize::from(PLACES) + place) * PLACE_BYTES) as u64)
    }

    /// Writes the header and returns what is sent.
    fn gather(
        &self,
        direction: Direction,
        header: &Header,
        payload: Payload<'_>,
    ) -> Result<(Vec<Sge>, InFlight), OutOfBounds> {
        let bytes = header.encode();
        let sge = |memory: &Memory, at: u64, length: usize| match memory.region() {
            Some(region) => region.sge(at, length as u32),
            None => {
                Err(OutOfBounds { offset: at, length: length as u64, size: 0, memory: "unregistered memory" })
            }
        };
        let outside = |_| OutOfBounds { offset: 0, length: 0, size: 0, memory: "a slot" };
        if let Payload::Slot { slot, length } = payload {
            let at = slot_offset(&self.options, slot);
            self.slots.store(at, &bytes).map_err(outside)?;
            let all = sge(&self.slots, at, HEADER_BYTES + length as usize)?;
            return Ok((vec![all], InFlight::Slot(slot)));
        }
        let at = self.out_place(direction).unwrap_or_default();
        self.out.store(at, &bytes).map_err(outside)?;
        match payload {
            Payload::Memory { memory, offset, length } if length > 0 => {
                let sges = vec![sge(&self.out, at, HEADER_BYTES)?, sge(memory, offset, length as usize)?];
                Ok((sges, InFlight::Memory(Some(Arc::clone(memory)))))
            }
            Payload::Bytes(own) => {
                self.out.store(at + HEADER_BYTES as u64, own).map_err(outside)?;
                Ok((vec![sge(&self.out, at, HEADER_BYTES + own.len())?], InFlight::Memory(None)))
            }
            _ => Ok((vec![sge(&self.out, at, HEADER_BYTES)?], InFlight::Memory(None))),
        }
    }
}

fn post_receives(link: &mut Side) {
    // A queue pair in error takes none, and its completions say so.
    let _ = link.pair.post_recv_list(&mut link.receives);
    link.receives.clear();
}

impl Links for VerbsLinks {
    fn is_ready(&self, direction: Direction) -> bool {
        self.sides[direction.index()]
            .as_ref()
            .is_some_and(|link| link.alive && link.ready && !link.free.is_empty())
    }

    fn send(&mut self, direction: Direction, slot: u16, header: &Header, payload: Payload<'_>) -> bool {
        let is_transit = matches!(payload, Payload::Slot { .. });
        let Some(link) = &self.sides[direction.index()] else { return true };
        let place = SlotRef { side: direction.reversed(), vc: header.vc, index: slot };
        let remote = link.slots;
        let (sges, holds) = match self.gather(direction, header, payload) {
            Ok(gathered) => gathered,
            Err(error) => {
                tracing::error!("link {direction}: {error}");
                return true;
            }
        };
        let length: u64 = sges.iter().map(|sge| u64::from(sge.len())).sum();
        let Ok(to) = remote.at(slot_offset(&self.options, place), length) else { return true };
        let diagnosis = self.diagnosis[direction.index()];
        let frame = Frame { kind: FrameKind::Packet { vc: header.vc, slot }, diagnosis };
        let posted = self.post(direction, &sges, to, frame, holds);
        // A slot in transit is released by its completion.
        !(posted && is_transit)
    }

    fn send_credits(&mut self, direction: Direction, freed: [u32; VirtualChannel::COUNT]) {
        let Some(at) = self.out_place(direction) else { return };
        let mut bytes = [0; 8 * VirtualChannel::COUNT];
        for (place, count) in bytes.chunks_exact_mut(8).zip(freed) {
            place.copy_from_slice(&u64::from(count).to_le_bytes());
        }
        let Some(link) = &self.sides[direction.index()] else { return };
        let there = (direction.reversed().index() * CREDIT_BYTES) as u64;
        let Ok(to) = link.credits.at(there, bytes.len() as u64) else { return };
        // A place holds more bytes than the counts have.
        let _ = self.out.store(at, &bytes);
        let Some(Ok(sge)) = self.out.region().map(|region| region.sge(at, bytes.len() as u32)) else {
            return;
        };
        let frame = Frame { kind: FrameKind::Credits, diagnosis: self.diagnosis[direction.index()] };
        self.post(direction, &[sge], to, frame, InFlight::Memory(None));
    }

    fn slot(&self, slot: SlotRef) -> (&Memory, u64) {
        (&self.slots, slot_offset(&self.options, slot) + HEADER_BYTES as u64)
    }
}

/// The link of a work request.
fn side_of(id: u64) -> Option<Direction> {
    Direction::from_index((id >> 16 & 0xff) as usize)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use millstream_rdma::wait::WaitOptions;
    use millstream_rdma::{CompletionQueue, CompletionWaiter, Deadline, DeviceSelector};
    use millstream_torus_core::{Dimensions, NodeNumber};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// One end of a link.
    struct End {
        engine: Engine,
        links: VerbsLinks,
        queue: CompletionQueue,
        connector: LinkConnector,
        _waiter: CompletionWaiter,
    }

    impl End {
        fn new(device: &Device, torus: Dimensions, here: NodeNumber) -> End {
            let options = EngineOptions::default();
            let wait = WaitOptions { spin: Duration::ZERO, descriptors_every: Duration::from_millis(1) };
            let waiter = CompletionWaiter::new(device, wait).unwrap();
            let queue = waiter.completion_queue(VerbsLinks::completions(&options)).unwrap();
            let links = VerbsLinks::new(device, options).unwrap();
            let parts = Connections {
                device,
                queue: &queue,
                torus,
                here,
                key: 1,
                options,
                listener: &millstream_rdma::connect::listen("127.0.0.1:0").unwrap(),
                peers: &[],
                deadline: Deadline::after(LONG),
            };
            let connector = LinkConnector::new(&links, &parts).unwrap();
            End { engine: Engine::new(torus, here, options), links, queue, connector, _waiter: waiter }
        }

        /// Handles completions until one is there.
        fn receive(&mut self) -> LinkEvent {
            let (start, mut completions) = (Instant::now(), [Completion::EMPTY; 1]);
            loop {
                assert!(start.elapsed() < LONG, "no frame arrives");
                let taken = self.queue.poll(&mut completions).unwrap().len();
                let event = (completions[..taken].iter())
                    .find_map(|completion| self.links.handle_completion(completion, &mut self.engine));
                if let Some(event) = event {
                    return event;
                }
                std::thread::yield_now();
            }
        }
    }

    /// Connects two nodes. Neither has taken the connection into use.
    fn connect(ends: &mut [End; 2], link: Direction) -> [(Connected, u8); 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let [dials, accepts] = ends;
        let incarnations = [dials.links.begin(link), accepts.links.begin(link.reversed())];
        let connected = std::thread::scope(|scope| {
            let dialled = scope.spawn(|| {
                dials.connector.dial(link, &address, incarnations[0], Deadline::after(LONG)).unwrap()
            });
            let (stream, _) = listener.accept().unwrap();
            let (sender, proved) = std::sync::mpsc::channel();
            accepts.connector.accept(&Default::default(), stream, move |direction, stream| {
                sender.send((direction, stream)).unwrap();
            });
            let (direction, stream) = proved.recv_timeout(LONG).unwrap();
            let deadline = Deadline::after(LONG);
            let accepted = accepts.connector.finish(direction, stream, incarnations[1], deadline).unwrap();
            [dialled.join().unwrap(), accepted]
        });
        let [dialled, accepted] = connected;
        [(dialled, incarnations[0]), (accepted, incarnations[1])]
    }

    /// Strangers connect first: one that says nothing, and one that names a link.
    #[test]
    fn strangers_do_not_keep_neighbours_out_at_the_start() {
        use std::io::Write as _;

        let device = millstream_rdma::device::open(&DeviceSelector::from_environment()).unwrap();
        let torus: Dimensions = "2x1x1".parse().unwrap();
        let listeners = [(); 2].map(|()| millstream_rdma::connect::listen("127.0.0.1:0").unwrap());
        let peers = listeners.each_ref().map(|listener| listener.address().to_string());
        let connect = || {
            let mut streams = peers.each_ref().map(|address| std::net::TcpStream::connect(address).unwrap());
            streams.iter_mut().for_each(|stream| stream.write_all(b"mtorus3").unwrap());
            streams
        };
        let (_silent, mut named) = (connect(), connect());
        let hello = std::array::from_fn::<u8, 33, _>(|_| 0);
        named.iter_mut().for_each(|stream| stream.write_all(&hello).unwrap());
        std::thread::scope(|scope| {
            for (listener, node) in listeners.iter().zip(torus.all()) {
                let (device, peers) = (&device, &peers);
                scope.spawn(move || {
                    let End { mut links, queue, .. } = End::new(device, torus, node);
                    let options = EngineOptions::default();
                    let deadline = Deadline::after(LONG);
                    let (queue, here, key) = (&queue, node, 1);
                    let parts =
                        Connections { device, queue, torus, here, key, options, listener, peers, deadline };
                    assert_eq!(connect_all(&mut links, &parts).unwrap().len(), 1);
                });
            }
        });
    }

    /// The other end may still forward packets of the former connection from its slots.
    #[test]
    fn nothing_is_written_into_slots_before_the_neighbour_has_begun_them_anew() {
        let device = millstream_rdma::device::open(&DeviceSelector::from_environment()).unwrap();
        let torus: Dimensions = "2x1x1".parse().unwrap();
        let mut ends = [0, 1].map(|node| End::new(&device, torus, NodeNumber(node)));
        let link =
            Direction::ALL.into_iter().find(|&direction| torus.neighbour(NodeNumber(0), direction).is_some());
        let link = link.unwrap();
        for _ in 0..2 {
            let [(dialled, first), (accepted, second)] = connect(&mut ends, link);
            let [dials, accepts] = &mut ends;
            let _stream = dials.links.take(dialled, first);
            assert!(!dials.links.is_ready(link), "the neighbour has not taken the connection into use");
            let _stream = accepts.links.take(accepted, second);
            for (end, side) in [(dials, link), (accepts, link.reversed())] {
                let frame = Frame { kind: FrameKind::Idle, diagnosis: 0 };
                assert_eq!(end.receive(), LinkEvent::Frame { side, frame });
                assert!(end.links.is_ready(side));
                end.links.shut_down(side);
            }
        }
    }

    #[test]
    fn immediate_data_keep_every_field() {
        for vc in 0..VirtualChannel::COUNT as u8 {
            for slot in [0, 7, 2047] {
                let kind = FrameKind::Packet { vc: VirtualChannel(vc), slot };
                let frame = Frame { kind, diagnosis: 0xa5c3 };
                assert_eq!(Frame::decode(frame.encode()), Some(frame));
            }
        }
        for kind in [FrameKind::Credits, FrameKind::Idle] {
            let frame = Frame { kind, diagnosis: u16::MAX };
            assert_eq!(Frame::decode(frame.encode()), Some(frame));
        }
        assert_eq!(Frame::decode(u32::MAX), None);
    }
}
