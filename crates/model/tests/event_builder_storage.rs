//! Disks as sinks of the event builder: the stored rate follows from their queues.

use millstream_model::Parameters;
use millstream_model::benchmarks::event_builder::{
    EventBuilderError, ModelLevel, RunResult, Scenario, ScenarioReport, run,
};
use millstream_model::explain::{Flow, explain};
use millstream_model::sites::SHIPPED;
use millstream_model::ssd::{Access, CommandQueue};
use millstream_site::{Site, parse};

fn text() -> &'static str {
    SHIPPED.iter().find(|(name, _)| *name == "event-builder-disks").unwrap().1
}

/// The shipped site with other commands of its disks.
fn site(depth: u32, block: &str) -> Site {
    let text = text()
        .replace("queue-depth = 32", &format!("queue-depth = {depth}"))
        .replace("write-block = \"128 KiB\"", &format!("write-block = \"{block}\""));
    parse("disks.toml", &text).unwrap_or_else(|error| panic!("{error}"))
}

/// The same site with disks on which nothing is stored.
fn without_storage() -> Site {
    let lines =
        text().lines().filter(|line| !line.starts_with("queue-depth") && !line.starts_with("write-block"));
    parse("no-storage.toml", &lines.collect::<Vec<_>>().join("\n")).unwrap()
}

/// The same site without disks.
fn without_disks() -> Site {
    let (before, rest) = text().split_once("[[host.ssd]]").unwrap();
    let (_, after) = rest.split_once("[[switch]]").unwrap();
    parse("no-disks.toml", &format!("{before}[[switch]]{after}")).unwrap()
}

/// Eight nodes with all events available at the start.
fn scenario(site: &Site) -> Result<Scenario, EventBuilderError> {
    let mut scenario = Scenario::from_site(site, &Parameters::shipped(), Some(8))?;
    scenario.load.rate = None;
    scenario.load.events = 80 * 8 * u64::from(scenario.load.batch);
    Ok(scenario)
}

fn simulate(scenario: &Scenario) -> RunResult {
    let result = run(scenario, ModelLevel::Flows).unwrap();
    assert!(result.summary.is_success() && result.summary.is_balanced(), "{}", result.summary);
    result
}

fn stored_per_node(result: &RunResult) -> f64 {
    result.storage.unwrap().bytes / result.span.seconds() / 8.0
}

#[test]
fn without_disks_or_without_storage_nothing_changes() {
    let [none, unused] = [without_disks(), without_storage()].map(|site| simulate(&scenario(&site).unwrap()));
    assert_eq!(none, unused, "bit for bit");
    assert!(none.storage.is_none());
    // Storage that takes no event takes no time.
    let mut idle = scenario(&site(1, "4 KiB")).unwrap();
    idle.storage.as_mut().unwrap().accepted = 0.0;
    let idle = simulate(&idle);
    assert_eq!((idle.span, idle.built, idle.network_bytes), (none.span, none.built, none.network_bytes));
    assert!(!idle.storage.unwrap().is_limit());
}

#[test]
fn the_rate_follows_from_queue_depth_and_block() {
    let rates = [(1, "16 KiB"), (1, "128 KiB"), (4, "16 KiB"), (32, "128 KiB")].map(|(depth, block)| {
        let scenario = scenario(&site(depth, block)).unwrap();
        let result = simulate(&scenario);
        let (stored, limit) = (stored_per_node(&result), scenario.storage.as_ref().unwrap().rate().0);
        let report =
            ScenarioReport { scenario: &scenario, level: ModelLevel::Flows, outcome: &result }.to_string();
        let said = report.contains(&format!("storage: disk0, queue depth {depth} at "));
        assert_eq!(said, result.storage.unwrap().is_limit(), "{report}");
        assert!(stored <= limit * 1.001, "{depth} {block}: {stored} of {limit}");
        // Disks that limit are always busy; a batch of few blocks does not fill a deep queue.
        if said && depth == 1 {
            assert!(stored > 0.9 * limit, "{depth} {block}: {stored} of {limit}\n{report}");
        }
        (stored, said)
    });
    assert!(rates.windows(2).all(|pair| pair[0].0 < 0.9 * pair[1].0), "{rates:?}");
    assert!(rates[..3].iter().all(|(_, is_limit)| *is_limit), "{rates:?}");
    // One command in flight on each of two disks: Little's law.
    let queue = CommandQueue::new(&Parameters::shipped(), "pm1753", Access::Write).unwrap();
    let alone = 2.0 * 16384.0 / queue.latency_of(16384).seconds();
    assert!((rates[0].0 / alone - 1.0).abs() < 0.05, "{} of {alone}", rates[0].0);
    // The flat write rate of the disks would not limit this run.
    assert!(2.0 * queue.rate.0 > rates[3].0);
}

