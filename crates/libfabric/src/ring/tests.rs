//! Rings of threads' nodes, on one thread.

use millstream_fabric::LocalNode;
use millstream_fabric::unreliable::UnreliableNode;
use proptest::prelude::*;

use super::*;
use crate::header::Kind;

fn pair() -> [Rings<LocalNode>; 2] {
    let nodes: [LocalNode; 2] = LocalNode::all("2x1x1".parse().unwrap()).try_into().expect("two nodes");
    nodes.map(|node| Rings::new(node).expect("few nodes"))
}

/// Closes the endpoint of a node, and opens another one.
fn reopened(rings: Rings<LocalNode>) -> Rings<LocalNode> {
    Rings::new(rings.close()).expect("few nodes")
}

/// Whether a message could be sent.
fn try_to_send(from: &mut Rings<LocalNode>, to: Address, tag: u64) -> bool {
    let is_ready = from.connect(to) && from.is_ready(to.node).expect("it has not ended");
    if is_ready {
        from.send(to.node, Header { tag, ..Header::new(Kind::Tagged) }, |_| {}).expect("lives");
    }
    is_ready
}

fn send(from: &mut Rings<LocalNode>, to: Address, tag: u64) {
    assert!(try_to_send(from, to, tag), "{tag}");
}

/// Tags of all messages of a node that are here.
fn tags(at: &mut Rings<LocalNode>, from: NodeNumber) -> Vec<u64> {
    let next = || {
        let tag = at.peek(from)?.tag;
        at.free(from);
        Some(tag)
    };
    std::iter::from_fn(next).collect()
}

#[test]
fn a_node_that_reopens_its_endpoint_sends_and_receives_all_messages() {
    let (node, other_node) = (NodeNumber(0), NodeNumber(1));
    for (read, unread) in (0..2 * SLOTS).flat_map(|read| (0..=SLOTS / 2).map(move |unread| (read, unread))) {
        let [mut here, mut other] = pair();
        for tag in 0..read {
            send(&mut other, here.address(), tag);
            assert_eq!(tags(&mut here, other_node), [tag]);
        }
        (read..read + unread).for_each(|tag| send(&mut other, here.address(), tag));
        let earlier = other.address();
        // An endpoint that only says hello is replaced by the next one.
        let mut silent = reopened(other);
        let _ = try_to_send(&mut silent, here.address(), 99);
        let has_sent = read + unread == 0;
        let mut other = reopened(silent);
        let first = 100;
        assert!(!try_to_send(&mut other, here.address(), first), "{read}, {unread}: behind another endpoint");
        let mut expected: Vec<u64> = (read..read + unread).collect();
        expected.extend(has_sent.then_some(99));
        assert_eq!(tags(&mut here, other_node), expected, "{read}, {unread}");
        for tag in first..first + 3 * SLOTS {
            send(&mut other, here.address(), tag);
            assert_eq!(tags(&mut here, other_node), [tag], "{read}, {unread}");
            assert_eq!(
                here.take_reopened(other_node),
                tag == first && read + unread + u64::from(has_sent) > 0
            );
            send(&mut here, other.address(), tag);
            assert_eq!(tags(&mut other, node), [tag], "{read}, {unread}");
        }
        assert!(!here.connect(earlier), "it has ended");
    }
}

#[test]
fn an_endpoint_that_is_known_by_its_address_first_loses_no_message() {
    for before in 0..2 * SLOTS {
        let [mut here, mut other] = pair();
        for tag in 0..before {
            send(&mut other, here.address(), tag);
            assert_eq!(tags(&mut here, NodeNumber(1)), [tag]);
        }
        let mut other = reopened(other);
        // Its first message comes before or after its address is used here.
        let has_sent = try_to_send(&mut other, here.address(), 7);
        assert_eq!(has_sent, before == 0);
        send(&mut here, other.address(), 8);
        assert_eq!(tags(&mut other, NodeNumber(0)), [8]);
        assert_eq!(tags(&mut here, NodeNumber(1)), if has_sent { vec![7] } else { vec![] });
        for tag in 10..10 + 2 * SLOTS {
            send(&mut other, here.address(), tag);
            assert_eq!(tags(&mut here, NodeNumber(1)), [tag]);
        }
    }
}

/// Two nodes that send each other numbered messages while puts are lost.
struct Numbered {
    rings: [Rings<UnreliableNode>; 2],
    addresses: [Address; 2],
    sent: [u64; 2],
    received: [u64; 2],
}

