//! Connections to other hosts: the messages of a link as management datagrams between queue pairs 1 (IBTA
//! volume 1, 12.9). This module adds communication IDs, retransmission, and replies to duplicates.
//!
//! There is no I/O and no clock: datagrams are arguments and results, and time is an argument. There is no
//! hang-up between hosts: a lost peer shows when the manager's timeout expires.

mod connection;
mod table;

use std::net::IpAddr;
use std::time::Instant;

use millstream_device::gsi::reply_to_unknown;
use millstream_link::COMMUNICATION_ID_INDEX_BITS as ID_BITS;
use millstream_wire::cm::{self, Addresses, Transport};
use millstream_wire::{Qkey, Qpn};

use crate::abi::{reason, sidr};
use crate::address::Address;
use crate::message::{Message, private};
use crate::system::{LinkId, PortName};

use connection::{
    CmConnection, FIRST_RETRANSMIT_TIMEOUT, HandshakeState, MAX_RETRANSMIT_TIMEOUT, Received, Retransmission,
    parameters_of_req,
};
use table::ConnectionTable;

/// The communication ID in a REJ of a REQ to which the responder has given none (12.6.7). Linux sends the same.
const NO_ID: u32 = 0;

/// A management datagram to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutgoingMad {
    /// Local address.
    pub from: IpAddr,
    /// Address of the other host.
    pub to: IpAddr,
    /// The datagram.
    pub bytes: [u8; millstream_wire::mad::LEN],
}

/// The result of a received datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEvent {
    /// A request: the first message of a new link. The caller chooses the link's number and
    /// [adopts](RemoteConnections::adopt) or [rejects](RemoteConnections::reject) it.
    Request(Box<IncomingReq>),
    /// A message on a link.
    Message(LinkId, Message),
}

/// A connection request from another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncomingReq {
    /// The requested port.
    pub name: PortName,
    /// The request.
    pub message: Message,
    connection: CmConnection,
}

/// Connections of this process to other hosts.
#[derive(Debug)]
pub struct RemoteConnections {
    /// High bits of the local communication IDs.
    qpn_prefix: u16,
    guid: u64,
    next: u32,
    connections: ConnectionTable,
    /// Datagrams to send.
    out: Vec<OutgoingMad>,
}

impl RemoteConnections {
    /// Connections of the process with this QPN prefix; communication IDs start at `first`.
    #[must_use]
    pub fn new(qpn_prefix: u16, guid: u64, first: u32) -> Self {
        Self { qpn_prefix, guid, next: first, connections: ConnectionTable::default(), out: Vec::new() }
    }

    /// Takes the queued datagrams.
    pub fn take_outgoing(&mut self) -> Vec<OutgoingMad> {
        std::mem::take(&mut self.out)
    }

    /// A communication ID that no connection has.
    fn local_id(&mut self) -> u32 {
        // This ends: there are fewer connections than IDs, because `manager::table` and `table::MAX_CLOSED` bound them.
        loop {
            self.next = self.next.wrapping_add(1);
            let id = u32::from(self.qpn_prefix) << ID_BITS | self.next & ((1 << ID_BITS) - 1);
            if !self.connections.has_local_id(id) {
                return id;
            }
        }
    }

    /// Whether the link leads to another host.
    #[must_use]
    pub fn has(&self, link: LinkId) -> bool {
        self.connections.contains(link)
    }

    /// Creates a link from the address `own` to a port of another host.
    pub fn connect(&mut self, link: LinkId, own: IpAddr, name: PortName) {
        let local_id = self.local_id();
        let connection = CmConnection {
            own,
            peer: name.ip,
            local_id,
            remote_id: 0,
            transaction: u64::from(local_id),
            peer_transaction: 0,
            dreq_transaction: None,
            service: name.service(),
            qpn: Qpn::new(0),
            transport: Transport::Rc,
            state: HandshakeState::ReqSent,
            pending: None,
            answer: None,
            forget_at: None,
        };
        self.connections.insert(link, connection);
    }

    /// Accepts a request as a new link; false if it repeats a request that was accepted. Requests and their repetitions may
    /// be received before the first one is accepted.
    pub fn adopt(&mut self, link: LinkId, request: &IncomingReq) -> bool {
        let is_new = !self.has_adopted(request);
        if is_new {
            let connection = CmConnection { local_id: self.local_id(), ..request.connection.clone() };
            self.connections.insert_requested(link, connection);
        }
        is_new
    }

    fn has_adopted(&self, request: &IncomingReq) -> bool {
        let IncomingReq { connection, .. } = request;
        self.connections.requested(connection.peer, connection.remote_id).is_some()
    }

    /// Rejects a request: there is no listener. The repetition of a request that was accepted is ignored.
    pub fn reject(&mut self, request: &IncomingReq) {
        if self.has_adopted(request) {
            return;
        }
        let mut connection = request.connection.clone();
        let refusal = match request.message {
            Message::SidrReq { .. } => Message::SidrRep {
                status: sidr::UNSUPPORTED,
                qpn: Qpn::new(0),
                qkey: Qkey::new(0),
                private: Vec::new(),
            },
            _ => Message::Rej { reason: reason::INVALID_SERVICE_ID, private: Vec::new() },
        };
        let (bytes, _) = connection.encode(&refusal, self.guid);
        self.out.push(OutgoingMad { from: connection.own, to: connection.peer, bytes });
    }

