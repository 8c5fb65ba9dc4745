//! Identifiers and their addresses: create, destroy, bind, resolve.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use millstream_wire::{Psn, Qkey, Qpn};

use super::queue::{Event, failure};
use super::{EINVAL, Id, Manager, State};
use crate::abi::{QPT_RC, QPT_UD, event, ps, reason, sidr};
use crate::address::Address;
use crate::message::Message;
use crate::system::{ChannelId, System};
use crate::{Errno, Result};

impl Manager {
    /// Creates an identifier and returns its number.
    ///
    /// # Errors
    /// EINVAL for an invalid port space or queue pair type; ENOMEM.
    pub fn create(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        uid: u64,
        space: u16,
        qp_type: u8,
    ) -> Result<u32> {
        let qp_type = match space {
            ps::TCP => QPT_RC,
            ps::UDP | ps::IPOIB => QPT_UD,
            ps::IB => qp_type,
            _ => return Err(EINVAL),
        };
        if !self.channels.contains_key(&channel) {
            return Err(EINVAL);
        }
        self.ids.add(Id::new(channel, uid, space, qp_type, Psn::new(system.random())))
    }

    /// Destroys an identifier; returns how many of its events the program has taken and must acknowledge.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such identifier.
    pub fn destroy(&mut self, system: &mut dyn System, channel: ChannelId, number: u32) -> Result<u32> {
        let id = self.id(channel, number)?;
        let (reported, link) = (id.reported, id.link);
        // The message that the specification requires in each state.
        let last_message = match id.state {
            State::ReqSent => Some(Message::Rej { reason: reason::TIMEOUT, private: Vec::new() }),
            State::ReqRcvd | State::RepSent | State::RepRcvd => {
                Some(Message::Rej { reason: reason::CONSUMER, private: Vec::new() })
            }
            State::Established => Some(Message::Dreq),
            State::DreqRcvd => Some(Message::Drep),
            State::SidrRcvd => Some(Message::SidrRep {
                status: sidr::REJECTED,
                qpn: Qpn::new(0),
                qkey: Qkey::new(0),
                private: Vec::new(),
            }),
            _ => None,
        };
        if let (Some(last_message), Some(link)) = (last_message, link) {
            system.send(link, &last_message);
        }
        self.unlink(system, number);
        self.set_deadline(number, None);
        let groups: Vec<u32> =
            self.groups.iter().filter(|(_, group)| group.id == number).map(|(group, _)| group).collect();
        for group in groups {
            self.groups.remove(group);
        }
        for child in self.forget_events(channel, |event| event.owner == number) {
            // Closing the channel may have destroyed it already.
            let _ = self.destroy(system, channel, child);
        }
        if let Some(port) = self.ids.remove(number).and_then(|id| id.port) {
            self.ports.release(system, port);
        }
        Ok(reported)
    }

    /// Binds an identifier to an address of this host or to the wildcard.
    ///
    /// # Errors
    /// EINVAL if it is bound already, EADDRNOTAVAIL for an address of another host, EADDRINUSE.
    pub fn bind(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        address: Address,
    ) -> Result<()> {
        if self.id(channel, number)?.state != State::Idle {
            return Err(EINVAL);
        }
        if !address.is_wildcard() && !is_local(system, address.ip) {
            return Err(Errno(libc::EADDRNOTAVAIL));
        }
        self.bind_port(system, number, address)?;
        self.id(channel, number)?.state = State::Bound;
        Ok(())
    }

