//! The operations of a node, from the first packet to the completion.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use millstream_fabric::Notification;
use millstream_quantity::Instant;
use millstream_torus_core::header::Kind;
use millstream_torus_core::{Header, NodeNumber, Sources};

use super::operation::{Failure, OWN_BYTES, Operation, Reply, Request};
use super::{Event, Payload};
use crate::memory::Memory;

/// Gets on their way to one node; its target has places for their data.
const MAX_GETS: usize = 16;
/// Replies to one node whose acknowledgements are missing; above, none of its requests is executed. An
/// application has at most [`MAX_COMMANDS`](crate::control::MAX_COMMANDS) operations under way, so only a
/// node that takes no replies gets so many. Such a node must not take the places of replies to others.
const MAX_REPLIES: usize = 4096;
/// Index bits of an operation's number; the others are its generation.
const INDEX_BITS: u32 = 20;

#[derive(Clone, Debug)]
enum Work {
    Request(Request),
    /// Answers the operation of this number at the target.
    Reply(u32, Reply),
}

/// Number of an operation at its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OperationId(pub(super) u32);

/// A packet of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) operation: OperationId,
    pub(super) index: u32,
    pub(super) last: bool,
}

impl Packet {
    /// A packet without operation: an acknowledgement.
    pub(super) const NONE: Packet = Packet { operation: OperationId(u32::MAX), index: 0, last: false };
}

#[derive(Debug)]
struct Entry {
    target: NodeNumber,
    work: Work,
    /// The application's number; `None` for replies, and after the application has gone.
    cookie: Option<u32>,
    /// Packets given to the pair so far.
    packets: u32,
    /// Bytes of a get that arrived.
    received: u64,
    failure: Option<Failure>,
    /// Operands, value or cause.
    bytes: [u8; OWN_BYTES],
}

impl Entry {
    /// Bytes of payload that its packets carry.
    fn payload_length(&self) -> u32 {
        match &self.work {
            Work::Request(Request::Put { length, .. }) | Work::Reply(_, Reply::Data { length, .. }) => {
                *length
            }
            Work::Request(Request::Get { .. }) => 0,
            Work::Request(Request::Atomic { .. }) => OWN_BYTES as u32,
            Work::Reply(..) => 16,
        }
    }
}

#[derive(Debug, Default)]
struct Target {
    requests: VecDeque<OperationId>,
    /// Before requests: other nodes wait for them.
    replies: VecDeque<OperationId>,
    /// Puts whose packets are acknowledged, with the refusals that were sent before.
    completing: VecDeque<(OperationId, u16)>,
    /// Refusals that arrived; wraps.
    refusals: u16,
    gets: usize,
    /// Replies whose acknowledgements are missing.
    unacknowledged: usize,
    listed: bool,
}

#[derive(Debug)]
pub(super) struct Operations {
    packet: u32,
    entries: Vec<(u32, Option<Entry>)>,
    free: Vec<u32>,
    live: usize,
    targets: BTreeMap<NodeNumber, Target>,
    /// Targets with packets to give to their pairs.
    ready: VecDeque<NodeNumber>,
}

