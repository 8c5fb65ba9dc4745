//! Transports in software: one core for all packets of an adapter, against values computed by hand.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::explain::explain;
use millstream_model::path::{DataPath, Verb, data_path};
use millstream_model::sites::shipped;

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

fn path() -> DataPath {
    data_path(&shipped("soft-device-wire"), &Parameters::shipped(), "node0", "node1").unwrap()
}

/// Times of the core in ns: first packet, further packet, acknowledgement; and its rate in bytes per ns.
fn core() -> [f64; 4] {
    let core = path().ends[0].adapter.core.unwrap();
    [core.message.nanos(), core.packet.nanos(), core.acknowledgement.nanos(), core.copy.as_gigabytes()]
}

#[test]
fn short_messages_take_a_core_the_time_of_the_message_and_its_acknowledgement() {
    let [message, _, acknowledgement, copy] = core();
    let rate = bandwidth(&path(), Verb::Write, 64, 128, false).rate.as_gigabytes();
    let expected = 64.0 / (message + acknowledgement + 64.0 / copy);
    assert!(near(rate, expected, 0.01), "{rate} of {expected}");
}

#[test]
fn long_messages_add_their_packets_and_bytes() {
    let [message, packet, acknowledgement, copy] = core();
    let rate = bandwidth(&path(), Verb::Write, 65536, 128, false).rate.as_gigabytes();
    let expected = 65536.0 / (message + 15.0 * packet + acknowledgement + 65536.0 / copy);
    assert!(near(rate, expected, 0.01), "{rate} of {expected}");
}

#[test]
fn a_message_passes_both_cores() {
    let [message, _, acknowledgement, copy] = core();
    let small = latency(&path(), Verb::Write, 8).nanos();
    // The responder acknowledges before it answers.
    let both = 2.0 * (message + 8.0 / copy) + acknowledgement;
    assert!(small > both && small < both + 1500.0, "{small}, both cores {both}");
    // Of a second packet, one core overlaps the other.
    let long = latency(&path(), Verb::Write, 4096).nanos();
    assert!(near(long - small, 2.0 * 4088.0 / copy, 0.05), "{}", long - small);
}

#[test]
fn an_explanation_names_the_core() {
    let site = shipped("soft-device-wire");
    let report =
        explain(&site, &Parameters::shipped(), &"write node0 node1 4096".parse().unwrap(), 0).unwrap();
    assert!(report.bottleneck().ends_with("transport core"), "{report}");
}
