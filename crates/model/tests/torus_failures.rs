//! Failed links of a torus: the model takes torus-core's routes around them.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::latency;
use millstream_model::benchmarks::torus::{Torus, all_to_all, small_packet_latency, stream};
use millstream_model::engine::{BytesPerSecond, Picos};
use millstream_model::explain::explain;
use millstream_model::flows::{Routing, concurrent};
use millstream_model::path::{Verb, data_path, hops};
use millstream_model::sites::SHIPPED;
use millstream_site::{Site, parse};
use millstream_torus_core::route::{UpDown, choose};
use millstream_torus_core::topology::Link;
use millstream_torus_core::{Axis, DeadSet, Dimensions, Direction, NodeNumber, Route, Sign};
use proptest::prelude::*;

fn apenet(failed: &[(&str, &str)]) -> Site {
    let text = SHIPPED.iter().find(|(name, _)| *name == "apenet-torus").unwrap().1;
    let failed = failed
        .iter()
        .map(|(from, to)| format!("\n[[failed-link]]\nfrom = \"{from}.apenet\"\nto = \"{to}.apenet\"\n"));
    parse("torus.toml", &(text.to_owned() + &failed.collect::<String>())).unwrap()
}

fn torus(dimensions: &[u32], dead: DeadSet) -> Torus {
    Torus {
        dimensions: dimensions.to_vec(),
        rate: BytesPerSecond::gigabytes(2.0),
        packet_size: 4096,
        buffer: 16 * 4096,
        hop_latency: Picos::from_nanos(200.0),
        end_latency: Picos::from_nanos(1000.0),
        cores: None,
        dead,
    }
}

fn dead(links: &[(u16, Axis)]) -> DeadSet {
    let mut dead = DeadSet::new();
    links.iter().for_each(|&(from, axis)| dead.kill_link(Link { from: NodeNumber(from), axis }));
    dead
}

/// Links between adapters that the hops of a path name.
fn links(site: &Site, to: &str) -> Vec<String> {
    let names = hops(site, &Parameters::shipped(), "node0", to).unwrap().into_iter().map(|hop| hop.name);
    names.filter(|name| name.contains("link")).collect()
}

#[test]
fn a_route_leads_around_a_failed_link() {
    // Node 3 is the neighbour of node 0 in the other direction of the ring of four.
    assert_eq!(links(&apenet(&[]), "node1"), ["client link"]);
    let around = links(&apenet(&[("node0", "node1")]), "node1");
    assert_eq!(around, ["client link", "node3 link -x", "node2 link -x"]);
    // Either order of the ends, and the way that closes the ring.
    assert_eq!(links(&apenet(&[("node1", "node0")]), "node1"), around);
    assert_eq!(links(&apenet(&[("node3", "node0")]), "node3").len(), 3);
}

#[test]
fn each_hop_of_a_detour_adds_its_latency() {
    let p = Parameters::shipped();
    let one = |site: &Site| latency(&data_path(site, &p, "node0", "node1").unwrap(), Verb::Write, 32).nanos();
    let (direct, around) = (one(&apenet(&[])), one(&apenet(&[("node0", "node1")])));
    let hop = p.get("apenet.hop.latency");
    let added = around - direct;
    // Two more hops of a small packet.
    assert!(added >= 2.0 * hop && added < 2.0 * hop + 50.0, "{added} ns for two hops of {hop} ns");
    let report =
        explain(&apenet(&[("node0", "node1")]), &p, &"write node0 node1".parse().unwrap(), 0).unwrap();
    assert!(report.to_string().contains("node2 link -x"), "{report}");
}

#[test]
fn flows_share_the_links_of_a_detour() {
    let p = Parameters::shipped();
    let flows = ["write node0 node1", "write node3 node2"].map(|flow| flow.parse().unwrap());
    let rates = |site: &Site| concurrent(site, &p, &flows, Routing::Deterministic).unwrap();
    let (before, after) = (rates(&apenet(&[])), rates(&apenet(&[("node0", "node1")])));
    assert!(before[1].together.0 > 0.99 * before[1].alone.0, "{before:?}");
    // The detour passes from node 3 to node 2.
    assert!(
        after[1].together.0 < 0.99 * after[1].alone.0 && after[1].limit.contains("node3 link -x"),
        "{after:?}"
    );
}

