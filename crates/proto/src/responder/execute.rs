//! Execution of the request that is in sequence.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Operation, Packet};

use super::response::Response;
use super::{ExecError, Nak, PartialMessage, ResourceKind, Responder, ResponderResource};
use crate::MAX_MESSAGE;
use crate::config::Service;
use crate::event::{Event, Received, ReceivedKind, Status};
use crate::extended_psn::ExtendedPsn;
use crate::memory::{Access, Atomic, DeliveryError, Memory, NakReason};
use crate::request::ReceiveId;

impl From<NakReason> for ExecError {
    fn from(reason: NakReason) -> Self {
        reason.nak().into()
    }
}

impl DeliveryError {
    /// NAK for the requester and status of the receive request (9.7.4.1.6, 9.9.3).
    pub(super) const fn codes(self) -> (NakCode, Status) {
        match self {
            Self::TooLong => (NakCode::InvalidRequest, Status::LocalLength),
            Self::Protection => (NakCode::RemoteOperational, Status::LocalProtection),
        }
    }
}

impl Responder {
    pub(super) fn execute<M: Memory>(
        &mut self,
        at: ExtendedPsn,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<(), ExecError> {
        let operation = packet.opcode().operation();
        self.check_position(packet)?;
        self.check_operation(operation)?;
        self.select(packet, memory)?;
        match operation {
            Operation::Send => self.send(packet, memory, events)?,
            Operation::Write => self.write(packet, memory, events)?,
            Operation::ReadRequest => return self.read(at, packet, memory),
            Operation::CompareSwap | Operation::FetchAdd => return self.atomic(at, packet, memory),
            Operation::AtomicWrite => return self.atomic_write(at, packet, memory),
            _ => return Err(NakCode::InvalidRequest.into()),
        }
        self.expected = at.plus(1);
        self.acknowledgeable = Some(at);
        if packet.opcode().position().ends() {
            self.msn = self.msn.next();
        }
        if packet.bth().ack_req() {
            self.acknowledge(at);
        }
        Ok(())
    }

    /// Selects the shared receive queue of an XRC request. All packets of a message name the same one (annex
    /// A14).
    fn select<M: Memory>(&mut self, packet: &Packet<&[u8]>, memory: &mut M) -> Result<(), ExecError> {
        if self.config.service != Service::XrcTarget {
            return Ok(());
        }
        let queue = packet.xrceth().ok_or(NakCode::InvalidRequest)?.srq();
        if self.partial.is_some() && queue != self.queue {
            return Err(NakCode::InvalidRequest.into());
        }
        memory.select(queue)?;
        self.queue = queue;
        Ok(())
    }

    /// Handles a packet of a SEND.
    pub(super) fn send<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<(), ExecError> {
        let (receive, offset) = match self.partial {
            Some(PartialMessage::Send { receive, offset }) => (receive, offset),
            _ => (self.take_receive(memory)?, 0),
        };
        let fail = |code, status| ExecError::Nak(Nak { code, receive: Some((receive, status)) });
        let payload = packet.payload();
        let len = offset
            .checked_add(payload.len() as u32)
            .filter(|len| *len <= MAX_MESSAGE)
            .ok_or_else(|| fail(NakCode::InvalidRequest, Status::LocalLength))?;
        if !payload.is_empty()
            && let Err(fault) = memory.deliver(receive, offset, payload)
        {
            let (code, status) = fault.codes();
            return Err(fail(code, status));
        }
        if !packet.opcode().position().ends() {
            self.partial = Some(PartialMessage::Send { receive, offset: len });
            return Ok(());
        }
        let invalidated = packet.ieth().map(|header| header.rkey());
        if let Some(rkey) = invalidated
            && let Err(reason) = memory.invalidate(rkey)
        {
            return Err(fail(reason.nak(), Status::LocalOperation));
        }
        self.partial = None;
        self.receive(packet, receive, ReceivedKind::Send, len, events);
        Ok(())
    }

    fn take_receive<M: Memory>(&mut self, memory: &mut M) -> Result<ReceiveId, ExecError> {
        self.spare_receive.take().or_else(|| memory.take_receive()).ok_or(ExecError::NoReceive)
    }

    fn receive(
        &self,
        packet: &Packet<&[u8]>,
        id: ReceiveId,
        kind: ReceivedKind,
        len: u32,
        events: &mut VecDeque<Event>,
    ) {
        events.push_back(Event::Received(Received {
            id,
            status: Status::Success,
            kind,
            len,
            immediate: packet.imm_dt().map(|header| header.data()),
            invalidated: packet.ieth().map(|header| header.rkey()),
            solicited: packet.bth().solicited(),
            source: None,
        }));
    }

    /// Handles a packet of a WRITE.
    pub(super) fn write<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<(), ExecError> {
        let payload = packet.payload();
        let (rkey, va, left, len) = match (self.partial, packet.reth()) {
            (Some(PartialMessage::Write { rkey, va, left, len }), _) => (rkey, va, left, len),
            (_, Some(reth)) => {
                let (rkey, va, len) = (reth.rkey(), reth.va(), reth.length());
                if len > MAX_MESSAGE {
                    return Err(NakCode::InvalidRequest.into());
                }
                // Zero-length transfers check no key (9.4.1.1.3), but the right of the queue pair.
                match len {
                    0 => memory.allows(Access::Write)?,
                    _ => memory.check(rkey, va, len, Access::Write)?,
                }
                (rkey, va, len, len)
            }
            // Only the first packet has the RETH.
            (_, None) => return Err(NakCode::InvalidRequest.into()),
        };
        // The message must have the announced length (9.7.4.1.6).
        let ends = packet.opcode().position().ends();
        let rest = left.checked_sub(payload.len() as u32).ok_or(NakCode::InvalidRequest)?;
        if (rest == 0) != ends {
            return Err(NakCode::InvalidRequest.into());
        }
        if !payload.is_empty() {
            memory.write(rkey, va, payload)?;
        }
        if packet.imm_dt().is_some() {
            // Without a receive request the packet is retransmitted, and its payload is written again.
            let receive = self.take_receive(memory)?;
            self.receive(packet, receive, ReceivedKind::Write, len, events);
        }
        let va = va.wrapping_add(payload.len() as u64);
        self.partial = (!ends).then_some(PartialMessage::Write { rkey, va, left: rest, len });
        Ok(())
    }

    /// Handles a READ request; its data is copied when the responses are built.
    fn read<M: Memory>(
        &mut self,
        at: ExtendedPsn,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Result<(), ExecError> {
        let reth = packet.reth().ok_or(NakCode::InvalidRequest)?;
        let (va, rkey, len) = (reth.va(), reth.rkey(), reth.length());
        if len > MAX_MESSAGE {
            return Err(NakCode::InvalidRequest.into());
        }
        self.has_resource()?;
        match len {
            0 => memory.allows(Access::Read)?,
            _ => memory.check(rkey, va, len, Access::Read)?,
        }
        let end = at.plus(self.config.mtu.packets(len));
        self.keep(ResponderResource {
            start: at,
            end,
            kind: ResourceKind::Read { queue: self.queue, va, rkey, len },
        });
        self.msn = self.msn.next();
        self.expected = end;
        self.responses.push_back(Response::Read {
            next: at,
            queue: self.queue,
            va,
            rkey,
            left: len,
            begun: false,
            again: false,
            msn: self.msn,
        });
        Ok(())
    }

    fn atomic<M: Memory>(
        &mut self,
        at: ExtendedPsn,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Result<(), ExecError> {
        let header = packet.atomic_eth().ok_or(NakCode::InvalidRequest)?;
        if !header.va().is_multiple_of(8) {
            return Err(NakCode::InvalidRequest.into());
        }
        self.has_resource()?;
        let operation = match packet.opcode().operation() {
            Operation::FetchAdd => Atomic::FetchAdd(header.swap_or_add()),
            _ => Atomic::CompareSwap { compare: header.compare(), swap: header.swap_or_add() },
        };
        let original = memory.atomic(header.rkey(), header.va(), operation)?;
        self.queue_single(at, ResourceKind::Atomic(original));
        Ok(())
    }

    fn atomic_write<M: Memory>(
        &mut self,
        at: ExtendedPsn,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Result<(), ExecError> {
        let reth = packet.reth().ok_or(NakCode::InvalidRequest)?;
        // Exactly eight bytes, regardless of the RETH (annex A19).
        let bytes: [u8; 8] = packet.payload().try_into().map_err(|_| NakCode::InvalidRequest)?;
        if reth.length() != 8 || !reth.va().is_multiple_of(8) {
            return Err(NakCode::InvalidRequest.into());
        }
        self.has_resource()?;
        memory.write_atomically(reth.rkey(), reth.va(), bytes)?;
        self.queue_single(at, ResourceKind::AtomicWrite);
        Ok(())
    }

    /// Queues the response of an operation with one response packet.
    fn queue_single(&mut self, at: ExtendedPsn, kind: ResourceKind) {
        self.msn = self.msn.next();
        self.expected = at.plus(1);
        self.keep(ResponderResource { start: at, end: self.expected, kind });
        self.responses.push_back(Response::Single { at, kind, again: false, msn: self.msn });
    }

    /// Checks that the peer has at most the agreed number of READs and atomic operations outstanding
    /// (9.7.4.1.4, table 58).
    fn has_resource(&self) -> Result<(), NakCode> {
        let most = usize::from(self.config.max_dest_rd_atomic);
        let under_way = self.responses.iter().filter(|answer| answer.uses_resource()).count();
        if under_way < most { Ok(()) } else { Err(NakCode::InvalidRequest) }
    }

    fn keep(&mut self, resource: ResponderResource) {
        while self.resources.len() >= usize::from(self.config.max_dest_rd_atomic).max(1) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }
}
