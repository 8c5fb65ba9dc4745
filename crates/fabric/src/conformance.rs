//! Checks of an implementation of [`Fabric`]. Each is called by all nodes at once, and panics on a difference.

use std::time::Duration;

use millstream_torus_core::NodeNumber;

use crate::{
    AllToAll, Collectives, Fabric, FabricError, Neighbourhood, Notification, Reduction, RegionId, Span,
};

const LONG: Duration = Duration::from_secs(30);

/// A check, by name.
pub type Check<F> = (&'static str, fn(&mut F));

/// All checks.
#[must_use]
pub fn checks<F: Fabric>() -> Vec<Check<F>> {
    vec![
        ("put_and_get_between_all_pairs", put_and_get_between_all_pairs),
        ("large_puts_from_a_region_arrive_whole", large_puts_from_a_region_arrive_whole),
        ("one_initiator_reads_what_it_wrote", one_initiator_reads_what_it_wrote),
        ("puts_of_a_pair_keep_their_order", puts_of_a_pair_keep_their_order),
        ("atomic_operations_lose_nothing", atomic_operations_lose_nothing),
        ("wrong_operations_are_refused_and_harm_nothing", wrong_operations_are_refused_and_harm_nothing),
        ("collectives_have_the_order_of_nodes", collectives_have_the_order_of_nodes),
        ("neighbours_exchange_messages_of_any_length", neighbours_exchange_messages_of_any_length),
        ("all_nodes_exchange_messages_of_any_length", all_nodes_exchange_messages_of_any_length),
    ]
}

fn regions<F: Fabric>(fabric: &mut F, size: usize) -> (RegionId, Vec<RegionId>) {
    let mine = fabric.register(size);
    let all = fabric.exchange(&mine.0.to_le_bytes(), LONG).expect("all nodes take part");
    let id = |bytes: &Vec<u8>| RegionId(u64::from_le_bytes(bytes[..].try_into().expect("8 bytes")));
    (mine, all.iter().map(id).collect())
}

fn everybody<F: Fabric>(fabric: &mut F) {
    fabric.exchange(&[], LONG).expect("all nodes take part");
}

fn put_and_get_between_all_pairs<F: Fabric>(fabric: &mut F) {
    let (here, nodes) = (fabric.here(), fabric.dimensions().nodes());
    // Before the exchange: behind it, others put already.
    let before = fabric.counter(1).expect("exists");
    let (mine, all) = regions(fabric, nodes * 100);
    let pattern = |from: NodeNumber, to: NodeNumber| -> Vec<u8> {
        (0..100).map(|i| (usize::from(from.0) * 31 + usize::from(to.0) * 7 + i) as u8).collect()
    };
    for to in fabric.dimensions().all() {
        let one = Notification::Counter { index: 1, add: 1 };
        let at = here.index() as u64 * 100;
        fabric.put(to, all[to.index()], at, &pattern(here, to), one).expect("a valid put");
    }
    for from in fabric.dimensions().all() {
        fabric.flush(from).expect("lives");
    }
    // The counter is raised by all nodes; each of them is here until the exchange.
    fabric.wait_counter(1, before + nodes as u64, here, LONG).expect("all puts arrive");
    for from in fabric.dimensions().all() {
        let mut bytes = [0; 100];
        fabric.load(mine, from.index() as u64 * 100, &mut bytes).expect("own region");
        assert_eq!(bytes[..], pattern(from, here), "{from} to {here}");
    }
    everybody(fabric);
    for (node, &region) in fabric.dimensions().all().zip(&all) {
        let mut bytes = [0; 100];
        fabric.get(node, region, here.index() as u64 * 100, &mut bytes).expect("a valid get");
        assert_eq!(bytes[..], pattern(here, node), "{here} from {node}");
    }
    everybody(fabric);
    fabric.deregister(mine).expect("own region");
}

fn large_puts_from_a_region_arrive_whole<F: Fabric>(fabric: &mut F) {
    let (here, nodes) = (fabric.here(), fabric.dimensions().nodes());
    // Neither a multiple of a packet nor of a word.
    let length = 300_007;
    let before = fabric.counter(2).expect("exists");
    let source = fabric.register(length + 5);
    let (mine, all) = regions(fabric, length + 3);
    let byte = |node: NodeNumber, i: usize| (i * 7 + i / 4096 + node.index() * 13) as u8;
    let data: Vec<u8> = (0..length).map(|i| byte(here, i)).collect();
    fabric.store(source, 5, &data).expect("own region");
    let far = NodeNumber(((here.index() + nodes / 2) % nodes) as u16);
    let span = Span { region: source, offset: 5, length };
    let one = Notification::Counter { index: 2, add: 1 };
    fabric.put_region(far, all[far.index()], 3, span, one).expect("valid");
    let from = NodeNumber(((here.index() + nodes - nodes / 2) % nodes) as u16);
    fabric.wait_counter(2, before + 1, from, LONG).expect("arrives");
    let mut bytes = vec![0; length];
    fabric.load(mine, 3, &mut bytes).expect("own region");
    assert!(bytes.iter().enumerate().all(|(i, &found)| found == byte(from, i)), "{from} to {here}");
    fabric.flush(far).expect("lives");
    let mut back = vec![0; length];
    fabric.get(far, all[far.index()], 3, &mut back).expect("valid");
    assert!(back == data, "{here} from {far}");
    everybody(fabric);
}

fn one_initiator_reads_what_it_wrote<F: Fabric>(fabric: &mut F) {
    let (here, nodes) = (fabric.here(), fabric.dimensions().nodes());
    let (mine, all) = regions(fabric, INITIATOR_BYTES);
    let next = NodeNumber(((here.index() + 1) % nodes) as u16);
    check_initiator(fabric, next, all[next.index()]);
    everybody(fabric);
    fabric.deregister(mine).expect("own region");
}

/// Size of the region for [`check_initiator`].
pub const INITIATOR_BYTES: usize = 320_000;

/// Checks what an initiator alone can see, on a region of zero bytes that it may read and write. Also for hosts that are no
/// nodes.
///
/// # Panics
/// On a difference.
pub fn check_initiator<F: Fabric>(fabric: &mut F, to: NodeNumber, region: RegionId) {
    let none = Notification::None;
    // Neither a multiple of a packet nor of a word.
    let length = 300_007;
    let data: Vec<u8> = (0..length).map(|i| (i * 7 + i / 4096) as u8).collect();
    let mut found = vec![0; length];
    fabric.put(to, region, 3, &data, none).expect("valid");
    fabric.flush(to).expect("lives");
    fabric.get(to, region, 3, &mut found).expect("valid");
    assert!(found == data, "put and get differ");
    // Backwards, from and into regions of this initiator.
    let own = fabric.register(2 * length);
    let reversed: Vec<u8> = data.iter().rev().copied().collect();
    fabric.store(own, 0, &reversed).expect("own region");
    let from = Span { region: own, offset: 0, length };
    fabric.put_region(to, region, 3, from, none).expect("valid");
    fabric.flush(to).expect("lives");
    fabric.get_region(to, region, 3, Span { offset: length as u64, ..from }).expect("valid");
    fabric.load(own, length as u64, &mut found).expect("own region");
    assert!(found == reversed, "operations between regions differ");
    fabric.deregister(own).expect("own region");
    let gone = FabricError::NoRegion { node: fabric.here(), region: own.0 };
    assert_eq!(fabric.put_region(to, region, 3, from, none), Err(gone));
    for i in 1..=200_u64 {
        fabric.put(to, region, 310_000, &i.to_le_bytes(), none).expect("valid");
    }
    fabric.flush(to).expect("lives");
    assert_eq!(fabric.fetch_add(to, region, 310_000, u64::MAX), Ok(200), "puts keep their order");
    assert_eq!(fabric.compare_swap(to, region, 310_000, 199, 7), Ok(199));
    assert_eq!(fabric.compare_swap(to, region, 310_000, 199, 8), Ok(7));
    let mut word = [0; 8];
    fabric.get(to, region, 310_000, &mut word).expect("valid");
    assert_eq!(u64::from_le_bytes(word), 7);
    let size = INITIATOR_BYTES as u64;
    for (offset, length) in [(size, 1), (size - 7, 8), (u64::MAX, 1)] {
        let bounds = FabricError::Bounds { offset, length: length as u64, size };
        let put = fabric.put(to, region, offset, &vec![1; length], none).and_then(|()| fabric.flush(to));
        assert_eq!(put, Err(bounds));
        assert_eq!(fabric.get(to, region, offset, &mut vec![0; length]), Err(bounds));
    }
    assert_eq!(fabric.fetch_add(to, region, 4, 1), Err(FabricError::Unaligned { offset: 4 }));
    let wrong = RegionId(region.0 ^ 1);
    let unknown = FabricError::NoRegion { node: to, region: wrong.0 };
    assert_eq!(fabric.get(to, wrong, 0, &mut word), Err(unknown));
    let nobody = NodeNumber(u16::MAX);
    assert_eq!(fabric.put(nobody, region, 0, &[1], none), Err(FabricError::NodeLost { node: nobody }));
    let lost = Notification::Counter { index: u16::MAX, add: 1 };
    assert_eq!(fabric.put(to, region, 0, &[1], lost), Err(FabricError::NoCounter { index: u16::MAX }));
    // None of that harmed anything.
    fabric.flush(to).expect("lives");
    fabric.get(to, region, 3, &mut found).expect("valid");
    assert!(found == reversed, "a refused operation wrote");
}

fn puts_of_a_pair_keep_their_order<F: Fabric>(fabric: &mut F) {
    let (here, nodes) = (fabric.here(), fabric.dimensions().nodes());
    let (mine, all) = regions(fabric, nodes * 8);
    let next = NodeNumber(((here.index() + 1) % nodes) as u16);
    for i in 1..=200_u32 {
        let data = u64::from(i).to_le_bytes();
        let at = here.index() as u64 * 8;
        fabric.put(next, all[next.index()], at, &data, Notification::Event { tag: i }).expect("valid");
    }
    fabric.flush(next).expect("lives");
    everybody(fabric);
    let previous = NodeNumber(((here.index() + nodes - 1) % nodes) as u16);
    for i in 1..=200 {
        let event = fabric.poll_event().expect("an event of each put");
        assert_eq!((event.source, event.tag, event.length), (previous, i, 8));
    }
    assert_eq!((fabric.poll_event(), fabric.lost_events()), (None, 0));
    let mut last = [0; 8];
    fabric.load(mine, previous.index() as u64 * 8, &mut last).expect("own region");
    assert_eq!(u64::from_le_bytes(last), 200);
    everybody(fabric);
}

fn atomic_operations_lose_nothing<F: Fabric>(fabric: &mut F) {
    let nodes = fabric.dimensions().nodes() as u64;
    let (mine, all) = regions(fabric, 16);
    let root = NodeNumber(0);
    for _ in 0..100 {
        fabric.fetch_add(root, all[0], 0, 3).expect("valid");
        loop {
            let mut word = [0; 8];
            fabric.get(root, all[0], 8, &mut word).expect("valid");
            let old = u64::from_le_bytes(word);
            if fabric.compare_swap(root, all[0], 8, old, old + 1).expect("valid") == old {
                break;
            }
        }
    }
    everybody(fabric);
    if fabric.here() == root {
        let mut words = [0; 16];
        fabric.load(mine, 0, &mut words).expect("own region");
        assert_eq!(words[..8], (300 * nodes).to_le_bytes());
        assert_eq!(words[8..], (100 * nodes).to_le_bytes());
    }
    everybody(fabric);
}

fn wrong_operations_are_refused_and_harm_nothing<F: Fabric>(fabric: &mut F) {
    let (mine, all) = regions(fabric, 16);
    let to = NodeNumber(0);
    let none = Notification::None;
    let failure = |fabric: &mut F, region, offset, length| {
        let posted = fabric.put(to, region, offset, &vec![1; length], none);
        posted.and_then(|()| fabric.flush(to)).expect_err("refused")
    };
    let wrong = RegionId(all[0].0 ^ 1);
    assert_eq!(failure(fabric, wrong, 0, 1), FabricError::NoRegion { node: to, region: wrong.0 });
    for (offset, length) in [(16, 1), (9, 8), (u64::MAX, 1)] {
        let bounds = FabricError::Bounds { offset, length: length as u64, size: 16 };
        assert_eq!(failure(fabric, all[0], offset, length), bounds);
    }
    assert_eq!(fabric.fetch_add(to, all[0], 4, 1), Err(FabricError::Unaligned { offset: 4 }));
    let nobody = NodeNumber(u16::MAX);
    assert_eq!(fabric.put(nobody, all[0], 0, &[1], none), Err(FabricError::NodeLost { node: nobody }));
    everybody(fabric);
    let mut bytes = [9; 16];
    fabric.load(mine, 0, &mut bytes).expect("own region");
    assert_eq!(bytes, [0; 16]);
    everybody(fabric);
    // An ended region refuses the others.
    fabric.deregister(mine).expect("own region");
    everybody(fabric);
    assert_eq!(failure(fabric, all[0], 0, 1), FabricError::NoRegion { node: to, region: all[0].0 });
    everybody(fabric);
}

fn collectives_have_the_order_of_nodes<F: Fabric>(fabric: &mut F) {
    let (here, nodes) = (fabric.here(), fabric.dimensions().nodes());
    let mut collectives = Collectives::new(fabric, 16, LONG).expect("all nodes take part");
    for round in 0..50_u8 {
        let all = collectives.allgather(fabric, &[here.0 as u8, round]).expect("all live");
        let expected: Vec<u8> = (0..nodes).flat_map(|node| [node as u8, round]).collect();
        assert_eq!(all, expected);
    }
    collectives.barrier(fabric).expect("all live");
    let sums = collectives.sum(fabric, &[f64::from(here.0), 0.1]).expect("all live");
    let tenths = (0..nodes).fold(0.0, |sum, _| sum + 0.1);
    assert_eq!(sums, [(nodes * (nodes - 1) / 2) as f64, tenths]);
    assert!(matches!(collectives.allgather(fabric, &[0; 17]), Err(FabricError::Bounds { size: 16, .. })));
    everybody(fabric);
}

fn neighbours_exchange_messages_of_any_length<F: Fabric>(fabric: &mut F) {
    let here = fabric.here();
    let all: Vec<NodeNumber> = fabric.dimensions().all().collect();
    let message = |from: NodeNumber, to: NodeNumber, turn: usize| -> Vec<u8> {
        // From empty to several rounds, another length in each direction.
        let length = (from.index() * 37 + to.index() * 11 + turn * 29) % 100;
        (0..length).map(|i| (from.index() * 3 + to.index() * 5 + turn + i) as u8).collect()
    };
    // Twice, because counters keep their values.
    for _ in 0..2 {
        let mut neighbourhood = Neighbourhood::new(fabric, &all, 16, LONG).expect("all nodes take part");
        for turn in 0..20 {
            let messages = all.iter().map(|&to| message(here, to, turn)).collect();
            let received = neighbourhood.exchange(fabric, messages).expect("all nodes live");
            for (&from, received) in all.iter().zip(received) {
                assert_eq!(received, message(from, here, turn), "{from} to {here}, turn {turn}");
            }
        }
        everybody(fabric);
    }
}

fn all_nodes_exchange_messages_of_any_length<F: Fabric>(fabric: &mut F) {
    let (here, nodes) = (fabric.here(), fabric.dimensions().nodes());
    let all: Vec<_> = fabric.dimensions().all().collect();
    // Some are empty, some exceed the capacity.
    let message = |from: NodeNumber, to: NodeNumber, turn: usize| {
        let length = (from.index() * 37 + to.index() * 11 + turn * 5) % 150;
        vec![(from.index() + 16 * to.index() + turn) as u8; length.saturating_sub(20)]
    };
    let mut all_to_all = AllToAll::new(fabric, 64, 10, LONG).expect("all nodes take part");
    let mut collectives = Collectives::new(fabric, 16, LONG).expect("all nodes take part");
    for turn in 0..6 {
        let messages = all.iter().map(|&to| message(here, to, turn)).collect();
        let received = all_to_all.alltoallv(fabric, messages).expect("all nodes live");
        for (&from, received) in all.iter().zip(received) {
            assert_eq!(received, message(from, here, turn), "{from} to {here}, turn {turn}");
        }
        let own = message(here, NodeNumber(0), turn);
        let gathered = all_to_all.allgatherv(fabric, &own).expect("all nodes live");
        for (&from, gathered) in all.iter().zip(gathered) {
            assert_eq!(gathered, message(from, NodeNumber(0), turn), "{from} at {here}, turn {turn}");
        }
        let number = u64::from(here.0) + 3;
        for (reduction, expected) in [
            (Reduction::Sum, all.iter().map(|node| u64::from(node.0) + 3).sum()),
            (Reduction::Min, 3),
            (Reduction::Max, nodes as u64 + 2),
            (Reduction::Or, all.iter().fold(0, |bits, node| bits | (u64::from(node.0) + 3))),
        ] {
            let values = collectives.allreduce(fabric, reduction, &[number, 7]).expect("all nodes live");
            let seven = if reduction == Reduction::Sum { 7 * nodes as u64 } else { 7 };
            assert_eq!(values, [expected, seven], "{reduction:?}");
        }
    }
    everybody(fabric);
}
