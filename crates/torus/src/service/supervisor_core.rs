//! A supervisor as a machine: reports in, orders and states out; time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millstream_health::registers::LinkState;
use millstream_health::verdict::Path;
use millstream_health::{HostReport, NodeState, Reports, Timers};
use millstream_quantity::Instant;
use millstream_torus_core::epoch::{Answer, Ballot, Coordinator, Order};
use millstream_torus_core::{DeadSet, Dimensions, Direction, NodeNumber};

use super::message::{Change, LostNodes, NodeRow, TorusState};

/// Time for all nodes to report before a missing one counts.
const START: Duration = Duration::from_secs(10);
/// The same in periods of reports, for a host monitor whose node process is there: each process had the time to connect again.
const MONITOR_PERIODS: u32 = 10;
/// Interval in which orders without an answer are sent again.
const REPEAT: Duration = Duration::from_millis(200);
/// A node that answers no order for so many periods of reports is avoided, so that the others' routes can change.
const ANSWER_PERIODS: u32 = 50;
/// The same for a node that has not connected yet: nodes wait as long for each other at the start.
const CONNECTION: Duration = Duration::from_secs(60);
/// A node that could come back but for some of its links does so without them after so many periods of reports: its
/// process and its neighbours had the time to connect them.
const LINK_PERIODS: u32 = 100;
const CHANGES: usize = 256;

/// Decides about all nodes.
#[derive(Debug)]
pub struct SupervisorCore {
    torus: Dimensions,
    index: u16,
    timers: Timers,
    reports: Reports,
    /// When nodes reported last.
    reported: BTreeMap<NodeNumber, Instant>,
    applications: BTreeMap<NodeNumber, bool>,
    /// Of the node processes that have connected last.
    incarnations: BTreeMap<NodeNumber, u64>,
    states: Vec<NodeState>,
    /// Since when answers of nodes are missing.
    unanswered: BTreeMap<NodeNumber, Instant>,
    /// Nodes that answer no order.
    silent: BTreeSet<NodeNumber>,
    /// Since when nodes wait for links only to come back.
    unconnected: BTreeMap<NodeNumber, Instant>,
    dead: DeadSet,
    coordinator: Option<Coordinator>,
    /// Highest ballot that a node has answered.
    highest: Ballot,
    repeat_at: Instant,
    /// Enough nodes have reported, or had the time to.
    has_judged: bool,
    /// Since when only reports of nodes are missing whose processes are there.
    monitors_missing: Option<Instant>,
    /// The list of lost nodes that nodes have.
    announced: Option<LostNodes>,
    changes: Vec<Change>,
}

impl SupervisorCore {
    /// A supervisor that has heard of nobody and does not act.
    #[must_use]
    pub fn new(torus: Dimensions, index: u16, timers: Timers) -> SupervisorCore {
        SupervisorCore {
            torus,
            index,
            timers,
            reports: Reports::new(torus),
            reported: BTreeMap::new(),
            applications: BTreeMap::new(),
            incarnations: BTreeMap::new(),
            states: vec![NodeState::Unknown; torus.nodes()],
            unanswered: BTreeMap::new(),
            silent: BTreeSet::new(),
            unconnected: BTreeMap::new(),
            dead: DeadSet::new(),
            coordinator: None,
            highest: Ballot::default(),
            repeat_at: Instant::default(),
            has_judged: false,
            monitors_missing: None,
            announced: None,
            changes: Vec::new(),
        }
    }

    /// A host monitor's report.
    pub fn handle_report(&mut self, node: NodeNumber, page: HostReport, now: Instant) {
        if self.torus.contains(node) {
            self.reported.insert(node, now);
            self.reports.handle_report(node, page, Path::Service);
        }
    }

