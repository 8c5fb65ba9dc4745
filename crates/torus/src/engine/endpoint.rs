//! The pairs and operations of one port. Those of the local and of the seventh port have nothing in common but the router,
//! so hosts outside of the torus take neither places nor windows from this node's application.

use std::collections::{BTreeMap, VecDeque};

use millstream_quantity::Instant;
use millstream_torus_core::epoch::Plan;
use millstream_torus_core::header::Kind;
use millstream_torus_core::pair::Acceptance;
use millstream_torus_core::route::{NodeTable, Route, VirtualChannel};
use millstream_torus_core::{
    Acknowledgement, Dimensions, Epoch, Header, NodeNumber, PairReceiver, Port, Router, Sources,
};

use super::operation::{Failure, Operation, Reply};
use super::operations::{OperationId, Operations, Packet};
use super::{EngineOptions, Event};

#[derive(Debug, Default)]
struct Receiver {
    pair: PairReceiver,
    /// Operation whose further packets are refused without another answer.
    refusing: Option<u32>,
    refusals: u16,
    queued: bool,
}

/// One port of a node.
#[derive(Debug)]
pub(super) struct Endpoint {
    port: Port,
    here: NodeNumber,
    window: usize,
    sources: Sources<Packet>,
    receivers: BTreeMap<NodeNumber, Receiver>,
    /// The epochs in which nodes came back, and that in which this one did.
    begun: BTreeMap<NodeNumber, Epoch>,
    all_begun: Epoch,
    pub(super) operations: Operations,
    acknowledgements: VecDeque<NodeNumber>,
    /// A header that found its injection queue full.
    stalled: Option<(Header, Packet)>,
    pub(super) events: VecDeque<Event>,
}

