//! Networks of routers: delivery without deadlock, conservation, and neighbours that break the rules.

mod simulation;

use millstream_torus_core::header::Kind;
use millstream_torus_core::route::dependency::DependencyGraph;
use millstream_torus_core::route::dimension_order::{self, Arrival, Signs};
use millstream_torus_core::route::{ChannelName, NodeTable, UpDown, VirtualChannel};
use millstream_torus_core::router::{Action, Decision, DropCause, Port, Routing, SlotError, SlotRef};
use millstream_torus_core::{
    Axis, DeadSet, Dimensions, Direction, Epoch, Header, Link, NodeNumber, Route, Router, RouterOptions,
    Sign, TorusRouting,
};
use proptest::prelude::*;
use simulation::{Network, Random, Replies};

const ONE_SLOT: RouterOptions = RouterOptions { slots: 1, injection: 1 };
const FIRST: Epoch = Epoch(0);

fn torus(text: &str) -> Dimensions {
    text.parse().expect("valid dimensions")
}

#[derive(Clone, Copy, Debug)]
enum Traffic {
    Uniform,
    Neighbour,
    Tornado,
    AllToOne,
}

fn target(torus: &Dimensions, traffic: Traffic, from: NodeNumber, random: &mut Random) -> NodeNumber {
    let shifted = |by: fn(u16) -> u16| {
        let mut at = torus.coordinates(from);
        for (place, size) in at.0.iter_mut().zip(torus.sizes()) {
            *place = (*place + by(size)) % size;
        }
        torus.node(at).expect("within the torus")
    };
    match traffic {
        Traffic::Uniform => NodeNumber(random.below(torus.nodes()) as u16),
        Traffic::Neighbour => shifted(|size| 1 % size),
        Traffic::Tornado => shifted(|size| (size.max(1) - 1) / 2),
        Traffic::AllToOne => NodeNumber(0),
    }
}

/// Fills a network with traffic, and returns the number of packets.
fn fill<R: Routing + Clone>(network: &mut Network<R>, traffic: Traffic, each: usize, seed: u64) -> u32 {
    let (torus, mut random) = (network.torus, Random::new(seed));
    let mut planned = 0;
    for from in torus.all() {
        for i in 0..each {
            let epoch = *network.configurations.keys().nth(i % network.configurations.len()).expect("some");
            let to = target(&torus, traffic, from, &mut random);
            planned += u32::from(network.plan(from, to, epoch));
        }
    }
    planned
}

fn assert_all_delivered<R: Routing + Clone>(network: &Network<R>, planned: u32) {
    network.check_conservation();
    let total = network.totals();
    assert!(network.delivered.iter().all(|&times| times == 1), "{total:?}");
    assert_eq!(total.dropped_total(), 0);
    assert_eq!(total.delivered, u64::from(planned + network.answered));
}

