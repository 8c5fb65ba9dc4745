//! The connection manager's state: identifiers, their states and their events, without I/O or clock.
//!
//! The program's commands are the methods of `address`, `connect` and `group`; messages of peers and timers
//! those of `incoming`. All of them act through [`System`], and report to the program through the events of
//! `queue`. `ports` assigns ports, `attributes` answers queries.

mod address;
mod attributes;
mod connect;
mod group;
mod incoming;
mod ports;
mod queue;
mod table;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use millstream_wire::Psn;
use millstream_wire::cm::Transport;

use crate::abi::{QPT_UC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, UDP_QKEY};
use crate::address::Address;
use crate::message::{ConnectionParameters, Message};
use crate::system::{ChannelId, ClaimId, LinkId, System};
use crate::{Errno, Result};

pub use queue::Event;

use group::Group;
use ports::{Port, Ports};
use queue::Queue;
use table::Table;

/// Timeout for a message of the peer, about that of the kernel after fifteen retransmissions.
pub const MESSAGE_TIMEOUT: Duration = Duration::from_secs(64);
/// TIMEWAIT duration (IBTA volume 1, 12.9.8.4: twice the packet life time plus the ACK delay). It is short
/// because no packet is in flight once both sides have disconnected.
pub const TIME_WAIT: Duration = Duration::from_secs(1);
/// Packet life time code of the path, as in the kernel for Ethernet: about a second.
const PACKET_LIFE_TIME: u8 = 18;
/// Default and largest listen backlog.
const MAX_BACKLOG: u32 = 1024;

const EINVAL: Errno = Errno(libc::EINVAL);

/// States of an identifier (IBTA volume 1, figure 138; the kernel's states before a connection).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Listening,
    ReqSent,
    ReqRcvd,
    RepSent,
    RepRcvd,
    Established,
    DreqSent,
    DreqRcvd,
    TimeWait,
    SidrSent,
    SidrRcvd,
    /// Rejected, unreachable, or past TIMEWAIT.
    Closed,
}

/// An identifier: the kernel's half of an `rdma_cm_id`.
#[derive(Debug)]
struct Id {
    channel: ChannelId,
    /// The program's identifier; zero until the program has accepted the incoming connection.
    uid: u64,
    space: u16,
    qp_type: u8,
    state: State,
    src: Option<Address>,
    dst: Option<Address>,
    port: Option<Port>,
    reuse: bool,
    /// IPV6_V6ONLY; `None` for the default of the family.
    v6only: Option<bool>,
    tos: u8,
    ack_timeout: Option<u8>,
    /// Listeners: limit and number of pending requests.
    backlog: u32,
    waiting: u32,
    link: Option<LinkId>,
    deadline: Option<Instant>,
    /// Events that the program has taken.
    reported: u32,
    connection: Connection,
    /// A DREQ arrived before the program has seen the CONNECT_RESPONSE.
    ending: bool,
    qkey: u32,
}

/// ConnectionParameters of a connection.
#[derive(Debug, Default)]
struct Connection {
    /// PSN with which the peer starts.
    psn: Psn,
    local: ConnectionParameters,
    remote: ConnectionParameters,
    responder_resources: u8,
    initiator_depth: u8,
    timeout: u8,
    /// Path MTU code; zero until it is known.
    mtu: u8,
    retry_count: u8,
    rnr_retry_count: u8,
}

impl Id {
    fn new(channel: ChannelId, uid: u64, space: u16, qp_type: u8, psn: Psn) -> Self {
        Self {
            channel,
            uid,
            space,
            qp_type,
            state: State::Idle,
            src: None,
            dst: None,
            port: None,
            reuse: false,
            v6only: None,
            tos: 0,
            ack_timeout: None,
            backlog: 0,
            waiting: 0,
            link: None,
            deadline: None,
            reported: 0,
            connection: Connection { psn, ..Connection::default() },
            ending: false,
            qkey: UDP_QKEY,
        }
    }

    fn is_datagram(&self) -> bool {
        self.qp_type == QPT_UD
    }

    /// The transport service of its connection.
    fn transport(&self) -> Transport {
        match self.qp_type {
            QPT_UC => Transport::Uc,
            QPT_XRC_SEND | QPT_XRC_RECV => Transport::Xrc,
            _ => Transport::Rc,
        }
    }

    /// Whether the device is known, which follows from the source address.
    fn has_device(&self) -> bool {
        self.src.is_some_and(|src| !src.is_wildcard())
    }

    /// ACK timeout code of the path.
    fn timeout(&self) -> u8 {
        self.ack_timeout.unwrap_or(PACKET_LIFE_TIME + 1)
    }
}

/// The owner of a link.
#[derive(Clone, Copy, Debug)]
enum LinkOwner {
    /// A listener, until the first message arrives.
    Listener(ClaimId),
    /// An identifier.
    Id(u32),
}

/// The connection manager of a process.
#[derive(Debug, Default)]
pub struct Manager {
    ids: Table<Id>,
    groups: Table<Group>,
    channels: HashMap<ChannelId, Queue>,
    links: HashMap<LinkId, LinkOwner>,
    ports: Ports,
    timers: BTreeSet<(Instant, u32)>,
    /// Requests of links to listeners whose backlog was full, the oldest link first, and when they are handled again.
    deferred: BTreeMap<LinkId, (ClaimId, Message)>,
    retry_at: Option<Instant>,
}

impl Manager {
    /// Opens an event channel under a number that the caller chose.
    pub fn open(&mut self, channel: ChannelId) {
        self.channels.insert(channel, Queue::default());
    }

    /// Closes an event channel and destroys its identifiers.
    pub fn close(&mut self, system: &mut dyn System, channel: ChannelId) {
        let ids: Vec<u32> = self.ids.iter().filter(|(_, id)| id.channel == channel).map(|(n, _)| n).collect();
        for id in ids {
            // Destroying a listener rejects its pending requests.
            let _ = self.destroy(system, channel, id);
        }
        self.channels.remove(&channel);
    }

    /// The time at which [`expire`](Self::expire) is due.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let first = self.timers.first().map(|(time, _)| *time);
        first.into_iter().chain(self.retry_at).min()
    }

    /// The identifier `number`, if it belongs to `channel`.
    fn id(&mut self, channel: ChannelId, number: u32) -> Result<&mut Id> {
        let id = self.ids.get_mut(number).ok_or(Errno(libc::ENOENT))?;
        if id.channel == channel { Ok(id) } else { Err(EINVAL) }
    }

    fn set_deadline(&mut self, number: u32, deadline: Option<Instant>) {
        let Some(id) = self.ids.get_mut(number) else { return };
        let before = std::mem::replace(&mut id.deadline, deadline);
        if let Some(time) = before {
            self.timers.remove(&(time, number));
        }
        if let Some(time) = deadline {
            self.timers.insert((time, number));
        }
    }

    /// Closes the link of an identifier, if it has one.
    fn unlink(&mut self, system: &mut dyn System, number: u32) {
        if let Some(link) = self.ids.get_mut(number).and_then(|id| id.link.take()) {
            self.links.remove(&link);
            system.close(link);
        }
    }
}
