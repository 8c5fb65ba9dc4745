//! Engine and components against analytic results.

use millstream_model::Parameters;
use millstream_model::benchmarks::dma::{self, DmaEngine, DmaTest};
use millstream_model::benchmarks::hbm::{AccessPattern, read};
use millstream_model::benchmarks::pcie_bench::{self, nfp6000};
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::component::pcie::{raw_rate, read_ceiling, write_ceiling};
use millstream_model::engine::{
    BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Picos, Simulation,
};
use millstream_model::path::Verb;
use millstream_model::path::{data_path, hbm};
use millstream_model::sites::{SHIPPED, shipped, shipped_with};
use millstream_site::schema::{Generation, PayloadSize, PcieLanes, PcieLink};
use proptest::prelude::*;

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

#[derive(Default)]
struct Sink {
    arrivals: Vec<(Picos, u64)>,
    bytes: u64,
}

impl Endpoint for Sink {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        self.arrivals.push((context.now(), packet.tag));
        self.bytes += u64::from(packet.size);
    }
}

struct Source {
    to: millstream_model::engine::Route<Internal>,
    sizes: Vec<u32>,
}

impl Endpoint for Source {
    fn receive(&mut self, _port: u16, _packet: Packet, _context: &mut Context<'_>) {}
    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        for (tag, &size) in self.sizes.iter().enumerate() {
            context.send(self.to, Packet::new(0, size, tag as u64));
        }
    }
}

/// Sends packets over channels; returns the arrivals and the bytes received.
fn over(lines: &[Channel], sizes: Vec<u32>) -> (Vec<(Picos, u64)>, u64, u64) {
    let mut simulation = Simulation::new(9);
    let ids: Vec<_> = lines.iter().map(|line| simulation.add_channel::<Internal>(line.clone())).collect();
    let sink = simulation.add_endpoint(Sink::default());
    let port = simulation.port(sink, 0);
    let to = simulation.route(&ids, port);
    let source = simulation.add_endpoint(Source { to, sizes });
    simulation.set_timer(source, Picos::ZERO, 0);
    simulation.run(Picos(u64::MAX));
    let end: &Sink = simulation.get(sink);
    (end.arrivals.clone(), end.bytes, simulation.events())
}

#[test]
fn a_pipeline_runs_at_the_rate_of_its_slowest_channel() {
    // 1000 B at 1, 2 and 0.5 GB/s take 1, 0.5 and 2 µs; the delay is 100 ns per channel.
    let lines = [1.0, 2.0, 0.5]
        .map(|rate| Channel::new("l", BytesPerSecond::gigabytes(rate)).latency(Picos(100_000)));
    let (arrivals, ..) = over(&lines, vec![1000; 10]);
    assert_eq!(arrivals[0].0, Picos(3_500_000 + 300_000));
    assert_eq!(arrivals[9].0, Picos(3_500_000 + 300_000 + 9 * 2_000_000));
}

#[test]
fn credits_throttle_a_fast_channel_before_a_slow_one() {
    let fast = Channel::new("fast", BytesPerSecond::gigabytes(10.0));
    let slow = Channel::new("slow", BytesPerSecond::gigabytes(1.0)).capacity(2000);
    let (arrivals, bytes, _) = over(&[fast, slow], vec![1000; 100]);
    assert_eq!((arrivals.len(), bytes), (100, 100_000));
    assert_eq!(arrivals[99].0, Picos(100_000 + 100 * 1_000_000));
}

fn slot(generation: u8, lanes: u8, payload: u32) -> PcieLink {
    PcieLink {
        generation: Generation(generation),
        lanes: PcieLanes(lanes),
        max_payload: PayloadSize(payload),
        max_read_request: PayloadSize(512),
    }
}

#[test]
fn pcie_bandwidth_is_the_payload_share() {
    assert!(
        near(raw_rate(3, 8).as_gigabits(), 63.015, 1e-4) && near(raw_rate(2, 8).as_gigabits(), 32.0, 1e-9)
    );
    // A DMA engine without limits reaches the bounds of rows P07 and P08.
    let p = Parameters::shipped();
    let fast = DmaEngine {
        workers: 256,
        tags: 256,
        read_issue: Picos(1),
        write_issue: Picos(1),
        variation: 0.0,
        fifo: 1 << 16,
        write_rate: BytesPerSecond(f64::INFINITY),
        internal: BytesPerSecond::gigabytes(200.0),
        ..nfp6000(&p, "nfp6000.dma.overhead")
    };
    let mut host = pcie_bench::host(&p, "haswell-ep", false);
    host.memory.rate = BytesPerSecond::gigabytes(200.0);
    for (generation, lanes, payload) in [(3, 16, 256), (3, 8, 256), (2, 8, 128)] {
        let link = slot(generation, lanes, payload);
        host.memory.max_completion = payload;
        for size in [512u32, 2048, 4096] {
            let requests = u64::from(size);
            let write = dma::bandwidth(&fast, &host, &link, DmaTest::Write, size);
            assert!(
                near(write.0, write_ceiling(&link, requests).0 * host.efficiency, 0.01),
                "gen{generation} x{lanes} write {size}"
            );
            let read = dma::bandwidth(&fast, &host, &link, DmaTest::Read, size);
            assert!(
                near(read.0, read_ceiling(&link, requests).0 * host.efficiency, 0.01),
                "gen{generation} x{lanes} read {size}"
            );
        }
    }
}

