//! Connecting and disconnecting by the program.

use std::io::ErrorKind;

use millstream_wire::cm::Transport;
use millstream_wire::{Psn, Qkey, Qpn};

use super::queue::{Event, failure, private_only};
use super::{EINVAL, LinkOwner, MAX_BACKLOG, MESSAGE_TIMEOUT, Manager, State, TIME_WAIT};
use crate::abi::{ConnParam, Ece, QPT_RC, QPT_UC, QPT_XRC_SEND, event, reason, sidr};
use crate::address::Address;
use crate::message::{ConnectionParameters, Message, private};
use crate::system::{ChannelId, LinkId, PortName, System};
use crate::{Errno, Result};

/// `IBV_EVENT_COMM_EST`
const COMM_EST: u32 = 4;

/// The program's private data.
///
/// # Errors
/// EINVAL if it exceeds `room`.
fn private_of(param: &ConnParam, room: usize) -> Result<Vec<u8>> {
    let given = &param.private_data[..usize::from(param.private_data_len)];
    if given.len() <= room { Ok(given.to_vec()) } else { Err(EINVAL) }
}

fn parameters(
    param: &ConnParam,
    ece: Ece,
    (transport, psn): (Transport, Psn),
    timeout: u8,
    room: usize,
) -> Result<ConnectionParameters> {
    Ok(ConnectionParameters {
        qpn: Qpn::new(param.qp_num),
        psn,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: u8::from(param.flow_control != 0),
        retry_count: param.retry_count.min(7),
        rnr_retry_count: param.rnr_retry_count.min(7),
        srq: u8::from(param.srq != 0),
        timeout,
        mtu: 0,
        transport,
        ece: [ece.vendor_id, ece.attr_mod],
        private: private_of(param, room)?,
    })
}

/// The parameters that an XRC initiator sends (annex A14; the kernel's `cm_format_req`): it receives no requests, and its peer
/// sends none.
fn xrc_request(from: ConnectionParameters) -> ConnectionParameters {
    ConnectionParameters { responder_resources: 0, retry_count: 0, rnr_retry_count: 0, srq: 0, ..from }
}

/// The parameters that an XRC target sends (annex A14; the kernel's `cm_format_rep`): it issues no requests, and receives into
/// shared receive queues.
fn xrc_reply(from: ConnectionParameters) -> ConnectionParameters {
    ConnectionParameters { initiator_depth: 0, flow_control: 0, srq: 1, ..from }
}

impl Manager {
    /// Listens with a backlog of pending requests.
    ///
    /// # Errors
    /// EINVAL in the wrong state; EADDRINUSE if the port is shared.
    pub fn listen(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        backlog: u32,
    ) -> Result<()> {
        if self.id(channel, number)?.state == State::Idle {
            self.bind(system, channel, number, Address::ANY)?;
        }
        if self.id(channel, number)?.state != State::Bound {
            return Err(EINVAL);
        }
        if !self.is_sole_owner(number) {
            return Err(Errno(libc::EADDRINUSE));
        }
        if let Some(port) = self.ids.get(number).and_then(|id| id.port.as_ref()) {
            self.ports.listen(system, port)?;
        }
        let id = self.id(channel, number)?;
        id.backlog = if (1..MAX_BACKLOG).contains(&backlog) { backlog } else { MAX_BACKLOG };
        id.state = State::Listening;
        Ok(())
    }

