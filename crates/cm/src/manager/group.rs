//! Multicast groups.
//!
//! The program attaches its queue pair to the group when it gets the event. The device delivers to every
//! member on the host, and joins the IP group for packets of other hosts. There is no subnet manager to ask,
//! so the event follows at once.

use super::attributes::address_vector_to;
use super::queue::{Event, ud_param};
use super::{EINVAL, Manager};
use crate::abi::{MULTICAST_QPN, event};
use crate::address::Address;
use crate::system::{ChannelId, System};
use crate::{Errno, Result};

/// A group membership.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: u32,
    /// The program's identifier of the membership.
    pub(super) uid: u64,
    address: Address,
    pub(super) reported: u32,
}

impl Manager {
    /// Joins a group and returns the membership's number; an event has the destination address.
    ///
    /// # Errors
    /// EINVAL for an address that is no group, or an identifier that is not of datagrams or has no device;
    /// EADDRINUSE for a second membership.
    pub fn join(
        &mut self,
        system: &mut dyn System,
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
        let av = address_vector_to(system, src.gid(), gid, tos);
        let event = Event::new(event::MULTICAST_JOIN, 0).with(&ud_param(MULTICAST_QPN, qkey, av, &[], 0));
        self.post_event(system, number, Event { group: Some(group), ..event });
        Ok(group)
    }

    /// Leaves a group; returns how many events of the membership the program has taken.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such membership.
    pub fn leave(&mut self, channel: ChannelId, membership: u32) -> Result<u32> {
        let group = self.groups.get(membership).ok_or(Errno(libc::ENOENT))?;
        let (number, reported) = (group.id, group.reported);
        self.id(channel, number)?;
        self.groups.remove(membership);
        self.forget_events(channel, |event| event.group == Some(membership));
        Ok(reported)
    }
}
