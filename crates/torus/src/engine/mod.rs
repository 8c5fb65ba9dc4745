//! One node as a machine: operations, pairs, router. It does no I/O; [`Links`] carry its packets.
//!
//! ```text
//!   post ─► operation ─► packets ─► Sources ─► Router ═► Links ═► neighbour
//!           └──────── one Endpoint a port ──┘
//!                                                 │
//!   Event ◄─ memory, completion, notification ◄───┘ delivery
//! ```

mod deliver;
mod endpoint;
mod operation;
mod operations;
mod regions;
#[cfg(test)]
mod tests;

pub use operation::{AtomicOperation, Failure, Operation, Request, Span};
pub use regions::{OutsideAccess, RegionError, Regions};

use std::time::Duration;

use millstream_quantity::Instant;
use millstream_torus_core::epoch::{Answer, Effect, Order, Participant, Plan};
use millstream_torus_core::header::Kind;
use millstream_torus_core::route::{NodeTable, UpDown, VirtualChannel};
use millstream_torus_core::router::{Action, CreditError, INJECTION_PORTS, Origin, SlotError, SlotRef};
use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{
    DeadSet, Dimensions, Direction, Epoch, Header, NodeNumber, Port, Router, RouterOptions, TorusRouting,
};

use crate::memory::Memory;
use endpoint::Endpoint;
use operations::Packet;

/// Payload after which [`Engine::run`] returns (bytes): a copy of it takes a few milliseconds.
const RUN_BYTES: u32 = 8 << 20;
/// The same in packets, for large ones.
const RUN_PACKETS: u32 = 16;

/// Sizes and times of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Payload of a packet (bytes).
    pub packet: u32,
    /// Receive slots per virtual channel.
    pub slots: u16,
    /// Packets of a pair on their way.
    pub window: usize,
    /// Time without progress after which a pair repeats its packets.
    pub repeat: Duration,
}

impl EngineOptions {
    /// Sizes for node processes: a packet of many pages, because each costs a process microseconds.
    #[must_use]
    pub fn of_processes() -> EngineOptions {
        EngineOptions { packet: 32 << 10, ..EngineOptions::default() }
    }
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions { packet: 4096, slots: 8, window: 32, repeat: Duration::from_secs(2) }
    }
}

/// Payload of a packet that leaves.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'m> {
    /// Some bytes of the engine.
    Bytes(&'m [u8]),
    /// A part of registered memory.
    Memory {
        /// The memory.
        memory: &'m std::sync::Arc<Memory>,
        /// Start (bytes).
        offset: u64,
        /// Length (bytes).
        length: u32,
    },
    /// In the receive slot, behind its header.
    Slot {
        /// The slot. The links call [`Engine::release`] when its bytes have left.
        slot: SlotRef,
        /// Length (bytes).
        length: u32,
    },
}

/// The links of a node.
pub trait Links {
    /// Whether a packet can be sent now.
    fn is_ready(&self, direction: Direction) -> bool;

    /// Sends a packet into a slot of the neighbour. Returns whether the bytes have left already.
    fn send(&mut self, direction: Direction, slot: u16, header: &Header, payload: Payload<'_>) -> bool;

    /// Tells the neighbour how many slots are free again, by virtual channel.
    fn send_credits(&mut self, direction: Direction, freed: [u32; VirtualChannel::COUNT]);

    /// The memory of a receive slot, and where its payload begins.
    fn slot(&self, slot: SlotRef) -> (&Memory, u64);
}

/// What the application learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation of the application ended.
    Completed {
        /// The application's number of the operation.
        cookie: u32,
        /// The previous value of an atomic operation.
        value: u64,
        /// Why it failed.
        failure: Option<Failure>,
    },
    /// A counter grows.
    Counter {
        /// The counter.
        index: u16,
        /// The increment.
        add: u16,
    },
    /// A notification with a tag.
    Notification(millstream_fabric::Event),
}

