//! The engine on one thread: operations between all nodes, refusals, and the counters.

use std::sync::Arc;
use std::time::Duration;

use millstream_fabric::{Notification, RegionId};
use millstream_quantity::Instant;
use millstream_torus::engine::{
    AtomicOperation, Engine, EngineOptions, Event, Failure, Links, Operation, OutsideAccess, Payload,
    Request, Span,
};
use millstream_torus::in_process::InProcessTorus;
use millstream_torus::memory::Memory;
use millstream_torus_core::epoch::{Attempt, Ballot, Order, Plan, Step};
use millstream_torus_core::header::Kind;
use millstream_torus_core::route::{VirtualChannel, dimension_order};
use millstream_torus_core::router::SlotRef;
use millstream_torus_core::{
    Acknowledgement, DeadSet, Direction, Epoch, Generation, Header, NodeNumber, Port, Sequence,
};

fn memory(len: usize) -> Arc<Memory> {
    Arc::new(Memory::allocate("test", len, None).expect("memory").0)
}

fn torus(dimensions: &str) -> InProcessTorus {
    InProcessTorus::new(dimensions.parse().expect("valid"), EngineOptions::default()).expect("memory")
}

/// Runs until nothing moves. Virtual time passes, so lost packets would be repeated.
fn settle(torus: &mut InProcessTorus) {
    let mut now = Instant::default();
    for _ in 0..100_000 {
        now = now + Duration::from_micros(10);
        if !torus.step(now) && torus.nodes.iter().all(|node| node.is_idle()) {
            return;
        }
    }
    panic!("the network does not come to rest");
}

fn events(torus: &mut InProcessTorus, node: usize) -> Vec<Event> {
    std::iter::from_fn(|| torus.nodes[node].poll_event(Port::Local)).collect()
}

fn put(
    target: u16,
    region: RegionId,
    offset: u64,
    source: &Arc<Memory>,
    length: u32,
    cookie: u32,
) -> Operation {
    let source = Span { memory: Arc::clone(source), offset: 0 };
    let notification = Notification::Event { tag: cookie };
    Operation {
        target: NodeNumber(target),
        request: Request::Put { region, offset, source, length, notification },
        cookie,
    }
}

/// Injected and received = delivered, dropped and sent, over all nodes.
fn assert_conserved(torus: &InProcessTorus) {
    let total = |count: fn(&millstream_torus_core::router::Counters) -> u64| -> u64 {
        torus.nodes.iter().map(|node| count(&node.packets())).sum()
    };
    let waiting: u64 = torus.nodes.iter().map(|node| node.waiting()).sum();
    assert_eq!(total(|c| c.injected), total(|c| c.delivered) + total(|c| c.dropped_total()) + waiting);
    assert_eq!(total(|c| c.transmitted), total(|c| c.received));
}

#[test]
fn every_pair_puts_every_byte_once() {
    for dimensions in ["1x1x1", "2x1x1", "2x2x2", "5x3x1"] {
        let mut torus = torus(dimensions);
        let nodes = torus.nodes.len();
        let length = 3 * 4096 + 5;
        let sources: Vec<_> = (0..nodes).map(|_| memory(length)).collect();
        let targets: Vec<_> = (0..nodes).map(|_| memory(length * nodes)).collect();
        let regions: Vec<_> =
            (0..nodes).map(|i| torus.nodes[i].regions.add(Arc::clone(&targets[i]))).collect();
        for (i, source) in sources.iter().enumerate() {
            let data: Vec<u8> = (0..length).map(|byte| (byte * 3 + i * 17) as u8).collect();
            source.store(0, &data).unwrap();
            for (to, &region) in regions.iter().enumerate() {
                let at = (i * length) as u64;
                torus.nodes[i]
                    .post(Port::Local, put(to as u16, region, at, source, length as u32, to as u32));
            }
        }
        settle(&mut torus);
        for (to, target) in targets.iter().enumerate() {
            let mut found = vec![0; length * nodes];
            target.load(0, &mut found).unwrap();
            for (at, byte) in found.iter().enumerate() {
                assert_eq!(*byte, ((at % length) * 3 + at / length * 17) as u8, "{dimensions}: {to} at {at}");
            }
            let events = events(&mut torus, to);
            let completed =
                events.iter().filter(|event| matches!(event, Event::Completed { failure: None, .. }));
            assert_eq!(completed.count(), nodes);
            let notified: Vec<_> = (events.iter())
                .filter_map(|event| {
                    if let Event::Notification(n) = event { Some((n.offset, n.length)) } else { None }
                })
                .collect();
            assert_eq!(notified.len(), nodes);
            assert!(notified.iter().all(|&(at, n)| at % length as u64 == 0 && n == length as u64));
        }
        assert_conserved(&torus);
    }
}