    /// Requests a connection or a datagram service at the resolved address; an event reports the result.
    ///
    /// # Errors
    /// EINVAL in the wrong state, for a queue pair type that cannot connect, or for private data that is too long.
    pub fn connect(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        param: &ConnParam,
        ece: Ece,
    ) -> Result<()> {
        let id = self.id(channel, number)?;
        let (State::RouteResolved, Some(src), Some(dst)) = (id.state, id.src, id.dst) else {
            return Err(EINVAL);
        };
        let (request, sent) = if id.is_datagram() {
            let private = private_of(param, private::SIDR_REQ)?;
            (Message::SidrReq { src, dst, private }, State::SidrSent)
        } else {
            if !matches!(id.qp_type, QPT_RC | QPT_UC | QPT_XRC_SEND) {
                return Err(EINVAL);
            }
            let mtu = system.path_mtu(src.ip, dst.ip);
            let parameters =
                parameters(param, ece, (id.transport(), id.connection.psn), id.timeout(), private::REQ)?;
            let parameters = ConnectionParameters { mtu, ..parameters };
            id.connection.mtu = mtu;
            let connection = &mut id.connection;
            connection.local = parameters.clone();
            connection.responder_resources = parameters.responder_resources;
            connection.initiator_depth = parameters.initiator_depth;
            connection.retry_count = parameters.retry_count;
            connection.timeout = parameters.timeout;
            let is_xrc = parameters.transport == Transport::Xrc;
            let parameters = if is_xrc { xrc_request(parameters) } else { parameters };
            (Message::Req { src, dst, parameters }, State::ReqSent)
        };
        let name = PortName { space: id.space, ip: dst.ip, port: dst.port };
        id.state = sent;
        match system.connect(src.ip, name) {
            Ok(link) => {
                self.link(number, link);
                system.send(link, &request);
                self.set_deadline(number, Some(system.now() + MESSAGE_TIMEOUT));
            }
            Err(error) if error.kind() != ErrorKind::ConnectionRefused => {
                self.unreachable(system, number, failure(Errno::from(error).0));
            }
            // The reply of the connection manager at the other end.
            Err(_) if sent == State::SidrSent => {
                self.unreachable(system, number, i32::from(sidr::UNSUPPORTED))
            }
            Err(_) => self.rejected(system, number, reason::INVALID_SERVICE_ID, &[]),
        }
        Ok(())
    }

    pub(super) fn link(&mut self, number: u32, link: LinkId) {
        self.links.insert(link, LinkOwner::Id(number));
        if let Some(id) = self.ids.get_mut(number) {
            id.link = Some(link);
        }
    }

    /// Accepts a request (with parameters) or a reply (without). The program calls the connection `uid` from
    /// now on.
    ///
    /// # Errors
    /// EINVAL in the wrong state (the peer may have given up) or for private data that is too long.
    pub fn accept(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        uid: u64,
        param: Option<(&ConnParam, Ece)>,
    ) -> Result<()> {
        let id = self.id(channel, number)?;
        let link = id.link.ok_or(EINVAL)?;
        match (id.state, param) {
            (State::RepRcvd, _) => {
                id.state = State::Established;
                let ending = std::mem::take(&mut id.ending);
                system.send(link, &Message::Rtu);
                if ending {
                    self.message(system, link, Message::Dreq);
                }
            }
            (State::ReqRcvd, Some((param, ece))) => {
                let timeout = id.connection.timeout;
                let reply =
                    parameters(param, ece, (id.transport(), id.connection.psn), timeout, private::REP)?;
                id.connection.local = reply.clone();
                id.connection.responder_resources = reply.responder_resources;
                id.connection.initiator_depth = reply.initiator_depth;
                id.state = State::RepSent;
                id.uid = uid;
                let reply = if reply.transport == Transport::Xrc { xrc_reply(reply) } else { reply };
                system.send(link, &Message::Rep(reply));
                self.set_deadline(number, Some(system.now() + MESSAGE_TIMEOUT));
            }
            (State::SidrRcvd, Some((param, _))) => {
                let private = private_of(param, private::SIDR_REP)?;
                let qpn = Qpn::new(param.qp_num);
                let reply = Message::SidrRep { status: sidr::VALID, qpn, qkey: Qkey::new(id.qkey), private };
                id.state = State::Established;
                id.uid = uid;
                system.send(link, &reply);
                self.unlink(system, number);
            }
            _ => return Err(EINVAL),
        }
        Ok(())
    }

