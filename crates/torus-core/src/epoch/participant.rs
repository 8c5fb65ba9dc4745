//! The node's side of a change of routes.

use super::{Answer, Attempt, Ballot, Order, Plan, Report, Step};
use crate::Epoch;
use crate::topology::NodeNumber;

/// What the node does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Compute and install the tables of an epoch beside those of the current one.
    Install {
        /// The epoch.
        epoch: Epoch,
        /// What its routes avoid.
        plan: Plan,
    },
    /// Give up packets of this epoch and drop them wherever they are.
    Retire {
        /// The epoch.
        epoch: Epoch,
    },
    /// Use the epoch for all pairs from here on.
    Activate {
        /// The epoch.
        epoch: Epoch,
        /// What its routes avoid.
        plan: Plan,
    },
    /// Answer the supervisor.
    Answer(Answer),
}

/// One node's epochs.
#[derive(Clone, Debug)]
pub struct Participant {
    here: NodeNumber,
    promised: Ballot,
    current: Epoch,
    committed: (Attempt, Plan),
    /// No packet of the previous epoch is on its way.
    drained: bool,
    has_joined: bool,
    prepared: Option<(Epoch, Attempt, Plan)>,
}

impl Participant {
    /// A node that uses the first epoch, in which nothing is dead.
    #[must_use]
    pub fn new(here: NodeNumber) -> Participant {
        Participant {
            here,
            promised: Ballot::default(),
            current: Epoch(0),
            committed: (Attempt::default(), Plan::default()),
            drained: true,
            has_joined: true,
            prepared: None,
        }
    }

    /// A node whose earlier process took part: it does so again with an epoch that has it as returning.
    #[must_use]
    pub fn rejoining(here: NodeNumber) -> Participant {
        Participant { has_joined: false, ..Participant::new(here) }
    }

    /// Whether the node takes part.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        self.has_joined
    }

    /// The epoch of new packets.
    #[must_use]
    pub fn current(&self) -> Epoch {
        self.current
    }

    /// The epoch that is prepared but not committed.
    #[must_use]
    pub fn prepared(&self) -> Option<Epoch> {
        self.prepared.as_ref().map(|&(epoch, ..)| epoch)
    }

    /// Whether a pair begins anew with this epoch, which is prepared here but not committed: one of its nodes returns with it.
    #[must_use]
    pub fn awaits_return(&self, epoch: Epoch, source: NodeNumber) -> bool {
        self.prepared.as_ref().is_some_and(|(prepared, _, plan)| {
            *prepared == epoch && [source, self.here].iter().any(|node| plan.returning.contains(node))
        })
    }

    /// An order arrived. Returns what to do, in this order.
    pub fn handle_order(&mut self, order: &Order) -> Vec<Effect> {
        if order.ballot < self.promised {
            // The answer names the ballot that a supervisor needs to exceed.
            return vec![self.state()];
        }
        self.promised = order.ballot;
        match &order.step {
            Step::Query => vec![self.state()],
            Step::Prepare { epoch, attempt, plan } => self.prepare(*epoch, *attempt, plan),
            Step::Commit { epoch, attempt } => self.commit(*epoch, *attempt),
        }
    }

    fn prepare(&mut self, epoch: Epoch, attempt: Attempt, plan: &Plan) -> Vec<Effect> {
        let next = epoch == self.current.next() && self.has_joined;
        // Also one that has committed another try of this epoch, while a supervisor took it for dead.
        let returns =
            (epoch, attempt) > (self.current, self.committed.0) && plan.returning.contains(&self.here);
        if !next && !returns {
            let follows = epoch <= self.current && self.has_joined;
            return vec![if follows { self.state() } else { self.answer(Report::Behind { epoch, attempt }) }];
        }
        let ready = self.answer(Report::Prepared { epoch, attempt });
        match self.prepared.as_ref().map(|&(epoch, attempt, _)| (epoch, attempt)) {
            Some(known) if known > (epoch, attempt) => return Vec::new(),
            Some(known) if known == (epoch, attempt) => return vec![ready],
            _ => {}
        }
        let mut effects = Vec::new();
        if self.current > Epoch(0) {
            effects.push(Effect::Retire { epoch: previous(self.current) });
        }
        if returns {
            effects.push(Effect::Retire { epoch: self.current });
            // Without routes it takes part no more, also if a supervisor that has never seen it dead takes over.
            self.has_joined = false;
        }
        self.drained = true;
        self.prepared = Some((epoch, attempt, plan.clone()));
        effects.push(Effect::Install { epoch, plan: plan.clone() });
        effects.push(ready);
        effects
    }

    fn commit(&mut self, epoch: Epoch, attempt: Attempt) -> Vec<Effect> {
        match self.prepared.take() {
            Some((prepared, tried, plan)) if (prepared, tried) == (epoch, attempt) => {
                self.current = epoch;
                self.has_joined = true;
                self.committed = (attempt, plan.clone());
                self.drained = false;
                vec![Effect::Activate { epoch, plan }]
            }
            other => {
                self.prepared = other;
                if epoch > self.current || !self.has_joined {
                    return vec![self.answer(Report::Behind { epoch, attempt })];
                }
                if epoch < self.current {
                    return vec![self.state()];
                }
                // A repeated order. If the previous epoch is not drained yet, the answer shows that the node lives.
                let report = Report::Drained { epoch: previous(epoch) };
                vec![if self.drained { self.answer(report) } else { self.state() }]
            }
        }
    }

    /// The node has no packet of an earlier epoch on its way. Returns the answer for the supervisor, once.
    pub fn handle_drained(&mut self) -> Option<Answer> {
        let report = Report::Drained { epoch: previous(self.current) };
        let first = !std::mem::replace(&mut self.drained, true);
        first.then_some(Answer { ballot: self.promised, report })
    }

    fn answer(&self, report: Report) -> Effect {
        Effect::Answer(Answer { ballot: self.promised, report })
    }

    fn state(&self) -> Effect {
        let (attempt, plan) = self.committed.clone();
        self.answer(Report::Committed { epoch: self.current, attempt, plan, has_joined: self.has_joined })
    }
}

fn previous(epoch: Epoch) -> Epoch {
    Epoch(epoch.0.wrapping_sub(1))
}
