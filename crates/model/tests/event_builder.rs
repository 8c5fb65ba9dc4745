//! The event builder core on a modelled network.

use millstream_model::Parameters;
use millstream_model::benchmarks::event_builder::{
    ModelLevel, RunResult, Scenario, SlowBuilder, TrafficShaping, run,
};
use millstream_model::engine::Picos;
use millstream_model::path::{ROCE_V2_HEADERS, overhead};
use millstream_model::sites::{SHIPPED, shipped, shipped_with};
use millstream_site::Site;
use proptest::prelude::*;

/// LHCb's nodes, with all events available at the start.
fn saturated(nodes: u16, batches_each: u64) -> Scenario {
    let mut scenario =
        Scenario::from_site(&shipped("event-builder-500"), &Parameters::shipped(), Some(nodes)).unwrap();
    scenario.load.rate = None;
    scenario.load.events = batches_each * u64::from(nodes) * u64::from(scenario.load.batch);
    scenario
}

/// LHCb's nodes at 40 MHz.
fn at_40_megahertz(nodes: u16, seconds: f64) -> Scenario {
    let mut scenario =
        Scenario::from_site(&shipped("event-builder-500"), &Parameters::shipped(), Some(nodes)).unwrap();
    scenario.load.events = (40e6 * seconds) as u64;
    scenario
}

fn run_closed(scenario: &Scenario, level: ModelLevel) -> RunResult {
    let outcome = run(scenario, level).unwrap();
    let summary = &outcome.summary;
    assert!(summary.is_balanced(), "{summary}");
    let kept = summary.built.fragments + summary.incomplete_total().fragments;
    assert_eq!(summary.fragments_read(), kept + summary.discarded_total().fragments, "{summary}");
    outcome
}

fn run_success(scenario: &Scenario, level: ModelLevel) -> RunResult {
    let outcome = run_closed(scenario, level);
    assert!(outcome.summary.is_success(), "{}", outcome.summary);
    assert_eq!(outcome.summary.assigned_events, Some(scenario.load.events));
    assert_eq!(outcome.summary.fragments_read(), scenario.load.events * u64::from(scenario.nodes));
    outcome
}

fn rate(outcome: &RunResult) -> f64 {
    outcome.network_rate().as_gigabits()
}

#[test]
fn a_run_is_a_function_of_its_setup() {
    for level in [ModelLevel::Flows, ModelLevel::Packets] {
        let scenario = saturated(4, 10);
        let first = run(&scenario, level).unwrap();
        assert_eq!(first, run(&scenario, level).unwrap());
        let other = run(&Scenario { seed: 2, ..scenario }, level).unwrap();
        assert_ne!(first.end, other.end, "the seed draws the fragments' sizes");
    }
}

#[test]
fn both_levels_agree_with_and_without_shaping() {
    // A run of 40 batches is chaotic: transfers that collide shift all later ones. The mean over seeds is not.
    const SEEDS: u64 = 8;
    for nodes in [4, 8] {
        for shape in [TrafficShaping::BarrelShifter, TrafficShaping::Unshaped] {
            let [packets, flows] = [ModelLevel::Packets, ModelLevel::Flows].map(|level| {
                let one = |seed| {
                    let mut scenario = saturated(nodes, 40);
                    (scenario.seed, scenario.configuration.traffic_shaping) = (seed, shape);
                    rate(&run_success(&scenario, level))
                };
                (1..=SEEDS).map(one).sum::<f64>() / SEEDS as f64
            });
            let off = flows / packets - 1.0;
            assert!(
                off.abs() < 0.05,
                "{nodes} {shape:?}: {packets} Gb/s by packets, {flows} by flows: {off}"
            );
        }
    }
}

#[test]
fn both_levels_agree_on_the_build_latency() {
    let scenario = at_40_megahertz(8, 0.004);
    let [packets, flows] =
        [ModelLevel::Packets, ModelLevel::Flows].map(|level| run_success(&scenario, level));
    let off = flows.build_latency[0].seconds() / packets.build_latency[0].seconds() - 1.0;
    assert!(off.abs() < 0.05, "{} by packets, {} by flows", packets.build_latency[0], flows.build_latency[0]);
}

#[test]
fn a_shaped_event_builder_keeps_up_with_40_megahertz() {
    let outcome = run_success(&at_40_megahertz(32, 0.02), ModelLevel::Flows);
    // At the end the event builder lags by a few rounds, as at any time.
    let late = outcome.end.seconds() - 0.02;
    assert!((0.0..0.002).contains(&late), "{late} s after the last event");
    assert!(outcome.max_buffered_batches < 4 * 32, "{} batches held", outcome.max_buffered_batches);
}

