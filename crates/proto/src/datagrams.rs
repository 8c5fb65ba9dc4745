//! A queue pair of the datagram service (9.8.3): each message is one packet, to anybody, from anybody.

use core::net::IpAddr;
use std::collections::VecDeque;

use millstream_wire::icrc::Flow;
use millstream_wire::{Headers, ICRC_LEN, Opcode, Packet, Pkey, Psn, Qkey, Qpn, bth, deth, imm_dt};

use crate::burst::{Burst, Limits, Transmit};
use crate::config::Mtu;
use crate::connection::{Disposition, DropReason};
use crate::event::{Event, Fault, Received, ReceivedKind, Status};
use crate::memory::{DeliveryFault, Memory};
use crate::request::{PostError, ReceiveId, WorkId};

/// The queue pair number in datagrams to a multicast group (10.5.2).
const MULTICAST: Qpn = Qpn::new(0xff_ffff);

/// Bytes of the headers that are delivered in front of a datagram.
const GRH: u32 = 40;

/// What a datagram queue pair is set up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramsConfig {
    /// Own queue pair number.
    pub local_qp: Qpn,
    /// The key that datagrams must show.
    pub qkey: Qkey,
    /// The partition.
    pub pkey: Pkey,
    /// The longest payload: the port's MTU.
    pub mtu: Mtu,
    /// What to start with (`sq_psn`).
    pub send_psn: Psn,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// From own to the receiver's address.
    pub flow: Flow,
    /// The receiver's queue pair.
    pub qp: Qpn,
    /// The key that it asks for.
    pub qkey: Qkey,
}

/// A datagram to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Its request's name.
    pub id: WorkId,
    /// Where it goes.
    pub to: Destination,
    /// Bytes of payload.
    pub len: u32,
    /// Immediate data, as it travels.
    pub immediate: Option<[u8; 4]>,
    /// The receiver's completion is a solicited event.
    pub solicited: bool,
}

/// What a datagram came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The sender's address.
    pub from: IpAddr,
    /// What the receiver finds in front of the data: an IPv6 header, or an IPv4 header in the last 20 bytes
    /// (annex A17, 17.4.5.1).
    pub headers: [u8; GRH as usize],
}

/// A queue pair of the datagram service.
#[derive(Debug)]
pub struct Datagrams {
    config: DatagramsConfig,
    psn: Psn,
    queue: VecDeque<Datagram>,
    events: VecDeque<Event>,
    /// A receive request that a datagram did not fit into: for the next one.
    held: Option<ReceiveId>,
    failed: bool,
}

impl Datagrams {
    /// A queue pair that sends and receives.
    #[must_use]
    pub fn new(config: DatagramsConfig) -> Self {
        Self {
            psn: config.send_psn,
            config,
            queue: VecDeque::new(),
            events: VecDeque::new(),
            held: None,
            failed: false,
        }
    }

    /// Other keys are asked for from now on.
    pub fn set_qkey(&mut self, qkey: Qkey) {
        self.config.qkey = qkey;
    }

    /// Takes a datagram to be sent.
    ///
    /// # Errors
    /// [`PostError::TooLong`] if it is longer than a packet's payload.
    pub fn post(&mut self, datagram: Datagram) -> Result<(), PostError> {
        let most = self.config.mtu.bytes();
        if datagram.len > most {
            return Err(PostError::TooLong { len: datagram.len, most });
        }
        if self.failed {
            self.events.push_back(Event::Completed { id: datagram.id, status: Status::Flushed });
        } else {
            self.queue.push_back(datagram);
        }
        Ok(())
    }

    /// Whether a packet is a datagram for this queue pair or a group, of its partition, with its key (9.6.1.4). For
    /// callers that deliver by themselves; [`handle_datagram`](Self::handle_datagram) asks it first.
    #[must_use]
    pub fn admits(&self, packet: &Packet<&[u8]>) -> bool {
        let bth = packet.bth();
        (bth.dest_qp() == self.config.local_qp || bth.dest_qp() == MULTICAST)
            && bth.pkey().matches(self.config.pkey)
            && packet.deth().is_some_and(|deth| deth.qkey() == self.config.qkey)
    }

    /// Takes a packet, whose ICRC was right or could not be checked. What is not for this queue pair, shows the
    /// wrong key, or does not fit, is dropped, and the queue pair lives on (9.8.3.2).
    pub fn handle_datagram<M: Memory>(
        &mut self,
        envelope: &Envelope,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let (bth, Some(deth)) = (packet.bth(), packet.deth()) else {
            return Disposition::Dropped(DropReason::Destination);
        };
        if !self.admits(packet) {
            return Disposition::Dropped(DropReason::Destination);
        }
        let payload = packet.payload();
        if self.failed || payload.len() > self.config.mtu.bytes() as usize {
            return Disposition::Dropped(DropReason::State);
        }
        let Some(id) = self.held.take().or_else(|| memory.take_receive()) else {
            return Disposition::NotReady;
        };
        let delivered = memory
            .deliver(id, 0, &envelope.headers)
            .and_then(|()| if payload.is_empty() { Ok(()) } else { memory.deliver(id, GRH, payload) });
        let status = match delivered {
            Ok(()) => Status::Success,
            Err(DeliveryFault::TooLong) => {
                self.held = Some(id);
                return Disposition::Dropped(DropReason::State);
            }
            Err(DeliveryFault::Protection) => Status::LocalProtection,
        };
        self.events.push_back(Event::Received(Received {
            id,
            status,
            kind: ReceivedKind::Send,
            len: payload.len() as u32,
            immediate: packet.imm_dt().map(|header| header.data()),
            invalidated: None,
            solicited: bth.solicited(),
            source: Some((envelope.from, deth.src_qp())),
        }));
        if status == Status::Success {
            return Disposition::Accepted;
        }
        self.fail_by(Fault::Receive);
        Disposition::Refused
    }

