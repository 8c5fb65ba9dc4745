//! All pairs whose source is this node: their routes, and how they move from epoch to epoch.
//!
//! A pair moves when nothing of it is on its way, or at once if its route crosses something dead. Then its generation
//! grows, and it repeats from the first unacknowledged packet.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use millstream_quantity::Instant;

use crate::Epoch;
use crate::faults::DeadSet;
use crate::pair::{Generation, PairSender, Sequence};
use crate::route::{NodeTable, Route, choose, dimension_order};
use crate::topology::{Dimensions, NodeNumber};

/// Why a node cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
    /// The node is dead.
    #[error("{node} is lost")]
    NodeLost {
        /// The node.
        node: NodeNumber,
    },
    /// The node may live, but no live path leads there.
    #[error("no live path leads to {node}")]
    NoRoute {
        /// The node.
        node: NodeNumber,
    },
}

/// A packet to inject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing<T> {
    /// The target.
    pub target: NodeNumber,
    /// The pair's generation.
    pub generation: Generation,
    /// The packet's place.
    pub sequence: Sequence,
    /// The epoch of its route.
    pub epoch: Epoch,
    /// The route.
    pub route: Route,
    /// The packet.
    pub packet: T,
}

#[derive(Clone, Debug)]
struct Pair<T> {
    sender: PairSender<T>,
    /// `NoRoute`: packets wait until a path exists again, because the target may have executed some of them.
    route: Result<Route, Unreachable>,
    epoch: Epoch,
    progress: Instant,
}

/// The pairs of one source.
#[derive(Clone, Debug)]
pub struct Sources<T> {
    torus: Dimensions,
    here: NodeNumber,
    window: usize,
    /// Time without progress after which a pair repeats its packets.
    timeout: Duration,
    epoch: Epoch,
    dead: DeadSet,
    table: NodeTable,
    pairs: BTreeMap<NodeNumber, Pair<T>>,
    /// The target after which [`Sources::poll`] continues.
    last: Option<NodeNumber>,
    lost: Vec<(Unreachable, T)>,
}

impl<T: Clone> Sources<T> {
    /// Pairs with at most `window` packets on their way each, which repeat after `timeout` without progress.
    #[must_use]
    pub fn new(
        torus: Dimensions,
        here: NodeNumber,
        table: NodeTable,
        window: usize,
        timeout: Duration,
    ) -> Sources<T> {
        Sources {
            torus,
            here,
            window,
            timeout,
            epoch: Epoch(0),
            dead: DeadSet::new(),
            table,
            pairs: BTreeMap::new(),
            last: None,
            lost: Vec::new(),
        }
    }

    /// The route to a node in the current epoch.
    ///
    /// # Errors
    /// [`Unreachable`] if the node is dead or no live path leads there.
    pub fn route(&self, target: NodeNumber) -> Result<Route, Unreachable> {
        if !self.torus.contains(target) || !self.dead.node_lives(target) {
            return Err(Unreachable::NodeLost { node: target });
        }
        choose(&self.torus, &self.dead, self.here, target, || self.table.hops(target))
            .ok_or(Unreachable::NoRoute { node: target })
    }

    /// The current epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Packets of a pair that are not acknowledged.
    #[must_use]
    pub fn pending(&self, target: NodeNumber) -> usize {
        self.pairs.get(&target).map_or(0, |pair| pair.sender.pending())
    }

    /// Appends a packet to a pair.
    ///
    /// # Errors
    /// [`Unreachable`] if the current epoch has no route.
    pub fn push(&mut self, target: NodeNumber, packet: T, now: Instant) -> Result<(), Unreachable> {
        if !self.pairs.contains_key(&target) {
            let route = Ok(self.route(target)?);
            let sender = PairSender::new(self.window);
            self.pairs.insert(target, Pair { sender, route, epoch: self.epoch, progress: now });
        }
        if let Some(pair) = self.pairs.get_mut(&target) {
            pair.route?;
            if !pair.sender.in_flight() {
                pair.progress = now;
            }
            pair.sender.push(packet);
        }
        Ok(())
    }

    /// The next packet to inject, by turns of the pairs.
    pub fn poll(&mut self) -> Option<Outgoing<T>> {
        let epoch = self.epoch;
        let (behind, before) = match self.last {
            Some(last) => {
                ((Bound::Excluded(last), Bound::Unbounded), (Bound::Unbounded, Bound::Included(last)))
            }
            None => {
                ((Bound::Unbounded, Bound::Unbounded), (Bound::Unbounded, Bound::Excluded(NodeNumber(0))))
            }
        };
        for range in [behind, before] {
            for (&target, pair) in self.pairs.range_mut(range) {
                if pair.epoch != epoch {
                    continue;
                }
                let Ok(route) = pair.route else { continue };
                let Some((generation, sequence, packet)) = pair.sender.poll() else { continue };
                let packet = packet.clone();
                self.last = Some(target);
                return Some(Outgoing { target, generation, sequence, epoch, route, packet });
            }
        }
        None
    }

