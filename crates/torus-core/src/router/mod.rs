//! The router of a node: receive slots, arbitration, credits.
//!
//! ```text
//!   neighbour ─► slots of (side, virtual channel) ─► head ─┬─► deliver
//!                                                          ├─► output: credit of (direction, virtual channel) ─► neighbour
//!   local, seventh port ─► injection queue ────────────────┘
//! ```
//! Packets are stored whole and forwarded in the order of each virtual channel. A packet leaves only with a credit, so
//! every packet on a link has a slot. Delivery never waits for an output. The caller moves bytes; the router decides.

mod arbiter;
mod decision;
mod queue;
mod ring;

pub use crate::port::{INJECTION_PORTS, Port};
pub use decision::{Decision, DropCause, Routing, TorusRouting};
pub use ring::{CreditError, SlotError, SlotRef};

use std::collections::VecDeque;

use crate::header::{Header, Kind};
use crate::route::VirtualChannel;
use crate::route::dimension_order::Arrival;
use crate::topology::{DIRECTIONS, Direction};
use arbiter::{Arbiter, InputIndex};
use queue::InjectionQueue;
use ring::{CreditAccount, SlotRing};

/// Where the bytes of a packet are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin<T> {
    /// In a receive slot. The caller releases it when the bytes are no longer needed.
    Slot(SlotRef),
    /// Injected here: the caller's handle.
    Injected(T),
}

/// What the caller has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action<T> {
    /// Hand the packet to this node, then release its slot. This must not wait for an output.
    Deliver {
        /// The header.
        header: Header,
        /// The bytes.
        origin: Origin<T>,
    },
    /// The packet was dropped and counted. A slot is already released.
    Drop {
        /// The header.
        header: Header,
        /// The bytes.
        origin: Origin<T>,
        /// The cause.
        cause: DropCause,
    },
}

/// A packet that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmission<T> {
    /// The header with its new virtual channel and hop count.
    pub header: Header,
    /// The bytes; release a slot when they have left.
    pub origin: Origin<T>,
    /// Slot in the neighbour's ring of `header.vc`.
    pub slot: u16,
}

/// Terms of the conservation law: injected = delivered + dropped + in the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets accepted from the ports of this node.
    pub injected: u64,
    /// Packets received from neighbours.
    pub received: u64,
    /// Packets sent to neighbours.
    pub transmitted: u64,
    /// Packets handed to this node.
    pub delivered: u64,
    /// Packets dropped, by [`DropCause`].
    pub dropped: [u64; DropCause::COUNT],
}

impl Counters {
    /// Packets dropped for any cause.
    #[must_use]
    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().sum()
    }
}

/// The router of one node. `T` names an injected packet.
#[derive(Clone, Debug)]
pub struct Router<T, R = TorusRouting> {
    routing: R,
    rings: Vec<SlotRing>,
    credits: Vec<CreditAccount>,
    queues: Vec<InjectionQueue<T>>,
    live: [bool; DIRECTIONS],
    arbiter: Arbiter,
    actions: VecDeque<Action<T>>,
    counters: Counters,
}

/// Slots per virtual channel of each link, and places of injection queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterOptions {
    /// Receive slots per virtual channel.
    pub slots: u16,
    /// Packets that wait per port, output and virtual channel.
    pub injection: usize,
}

impl Default for RouterOptions {
    fn default() -> RouterOptions {
        RouterOptions { slots: 8, injection: 64 }
    }
}

fn ring_index(side: Direction, vc: VirtualChannel) -> usize {
    side.index() * VirtualChannel::COUNT + vc.index()
}