    /// Fails: what waits is flushed.
    pub fn fail(&mut self) {
        self.fail_by(Fault::Asked);
    }

    fn fail_by(&mut self, fault: Fault) {
        if self.failed {
            return;
        }
        self.failed = true;
        if let Some(id) = self.held.take() {
            self.events.push_back(Event::Received(Received {
                id,
                status: Status::Flushed,
                kind: ReceivedKind::Send,
                len: 0,
                immediate: None,
                invalidated: None,
                solicited: false,
                source: None,
            }));
        }
        self.flush();
        self.events.push_back(Event::Failed(fault));
    }

    fn flush(&mut self) {
        for datagram in self.queue.drain(..) {
            self.events.push_back(Event::Completed { id: datagram.id, status: Status::Flushed });
        }
    }

    /// Fills `out` with datagrams to one destination address, as [`Connection`](crate::Connection) does; None if
    /// there are none.
    pub fn poll_transmit<M: Memory>(
        &mut self,
        memory: &mut M,
        limits: Limits,
        out: &mut [u8],
    ) -> Option<(Flow, Transmit)> {
        loop {
            let flow = self.queue.front()?.to.flow;
            let mut burst = Burst::new(out, flow.prepare(), limits);
            let mut removed = false;
            while let Some(datagram) = self.queue.front().copied().filter(|datagram| datagram.to.flow == flow)
            {
                let len = datagram.packet_len();
                if !burst.is_allowed() || !burst.has_room(len) {
                    break;
                }
                // Complete when it is sent; one that cannot be read has failed alone (10.3.1.7 lets the send
                // queue fail; those behind it were not wrong).
                let gather = |into: &mut [u8]| memory.gather(datagram.id, 0, into);
                let status = match self.build(&datagram, &mut burst, gather) {
                    Ok(()) => Status::Success,
                    Err(status) => status,
                };
                self.events.push_back(Event::Completed { id: datagram.id, status });
                self.queue.pop_front();
                removed = true;
            }
            match burst.finish() {
                Some(transmit) => return Some((flow, transmit)),
                // All of them failed; others may follow.
                None if removed => {}
                None => return None,
            }
        }
    }

    /// Makes a datagram's packet at once, for callers that send and complete by themselves: nothing is queued, and
    /// no event comes of it. `gather` copies the payload.
    ///
    /// # Errors
    /// [`PostError::TooLong`] if it is longer than a packet's payload.
    ///
    /// # Panics
    /// If `out` has no room for the packet: [`Datagram::packet_len`].
    pub fn packet(
        &mut self,
        datagram: &Datagram,
        out: &mut [u8],
        gather: impl FnOnce(&mut [u8]),
    ) -> Result<(), PostError> {
        let most = self.config.mtu.bytes();
        if datagram.len > most {
            return Err(PostError::TooLong { len: datagram.len, most });
        }
        let mut burst = Burst::new(out, datagram.to.flow.prepare(), Limits::NONE);
        assert!(
            burst.has_room(datagram.packet_len()),
            "room for a packet of {} bytes",
            datagram.packet_len()
        );
        let gathered = self.build(datagram, &mut burst, |into| {
            gather(into);
            Ok(())
        });
        gathered.expect("the payload is there");
        burst.finish();
        Ok(())
    }

    fn build(
        &mut self,
        datagram: &Datagram,
        burst: &mut Burst<'_>,
        gather: impl FnOnce(&mut [u8]) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let (payload, opcode) = (datagram.len as usize, datagram.opcode());
        let pad = payload.next_multiple_of(4) - payload;
        let len = datagram.packet_len();
        let bth = bth::Repr {
            solicited: datagram.solicited,
            pad: pad as u8,
            pkey: self.config.pkey,
            ..bth::Repr::new(opcode, datagram.to.qp, self.psn)
        };
        let packet = burst.begin(&bth, len);
        deth::Repr { qkey: datagram.to.qkey, src_qp: self.config.local_qp }
            .emit(&mut deth::Packet::new_unchecked(&mut packet[bth::LEN..]));
        if let (Some(data), Some(at)) = (datagram.immediate, opcode.headers().offset_of(Headers::IMM_DT)) {
            imm_dt::Repr { data }.emit(&mut imm_dt::Packet::new_unchecked(&mut packet[bth::LEN + at..]));
        }
        let start = bth::LEN + opcode.headers_len();
        if payload > 0 {
            gather(&mut packet[start..start + payload])?;
            packet[start + payload..start + payload + pad].fill(0);
        }
        burst.commit(len, true);
        self.psn = self.psn.plus(1);
        Ok(())
    }

    /// What there is to tell, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

impl Datagram {
    fn opcode(&self) -> Opcode {
        if self.immediate.is_some() { Opcode::UD_SEND_ONLY_IMM } else { Opcode::UD_SEND_ONLY }
    }

    /// Bytes of its packet, the ICRC's included.
    #[must_use]
    pub fn packet_len(&self) -> usize {
        bth::LEN + self.opcode().headers_len() + (self.len as usize).next_multiple_of(4) + ICRC_LEN
    }
}