    /// Resolves an address; an event reports the result.
    ///
    /// # Errors
    /// EINVAL in the wrong state or for different address families; errors of binding to `src`.
    pub fn resolve_addr(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        src: Option<Address>,
        mut dst: Address,
    ) -> Result<()> {
        let state = self.id(channel, number)?.state;
        if !matches!(state, State::Idle | State::Bound) {
            return Err(EINVAL);
        }
        if dst.is_wildcard() {
            dst.ip = match dst.ip {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            };
        }
        let given = src.filter(|src| !src.is_wildcard() || src.port != 0);
        if given.is_some_and(|src| src.ip.is_ipv4() != dst.ip.is_ipv4()) {
            return Err(EINVAL);
        }
        let Some(ip) = source_address(system, dst.ip) else {
            self.post_event(system, number, Event::new(event::ADDR_ERROR, failure(libc::EHOSTUNREACH)));
            return Ok(());
        };
        let from = Address { ip, port: 0, scope: dst.scope };
        if state == State::Idle {
            let mut wanted = given.unwrap_or(from);
            if wanted.is_wildcard() {
                wanted.ip = from.ip;
            } else if !is_local(system, wanted.ip) {
                return Err(Errno(libc::EADDRNOTAVAIL));
            }
            self.bind_port(system, number, wanted)?;
        }
        let id = self.id(channel, number)?;
        if let Some(src) = id.src.as_mut().filter(|src| src.is_wildcard()) {
            src.ip = from.ip;
        }
        id.dst = Some(dst);
        id.state = State::AddrResolved;
        self.post_event(system, number, Event::new(event::ADDR_RESOLVED, 0));
        Ok(())
    }

    /// Resolves the route; an event reports the result.
    ///
    /// # Errors
    /// EINVAL in the wrong state.
    pub fn resolve_route(&mut self, system: &mut dyn System, channel: ChannelId, number: u32) -> Result<()> {
        let id = self.id(channel, number)?;
        if id.state != State::AddrResolved {
            return Err(EINVAL);
        }
        id.state = State::RouteResolved;
        self.post_event(system, number, Event::new(event::ROUTE_RESOLVED, 0));
        Ok(())
    }

    /// Sets the type of service.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such identifier.
    pub fn set_tos(&mut self, channel: ChannelId, number: u32, tos: u8) -> Result<()> {
        self.id(channel, number)?.tos = tos;
        Ok(())
    }

    /// Sets address reuse: identifiers that all allow it may bind to one address.
    ///
    /// # Errors
    /// EINVAL after binding.
    pub fn set_reuse(&mut self, channel: ChannelId, number: u32, reuse: bool) -> Result<()> {
        let id = self.id(channel, number)?;
        if id.state != State::Idle && (!reuse || id.state == State::Listening) {
            return Err(EINVAL);
        }
        id.reuse = reuse;
        Ok(())
    }

    /// Sets IPV6_V6ONLY.
    ///
    /// # Errors
    /// EINVAL once an address is resolved or the identifier listens, or if the option would change the addresses to
    /// which it is bound.
    pub fn set_v6only(&mut self, channel: ChannelId, number: u32, only: bool) -> Result<()> {
        let id = self.id(channel, number)?;
        let is_ipv6_wildcard = |src: Address| src.is_wildcard() && src.ip.is_ipv6();
        let has_effect = id.src.is_some_and(is_ipv6_wildcard) && only != (id.v6only == Some(true));
        if !matches!(id.state, State::Idle | State::Bound) || has_effect {
            return Err(EINVAL);
        }
        id.v6only = Some(only);
        Ok(())
    }

    /// Sets the ACK timeout code.
    ///
    /// # Errors
    /// EINVAL for a code above 31 or a datagram identifier.
    pub fn set_ack_timeout(&mut self, channel: ChannelId, number: u32, code: u8) -> Result<()> {
        let id = self.id(channel, number)?;
        if code > 31 || id.is_datagram() {
            return Err(EINVAL);
        }
        id.ack_timeout = Some(code);
        Ok(())
    }
}

/// The local source address of packets to `dst`. Local destinations are their own source; multicast groups
/// are reached from any address, preferably not loopback. `None` if there is no route.
fn source_address(system: &mut dyn System, dst: IpAddr) -> Option<IpAddr> {
    if !dst.is_multicast() {
        return if is_local(system, dst) { Some(dst) } else { system.source_address(dst) };
    }
    let mut own = system.addresses();
    own.retain(|ip| ip.is_ipv4() == dst.is_ipv4());
    own.sort_by_key(IpAddr::is_loopback);
    own.first().copied()
}

/// Whether the address belongs to this host.
fn is_local(system: &mut dyn System, ip: IpAddr) -> bool {
    ip.is_loopback() || system.addresses().contains(&ip)
}
