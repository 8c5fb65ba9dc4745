//! Queues of packets that enter the network here.

use std::collections::VecDeque;

use crate::header::Header;

/// Where packets enter the network at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Port {
    /// The node's applications and card.
    Local,
    /// Hosts outside of the torus. It is never a transit port.
    Seventh,
}

/// Number of [`Port`]s.
pub const INJECTION_PORTS: usize = 2;

impl Port {
    pub(super) const ALL: [Port; INJECTION_PORTS] = [Port::Local, Port::Seventh];

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// Packets of one port for one output and virtual channel.
#[derive(Clone, Debug)]
pub(super) struct InjectionQueue<T> {
    packets: VecDeque<(Header, T)>,
    limit: usize,
}

impl<T> InjectionQueue<T> {
    pub(super) fn new(limit: usize) -> InjectionQueue<T> {
        InjectionQueue { packets: VecDeque::new(), limit: limit.max(1) }
    }

    pub(super) fn push(&mut self, header: Header, packet: T) -> Result<(), T> {
        if self.packets.len() >= self.limit {
            return Err(packet);
        }
        self.packets.push_back((header, packet));
        Ok(())
    }

    pub(super) fn pop(&mut self) -> Option<(Header, T)> {
        self.packets.pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }
}
