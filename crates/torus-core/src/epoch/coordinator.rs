//! The acting supervisor's side of a change of routes.

use std::collections::{BTreeMap, BTreeSet};

use super::{Answer, Attempt, Ballot, Order, Plan, Report, Step};
use crate::Epoch;
use crate::faults::DeadSet;
use crate::topology::{Dimensions, NodeNumber};

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the states of these nodes. The others have the epochs and tries that they named.
    Querying { waiting: BTreeSet<NodeNumber>, heard: BTreeMap<NodeNumber, Heard> },
    /// All live nodes use the current epoch, and the previous one is drained.
    Idle,
    /// Waits for PREPARED of these nodes.
    Preparing { plan: Plan, waiting: BTreeSet<NodeNumber> },
    /// Waits for DRAINED of these nodes.
    Committing { waiting: BTreeSet<NodeNumber> },
}

/// A node's state, as it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heard {
    committed: (Epoch, Attempt),
    has_joined: bool,
}

/// Moves all live nodes from epoch to epoch. [`Coordinator::poll`] gives the orders to send; [`Coordinator::repeat`]
/// gives those again that have no answer.
///
/// A supervisor that takes over asks all live nodes first. If one of them has committed an epoch, all of them have
/// prepared it, so the new supervisor finishes that change before it begins another.
///
/// A node that was dead for a moment, or whose process was started again, has missed an epoch or forgotten its pairs. It
/// takes part again only by an epoch whose plan has it as returning, also if that plan is the only change.
#[derive(Clone, Debug)]
pub struct Coordinator {
    torus: Dimensions,
    ballot: Ballot,
    tries: u32,
    current: Epoch,
    committed: (Attempt, Plan),
    wanted: DeadSet,
    /// Nodes that were dead, or began anew, since a plan had them as returning.
    fallen: BTreeSet<NodeNumber>,
    state: State,
    outgoing: Vec<(NodeNumber, Order)>,
}

impl Coordinator {
    /// A supervisor that takes over with a higher ballot than all before. `dead` is what it knows to be dead.
    #[must_use]
    pub fn take_over(torus: Dimensions, ballot: Ballot, dead: DeadSet) -> Coordinator {
        let waiting = live(&torus, &dead);
        let mut coordinator = Coordinator {
            torus,
            ballot,
            tries: 0,
            current: Epoch(0),
            committed: Default::default(),
            fallen: dead.nodes().collect(),
            wanted: dead,
            state: State::Querying { waiting, heard: BTreeMap::new() },
            outgoing: Vec::new(),
        };
        coordinator.repeat();
        coordinator
    }

    /// The supervisor's term.
    #[must_use]
    pub fn ballot(&self) -> Ballot {
        self.ballot
    }

    /// The committed epoch.
    #[must_use]
    pub fn current(&self) -> Epoch {
        self.current
    }