impl Endpoint {
    pub(super) fn new(
        port: Port,
        torus: Dimensions,
        here: NodeNumber,
        table: NodeTable,
        options: &EngineOptions,
    ) -> Endpoint {
        Endpoint {
            port,
            here,
            window: options.window,
            sources: Sources::new(torus, here, table, options.window, options.repeat),
            receivers: BTreeMap::new(),
            begun: BTreeMap::new(),
            all_begun: Epoch(0),
            operations: Operations::new(options.packet),
            acknowledgements: VecDeque::new(),
            stalled: None,
            events: VecDeque::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.sources.is_idle()
            && self.operations.is_idle()
            && self.acknowledgements.is_empty()
            && self.stalled.is_none()
    }

    /// Packets sent again, and acknowledgements of packets that were never sent.
    pub(super) fn repeated_and_foreign(&self) -> (u64, u64) {
        self.sources.repeated_and_foreign()
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.sources.poll_timeout()
    }

    pub(super) fn handle_time(&mut self, give_up_old_routes: bool, now: Instant) {
        if self.sources.poll_timeout().is_some_and(|at| at <= now) {
            self.sources.handle_timeout(now);
        }
        if give_up_old_routes {
            self.sources.give_up_old_routes(now);
        }
        self.lose();
    }

    /// Begins an operation.
    pub(super) fn post(&mut self, operation: Operation) {
        if let Err(unreachable) = self.sources.route(operation.target) {
            self.operations.fail_new(&operation, unreachable.into(), &mut self.events);
        } else if let Err(operation) = self.operations.post(operation) {
            self.operations.fail_new(&operation, Failure::NoRoute, &mut self.events);
        }
    }

    /// Nodes that take part again begin their pairs anew with this epoch; so do all if this one does.
    fn begin_pairs(&mut self, epoch: Epoch, plan: &Plan) {
        if plan.returning.contains(&self.here) {
            self.receivers.clear();
            self.begun.clear();
            self.all_begun = epoch;
        }
        self.receivers.retain(|source, _| !plan.returning.contains(source));
        self.begun.extend(plan.returning.iter().map(|&node| (node, epoch)));
    }

    /// Whether a packet is of an epoch before that with which its pair began: its node's former process sent
    /// it, or it is for that of this node.
    pub(super) fn is_of_former_pair(&self, header: &Header) -> bool {
        header.epoch < self.begun.get(&header.source).copied().unwrap_or_default().max(self.all_begun)
    }

    pub(super) fn activate(&mut self, epoch: Epoch, plan: &Plan, table: NodeTable, now: Instant) {
        // If this node returns, all pairs begin anew, also with what it knows of refusals.
        let all = plan.returning.contains(&self.here);
        let is_lost = |node| all || !plan.dead.node_lives(node) || plan.returning.contains(&node);
        self.operations.fail_targets(is_lost, Failure::NodeLost, &mut self.events);
        self.begin_pairs(epoch, plan);
        self.sources.activate(epoch, plan.dead.clone(), plan.returning.clone(), table, now);
    }

    pub(super) fn give_up_old_routes(&mut self, now: Instant) {
        self.sources.give_up_old_routes(now);
    }

    pub(super) fn is_drained(&self) -> bool {
        self.sources.is_drained()
    }

    /// Operations whose target was lost fail.
    pub(super) fn lose(&mut self) {
        while let Some((unreachable, packet)) = self.sources.poll_lost() {
            self.operations.fail(packet.operation, unreachable.into(), &mut self.events);
        }
    }

    /// Leases of cards may have ended: operations on their memory fail.
    pub(super) fn lose_memory(&mut self) {
        for reader in self.operations.lose_memory(&mut self.events) {
            // As every refusal: the reader counts them.
            let receiver = self.receivers.entry(reader).or_default();
            receiver.refusals = receiver.refusals.wrapping_add(1);
        }
    }

    /// Gives packets of operations to their pairs, and packets of pairs to the router.
    pub(super) fn inject(&mut self, router: &mut Router<Packet>, now: Instant) -> bool {
        let mut moved = self.operations.feed(&mut self.sources, 2 * self.window, now);
        self.lose();
        loop {
            let next = self.stalled.take().or_else(|| {
                let out = self.sources.poll()?;
                let mut header = self.operations.header(out.packet, self.here, out.target);
                (header.generation, header.sequence) = (out.generation, out.sequence);
                Some((routed(header, out.epoch, out.route), out.packet))
            });
            let Some((header, packet)) = next else { return moved };
            if router.inject(self.port, header, packet).is_err() {
                self.stalled = Some((header, packet));
                return moved;
            }
            moved = true;
        }
    }

    /// Acknowledges what arrived.
    pub(super) fn acknowledge(&mut self, router: &mut Router<Packet>) -> bool {
        let mut moved = false;
        for _ in 0..self.acknowledgements.len() {
            let Some(to) = self.acknowledgements.pop_front() else { break };
            let Some(receiver) = self.receivers.get_mut(&to) else { continue };
            receiver.queued = false;
            // Without a route the source repeats later.
            let Ok(route) = self.sources.route(to) else { continue };
            let (generation, next) = receiver.pair.acknowledge();
            let mut header = Header::new(Kind::Acknowledge, self.here, to);
            header.acknowledgement = Some(Acknowledgement { generation, next, refusals: receiver.refusals });
            let header = routed(header, self.sources.epoch(), route);
            if router.inject(self.port, header, Packet::NONE).is_ok() {
                moved = true;
                continue;
            }
            receiver.queued = true;
            self.acknowledgements.push_back(to);
            break;
        }
        moved
    }

    /// A target acknowledged packets of this port.
    pub(super) fn handle_acknowledgement(&mut self, source: NodeNumber, ack: Acknowledgement, now: Instant) {
        let done = self.sources.handle_acknowledgement(source, ack.generation, ack.next, now);
        self.operations.acknowledged(source, done, ack.refusals, &mut self.events);
    }

    /// A packet with a place in its pair's sequence arrived. Whether to execute it.
    pub(super) fn accept(&mut self, header: &Header) -> bool {
        let is_request = matches!(header.kind, Kind::Put | Kind::GetRequest | Kind::Atomic);
        // The source repeats the packet.
        if is_request && !self.operations.takes_replies(header.source) {
            return false;
        }
        let receiver = self.receivers.entry(header.source).or_default();
        let acceptance = receiver.pair.handle_packet(header.generation, header.sequence);
        if acceptance != Acceptance::StaleGeneration && !std::mem::replace(&mut receiver.queued, true) {
            self.acknowledgements.push_back(header.source);
        }
        acceptance == Acceptance::Execute
    }

    /// Refuses an operation with one answer for all of its packets. Whether this is the first.
    pub(super) fn refuse(&mut self, header: &Header, failure: Failure) -> bool {
        let Some(receiver) = self.receivers.get_mut(&header.source) else { return false };
        let first = header.index == 0 || receiver.refusing != Some(header.operation);
        receiver.refusing = Some(header.operation);
        if first {
            receiver.refusals = receiver.refusals.wrapping_add(1);
            self.operations.reply(header.source, header.operation, Reply::Refused(failure));
        }
        first
    }

    /// A target refused an operation of this port.
    pub(super) fn refused(&mut self, header: &Header, failure: Failure) {
        let id = OperationId(header.operation);
        self.operations.refused(header.source, id, failure, &mut self.events);
    }

    /// Data of a get are in place.
    pub(super) fn data_arrived(&mut self, header: &Header) {
        self.operations.data_arrived(header, &mut self.events);
    }

    /// The previous value of an atomic operation arrived.
    pub(super) fn value_arrived(&mut self, header: &Header, value: u64) {
        self.operations.value_arrived(header, value, &mut self.events);
    }

    /// Nobody learns of the completions of these operations any more, and those not yet given to a pair in whole never are.
    pub(super) fn cancel(&mut self, is_cancelled: impl Fn(u32) -> bool) {
        self.operations.cancel(is_cancelled);
    }
}

fn routed(mut header: Header, epoch: Epoch, route: Route) -> Header {
    header.epoch = epoch;
    match route {
        Route::DimensionOrder { signs, .. } => header.signs = signs,
        Route::UpDown { .. } => header.vc = VirtualChannel::up_down(epoch),
    }
    header
}
