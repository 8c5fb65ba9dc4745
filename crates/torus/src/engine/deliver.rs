//! Execution of packets at their target. Every value of a header is input.

use std::collections::VecDeque;
use std::sync::Arc;

use millstream_fabric::{Event as FabricEvent, Notification, RegionId};
use millstream_torus_core::header::Kind;
use millstream_torus_core::{Header, Port};

use super::operation::Reply;
use super::operations::Packet;
use super::regions::RegionError;
use super::{AtomicOperation, Engine, Event, Failure, Payload, Span};
use crate::memory::Memory;

impl From<RegionError> for Failure {
    fn from(error: RegionError) -> Failure {
        match error {
            RegionError::NoRegion => Failure::NoRegion,
            RegionError::Gone => Failure::Gone,
            RegionError::NotPublished => Failure::Access,
            RegionError::Bounds(range) => Failure::Bounds(range.size),
        }
    }
}

/// Where the payload is: in a slot, or at a packet that was injected here.
#[derive(Clone, Copy)]
struct Arrived<'m> {
    port: Port,
    slot: Option<(&'m Memory, u64)>,
    packet: Option<Packet>,
}

impl Engine {
    pub(super) fn deliver_packet(
        &mut self,
        header: &Header,
        slot: Option<(&Memory, u64)>,
        packet: Option<Packet>,
    ) {
        if header.length > self.options.packet.max(64) {
            self.counters.malformed += 1;
            return;
        }
        let endpoint = &mut self.endpoints[header.port.index()];
        if endpoint.is_of_former_pair(header) {
            self.counters.not_executed += u64::from(header.kind.is_sequenced());
            return;
        }
        if let Some(ack) = header.acknowledgement {
            endpoint.handle_acknowledgement(header.source, ack, self.now);
            return;
        }
        if !header.kind.is_sequenced() {
            return;
        }
        // This node's side of the pair begins anew with COMMIT, and would lose its reply: the source repeats the packet.
        if !self.participant.has_joined() || self.participant.awaits_return(header.epoch, header.source) {
            self.counters.not_executed += 1;
            return;
        }
        if endpoint.accept(header) {
            self.execute(header, Arrived { port: header.port, slot, packet });
        } else {
            self.counters.not_executed += 1;
        }
    }

    fn execute(&mut self, header: &Header, arrived: Arrived<'_>) {
        let result = match header.kind {
            Kind::Put => self.execute_put(header, arrived),
            Kind::GetRequest => self.execute_get(header),
            Kind::Atomic => self.execute_atomic(header, arrived),
            _ => {
                self.take_reply(header, arrived);
                return;
            }
        };
        let Err(failure) = result else { return };
        if self.endpoints[header.port.index()].refuse(header, failure) {
            self.counters.refused += 1;
        }
    }

    fn execute_put(&mut self, header: &Header, arrived: Arrived<'_>) -> Result<(), Failure> {
        let region = RegionId(header.region);
        // The whole operation must fit, so that none is executed in part.
        let before = u64::from(header.index) * u64::from(self.options.packet.max(64));
        let whole = u64::from(header.total).max(before + u64::from(header.length));
        let start = header.offset.checked_sub(before).ok_or(Failure::Bounds(0))?;
        let memory = Arc::clone(self.regions.written(header.port, region, start, whole)?);
        let _access = memory.access().ok_or(RegionError::Gone)?;
        // Its source is on this node, and gone.
        if !self.copy_payload(arrived, &memory, header.offset, header.length) {
            return Err(Failure::Gone);
        }
        self.counters.delivered_bytes += u64::from(header.length);
        if header.last {
            self.notify(header, start);
        }
        Ok(())
    }

    fn notify(&mut self, header: &Header, start: u64) {
        match header.notification {
            Notification::None => {}
            Notification::Counter { index, add } => {
                self.application().push_back(Event::Counter { index, add })
            }
            Notification::Event { tag } => self.application().push_back(Event::Notification(FabricEvent {
                source: header.source,
                tag,
                region: RegionId(header.region),
                offset: start,
                length: u64::from(header.total),
            })),
        }
    }