impl Operations {
    pub(super) fn new(packet: u32) -> Operations {
        Operations {
            packet: packet.max(64),
            entries: Vec::new(),
            free: Vec::new(),
            live: 0,
            targets: BTreeMap::new(),
            ready: VecDeque::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.live == 0
    }

    fn get(&self, id: OperationId) -> Option<&Entry> {
        let (generation, entry) = self.entries.get((id.0 & ((1 << INDEX_BITS) - 1)) as usize)?;
        entry.as_ref().filter(|_| *generation == id.0 >> INDEX_BITS)
    }

    fn get_mut(&mut self, id: OperationId) -> Option<&mut Entry> {
        let (generation, entry) = self.entries.get_mut((id.0 & ((1 << INDEX_BITS) - 1)) as usize)?;
        entry.as_mut().filter(|_| *generation == id.0 >> INDEX_BITS)
    }

    fn insert(&mut self, entry: Entry) -> Option<OperationId> {
        let index = match self.free.pop() {
            Some(index) => index,
            // The last number is that of `Packet::NONE`.
            None if self.entries.len() + 1 < 1 << INDEX_BITS => {
                self.entries.push((0, None));
                self.entries.len() as u32 - 1
            }
            None => return None,
        };
        let (generation, place) = &mut self.entries[index as usize];
        *place = Some(entry);
        self.live += 1;
        Some(OperationId(*generation << INDEX_BITS | index))
    }

    fn remove(&mut self, id: OperationId) -> Option<Entry> {
        self.get(id)?;
        let index = id.0 & ((1 << INDEX_BITS) - 1);
        let (generation, place) = &mut self.entries[index as usize];
        *generation = (*generation + 1) & (u32::MAX >> INDEX_BITS);
        self.free.push(index);
        self.live -= 1;
        let entry = place.take()?;
        if let Work::Reply(..) = entry.work
            && let Some(target) = self.targets.get_mut(&entry.target)
        {
            target.unacknowledged = target.unacknowledged.saturating_sub(1);
        }
        Some(entry)
    }

    fn list(&mut self, node: NodeNumber) -> &mut Target {
        let target = self.targets.entry(node).or_default();
        if !std::mem::replace(&mut target.listed, true) {
            self.ready.push_back(node);
        }
        target
    }

    /// Queues an operation of the application. Gives it back if there are too many.
    pub(super) fn post(&mut self, operation: Operation) -> Result<(), Operation> {
        let mut bytes = [0; OWN_BYTES];
        if let Request::Atomic { change, .. } = operation.request {
            bytes = change.encode();
        }
        let entry = Entry {
            target: operation.target,
            work: Work::Request(operation.request.clone()),
            cookie: Some(operation.cookie),
            packets: 0,
            received: 0,
            failure: None,
            bytes,
        };
        let Some(id) = self.insert(entry) else { return Err(operation) };
        self.list(operation.target).requests.push_back(id);
        Ok(())
    }

    /// Queues a reply.
    pub(super) fn reply(&mut self, to: NodeNumber, operation: u32, reply: Reply) {
        let mut bytes = [0; OWN_BYTES];
        match reply {
            Reply::Value(value) => bytes[..8].copy_from_slice(&value.to_le_bytes()),
            Reply::Refused(failure) => {
                let (code, size) = failure.encode();
                bytes[0] = code;
                bytes[8..16].copy_from_slice(&size.to_le_bytes());
            }
            Reply::Data { .. } => {}
        }
        let entry = Entry {
            target: to,
            work: Work::Reply(operation, reply),
            cookie: None,
            packets: 0,
            received: 0,
            failure: None,
            bytes,
        };
        // `MAX_REPLIES` bounds the number of replies.
        let Some(id) = self.insert(entry) else {
            tracing::error!("{to}: no place for a reply");
            return;
        };
        let target = self.list(to);
        target.unacknowledged += 1;
        target.replies.push_back(id);
    }

    /// Whether a node may get further replies.
    pub(super) fn takes_replies(&self, node: NodeNumber) -> bool {
        self.targets.get(&node).is_none_or(|target| target.unacknowledged < MAX_REPLIES)
    }

    /// Gives packets to pairs that have fewer than `limit`. Returns whether it gave any.
    pub(super) fn feed(&mut self, sources: &mut Sources<Packet>, limit: usize, now: Instant) -> bool {
        let mut moved = false;
        for _ in 0..self.ready.len() {
            let Some(node) = self.ready.pop_front() else { break };
            moved |= self.feed_target(node, sources, limit, now);
            let Some(target) = self.targets.get_mut(&node) else { continue };
            target.listed = !(target.requests.is_empty() && target.replies.is_empty());
            if target.listed {
                self.ready.push_back(node);
            }
        }
        moved
    }

    fn feed_target(
        &mut self,
        node: NodeNumber,
        sources: &mut Sources<Packet>,
        limit: usize,
        now: Instant,
    ) -> bool {
        let mut moved = false;
        while sources.pending(node) < limit {
            let Some(target) = self.targets.get_mut(&node) else { break };
            let is_reply = !target.replies.is_empty();
            let queue = if is_reply { &target.replies } else { &target.requests };
            let Some(&id) = queue.front() else { break };
            let packet_size = self.packet;
            let gets = target.gets;
            let Some(entry) = self.get_mut(id) else {
                self.pop(node, is_reply);
                continue;
            };
            let is_get = matches!(entry.work, Work::Request(Request::Get { .. }));
            if is_get && gets >= MAX_GETS {
                break;
            }
            let count = entry.payload_length().div_ceil(packet_size).max(1);
            let packet = Packet { operation: id, index: entry.packets, last: entry.packets + 1 >= count };
            match sources.push(node, packet, now) {
                Ok(()) => {}
                // Packets wait until a path exists again, or the node is known to be lost.
                Err(_) => break,
            }
            moved = true;
            entry.packets += 1;
            if packet.last {
                self.pop(node, is_reply);
            }
            if let Some(target) = self.targets.get_mut(&node) {
                target.gets += usize::from(is_get);
            }
        }
        moved
    }

    fn pop(&mut self, node: NodeNumber, is_reply: bool) {
        if let Some(target) = self.targets.get_mut(&node) {
            if is_reply {
                target.replies.pop_front()
            } else {
                target.requests.pop_front()
            };
        }
    }

    /// The header of a packet, without its route.
    pub(super) fn header(&self, packet: Packet, here: NodeNumber, to: NodeNumber) -> Header {
        let mut header = Header::new(Kind::Put, here, to);
        header.operation = packet.operation.0;
        (header.index, header.last) = (packet.index, packet.last);
        // An operation that failed meanwhile: its rest is refused for its region, which is none.
        let Some(entry) = self.get(packet.operation) else { return header };
        let start = u64::from(packet.index) * u64::from(self.packet);
        let length = u64::from(entry.payload_length());
        header.total = entry.payload_length();
        header.length = length.saturating_sub(start).min(self.packet.into()) as u32;
        match &entry.work {
            Work::Request(Request::Put { region, offset, notification, .. }) => {
                (header.region, header.offset) = (region.0, offset.wrapping_add(start));
                header.notification = if packet.last { *notification } else { Notification::None };
            }
            Work::Request(Request::Get { region, offset, length, .. }) => {
                header.kind = Kind::GetRequest;
                (header.region, header.offset, header.total) = (region.0, *offset, *length);
            }
            Work::Request(Request::Atomic { region, offset, .. }) => {
                header.kind = Kind::Atomic;
                (header.region, header.offset) = (region.0, *offset);
            }
            Work::Reply(operation, reply) => {
                header.operation = *operation;
                header.offset = start;
                header.kind = match reply {
                    Reply::Data { .. } => Kind::GetData,
                    Reply::Value(_) => Kind::AtomicResult,
                    Reply::Refused(_) => Kind::Refused,
                };
            }
        }
        header
    }

    /// The payload of a packet; `None` if its operation has ended.
    pub(super) fn payload(&self, packet: Packet) -> Option<Payload<'_>> {
        if packet == Packet::NONE {
            return Some(Payload::Bytes(&[]));
        }
        let entry = self.get(packet.operation)?;
        let total = entry.payload_length();
        let start = packet.index.checked_mul(self.packet).filter(|&start| start <= total)?;
        let length = (total - start).min(self.packet);
        match &entry.work {
            Work::Request(Request::Put { source, .. }) | Work::Reply(_, Reply::Data { source, .. }) => {
                if !source.memory.is_live() {
                    return None;
                }
                let offset = source.offset + u64::from(start);
                Some(Payload::Memory { memory: &source.memory, offset, length })
            }
            _ => Some(Payload::Bytes(&entry.bytes[..length as usize])),
        }
    }

