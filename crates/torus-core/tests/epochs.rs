//! Changes of routes between a supervisor and participants without packets: nodes that miss an epoch, or begin anew, return.

use millstream_torus_core::epoch::{Answer, Ballot, Coordinator, Effect, Order, Participant, Report};
use millstream_torus_core::{DeadSet, Dimensions, Epoch, NodeNumber};

struct World {
    torus: Dimensions,
    coordinator: Coordinator,
    participants: Vec<Participant>,
    /// Answers that are kept back.
    withheld: Vec<(NodeNumber, Answer)>,
    /// Plans had this node as returning.
    returned: Vec<NodeNumber>,
}

fn ballot(term: u64) -> Ballot {
    Ballot { term, supervisor: 0 }
}

fn dead(nodes: &[u16]) -> DeadSet {
    let mut dead = DeadSet::new();
    nodes.iter().for_each(|&node| dead.kill_node(NodeNumber(node)));
    dead
}

impl World {
    fn new() -> World {
        let torus: Dimensions = "2x2x1".parse().expect("valid");
        let mut world = World {
            torus,
            coordinator: Coordinator::take_over(torus, ballot(1), DeadSet::new()),
            participants: torus.all().map(Participant::new).collect(),
            withheld: Vec::new(),
            returned: Vec::new(),
        };
        world.settle(|_, _| false);
        assert!(world.coordinator.is_settled());
        world
    }

    /// Carries orders and answers until there are none, but keeps back those answers.
    fn settle(&mut self, withhold: impl Fn(NodeNumber, &Answer) -> bool) {
        for _ in 0..3 {
            while let Some((node, order)) = self.coordinator.poll() {
                for answer in self.handle_order(node, &order) {
                    if withhold(node, &answer) {
                        self.withheld.push((node, answer));
                    } else {
                        self.coordinator.handle_answer(node, &answer);
                    }
                }
            }
            self.coordinator.repeat();
        }
        while self.coordinator.poll().is_some() {}
    }

    fn handle_order(&mut self, node: NodeNumber, order: &Order) -> Vec<Answer> {
        let participant = &mut self.participants[node.index()];
        let mut answers = Vec::new();
        for effect in participant.handle_order(order) {
            match effect {
                Effect::Answer(answer) => answers.push(answer),
                Effect::Activate { plan, .. } => {
                    if plan.returning.contains(&node) {
                        self.returned.push(node);
                    }
                    answers.extend(participant.handle_drained());
                }
                _ => {}
            }
        }
        answers
    }

    fn deliver_withheld(&mut self) {
        for (node, answer) in std::mem::take(&mut self.withheld) {
            self.coordinator.handle_answer(node, &answer);
        }
        self.settle(|_, _| false);
    }

    #[track_caller]
    fn assert_settled(&self, epoch: u32, returned: &[u16]) {
        assert!(self.coordinator.is_settled(), "{:?}", self.coordinator);
        let epochs: Vec<_> = self.participants.iter().map(Participant::current).collect();
        assert_eq!(epochs, vec![Epoch(epoch); self.torus.nodes()]);
        assert_eq!(self.coordinator.current(), Epoch(epoch));
        assert!(self.participants.iter().all(Participant::has_joined));
        let mut found: Vec<_> = self.returned.iter().map(|node| node.0).collect();
        found.sort_unstable();
        assert_eq!(found, returned, "each once");
    }
}

fn drained_of(number: u16) -> impl Fn(NodeNumber, &Answer) -> bool {
    move |node, answer| node.0 == number && matches!(answer.report, Report::Drained { .. })
}

fn prepared_of(number: u16) -> impl Fn(NodeNumber, &Answer) -> bool {
    move |node, answer| node.0 == number && matches!(answer.report, Report::Prepared { .. })
}

/// It dies and returns while another node's answer to COMMIT is lost: no plan has it as dead.
#[test]
fn a_node_that_was_dead_during_a_commit_returns() {
    for restarted in [Participant::new as fn(NodeNumber) -> Participant, Participant::rejoining] {
        let mut world = World::new();
        world.coordinator.request(dead(&[1]));
        world.settle(drained_of(0));
        world.coordinator.request(dead(&[1, 3]));
        world.participants[3] = restarted(NodeNumber(3));
        world.coordinator.request(dead(&[1]));
        world.settle(drained_of(0));
        world.deliver_withheld();
        assert_eq!(world.participants[3].current(), world.coordinator.current());
        world.coordinator.request(DeadSet::new());
        world.participants[1] = restarted(NodeNumber(1));
        world.settle(|_, _| false);
        world.assert_settled(3, &[1, 3]);
    }
}