#[test]
fn fewer_accepted_events_take_less_of_the_disks() {
    let with = |accepted: f64| {
        let mut scenario = scenario(&site(1, "16 KiB")).unwrap();
        scenario.storage.as_mut().unwrap().accepted = accepted;
        simulate(&scenario)
    };
    let (all, tenth) = (with(1.0), with(0.1));
    assert_eq!(
        (all.summary.accepted, tenth.summary.accepted),
        (all.summary.built.events, all.summary.built.events / 10)
    );
    assert!(all.storage.unwrap().is_limit() && !tenth.storage.unwrap().is_limit());
    assert!(tenth.event_rate() > 2.0 * all.event_rate(), "{} {}", tenth.event_rate(), all.event_rate());
    let mut invalid = scenario(&site(1, "16 KiB")).unwrap();
    invalid.storage.as_mut().unwrap().accepted = 1.5;
    let error = run(&invalid, ModelLevel::Flows).unwrap_err().to_string();
    assert!(error.starts_with("accepted = 1.5: must be 0 to 1"), "{error}");
}

#[test]
fn both_levels_agree_if_storage_limits() {
    let scenario = scenario(&site(2, "16 KiB")).unwrap();
    let [packets, flows] =
        [ModelLevel::Packets, ModelLevel::Flows].map(|level| run(&scenario, level).unwrap());
    let off = flows.event_rate() / packets.event_rate() - 1.0;
    assert!(off.abs() < 0.03, "{off}");
    assert!(packets.storage.unwrap().is_limit() && flows.storage.unwrap().is_limit());
}

#[test]
fn explain_says_when_a_disk_limits() {
    let p = Parameters::shipped();
    let said = |depth: u32, block: &str, flow: &str| {
        let flow: Flow = flow.parse().unwrap();
        explain(&site(depth, block), &p, &flow, 0).unwrap()
    };
    let queue = CommandQueue::new(&p, "pm1753", Access::Write).unwrap();
    let slow = said(1, "128 KiB", "write node0 node1.disk0 16384");
    assert_eq!(slow.rate.0, queue.bandwidth(16384, 1).0);
    assert_eq!(slow.bottleneck(), "node1.disk0, writes, queue depth 1 at 16384 B");
    assert!(slow.hops.last().unwrap().name.starts_with("node1.disk0"), "{slow}");
    assert!(slow.sensitivities.iter().any(|of| of.name == "pm1753.write.latency"), "{slow}");
    // Reads go the other way: the disk is the source.
    let read = said(1, "128 KiB", "read node0 node1.disk0 16384");
    assert_eq!(read.bottleneck(), "node1.disk0, reads, queue depth 1 at 16384 B");
    let deep = said(256, "128 KiB", "read node0 node1.disk0 1048576");
    assert!(!deep.bottleneck().contains("disk0"), "{deep}");
    let host: Flow = "read node0 node1 1048576".parse().unwrap();
    assert_eq!(deep.rate, explain(&site(256, "128 KiB"), &p, &host, 0).unwrap().rate);
}

#[test]
fn invalid_disks_are_refused_with_their_line() {
    for (old, new, words) in [
        ("queue-depth = 32\n", "", "write-block needs queue-depth"),
        ("\"128 KiB\"", "\"100 B\"", "write-block = 100 B: must be 512 B to 128 MiB"),
        ("\"128 KiB\"", "\"1 parsec\"", "unknown unit"),
        ("model = \"ConnectX-5\"", "model = \"ConnectX-5\"\nwrite-block = \"4 KiB\"", "for disks only"),
    ] {
        let error = parse("disks.toml", &text().replacen(old, new, 1)).unwrap_err().to_string();
        assert!(error.contains(words) && error.starts_with("disks.toml:"), "{error}");
    }
    // A disk without queues.
    let flat = text().replace("Samsung PM1753", "a rate only")
        + "\n[device.flat]\nkind = \"ssd\"\nnames = [\"a rate only\"]\n\n[device.flat.values]\n\
           \"write.rate\" = { value = 3.0, low = 2.5, high = 3.5, unit = \"GB/s\", source = \"data sheet\" }\n";
    let error = scenario(&parse("flat.toml", &flat).unwrap()).unwrap_err().to_string();
    assert!(error.contains("node0.disk0") && error.contains("write.latency"), "{error}");
}