    /// A target acknowledged packets.
    pub(super) fn acknowledged(
        &mut self,
        node: NodeNumber,
        packets: Vec<Packet>,
        refusals: u16,
        events: &mut VecDeque<Event>,
    ) {
        for packet in packets.into_iter().filter(|packet| packet.last) {
            match self.get(packet.operation).map(|entry| &entry.work) {
                Some(Work::Request(Request::Put { .. })) => {
                    let target = self.targets.entry(node).or_default();
                    target.completing.push_back((packet.operation, refusals));
                }
                // Some of its packets may have left without data: `lose_memory` tells the reader.
                Some(Work::Reply(_, Reply::Data { source, .. })) if !source.memory.is_live() => {}
                Some(Work::Reply(..)) => drop(self.remove(packet.operation)),
                _ => {}
            }
        }
        self.complete_puts(node, events);
    }

    /// Completes puts all of whose refusals have arrived.
    fn complete_puts(&mut self, node: NodeNumber, events: &mut VecDeque<Event>) {
        while let Some(target) = self.targets.get_mut(&node) {
            let Some(&(id, refusals)) = target.completing.front() else { return };
            if (target.refusals.wrapping_sub(refusals) as i16) < 0 {
                return;
            }
            target.completing.pop_front();
            self.complete(id, 0, events);
        }
    }