/// A node process looks at its links between two steps.
#[test]
fn a_large_operation_of_a_node_on_its_own_memory_takes_many_steps() {
    const LENGTH: u32 = 64 << 20;
    let mut torus = torus("1x1x1");
    let (source, target) = (memory(LENGTH as usize), memory(LENGTH as usize));
    let packets = u64::from(LENGTH / EngineOptions::default().packet);
    source.store(u64::from(LENGTH) - 8, b"the last").unwrap();
    let region = torus.nodes[0].regions.add(Arc::clone(&target));
    let into = Span { memory: memory(LENGTH as usize), offset: 0 };
    let get = Request::Get { region, offset: 0, into: into.clone(), length: LENGTH };
    for operation in
        [put(0, region, 0, &source, LENGTH, 1), Operation { target: NodeNumber(0), request: get, cookie: 2 }]
    {
        torus.nodes[0].post(Port::Local, operation);
        let before = torus.nodes[0].packets().delivered;
        assert!(torus.step(Instant::default()));
        let moved = torus.nodes[0].packets().delivered - before;
        assert!((1..=packets / 4).contains(&moved), "{moved} of {packets} packets");
        settle(&mut torus);
    }
    let mut last = [0; 8];
    into.memory.load(u64::from(LENGTH) - 8, &mut last).unwrap();
    assert_eq!(&last, b"the last");
    assert_eq!(events(&mut torus, 0).len(), 3);
    assert_conserved(&torus);
}

#[test]
fn gets_and_atomics_return_the_targets_values() {
    let mut torus = torus("3x2x1");
    let target = memory(100_000);
    let data: Vec<u8> = (0..100_000).map(|i| (i % 251) as u8).collect();
    target.store(0, &data).unwrap();
    let region = torus.nodes[5].regions.add(Arc::clone(&target));
    let into = memory(100_000);
    // More than may be on their way at once.
    for cookie in 0..50_u32 {
        let offset = u64::from(cookie) * 2000;
        let into = Span { memory: Arc::clone(&into), offset };
        let request = Request::Get { region, offset, into, length: 2000 };
        torus.nodes[0].post(Port::Local, Operation { target: NodeNumber(5), request, cookie });
    }
    settle(&mut torus);
    let mut found = vec![0; 100_000];
    into.load(0, &mut found).unwrap();
    assert_eq!(found, data);
    assert_eq!(events(&mut torus, 0).len(), 50);

    target.store(8, &7_u64.to_le_bytes()).unwrap();
    for (cookie, change) in [
        AtomicOperation::FetchAdd(5),
        AtomicOperation::CompareSwap(12, 1),
        AtomicOperation::CompareSwap(12, 2),
    ]
    .into_iter()
    .enumerate()
    {
        let request = Request::Atomic { region, offset: 8, change };
        torus.nodes[1].post(Port::Local, Operation { target: NodeNumber(5), request, cookie: cookie as u32 });
    }
    settle(&mut torus);
    let values: Vec<_> = (events(&mut torus, 1).into_iter())
        .filter_map(|event| if let Event::Completed { value, .. } = event { Some(value) } else { None })
        .collect();
    assert_eq!(values, [7, 12, 1]);
}

