//! Multicast groups.
//!
//! Joining is between the program and its own queue pair, which the program attaches once it has the event: the
//! device delivers to every member on the host, and has the packets of other hosts come by joining the IP group. So
//! there is no manager of groups to ask, and the event comes at once.

use super::attributes::way_to;
use super::queue::{Event, ud_param};
use super::{EINVAL, Manager};
use crate::abi::{MULTICAST_QPN, event};
use crate::address::Address;
use crate::wire::{ChannelId, Wire};
use crate::{Errno, Result};

/// A membership.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: u32,
    /// The program's name for it.
    pub(super) uid: u64,
    address: Address,
    pub(super) reported: u32,
}

impl Manager {
    /// Joins a group and returns the membership's number; an event carries where to send.
    ///
    /// # Errors
    /// EINVAL for what is not a group, or not an identifier of datagrams with a device; EADDRINUSE for a second
    /// membership.
    pub fn join(
        &mut self,
        wire: &mut dyn Wire,
        channel: ChannelId,
        number: u32,
        uid: u64,
        address: Address,
    ) -> Result<u32> {
        let id = self.id(channel, number)?;
        if !id.is_datagram() || !id.has_device() {
            return Err(EINVAL);
        }
        let (Some(src), Some(gid)) = (id.src, address.multicast_gid()) else { return Err(EINVAL) };
        let (qkey, tos) = (id.qkey, id.tos);
        if self.groups.iter().any(|(_, group)| group.id == number && group.address.ip == address.ip) {
            return Err(Errno(libc::EADDRINUSE));
        }
        let group = self.groups.add(Group { id: number, uid, address, reported: 0 })?;
        let way = way_to(wire, src.gid(), gid, tos);
        let event = Event::new(event::MULTICAST_JOIN, 0).with(&ud_param(MULTICAST_QPN, qkey, way, &[], 0));
        self.tell(wire, number, Event { group: Some(group), ..event });
        Ok(group)
    }

    /// Leaves a group; says how many events of the membership the program has taken.
    ///
    /// # Errors
    /// ENOENT and EINVAL for memberships that are not there.
    pub fn leave(&mut self, channel: ChannelId, membership: u32) -> Result<u32> {
        let group = self.groups.get(membership).ok_or(Errno(libc::ENOENT))?;
        let (number, reported) = (group.id, group.reported);
        self.id(channel, number)?;
        self.groups.remove(membership);
        self.forget_events(channel, |event| event.group == Some(membership));
        Ok(reported)
    }
}