    fn complete(&mut self, id: OperationId, value: u64, events: &mut VecDeque<Event>) {
        let Some(entry) = self.remove(id) else { return };
        if matches!(entry.work, Work::Request(Request::Get { .. }))
            && entry.packets > 0
            && let Some(target) = self.targets.get_mut(&entry.target)
        {
            target.gets = target.gets.saturating_sub(1);
        }
        if let Some(cookie) = entry.cookie {
            events.push_back(Event::Completed { cookie, value, failure: entry.failure });
        }
    }

    /// A target refused an operation.
    pub(super) fn refused(
        &mut self,
        node: NodeNumber,
        id: OperationId,
        failure: Failure,
        events: &mut VecDeque<Event>,
    ) {
        let target = self.targets.entry(node).or_default();
        target.refusals = target.refusals.wrapping_add(1);
        if let Some(entry) = self.get_mut(id).filter(|entry| entry.target == node) {
            // Packets whose source is lost leave without payload, and the target refuses them.
            let is_lost =
                matches!(&entry.work, Work::Request(Request::Put { source, .. }) if !source.memory.is_live());
            entry.failure.get_or_insert(if is_lost { Failure::Gone } else { failure });
            // A put completes with its last acknowledgement.
            if let Work::Request(Request::Get { .. } | Request::Atomic { .. }) = entry.work {
                self.complete(id, 0, events);
            }
        }
        self.complete_puts(node, events);
    }

    /// Data of a get arrived. Returns where they go, or `None` if no such get waits for them.
    pub(super) fn data_place(&self, header: &Header) -> Option<(Arc<Memory>, u64)> {
        let entry = self.get(OperationId(header.operation))?;
        let Work::Request(Request::Get { into, length, .. }) = &entry.work else { return None };
        let end = header.offset.checked_add(header.length.into())?;
        let fits = entry.target == header.source && end <= u64::from(*length) && into.memory.is_live();
        fits.then(|| (Arc::clone(&into.memory), into.offset + header.offset))
    }

    /// Whether the operation of a reply has ended: it failed, or its node was lost.
    pub(super) fn has_ended(&self, header: &Header) -> bool {
        self.get(OperationId(header.operation)).is_none()
    }

    /// Data of a get are in place.
    pub(super) fn data_arrived(&mut self, header: &Header, events: &mut VecDeque<Event>) {
        let id = OperationId(header.operation);
        let Some(entry) = self.get_mut(id) else { return };
        entry.received += u64::from(header.length);
        if header.last {
            self.complete(id, 0, events);
        }
    }

