//! A node among neighbours that lie: an interpreter of bytes as frames, for tests and for the fuzz target `torus`.
//!
//! Each step is a code and its operands. Whatever arrives, the node does not panic, writes nothing outside of its regions,
//! and counters for every packet.

use std::sync::Arc;

use millstream_fabric::{Notification, RegionId};
use millstream_quantity::Instant;
use millstream_torus::engine::{
    AtomicOperation, Engine, EngineOptions, Links, Operation, Payload, Request, Span,
};
use millstream_torus::memory::Memory;
use millstream_torus_core::epoch::{Attempt, Ballot, Order, Plan, Step};
use millstream_torus_core::header::{HEADER_BYTES, Kind};
use millstream_torus_core::route::VirtualChannel;
use millstream_torus_core::router::SlotRef;
use millstream_torus_core::{
    Acknowledgement, Dimensions, Direction, Epoch, Generation, Header, NodeNumber, Port, Sequence,
};

const REGION: RegionId = RegionId(7);
const REGION_BYTES: usize = 256;
const SLOTS: u16 = 2;

/// Links into the void; every slot has the same bytes.
struct Void {
    slot: Memory,
}

impl Links for Void {
    fn is_ready(&self, _: Direction) -> bool {
        true
    }

    fn send(&mut self, _: Direction, _: u16, _: &Header, _: Payload<'_>) -> bool {
        true
    }

    fn send_credits(&mut self, _: Direction, _: [u32; VirtualChannel::COUNT]) {}

    fn slot(&self, _: SlotRef) -> (&Memory, u64) {
        (&self.slot, 0)
    }
}

/// Takes bytes; zeros behind the end.
struct Input<'b>(&'b [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        first
    }

    /// A small number, or now and then one of any size.
    fn number(&mut self) -> u64 {
        match self.byte() {
            byte @ 0..=250 => byte.into(),
            251 => u64::MAX,
            252 => 1 << 40,
            253 => u64::from(u32::MAX),
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }
}

/// Runs the bytes.
///
/// # Panics
/// If the node breaks a rule.
pub(crate) fn play(bytes: &[u8]) {
    let torus: Dimensions = "3x3x2".parse().expect("valid");
    let options = EngineOptions { slots: SLOTS, ..EngineOptions::default() };
    let mut node = Engine::new(torus, NodeNumber(4), options);
    let memory = |len| Arc::new(Memory::allocate("hostile", len, None).expect("memory").0);
    let (region, own) = (memory(REGION_BYTES), memory(REGION_BYTES));
    node.regions.add_known(REGION, Arc::clone(&region));
    let mut links = Void { slot: Memory::allocate("hostile", 8192, None).expect("memory").0 };
    Direction::ALL.into_iter().for_each(|direction| {
        node.set_link(direction, torus.neighbour(NodeNumber(4), direction).is_some());
    });
    let (mut input, mut now) = (Input(bytes), Instant::default());
    while !input.0.is_empty() {
        let side = Direction::ALL[usize::from(input.byte()) % 6];
        match input.byte() % 8 {
            0 => raw_packet(&mut node, &mut input, side),
            1..=3 => packet(&mut node, &mut input, side),
            4 => {
                let freed = std::array::from_fn(|_| input.number() as u32);
                if node.link_is_up(side) && node.handle_credits(side, freed).is_err() {
                    node.set_link(side, false);
                }
            }
            5 => {
                now = now + std::time::Duration::from_millis(input.number() & 0xffff);
                node.handle_time(now);
            }
            6 => {
                let port = Port::ALL[usize::from(input.byte()) % 2];
                node.post(port, operation(&mut input, &own));
                if input.byte() & 7 == 0 {
                    node.cancel(port, |_| true);
                }
            }
            _ => order_or_link(&mut node, &mut input, side),
        }
        node.run(&mut links);
        Port::ALL.into_iter().for_each(|port| while node.poll_event(port).is_some() {});
        check(&node);
    }
}

fn check(node: &Engine) {
    let packets = node.packets();
    let dropped = packets.dropped_total();
    assert_eq!(
        packets.injected + packets.received,
        packets.delivered + dropped + node.waiting() + packets.transmitted,
        "{packets:?}, {} waiting",
        node.waiting()
    );
}