#[test]
fn a_refused_put_writes_nothing_and_names_its_cause() {
    let mut torus = torus("2x2x1");
    let target = memory(10_000);
    let region = torus.nodes[3].regions.add(Arc::clone(&target));
    let gone = torus.nodes[3].regions.add(memory(8));
    torus.nodes[3].regions.end(gone);
    let ended = torus.nodes[3].regions.add(memory(8));
    assert!(torus.nodes[3].regions.remove(ended));
    let source = memory(20_000);
    source.store(0, &[9; 20_000]).unwrap();
    let cases = [
        // Begins inside and ends outside: not even its first packets are written.
        (region, 4000, 10_000, Some(Failure::Bounds(target.size()))),
        (region, u64::MAX, 1, Some(Failure::Bounds(target.size()))),
        (gone, 0, 8, Some(Failure::Gone)),
        (ended, 0, 8, Some(Failure::NoRegion)),
        (RegionId(1), 0, 0, Some(Failure::NoRegion)),
        (region, 0, 1, None),
    ];
    assert!(target.size() < 14_000);
    for (cookie, (region, offset, length, _)) in cases.into_iter().enumerate() {
        torus.nodes[0].post(Port::Local, put(3, region, offset, &source, length, cookie as u32));
    }
    settle(&mut torus);
    let found = events(&mut torus, 0);
    let expected: Vec<_> = (cases.iter().enumerate())
        .map(|(cookie, &(.., failure))| Event::Completed { cookie: cookie as u32, value: 0, failure })
        .collect();
    assert_eq!(found, expected);
    let mut bytes = vec![0; 10_000];
    target.load(0, &mut bytes).unwrap();
    assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 1);
    assert_eq!(torus.nodes[3].counters().refused, 5);
    assert_conserved(&torus);
}

#[test]
fn an_unreachable_target_fails_at_once() {
    let mut torus = torus("2x1x1");
    let source = memory(8);
    torus.nodes[0].post(Port::Local, put(9, RegionId(1), 0, &source, 8, 4));
    let lost = Event::Completed { cookie: 4, value: 0, failure: Some(Failure::NodeLost) };
    assert_eq!(events(&mut torus, 0), [lost]);
    assert!(torus.nodes[0].link_is_up(Direction::ALL[0]));
}

fn outside_events(torus: &mut InProcessTorus, node: usize) -> Vec<Event> {
    std::iter::from_fn(|| torus.nodes[node].poll_event(Port::Seventh)).collect()
}