impl Numbered {
    /// With `is_second`, both nodes have opened an endpoint before.
    fn new(is_second: bool) -> Numbered {
        let nodes: [LocalNode; 2] = LocalNode::all("2x1x1".parse().unwrap()).try_into().expect("two nodes");
        let mut rings =
            nodes.map(|node| Rings::new(UnreliableNode::new(node)).expect("few nodes").without_pause());
        let mut addresses = [0, 1].map(|at: usize| rings[at].address());
        if is_second {
            for at in 0..2 {
                assert!(rings[at].connect(addresses[1 - at]));
                assert_eq!(rings[at].is_ready(addresses[1 - at].node), Ok(true));
            }
            let [mut first, second] = rings;
            // This one is known to the other node by its counted endpoint only.
            let own = first.address();
            first.fabric().deregister(own.inbox).expect("its own");
            let first = Rings::new(first.fabric).expect("few nodes").without_pause();
            addresses[0] = first.address();
            rings = [first, second];
        }
        Numbered { rings, addresses, sent: [0; 2], received: [0; 2] }
    }

    fn other(at: usize) -> NodeNumber {
        NodeNumber(1 - at as u16)
    }

    fn send(&mut self, at: usize, length: usize) {
        let (to, tag) = (self.addresses[1 - at], self.sent[at]);
        let rings = &mut self.rings[at];
        if !rings.connect(to) || rings.is_ready(to.node) != Ok(true) {
            return;
        }
        let total = length as u64;
        let header = Header { tag, total, length: length as u32, ..Header::new(Kind::Tagged) };
        let fill = |slot: &mut Vec<u8>| slot.extend(std::iter::repeat_n(tag as u8, length));
        self.sent[at] += u64::from(rings.send(to.node, header, fill).is_ok());
    }

    fn receive(&mut self, at: usize) {
        let from = Numbered::other(at);
        if let Some(header) = self.rings[at].peek(from) {
            let mut data = vec![0; header.length as usize];
            self.rings[at].load(from, 0, &mut data).expect("in the slot");
            assert_eq!(header.tag, self.received[at], "in turn");
            assert!(data.iter().all(|&byte| byte == header.tag as u8), "whole: {data:?}");
            self.rings[at].free(from);
            self.received[at] += 1;
        }
    }

    fn progress(&mut self, at: usize) {
        self.rings[at].look_for_lost_puts();
        self.rings[at].recover(Numbered::other(at));
    }

    fn step(&mut self, (what, at, count, part): (u8, usize, usize, usize)) {
        let other = Numbered::other(at);
        match what {
            0..=3 => (0..count).for_each(|_| self.send(at, part)),
            4..=7 => (0..count).for_each(|_| self.receive(at)),
            8 | 9 => self.rings[at].fabric().execute(other, count),
            10 | 11 => self.progress(at),
            12 => self.rings[at].fabric().lose(other),
            13 => self.rings[at].fabric().set_away(other, count % 2 == 0),
            _ => self.rings[at].fabric().execute_lost(other, count, part),
        }
    }

    /// Both nodes are back: everything sent arrives.
    fn settle(&mut self) {
        (0..2).for_each(|at| self.rings[at].fabric().set_away(Numbered::other(at), false));
        for _ in 0..100 {
            for at in 0..2 {
                self.progress(at);
                self.rings[at].fabric().execute(Numbered::other(at), usize::MAX);
                (0..2 * SLOTS).for_each(|_| self.receive(at));
            }
        }
        assert_eq!([self.received[1], self.received[0]], self.sent);
        assert!(self.rings.iter_mut().all(Rings::flush));
    }
}

proptest! {
    /// Puts are lost in any number behind any others, known at once or later, and a node is away for a while.
    #[test]
    fn each_message_arrives_once_and_in_order_although_puts_are_lost(
        is_second: bool,
        rounds in prop::collection::vec(prop::collection::vec((0..15_u8, 0..2_usize, 0..20_usize, 0..300_usize), 1..60), 1..4),
    ) {
        let mut nodes = Numbered::new(is_second);
        for steps in rounds {
            steps.into_iter().for_each(|step| nodes.step(step));
            nodes.settle();
        }
        // The rings go on, in laps.
        for lap in 0..4 {
            for at in 0..2 {
                let before = nodes.sent[at];
                (0..SLOTS).for_each(|_| nodes.send(at, 8));
                // Behind an earlier endpoint it waits first.
                assert!(lap == 0 || nodes.sent[at] - before > SLOTS / 2, "half of a ring is free");
            }
            nodes.settle();
        }
    }
}
