//! Identifiers, their states and their events: the manager without input, output or clock.
//!
//! Commands of the program come in through the methods of `address`, `connect` and `group`; what other processes do,
//! and time, through those of `incoming`. All of them act on the world through [`Wire`] and on the program through
//! the events of `queue`. `ports` says who owns which port, `attributes` what the program's queue pairs need.

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

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use crate::abi::{QPT_UD, UDP_QKEY};
use crate::address::Address;
use crate::message::Parameters;
use crate::wire::{ChannelId, ClaimId, LinkId, Wire};
use crate::{Errno, Result};

pub use queue::Event;

use group::Group;
use ports::{Port, Ports};
use queue::Queue;
use table::Table;

/// How long to wait for a message of the peer. What the kernel comes to with fifteen repetitions.
pub const PATIENCE: Duration = Duration::from_secs(64);
/// How long a connection that ended is remembered (IBTA volume 1, 12.9.8.4: twice the life of a packet and the
/// acknowledgement's delay). Here no packet is under way once both sides have agreed, so it is short.
pub const TIME_WAIT: Duration = Duration::from_secs(1);
/// Code of a packet's life time on the path, as the kernel has it for Ethernet: about a second.
const PACKET_LIFE_TIME: u8 = 18;
/// Connection requests that wait in a listener, at most and unless it says less.
const MAX_BACKLOG: u32 = 1024;

const EINVAL: Errno = Errno(libc::EINVAL);

/// Where an identifier is between its making and its end (IBTA volume 1, figure 138; before a connection, the
/// kernel's states).
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
    /// Rejected, unreachable, or long over.
    Closed,
}

/// An identifier: the kernel's half of an `rdma_cm_id`.
#[derive(Debug)]
struct Id {
    channel: ChannelId,
    /// The program's name for it; zero until the program has accepted the connection that it came with.
    uid: u64,
    space: u16,
    qp_type: u8,
    state: State,
    src: Option<Address>,
    dst: Option<Address>,
    port: Option<Port>,
    reuse: bool,
    /// None: as the address family says.
    only_own_family: Option<bool>,
    tos: u8,
    ack_timeout: Option<u8>,
    /// Of a listener: requests that may wait, and that do.
    backlog: u32,
    waiting: u32,
    link: Option<LinkId>,
    deadline: Option<Instant>,
    /// The program's events that it has taken.
    reported: u32,
    connection: Connection,
    /// The peer wants to end a connection that the program has yet to hear of.
    ending: bool,
    qkey: u32,
}

/// The two ends of a connection.
#[derive(Debug, Default)]
struct Connection {
    /// Starts the peer's numbers.
    psn: u32,
    local: Parameters,
    remote: Parameters,
    responder_resources: u8,
    initiator_depth: u8,
    timeout: u8,
    /// Code of the path MTU; zero until it is known.
    mtu: u8,
    retry_count: u8,
    rnr_retry_count: u8,
}

impl Id {
    fn new(channel: ChannelId, uid: u64, space: u16, qp_type: u8, psn: u32) -> Self {
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
            only_own_family: None,
            tos: 0,
            ack_timeout: None,
            backlog: 0,
            waiting: 0,
            link: None,
            deadline: None,
            reported: 0,
            connection: Connection { psn: psn & 0xff_ffff, ..Connection::default() },
            ending: false,
            qkey: UDP_QKEY,
        }
    }

    fn is_datagram(&self) -> bool {
        self.qp_type == QPT_UD
    }

    /// The device is known as soon as the source address is.
    fn has_device(&self) -> bool {
        self.src.is_some_and(|src| !src.is_wildcard())
    }

    /// Code of the time after which a request is repeated.
    fn timeout(&self) -> u8 {
        self.ack_timeout.unwrap_or(PACKET_LIFE_TIME + 1)
    }
}

/// What a link is for.
#[derive(Clone, Copy, Debug)]
enum Use {
    /// Its first message will say.
    Unknown(ClaimId),
    /// One identifier's connection.
    Of(u32),
}

/// All of a process's identifiers.
#[derive(Debug, Default)]
pub struct Manager {
    ids: Table<Id>,
    groups: Table<Group>,
    channels: HashMap<ChannelId, Queue>,
    links: HashMap<LinkId, Use>,
    ports: Ports,
    timers: BTreeSet<(Instant, u32)>,
}

impl Manager {
    /// A channel, under a name that the caller chooses.
    pub fn open(&mut self, channel: ChannelId) {
        self.channels.insert(channel, Queue::default());
    }

    /// Ends a channel and all of its identifiers.
    pub fn close(&mut self, wire: &mut dyn Wire, channel: ChannelId) {
        let ids: Vec<u32> = self.ids.iter().filter(|(_, id)| id.channel == channel).map(|(n, _)| n).collect();
        for id in ids {
            // A listener's end ends the requests that wait in it.
            let _ = self.destroy(wire, channel, id);
        }
        self.channels.remove(&channel);
    }

    /// When [`expire`](Self::expire) has something to do next.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(time, _)| *time)
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

    /// Ends the link of an identifier, if it has one.
    fn unlink(&mut self, wire: &mut dyn Wire, number: u32) {
        if let Some(link) = self.ids.get_mut(number).and_then(|id| id.link.take()) {
            self.links.remove(&link);
            wire.close(link);
        }
    }
}
