//! A request whose turn it is.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Operation, Packet};

use super::answer::Answer;
use super::{Kept, Progress, Refused, Resource, Responder, Stop};
use crate::MAX_MESSAGE;
use crate::config::Service;
use crate::event::{Event, Received, ReceivedKind, Status};
use crate::memory::{Access, Atomic, DeliveryFault, Memory, Refusal};
use crate::request::ReceiveId;
use crate::sequence::Sequence;

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        refusal.nak().into()
    }
}

impl DeliveryFault {
    /// What the sender and the receive request are told (9.7.4.1.6, 9.9.3).
    pub(super) const fn verdict(self) -> (NakCode, Status) {
        match self {
            Self::TooLong => (NakCode::InvalidRequest, Status::LocalLength),
            Self::Protection => (NakCode::RemoteOperational, Status::LocalProtection),
        }
    }
}

impl Responder {
    pub(super) fn execute<M: Memory>(
        &mut self,
        at: Sequence,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<(), Stop> {
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

    /// Over an extended connection each request names its queue, all packets of a message the same one (annex A14).
    fn select<M: Memory>(&mut self, packet: &Packet<&[u8]>, memory: &mut M) -> Result<(), Stop> {
        if self.config.service != Service::Target {
            return Ok(());
        }
        let queue = packet.xrceth().ok_or(NakCode::InvalidRequest)?.srq();
        if self.progress.is_some() && queue != self.queue {
            return Err(NakCode::InvalidRequest.into());
        }
        memory.select(queue)?;
        self.queue = queue;
        Ok(())
    }

    /// Part of a SEND.
    pub(super) fn send<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<(), Stop> {
        let (receive, offset) = match self.progress {
            Some(Progress::Send { receive, offset }) => (receive, offset),
            _ => (self.take_receive(memory)?, 0),
        };
        let refused = |nak, status| Stop::Refused(Refused { nak, receive: Some((receive, status)) });
        let payload = packet.payload();
        let len = offset
            .checked_add(payload.len() as u32)
            .filter(|len| *len <= MAX_MESSAGE)
            .ok_or_else(|| refused(NakCode::InvalidRequest, Status::LocalLength))?;
        if !payload.is_empty()
            && let Err(fault) = memory.deliver(receive, offset, payload)
        {
            let (nak, status) = fault.verdict();
            return Err(refused(nak, status));
        }
        if !packet.opcode().position().ends() {
            self.progress = Some(Progress::Send { receive, offset: len });
            return Ok(());
        }
        let invalidated = packet.ieth().map(|header| header.rkey());
        if let Some(rkey) = invalidated
            && let Err(refusal) = memory.invalidate(rkey)
        {
            return Err(refused(refusal.nak(), Status::LocalOperation));
        }
        self.progress = None;
        self.receive(packet, receive, ReceivedKind::Send, len, events);
        Ok(())
    }

    fn take_receive<M: Memory>(&mut self, memory: &mut M) -> Result<ReceiveId, Stop> {
        self.held.take().or_else(|| memory.take_receive()).ok_or(Stop::NoReceive)
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

    /// Part of a WRITE.
    pub(super) fn write<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<(), Stop> {
        let payload = packet.payload();
        let (rkey, va, left, len) = match (self.progress, packet.reth()) {
            (Some(Progress::Write { rkey, va, left, len }), _) => (rkey, va, left, len),
            (_, Some(reth)) => {
                let (rkey, va, len) = (reth.rkey(), reth.va(), reth.length());
                if len > MAX_MESSAGE {
                    return Err(NakCode::InvalidRequest.into());
                }
                // No key is checked for a transfer of nothing (9.4.1.1.3).
                if len > 0 {
                    memory.check(rkey, va, len, Access::Write)?;
                }
                (rkey, va, len, len)
            }
            // The first packet has the header.
            (_, None) => return Err(NakCode::InvalidRequest.into()),
        };
        // The length that was announced is the length that comes (9.7.4.1.6).
        let ends = packet.opcode().position().ends();
        let rest = left.checked_sub(payload.len() as u32).ok_or(NakCode::InvalidRequest)?;
        if (rest == 0) != ends {
            return Err(NakCode::InvalidRequest.into());
        }
        if !payload.is_empty() {
            memory.write(rkey, va, payload)?;
        }
        if packet.imm_dt().is_some() {
            // Without a receive request the packet comes again, and its payload is written again.
            let receive = self.take_receive(memory)?;
            self.receive(packet, receive, ReceivedKind::Write, len, events);
        }
        let va = va.wrapping_add(payload.len() as u64);
        self.progress = (!ends).then_some(Progress::Write { rkey, va, left: rest, len });
        Ok(())
    }

    /// A READ: its data is copied when the responses are built.
    fn read<M: Memory>(&mut self, at: Sequence, packet: &Packet<&[u8]>, memory: &mut M) -> Result<(), Stop> {
        let reth = packet.reth().ok_or(NakCode::InvalidRequest)?;
        let (va, rkey, len) = (reth.va(), reth.rkey(), reth.length());
        if len > MAX_MESSAGE {
            return Err(NakCode::InvalidRequest.into());
        }
        self.has_resource()?;
        if len > 0 {
            memory.check(rkey, va, len, Access::Read)?;
        }
        let end = at.plus(self.config.mtu.packets(len));
        self.keep(Resource { start: at, end, what: Kept::Read { queue: self.queue, va, rkey, len } });
        self.msn = self.msn.next();
        self.expected = end;
        self.answers.push_back(Answer::Read {
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
        at: Sequence,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Result<(), Stop> {
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
        self.answer_one(at, Kept::Atomic(original));
        Ok(())
    }

    fn atomic_write<M: Memory>(
        &mut self,
        at: Sequence,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Result<(), Stop> {
        let reth = packet.reth().ok_or(NakCode::InvalidRequest)?;
        // Exactly eight bytes, whatever the header says (annex A19).
        let bytes: [u8; 8] = packet.payload().try_into().map_err(|_| NakCode::InvalidRequest)?;
        if reth.length() != 8 || !reth.va().is_multiple_of(8) {
            return Err(NakCode::InvalidRequest.into());
        }
        self.has_resource()?;
        memory.write_atomically(reth.rkey(), reth.va(), bytes)?;
        self.answer_one(at, Kept::AtomicWrite);
        Ok(())
    }

    /// An operation of one packet that is answered by a response is done.
    fn answer_one(&mut self, at: Sequence, what: Kept) {
        self.msn = self.msn.next();
        self.expected = at.plus(1);
        self.keep(Resource { start: at, end: self.expected, what });
        self.answers.push_back(Answer::One { at, what, again: false, msn: self.msn });
    }

    /// The peer keeps to the number of READs and atomic operations that it was told (9.7.4.1.4, table 58).
    fn has_resource(&self) -> Result<(), NakCode> {
        let most = usize::from(self.config.max_dest_rd_atomic);
        let under_way = self.answers.iter().filter(|answer| answer.uses_resource()).count();
        if under_way < most { Ok(()) } else { Err(NakCode::InvalidRequest) }
    }

    fn keep(&mut self, resource: Resource) {
        while self.resources.len() >= usize::from(self.config.max_dest_rd_atomic).max(1) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }
}