#[test]
fn the_seventh_port_reaches_what_is_published() {
    let mut torus = torus("3x2x1");
    let targets: Vec<_> = (0..3).map(|_| memory(4096)).collect();
    let regions: Vec<_> =
        targets.iter().map(|target| torus.nodes[5].regions.add(Arc::clone(target))).collect();
    let [hidden, readable, writable] = regions[..] else { panic!("three regions") };
    assert!(torus.nodes[5].regions.publish(readable, OutsideAccess::Read));
    assert!(torus.nodes[5].regions.publish(writable, OutsideAccess::ReadWrite));
    assert!(!torus.nodes[5].regions.publish(RegionId(3), OutsideAccess::Read));
    targets[1].store(0, &[5; 64]).unwrap();
    let (source, into) = (memory(64), memory(64));
    source.store(0, &[9; 64]).unwrap();
    let get = |region, cookie| {
        let into = Span { memory: Arc::clone(&into), offset: 0 };
        let request = Request::Get { region, offset: 0, into, length: 64 };
        Operation { target: NodeNumber(5), request, cookie }
    };
    let add = |region, cookie| {
        let request = Request::Atomic { region, offset: 128, change: AtomicOperation::FetchAdd(1) };
        Operation { target: NodeNumber(5), request, cookie }
    };
    let operations = [
        (put(5, hidden, 0, &source, 64, 0), Some(Failure::Access)),
        (put(5, readable, 0, &source, 64, 1), Some(Failure::Access)),
        (put(5, writable, 0, &source, 64, 2), None),
        (get(hidden, 3), Some(Failure::Access)),
        (get(readable, 4), None),
        (add(readable, 5), Some(Failure::Access)),
        (add(writable, 6), None),
        (get(RegionId(3), 7), Some(Failure::NoRegion)),
    ];
    let mut expected: Vec<_> =
        (operations.iter()).map(|(operation, failure)| (operation.cookie, *failure)).collect();
    for (operation, _) in operations {
        torus.nodes[0].post(Port::Seventh, operation);
    }
    settle(&mut torus);
    let mut found: Vec<_> = (outside_events(&mut torus, 0).into_iter())
        .filter_map(|event| match event {
            Event::Completed { cookie, failure, .. } => Some((cookie, failure)),
            _ => None,
        })
        .collect();
    found.sort_by_key(|&(cookie, _)| cookie);
    expected.sort_by_key(|&(cookie, _)| cookie);
    assert_eq!(found, expected);
    let first = |memory: &Memory| {
        let mut byte = [0];
        memory.load(0, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!([first(&targets[0]), first(&targets[1]), first(&targets[2]), first(&into)], [0, 5, 9, 5]);
    assert_eq!(events(&mut torus, 0), [], "the gateway's application began none of these");
    let notified = events(&mut torus, 5);
    assert!(
        matches!(notified[..], [Event::Notification(event)] if event.source == NodeNumber(0)),
        "{notified:?}"
    );
    // Deregistered, so it does not exist; gone with its application.
    assert!(torus.nodes[5].regions.remove(readable));
    torus.nodes[5].detach();
    torus.nodes[0].post(Port::Seventh, get(readable, 8));
    torus.nodes[0].post(Port::Seventh, get(writable, 9));
    settle(&mut torus);
    let failed = |cookie, failure| Event::Completed { cookie, value: 0, failure: Some(failure) };
    assert_eq!(outside_events(&mut torus, 0), [failed(8, Failure::NoRegion), failed(9, Failure::Gone)]);
    assert_conserved(&torus);
}

#[test]
fn a_flood_of_the_seventh_port_does_not_starve_the_local_one() {
    let mut torus = torus("4x1x1");
    let (source, target) = (memory(65_536), memory(65_536));
    let region = torus.nodes[2].regions.add(Arc::clone(&target));
    assert!(torus.nodes[2].regions.publish(region, OutsideAccess::ReadWrite));
    for cookie in 0..500 {
        torus.nodes[0].post(Port::Seventh, put(2, region, 0, &source, 65_536, cookie));
    }
    let mut now = Instant::default();
    // The flood is under way.
    for _ in 0..50 {
        now = now + Duration::from_micros(10);
        torus.step(now);
    }
    torus.nodes[0].post(Port::Local, put(2, region, 0, &source, 65_536, 7));
    let mut local = Vec::new();
    let before = outside_events(&mut torus, 0).len();
    while local.is_empty() {
        now = now + Duration::from_micros(10);
        assert!(torus.step(now), "the network is at rest");
        local = events(&mut torus, 0);
    }
    let meanwhile = outside_events(&mut torus, 0).len();
    assert_eq!(local, [Event::Completed { cookie: 7, value: 0, failure: None }]);
    assert!(before + meanwhile < 100, "{before} puts before, {meanwhile} while the local one was on its way");
    settle(&mut torus);
    assert_eq!(before + meanwhile + outside_events(&mut torus, 0).len(), 500);
    assert_conserved(&torus);
}

#[test]
fn cancelled_operations_end_unseen_and_release_their_memory() {
    let mut torus = torus("3x1x1");
    let (theirs, own) = (memory(1 << 20), memory(1 << 20));
    let target = memory(1 << 20);
    let region = torus.nodes[1].regions.add(Arc::clone(&target));
    assert!(torus.nodes[1].regions.publish(region, OutsideAccess::ReadWrite));
    for cookie in 0..20 {
        let source = if cookie % 2 == 0 { &theirs } else { &own };
        torus.nodes[0].post(Port::Seventh, put(1, region, 0, source, 1 << 20, cookie));
        let into = Span { memory: Arc::clone(source), offset: 0 };
        let request = Request::Get { region, offset: 0, into, length: 4096 };
        let target = NodeNumber(1);
        torus.nodes[0].post(Port::Seventh, Operation { target, request, cookie: 100 + cookie });
    }
    let mut now = Instant::default();
    for _ in 0..20 {
        now = now + Duration::from_micros(10);
        torus.step(now);
    }
    assert!(Arc::strong_count(&theirs) > 10);
    let before = outside_events(&mut torus, 0);
    torus.nodes[0].cancel(Port::Seventh, |cookie| cookie % 2 == 0);
    assert_eq!(Arc::strong_count(&theirs), 1, "released at once");
    settle(&mut torus);
    let cookies = |events: Vec<Event>| -> Vec<u32> {
        let cookie = |event| match event {
            Event::Completed { cookie, failure: None, .. } => cookie,
            other => panic!("{other:?}"),
        };
        events.into_iter().map(cookie).collect()
    };
    let after = cookies(outside_events(&mut torus, 0));
    assert!(after.iter().all(|cookie| cookie % 2 == 1), "{after:?}");
    let mut found: Vec<_> =
        cookies(before).into_iter().filter(|cookie| cookie % 2 == 1).chain(after).collect();
    found.sort_unstable();
    let mut expected: Vec<u32> = (0..20).filter(|cookie| cookie % 2 == 1).collect();
    expected.extend(expected.clone().iter().map(|cookie| 100 + cookie));
    assert_eq!(found, expected);
    assert_eq!(Arc::strong_count(&own), 1);
    assert!(torus.nodes[0].is_port_idle(Port::Seventh));
    assert_conserved(&torus);
}

fn get(target: u16, region: RegionId, into: &Arc<Memory>, length: u32, cookie: u32) -> Operation {
    let into = Span { memory: Arc::clone(into), offset: 0 };
    let request = Request::Get { region, offset: 0, into, length };
    Operation { target: NodeNumber(target), request, cookie }
}

const ATTEMPT: Attempt = Attempt { ballot: Ballot { term: 1, supervisor: 0 }, number: 1 };

fn order(torus: &mut InProcessTorus, node: usize, step: Step) {
    torus.nodes[node].handle_order(&Order { ballot: ATTEMPT.ballot, step });
}

fn prepare(torus: &mut InProcessTorus, node: usize, epoch: u32, dead: &[u16], returning: &[u16]) {
    let mut plan = Plan { dead: DeadSet::new(), ..Plan::default() };
    dead.iter().for_each(|&node| plan.dead.kill_node(NodeNumber(node)));
    plan.returning.extend(returning.iter().map(|&node| NodeNumber(node)));
    order(torus, node, Step::Prepare { epoch: Epoch(epoch), attempt: ATTEMPT, plan });
}

fn commit(torus: &mut InProcessTorus, node: usize, epoch: u32) {
    order(torus, node, Step::Commit { epoch: Epoch(epoch), attempt: ATTEMPT });
}

/// Node 1 was avoided, and both nodes have prepared the epoch in which it returns. It was stopped, or started again.
fn returning_torus(restarted: bool) -> InProcessTorus {
    let mut torus = torus("2x1x1");
    if restarted {
        torus.nodes[1].rejoin();
    }
    prepare(&mut torus, 0, 1, &[1], &[]);
    commit(&mut torus, 0, 1);
    (0..2).for_each(|node| prepare(&mut torus, node, 2, &[], &[1]));
    torus
}

/// Nodes activate an epoch one after another: an operation of the first to the other is executed when both have done so.
#[test]
fn operations_between_commits_of_a_return_complete() {
    for (first, restarted) in [(0, false), (0, true), (1, false), (1, true)] {
        let mut torus = returning_torus(restarted);
        let other = 1 - first;
        let (target, into) = (memory(64), memory(64));
        target.store(0, &[5; 64]).unwrap();
        let region = torus.nodes[other].regions.add(Arc::clone(&target));
        commit(&mut torus, first, 2);
        torus.nodes[first].post(Port::Local, get(other as u16, region, &into, 64, 1));
        torus.nodes[first].post(Port::Local, put(other as u16, RegionId(7), 0, &into, 64, 2));
        let change = AtomicOperation::FetchAdd(1);
        let request = Request::Atomic { region, offset: 0, change };
        let target_node = NodeNumber(other as u16);
        torus.nodes[first].post(Port::Local, Operation { target: target_node, request, cookie: 3 });
        let mut now = Instant::default();
        for _ in 0..100 {
            now = now + Duration::from_micros(10);
            torus.step(now);
        }
        commit(&mut torus, other, 2);
        for _ in 0..1000 {
            now = now + Duration::from_millis(10);
            torus.step(now);
        }
        let mut found = events(&mut torus, first);
        found.sort_by_key(|event| if let Event::Completed { cookie, .. } = event { *cookie } else { 0 });
        let completed = |cookie, value, failure| Event::Completed { cookie, value, failure };
        let expected = [
            completed(1, 0, None),
            completed(2, 0, Some(Failure::NoRegion)),
            completed(3, 0x0505_0505_0505_0505, None),
        ];
        assert_eq!(found, expected, "node {first} is first, restarted: {restarted}");
        assert!(torus.nodes.iter().all(|node| node.is_idle()));
        assert_conserved(&torus);
    }
}

/// A node that was stopped begins anew as its peers do: their refusals of before do not count for its new puts.
#[test]
fn a_returned_node_completes_no_refused_put() {
    let mut torus = torus("2x1x1");
    let source = memory(1 << 20);
    let region = torus.nodes[1].regions.add(memory(1 << 20));
    let failure = Some(Failure::NoRegion);
    torus.nodes[1].post(Port::Local, put(0, RegionId(7), 0, &source, 8, 1));
    settle(&mut torus);
    assert_eq!(events(&mut torus, 1), [Event::Completed { cookie: 1, value: 0, failure }]);
    prepare(&mut torus, 0, 1, &[1], &[]);
    commit(&mut torus, 0, 1);
    (0..2).for_each(|node| prepare(&mut torus, node, 2, &[], &[1]));
    (0..2).for_each(|node| commit(&mut torus, node, 2));
    // Many packets of node 0 are before its answer, and none before its acknowledgement.
    torus.nodes[0].post(Port::Local, put(1, region, 0, &source, 1 << 20, 2));
    torus.step(Instant::default());
    torus.nodes[1].post(Port::Local, put(0, RegionId(7), 0, &source, 8, 3));
    settle(&mut torus);
    let mut found = events(&mut torus, 1);
    found.retain(|event| matches!(event, Event::Completed { .. }));
    assert_eq!(found, [Event::Completed { cookie: 3, value: 0, failure }]);
}

/// Packets and acknowledgements of a node's former process are still on their way when its next one takes
/// part.
#[test]
fn what_a_former_process_sent_does_not_count_for_the_next_one() {
    let options = EngineOptions::default();
    let mut node = Engine::new("5x1x1".parse().expect("valid"), NodeNumber(0), options);
    let side = Direction::ALL[0];
    node.set_link(side, true);
    let (source, region) = (memory(8), node.regions.add(memory(8)));
    let (slot, _) = Memory::allocate("test", 8192, None).expect("memory");
    let mut links = Void { slot, sent: Default::default(), data: 0 };
    let plan = Plan { returning: [NodeNumber(1)].into(), ..Plan::default() };
    let attempt = ATTEMPT;
    let steps = [Step::Prepare { epoch: Epoch(1), attempt, plan }, Step::Commit { epoch: Epoch(1), attempt }];
    for step in steps {
        node.handle_order(&Order { ballot: ATTEMPT.ballot, step });
    }
    node.post(Port::Local, put(1, RegionId(7), 0, &source, 8, 9));
    node.run(&mut links);
    let mut slot = 0;
    let mut arrive = |node: &mut Engine, kind, epoch: u32| {
        let mut header = Header::new(kind, NodeNumber(1), NodeNumber(0));
        header.signs = dimension_order::shortest(&node.dimensions(), NodeNumber(1), NodeNumber(0));
        (header.hops, header.epoch, header.last) = (1, Epoch(epoch), true);
        if kind == Kind::Put {
            (header.region, header.length, header.total) = (region.0, 8, 8);
            header.notification = Notification::Event { tag: epoch };
        } else {
            let (generation, next) = (Generation(0), Sequence(1));
            header.acknowledgement = Some(Acknowledgement { generation, next, refusals: 0 });
        }
        node.handle_packet(side, slot, header).expect("the next slot");
        slot += 1;
        node.run(&mut links);
        std::iter::from_fn(|| node.poll_event(Port::Local)).collect::<Vec<_>>()
    };
    for kind in [Kind::Put, Kind::Acknowledge] {
        assert_eq!(arrive(&mut node, kind, 0), []);
    }
    assert!(matches!(arrive(&mut node, Kind::Put, 1)[..], [Event::Notification(event)] if event.tag == 1));
    let completed = Event::Completed { cookie: 9, value: 0, failure: None };
    assert_eq!(arrive(&mut node, Kind::Acknowledge, 1), [completed]);
}

/// Links that carry nothing, and count what would leave.
struct Void {
    slot: Memory,
    sent: [u32; VirtualChannel::COUNT],
    /// Data for node 2.
    data: u32,
}

impl Links for Void {
    fn is_ready(&self, _: Direction) -> bool {
        true
    }

    fn send(&mut self, _: Direction, _: u16, header: &Header, _: Payload<'_>) -> bool {
        self.sent[header.vc.index()] += 1;
        self.data += u32::from(header.kind == Kind::GetData && header.target == NodeNumber(2));
        true
    }

    fn send_credits(&mut self, _: Direction, _: [u32; VirtualChannel::COUNT]) {}

    fn slot(&self, _: SlotRef) -> (&Memory, u64) {
        (&self.slot, 0)
    }
}

/// Node 1 asks for ever and acknowledges no reply; then node 2 reads a word through it.
#[test]
fn a_node_that_takes_no_replies_harms_no_other_one() {
    let options = EngineOptions::default();
    let dimensions = "5x1x1".parse().expect("valid");
    let mut node = Engine::new(dimensions, NodeNumber(0), options);
    let side = Direction::ALL[0];
    node.set_link(side, true);
    let region = node.regions.add(memory(8));
    let (slot, _) = Memory::allocate("test", 8192, None).expect("memory");
    let mut links = Void { slot, sent: Default::default(), data: 0 };
    let mut packets = 0_u32;
    let mut ask = |source: u16, sequence: u32| {
        let mut header = Header::new(Kind::GetRequest, NodeNumber(source), NodeNumber(0));
        header.signs = dimension_order::shortest(&dimensions, NodeNumber(source), NodeNumber(0));
        header.hops = source;
        header.sequence = Sequence(sequence);
        (header.region, header.total, header.operation) = (region.0, 8, sequence);
        node.handle_packet(side, (packets % u32::from(options.slots)) as u16, header).expect("the next slot");
        packets += 1;
        node.run(&mut links);
        node.handle_credits(side, links.sent).expect("sent");
        node.run(&mut links);
    };
    // As many as a node has places for operations.
    (0..1 << 20).for_each(|sequence| ask(1, sequence));
    ask(2, 0);
    assert_eq!(links.data, 1);
    let (packets, counters) = (node.packets(), node.counters());
    assert_eq!((packets.delivered, packets.dropped_total()), ((1 << 20) + 1, 0));
    assert!(counters.not_executed > 1 << 19, "{counters:?}");
}
