//! Card memory as source and target of operations; the end of a card's lease.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_card::Card;
use millstream_card_abi::CardName;
use millstream_card_server::{CardConfig, Lifetime, serve};
use millstream_fabric::{Fabric, FabricError, Notification, RegionId, Span};
use millstream_rdma::device::DeviceSelector;
use millstream_torus::launch::{LaunchError, Launcher};
use millstream_torus::node::SeventhOptions;
use millstream_torus::seventh::GatewayOptions;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus::{OutsideHost, TorusNode};
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
        Trial::test("outside_hosts_use_published_cards", move || {
            outside_hosts_use_published_cards().map_err(failed)
        }),
        Trial::test("programs_on_card_memory_pass_the_conformance_suite", move || {
            programs_on_card_memory_conform().map_err(failed)
        }),
        Trial::test("a_lease_that_ends_fails_its_operations_only", move || {
            let (_cards, card) = operations_fail_alone("lease", |_, card| revoke(card)).map_err(failed)?;
            // The next holder's memory must not change: the card clears it when a lease ends.
            let mut memory = vec![0; LENGTH];
            card.memory().read(AT, &mut memory).expect("card memory");
            assert!(
                memory.iter().all(|&byte| byte == 0),
                "a node wrote to the card after the end of its lease"
            );
            Ok(())
        }),
        Trial::test("a_card_that_ends_fails_its_operations_only", move || {
            operations_fail_alone("ended", Cards::end).map_err(failed).map(drop)
        }),
    ]
}

/// Emulated cards, one for each node. They end with this value.
struct Cards {
    pattern: String,
    /// The card of a node ends with its writer.
    lifetimes: Vec<std::io::PipeWriter>,
}

impl Cards {
    fn start(test: &str, nodes: usize) -> Cards {
        let pattern = format!("torus-{}-{test}-{{node}}", std::process::id());
        let mut lifetimes = Vec::new();
        for node in 0..nodes {
            let (lifetime, launcher) = std::io::pipe().expect("a pipe");
            lifetimes.push(launcher);
            let name = pattern.replace("{node}", &node.to_string()).parse().expect("valid");
            let mut config = CardConfig::new(name, BANK);
            config.lifetime = Lifetime::Launcher(lifetime.into());
            std::thread::spawn(|| serve(config).expect("an emulated card"));
        }
        Cards { pattern, lifetimes }
    }

    /// Ends the card of the last node.
    fn end(&mut self, _: &Card) {
        drop(self.lifetimes.pop());
    }

    fn open(&self, node: NodeNumber) -> Card {
        let name: CardName = self.pattern.replace("{node}", &node.0.to_string()).parse().expect("valid");
        Card::open(&name, LONG).expect("runs")
    }
}

