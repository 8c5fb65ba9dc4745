//! Messages of peers, hang-ups and timers.

use std::collections::HashSet;
use std::time::Duration;

use millstream_wire::cm::Transport;
use millstream_wire::{Psn, Qkey, Qpn};

use super::queue::{Event, conn_param, ud_param};
use super::{Id, LinkOwner, Manager, State};
use crate::abi::{AhAttr, QPT_RC, QPT_UC, QPT_UD, QPT_XRC_RECV, event, ps, reason, sidr};
use crate::address::Address;
use crate::message::{ConnectionParameters, Message, private};
use crate::system::{ClaimId, LinkId, System};

/// Interval of attempts to hand over the requests of this host that wait for a place in a backlog.
pub(super) const BACKLOG_RETRY: Duration = Duration::from_millis(20);

impl Manager {
    /// Handles a link that a peer has opened to a port of this process.
    pub fn accepted(&mut self, claim: ClaimId, link: LinkId) {
        self.links.insert(link, LinkOwner::Listener(claim));
    }

    /// Handles a message.
    pub fn message(&mut self, system: &mut dyn System, link: LinkId, message: Message) {
        match self.links.get(&link) {
            Some(LinkOwner::Listener(claim)) => {
                let claim = *claim;
                self.handle_first(system, claim, link, message);
            }
            Some(LinkOwner::Id(number)) => {
                let number = *number;
                self.handle_later(system, number, link, message);
            }
            None => {}
        }
    }

    /// Whether a request has to wait because the program has not taken as many as the listener's backlog.
    #[must_use]
    pub fn has_full_backlog(&self, claim: ClaimId, message: &Message) -> bool {
        let is_full = |number| self.ids.get(number).is_some_and(|id| id.waiting >= id.backlog);
        matches!(message, Message::Req { .. }) && self.listener(claim).is_some_and(is_full)
    }

    /// Handles the requests that wait for a place in a backlog.
    fn handle_deferred(&mut self, system: &mut dyn System) {
        self.retry_at = None;
        let mut full = HashSet::new();
        for (link, (claim, message)) in std::mem::take(&mut self.deferred) {
            if full.contains(&claim) {
                self.deferred.insert(link, (claim, message));
                continue;
            }
            self.handle_first(system, claim, link, message);
            if self.deferred.contains_key(&link) {
                full.insert(claim);
            }
        }
    }

    /// Handles the first message of a link, which must be a request.
    fn handle_first(&mut self, system: &mut dyn System, claim: ClaimId, link: LinkId, message: Message) {
        if self.deferred.remove(&link).is_some() {
            // The peer gives up, or does not keep to the protocol.
            self.links.remove(&link);
            return system.close(link);
        }
        if self.has_full_backlog(claim, &message) {
            self.deferred.insert(link, (claim, message));
            self.retry_at.get_or_insert(system.now() + BACKLOG_RETRY);
            return;
        }
        let made = match message {
            Message::Req { src, dst, parameters } => {
                let mtu = system.path_mtu(dst.ip, src.ip);
                let mtu = if parameters.mtu == 0 { mtu } else { mtu.min(parameters.mtu) };
                self.handle_req(
                    claim,
                    src,
                    dst,
                    ConnectionParameters { mtu, ..parameters },
                    Psn::new(system.random()),
                )
            }
            Message::SidrReq { src, dst, private } => {
                self.handle_sidr_req(claim, src, dst, &private, Psn::new(system.random()))
            }
            // No reply: any other message is invalid.
            _ => {
                self.links.remove(&link);
                return system.close(link);
            }
        };
        match made {
            Ok((listener, child, event)) => {
                self.link(child, link);
                self.post_event(system, listener, event);
            }
            Err(refusal) => {
                system.send(link, &refusal);
                self.links.remove(&link);
                system.close(link);
            }
        }
    }