/// As a node process does: what breaks the rules takes the link down.
fn arrive(node: &mut Engine, side: Direction, slot: u16, bytes: &[u8; HEADER_BYTES]) {
    if !node.link_is_up(side) || slot >= SLOTS {
        return;
    }
    let accepted = Header::decode(bytes).map_err(drop).and_then(|header| {
        assert_eq!(Header::decode(&header.encode()), Ok(header), "a header keeps its values");
        if header.vc.index() >= VirtualChannel::COUNT {
            return Err(());
        }
        node.handle_packet(side, slot, header).map_err(drop)
    });
    if accepted.is_err() {
        node.count_malformed();
        node.set_link(side, false);
    }
}

fn raw_packet(node: &mut Engine, input: &mut Input<'_>, side: Direction) {
    let slot = u16::from(input.byte()) % 3;
    let bytes = std::array::from_fn(|_| input.byte());
    arrive(node, side, slot, &bytes);
}

fn packet(node: &mut Engine, input: &mut Input<'_>, side: Direction) {
    const KINDS: [Kind; 8] = [
        Kind::Put,
        Kind::GetRequest,
        Kind::GetData,
        Kind::Atomic,
        Kind::AtomicResult,
        Kind::Refused,
        Kind::Acknowledge,
        Kind::Diagnosis,
    ];
    let slot = u16::from(input.byte()) % 3;
    let kind = KINDS[usize::from(input.byte()) % 8];
    let mut header = Header::new(kind, NodeNumber(input.number() as u16), NodeNumber(input.number() as u16));
    let (port, vc) = (input.byte(), input.byte());
    (header.port, header.vc) = (Port::ALL[usize::from(port) % 2], VirtualChannel(vc % 6));
    header.hops = input.number() as u16;
    header.generation = Generation(input.number() as u16);
    header.sequence = Sequence(input.number() as u32);
    header.epoch = Epoch(input.number() as u32);
    header.region = input.number();
    header.offset = input.number();
    header.length = input.number() as u32;
    header.operation = input.number() as u32;
    (header.total, header.index) = (input.number() as u32, input.number() as u32);
    header.last = input.byte() & 1 != 0;
    header.notification = match input.byte() % 3 {
        0 => Notification::None,
        1 => Notification::Counter { index: input.number() as u16, add: 1 },
        _ => Notification::Event { tag: 1 },
    };
    if kind == Kind::Acknowledge {
        let generation = Generation(input.number() as u16);
        let next = Sequence(input.number() as u32);
        let refusals = input.number() as u16;
        header.acknowledgement = Some(Acknowledgement { generation, next, refusals });
    }
    arrive(node, side, slot, &header.encode());
}

fn operation(input: &mut Input<'_>, own: &Arc<Memory>) -> Operation {
    let (region, offset) = (RegionId(input.number()), input.number());
    // The node process checks its application's ranges before.
    let (at, length) = (u64::from(input.byte()) % 128, u32::from(input.byte()) % 128);
    let span = Span { memory: Arc::clone(own), offset: at };
    let notification = Notification::None;
    let request = match input.byte() % 3 {
        0 => Request::Put { region, offset, source: span, length, notification },
        1 => Request::Get { region, offset, into: span, length },
        _ => Request::Atomic { region, offset, change: AtomicOperation::FetchAdd(1) },
    };
    Operation { target: NodeNumber(input.number() as u16), request, cookie: 1 }
}

fn order_or_link(node: &mut Engine, input: &mut Input<'_>, side: Direction) {
    let ballot = Ballot { term: input.number(), supervisor: 0 };
    let attempt = Attempt { ballot, number: input.number() as u32 };
    let epoch = Epoch(input.number() as u32);
    let step = match input.byte() % 5 {
        0 => Step::Query,
        1 => {
            let mut plan = Plan::default();
            let dead = NodeNumber(u16::from(input.byte()) % 18);
            if dead != node.here() {
                plan.dead.kill_node(dead);
            }
            plan.returning.extend([NodeNumber(u16::from(input.byte()) % 18)]);
            Step::Prepare { epoch, attempt, plan }
        }
        2 => Step::Commit { epoch, attempt },
        3 => {
            node.set_link(side, false);
            return;
        }
        _ => {
            let exists = node.dimensions().neighbour(node.here(), side).is_some();
            if exists && !node.link_is_up(side) && node.reset_link(side).is_ok() {
                node.set_link(side, true);
            }
            return;
        }
    };
    node.handle_order(&Order { ballot, step });
    let _ = node.poll_drained();
}