    /// Rejects a request or a reply.
    ///
    /// # Errors
    /// EINVAL in the wrong state, for private data that is too long, or for a reason reserved to the
    /// connection manager.
    pub fn reject(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        why: u8,
        data: &[u8],
    ) -> Result<()> {
        let why = match why {
            0 | reason::CONSUMER => reason::CONSUMER,
            reason::VENDOR_OPTION => why,
            _ => return Err(EINVAL),
        };
        let id = self.id(channel, number)?;
        let (message, room) = match id.state {
            State::ReqRcvd | State::RepRcvd => {
                (Message::Rej { reason: why, private: data.to_vec() }, private::REJ)
            }
            State::SidrRcvd => {
                let private = data.to_vec();
                (
                    Message::SidrRep {
                        status: sidr::REJECTED,
                        qpn: Qpn::new(0),
                        qkey: Qkey::new(0),
                        private,
                    },
                    private::SIDR_REP,
                )
            }
            _ => return Err(EINVAL),
        };
        let link = id.link.ok_or(EINVAL)?;
        if data.len() > room {
            return Err(EINVAL);
        }
        id.state = State::Closed;
        system.send(link, &message);
        self.unlink(system, number);
        self.set_deadline(number, None);
        Ok(())
    }

    /// Disconnects, or replies to the peer's DREQ. The event follows when both sides have disconnected.
    ///
    /// # Errors
    /// EINVAL before the connection was requested.
    pub fn disconnect(&mut self, system: &mut dyn System, channel: ChannelId, number: u32) -> Result<()> {
        let id = self.id(channel, number)?;
        match (id.state, id.link) {
            (State::RepSent | State::Established, Some(link)) => {
                id.state = State::DreqSent;
                system.send(link, &Message::Dreq);
                self.set_deadline(number, Some(system.now() + MESSAGE_TIMEOUT));
            }
            (State::DreqRcvd, link) => {
                if let Some(link) = link {
                    system.send(link, &Message::Drep);
                }
                self.enter_timewait(system, number);
            }
            // The kernel ignores it as well: there is no connection yet, or no longer.
            (State::ReqSent | State::ReqRcvd | State::RepRcvd, _) => {}
            (State::DreqSent | State::TimeWait | State::Closed, _) => {}
            _ => return Err(EINVAL),
        }
        Ok(())
    }

    /// Handles RDMA_USER_CM_CMD_NOTIFY: the queue pair received a packet before the RTU arrived.
    ///
    /// # Errors
    /// EISCONN if the connection is established, EINVAL for other events and states.
    pub fn notify(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        event: u32,
    ) -> Result<()> {
        let state = self.id(channel, number)?.state;
        match (event, state) {
            (COMM_EST, State::RepSent) => {
                self.established(system, number);
                Ok(())
            }
            (COMM_EST, State::Established) => Err(Errno(libc::EISCONN)),
            _ => Err(EINVAL),
        }
    }

    pub(super) fn established(&mut self, system: &mut dyn System, number: u32) {
        self.set_deadline(number, None);
        if let Some(id) = self.ids.get_mut(number) {
            id.state = State::Established;
        }
        self.post_event(system, number, Event::new(event::ESTABLISHED, 0));
    }

    pub(super) fn rejected(&mut self, system: &mut dyn System, number: u32, why: u8, data: &[u8]) {
        self.give_up(system, number);
        let event = Event::new(event::REJECTED, i32::from(why)).with(&private_only(data, private::REJ));
        self.post_event(system, number, event);
    }

    pub(super) fn unreachable(&mut self, system: &mut dyn System, number: u32, status: i32) {
        self.give_up(system, number);
        self.post_event(system, number, Event::new(event::UNREACHABLE, status));
    }

    pub(super) fn give_up(&mut self, system: &mut dyn System, number: u32) {
        self.unlink(system, number);
        self.set_deadline(number, None);
        if let Some(id) = self.ids.get_mut(number) {
            id.state = State::Closed;
        }
    }

    /// Moves to TIMEWAIT; an event follows at its end.
    pub(super) fn enter_timewait(&mut self, system: &mut dyn System, number: u32) {
        self.unlink(system, number);
        if let Some(id) = self.ids.get_mut(number) {
            id.state = State::TimeWait;
        }
        self.set_deadline(number, Some(system.now() + TIME_WAIT));
    }

    pub(super) fn disconnected(&mut self, system: &mut dyn System, number: u32, errno: i32) {
        self.post_event(system, number, Event::new(event::DISCONNECTED, failure(errno)));
    }
}