/// Counters of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Payload bytes copied from slots to memory.
    pub delivered_bytes: u64,
    /// Payload bytes that the application copies through staging memory.
    pub staged_bytes: u64,
    /// Packets that a pair dropped because an earlier one is missing, or repeats.
    pub not_executed: u64,
    /// Operations of other nodes that were refused.
    pub refused: u64,
    /// Headers with wrong values.
    pub malformed: u64,
}

/// A node.
#[derive(Debug)]
pub struct Engine {
    torus: Dimensions,
    here: NodeNumber,
    options: EngineOptions,
    router: Router<Packet>,
    /// By port.
    endpoints: [Endpoint; INJECTION_PORTS],
    participant: Participant,
    /// Regions of the application, by number.
    pub regions: Regions,
    advertised: [[u32; VirtualChannel::COUNT]; DIRECTIONS],
    diagnosis: [u16; DIRECTIONS],
    counters: EngineCounters,
    activated: Instant,
    now: Instant,
}

impl Engine {
    /// A node whose links are all down.
    #[must_use]
    pub fn new(torus: Dimensions, here: NodeNumber, options: EngineOptions) -> Engine {
        let table = NodeTable::new(&UpDown::new(&torus, &DeadSet::new()), here);
        let mut routing = TorusRouting::new(torus, here);
        routing.install(Epoch(0), table.clone());
        let router = RouterOptions { slots: options.slots, ..RouterOptions::default() };
        Engine {
            torus,
            here,
            options,
            router: Router::new(routing, router),
            endpoints: Port::ALL.map(|port| Endpoint::new(port, torus, here, table.clone(), &options)),
            participant: Participant::new(here),
            regions: Regions::new(here),
            advertised: Default::default(),
            diagnosis: [0; DIRECTIONS],
            counters: EngineCounters::default(),
            activated: Instant::default(),
            now: Instant::default(),
        }
    }

    /// Shape of the torus.
    #[must_use]
    pub fn dimensions(&self) -> Dimensions {
        self.torus
    }

    /// This node.
    #[must_use]
    pub fn here(&self) -> NodeNumber {
        self.here
    }

    /// The router's terms of the conservation law.
    #[must_use]
    pub fn packets(&self) -> millstream_torus_core::router::Counters {
        *self.router.counters()
    }

    /// Packets delivered and sent so far.
    #[must_use]
    pub fn moved(&self) -> u64 {
        let counters = self.router.counters();
        counters.delivered + counters.transmitted
    }