#[test]
fn separated_nodes_are_an_error_that_counts_the_failed_links() {
    let all = ["node1", "node3", "node4", "node12", "node16", "node48"].map(|other| ("node0", other));
    let site = apenet(&all);
    let p = Parameters::shipped();
    let error = data_path(&site, &p, "node0", "node1").unwrap_err().to_string();
    assert!(error.contains("node0") && error.contains("6 links of the site have failed"), "{error}");
    assert!(data_path(&site, &p, "node1", "node2").is_ok());
    let pair = torus(&[2], dead(&[(0, Axis::X)]));
    assert_eq!((pair.hops(0, 1), small_packet_latency(&pair, 0, 1)), (None, None));
    assert_eq!(stream(&pair, 0, 1, 1 << 20), BytesPerSecond(0.0));
}

#[test]
fn packets_take_both_layers_around_failed_links() {
    // No dimension order leads from node 0: its links in x are dead, so that it must leave in y and turn back into x.
    let dead = dead(&[(0, Axis::X), (3, Axis::X)]);
    let model = torus(&[4, 4], dead.clone());
    let dimensions = Dimensions::new([4, 4, 1]).unwrap();
    let graph = UpDown::new(&dimensions, &dead);
    let (from, to) = (NodeNumber(0), NodeNumber(1));
    let route = choose(&dimensions, &dead, from, to, || graph.toward(to).hops(from)).unwrap();
    assert!(matches!(route, Route::UpDown { .. }), "{route:?}");
    assert_eq!(model.hops(0, 1).unwrap().len(), 3);
    let rate = stream(&model, 0, 1, 16 << 20).as_gigabytes();
    assert!((1.8..=2.0).contains(&rate), "{rate}");
    let (whole, broken) = (all_to_all(&torus(&[4, 4], DeadSet::new()), 1 << 16), all_to_all(&model, 1 << 16));
    assert!(broken.time > whole.time, "{broken:?} of {whole:?}");
    assert_eq!(broken, all_to_all(&model, 1 << 16));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn routes_are_those_of_torus_core(
        sizes in (1u16..5, 1u16..5, 1u16..4),
        picks in proptest::collection::vec(any::<u16>(), 0..12),
    ) {
        let dimensions = Dimensions::new([sizes.0, sizes.1, sizes.2]).unwrap();
        let all: Vec<Link> = dimensions.links().collect();
        let mut dead = DeadSet::new();
        if !all.is_empty() {
            picks.iter().for_each(|&pick| dead.kill_link(all[usize::from(pick) % all.len()]));
        }
        let model = torus(&[sizes.0.into(), sizes.1.into(), sizes.2.into()], dead.clone());
        let graph = UpDown::new(&dimensions, &dead);
        for from in dimensions.all() {
            for to in dimensions.all() {
                let expected = choose(&dimensions, &dead, from, to, || graph.toward(to).hops(from));
                let found = model.hops(from.index(), to.index());
                prop_assert_eq!(expected.map(Route::hops), found.as_ref().map(|hops| hops.len() as u32));
                // The hops lead to the target over live links.
                let mut here = from;
                for hop in found.iter().flatten() {
                    prop_assert_eq!(hop.node, here.index());
                    let sign = if hop.positive { Sign::Plus } else { Sign::Minus };
                    let direction = Direction::new(Axis::ALL[hop.dimension], sign);
                    here = dead.live_neighbour(&dimensions, here, direction).unwrap();
                }
                prop_assert!(found.is_none() || here == to);
            }
        }
        // Every packet of every pair that has a route arrives.
        let result = all_to_all(&model, 3 * 4096);
        prop_assert!(result.rate.0 >= 0.0);
    }
}
