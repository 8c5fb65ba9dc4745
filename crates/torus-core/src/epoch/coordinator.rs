//! The acting supervisor's side of a change of routes.

use std::collections::BTreeSet;

use super::{Answer, Attempt, Ballot, Order, Plan, Report, Step};
use crate::Epoch;
use crate::faults::DeadSet;
use crate::topology::{Dimensions, NodeNumber};

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the states of these nodes.
    Querying { waiting: BTreeSet<NodeNumber> },
    /// All live nodes use the current epoch, and the previous one is drained.
    Idle,
    /// Waits for PREPARED of these nodes.
    Preparing { plan: Plan, waiting: BTreeSet<NodeNumber> },
    /// Waits for DRAINED of these nodes.
    Committing { waiting: BTreeSet<NodeNumber> },
}

/// Moves all live nodes from epoch to epoch. [`Coordinator::poll`] gives the orders to send; [`Coordinator::repeat`]
/// gives those again that have no answer.
///
/// A supervisor that takes over asks all live nodes first. If one of them has committed an epoch, all of them have
/// prepared it, so the new supervisor finishes that change before it begins another.
#[derive(Clone, Debug)]
pub struct Coordinator {
    torus: Dimensions,
    ballot: Ballot,
    tries: u32,
    current: Epoch,
    committed: (Attempt, Plan),
    wanted: DeadSet,
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
            wanted: dead,
            state: State::Querying { waiting },
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
        self.state == State::Idle && self.wanted == self.committed.1.dead
    }

    /// The dead set that routes should avoid.
    pub fn request(&mut self, dead: DeadSet) {
        self.wanted = dead;
        let wanted = &self.wanted;
        match &mut self.state {
            State::Preparing { plan, .. } if plan.dead != *wanted => self.prepare(),
            // The dead have nothing to answer.
            State::Committing { waiting } | State::Querying { waiting } => {
                waiting.retain(|&node| wanted.node_lives(node));
            }
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
            (State::Querying { waiting }, Report::Committed { epoch, attempt, plan }) => {
                waiting.remove(&from);
                if *epoch >= self.current {
                    self.current = *epoch;
                    self.committed = (*attempt, plan.clone());
                }
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
            State::Querying { waiting } => (waiting, Step::Query),
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
        let dead = self.wanted.clone();
        let returning = self.committed.1.dead.nodes().filter(|&node| dead.node_lives(node)).collect();
        let waiting = live(&self.torus, &dead);
        self.state = State::Preparing { plan: Plan { dead, returning }, waiting };
        self.repeat();
    }

    fn advance(&mut self) {
        match &self.state {
            State::Querying { waiting } if waiting.is_empty() => self.commit_again(),
            State::Idle if self.wanted != self.committed.1.dead => {
                self.prepare();
                // Without a live node nobody answers.
                self.advance();
            }
            State::Preparing { plan, waiting } if waiting.is_empty() => {
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
        let dead = &self.committed.1.dead;
        let nodes = self.torus.all().filter(|&node| dead.node_lives(node) && self.wanted.node_lives(node));
        self.state = State::Committing { waiting: nodes.collect() };
        self.repeat();
        self.advance();
    }
}

fn live(torus: &Dimensions, dead: &DeadSet) -> BTreeSet<NodeNumber> {
    torus.all().filter(|&node| dead.node_lives(node)).collect()
}
