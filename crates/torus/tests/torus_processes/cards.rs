//! Card memory as source and target of operations; the end of a card's lease.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_card::Card;
use millstream_card_abi::CardName;
use millstream_card_server::{CardConfig, Lifetime, serve};
use millstream_fabric::{Fabric, FabricError, Notification, RegionId, Span};
use millstream_torus::TorusNode;
use millstream_torus::launch::{LaunchError, Launcher};
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::NodeNumber;

use super::{LONG, application, launcher};

const BANK: u64 = 16 << 20;
/// Neither a multiple of a packet nor of a word.
const LENGTH: usize = 1_000_007;
/// Where the part of the card begins that applications register.
const AT: u64 = 1 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    let failed = |error: LaunchError| Failed::from(error.to_string());
    vec![
        Trial::test("card_and_host_memory_are_sources_and_targets", move || {
            card_and_host_memory_are_sources_and_targets().map_err(failed)
        }),
        Trial::test("a_lease_that_ends_fails_its_operations_only", move || {
            a_lease_that_ends_fails_its_operations_only().map_err(failed)
        }),
    ]
}

/// Emulated cards, one for each node. They end with this value.
struct Cards {
    pattern: String,
    _lifetime: std::io::PipeWriter,
}

impl Cards {
    fn start(test: &str, nodes: usize) -> Cards {
        let pattern = format!("torus-{}-{test}-{{node}}", std::process::id());
        let (lifetime, launcher) = std::io::pipe().expect("a pipe");
        for node in 0..nodes {
            let name = pattern.replace("{node}", &node.to_string()).parse().expect("valid");
            let mut config = CardConfig::new(name, BANK);
            config.lifetime = Lifetime::Launcher(lifetime.try_clone().expect("a descriptor").into());
            std::thread::spawn(|| serve(config).expect("an emulated card"));
        }
        Cards { pattern, _lifetime: launcher }
    }

    fn open(&self, node: NodeNumber) -> Card {
        let name: CardName = self.pattern.replace("{node}", &node.0.to_string()).parse().expect("valid");
        Card::open(&name, LONG).expect("runs")
    }
}

fn card_and_host_memory_are_sources_and_targets() -> Result<(), LaunchError> {
    let cards = Cards::start("memory", 8);
    let mut torus = Launcher { card: Some(cards.pattern.clone()), ..launcher("2x2x2") }.launch()?;
    torus.run(&application("card_and_host"))?;
    let total = TrafficCounters::total(&torus.finish()?);
    // Eight nodes, four combinations, put and get.
    let payload = 8 * 4 * 2 * LENGTH as u64;
    assert!(total.delivered_bytes >= payload, "{total}");
    // What exchanges of handles and barriers copy, and nothing of the payload.
    assert!(total.staged_bytes < payload / 100, "{total}: {} bytes staged", total.staged_bytes);
    assert_eq!((total.dropped_total(), total.malformed, total.refused), (0, 0, 0), "{total}");
    Ok(())
}

fn byte(node: NodeNumber, kind: usize, i: usize) -> u8 {
    (i * 7 + i / 4096 + node.index() * 13 + kind * 101) as u8
}

fn exchange(node: &mut TorusNode, region: RegionId) -> Vec<RegionId> {
    let all = node.exchange(&region.0.to_le_bytes(), LONG).expect("all live");
    all.iter().map(|bytes| RegionId(u64::from_le_bytes(bytes[..].try_into().expect("8 bytes")))).collect()
}

fn everybody(node: &mut TorusNode) {
    node.exchange(&[], LONG).expect("all live");
}

