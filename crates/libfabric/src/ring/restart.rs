//! Puts that are lost because their node was avoided for a moment, or because no path led there.
//!
//! ```text
//!   source:  a put was lost ─► hello, restart n ─► waits ───────────► puts the slots behind r again
//!   target:                     receives what has arrived ─► freed: r, for restart n
//! ```
//! Puts take effect in order, but one may be missing between others. The target takes a slot only by its number, so none out
//! of turn. It drops the counts of slots behind a missing one. Behind a restart nothing is put before its answer, so that
//! from there on the counter is that of the slots again. What had arrived is not put again: each message is received once.

use std::time::Instant;

use millstream_fabric::{Fabric, FabricError, Notification};
use millstream_torus_core::NodeNumber;

use super::{FREED_BITS, MARK, Peer, Rings, Word};

/// What a source does about lost puts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Recovery {
    /// No put since the last restart is known to be lost.
    #[default]
    None,
    /// Puts were lost; restarts from this time on, when the node is not lost.
    Due(Instant),
    /// Waits for the answer of its restart.
    Restarted,
}

/// The word of a restart: an endpoint and a number.
fn restart_of(inbox: u64, number: u16) -> u64 {
    inbox & !u64::from(u16::MAX) | u64::from(number)
}

impl Peer {
    /// All slots sent are put, and none is known to be lost.
    pub(super) fn is_sound(&self) -> bool {
        self.recovery == Recovery::None && self.posted == self.sent
    }
}

impl<F: Fabric> Rings<F> {
    /// Learns which puts were lost.
    pub fn look_for_lost_puts(&mut self) {
        for (number, peer) in self.peers.iter_mut().enumerate() {
            let ended = self.fabric.ended_region(NodeNumber(number as u16));
            // Otherwise it is the inbox of an earlier endpoint.
            if ended.is_some() && peer.inbox == ended && !peer.has_ended {
                (peer.has_ended, peer.ended) = (true, true);
            }
            let Some(lost) = self.fabric.lost_puts(NodeNumber(number as u16)) else { continue };
            if lost.count != std::mem::replace(&mut peer.lost_puts, lost.count) {
                peer.recovery = Recovery::Due(Instant::now() + self.pause);
                peer.unreachable = matches!(lost.cause, FabricError::NoRoute { .. });
            }
        }
    }

    /// Goes on with the recovery of what a node has lost. Returns whether there was anything to do.
    pub fn recover(&mut self, node: NodeNumber) -> bool {
        let Some(peer) = self.peers.get(node.index()) else { return false };
        match peer.recovery {
            Recovery::None => peer.posted < peer.sent && self.put_again(node),
            Recovery::Due(at) => Instant::now() >= at && !self.seems_lost(node) && self.restart(node),
            Recovery::Restarted => {
                let is_answered = self.load_word(Word::Freed, node) >> FREED_BITS == u64::from(peer.restart);
                is_answered && self.resume(node)
            }
        }
    }

    /// Tells a node again what may be lost, and asks what it has received.
    fn restart(&mut self, node: NodeNumber) -> bool {
        let freed = self.freed(node);
        let here = self.fabric.here();
        let (hello, restart) = (self.word(Word::Hello, here), self.word(Word::Restart, here));
        let peer = &mut self.peers[node.index()];
        peer.recovery = Recovery::None;
        // Perhaps it does not know what was freed.
        peer.returned = None;
        let Some(inbox) = peer.inbox.filter(|_| peer.is_open) else { return true };
        if freed.is_some() && peer.unfreed.is_empty() {
            (peer.posted, peer.unreachable) = (peer.sent, false);
            return true;
        }
        peer.restart = peer.restart.wrapping_add(1);
        peer.recovery = Recovery::Restarted;
        let number = restart_of(self.inbox.0, peer.restart).to_le_bytes();
        let mark = Notification::Counter { index: here.0, add: MARK };
        let put = (self.fabric.put(node, inbox, hello, &self.inbox.0.to_le_bytes(), Notification::None))
            .and_then(|()| self.fabric.put(node, inbox, restart, &number, mark));
        if put.is_err() {
            self.peers[node.index()].recovery = Recovery::Due(Instant::now() + self.pause);
        }
        true
    }

    /// A node has answered what it has received.
    fn resume(&mut self, node: NodeNumber) -> bool {
        self.freed(node);
        let peer = &mut self.peers[node.index()];
        (peer.recovery, peer.unreachable) = (Recovery::None, false);
        peer.posted = peer.sent - peer.unfreed.len() as u64;
        self.put_again(node);
        true
    }

    /// Puts slots again that were not received.
    fn put_again(&mut self, node: NodeNumber) -> bool {
        let mut has_put = false;
        while let Some(peer) = self.peers.get_mut(node.index())
            && let Some(inbox) = peer.inbox
            && let Some(at) = (peer.unfreed.len() as u64).checked_sub(peer.sent - peer.posted)
            && let Some(slot) = peer.unfreed.get_mut(at as usize).map(std::mem::take)
        {
            let number = peer.posted;
            let result = self.put_slot(node, inbox, number, &slot);
            let peer = &mut self.peers[node.index()];
            peer.unfreed[at as usize] = slot;
            if result.is_err() {
                break;
            }
            peer.posted = number + 1;
            has_put = true;
        }
        has_put
    }

    /// Answers a restart of the endpoint that fills the ring of a node.
    pub(super) fn answer_restart(&mut self, node: NodeNumber) {
        let word = self.load_word(Word::Restart, node);
        let peer = &mut self.peers[node.index()];
        let number = word as u16;
        if peer.answered != number && peer.source.is_some_and(|inbox| restart_of(inbox.0, number) == word) {
            (peer.answered, peer.returned) = (number, None);
        }
    }
}