    /// A node process has connected. If it is another one than before, its pairs have to begin anew, although nobody may
    /// have missed the earlier one.
    pub fn handle_node(&mut self, node: NodeNumber, incarnation: u64) {
        if !self.torus.contains(node) {
            return;
        }
        self.hear(node);
        let earlier = self.incarnations.insert(node, incarnation);
        if earlier.is_some_and(|earlier| earlier != incarnation)
            && let Some(coordinator) = &mut self.coordinator
        {
            coordinator.handle_restart(node);
        }
    }

    /// An application came, or is gone.
    pub fn handle_application(&mut self, node: NodeNumber, attached: bool) {
        if self.torus.contains(node) {
            self.applications.insert(node, attached);
        }
    }

    /// A node process answered.
    pub fn handle_answer(&mut self, node: NodeNumber, answer: &Answer) {
        self.hear(node);
        self.highest = self.highest.max(answer.ballot);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.handle_answer(node, answer);
        }
    }

    /// A node takes orders again.
    fn hear(&mut self, node: NodeNumber) {
        self.unanswered.remove(&node);
        self.silent.remove(&node);
    }

    /// Avoids nodes that answer no order: a change of routes waits for all others.
    fn avoid_silent(&mut self, now: Instant) {
        let period = Duration::from_millis(self.timers.report);
        let waiting: BTreeSet<_> = self.coordinator.iter().flat_map(Coordinator::waiting).collect();
        self.unanswered.retain(|node, _| waiting.contains(node));
        for node in waiting {
            let since = *self.unanswered.entry(node).or_insert(now);
            let connected = self.incarnations.contains_key(&node);
            if now.since(since) >= if connected { ANSWER_PERIODS * period } else { CONNECTION } {
                self.silent.insert(node);
            }
        }
        self.silent.iter().for_each(|&node| self.dead.kill_node(node));
    }

    /// Begins to act, with this term or a higher one than all that nodes have answered.
    pub fn act(&mut self, term: u64) {
        if self.coordinator.is_none() {
            self.take_over(term.max(self.highest.term.saturating_add(1)));
        }
    }

    fn take_over(&mut self, term: u64) {
        let ballot = Ballot { term, supervisor: self.index };
        self.coordinator = Some(Coordinator::take_over(self.torus, ballot, self.dead.clone()));
    }

    /// A lower supervisor lives: this one only watches.
    pub fn step_back(&mut self) {
        self.coordinator = None;
        self.announced = None;
    }

    /// Whether it acts.
    #[must_use]
    pub fn is_acting(&self) -> bool {
        self.coordinator.is_some()
    }

    /// Time passed. Returns whether a state changed.
    pub fn handle_time(&mut self, now: Instant) -> bool {
        let overdue = Duration::from_millis(u64::from(self.timers.missed_reports) * self.timers.report);
        for (&node, &at) in &self.reported {
            if now.since(at) > overdue {
                self.reports.handle_silence(node);
            }
        }
        self.has_judged = self.has_judged || self.can_judge(now);
        if !self.has_judged {
            return false;
        }
        let changed = self.update_states(now);
        self.avoid(now);
        self.avoid_silent(now);
        let repeats = now >= self.repeat_at;
        if repeats {
            self.repeat_at = now + REPEAT;
            // Another supervisor acted meanwhile, or one with a clock that is ahead acted before: nodes refuse a lower ballot.
            if self.coordinator.as_ref().is_some_and(|own| own.ballot() < self.highest) {
                self.take_over(self.highest.term.saturating_add(1));
            }
        }
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.request(self.dead.clone());
            if repeats {
                coordinator.repeat();
            }
        }
        changed
    }

    /// Whether it has judged the nodes: it knows who is dead.
    #[must_use]
    pub fn has_judged(&self) -> bool {
        self.has_judged
    }

    /// Whether all nodes have reported, or had the time to. If the process of a node has connected and a neighbour reports
    /// what it sees, its host monitor may be dead.
    fn can_judge(&mut self, now: Instant) -> bool {
        let missing: Vec<_> = self.torus.all().filter(|node| !self.reported.contains_key(node)).collect();
        if missing.is_empty() || now >= Instant::default() + START {
            return true;
        }
        let is_seen = |&node: &NodeNumber| {
            let mut neighbours = self.neighbours(node);
            self.incarnations.contains_key(&node)
                && neighbours.any(|(other, _)| self.reported.contains_key(&other))
        };
        if !missing.iter().all(is_seen) {
            self.monitors_missing = None;
            return false;
        }
        let since = *self.monitors_missing.get_or_insert(now);
        now.since(since) >= MONITOR_PERIODS * Duration::from_millis(self.timers.report)
    }

    fn update_states(&mut self, now: Instant) -> bool {
        let mut changed = false;
        for node in self.torus.all() {
            let state = self.reports.verdict(node);
            let known = &mut self.states[node.index()];
            if *known != state {
                *known = state;
                changed = true;
                if self.changes.len() == CHANGES {
                    self.changes.remove(0);
                }
                let at = now.since(Instant::default()).as_millis() as u64;
                self.changes.push(Change { at, node, state });
            }
        }
        changed
    }

    /// What routes avoid. A node comes back when its adapter works, it takes orders, and all its links to live nodes
    /// are up, or have had the time; a link, when it is up. The ends of a link that report have to agree.
    fn avoid(&mut self, now: Instant) {
        let links: Vec<_> = self.dead.links().collect();
        for node in self.torus.all() {
            self.take_back(node, now);
            for direction in Direction::ALL {
                let link = self.torus.link(node, direction).filter(|link| links.contains(link));
                if let Some(link) = link.filter(|_| self.is_up(node, direction)) {
                    self.dead.revive_link(link);
                }
            }
        }
        for node in self.torus.all() {
            match self.states[node.index()] {
                NodeState::NodeFailed => self.dead.kill_node(node),
                NodeState::AdapterFailed if self.neighbours_agree(node) => self.dead.kill_node(node),
                _ => {}
            }
        }
        // Not by the nodes' states: a node shows only the first of its broken links.
        for node in self.torus.all() {
            for direction in Direction::ALL {
                if let Some(link) = self.torus.link(node, direction)
                    && (self.reports.is_broken(node, direction) || self.ends_at_enclosed(node, direction))
                    && self.both_live(node, direction)
                {
                    self.dead.kill_link(link);
                }
            }
        }
    }

    fn take_back(&mut self, node: NodeNumber, now: Instant) {
        if !self.may_return(node) {
            self.unconnected.remove(&node);
            return;
        }
        if !self.is_connected(node) {
            let (up, down): (Vec<_>, Vec<_>) =
                self.live_neighbours(node).partition(|&(_, direction)| self.is_up(node, direction));
            let since = *self.unconnected.entry(node).or_insert(now);
            let period = Duration::from_millis(self.timers.report);
            if up.is_empty() || now.since(since) < LINK_PERIODS * period {
                return;
            }
            let down = down.iter().filter_map(|&(_, direction)| self.torus.link(node, direction));
            down.for_each(|link| self.dead.kill_link(link));
        }
        self.unconnected.remove(&node);
        self.dead.revive_node(node);
    }

    /// Whether neither end of a link is avoided: the links of one that is dead fail with it.
    fn both_live(&self, node: NodeNumber, direction: Direction) -> bool {
        let other = self.torus.neighbour(node, direction);
        self.dead.node_lives(node) && other.is_some_and(|other| self.dead.node_lives(other))
    }

    /// Whether a node sees a link broken behind which a node is enclosed. Whatever that one's state is,
    /// nothing gets there over this link.
    fn ends_at_enclosed(&self, node: NodeNumber, direction: Direction) -> bool {
        self.reports.link(node, direction) == Some(LinkState::Broken)
            && self
                .torus
                .neighbour(node, direction)
                .is_some_and(|other| self.states[other.index()] == NodeState::Enclosed)
    }

    /// Whether all ends of a link that report see it up, and there is one.
    fn is_up(&self, node: NodeNumber, direction: Direction) -> bool {
        let Some(other) = self.torus.neighbour(node, direction) else { return false };
        let mut ends = [(node, direction), (other, direction.reversed())]
            .into_iter()
            .filter_map(|(node, direction)| self.reports.link(node, direction))
            .peekable();
        ends.peek().is_some() && ends.all(|link| link == LinkState::Up)
    }

    /// Whether a node is avoided, has an adapter that works, and takes orders. Others in these states are not avoided
    /// either.
    fn may_return(&self, node: NodeNumber) -> bool {
        let works = matches!(
            self.states[node.index()],
            NodeState::Ok | NodeState::Sick | NodeState::HostFailed | NodeState::LinkFailed(_)
        );
        works && !self.dead.node_lives(node) && !self.silent.contains(&node)
    }

    fn neighbours(&self, node: NodeNumber) -> impl Iterator<Item = (NodeNumber, Direction)> {
        let torus = self.torus;
        Direction::ALL
            .into_iter()
            .filter_map(move |direction| Some((torus.neighbour(node, direction)?, direction)))
    }

    fn live_neighbours(&self, node: NodeNumber) -> impl Iterator<Item = (NodeNumber, Direction)> {
        self.neighbours(node).filter(|&(other, _)| self.dead.node_lives(other))
    }

    /// Whether all links of a node to live nodes are up. If there is no live neighbour, the node waits for a
    /// link to one that may return, too, if there is such a neighbour.
    fn is_connected(&self, node: NodeNumber) -> bool {
        let is_up = |(_, direction): (NodeNumber, Direction)| self.is_up(node, direction);
        if self.live_neighbours(node).next().is_some() {
            return self.live_neighbours(node).all(is_up);
        }
        let mut returning = self.neighbours(node).filter(|&(other, _)| self.may_return(other)).peekable();
        returning.peek().is_none() || returning.any(is_up)
    }

    /// Whether a neighbour sees its link to the node broken, or none can tell.
    fn neighbours_agree(&self, node: NodeNumber) -> bool {
        let mut views = Direction::ALL
            .into_iter()
            .filter_map(|direction| {
                let other = self.torus.neighbour(node, direction)?;
                self.reports.link(other, direction.reversed())
            })
            .peekable();
        views.peek().is_none() || views.any(|link| link == LinkState::Broken)
    }

    /// The next order.
    pub fn poll(&mut self) -> Option<(NodeNumber, Order)> {
        self.coordinator.as_mut()?.poll()
    }

    /// All nodes that are dead or whose application is gone.
    #[must_use]
    pub fn lost(&self) -> Vec<NodeNumber> {
        let gone = |node: &NodeNumber| {
            !self.dead.node_lives(*node) || self.applications.get(node).is_some_and(|&attached| !attached)
        };
        self.torus.all().filter(gone).collect()
    }

    /// The list of lost nodes for all nodes, if this supervisor acts and they do not have it.
    pub fn poll_lost(&mut self) -> Option<LostNodes> {
        // One that has judged nothing would revoke what its predecessor said.
        let ballot = self.coordinator.as_ref().filter(|_| self.has_judged)?.ballot();
        let lost = Some(LostNodes { ballot, nodes: self.lost() });
        if lost == self.announced {
            return None;
        }
        self.announced.clone_from(&lost);
        lost
    }

    /// The list of lost nodes for a node that has connected now; `None` if [`SupervisorCore::poll_lost`] gives it later.
    #[must_use]
    pub fn announced(&self) -> Option<&LostNodes> {
        self.announced.as_ref()
    }

    /// The state for watchers.
    #[must_use]
    pub fn state(&self) -> TorusState {
        let nodes = self.torus.all().map(|node| NodeRow {
            node,
            state: self.states[node.index()],
            avoided: !self.dead.node_lives(node),
            application: self.applications.get(&node).copied(),
        });
        TorusState {
            dimensions: self.torus.to_string(),
            supervisor: self.index,
            acting: self.is_acting(),
            epoch: self.coordinator.as_ref().map_or(0, |coordinator| coordinator.current().0),
            settled: self.coordinator.as_ref().is_some_and(Coordinator::is_settled),
            nodes: nodes.collect(),
            changes: self.changes.clone(),
        }
    }
}

