//! A queue pair of the unreliable datagram service (9.8.3): each message is one packet.

use core::net::IpAddr;
use std::collections::VecDeque;

use millstream_wire::icrc::Flow;
use millstream_wire::{Headers, ICRC_LEN, Opcode, Packet, Pkey, Psn, Qkey, Qpn, bth, deth, imm_dt};

use crate::burst::{Burst, Transmit, TransmitLimits};
use crate::config::Mtu;
use crate::connection::{Disposition, DropReason};
use crate::event::{Event, FailureCause, Received, ReceivedKind, Status};
use crate::memory::{DeliveryError, Memory};
use crate::request::{PostError, ReceiveId, WorkId};

/// Queue pair number of datagrams to a multicast group (10.5.2).
const MULTICAST: Qpn = Qpn::new(0xff_ffff);

/// Bytes of the global route header in front of a received datagram.
const GRH: u32 = 40;

/// Attributes of a UD queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdConfig {
    /// Local queue pair number.
    pub local_qp: Qpn,
    /// Q_Key that received datagrams must carry.
    pub qkey: Qkey,
    /// Partition key.
    pub pkey: Pkey,
    /// The port's MTU, the longest payload.
    pub mtu: Mtu,
    /// First own PSN (`sq_psn`).
    pub send_psn: Psn,
}

/// Destination of a datagram: address handle, queue pair number and Q_Key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramDestination {
    /// Addresses and ports.
    pub flow: Flow,
    /// Destination queue pair.
    pub qp: Qpn,
    /// Q_Key of the destination.
    pub qkey: Qkey,
}

/// A datagram to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Its send request.
    pub id: WorkId,
    /// Its destination.
    pub to: DatagramDestination,
    /// Payload in bytes.
    pub len: u32,
    /// Immediate data in network order.
    pub immediate: Option<[u8; 4]>,
    /// Whether the receiver's completion is a solicited event.
    pub solicited: bool,
}

/// Source of a received datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramSource {
    /// Source address.
    pub from: IpAddr,
    /// Header in front of the payload: an IPv6 header, or an IPv4 header in the last 20 bytes (annex A17,
    /// 17.4.5.1).
    pub headers: [u8; GRH as usize],
}

/// A queue pair of the unreliable datagram service.
#[derive(Debug)]
pub struct UdQueuePair {
    config: UdConfig,
    psn: Psn,
    queue: VecDeque<Datagram>,
    events: VecDeque<Event>,
    /// A receive request that was too short for a datagram; the next datagram uses it.
    spare_receive: Option<ReceiveId>,
    failed: bool,
}

impl UdQueuePair {
    /// A queue pair that sends and receives.
    #[must_use]
    pub fn new(config: UdConfig) -> Self {
        Self {
            psn: config.send_psn,
            config,
            queue: VecDeque::new(),
            events: VecDeque::new(),
            spare_receive: None,
            failed: false,
        }
    }

    /// Changes the Q_Key that received datagrams must carry.
    pub fn set_qkey(&mut self, qkey: Qkey) {
        self.config.qkey = qkey;
    }

    /// Posts a datagram.
    ///
    /// # Errors
    /// [`PostError::TooLong`] if it exceeds the port's MTU.
    pub fn post(&mut self, datagram: Datagram) -> Result<(), PostError> {
        let max = self.config.mtu.bytes();
        if datagram.len > max {
            return Err(PostError::TooLong { len: datagram.len, max });
        }
        if self.failed {
            self.events.push_back(Event::Completed { id: datagram.id, status: Status::Flushed });
        } else {
            self.queue.push_back(datagram);
        }
        Ok(())
    }

    /// Whether a datagram is for this queue pair or a multicast group, with matching partition and Q_Key
    /// (9.6.1.4), and no longer than the port's MTU. [`handle_datagram`](Self::handle_datagram) checks this itself.
    #[must_use]
    pub fn admits(&self, packet: &Packet<&[u8]>) -> bool {
        let bth = packet.bth();
        (bth.dest_qp() == self.config.local_qp || bth.dest_qp() == MULTICAST)
            && bth.pkey().matches(self.config.pkey)
            && packet.deth().is_some_and(|deth| deth.qkey() == self.config.qkey)
            && self.fits(packet)
    }