#[test]
fn a_node_that_was_dead_during_a_prepare_returns() {
    let mut world = World::new();
    world.coordinator.request(dead(&[1]));
    world.settle(prepared_of(0));
    world.coordinator.request(dead(&[1, 3]));
    world.settle(prepared_of(0));
    world.participants[3] = Participant::rejoining(NodeNumber(3));
    world.coordinator.request(DeadSet::new());
    world.participants[1] = Participant::rejoining(NodeNumber(1));
    world.settle(|_, _| false);
    world.assert_settled(1, &[1, 3]);
}

/// Its end is too short to be seen: the supervisor knows by its next connection, or not at all.
#[test]
fn a_node_that_is_started_again_at_once_returns() {
    let mut world = World::new();
    world.participants[3] = Participant::rejoining(NodeNumber(3));
    world.coordinator.handle_restart(NodeNumber(3));
    world.settle(|_, _| false);
    world.assert_settled(1, &[3]);
    // Not known: the node says so when the next order comes.
    world.participants[2] = Participant::rejoining(NodeNumber(2));
    world.coordinator.request(dead(&[1]));
    world.settle(|_, _| false);
    world.participants[1] = Participant::rejoining(NodeNumber(1));
    world.coordinator.request(DeadSet::new());
    world.settle(|_, _| false);
    world.assert_settled(3, &[1, 2, 3]);
}

/// It begins anew between PREPARE and COMMIT, or while no supervisor lives.
#[test]
fn a_node_that_was_started_again_unseen_returns_after_a_takeover() {
    let mut world = World::new();
    world.coordinator.request(dead(&[1]));
    world.settle(prepared_of(0));
    world.participants[3] = Participant::rejoining(NodeNumber(3));
    world.deliver_withheld();
    assert_eq!(world.participants[3].current(), world.coordinator.current());
    world.participants[2] = Participant::rejoining(NodeNumber(2));
    world.coordinator = Coordinator::take_over(world.torus, ballot(2), dead(&[1]));
    world.settle(|_, _| false);
    world.participants[1] = Participant::rejoining(NodeNumber(1));
    world.coordinator.request(DeadSet::new());
    world.settle(|_, _| false);
    world.assert_settled(4, &[1, 2, 3]);
}

/// A supervisor dies while a plan with a returning node is committed: its successor does not have the node return twice.
#[test]
fn a_takeover_does_not_repeat_a_return() {
    let mut world = World::new();
    world.coordinator.request(dead(&[3]));
    world.settle(|_, _| false);
    world.participants[3] = Participant::rejoining(NodeNumber(3));
    world.coordinator.request(DeadSet::new());
    // COMMIT reaches node 0 only.
    let prepared: Vec<_> = std::iter::from_fn(|| world.coordinator.poll()).collect();
    for (node, order) in prepared {
        for answer in world.handle_order(node, &order) {
            world.coordinator.handle_answer(node, &answer);
        }
    }
    let commits: Vec<_> = std::iter::from_fn(|| world.coordinator.poll()).collect();
    for (node, order) in commits.iter().filter(|(node, _)| node.0 == 0) {
        world.handle_order(*node, order);
    }
    assert_eq!(world.participants[0].current(), Epoch(2));
    world.coordinator = Coordinator::take_over(world.torus, ballot(2), DeadSet::new());
    world.settle(|_, _| false);
    world.assert_settled(2, &[3]);
}

/// A supervisor takes a node for dead for a moment and dies between PREPARE and COMMIT of its return. The node has no routes
/// any more. Its successor has never seen the node dead.
#[test]
fn a_return_that_only_a_lost_supervisor_knew_of_is_made_by_its_successor() {
    let mut world = World::new();
    world.coordinator.request(dead(&[3]));
    world.settle(prepared_of(0));
    world.coordinator.request(DeadSet::new());
    world.settle(prepared_of(0));
    assert_eq!(world.participants[3].prepared(), Some(Epoch(1)));
    world.coordinator = Coordinator::take_over(world.torus, ballot(2), DeadSet::new());
    world.settle(|_, _| false);
    world.assert_settled(1, &[3]);
}
