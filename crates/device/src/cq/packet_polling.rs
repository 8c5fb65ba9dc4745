//! Receiving packets while the application polls.

use std::sync::Arc;

use super::Cq;

/// While it exists, an application that polls one of the queues also receives packets.
#[derive(Debug)]
pub(crate) struct PacketPolling(Vec<Arc<Cq>>);

impl PacketPolling {
    pub(crate) fn new(queues: Vec<Arc<Cq>>) -> Self {
        queues.iter().for_each(|cq| cq.poll_network(true));
        Self(queues)
    }
}

impl Drop for PacketPolling {
    fn drop(&mut self) {
        self.0.iter().for_each(|cq| cq.poll_network(false));
    }
}