/// Each node writes to the opposite corner and reads back: from host and card, to host and card.
pub(crate) fn between_card_and_host_memory(node: &mut TorusNode) {
    let here = node.here();
    let far = NodeNumber(7 - here.0);
    let size = LENGTH + 9;
    let card = |node: &mut TorusNode, part: u64| {
        node.register_card(AT + part * (2 << 20), size).expect("the node has a card")
    };
    let sources = [node.register(size), card(node, 0)];
    let targets = [node.register(size), card(node, 1)];
    let remote = targets.map(|target| exchange(node, target)[far.index()]);
    let mut counted = 0;
    for (from, source) in sources.into_iter().enumerate() {
        for (to, target) in targets.into_iter().enumerate() {
            let kind = 2 * from + to;
            let data: Vec<u8> = (0..LENGTH).map(|i| byte(here, kind, i)).collect();
            node.store(source, 4, &data).expect("own region");
            let one = Notification::Counter { index: 1, add: 1 };
            let span = Span { region: source, offset: 4, length: LENGTH };
            node.put_region(far, remote[to], 9, span, one).expect("a valid put");
            counted += 1;
            node.wait_counter(1, counted, far, LONG).expect("arrives");
            let mut found = vec![0; LENGTH];
            node.load(target, 9, &mut found).expect("own region");
            let first_wrong = (0..LENGTH).find(|&i| found[i] != byte(far, kind, i));
            assert_eq!(first_wrong, None, "{far} to {here}: source {from}, target {to}");
            node.flush(far).expect("lives");
            // The source is overwritten, and read back from the target.
            node.store(source, 4, &vec![0; LENGTH]).expect("own region");
            let into = Span { region: source, offset: 1, length: LENGTH };
            node.get_region(far, remote[to], 9, into).expect("a valid get");
            node.load(source, 1, &mut found).expect("own region");
            assert!(found == data, "{here} from {far}: target {to}, source {from}");
            everybody(node);
        }
    }
    let beyond = node.register_card(BANK, 4096);
    assert_eq!(beyond, Err(FabricError::NoCard { node: here, offset: BANK, length: 4096 }));
}

/// Node 1's lease is revoked while node 0 writes to its card, and node 1 writes from it.
fn a_lease_that_ends_fails_its_operations_only() -> Result<(), LaunchError> {
    let cards = Cards::start("lease", 2);
    let mut torus = Launcher { card: Some(cards.pattern.clone()), ..launcher("2x1x1") }.launch()?;
    let card = cards.open(NodeNumber(1));
    // The next holder's memory must not change: the card clears it when a lease ends.
    let start = Instant::now();
    let revoke = std::thread::spawn(move || {
        while card.memory().read_array::<1>(AT).expect("card memory") == [0] {
            assert!(start.elapsed() < LONG, "no byte arrives in the card");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (epoch, _) =
            millstream_card_abi::lease::unpack(card.registers().lease_word().load(Ordering::Acquire));
        card.registers().lease_revoke().store(epoch.into(), Ordering::Release);
        card
    });
    torus.run(&application("lost_lease"))?;
    let card = revoke.join().expect("no panic");
    let total = TrafficCounters::total(&torus.finish()?);
    assert_eq!(total.dropped_total(), 0, "{total}");
    let mut memory = vec![0; LENGTH];
    card.memory().read(AT, &mut memory).expect("card memory");
    assert!(memory.iter().all(|&byte| byte == 0), "a node wrote to the card after the end of its lease");
    Ok(())
}

pub(crate) fn use_a_card_until_its_lease_ends(node: &mut TorusNode) {
    let here = node.here();
    let other = NodeNumber(1 - here.0);
    let host = node.register(LENGTH);
    node.store(host, 0, &vec![7; LENGTH]).expect("own region");
    // Another region than the source, which the other node's card would overwrite with zeros.
    let target = node.register(LENGTH);
    let hosts = exchange(node, target);
    let card = node.register_card(AT, LENGTH).expect("the node has a card");
    let cards = exchange(node, card);
    let start = Instant::now();
    let mut puts = 0;
    let error = loop {
        assert!(start.elapsed() < LONG, "the lease does not end");
        let (from, to) = if here.0 == 0 { (host, cards[1]) } else { (card, hosts[0]) };
        let span = Span { region: from, offset: 0, length: LENGTH };
        let put = node.put_region(other, to, 0, span, Notification::None);
        match put.and_then(|()| node.flush(other)) {
            Ok(()) => puts += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FabricError::Gone { .. }), "{here} after {puts} puts: {error}");
    // Everything else works: host memory of both, and node 0's card.
    let span = Span { region: host, offset: 0, length: LENGTH };
    node.put_region(other, hosts[other.index()], 0, span, Notification::None).expect("host memory");
    node.flush(other).expect("host memory");
    if here.0 == 1 {
        node.get_region(other, cards[0], 0, span).expect("node 0's card");
        let own = node.load(card, 0, &mut [0]);
        assert_eq!(own, Err(FabricError::Gone { node: here, region: card.0 }));
        assert!(matches!(node.register_card(AT, 4096), Err(FabricError::NoCard { .. })));
    } else {
        let gone = FabricError::Gone { node: other, region: cards[1].0 };
        assert_eq!(node.get(other, cards[1], 0, &mut [0; 9]), Err(gone));
        assert_eq!(node.fetch_add(other, cards[1], 8, 1), Err(gone));
    }
    everybody(node);
}
