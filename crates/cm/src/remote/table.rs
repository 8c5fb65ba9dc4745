//! The connections to other hosts, found by any of their numbers in constant time, and their timers.
//!
//! Other hosts decide how many requests arrive and are refused. So the closed connections, which only answer duplicates, are
//! bounded.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use super::connection::{CmConnection, REPLY_TO_DUPLICATES};
use crate::system::LinkId;

/// Most closed connections that answer duplicates. More make the oldest one forgotten.
pub(super) const MAX_CLOSED: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct ConnectionTable {
    by_link: HashMap<LinkId, CmConnection>,
    /// Connections that another host has requested, by its address and its communication ID.
    by_request: HashMap<(IpAddr, u32), LinkId>,
    by_local_id: HashMap<u32, LinkId>,
    /// Closed connections, the oldest first.
    closed: VecDeque<LinkId>,
    /// Times of the next retransmissions.
    timers: BTreeSet<(Instant, LinkId)>,
    timer_of: HashMap<LinkId, Instant>,
}

impl ConnectionTable {
    pub(super) fn contains(&self, link: LinkId) -> bool {
        self.by_link.contains_key(&link)
    }

    /// Adds a connection that this host requests.
    pub(super) fn insert(&mut self, link: LinkId, connection: CmConnection) {
        self.by_local_id.insert(connection.local_id, link);
        self.by_link.insert(link, connection);
    }

    /// Adds a connection that another host has requested.
    pub(super) fn insert_requested(&mut self, link: LinkId, connection: CmConnection) {
        self.by_request.insert((connection.peer, connection.remote_id), link);
        self.insert(link, connection);
    }

    /// Changes a connection. None if there is none.
    pub(super) fn with<R>(&mut self, link: LinkId, change: impl FnOnce(&mut CmConnection) -> R) -> Option<R> {
        let result = change(self.by_link.get_mut(&link)?);
        self.set_timer(link);
        Some(result)
    }

    /// The connection that `peer` has requested with this communication ID.
    pub(super) fn requested(&self, peer: IpAddr, remote_id: u32) -> Option<&CmConnection> {
        self.by_link.get(&self.link_of_request(peer, remote_id)?)
    }

    /// The link of a request of `peer` with its communication ID.
    pub(super) fn link_of_request(&self, peer: IpAddr, remote_id: u32) -> Option<LinkId> {
        self.by_request.get(&(peer, remote_id)).copied()
    }

    /// The link to `peer` with this local communication ID.
    pub(super) fn link_of(&self, peer: IpAddr, local_id: u32) -> Option<LinkId> {
        let link = *self.by_local_id.get(&local_id)?;
        (self.by_link.get(&link)?.peer == peer).then_some(link)
    }

    /// Whether a connection has this local communication ID.
    pub(super) fn has_local_id(&self, local_id: u32) -> bool {
        self.by_local_id.contains_key(&local_id)
    }

    /// Closes a connection, which answers duplicates for a while.
    pub(super) fn close(&mut self, link: LinkId, now: Instant) {
        let Some(connection) = self.by_link.get_mut(&link) else { return };
        if connection.forget_at.replace(now + REPLY_TO_DUPLICATES).is_none() {
            self.closed.push_back(link);
        }
        if self.closed.len() > MAX_CLOSED
            && let Some(oldest) = self.closed.pop_front()
        {
            self.remove(oldest);
        }
    }

    /// Removes the closed connections whose time is over.
    pub(super) fn forget(&mut self, now: Instant) {
        while let Some(oldest) = self.closed.front().copied()
            && self.forget_at(oldest).is_none_or(|forget_at| forget_at <= now)
        {
            self.closed.pop_front();
            self.remove(oldest);
        }
    }

    /// The links whose retransmission is due.
    pub(super) fn due(&self, now: Instant) -> Vec<LinkId> {
        self.timers.iter().take_while(|(again, _)| *again <= now).map(|(_, link)| *link).collect()
    }

    /// The time of the next retransmission, or at which a closed connection is forgotten.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let again = self.timers.first().map(|(again, _)| *again);
        let forget = self.closed.front().and_then(|oldest| self.forget_at(*oldest));
        [again, forget].into_iter().flatten().min()
    }

    /// Whether a message waits for its reply.
    pub(super) fn has_unanswered(&self) -> bool {
        !self.timers.is_empty()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&LinkId, &CmConnection)> {
        self.by_link.iter()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_link.len()
    }

    fn forget_at(&self, link: LinkId) -> Option<Instant> {
        self.by_link.get(&link)?.forget_at
    }

    fn set_timer(&mut self, link: LinkId) {
        let wanted = self.by_link.get(&link).and_then(|c| c.pending.as_ref()).map(|pending| pending.again);
        let known = self.timer_of.get(&link).copied();
        if wanted == known {
            return;
        }
        if let Some(known) = known {
            self.timers.remove(&(known, link));
            self.timer_of.remove(&link);
        }
        if let Some(wanted) = wanted {
            self.timers.insert((wanted, link));
            self.timer_of.insert(link, wanted);
        }
    }

    fn remove(&mut self, link: LinkId) {
        let Some(connection) = self.by_link.remove(&link) else { return };
        self.set_timer(link);
        let request = (connection.peer, connection.remote_id);
        if self.by_request.get(&request) == Some(&link) {
            self.by_request.remove(&request);
        }
        if self.by_local_id.get(&connection.local_id) == Some(&link) {
            self.by_local_id.remove(&connection.local_id);
        }
    }
}