#[test]
fn throughput_is_lower_without_shaping() {
    let shaped = run_success(&saturated(16, 20), ModelLevel::Flows);
    let mut scenario = saturated(16, 20);
    scenario.configuration.traffic_shaping = TrafficShaping::Unshaped;
    let unshaped = run_success(&scenario, ModelLevel::Flows);
    assert!(rate(&unshaped) < 0.8 * rate(&shaped), "{} against {}", rate(&unshaped), rate(&shaped));
}

/// A builder unit with a slow kernel frees its slots later, so the manager assigns its batches to others.
#[test]
fn a_slow_builder_unit_gets_fewer_batches() {
    let mut scenario = saturated(8, 40);
    scenario.configuration.slots = 4;
    let fast = run_success(&scenario, ModelLevel::Flows);
    let batch = 8.0 * f64::from(scenario.load.batch) * scenario.load.fragment;
    // A fair share would take ten times as long as the whole run.
    let span = 10.0 * fast.span.seconds() / 40.0;
    scenario.slow_builders = vec![SlowBuilder { builder: 3, factor: span * scenario.kernel.0 / batch }];
    let slow = run_success(&scenario, ModelLevel::Flows);
    let batches: Vec<u64> = slow.builders.iter().map(|builder| builder.batches).collect();
    assert!(batches[3] < 12, "{batches:?}");
    assert_eq!(batches.iter().sum::<u64>(), 320);
    assert!(batches.iter().enumerate().all(|(at, &n)| at == 3 || n > 40), "{batches:?}");
    assert!(slow.builders.iter().all(|builder| builder.max_slots_used <= 4));
    // Much faster than with a fair share.
    assert!(slow.span.seconds() < 5.0 * fast.span.seconds(), "{} against {}", slow.span, fast.span);
}

#[test]
fn injected_faults_are_in_the_account() {
    let mut scenario = saturated(4, 50);
    (scenario.load.missing_every, scenario.load.corrupt_every) = (10, 25);
    for level in [ModelLevel::Flows, ModelLevel::Packets] {
        let outcome = run_closed(&scenario, level);
        let summary = &outcome.summary;
        assert_eq!(summary.incomplete.missing_at_source.events, 20, "{summary}");
        assert_eq!(summary.incomplete.missing_at_source.fragments, 60, "{summary}");
        // Batches 24, 74 … lack no fragment; 49, 99 … lack one, most likely of another event.
        assert!((4..=8).contains(&summary.discarded.corrupt.events), "{summary}");
        assert_eq!(summary.built.fragments, 4 * summary.built.events);
    }
}

#[test]
fn a_stopped_run_accounts_for_batches_in_flight() {
    let mut scenario = at_40_megahertz(8, 0.01);
    scenario.stop_at = Some(Picos::from_seconds(0.004_321));
    for level in [ModelLevel::Flows, ModelLevel::Packets] {
        let outcome = run_closed(&scenario, level);
        let summary = &outcome.summary;
        assert!(!summary.cause.is_success() && summary.built.events > 0, "{summary}");
        assert!(summary.assigned_events < Some(scenario.load.events));
        let lost = summary.incomplete_total().fragments + summary.discarded_total().fragments;
        assert!(lost + summary.withdrawn_events > 0, "{summary}");
    }
}

#[test]
fn invalid_scenarios_are_refused_by_field() {
    let p = Parameters::shipped();
    let site = shipped("event-builder-500");
    let refused = |change: fn(&mut Scenario)| {
        let mut scenario = Scenario::from_site(&site, &p, Some(4)).unwrap();
        change(&mut scenario);
        run(&scenario, ModelLevel::Flows).unwrap_err().to_string()
    };
    assert!(refused(|s| s.load.batch = 0).starts_with("batch = 0: must be"));
    assert!(refused(|s| s.load.fragment = f64::NAN).starts_with("fragment = NaN: must be"));
    assert!(refused(|s| s.load.rate = Some(-1.0)).starts_with("rate = -1: must be"));
    let too_long = refused(|s| (s.load.batch, s.load.fragment) = (65_535, 65_536.0));
    assert!(too_long.starts_with("batch × fragment = "), "{too_long}");
    assert!(refused(|s| s.configuration.slots = 0).starts_with("slots = 0: must be"));
    assert!(
        refused(|s| s.slow_builders = vec![SlowBuilder { builder: 4, factor: 2.0 }])
            .contains("existing builder unit")
    );
    assert!(
        Scenario::from_site(&site, &p, Some(501)).unwrap_err().to_string().contains("the site has 500 hosts")
    );
    assert!(
        Scenario::from_site(&shipped("recipe-baseline"), &p, None)
            .unwrap_err()
            .to_string()
            .contains("differ")
    );
}