    /// Creates the identifier of a request, with this type of queue pair; the error is the message that rejects it.
    fn create_child(&mut self, claim: ClaimId, qp_type: u8, make: impl FnOnce(&Id) -> Id) -> ChildResult {
        let datagram = qp_type == QPT_UD;
        let refuse = |reason, status| {
            if datagram {
                Message::SidrRep { status, qpn: Qpn::new(0), qkey: Qkey::new(0), private: Vec::new() }
            } else {
                Message::Rej { reason, private: Vec::new() }
            }
        };
        let no_listener = refuse(reason::INVALID_SERVICE_ID, sidr::UNSUPPORTED);
        let Some(listener) = self.listener(claim) else { return Err(no_listener) };
        let refused = refuse(reason::CONSUMER, sidr::REJECTED);
        let id = self.ids.get_mut(listener).ok_or_else(|| refused.clone())?;
        // As the kernel's `cma_ib_check_req_qp_type`: a listener without a type takes all.
        // Linux rejects datagram requests beyond the backlog. Others wait.
        if id.qp_type != ANY_QPT && id.qp_type != qp_type || id.waiting >= id.backlog {
            return Err(refused);
        }
        let child = make(id);
        let child = self.ids.add(child).map_err(|_| refused)?;
        if let Some(listener) = self.ids.get_mut(listener) {
            listener.waiting += 1;
        }
        Ok((listener, child))
    }

    fn handle_req(
        &mut self,
        claim: ClaimId,
        src: Address,
        dst: Address,
        parameters: ConnectionParameters,
        psn: Psn,
    ) -> Result<(u32, u32, Event), Message> {
        let answer = conn_param(&parameters, private::REQ);
        let ece = parameters.ece;
        let qp_type = match parameters.transport {
            Transport::Rc => QPT_RC,
            Transport::Uc => QPT_UC,
            Transport::Xrc => QPT_XRC_RECV,
        };
        let (listener, child) = self.create_child(claim, qp_type, |listener| {
            let mut id = Id::new(listener.channel, 0, listener.space, qp_type, psn);
            (id.src, id.dst, id.tos) = (Some(dst), Some(src), listener.tos);
            id.state = State::ReqRcvd;
            let connection = &mut id.connection;
            connection.responder_resources = parameters.initiator_depth;
            connection.initiator_depth = parameters.responder_resources;
            connection.retry_count = parameters.retry_count;
            connection.rnr_retry_count = parameters.rnr_retry_count;
            connection.timeout = parameters.timeout;
            connection.mtu = parameters.mtu;
            connection.remote = parameters;
            id
        })?;
        let event = Event::new(event::CONNECT_REQUEST, 0).with(&answer).with_ece(ece);
        Ok((listener, child, Event { child: Some(child), ..event }))
    }

    fn handle_sidr_req(
        &mut self,
        claim: ClaimId,
        src: Address,
        dst: Address,
        data: &[u8],
        psn: Psn,
    ) -> Result<(u32, u32, Event), Message> {
        let (listener, child) = self.create_child(claim, QPT_UD, |listener| {
            let mut id = Id::new(listener.channel, 0, listener.space, QPT_UD, psn);
            (id.src, id.dst, id.tos) = (Some(dst), Some(src), listener.tos);
            id.state = State::SidrRcvd;
            id
        })?;
        let answer = ud_param(0, 0, AhAttr::ZERO, data, private::SIDR_REQ);
        let event = Event::new(event::CONNECT_REQUEST, 0).with(&answer);
        Ok((listener, child, Event { child: Some(child), ..event }))
    }