    /// An acknowledgement from a target. Returns the packets that it covers.
    pub fn handle_acknowledgement(
        &mut self,
        target: NodeNumber,
        generation: Generation,
        next: Sequence,
        now: Instant,
    ) -> Vec<T> {
        let Some(pair) = self.pairs.get_mut(&target) else { return Vec::new() };
        let done: Vec<T> = pair.sender.handle_acknowledgement(generation, next).collect();
        if !done.is_empty() {
            pair.progress = now;
        }
        self.move_pair(target, false, now);
        done
    }

    /// Uses another epoch. Pairs with nodes in `returning` begin anew.
    pub fn activate(
        &mut self,
        epoch: Epoch,
        dead: DeadSet,
        returning: impl IntoIterator<Item = NodeNumber>,
        table: NodeTable,
        now: Instant,
    ) {
        self.epoch = epoch;
        self.dead = dead;
        self.table = table;
        for node in returning {
            if node == self.here {
                for (node, mut pair) in std::mem::take(&mut self.pairs) {
                    let lost = Unreachable::NodeLost { node };
                    self.lost.extend(pair.sender.abandon().map(|packet| (lost, packet)));
                }
            } else if let Some(mut pair) = self.pairs.remove(&node) {
                let lost = Unreachable::NodeLost { node };
                self.lost.extend(pair.sender.abandon().map(|packet| (lost, packet)));
            }
        }
        let targets: Vec<_> = self.pairs.keys().copied().collect();
        for target in targets {
            self.move_pair(target, false, now);
        }
    }

    /// Moves a pair of an earlier epoch to the current one if it may.
    fn move_pair(&mut self, target: NodeNumber, force: bool, now: Instant) {
        if self.pairs.get(&target).is_none_or(|pair| pair.epoch == self.epoch) {
            return;
        }
        let route = self.route(target);
        let Some(pair) = self.pairs.get_mut(&target) else { return };
        if let Err(lost @ Unreachable::NodeLost { .. }) = route {
            // The node begins anew when it returns.
            self.lost.extend(pair.sender.abandon().map(|packet| (lost, packet)));
            self.pairs.remove(&target);
            return;
        }
        let old_route_lives = match pair.route {
            Ok(Route::DimensionOrder { signs, .. }) => {
                dimension_order::is_live(&self.torus, &self.dead, self.here, target, signs)
            }
            // The table of its epoch is gone, so the pair repeats its packets.
            Ok(Route::UpDown { .. }) | Err(_) => false,
        };
        if force || !pair.sender.in_flight() || !old_route_lives {
            pair.sender.restart();
            (pair.route, pair.epoch, pair.progress) = (route, self.epoch, now);
        }
    }

    /// Gives up the old routes of all pairs.
    pub fn give_up_old_routes(&mut self, now: Instant) {
        let targets: Vec<_> = self.pairs.keys().copied().collect();
        for target in targets {
            self.move_pair(target, true, now);
        }
    }

    /// Whether no pair has packets of an earlier epoch on their way.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.pairs.values().all(|pair| pair.epoch == self.epoch || !pair.sender.in_flight())
    }

    /// When [`Sources::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        (self.pairs.values().filter(|pair| pair.sender.in_flight()))
            .map(|pair| pair.progress + self.timeout)
            .min()
    }

    /// Repeats the packets of pairs without progress, on the current epoch's route.
    pub fn handle_timeout(&mut self, now: Instant) {
        let late: Vec<_> = (self.pairs.iter())
            .filter(|(_, pair)| pair.sender.in_flight() && pair.progress + self.timeout <= now)
            .map(|(&target, _)| target)
            .collect();
        for target in late {
            self.move_pair(target, true, now);
            if let Some(pair) = self.pairs.get_mut(&target).filter(|pair| pair.sender.in_flight()) {
                pair.sender.restart();
                pair.progress = now;
            }
        }
    }

    /// The next packet whose target cannot be reached.
    pub fn poll_lost(&mut self) -> Option<(Unreachable, T)> {
        self.lost.pop()
    }

    /// Whether every packet is acknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.pairs.values().all(|pair| pair.sender.is_idle())
    }

    /// Packets sent again, and acknowledgements of packets that were never sent.
    #[must_use]
    pub fn repeated_and_foreign(&self) -> (u64, u64) {
        (self.pairs.values()).fold((0, 0), |(repeated, foreign), pair| {
            (repeated + pair.sender.repeated(), foreign + pair.sender.foreign_acknowledgements())
        })
    }
}