#[test]
fn infiniband_bandwidth_is_the_payload_share() {
    // Rows I110 to I124: rate · MTU / (MTU + 26), less the RETH of each message's first packet.
    let p = Parameters::shipped();
    for (rate, data) in [("FDR", 54.545), ("EDR", 100.0)] {
        for mtu in [256u32, 1024, 4096] {
            let site = shipped_with("edr-pair", &[("link.0.mtu", &mtu.to_string())]);
            let mut path = data_path(&site, &p, "node0", "node1").unwrap();
            path.rate = BytesPerSecond::gigabits(data);
            let size = 1 << 18;
            let measured = bandwidth(&path, Verb::Write, size, 128, false).rate.as_gigabits();
            let ceiling = data * f64::from(mtu) / f64::from(mtu + 26);
            assert!(
                near(measured, ceiling, 0.005) && measured <= ceiling,
                "{rate} {mtu}: {measured} of {ceiling}"
            );
        }
    }
}

#[test]
fn hbm_is_as_fast_as_its_port_less_refresh() {
    let p = Parameters::shipped();
    let mut memory = hbm(&p, None);
    for clock in [450e6, 250e6] {
        memory.rate = BytesPerSecond(clock * 32.0);
        let sequential = read(&memory, AccessPattern::Sequential, 1, 256);
        assert!(near(sequential.0, memory.rate.0 * memory.refresh_share(), 0.01), "{clock}: {sequential:?}");
        let random = read(&memory, AccessPattern::Random, 1, 64);
        assert!(random.0 < sequential.0 && read(&memory, AccessPattern::Random, 2, 64).0 < random.0);
    }
}

#[test]
fn a_read_takes_a_full_round_trip() {
    let p = Parameters::shipped();
    let site = shipped("edr-pair");
    let path = data_path(&site, &p, "node0", "node1").unwrap();
    let write = latency(&path, Verb::Write, 8);
    let read = latency(&path, Verb::Read, 8);
    assert!(read > write, "a READ is a whole round trip: {read} against {write}");
    let sizes = [64, 512, 4096, 32768, 1 << 20].map(|size| latency(&path, Verb::Write, size));
    assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]), "{sizes:?}");
}