/// Ends the lease of a card's holder.
fn revoke(card: &Card) {
    let (epoch, _) =
        millstream_card_abi::lease::unpack(card.registers().lease_word().load(Ordering::Acquire));
    card.registers().lease_revoke().store(epoch.into(), Ordering::Release);
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

/// Nodes without programs: hosts outside write to the cards of all nodes, and read them.
fn outside_hosts_use_published_cards() -> Result<(), LaunchError> {
    let cards = Cards::start("published", 4);
    let seventh = SeventhOptions { listen: "127.0.0.1:0".to_owned(), key: 5 };
    let torus = Launcher {
        card: Some(cards.pattern.clone()),
        seventh: Some(seventh),
        node_arguments: vec!["--publish-card".into()],
        ..launcher("2x2x1")
    }
    .launch()?;
    let (address, key) = torus.gateway(NodeNumber(0)).expect("a seventh port");
    let options = GatewayOptions { address: address.to_owned(), key, device: DeviceSelector::Soft };
    let mut host = OutsideHost::connect(&options).expect("admitted");
    let data = |node: NodeNumber| -> Vec<u8> { (0..LENGTH).map(|i| byte(node, 3, i)).collect() };
    let mut regions = Vec::new();
    for node in host.dimensions().all() {
        let region = host.find(node, "card").expect("lives").expect("published");
        assert_eq!(region.size, BANK);
        host.put(node, region.region, AT, &data(node), Notification::None).expect("valid");
        regions.push(region.region);
    }
    for (node, &region) in host.dimensions().all().zip(&regions) {
        host.flush(node).expect("lives");
        let mut found = vec![0; LENGTH];
        host.get(node, region, AT, &mut found).expect("valid");
        assert!(found == data(node), "{node}");
    }
    // The leases end: so do the regions.
    let node = NodeNumber(3);
    revoke(&cards.open(node));
    let start = Instant::now();
    let gone = FabricError::Gone { node, region: regions[3].0 };
    while host.get(node, regions[3], AT, &mut [0]) != Err(gone) {
        assert!(start.elapsed() < LONG, "the lease does not end");
    }
    host.get(NodeNumber(2), regions[2], AT, &mut [0]).expect("another card");
    drop(host);
    torus.finish().map(drop)
}

/// The suite over regions of cards, whose puts and gets go from card to card.
fn programs_on_card_memory_conform() -> Result<(), LaunchError> {
    let cards = Cards::start("conformance", 8);
    let mut torus = Launcher { card: Some(cards.pattern.clone()), ..launcher("2x2x2") }.launch()?;
    torus.run(&application("conformance_on_card"))?;
    let total = TrafficCounters::total(&torus.finish()?);
    // Only the exchange of handles is staged in host memory.
    assert!(total.staged_bytes * 4 < total.delivered_bytes, "{total}: {} bytes staged", total.staged_bytes);
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
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
    // Kernels run on the card's memory, where it is.
    let words = std::array::from_fn(|i| 100 * u64::from(here.0) + i as u64);
    assert_eq!(node.run_kernel("null", &words), Ok(words));
    assert_eq!(node.card_offset(sources[0]), None);
    let at = node.card_offset(sources[1]).expect("card memory");
    node.store(sources[1], 0, &[3; 64]).expect("own region");
    let mut mixing = [0; 16];
    mixing[..3].copy_from_slice(&[at, 64, 5]);
    let results = node.run_kernel("mix", &mixing).expect("a kernel of every card");
    let mut found = [0; 64];
    node.load(sources[1], 0, &mut found).expect("own region");
    assert_eq!((results[0], found[56..].to_vec()), (5, results[1].to_le_bytes().to_vec()));
    assert_eq!(
        node.run_kernel("absent", &words),
        Err(FabricError::NoKernel { node: here, kernel: "absent" })
    );
    mixing[0] = BANK;
    let failed = node.run_kernel("mix", &mixing);
    let cause = "kernel accessed memory outside its banks";
    assert_eq!(failed, Err(FabricError::KernelFailed { node: here, kernel: "mix", cause, detail: BANK }));
    assert_eq!(node.run_kernel("null", &words), Ok(words));
    let beyond = node.register_card(BANK, 4096);
    assert_eq!(beyond, Err(FabricError::NoCard { node: here, offset: BANK, length: 4096 }));
}

/// Node 1's lease or card ends while node 0 writes to its card, and node 1 writes from it. Operations on the card fail, and
/// no others. Returns the cards and that of node 1.
fn operations_fail_alone(test: &str, end: fn(&mut Cards, &Card)) -> Result<(Cards, Card), LaunchError> {
    let mut cards = Cards::start(test, 2);
    let mut torus = Launcher { card: Some(cards.pattern.clone()), ..launcher("2x1x1") }.launch()?;
    let card = cards.open(NodeNumber(1));
    let start = Instant::now();
    let revoking = std::thread::spawn(move || {
        while card.memory().read_array::<1>(AT).expect("card memory") == [0] {
            assert!(start.elapsed() < LONG, "no byte arrives in the card");
            std::thread::sleep(Duration::from_millis(1));
        }
        end(&mut cards, &card);
        (cards, card)
    });
    torus.run(&application("lost_lease"))?;
    let (cards, card) = revoking.join().expect("no panic");
    let total = TrafficCounters::total(&torus.finish()?);
    assert_eq!(total.dropped_total(), 0, "{total}");
    Ok((cards, card))
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
    assert_eq!(node.run_kernel("null", &[7; 16]), Ok([7; 16]));
    // The first byte that arrives in node 1's card ends its lease.
    everybody(node);
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
        // The node process learns of the lease's end a moment after its put has failed.
        let gone = Err(FabricError::Gone { node: here, region: card.0 });
        while node.load(card, 0, &mut [0]) != gone {
            assert!(start.elapsed() < LONG, "the card's region is still there");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(node.register_card(AT, 4096), Err(FabricError::NoCard { .. })));
        assert_eq!(node.run_kernel("null", &[7; 16]), Err(FabricError::CardLost { node: here }));
    } else {
        let gone = FabricError::Gone { node: other, region: cards[1].0 };
        assert_eq!(node.get(other, cards[1], 0, &mut [0; 9]), Err(gone));
        assert_eq!(node.fetch_add(other, cards[1], 8, 1), Err(gone));
    }
    everybody(node);
}