    /// Packets in slots and injection queues.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.router.waiting()
    }

    /// Whether a link is up.
    #[must_use]
    pub fn link_is_up(&self, direction: Direction) -> bool {
        self.router.link_is_up(direction)
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> EngineCounters {
        self.counters
    }

    /// The epoch of new packets.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.participant.current()
    }

    /// Packets sent again, and acknowledgements of packets that were never sent.
    #[must_use]
    pub fn repeated_and_foreign(&self) -> (u64, u64) {
        self.endpoints
            .iter()
            .map(Endpoint::repeated_and_foreign)
            .fold((0, 0), |sum, of_port| (sum.0 + of_port.0, sum.1 + of_port.1))
    }

    /// This process takes the place of an earlier one, which others may not have missed yet: it executes nothing before
    /// they have begun their pairs with it anew.
    pub fn rejoin(&mut self) {
        self.participant = Participant::rejoining(self.here);
    }

    /// Whether this node takes part: from the start, or since the supervisors took it back.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        self.participant.has_joined()
    }

    /// Whether nothing of this node waits for another one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.endpoints.iter().all(Endpoint::is_idle) && self.router.waiting() == 0
    }

    /// Whether every operation of a port has ended, and nothing of it is on its way.
    #[must_use]
    pub fn is_port_idle(&self, port: Port) -> bool {
        self.endpoints[port.index()].is_idle()
    }

    /// The clock.
    pub fn handle_time(&mut self, now: Instant) {
        self.now = now;
        let give_up = self.activated != Instant::default() && now >= self.activated + 2 * self.options.repeat;
        self.endpoints.iter_mut().for_each(|endpoint| endpoint.handle_time(give_up, now));
    }

    /// When [`Engine::handle_time`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.endpoints.iter().filter_map(Endpoint::poll_timeout).min()
    }

    /// A link came up or died.
    pub fn set_link(&mut self, direction: Direction, live: bool) {
        self.router.set_link(direction, live);
    }

    /// Begins a link anew, before it is connected again.
    ///
    /// # Errors
    /// [`SlotError::InUse`] while a packet that came over it is here.
    pub fn reset_link(&mut self, direction: Direction) -> Result<(), SlotError> {
        self.router.reset_link(direction)?;
        self.advertised[direction.index()] = Default::default();
        Ok(())
    }

    /// The diagnosis word of packets in a direction.
    pub fn set_diagnosis(&mut self, direction: Direction, word: u16) {
        self.diagnosis[direction.index()] = word;
    }

    /// A packet from a neighbour is in a slot.
    ///
    /// # Errors
    /// [`SlotError`]: the link should be taken down.
    pub fn handle_packet(&mut self, side: Direction, slot: u16, header: Header) -> Result<(), SlotError> {
        self.router.handle_packet(side, slot, header)
    }

    /// A header from a neighbour had wrong values.
    pub fn count_malformed(&mut self) {
        self.counters.malformed += 1;
    }

    /// A neighbour freed slots.
    ///
    /// # Errors
    /// [`CreditError`]: the link should be taken down.
    pub fn handle_credits(
        &mut self,
        direction: Direction,
        freed: [u32; VirtualChannel::COUNT],
    ) -> Result<(), CreditError> {
        for (vc, freed) in freed.into_iter().enumerate() {
            self.router.handle_credit(direction, VirtualChannel(vc as u8), freed)?;
        }
        Ok(())
    }

    /// The bytes of a slot have left.
    pub fn release(&mut self, slot: SlotRef) {
        if let Err(error) = self.router.release(slot) {
            tracing::error!("{}: {error}", self.here);
        }
    }

    /// Begins an operation of a port.
    pub fn post(&mut self, port: Port, operation: Operation) {
        self.endpoints[port.index()].post(operation);
    }

    /// An order of a supervisor. Returns answers.
    pub fn handle_order(&mut self, order: &Order) -> Vec<Answer> {
        let mut answers = Vec::new();
        for effect in self.participant.handle_order(order) {
            match effect {
                Effect::Install { epoch, plan } => {
                    let table = NodeTable::new(&UpDown::new(&self.torus, &plan.dead), self.here);
                    self.router.routing_mut().install(epoch, table);
                    self.router.reroute();
                }
                Effect::Retire { epoch } => {
                    let now = self.now;
                    self.endpoints.iter_mut().for_each(|endpoint| endpoint.give_up_old_routes(now));
                    self.router.routing_mut().retire(epoch);
                    self.router.reroute();
                }
                Effect::Activate { epoch, plan } => self.activate(epoch, plan),
                Effect::Answer(answer) => answers.push(answer),
            }
        }
        self.endpoints.iter_mut().for_each(Endpoint::lose);
        answers
    }

    fn activate(&mut self, epoch: Epoch, plan: Plan) {
        // The same order installed it, or an earlier one of the same epoch did.
        let Some(table) = self.router.routing().table(epoch).cloned() else { return };
        self.activated = self.now;
        for endpoint in &mut self.endpoints {
            endpoint.activate(epoch, &plan, table.clone(), self.now);
        }
        self.router.reroute();
    }

    /// The answer that the previous epoch has drained, once.
    pub fn poll_drained(&mut self) -> Option<Answer> {
        if self.endpoints.iter().all(Endpoint::is_drained) { self.participant.handle_drained() } else { None }
    }

    /// What the user of a port learns next: the application of the local port also learns of notifications.
    pub fn poll_event(&mut self, port: Port) -> Option<Event> {
        self.endpoints[port.index()].events.pop_front()
    }

    /// The application is gone: its regions end, its operations complete unseen.
    pub fn detach(&mut self) {
        self.regions.end_all();
        let local = &mut self.endpoints[Port::Local.index()];
        local.operations.disown();
        local.events.clear();
    }

    /// A host outside is gone: its operations, by their numbers, end unseen and release their memory. A put of which a part
    /// is on its way ends in the middle, without its notification.
    pub fn cancel(&mut self, port: Port, is_cancelled: impl Fn(u32) -> bool) {
        self.endpoints[port.index()].cancel(is_cancelled);
    }

    /// Leases of cards may have ended: operations on their memory fail.
    pub fn handle_lost_memory(&mut self) {
        self.regions.end_dead();
        self.endpoints.iter_mut().for_each(Endpoint::lose_memory);
    }

    /// Payload of an operation goes through memory that is neither its source nor its target.
    pub fn count_staged(&mut self, bytes: u32) {
        self.counters.staged_bytes += u64::from(bytes);
    }

    /// Moves packets until nothing can move, or for a few milliseconds: the caller has timers to look at.
    /// Returns whether anything moved; then more may.
    pub fn run(&mut self, links: &mut impl Links) -> bool {
        let mut worked = false;
        let end = self.moved() + u64::from((RUN_BYTES / self.options.packet.max(1)).max(RUN_PACKETS));
        loop {
            let mut moved = self.deliver(links);
            for endpoint in &mut self.endpoints {
                moved |= endpoint.inject(&mut self.router, self.now);
                moved |= endpoint.acknowledge(&mut self.router);
            }
            moved |= self.transmit(links);
            Direction::ALL.into_iter().for_each(|direction| self.return_credits(direction, links));
            worked |= moved;
            if !moved || self.moved() >= end {
                return worked;
            }
        }
    }

    /// Executes the packets that arrived for this node. Returns whether there were any.
    pub fn deliver(&mut self, links: &mut impl Links) -> bool {
        let mut moved = false;
        while let Some(action) = self.router.poll() {
            moved = true;
            let Action::Deliver { header, origin } = action else { continue };
            match origin {
                Origin::Slot(slot) => {
                    let (memory, at) = links.slot(slot);
                    self.deliver_packet(&header, Some((memory, at)), None);
                    self.release(slot);
                    // The neighbour goes on while the next packets are copied.
                    self.return_credits(slot.side, links);
                }
                Origin::Injected(packet) => self.deliver_packet(&header, None, Some(packet)),
            }
        }
        moved
    }

    fn transmit(&mut self, links: &mut impl Links) -> bool {
        let mut moved = false;
        for direction in Direction::ALL {
            while links.is_ready(direction) {
                let Some(sent) = self.router.transmit(direction) else { break };
                moved = true;
                let mut header = sent.header;
                header.diagnosis = self.diagnosis[direction.index()];
                match sent.origin {
                    Origin::Slot(slot) => {
                        let length = header.length.min(self.options.packet);
                        if links.send(direction, sent.slot, &header, Payload::Slot { slot, length }) {
                            self.release(slot);
                        }
                    }
                    Origin::Injected(packet) => {
                        let payload = self.endpoints[header.port.index()].operations.payload(packet);
                        if payload.is_none() {
                            // A repeat of what is acknowledged by now is never executed. What lost its memory is refused.
                            (header.kind, header.region, header.length) = (Kind::Put, 0, 0);
                            // That of a reply is the number at its reader, which refuses the packet to this node.
                            header.operation = packet.operation.0;
                            header.notification = millstream_fabric::Notification::None;
                        }
                        let payload = payload.unwrap_or(Payload::Bytes(&[]));
                        links.send(direction, sent.slot, &header, payload);
                    }
                }
            }
        }
        moved
    }

    /// Tells a neighbour how many slots are free again, if it is due.
    fn return_credits(&mut self, direction: Direction, links: &mut impl Links) {
        if !self.router.link_is_up(direction) || !links.is_ready(direction) {
            return;
        }
        let advertised = &mut self.advertised[direction.index()];
        let due = (0..VirtualChannel::COUNT)
            .any(|vc| self.router.credit_is_due(direction, VirtualChannel(vc as u8), advertised[vc]));
        if due {
            *advertised = self.router.freed(direction);
            links.send_credits(direction, *advertised);
        }
    }
}