    fn execute_get(&mut self, header: &Header) -> Result<(), Failure> {
        let region = RegionId(header.region);
        let memory =
            Arc::clone(self.regions.read(header.port, region, header.offset, header.total.into())?);
        let source = Span { memory, offset: header.offset };
        let reply = Reply::Data { source, length: header.total };
        self.endpoints[header.port.index()].operations.reply(header.source, header.operation, reply);
        Ok(())
    }

    fn execute_atomic(&mut self, header: &Header, arrived: Arrived<'_>) -> Result<(), Failure> {
        let memory =
            Arc::clone(self.regions.written(header.port, RegionId(header.region), header.offset, 8)?);
        if !header.offset.is_multiple_of(8) {
            return Err(Failure::Unaligned);
        }
        let mut bytes = [0; 24];
        if header.length != 24 || !self.read_payload(arrived, &mut bytes) {
            self.counters.malformed += 1;
            return Err(Failure::Access);
        }
        let change = AtomicOperation::decode(&bytes).ok_or(Failure::Access)?;
        let _access = memory.access().ok_or(RegionError::Gone)?;
        let old = memory
            .update(header.offset, |old| change.apply(old))
            .map_err(|range| Failure::Bounds(range.size))?;
        let operations = &mut self.endpoints[header.port.index()].operations;
        operations.reply(header.source, header.operation, Reply::Value(old));
        Ok(())
    }

    fn take_reply(&mut self, header: &Header, arrived: Arrived<'_>) {
        if header.kind == Kind::GetData {
            let operations = &self.endpoints[header.port.index()].operations;
            let Some((memory, at)) = operations.data_place(header) else {
                if operations.has_ended(header) {
                    self.counters.not_executed += 1;
                } else {
                    self.counters.malformed += 1;
                }
                return;
            };
            // Either memory is gone: the get fails when its card's lease is known to have ended.
            let Some(_access) = memory.access() else { return };
            if !self.copy_payload(arrived, &memory, at, header.length) {
                return;
            }
            self.counters.delivered_bytes += u64::from(header.length);
            self.endpoints[header.port.index()].data_arrived(header);
            return;
        }
        let mut bytes = [0; 16];
        if header.length != 16 || !self.read_payload(arrived, &mut bytes) {
            self.counters.malformed += 1;
            return;
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let endpoint = &mut self.endpoints[header.port.index()];
        if header.kind == Kind::AtomicResult {
            endpoint.value_arrived(header, word(0));
        } else {
            endpoint.refused(header, Failure::decode(bytes[0], word(8)));
        }
    }

    /// Payload of a packet that was injected here.
    fn injected_payload(&self, port: Port, packet: Packet) -> Option<Payload<'_>> {
        self.endpoints[port.index()].operations.payload(packet)
    }

    /// What this node's application learns, whoever initiated it.
    fn application(&mut self) -> &mut VecDeque<Event> {
        &mut self.endpoints[Port::Local.index()].events
    }

    /// Copies the payload to memory. False if there is none of that length.
    fn copy_payload(&self, arrived: Arrived<'_>, to: &Memory, at: u64, length: u32) -> bool {
        if let Some((slot, offset)) = arrived.slot {
            return to.copy_from(at, slot, offset, length.into()).is_ok();
        }
        match arrived.packet.and_then(|packet| self.injected_payload(arrived.port, packet)) {
            Some(Payload::Memory { memory, offset, length: found }) if found == length => {
                to.copy_from(at, memory, offset, length.into()).is_ok()
            }
            Some(Payload::Bytes(bytes)) if bytes.len() == length as usize => to.store(at, bytes).is_ok(),
            _ => false,
        }
    }

    fn read_payload(&self, arrived: Arrived<'_>, into: &mut [u8]) -> bool {
        if let Some((slot, offset)) = arrived.slot {
            return slot.load(offset, into).is_ok();
        }
        match arrived.packet.and_then(|packet| self.injected_payload(arrived.port, packet)) {
            Some(Payload::Bytes(bytes)) if bytes.len() == into.len() => {
                into.copy_from_slice(bytes);
                true
            }
            _ => false,
        }
    }
}