    /// The previous value of an atomic operation arrived.
    pub(super) fn value_arrived(&mut self, header: &Header, value: u64, events: &mut VecDeque<Event>) {
        let id = OperationId(header.operation);
        let is_atomic = self.get(id).is_some_and(|entry| {
            entry.target == header.source && matches!(entry.work, Work::Request(Request::Atomic { .. }))
        });
        if is_atomic {
            self.complete(id, value, events);
        }
    }

    /// An operation that was never begun fails.
    pub(super) fn fail_new(&self, operation: &Operation, failure: Failure, events: &mut VecDeque<Event>) {
        let completed = Event::Completed { cookie: operation.cookie, value: 0, failure: Some(failure) };
        events.push_back(completed);
    }

    pub(super) fn fail(&mut self, id: OperationId, failure: Failure, events: &mut VecDeque<Event>) {
        if let Some(entry) = self.get_mut(id) {
            entry.failure.get_or_insert(failure);
            self.complete(id, 0, events);
        }
    }

    /// All operations with these targets fail.
    pub(super) fn fail_targets(
        &mut self,
        is_lost: impl Fn(NodeNumber) -> bool,
        failure: Failure,
        events: &mut VecDeque<Event>,
    ) {
        self.targets.retain(|&node, _| !is_lost(node));
        self.ready.retain(|&node| !is_lost(node));
        let ids: Vec<_> = (self.entries.iter().enumerate())
            .filter_map(|(index, (generation, entry))| {
                entry.as_ref().filter(|entry| is_lost(entry.target))?;
                Some(OperationId(generation << INDEX_BITS | index as u32))
            })
            .collect();
        ids.into_iter().for_each(|id| self.fail(id, failure, events));
    }

    /// Cards' leases have ended: operations on their memory fail, and readers of it learn so. Returns these readers' nodes,
    /// one for each refusal.
    pub(super) fn lose_memory(&mut self, events: &mut VecDeque<Event>) -> Vec<NodeNumber> {
        let dead: Vec<_> = (self.entries.iter().enumerate())
            .filter_map(|(index, (generation, entry))| {
                let entry = entry.as_ref()?;
                let (memory, answers) = match &entry.work {
                    Work::Request(Request::Put { source, .. }) => (&source.memory, None),
                    Work::Request(Request::Get { into, .. }) => (&into.memory, None),
                    Work::Reply(operation, Reply::Data { source, .. }) => (&source.memory, Some(*operation)),
                    _ => return None,
                };
                let id = OperationId(generation << INDEX_BITS | index as u32);
                (!memory.is_live()).then_some((id, entry.target, answers))
            })
            .collect();
        let mut readers = Vec::new();
        for (id, target, answers) in dead {
            match answers {
                None => self.fail(id, Failure::Gone, events),
                Some(operation) => {
                    drop(self.remove(id));
                    self.reply(target, operation, Reply::Refused(Failure::Gone));
                    readers.push(target);
                }
            }
        }
        readers
    }

    /// Operations of the user of a port end here: their memory is released, and packets of them that pairs still hold are
    /// sent without payload.
    pub(super) fn cancel(&mut self, is_cancelled: impl Fn(u32) -> bool) {
        let ids: Vec<_> = (self.entries.iter().enumerate())
            .filter_map(|(index, (generation, entry))| {
                let cookie = entry.as_ref()?.cookie.filter(|&cookie| is_cancelled(cookie));
                cookie.map(|_| OperationId(generation << INDEX_BITS | index as u32))
            })
            .collect();
        for id in ids {
            if let Some(entry) = self.get_mut(id) {
                entry.cookie = None;
            }
            // Nobody learns of it, so there is no event.
            self.complete(id, 0, &mut VecDeque::new());
        }
    }

    /// The application is gone: nobody learns of completions.
    pub(super) fn disown(&mut self) {
        self.entries.iter_mut().filter_map(|(_, entry)| entry.as_mut()).for_each(|entry| entry.cookie = None);
    }
}