    /// Handles a later message. Messages that do not fit the state are late or invalid, and are ignored.
    fn handle_later(&mut self, system: &mut dyn System, number: u32, link: LinkId, message: Message) {
        let Some(id) = self.ids.get_mut(number) else { return };
        match (id.state, message) {
            (State::ReqSent, Message::Rep(parameters)) => {
                id.state = State::RepRcvd;
                let connection = &mut id.connection;
                connection.responder_resources = parameters.initiator_depth;
                connection.initiator_depth = parameters.responder_resources;
                connection.rnr_retry_count = parameters.rnr_retry_count;
                let event = Event::new(event::CONNECT_RESPONSE, 0)
                    .with(&conn_param(&parameters, private::REP))
                    .with_ece(parameters.ece);
                connection.remote = parameters;
                // The program may take any time from here on.
                self.set_deadline(number, None);
                self.post_event(system, number, event);
            }
            (State::RepSent, Message::Rtu) => self.established(system, number),
            (State::ReqSent | State::ReqRcvd | State::RepSent, Message::Rej { reason, private }) => {
                self.rejected(system, number, reason, &private);
            }
            // The peer has withdrawn its acceptance.
            (State::RepRcvd | State::Established, Message::Rej { reason, private }) => {
                self.rejected(system, number, reason, &private);
            }
            (State::RepRcvd, Message::Dreq) => id.ending = true,
            (State::RepSent | State::Established, Message::Dreq) => {
                id.state = State::DreqRcvd;
                self.set_deadline(number, None);
                self.disconnected(system, number, 0);
            }
            // Both sides sent a DREQ, so there is no reply to wait for.
            (State::DreqSent, Message::Dreq) => {
                system.send(link, &Message::Drep);
                self.enter_timewait(system, number);
                self.disconnected(system, number, 0);
            }
            (State::DreqSent, Message::Drep) => {
                self.enter_timewait(system, number);
                self.disconnected(system, number, 0);
            }
            (State::SidrSent, Message::SidrRep { status: sidr::VALID, qpn, qkey, private }) => {
                let av = self.address_vector(system, number);
                let answer = ud_param(qpn.get(), qkey.get(), av, &private, private::SIDR_REP);
                self.unlink(system, number);
                self.set_deadline(number, None);
                if let Some(id) = self.ids.get_mut(number) {
                    id.state = State::Established;
                }
                self.post_event(system, number, Event::new(event::ESTABLISHED, 0).with(&answer));
            }
            (State::SidrSent, Message::SidrRep { status, private, .. }) => {
                let answer = ud_param(0, 0, AhAttr::ZERO, &private, private::SIDR_REP);
                self.give_up(system, number);
                let event = Event::new(event::UNREACHABLE, i32::from(status)).with(&answer);
                self.post_event(system, number, event);
            }
            _ => {}
        }
    }

    /// Handles a hang-up: the peer closed the link or died.
    pub fn hang_up(&mut self, system: &mut dyn System, link: LinkId) {
        let Some(used) = self.links.remove(&link) else { return };
        self.deferred.remove(&link);
        system.close(link);
        let LinkOwner::Id(number) = used else { return };
        let Some(id) = self.ids.get_mut(number) else { return };
        id.link = None;
        match id.state {
            // The peer's connection manager would have sent a REJ.
            State::ReqSent | State::ReqRcvd | State::RepSent | State::RepRcvd => {
                self.rejected(system, number, reason::CONSUMER, &[]);
            }
            State::SidrSent => self.unreachable(system, number, i32::from(sidr::REJECTED)),
            State::SidrRcvd => id.state = State::Closed,
            State::Established if id.space != ps::UDP && id.space != ps::IPOIB => {
                id.state = State::DreqRcvd;
                self.disconnected(system, number, 0);
            }
            State::DreqSent => {
                self.enter_timewait(system, number);
                self.disconnected(system, number, 0);
            }
            _ => {}
        }
    }

    /// Handles expired timers.
    pub fn expire(&mut self, system: &mut dyn System) {
        let now = system.now();
        if self.retry_at.is_some_and(|time| time <= now) {
            self.handle_deferred(system);
        }
        while let Some((time, number)) = self.timers.first().copied()
            && time <= now
        {
            self.set_deadline(number, None);
            let Some(id) = self.ids.get_mut(number) else { continue };
            match id.state {
                State::ReqSent | State::RepSent => {
                    if let Some(link) = id.link {
                        system.send(link, &Message::Rej { reason: reason::TIMEOUT, private: Vec::new() });
                    }
                    self.unreachable(system, number, -libc::ETIMEDOUT);
                }
                State::SidrSent => self.unreachable(system, number, -libc::ETIMEDOUT),
                State::DreqSent => {
                    self.enter_timewait(system, number);
                    self.disconnected(system, number, libc::ETIMEDOUT);
                }
                State::TimeWait => {
                    id.state = State::Closed;
                    self.post_event(system, number, Event::new(event::TIMEWAIT_EXIT, 0));
                }
                _ => {}
            }
        }
    }
}

/// The type of a listener whose program has chosen none.
const ANY_QPT: u8 = 0;

/// The listener and the identifier of the new connection, or the message that rejects the request.
type ChildResult = Result<(u32, u32), Message>;