    /// Whether all live nodes have the wanted routes and nothing is under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.state == State::Idle && !self.wants_change()
    }

    fn wants_change(&self) -> bool {
        let plan = self.plan();
        plan.dead != self.committed.1.dead || !plan.returning.is_empty()
    }

    /// What the next epoch should be.
    fn plan(&self) -> Plan {
        let dead = self.wanted.clone();
        let returning = self.fallen.iter().copied().filter(|&node| dead.node_lives(node)).collect();
        Plan { dead, returning }
    }

    /// Nodes whose answers are missing.
    pub fn waiting(&self) -> impl Iterator<Item = NodeNumber> + '_ {
        let waiting = match &self.state {
            State::Idle => None,
            State::Querying { waiting, .. }
            | State::Preparing { waiting, .. }
            | State::Committing { waiting } => Some(waiting),
        };
        waiting.into_iter().flatten().copied()
    }

    /// The dead set that routes should avoid.
    pub fn request(&mut self, dead: DeadSet) {
        self.fallen.extend(dead.nodes());
        self.wanted = dead;
        self.follow_plan();
    }

    /// The process of a node was started again.
    pub fn handle_restart(&mut self, node: NodeNumber) {
        if self.torus.contains(node) {
            self.fallen.insert(node);
            self.follow_plan();
        }
    }

    /// Another set of nodes is dead, or has fallen.
    fn follow_plan(&mut self) {
        let wanted = self.plan();
        match &mut self.state {
            State::Preparing { plan, .. } if *plan != wanted => self.prepare(),
            // The dead have nothing to answer.
            State::Querying { waiting, .. } => waiting.retain(|&node| wanted.dead.node_lives(node)),
            // Nor can the fallen activate this epoch: their way is the next one.
            State::Committing { waiting } => waiting.retain(|node| !self.fallen.contains(node)),
            _ => {}
        }
        self.advance();
    }

    /// A node answered.
    pub fn handle_answer(&mut self, from: NodeNumber, answer: &Answer) {
        if answer.ballot != self.ballot {
            return;
        }
        match (&mut self.state, &answer.report) {
            (State::Querying { waiting, heard }, Report::Committed { epoch, attempt, plan, has_joined }) => {
                waiting.remove(&from);
                heard.insert(from, Heard { committed: (*epoch, *attempt), has_joined: *has_joined });
                if (*epoch, *attempt) >= (self.current, self.committed.0) {
                    self.current = *epoch;
                    self.committed = (*attempt, plan.clone());
                }
            }
            (State::Preparing { waiting, .. }, Report::Behind { epoch, attempt })
                if *epoch == self.current.next()
                    && *attempt == (Attempt { ballot: self.ballot, number: self.tries })
                    && waiting.contains(&from) =>
            {
                self.handle_restart(from);
            }
            (State::Committing { waiting }, Report::Behind { epoch, attempt })
                if (*epoch, *attempt) == (self.current, self.committed.0) && waiting.contains(&from) =>
            {
                self.handle_restart(from);
            }
            (State::Preparing { waiting, .. }, Report::Prepared { epoch, attempt })
                if *epoch == self.current.next()
                    && *attempt == (Attempt { ballot: self.ballot, number: self.tries }) =>
            {
                waiting.remove(&from);
            }
            (State::Committing { waiting }, Report::Drained { epoch }) if epoch.next() == self.current => {
                waiting.remove(&from);
            }
            _ => {}
        }
        self.advance();
    }

    /// The next order.
    pub fn poll(&mut self) -> Option<(NodeNumber, Order)> {
        self.outgoing.pop()
    }

    /// Sends all orders again that have no answer.
    pub fn repeat(&mut self) {
        let (waiting, step) = match &self.state {
            State::Idle => return,
            State::Querying { waiting, .. } => (waiting, Step::Query),
            State::Preparing { plan, waiting } => {
                let attempt = Attempt { ballot: self.ballot, number: self.tries };
                (waiting, Step::Prepare { epoch: self.current.next(), attempt, plan: plan.clone() })
            }
            State::Committing { waiting } => {
                (waiting, Step::Commit { epoch: self.current, attempt: self.committed.0 })
            }
        };
        let order = Order { ballot: self.ballot, step };
        self.outgoing = waiting.iter().map(|&node| (node, order.clone())).collect();
    }

    fn prepare(&mut self) {
        self.tries += 1;
        let plan = self.plan();
        let waiting = live(&self.torus, &plan.dead);
        self.state = State::Preparing { plan, waiting };
        self.repeat();
    }

    fn advance(&mut self) {
        match &self.state {
            State::Querying { waiting, heard } if waiting.is_empty() => {
                let (current, committed) = (self.current, &self.committed);
                let is_returning = |node| committed.1.returning.contains(node);
                // One that the committed plan has as returning may have prepared that, as may one that is an epoch behind.
                // One that has committed that plan and takes part no more has prepared a later return.
                let fallen = heard.iter().filter(|&(node, heard)| {
                    let (epoch, attempt) = heard.committed;
                    if epoch == current {
                        return attempt != committed.0 || !heard.has_joined;
                    }
                    (epoch.next() < current || !heard.has_joined) && !is_returning(node)
                });
                self.fallen.extend(fallen.map(|(&node, _)| node).chain(committed.1.dead.nodes()));
                self.commit_again();
            }
            State::Idle if self.wants_change() => {
                self.prepare();
                // Without a live node nobody answers.
                self.advance();
            }
            State::Preparing { plan, waiting } if waiting.is_empty() => {
                self.fallen.retain(|node| !plan.returning.contains(node));
                self.committed = (Attempt { ballot: self.ballot, number: self.tries }, plan.clone());
                self.current = self.current.next();
                self.commit_again();
            }
            State::Committing { waiting } if waiting.is_empty() => {
                self.state = State::Idle;
                self.advance();
            }
            _ => {}
        }
    }

    fn commit_again(&mut self) {
        // The dead are among the fallen.
        let nodes = self.torus.all().filter(|node| !self.fallen.contains(node));
        self.state = State::Committing { waiting: nodes.collect() };
        self.repeat();
        self.advance();
    }
}

fn live(torus: &Dimensions, dead: &DeadSet) -> BTreeSet<NodeNumber> {
    torus.all().filter(|&node| dead.node_lives(node)).collect()
}