impl<T: Clone, R: Routing> Router<T, R> {
    /// A router whose links are all down.
    #[must_use]
    pub fn new(routing: R, options: RouterOptions) -> Router<T, R> {
        let rings = DIRECTIONS * VirtualChannel::COUNT;
        let slots = options.slots.max(1);
        Router {
            routing,
            rings: (0..rings).map(|_| SlotRing::new(slots)).collect(),
            credits: (0..rings).map(|_| CreditAccount::new(slots)).collect(),
            queues: (0..rings * INJECTION_PORTS).map(|_| InjectionQueue::new(options.injection)).collect(),
            live: [false; DIRECTIONS],
            arbiter: Arbiter::default(),
            actions: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// The routing of this node.
    pub fn routing(&self) -> &R {
        &self.routing
    }

    /// The routing of this node. After a change of its tables, call [`Router::reroute`].
    pub fn routing_mut(&mut self) -> &mut R {
        &mut self.routing
    }

    /// Conservation counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Packets in slots or injection queues that wait for an output.
    pub fn waiting(&self) -> u64 {
        let slots: usize = self.rings.iter().map(SlotRing::waiting).sum();
        let queues: usize = self.queues.iter().map(InjectionQueue::len).sum();
        (slots + queues) as u64
    }

    /// Slots of a ring that are not free: waiting, leaving or being delivered.
    pub fn occupied(&self, side: Direction, vc: VirtualChannel) -> u16 {
        self.rings[ring_index(side, vc)].occupied()
    }

    /// Credits for an output.
    pub fn credits(&self, direction: Direction, vc: VirtualChannel) -> u16 {
        self.credits[ring_index(direction, vc)].available()
    }

    /// Slots that the neighbour has freed, as far as this node knows.
    pub fn freed_by_neighbour(&self, direction: Direction, vc: VirtualChannel) -> u32 {
        self.credits[ring_index(direction, vc)].freed()
    }

    /// A link came up or died. A dead link's waiting packets are dropped; packets that came from there stay valid.
    pub fn set_link(&mut self, direction: Direction, live: bool) {
        self.live[direction.index()] = live;
        self.reroute();
    }

    /// Whether a link is up.
    pub fn link_is_up(&self, direction: Direction) -> bool {
        self.live[direction.index()]
    }

    /// Begins the credits and slots of a link anew, before it is connected again.
    ///
    /// # Errors
    /// [`SlotError::InUse`] while a slot of this side is occupied: its bytes may still be read.
    pub fn reset_link(&mut self, direction: Direction) -> Result<(), SlotError> {
        let range = ring_index(direction, VirtualChannel(0))
            ..ring_index(direction, VirtualChannel(0)) + VirtualChannel::COUNT;
        if self.rings[range.clone()].iter().any(|ring| ring.occupied() > 0) {
            return Err(SlotError::InUse);
        }
        for i in range {
            self.rings[i].reset();
            self.credits[i].reset();
        }
        Ok(())
    }

    /// Accepts a packet from a port of this node, which the header names from here on. The header's virtual channel names
    /// its layer.
    ///
    /// # Errors
    /// The packet's handle if the queue of its output is full.
    pub fn inject(&mut self, port: Port, header: Header, packet: T) -> Result<(), T> {
        let header = Header { port, ..header };
        let Decision::Forward(direction, vc) = self.routing.decide(&header, None) else {
            self.counters.injected += 1;
            self.finish(header, Origin::Injected(packet), None);
            return Ok(());
        };
        let queue = port.index() * self.rings.len() + ring_index(direction, vc);
        let input = InputIndex(self.rings.len() + queue);
        if !self.live[direction.index()] {
            self.counters.injected += 1;
            self.count_drop(header, Origin::Injected(packet), DropCause::DeadLink);
            return Ok(());
        }
        self.queues[queue].push(header, packet)?;
        self.counters.injected += 1;
        self.arbiter.request(direction, vc, input);
        Ok(())
    }

    /// Sends a diagnosis packet to a neighbour, on the virtual channel of diagnosis.
    ///
    /// # Errors
    /// The packet's handle if the queue is full or the link is down.
    pub fn inject_diagnosis(&mut self, direction: Direction, header: Header, packet: T) -> Result<(), T> {
        if !self.live[direction.index()] {
            return Err(packet);
        }
        let ring = ring_index(direction, VirtualChannel::DIAGNOSIS);
        self.queues[ring]
            .push(Header { kind: Kind::Diagnosis, vc: VirtualChannel::DIAGNOSIS, ..header }, packet)?;
        self.counters.injected += 1;
        let input = InputIndex(self.rings.len() + ring);
        self.arbiter.request(direction, VirtualChannel::DIAGNOSIS, input);
        Ok(())
    }

    /// A packet from the neighbour on `side` is in a slot.
    ///
    /// # Errors
    /// [`SlotError`] if the neighbour used a slot that is not its next free one. The link should be taken down.
    pub fn handle_packet(&mut self, side: Direction, slot: u16, header: Header) -> Result<(), SlotError> {
        let Some(ring) = self
            .rings
            .get_mut(ring_index(side, header.vc))
            .filter(|_| header.vc.index() < VirtualChannel::COUNT)
        else {
            return Err(SlotError::UnknownChannel { vc: header.vc.0 });
        };
        ring.arrive(slot, header)?;
        self.counters.received += 1;
        if ring.waiting() == 1 {
            self.route_head(side, header.vc);
        }
        Ok(())
    }

    /// The bytes of a slot are no longer needed.
    ///
    /// # Errors
    /// [`SlotError::NotTaken`] if the slot is free, or its packet still waits.
    pub fn release(&mut self, slot: SlotRef) -> Result<(), SlotError> {
        self.rings[ring_index(slot.side, slot.vc)].release(slot.index)
    }

    /// Number of slots freed so far in each ring of a side: the credit word for that neighbour.
    pub fn freed(&self, side: Direction) -> [u32; VirtualChannel::COUNT] {
        std::array::from_fn(|vc| self.rings[ring_index(side, VirtualChannel(vc as u8))].freed())
    }

    /// Whether the neighbour should learn of freed slots with a wake-up: it has no credit left, or half of the ring is
    /// free again since the count `advertised` was sent.
    pub fn credit_is_due(&self, side: Direction, vc: VirtualChannel, advertised: u32) -> bool {
        self.rings[ring_index(side, vc)].credit_is_due(advertised)
    }

    /// The neighbour freed slots: a cumulative count.
    ///
    /// # Errors
    /// [`CreditError`] if it claims more slots than this node has used. The link should be taken down.
    pub fn handle_credit(
        &mut self,
        direction: Direction,
        vc: VirtualChannel,
        freed: u32,
    ) -> Result<(), CreditError> {
        let account = self.credits.get_mut(ring_index(direction, vc)).ok_or(CreditError {
            vc: vc.0,
            freed,
            sent: 0,
        })?;
        account.handle(vc, freed)
    }

    /// The next delivery or drop.
    pub fn poll(&mut self) -> Option<Action<T>> {
        self.actions.pop_front()
    }

    /// The next packet for an output, by round robin over the inputs.
    pub fn transmit(&mut self, direction: Direction) -> Option<Transmission<T>> {
        self.transmit_with(direction, None)
    }

    /// As [`Router::transmit`]; `pick` chooses among the inputs (one bit each) in place of round robin.
    pub fn transmit_with(
        &mut self,
        direction: Direction,
        pick: Option<&mut dyn FnMut(u128) -> u32>,
    ) -> Option<Transmission<T>> {
        if !self.live[direction.index()] {
            return None;
        }
        let (rings, credits) = (&self.rings, &self.credits);
        let (input, vc) = self.arbiter.grant(
            direction,
            |vc| credits[ring_index(direction, vc)].available() > 0,
            |ring| rings[ring].is_pressed(),
            pick,
        )?;
        let slot = self.credits[ring_index(direction, vc)].take()?;
        let (mut header, origin) = if let Some(ring) = input.ring() {
            let (header, index) = self.rings[ring].take_head()?;
            let side = Direction::ALL[ring / VirtualChannel::COUNT];
            let origin = Origin::Slot(SlotRef { side, vc: header.vc, index });
            self.route_head(side, header.vc);
            (header, origin)
        } else {
            let queue = &mut self.queues[input.0 - self.rings.len()];
            let (header, packet) = queue.pop()?;
            if queue.len() > 0 {
                self.arbiter.request(direction, vc, input);
            }
            (header, Origin::Injected(packet))
        };
        header.vc = vc;
        header.hops = header.hops.saturating_add(1);
        self.counters.transmitted += 1;
        Some(Transmission { header, origin, slot })
    }

    /// Decides again about all waiting packets, after a change of links or tables.
    pub fn reroute(&mut self) {
        self.arbiter.clear();
        for side in Direction::ALL {
            for vc in 0..VirtualChannel::COUNT {
                self.route_head(side, VirtualChannel(vc as u8));
            }
        }
        for i in 0..self.queues.len() {
            let entries: Vec<_> = std::iter::from_fn(|| self.queues[i].pop()).collect();
            let port = Port::ALL[i / (DIRECTIONS * VirtualChannel::COUNT)];
            let direction = Direction::ALL[i / VirtualChannel::COUNT % DIRECTIONS];
            for (header, packet) in entries {
                self.requeue(port, direction, header, packet);
            }
        }
    }

    fn requeue(&mut self, port: Port, direction: Direction, header: Header, packet: T) {
        let refused = if header.kind == Kind::Diagnosis {
            self.inject_diagnosis(direction, header, packet)
        } else {
            self.inject(port, header, packet)
        };
        match refused {
            // Each accepted packet was counted when it came first.
            Ok(()) => self.counters.injected -= 1,
            Err(packet) => self.count_drop(header, Origin::Injected(packet), DropCause::DeadLink),
        }
    }

    /// Delivers or drops heads of a ring until one has to wait for an output.
    fn route_head(&mut self, side: Direction, vc: VirtualChannel) {
        let ring = ring_index(side, vc);
        while let Some((header, _)) = self.rings[ring].head() {
            let arrival = Arrival { travelling: side.reversed(), vc };
            match self.routing.decide(&header, Some(arrival)) {
                Decision::Forward(direction, next) if self.live[direction.index()] => {
                    self.arbiter.request(direction, next, InputIndex(ring));
                    return;
                }
                decision => {
                    let Some((header, index)) = self.rings[ring].take_head() else { return };
                    let slot = SlotRef { side, vc, index };
                    let dead = matches!(decision, Decision::Forward(..));
                    self.finish(header, Origin::Slot(slot), dead.then_some(DropCause::DeadLink));
                }
            }
        }
    }

    /// A packet ends here: it is delivered or dropped.
    fn finish(&mut self, header: Header, origin: Origin<T>, dead: Option<DropCause>) {
        let arrival = match &origin {
            Origin::Slot(slot) => Some(Arrival { travelling: slot.side.reversed(), vc: slot.vc }),
            Origin::Injected(_) => None,
        };
        match (dead, self.routing.decide(&header, arrival)) {
            (None, Decision::Deliver) => {
                self.counters.delivered += 1;
                self.actions.push_back(Action::Deliver { header, origin });
            }
            (Some(cause), _) | (None, Decision::Drop(cause)) => self.count_drop(header, origin, cause),
            (None, Decision::Forward(..)) => self.count_drop(header, origin, DropCause::DeadLink),
        }
    }

    fn count_drop(&mut self, header: Header, origin: Origin<T>, cause: DropCause) {
        self.counters.dropped[cause as usize] += 1;
        if let Origin::Slot(slot) = &origin {
            // The slot was taken just now, so releasing it succeeds.
            let _ = self.rings[ring_index(slot.side, slot.vc)].release(slot.index);
        }
        self.actions.push_back(Action::Drop { header, origin, cause });
    }
}