    fn fits(&self, packet: &Packet<&[u8]>) -> bool {
        packet.payload().len() <= self.config.mtu.bytes() as usize
    }

    /// Handles a packet whose ICRC was correct or could not be checked. Datagrams that are not for this queue
    /// pair, have another Q_Key, or do not fit are dropped; the queue pair stays usable (9.8.3.2).
    pub fn handle_datagram<M: Memory>(
        &mut self,
        envelope: &DatagramSource,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let (bth, Some(deth)) = (packet.bth(), packet.deth()) else {
            return Disposition::Dropped(DropReason::WrongDestination);
        };
        if self.failed || !self.fits(packet) {
            return Disposition::Dropped(DropReason::QpState);
        }
        if !self.admits(packet) {
            return Disposition::Dropped(DropReason::WrongDestination);
        }
        let payload = packet.payload();
        let Some(id) = self.spare_receive.take().or_else(|| memory.take_receive()) else {
            return Disposition::NotReady;
        };
        let delivered = memory
            .deliver(id, 0, &envelope.headers)
            .and_then(|()| if payload.is_empty() { Ok(()) } else { memory.deliver(id, GRH, payload) });
        let status = match delivered {
            Ok(()) => Status::Success,
            Err(DeliveryError::TooLong) => {
                self.spare_receive = Some(id);
                return Disposition::Dropped(DropReason::QpState);
            }
            Err(DeliveryError::Protection) => Status::LocalProtection,
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
        self.fail_by(FailureCause::ReceiveRequest);
        Disposition::Nak
    }

    /// Moves to the error state and flushes posted datagrams.
    pub fn fail(&mut self) {
        self.fail_by(FailureCause::Requested);
    }

    fn fail_by(&mut self, fault: FailureCause) {
        if self.failed {
            return;
        }
        self.failed = true;
        if let Some(id) = self.spare_receive.take() {
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

    /// Fills `out` with datagrams to one destination address, as
    /// [`Connection::poll_transmit`](crate::Connection::poll_transmit) does; `None` if there are none.
    pub fn poll_transmit<M: Memory>(
        &mut self,
        memory: &mut M,
        limits: TransmitLimits,
        out: &mut [u8],
    ) -> Option<(Flow, Transmit)> {
        loop {
            let flow = self.queue.front()?.to.flow;
            let mut burst = Burst::new(out, flow.crc(), limits);
            let mut removed = false;
            while let Some(datagram) = self.queue.front().copied().filter(|datagram| datagram.to.flow == flow)
            {
                let len = datagram.packet_len();
                if !burst.is_allowed() || !burst.has_room(len) {
                    break;
                }
                // Datagrams complete when they are sent. An unreadable one fails alone: 10.3.1.7 lets the
                // send queue fail, but the datagrams behind it are valid.
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
                // All datagrams of this burst failed; others may follow.
                None if removed => {}
                None => return None,
            }
        }
    }

    /// Builds one packet for callers that queue and complete datagrams themselves; there is no event.
    /// `gather` copies the payload.
    ///
    /// # Errors
    /// [`PostError::TooLong`] if the datagram exceeds the port's MTU.
    ///
    /// # Panics
    /// If `out` is shorter than [`Datagram::packet_len`].
    pub fn packet(
        &mut self,
        datagram: &Datagram,
        out: &mut [u8],
        gather: impl FnOnce(&mut [u8]),
    ) -> Result<(), PostError> {
        let max = self.config.mtu.bytes();
        if datagram.len > max {
            return Err(PostError::TooLong { len: datagram.len, max });
        }
        let mut burst = Burst::new(out, datagram.to.flow.crc(), TransmitLimits::NONE);
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

    /// The next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

impl Datagram {
    fn opcode(&self) -> Opcode {
        if self.immediate.is_some() { Opcode::UD_SEND_ONLY_IMM } else { Opcode::UD_SEND_ONLY }
    }

    /// Length of its packet in bytes, ICRC included.
    #[must_use]
    pub fn packet_len(&self) -> usize {
        bth::LEN + self.opcode().headers_len() + (self.len as usize).next_multiple_of(4) + ICRC_LEN
    }
}