    /// Sends a message on a link.
    pub fn send(&mut self, link: LinkId, message: &Message, now: Instant) {
        let guid = self.guid;
        let sent = self.connections.with(link, |connection| {
            let (bytes, is_repeated) = connection.encode(message, guid);
            connection.pending = is_repeated.then_some(Retransmission {
                bytes,
                again: now + FIRST_RETRANSMIT_TIMEOUT,
                wait: FIRST_RETRANSMIT_TIMEOUT,
            });
            if !is_repeated || matches!(message, Message::Rep(_)) {
                connection.answer = Some(bytes);
            }
            OutgoingMad { from: connection.own, to: connection.peer, bytes }
        });
        self.out.extend(sent);
    }

    /// Closes a link. For a while the last message is still retransmitted, and duplicates are answered.
    pub fn close(&mut self, link: LinkId, now: Instant) {
        self.connections.close(link, now);
    }

    /// The time at which [`expire`](Self::expire) is due.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.connections.deadline()
    }

    /// Retransmits due messages, and removes closed connections.
    pub fn expire(&mut self, now: Instant) {
        self.connections.forget(now);
        for link in self.connections.due(now) {
            let sent = self.connections.with(link, |connection| {
                let pending = connection.pending.as_mut()?;
                pending.wait = (pending.wait * 2).min(MAX_RETRANSMIT_TIMEOUT);
                pending.again = now + pending.wait;
                Some(OutgoingMad { from: connection.own, to: connection.peer, bytes: pending.bytes })
            });
            self.out.extend(sent.flatten());
        }
    }

    /// Whether a message waits for its reply.
    #[must_use]
    pub fn has_unanswered(&self) -> bool {
        self.connections.has_unanswered()
    }

    /// Handles a datagram from `peer` to the local address `own`.
    pub fn receive(&mut self, own: IpAddr, peer: IpAddr, datagram: &[u8], now: Instant) -> Option<CmEvent> {
        let (transaction, message) = cm::Message::parse(datagram).ok()?;
        let asks = match &message {
            cm::Message::Req(request) => Some(request.local_id),
            cm::Message::SidrReq { request_id, .. } => Some(*request_id),
            _ => None,
        };
        if let Some(remote_id) = asks {
            if let Some(connection) = self.connections.requested(peer, remote_id) {
                // A duplicate; there may be no reply yet while the program decides.
                if let Some(bytes) = connection.answer {
                    self.out.push(OutgoingMad { from: own, to: peer, bytes });
                }
                return None;
            }
            return self
                .handle_request(own, peer, transaction, &message)
                .map(|request| CmEvent::Request(Box::new(request)));
        }
        let id = match &message {
            cm::Message::SidrRep { request_id, .. } => *request_id,
            cm::Message::Rep(reply) => reply.remote_id,
            cm::Message::Mra { remote_id, .. }
            | cm::Message::Rej { remote_id, .. }
            | cm::Message::Rtu { remote_id, .. }
            | cm::Message::Dreq { remote_id, .. }
            | cm::Message::Drep { remote_id, .. } => *remote_id,
            cm::Message::Req(_) | cm::Message::SidrReq { .. } => return None,
        };
        let link = match message.withdrawn_request() {
            Some(remote_id) => self.connections.link_of_request(peer, remote_id),
            None => self.connections.link_of(peer, id),
        };
        let found = link.and_then(|link| {
            let handle = |connection: &mut CmConnection| {
                connection.is_from_peer(&message).then(|| {
                    let heard = connection.handle_message(transaction, &message, now);
                    (heard, connection.forget_at.is_none(), connection.answer)
                })
            };
            Some((link, self.connections.with(link, handle)??))
        });
        let Some((link, (heard, is_open, answer))) = found else {
            let reply = reply_to_unknown(transaction, &message);
            self.out.extend(reply.map(|bytes| OutgoingMad { from: own, to: peer, bytes }));
            return None;
        };
        match heard {
            Received::New(message) => is_open.then_some(CmEvent::Message(link, message)),
            Received::Duplicate => {
                if let Some(bytes) = answer {
                    self.out.push(OutgoingMad { from: own, to: peer, bytes });
                }
                None
            }
            Received::Ignored => None,
        }
    }

    fn handle_request(
        &mut self,
        own: IpAddr,
        peer: IpAddr,
        transaction: u64,
        message: &cm::Message<'_>,
    ) -> Option<IncomingReq> {
        let (service, remote_id, data) = match message {
            cm::Message::Req(request) => (request.service_id, request.local_id, request.private),
            cm::Message::SidrReq { service_id, request_id, private, .. } => {
                (*service_id, *request_id, *private)
            }
            _ => return None,
        };
        let (addresses, rest) = Addresses::parse(data).ok()?;
        let (space, port) = ((service >> 16) as u16, service as u16);
        if service >> 32 != 0 {
            return None;
        }
        // The addresses of the packet count, not those in the request.
        let src = Address { ip: peer, port: addresses.source_port, scope: 0 };
        let dst = Address { ip: own, port, scope: 0 };
        let (mut qpn, mut transport) = (Qpn::new(0), Transport::Rc);
        let said = match message {
            cm::Message::Req(request) => {
                (qpn, transport) = (request.qpn, request.transport);
                let private = rest[..private::REQ.min(rest.len())].to_vec();
                Message::Req { src, dst, parameters: parameters_of_req(request, private) }
            }
            _ => Message::SidrReq { src, dst, private: rest[..private::SIDR_REQ.min(rest.len())].to_vec() },
        };
        let connection = CmConnection {
            own,
            peer,
            local_id: NO_ID,
            remote_id,
            transaction,
            peer_transaction: transaction,
            dreq_transaction: None,
            service,
            qpn,
            transport,
            state: HandshakeState::ReqRcvd,
            pending: None,
            answer: None,
            forget_at: None,
        };
        Some(IncomingReq { name: PortName { space, ip: own, port }, message: said, connection })
    }
}

#[cfg(test)]
mod tests;
