//! Queues of packets that enter the network here.

use std::collections::VecDeque;

use crate::header::Header;

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