#[test]
fn a_node_has_the_path_of_its_site() {
    let p = Parameters::shipped();
    let node = |site: &Site| Scenario::from_site(site, &p, Some(2)).unwrap().node;
    let roce = node(&shipped("roce100-cx5"));
    assert_eq!(roce.overhead, overhead(ROCE_V2_HEADERS));
    let most = roce.rate.0 * 1024.0 / (1024.0 + f64::from(ROCE_V2_HEADERS));
    assert!(roce.tx_payload_rate().0 <= most && roce.rx_payload_rate().0 <= most, "{roce:?}");
    assert_eq!(node(&shipped("roce800-cx8")).switch_buffer, p.get("spectrum-4.buffer") as u64);
    // The uplink of a PCIe switch.
    let wide = node(&shipped("ndr-h100"));
    let narrow = node(&shipped_with("ndr-h100", &[("host.node.pcie-switch.sw.pcie.lanes", "4")]));
    assert!(narrow.rx_payload_rate().0 < 0.5 * wide.rx_payload_rate().0, "{narrow:?}");
    assert!(wide.pcie_latency > p.nanos("pcie.link.latency") * 2, "{wide:?}");
    // Several switches.
    assert!(node(&shipped("ndr-fat-tree")).latency > Picos::from_nanos(200.0));
}

#[test]
fn a_run_of_roce_carries_its_headers_at_both_levels() {
    let p = Parameters::shipped();
    for level in [ModelLevel::Flows, ModelLevel::Packets] {
        let mut scenario = Scenario::from_site(&shipped("roce100-cx5"), &p, Some(2)).unwrap();
        scenario.load.rate = None;
        scenario.load.events = 400 * u64::from(scenario.load.batch);
        let most = scenario.node.rate.as_gigabits() * 1024.0 / (1024.0 + f64::from(ROCE_V2_HEADERS));
        let each = rate(&run_success(&scenario, level)) / 2.0;
        assert!(each < most, "{level:?}: {each} of {most} Gb/s");
    }
}

#[test]
fn sites_that_the_network_of_the_event_builder_does_not_model_are_refused() {
    let p = Parameters::shipped();
    let refused =
        |site: &Site| Scenario::from_site(site, &p, Some(2)).map(|s| s.nodes).unwrap_err().to_string();
    assert!(refused(&shipped("soft-device-wire")).contains("transport in software"));
    let text = SHIPPED.iter().find(|(name, _)| *name == "edr-pair").unwrap().1;
    let iommu = "count = 2\niommu = { page = \"4 KiB\", footprint = \"1 GiB\" }\n";
    let text = text.replacen("count = 2\n", iommu, 1);
    assert!(refused(&millstream_site::parse("iommu", &text).unwrap()).contains("IOMMU"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// For any scenario: no receiving link exceeds its rate, every batch is built once, and no slot is used twice.
    #[test]
    fn no_link_exceeds_its_rate(
        nodes in 2u16..9,
        batch in 1u16..400,
        slots in 1u16..8,
        in_flight in 1u32..12,
        shaped: bool,
        fragment in 20.0f64..500.0,
        packets: bool,
        seed: u64,
    ) {
        let mut scenario = saturated(nodes, 6);
        scenario.load.batch = batch;
        scenario.load.events = 6 * u64::from(nodes) * u64::from(batch) - u64::from(batch / 2);
        (scenario.load.fragment, scenario.load.deviation) = (fragment, fragment / 10.0);
        scenario.configuration.slots = slots;
        scenario.configuration.in_flight = in_flight;
        scenario.configuration.traffic_shaping = if shaped { TrafficShaping::BarrelShifter } else { TrafficShaping::Unshaped };
        scenario.seed = seed;
        let outcome = run_success(&scenario, if packets { ModelLevel::Packets } else { ModelLevel::Flows });
        prop_assert!(outcome.peak_link_utilization <= 1.0, "{}", outcome.peak_link_utilization);
        prop_assert!(outcome.builders.iter().all(|builder| builder.max_slots_used <= slots));
        prop_assert_eq!(outcome.builders.iter().map(|builder| builder.batches).sum::<u64>(), 6 * u64::from(nodes));
        prop_assert_eq!(outcome.transfers, 6 * u64::from(nodes) * u64::from(nodes));
    }
}