fn traffic() -> impl Strategy<Value = Traffic> {
    prop_oneof![
        Just(Traffic::Uniform),
        Just(Traffic::Neighbour),
        Just(Traffic::Tornado),
        Just(Traffic::AllToOne)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// One slot per virtual channel, random arbitration, delays, faults, packets of two epochs at once: every packet
    /// arrives once, and conservation holds after every pass.
    #[test]
    fn every_packet_arrives_with_one_slot(
        (x, y, z) in (1..=6_u16, 1..=5_u16, 1..=3_u16),
        traffic in traffic(),
        old in proptest::collection::vec((any::<u16>(), 0..3_usize), 0..4),
        new in proptest::collection::vec((any::<u16>(), 0..3_usize), 0..4),
        adversarial: bool,
        slots in 1..4_u16,
        seed: u64,
    ) {
        let torus = Dimensions::new([x, y, z]).expect("small");
        let dead = |links: &[(u16, usize)]| {
            let mut dead = DeadSet::new();
            for &(raw, axis) in links {
                let from = NodeNumber(raw % torus.nodes() as u16);
                let plus = Direction::new(Axis::ALL[axis], Sign::Plus);
                torus.link(from, plus).into_iter().for_each(|link| dead.kill_link(link));
            }
            dead
        };
        // The links still work: routes avoid them already, or not yet again.
        let epochs = [(Epoch(6), dead(&old)), (Epoch(7), dead(&new))];
        let options = RouterOptions { slots, injection: 2 };
        let mut network = Network::new(torus, options, Replies::Reserved, seed, &epochs, |both| both);
        let planned = fill(&mut network, traffic, 6, seed);
        network.run(adversarial, Network::check_conservation);
        assert_all_delivered(&network, planned);
        prop_assert_eq!(network.answered, planned);
    }
}

/// Faulty routing: every packet of layer A stays on virtual channel 0.
#[derive(Clone)]
struct NoDateline(TorusRouting);

impl Routing for NoDateline {
    fn decide(&self, header: &Header, arrival: Option<Arrival>) -> Decision {
        match self.0.decide(header, arrival) {
            Decision::Forward(direction, VirtualChannel::BEHIND_DATELINE) => {
                Decision::Forward(direction, VirtualChannel::BEFORE_DATELINE)
            }
            other => other,
        }
    }
}

#[test]
fn without_a_dateline_a_ring_of_five_deadlocks() {
    let torus = torus("5x1x1");
    let epochs = [(FIRST, DeadSet::new())];
    for adversarial in [false, true] {
        let mut deadlocks = 0;
        for seed in 0..10 {
            let mut right = Network::new(torus, ONE_SLOT, Replies::None, seed, &epochs, |both| both);
            let planned = fill(&mut right, Traffic::Tornado, 20, seed);
            right.run(adversarial, |_| ());
            assert_all_delivered(&right, planned);

            let mut faulty = Network::new(torus, ONE_SLOT, Replies::None, seed, &epochs, NoDateline);
            fill(&mut faulty, Traffic::Tornado, 20, seed);
            faulty.run(adversarial, |_| ());
            faulty.check_conservation();
            assert_eq!(faulty.totals().dropped_total(), 0);
            deadlocks += u32::from(faulty.delivered.contains(&0));
        }
        assert!(deadlocks > 0, "adversarial = {adversarial}");
    }
}

/// Faulty routing: layer B of all epochs is on one virtual channel.
#[derive(Clone)]
struct OneLayerB(TorusRouting);

impl Routing for OneLayerB {
    fn decide(&self, header: &Header, arrival: Option<Arrival>) -> Decision {
        let own = VirtualChannel::up_down(header.epoch);
        let in_layer_b = header.vc.0 == 2 || header.vc.0 == 3;
        let true_header = Header { vc: if in_layer_b { own } else { header.vc }, ..*header };
        match self.0.decide(&true_header, arrival) {
            Decision::Forward(direction, vc) if vc == own => Decision::Forward(direction, VirtualChannel(2)),
            other => other,
        }
    }
}

/// Old tables have root 0, new ones have another. The packets are those whose routes form a cycle of dependencies.
#[test]
fn two_epochs_on_one_virtual_channel_deadlock_when_the_root_died() {
    let torus = torus("3x3x2");
    let mut dead = DeadSet::new();
    dead.kill_node(NodeNumber(0));
    let epochs = [(Epoch(2), DeadSet::new()), (Epoch(3), dead)];
    let graphs = epochs.clone().map(|(epoch, dead)| (epoch, UpDown::new(&torus, &dead)));
    let mut dependencies = DependencyGraph::new();
    let mut routes = Vec::new();
    for (epoch, graph) in &graphs {
        for to in torus.all() {
            let table = graph.toward(to);
            for from in torus.all().filter(|&from| from != to) {
                let Some(channels) = table.channels(graph, from, *epoch) else { continue };
                let on_one: Vec<_> =
                    channels.iter().map(|&c| ChannelName { vc: VirtualChannel(2), ..c }).collect();
                dependencies.add_route(&on_one);
                routes.push((from, to, *epoch, on_one));
            }
        }
    }
    let cycle = dependencies.cycle().expect("the union has a cycle");
    let needed: Vec<_> = (0..cycle.len())
        .map(|i| {
            let step = [cycle[i], cycle[(i + 1) % cycle.len()]];
            (routes.iter())
                .filter(|(.., route)| route.windows(2).any(|pair| pair == step))
                // The route that reaches the cycle soonest fills its channel soonest.
                .min_by_key(|(.., route)| route.iter().position(|&c| c == step[0]))
                .expect("a dependency comes from a route")
        })
        .collect();
    let load = |network: &mut dyn FnMut(NodeNumber, NodeNumber, Epoch, Route)| {
        for _ in 0..30 {
            for (from, to, epoch, route) in &needed {
                network(*from, *to, *epoch, Route::UpDown { hops: route.len() as u32 });
            }
        }
    };
    let mut deadlocks = 0;
    for seed in 0..40 {
        let mut right = Network::new(torus, ONE_SLOT, Replies::None, seed, &epochs, |both| both);
        load(&mut |from, to, epoch, route| right.plan_route(from, to, epoch, route));
        right.run(true, |_| ());
        assert_all_delivered(&right, 30 * needed.len() as u32);

        let mut faulty = Network::new(torus, ONE_SLOT, Replies::None, seed, &epochs, OneLayerB);
        load(&mut |from, to, epoch, route| faulty.plan_route(from, to, epoch, route));
        faulty.run(true, |_| ());
        faulty.check_conservation();
        assert_eq!(faulty.totals().dropped_total(), 0);
        deadlocks += u32::from(faulty.delivered.contains(&0));
    }
    assert!(deadlocks > 0);
}

/// Arrivals that wait for room for their answer tie arrivals to departures.
#[test]
fn answers_that_hold_a_slot_deadlock() {
    let torus = torus("3x3x1");
    let epochs = [(FIRST, DeadSet::new())];
    let mut deadlocks = 0;
    for seed in 0..10 {
        let mut right = Network::new(torus, ONE_SLOT, Replies::Reserved, seed, &epochs, |both| both);
        let planned = fill(&mut right, Traffic::Uniform, 30, seed);
        right.run(true, |_| ());
        assert_all_delivered(&right, planned);

        let mut faulty = Network::new(torus, ONE_SLOT, Replies::HoldSlot, seed, &epochs, |both| both);
        fill(&mut faulty, Traffic::Uniform, 30, seed);
        faulty.run(true, |_| ());
        faulty.check_conservation();
        assert_eq!(faulty.totals().dropped_total(), 0);
        deadlocks += u32::from(faulty.answered < planned);
    }
    assert!(deadlocks > 0);
}

#[test]
fn packets_for_a_dead_link_are_dropped_and_counted() {
    let torus = torus("4x1x1");
    let epochs = [(FIRST, DeadSet::new())];
    let mut network = Network::new(torus, ONE_SLOT, Replies::None, 1, &epochs, |both| both);
    let plus = Direction::new(Axis::X, Sign::Plus);
    // Two hops; the second link dies.
    for _ in 0..5 {
        let route = Route::DimensionOrder { signs: Signs::default(), hops: 2 };
        network.plan_route(NodeNumber(0), NodeNumber(2), FIRST, route);
    }
    network.routers[1].set_link(plus, false);
    network.run(false, Network::check_conservation);
    let dropped = network.routers[1].counters().dropped;
    assert_eq!(dropped[DropCause::DeadLink as usize], 5);
    assert!(network.delivered.iter().all(|&times| times == 0));
}

fn router(torus: &Dimensions, node: u16, options: RouterOptions) -> Router<u32> {
    let here = NodeNumber(node);
    let mut routing = TorusRouting::new(*torus, here);
    routing.install(FIRST, NodeTable::new(&UpDown::new(torus, &DeadSet::new()), here));
    let mut router = Router::new(routing, options);
    for direction in Direction::ALL {
        router.set_link(direction, torus.neighbour(here, direction).is_some());
    }
    router
}

/// Node 1 of a ring of five; its neighbours are nodes 0 (side −x) and 2 (side +x).
fn victim() -> Router<u32> {
    router(&torus("5x1x1"), 1, RouterOptions { slots: 2, injection: 4 })
}

const MINUS_X: Direction = Direction { axis: Axis::X, sign: Sign::Minus };
const PLUS_X: Direction = Direction { axis: Axis::X, sign: Sign::Plus };

#[test]
fn a_neighbour_without_credit_is_refused() {
    let mut router = victim();
    let header = Header::new(Kind::Put, NodeNumber(0), NodeNumber(1));
    assert_eq!(router.handle_packet(MINUS_X, 1, header), Err(SlotError::Order { found: 1, expected: 0 }));
    assert_eq!(router.handle_packet(MINUS_X, 0, header), Ok(()));
    assert_eq!(router.handle_packet(MINUS_X, 1, header), Ok(()));
    assert_eq!(router.handle_packet(MINUS_X, 0, header), Err(SlotError::Overrun { slots: 2 }));
    let wrong = Header { vc: VirtualChannel(9), ..header };
    assert_eq!(router.handle_packet(MINUS_X, 0, wrong), Err(SlotError::UnknownChannel { vc: 9 }));
    assert_eq!(router.counters().received, 2);
}

#[test]
fn credits_beyond_the_slots_are_refused() {
    let mut router = victim();
    let vc = VirtualChannel::BEFORE_DATELINE;
    assert!(router.handle_credit(PLUS_X, vc, 1).is_err());
    assert_eq!(router.credits(PLUS_X, vc), 2);
    let header = Header::new(Kind::Put, NodeNumber(1), NodeNumber(2));
    for _ in 0..2 {
        assert_eq!(router.inject(Port::Local, header, 0), Ok(()));
        assert!(router.transmit(PLUS_X).is_some());
    }
    assert!(router.transmit(PLUS_X).is_none());
    assert!(router.handle_credit(PLUS_X, vc, 3).is_err());
    assert_eq!(router.handle_credit(PLUS_X, vc, 2), Ok(()));
    // An older word arrives late.
    assert_eq!(router.handle_credit(PLUS_X, vc, 1), Ok(()));
    assert_eq!(router.credits(PLUS_X, vc), 2);
}

#[test]
fn a_slot_is_released_once_and_only_after_its_packet_left() {
    let mut router = victim();
    let header = Header::new(Kind::Put, NodeNumber(0), NodeNumber(2));
    router.handle_packet(MINUS_X, 0, header).expect("a free slot");
    let slot = SlotRef { side: MINUS_X, vc: header.vc, index: 0 };
    assert_eq!(router.release(slot), Err(SlotError::NotTaken { index: 0 }));
    assert!(router.transmit(PLUS_X).is_some());
    assert_eq!(router.reset_link(MINUS_X), Err(SlotError::InUse));
    assert_eq!(router.release(slot), Ok(()));
    assert_eq!(router.release(slot), Err(SlotError::NotTaken { index: 0 }));
    assert_eq!(router.reset_link(MINUS_X), Ok(()));
}

/// A neighbour claims packets of sources whose routes do not lead through it.
#[test]
fn a_forged_source_off_the_route_is_dropped() {
    let mut router = victim();
    // Node 2 cannot be the last hop of a route in positive direction to node 1.
    let plus = Header::new(Kind::Put, NodeNumber(0), NodeNumber(1));
    router.handle_packet(PLUS_X, 0, plus).expect("a free slot");
    let foreign = Header::new(Kind::Put, NodeNumber(900), NodeNumber(1));
    router.handle_packet(MINUS_X, 0, foreign).expect("a free slot");
    let stale = Header { epoch: Epoch(5), ..plus };
    router.handle_packet(MINUS_X, 1, stale).expect("a free slot");
    let mut causes = Vec::new();
    while let Some(action) = router.poll() {
        match action {
            Action::Drop { cause, .. } => causes.push(cause),
            Action::Deliver { header, .. } => panic!("delivered {header:?}"),
        }
    }
    assert_eq!(causes, [DropCause::OffRoute, DropCause::Malformed, DropCause::StaleEpoch]);
}

fn any_header() -> impl Strategy<Value = Header> {
    (0..8_u8, 0..12_u16, 0..12_u16, 0..5_u8, any::<u16>(), 0..3_u32, any::<bool>()).prop_map(
        |(signs, source, target, vc, hops, epoch, diagnosis)| {
            let kind = if diagnosis { Kind::Diagnosis } else { Kind::Put };
            let mut header = Header::new(kind, NodeNumber(source), NodeNumber(target));
            header.signs = Signs::from_bits(signs).expect("below 8");
            header.vc = VirtualChannel(vc);
            header.hops = hops % 12;
            header.epoch = Epoch(epoch);
            header
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A neighbour that sends any headers in any slots, and any credits: each is delivered, forwarded, dropped with a
    /// cause or refused, counters balance, and the other links keep their credits.
    #[test]
    fn a_lying_neighbour_harms_no_third(frames in proptest::collection::vec((any_header(), 0..3_u16, any::<u32>()), 1..60)) {
        let torus = torus("3x2x2");
        let mut router = router(&torus, 1, RouterOptions { slots: 2, injection: 2 });
        for (header, slot, freed) in frames {
            let _ = router.handle_packet(MINUS_X, slot, header);
            let _ = router.handle_credit(MINUS_X, header.vc, freed);
            while let Some(action) = router.poll() {
                if let Action::Deliver { origin: millstream_torus_core::router::Origin::Slot(slot), .. } = action {
                    prop_assert_eq!(router.release(slot), Ok(()));
                }
            }
            let counters = router.counters();
            let inside = router.waiting();
            prop_assert_eq!(
                counters.received,
                counters.delivered + counters.dropped_total() + counters.transmitted + inside
            );
        }
        // An honest packet of another side still passes.
        let y = Direction::new(Axis::Y, Sign::Plus);
        let honest = Header::new(Kind::Put, NodeNumber(4), NodeNumber(1));
        let honest =
            Header { signs: dimension_order::shortest(&torus, honest.source, honest.target), ..honest };
        let before = router.counters().delivered;
        prop_assert_eq!(router.handle_packet(y, 0, honest), Ok(()));
        prop_assert_eq!(router.counters().delivered, before + 1);
    }
}

#[test]
fn transit_goes_before_injection_when_a_ring_is_more_than_half_full() {
    let mut router = victim();
    let own = Header::new(Kind::Put, NodeNumber(1), NodeNumber(2));
    let transit = Header::new(Kind::Put, NodeNumber(0), NodeNumber(2));
    for i in 0..2 {
        router.inject(Port::Local, own, 7).expect("room");
        router.handle_packet(MINUS_X, i, transit).expect("a free slot");
    }
    // Two of two slots wait: transit. One of two: round robin lets the injected packet go.
    assert_eq!(router.transmit(PLUS_X).expect("a credit").header.source, NodeNumber(0));
    assert_eq!(router.transmit(PLUS_X).expect("a credit").header.source, NodeNumber(1));
}

#[test]
fn a_dead_link_is_named_at_injection() {
    let mut router = victim();
    router.set_link(PLUS_X, false);
    let link = Link { from: NodeNumber(1), axis: Axis::X };
    assert_eq!(torus("5x1x1").link(NodeNumber(1), PLUS_X), Some(link));
    router.inject(Port::Local, Header::new(Kind::Put, NodeNumber(1), NodeNumber(2)), 3).expect("accepted");
    assert!(matches!(router.poll(), Some(Action::Drop { cause: DropCause::DeadLink, .. })));
}