#[cfg(test)]
mod fault_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_health::registers::Condition;
    use millstream_health::verdict::NeighbourView;
    use millstream_torus_core::epoch::{Effect, Participant};
    use millstream_torus_core::{Axis, Sign};

    pub(super) fn page(
        torus: &Dimensions,
        node: NodeNumber,
        dead: Option<NodeNumber>,
        adapter: Condition,
    ) -> HostReport {
        let neighbours = Direction::ALL.map(|direction| {
            let other = torus.neighbour(node, direction)?;
            let link = if Some(other) == dead { LinkState::Broken } else { LinkState::Up };
            Some(NeighbourView { link, host: Condition::Ok, service: true })
        });
        HostReport { host: Condition::Ok, adapter, neighbours }
    }

    #[test]
    fn a_dead_adapter_is_avoided_only_when_a_neighbour_agrees() {
        let torus: Dimensions = "2x2x2".parse().unwrap();
        let mut core = SupervisorCore::new(torus, 0, Timers::default());
        let dead = NodeNumber(3);
        let report = |core: &mut SupervisorCore, seen: Option<NodeNumber>, ms: u64| {
            let now = Instant::from_nanos(ms * 1_000_000);
            for node in torus.all() {
                let adapter = if node == dead { Condition::Failed } else { Condition::Ok };
                core.handle_report(node, page(&torus, node, seen, adapter), now);
            }
            core.handle_time(now)
        };
        assert!(report(&mut core, None, 10));
        assert_eq!(core.state().nodes[3].state, NodeState::AdapterFailed);
        assert_eq!(core.lost(), []);
        report(&mut core, Some(dead), 20);
        assert_eq!(core.lost(), [dead]);
        assert!(core.state().nodes[3].avoided);
        assert_eq!(core.poll(), None, "it does not act");
        core.act(5);
        let asked: Vec<_> = std::iter::from_fn(|| core.poll()).map(|(node, _)| node).collect();
        assert_eq!(asked.len(), 7, "the dead are not asked: {asked:?}");
    }

    /// Nodes 0 and 9 share a broken link, and each has another one, which its state names.
    #[test]
    fn every_broken_link_of_a_node_is_avoided() {
        let torus: Dimensions = "3x3x3".parse().unwrap();
        let mut core = SupervisorCore::new(torus, 0, Timers::default());
        let plus = |axis| Direction { axis, sign: Sign::Plus };
        let ends =
            [(0, Axis::X), (9, Axis::X), (0, Axis::Z)].map(|(node, axis)| (NodeNumber(node), plus(axis)));
        let links = ends.map(|(node, direction)| torus.link(node, direction).unwrap());
        let mut report = |state: LinkState, ms: u64| {
            let now = Instant::from_nanos(ms * 1_000_000);
            for node in torus.all() {
                let mut page = page(&torus, node, None, Condition::Ok);
                for direction in Direction::ALL {
                    if torus.link(node, direction).is_some_and(|link| links.contains(&link)) {
                        page.neighbours[direction.index()].as_mut().unwrap().link = state;
                    }
                }
                core.handle_report(node, page, now);
            }
            core.handle_time(now);
            core.dead.links().collect::<Vec<_>>()
        };
        let dead = report(LinkState::Broken, 10);
        assert!(dead.len() == 3 && links.iter().all(|link| dead.contains(link)), "{dead:?}");
        assert_eq!(report(LinkState::Up, 20), []);
    }

    /// Node 3 begins anew so soon that nobody misses it, or while this supervisor does not act.
    #[test]
    fn a_node_that_is_started_again_at_once_is_taken_back() {
        let torus: Dimensions = "2x2x1".parse().unwrap();
        let mut core = SupervisorCore::new(torus, 0, Timers::default());
        let mut nodes: Vec<_> = torus.all().map(Participant::new).collect();
        let restarted = NodeNumber(3);
        torus.all().for_each(|node| core.handle_node(node, 1));
        core.act(1);
        let mut now = Instant::default();
        for (epoch, incarnation) in [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)] {
            let acts = core.is_acting();
            if nodes[restarted.index()].current().0 < epoch {
                nodes[restarted.index()] = Participant::rejoining(restarted);
                if epoch == 3 {
                    core.step_back();
                }
            }
            core.handle_node(restarted, incarnation);
            core.act(2);
            for _ in 0..4 {
                now = now + REPEAT;
                for node in torus.all() {
                    core.handle_report(node, page(&torus, node, None, Condition::Ok), now);
                }
                core.handle_time(now);
                settle(&mut core, &mut nodes);
            }
            let state = core.state();
            assert!(acts && state.settled && state.epoch == epoch, "{state:?}");
            assert!(nodes.iter().all(|node| node.has_joined() && node.current().0 == epoch), "{nodes:?}");
        }
    }

    /// Node 2 gets no orders, and node 3 dies: routes change without both. Node 2 comes back with its connection.
    #[test]
    fn a_node_that_answers_no_order_does_not_stop_a_change() {
        let torus: Dimensions = "3x2x1".parse().unwrap();
        let (cut_off, dead) = (NodeNumber(2), NodeNumber(3));
        let mut nodes: Vec<_> = torus.all().map(Participant::new).collect();
        let mut now = Instant::default();
        let mut supervise = |core: &mut SupervisorCore, dead, cut_off: Option<NodeNumber>| {
            // 60 s.
            for _ in 0..300 {
                now = now + REPEAT;
                for node in torus.all() {
                    let adapter = if Some(node) == dead { Condition::Failed } else { Condition::Ok };
                    core.handle_report(node, page(&torus, node, dead, adapter), now);
                }
                core.handle_time(now);
                settle_without(core, &mut nodes, &cut_off.into_iter().collect());
            }
            core.state()
        };
        for index in 0..2 {
            let mut core = SupervisorCore::new(torus, index, Timers::default());
            torus.all().for_each(|node| core.handle_node(node, 1));
            core.act((index + 1).into());
            if index == 0 {
                let state = supervise(&mut core, None, None);
                assert!(state.settled && state.epoch == 0, "{state:?}");
            }
            let state = supervise(&mut core, Some(dead), Some(cut_off));
            let avoided: Vec<_> = state.nodes.iter().filter(|row| row.avoided).map(|row| row.node).collect();
            assert!(state.settled && avoided == [cut_off, dead], "{state:?}");
            core.handle_node(cut_off, 1);
            let state = supervise(&mut core, None, None);
            assert!(state.settled && state.nodes.iter().all(|row| !row.avoided), "{state:?}");
        }
        assert!(nodes.iter().all(|node| node.current() == nodes[0].current()), "{nodes:?}");
    }

    /// A node dies while the supervisor only watches: nodes learn so when it begins to act.
    #[test]
    fn lost_nodes_are_named_by_the_one_that_acts() {
        let torus: Dimensions = "2x2x1".parse().unwrap();
        let dead = NodeNumber(3);
        let mut core = SupervisorCore::new(torus, 1, Timers::default());
        core.act(5);
        assert_eq!((core.poll_lost(), core.announced()), (None, None), "it has judged nothing");
        core.step_back();
        for node in torus.all() {
            let adapter = if node == dead { Condition::Failed } else { Condition::Ok };
            core.handle_report(node, page(&torus, node, Some(dead), adapter), Instant::default());
        }
        core.handle_time(Instant::default());
        assert_eq!(core.lost(), [dead]);
        for term in [6, 7] {
            assert_eq!((core.poll_lost(), core.announced()), (None, None), "it does not act");
            core.act(term);
            let lost = LostNodes { ballot: Ballot { term, supervisor: 1 }, nodes: vec![dead] };
            assert_eq!(core.poll_lost(), Some(lost.clone()));
            assert_eq!((core.poll_lost(), core.announced()), (None, Some(&lost)));
            core.step_back();
        }
    }

    /// Carries orders and answers until there are none.
    fn settle(core: &mut SupervisorCore, nodes: &mut [Participant]) {
        settle_without(core, nodes, &BTreeSet::new());
    }

    pub(super) fn settle_without(
        core: &mut SupervisorCore,
        nodes: &mut [Participant],
        cut_off: &BTreeSet<NodeNumber>,
    ) {
        while let Some((node, order)) = core.poll() {
            if cut_off.contains(&node) {
                continue;
            }
            for effect in nodes[node.index()].handle_order(&order) {
                match effect {
                    Effect::Answer(answer) => core.handle_answer(node, &answer),
                    // No packets: each epoch is drained at once.
                    Effect::Activate { .. } => {
                        let drained = nodes[node.index()].handle_drained().expect("once");
                        core.handle_answer(node, &drained);
                    }
                    _ => {}
                }
            }
        }
    }

    /// The clock of the first supervisor is an hour ahead of that of the second one; the first one goes on after a stop.
    #[test]
    fn a_supervisor_with_an_earlier_clock_takes_over() {
        let torus: Dimensions = "2x2x1".parse().unwrap();
        let mut nodes: Vec<_> = torus.all().map(Participant::new).collect();
        let mut now = Instant::default();
        let mut supervise = |core: &mut SupervisorCore, dead: Option<NodeNumber>| {
            for _ in 0..4 {
                now = now + REPEAT;
                for node in torus.all() {
                    let failed = if Some(node) == dead { Condition::Failed } else { Condition::Ok };
                    core.handle_report(node, page(&torus, node, dead, failed), now);
                }
                core.handle_time(now);
                settle(core, &mut nodes);
            }
            core.state()
        };
        let new = |index| SupervisorCore::new(torus, index, Timers::default());
        let (mut first, mut second) = (new(0), new(1));
        first.act(7200);
        let state = supervise(&mut first, Some(NodeNumber(3)));
        assert!(state.settled && state.epoch == 1, "{state:?}");
        second.act(3600);
        let state = supervise(&mut second, None);
        assert!(state.settled && state.epoch == 2, "{state:?}");
        // The clock was set back, and then forth.
        let mut restarted = new(0);
        restarted.act(5);
        let state = supervise(&mut restarted, Some(NodeNumber(1)));
        assert!(state.settled && state.epoch == 3 && state.nodes[1].avoided, "{state:?}");
        let state = supervise(&mut first, None);
        assert!(state.settled && state.epoch == 4, "{state:?}");
        // Both take the same term: that of the second one is the higher ballot.
        let (mut second, mut restarted) = (new(1), new(0));
        second.act(9000);
        let state = supervise(&mut second, Some(NodeNumber(2)));
        assert!(state.settled && state.epoch == 5, "{state:?}");
        restarted.act(9000);
        let state = supervise(&mut restarted, None);
        assert!(state.settled && state.epoch == 6, "{state:?}");
    }

    #[test]
    fn nothing_is_judged_before_all_have_reported() {
        let torus: Dimensions = "2x1x1".parse().unwrap();
        let mut core = SupervisorCore::new(torus, 0, Timers::default());
        core.handle_report(
            NodeNumber(0),
            page(&torus, NodeNumber(0), None, Condition::Ok),
            Instant::default(),
        );
        core.handle_report(
            NodeNumber(9),
            page(&torus, NodeNumber(0), None, Condition::Ok),
            Instant::default(),
        );
        assert!(!core.handle_time(Instant::from_nanos(1_000_000_000)));
        assert_eq!(core.lost(), []);
        core.handle_application(NodeNumber(1), true);
        core.handle_application(NodeNumber(1), false);
        assert_eq!(core.lost(), [NodeNumber(1)]);
    }
}
