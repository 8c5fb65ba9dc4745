//! The metrics' text, its list, the documentation and the dashboard.

use crate::backend::{REFUSED, Test};
use millstream_control::machine::State;
use millstream_control::metrics::{METRICS, table};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::process::{Command, Stdio};

/// Parses the exposition format: samples by name. Panics at the first violation.
fn parse(text: &str) -> HashMap<String, Vec<(String, f64)>> {
    let mut samples: HashMap<String, Vec<(String, f64)>> = HashMap::new();
    let mut present = "";
    let mut series = HashSet::new();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let (kind, rest) = comment.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            let (name, rest) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            match kind {
                "HELP" => {
                    assert!(!samples.contains_key(name) && !rest.is_empty(), "{line}");
                    present = name;
                }
                "TYPE" => assert!(name == present && ["counter", "gauge"].contains(&rest), "{line}"),
                _ => panic!("{line}"),
            }
            continue;
        }
        let (key, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        let (name, labels) = key.split_once('{').unwrap_or((key, "}"));
        assert!(name == present && labels.ends_with('}') && series.insert(key.to_owned()), "{line}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{line}");
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(value.is_finite(), "{line}");
        samples.entry(name.to_owned()).or_default().push((labels.trim_end_matches('}').to_owned(), value));
    }
    samples
}

fn one(samples: &HashMap<String, Vec<(String, f64)>>, name: &str) -> f64 {
    samples[name][0].1
}

#[test]
fn the_text_follows_the_exposition_format() {
    let test = Test::new();
    let idle = parse(&test.get("/metrics").body);
    assert!(idle["millstream_control_state"].contains(&("state=\"idle\"".to_owned(), 1.0)), "{idle:?}");
    test.succeed("configure", "");
    test.succeed("start", "");
    test.wait(|status| status.run.as_ref().is_some_and(|run| run.progress.events_built > 0));
    let text = test.get("/metrics").body;
    let running = parse(&text);
    let built = one(&running, "millstream_events_built_total");
    assert!(built > 0.0 && one(&running, "millstream_run_number") == 1.0, "{text}");
    test.succeed("stop", "");
    test.wait_for(State::Configured);
    let ended = parse(&test.get("/metrics").body);
    // A counter does not fall when the run ends.
    assert!(one(&ended, "millstream_events_built_total") >= built);
    assert!(ended["millstream_runs_total"].contains(&("result=\"stopped\"".to_owned(), 1.0)));
    let known: HashSet<_> = METRICS.iter().map(|metric| metric.name).collect();
    assert!(ended.keys().all(|name| known.contains(name.as_str())), "{ended:?}");
    check_with_promtool(&text);
    // The log book outlives the process.
    let again = parse(&test.restarted().get("/metrics").body);
    assert_eq!(one(&again, "millstream_run_number"), 1.0);
}

/// A failed run has no report, or one without the last batches.
#[test]
fn counters_of_events_do_not_fall_when_a_run_ends() {
    let test = Test::new();
    test.succeed("configure", "");
    let counts = || {
        let samples = parse(&test.get("/metrics").body);
        ["built", "accepted"].map(|what| one(&samples, &format!("millstream_events_{what}_total")))
    };
    test.start_with_batch(16);
    test.wait(|status| status.run.as_ref().is_some_and(|run| run.progress.events_built >= 20));
    let running = counts();
    test.succeed("stop", "");
    test.wait_for(State::Configured);
    let ended = counts();
    assert!(ended[0] >= running[0] && ended[1] >= running[1], "{running:?} {ended:?}");
    test.start_with_batch(15);
    test.wait_for(State::Error);
    let failed = counts();
    assert!(failed[0] >= ended[0] + 100.0 && failed[1] >= ended[1] + 50.0, "{ended:?} {failed:?}");
}

#[test]
fn events_without_a_lost_readout_unit_are_incomplete_while_the_run_goes_on() {
    let test = Test::new();
    test.succeed("configure", "");
    test.start_with_batch(17);
    test.wait(|status| status.run.as_ref().is_some_and(|run| run.progress.events_incomplete >= 20));
    assert!(one(&parse(&test.get("/metrics").body), "millstream_events_incomplete_total") >= 20.0);
}

#[test]
fn the_energy_does_not_fall_when_its_counter_wraps() {
    let test = Test::new();
    let zone = test.folder.path().join("sys/class/powercap/intel-rapl:0");
    std::fs::create_dir_all(&zone).unwrap();
    std::fs::write(zone.join("name"), "package-0").unwrap();
    std::fs::write(zone.join("max_energy_range_uj"), "10000000").unwrap();
    let shown = [("9000000", 9.0), ("500000", 10.5), ("700000", 10.7), ("0", 20.0)];
    for (counter, joules) in shown {
        std::fs::write(zone.join("energy_uj"), counter).unwrap();
        let samples = parse(&test.get("/metrics").body);
        let expected = ("package=\"package-0\"".to_owned(), joules);
        assert_eq!(samples["millstream_host_energy_joules_total"], [expected], "{counter}");
    }
}

#[test]
fn units_that_listen_have_counts_of_refused_connections() {
    let test = Test::with_units();
    test.succeed("configure", "");
    test.succeed("start", "");
    test.wait(|status| status.run.as_ref().is_some_and(|run| run.progress.events_built > 0));
    let samples = parse(&test.get("/metrics").body);
    let refused = &samples["millstream_unit_connections_refused_total"];
    let of = |role: &str| {
        let role = format!("role=\"{role}\"");
        refused
            .iter()
            .filter(|(labels, _)| labels.contains(&role))
            .map(|(_, count)| *count)
            .collect::<Vec<_>>()
    };
    assert_eq!((of("manager"), of("builder"), of("readout")), (vec![REFUSED as f64], vec![0.0], vec![]));
    assert_eq!(samples["millstream_control_clients_refused_total"], [(String::new(), 0.0)]);
    test.succeed("stop", "");
    test.wait_for(State::Configured);
    let ended = parse(&test.get("/metrics").body);
    assert!(ended["millstream_unit_up"].iter().all(|(_, up)| *up == 0.0), "{ended:?}");
}

/// Prometheus' own checker, where it is installed.
fn check_with_promtool(text: &str) {
    use std::io::Write as _;
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else {
        println!("skipped: promtool is not installed (Debian package prometheus)");
        return;
    };
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn docs(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

#[test]
fn the_documentation_lists_all_metrics() {
    let page = std::fs::read_to_string(docs("run-control.md")).unwrap();
    assert!(page.contains(&table()), "docs/run-control.md needs this table:\n\n{}", table());
    let names: HashSet<_> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(names.len(), METRICS.len());
}

#[test]
fn the_dashboard_uses_only_listed_metrics() {
    let text = std::fs::read_to_string(docs("grafana-dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(queries.len() >= 8);
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for query in queries {
        let names: Vec<_> =
            query.split(|c| !is_name(c)).filter(|word| word.starts_with("millstream_")).collect();
        assert!(!names.is_empty(), "{query}");
        // A fixed one is shorter than two scrapes of some installation.
        assert!(!query.contains("rate(") || query.contains("[$__rate_interval]"), "{query}");
        for name in names {
            let metric = METRICS.iter().find(|metric| metric.name == name);
            let metric = metric.unwrap_or_else(|| panic!("{query}: {name} is not in the list"));
            // A rate is of a counter.
            let is_counter = metric.kind == millstream_control::metrics::Kind::Counter;
            assert_eq!(query.contains(&format!("rate({name}")), is_counter, "{query}");
        }
    }
}