#[test]
fn shipped_sites_are_found_by_name() {
    assert!(SHIPPED.iter().all(|(name, _)| !shipped(name).hosts.is_empty()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any channels, sizes and buffers: all packets arrive once and in order, equal input gives equal events, and no
    /// flow exceeds its slowest channel.
    #[test]
    fn no_flow_is_above_its_link(
        lines in prop::collection::vec((1u32..400, 0u32..64, 0u64..500_000, 1u64..20_000), 1..6),
        sizes in prop::collection::vec(1u32..5000, 1..60),
    ) {
        let lines: Vec<Channel> = lines
            .into_iter()
            .map(|(rate, overhead, latency, room)| {
                let line = Channel::new("l", BytesPerSecond::gigabytes(f64::from(rate) / 10.0));
                line.overhead(overhead).latency(Picos(latency)).capacity(room)
            })
            .collect();
        let (arrivals, bytes, events) = over(&lines, sizes.clone());
        prop_assert_eq!(arrivals.len(), sizes.len());
        prop_assert!(arrivals.iter().enumerate().all(|(i, (_, tag))| *tag == i as u64));
        let slowest = lines.iter().map(|l| l.rate.0).fold(f64::INFINITY, f64::min);
        let end = arrivals[arrivals.len() - 1].0.seconds();
        // Rounding: one picosecond per packet and channel.
        let rounding = 1e-12 * (sizes.len() * lines.len()) as f64;
        prop_assert!(bytes as f64 / (end + rounding) <= slowest * (1.0 + 1e-9), "{} over {}", bytes as f64 / end, slowest);
        prop_assert_eq!(over(&lines, sizes), (arrivals, bytes, events));
    }

    /// For any parameters within their ranges, verbs stay below link and PCIe.
    #[test]
    fn verbs_stay_below_link_and_pcie(seed in 0u64..1000, bits in 6u32..20, both: bool) {
        let p = Parameters::shipped().sample(seed);
        let site = shipped("lhcb-pair-fdr-e5");
        let path = data_path(&site, &p, "node0", "node1").unwrap();
        let measured = bandwidth(&path, Verb::Write, 1 << bits, 64, both).rate.0 / if both { 2.0 } else { 1.0 };
        let link = path.rate.0 * f64::from(path.mtu) / f64::from(path.mtu + 26);
        // Opposing traffic may delay the first completion by two of some 300 messages more than the last one.
        let excess = if both { 2.0 / 300.0 } else { 0.0 };
        prop_assert!(measured <= link * (1.0 + excess), "{measured} over a link of {link}");
        // The adapter's buffer may hold payload that PCIe has not carried yet.
        prop_assert!(measured <= millstream_model::path::pcie_ceiling(&path, 1).0 * 1.02);
    }
}

mod torus {
    use super::{near, prop_assert, prop_assert_eq, proptest};
    use millstream_model::benchmarks::torus::{Torus, all_to_all, small_packet_latency};
    use millstream_model::engine::{BytesPerSecond, Picos};
    use millstream_torus_core::DeadSet;

    fn torus(dimensions: &[u32]) -> Torus {
        Torus {
            dimensions: dimensions.to_vec(),
            rate: BytesPerSecond::gigabytes(2.6),
            packet_size: 4096,
            buffer: 40_000,
            hop_latency: Picos::from_nanos(250.0),
            end_latency: Picos::from_nanos(3000.0),
            cores: None,
            dead: DeadSet::new(),
        }
    }

    #[test]
    fn bisection_bandwidth_is_analytic() {
        // 4 × 4 × 4: the cut crosses 16 rings at two links of two directions each.
        assert!(near(torus(&[4, 4, 4]).bisection().0, 64.0 * 2.6e9, 1e-12));
        assert!(near(torus(&[2]).bisection().0, 2.0 * 2.6e9, 1e-12));
    }

    #[test]
    fn all_to_all_reaches_60_percent_of_the_bisection() {
        let torus = torus(&[4, 4]);
        let result = all_to_all(&torus, 1 << 18);
        // Half of all bytes cross the bisection.
        let crossing = result.rate.0 * 8.0 / 15.0;
        assert!(crossing <= torus.bisection().0 && crossing >= 0.6 * torus.bisection().0, "{result:?}");
        assert_eq!(result, all_to_all(&torus, 1 << 18));
    }

    #[test]
    fn latency_grows_with_the_hops() {
        let torus = torus(&[4, 4, 4]);
        let latency = |to| small_packet_latency(&torus, 0, to).unwrap();
        let hop = latency(1) - torus.end_latency;
        // The opposite corner is two hops away in each dimension.
        assert_eq!(latency(42), torus.end_latency + hop * 6);
        assert_eq!(latency(3), latency(1));
    }

    proptest! {
        #[test]
        fn routes_are_shortest(x in 1u32..6, y in 1u32..6, z in 1u32..6, a: u16, b: u16) {
            let torus = torus(&[x, y, z]);
            let (a, b) = (usize::from(a) % torus.nodes(), usize::from(b) % torus.nodes());
            let hops = torus.hops(a, b).unwrap();
            prop_assert!(hops.len() as u32 <= x / 2 + y / 2 + z / 2);
            prop_assert!(hops.windows(2).all(|pair| pair[0].dimension <= pair[1].dimension));
            prop_assert_eq!(hops.is_empty(), a == b);
            let entries = hops.iter().filter(|hop| hop.enters_ring).count();
            prop_assert!(entries <= 3);
        }
    }
}

mod flows {
    use super::{near, prop, prop_assert, proptest};
    use millstream_model::Parameters;
    use millstream_model::benchmarks::perftest::bandwidth;
    use millstream_model::engine::{BytesPerSecond, Picos};
    use millstream_model::flow::{FlowSimulation, all_to_all};
    use millstream_model::path::data_path;
    use millstream_model::path::{IB_HEADERS, Verb};
    use millstream_model::sites::shipped;

    #[test]
    fn links_are_shared_max_min_fairly() {
        // Two flows share a link of 2 GB/s; one of them also uses a link of 0.5 GB/s. Rates: 1.5 and 0.5.
        let mut flow_simulation = FlowSimulation::new();
        let (wide, narrow) = (
            flow_simulation.add_link(BytesPerSecond::gigabytes(2.0)),
            flow_simulation.add_link(BytesPerSecond::gigabytes(0.5)),
        );
        let one = flow_simulation.add_path(&[wide], Picos::ZERO);
        let two = flow_simulation.add_path(&[wide, narrow], Picos::from_nanos(7.0));
        flow_simulation.start_flow(one, 1_500_000, 1);
        flow_simulation.start_flow(two, 1_500_000, 2);
        assert!(
            near(flow_simulation.rate(one).0, 1.5e9, 1e-9) && near(flow_simulation.rate(two).0, 0.5e9, 1e-9)
        );
        let first = flow_simulation.next_completion().unwrap();
        assert!(first.1 == 1 && near(first.0.seconds(), 1e-3, 1e-6), "{first:?}");
        let second = flow_simulation.next_completion().unwrap();
        assert!(second.1 == 2 && near(second.0.seconds(), 3e-3, 1e-4), "{second:?}");
        assert_eq!(flow_simulation.next_completion(), None);
    }

    #[test]
    fn the_receiver_limits_many_to_one() {
        let rate = BytesPerSecond::gigabytes(12.0);
        let end = all_to_all(8, 4, 1 << 20, rate, Picos::ZERO);
        assert!(near(end.seconds(), 7.0 * 4.0 * f64::from(1 << 20) / rate.0, 1e-6), "{end}");
    }

    #[test]
    fn both_levels_agree_where_both_apply() {
        let p = Parameters::shipped();
        let path = data_path(&shipped("lhcb-pair-fdr-e5"), &p, "node0", "node1").unwrap();
        let share = f64::from(path.mtu) / f64::from(path.mtu + IB_HEADERS);
        for size in [1u32 << 18, 1 << 20, 1 << 22] {
            let packets = bandwidth(&path, Verb::Send, size, 16, false).rate.0;
            let mut flow_simulation = FlowSimulation::new();
            let link = flow_simulation.add_link(BytesPerSecond(path.rate.0 * share));
            let way = flow_simulation.add_path(&[link], path.latency);
            flow_simulation.start_flow(way, u64::from(size) * 100, 0);
            let flows = f64::from(size) * 100.0 / flow_simulation.next_completion().unwrap().0.seconds();
            assert!(near(packets, flows, 0.02), "{size}: {packets} by packets, {flows} by flows");
        }
    }

    proptest! {
        /// No link exceeds its rate, all flows end, and none ends before its bytes can have passed.
        #[test]
        fn no_flow_is_above_its_link(
            rates in prop::collection::vec(1u32..100, 1..8),
            flows in prop::collection::vec((prop::collection::vec(any_index(), 1..4), 1u64..1_000_000), 1..40),
        ) {
            let mut flow_simulation = FlowSimulation::new();
            let links: Vec<_> = rates.iter().map(|&r| flow_simulation.add_link(BytesPerSecond(f64::from(r) * 1e8))).collect();
            let mut load = vec![0u64; rates.len()];
            let mut ways = Vec::new();
            for (tag, (way, bytes)) in flows.iter().enumerate() {
                let mut mine: Vec<usize> = way.iter().map(|i| i % rates.len()).collect();
                mine.sort_unstable();
                mine.dedup();
                mine.iter().for_each(|&i| load[i] += bytes);
                let ids: Vec<_> = mine.iter().map(|&i| links[i]).collect();
                let way = flow_simulation.add_path(&ids, Picos::ZERO);
                flow_simulation.start_flow(way, *bytes, tag as u64);
                ways.push((way, mine));
            }
            let mut used = vec![0.0; rates.len()];
            for (way, mine) in &ways {
                let rate = flow_simulation.rate(*way).0;
                mine.iter().for_each(|&i| used[i] += rate);
            }
            prop_assert!(used.iter().zip(&rates).all(|(used, &rate)| *used <= f64::from(rate) * 1e8 * (1.0 + 1e-9)));
            let mut ended = 0;
            let mut last = Picos::ZERO;
            while let Some((at, _)) = flow_simulation.next_completion() {
                prop_assert!(at >= last);
                last = at;
                ended += 1;
            }
            prop_assert!(ended == flows.len());
            let least = load.iter().zip(&rates).map(|(&bytes, &rate)| bytes as f64 / (f64::from(rate) * 1e8));
            prop_assert!(last.seconds() >= least.fold(0.0, f64::max) * (1.0 - 1e-6) - 1e-9);
        }
    }

    fn any_index() -> impl proptest::strategy::Strategy<Value = usize> {
        0usize..8
    }
}
