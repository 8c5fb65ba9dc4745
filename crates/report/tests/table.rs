//! Table and JSON of a report show the same numbers.

use millstream_report::table::{self, Style};
use millstream_report::{
    Bytes, BytesPerSecond, CorruptSource, FragmentAccounting, FragmentOutcome, LiveSource, MemcpyBaseline,
    OutcomeCount, ProgressSample, RecoveredFailure, RunReport, Seconds, SoftwareTriggerReport, StorageReport,
    TriggerComparison, UnitReport, VERSION, count,
};
use proptest::prelude::*;
use serde_json::Value;

fn report() -> RunReport {
    let count_of = |outcome, reason: &str, events, fragments| OutcomeCount {
        outcome,
        reason: reason.into(),
        events,
        fragments,
    };
    let unit = |name: &str, events, fragments, end: &str| UnitReport {
        name: name.into(),
        events,
        fragments,
        payload_bytes: Bytes(fragments * 5280),
        peak_memory_bytes: name.starts_with("builder").then_some(Bytes(68_000_000)),
        cpu_time_s: name.starts_with("builder").then_some(Seconds(0.25)),
        exit_status: end.into(),
    };
    RunReport {
        name: "sst1m replay".into(),
        software: "millstream 0.1.0".into(),
        error: None,
        events: 1_024_000,
        fragments: 30_720_000,
        payload_bytes: Bytes(162_201_600_000),
        duration_s: Seconds(19.24),
        memcpy_baseline: Some(MemcpyBaseline {
            block_bytes: Bytes(1 << 20),
            bytes_per_s: BytesPerSecond(12.1e9),
        }),
        trigger: Some(TriggerComparison {
            kernel: "cluster7".into(),
            decisions_compared: 691_200,
            decisions_matching: 691_200,
            decisions_set: 56,
        }),
        accepted_events: 960_000,
        stored_events: 960_000,
        selected_events: None,
        not_stored_events: 0,
        event_files: vec!["run-0.h5".into(), "run-1.h5".into()],
        fragment_accounting: FragmentAccounting {
            fragments_read: 30_720_120,
            fragments_rebuilt: 0,
            fragments_duplicate: 0,
            events_rebuilt: 0,
            outcomes: vec![
                count_of(FragmentOutcome::Built, "whole event", 1_024_000, 30_720_000),
                count_of(FragmentOutcome::Incomplete, "missing at source", 4, 116),
                count_of(FragmentOutcome::Incomplete, "timed out", 0, 0),
                count_of(FragmentOutcome::Discarded, "corrupt", 1, 4),
            ],
            inconsistencies: Vec::new(),
        },
        software_triggers: vec![SoftwareTriggerReport {
            builder: "bu1".into(),
            batches: 30_000,
            events: 480_000,
            accepted: 4_800,
            workers_lost: 2,
            longest_queue: 3,
            all_credits_used_s: Seconds(1.5),
        }],
        recovered: Vec::new(),
        recovered_failures: vec![RecoveredFailure {
            unit: "builder 2".into(),
            cause: "exit status: 1: no space left".into(),
        }],
        joined: Vec::new(),
        corrupt_sources: vec![CorruptSource { source: "source 0x101".into(), fragments: 1, checked: 1000 }],
        live_sources: vec![LiveSource {
            source: "source 0x7".into(),
            received: 1000,
            lost: 3,
            ..LiveSource::default()
        }],
        storage: vec![StorageReport {
            builder: "bu0".into(),
            batches: 30_000,
            payload_bytes: Bytes(152_000_000_000),
            direct_bytes: Bytes(160_000_000_000),
            copied_bytes: Bytes(0),
            flushes: 12_000,
            busy_s: Seconds(18.5),
            longest_queue: 7,
            all_slots_waiting_s: Seconds(2.5),
        }],
        units: vec![
            unit("readout 0", 1_024_005, 10_240_040, "done"),
            unit("builder 0", 512_000, 15_360_000, "done"),
            unit("builder 1", 512_005, 15_360_120, "done"),
        ],
        samples: vec![ProgressSample {
            elapsed_s: Seconds(0.1),
            events: 5_000,
            payload_bytes: Bytes(792_000_000),
        }],
    }
}

fn json(report: &RunReport) -> Value {
    serde_json::from_str(&report.to_json()).unwrap()
}

/// The words of the row that starts with this label.
fn row<'a>(table: &'a str, label: &str) -> Vec<&'a str> {
    let row = table.lines().find_map(|line| line.trim_start().strip_prefix(label));
    row.unwrap_or_else(|| panic!("no {label} in\n{table}")).split_whitespace().collect()
}

#[test]
fn table_and_json_have_the_same_numbers() {
    let report = report();
    let (table, json) = (table::render(&report, Style::Plain), json(&report));
    let counted = |pointer: &str| count(json.pointer(pointer).unwrap().as_u64().unwrap());
    let measured = |pointer: &str| json.pointer(pointer).unwrap().as_f64().unwrap();

    assert_eq!(table.lines().next().unwrap(), "sst1m replay  millstream 0.1.0  OK");
    assert_eq!(row(&table, "events ")[0], counted("/events"));
    assert_eq!(row(&table, "events ")[1], count(measured("/derived/events_per_s").round() as u64));
    assert_eq!(row(&table, "fragments ")[0], counted("/fragments"));
    assert_eq!(row(&table, "fragments ")[1], count(measured("/derived/fragments_per_s").round() as u64));
    let payload = row(&table, "payload ");
    assert_eq!(payload[0], format!("{:.0}", measured("/payload_bytes") / 1e9));
    assert_eq!(payload[2], format!("{:.2}", measured("/derived/payload_bytes_per_s") / 1e9));
    assert_eq!(payload[5..7], [format!("{:.1}", measured("/duration_s")).as_str(), "s"]);
    let fraction = format!("{:.2}", measured("/derived/memcpy_ratio"));
    assert_eq!(row(&table, &fraction).join(" "), "× memcpy (12.1 GB/s in blocks of 1 MiB)");
    assert_eq!(row(&table, "accepted ")[..2], [counted("/accepted_events"), counted("/stored_events")]);
    let decided = row(&table, "decided ");
    let software = |field: &str| counted(&format!("/software_triggers/0/{field}"));
    assert_eq!([decided[0], decided[2]], [software("accepted"), software("events")]);
    assert_eq!(row(&table, &software("workers_lost")).last(), Some(&"lost"));
    assert_eq!(row(&table, "cause ").join(" "), "builder 2 exit status: 1: no space left");
    assert_eq!(row(&table, "trigger ")[0], counted("/trigger/decisions_matching"));
    assert_eq!(row(&table, "trigger ")[2], counted("/trigger/decisions_compared"));
    assert!(table.contains(&format!("match (100 %), {} set", counted("/trigger/decisions_set"))));
    assert_eq!(
        row(&table, "fragments read ").join(" "),
        format!(
            "{} = 30,720,000 built + 116 incomplete + 4 discarded",
            counted("/fragment_accounting/fragments_read")
        )
    );
    assert_eq!(row(&table, "incomplete ").join(" "), "116 missing at source in 4 events");
    assert_eq!(row(&table, "discarded ").join(" "), "4 corrupt in 1 event");
    for unit in 0..3 {
        let name = json.pointer(&format!("/units/{unit}/name")).unwrap().as_str().unwrap();
        let words = row(&table, name);
        assert_eq!(words[0], counted(&format!("/units/{unit}/events")));
        assert_eq!(words[1], counted(&format!("/units/{unit}/fragments")));
        assert_eq!(words.last(), Some(&"done"));
    }
}

#[test]
fn columns_are_aligned() {
    let table = table::render(&report(), Style::Plain);
    let units: Vec<&str> = table.lines().skip_while(|line| !line.contains("unit ")).collect();
    assert_eq!(units.len(), 4);
    // The last column is aligned left, the others right.
    let at = |line: &str, word: &str| line.find(word).unwrap();
    assert!(units[1..].iter().all(|line| at(line, "done") == at(units[0], "exit")));
    let ends = |line: &str| line.find("fragments").map(|start| start + "fragments".len());
    let end = ends(units[0]).unwrap();
    assert!(
        units[1..]
            .iter()
            .all(|line| line.as_bytes()[end - 1].is_ascii_digit() && line.as_bytes()[end] == b' ')
    );
}

#[test]
fn colours_change_no_text() {
    let report = report();
    let coloured = table::render(&report, Style::Coloured);
    let mut plain = String::new();
    let mut rest = coloured.as_str();
    while let Some((before, after)) = rest.split_once('\x1b') {
        plain += before;
        rest = after.split_once('m').unwrap().1;
    }
    plain += rest;
    assert_ne!(coloured, plain);
    assert_eq!(plain, table::render(&report, Style::Plain));
}

#[test]
fn files_are_not_coloured() {
    assert_eq!(Style::of(&tempfile::tempfile().unwrap()), Style::Plain);
}

#[test]
fn problems_are_in_table_and_json() {
    let problem = |change: &dyn Fn(&mut RunReport), expected: &str| {
        let mut report = report();
        change(&mut report);
        let (table, json) = (table::render(&report, Style::Plain), json(&report));
        assert_eq!(json["derived"]["success"], Value::Bool(false));
        assert_eq!(json["derived"]["problems"], serde_json::json!([expected]));
        assert!(table.starts_with("sst1m replay  millstream 0.1.0  FAILED\n"), "{table}");
        assert!(table.ends_with(&format!("\nproblem:  {expected}\n")), "{table}");
    };
    problem(&|report| report.error = Some("card 1 was killed".into()), "card 1 was killed");
    problem(
        &|report| report.fragment_accounting.fragments_read += 1,
        "30720121 fragments read, but 30720120 accounted for",
    );
    problem(
        &|report| {
            report
                .fragment_accounting
                .inconsistencies
                .push("readout 0 to builder 1: 7 sent, 6 arrived".into())
        },
        "readout 0 to builder 1: 7 sent, 6 arrived",
    );
    problem(
        &|report| report.trigger.as_mut().unwrap().decisions_matching -= 2,
        "2 of 691200 trigger decisions differ from the recorded ones",
    );
    problem(
        &|report| report.stored_events = 959_999,
        "960000 events accepted, but 959999 stored and 0 beyond the configured number",
    );
    assert!(report().derived().success);
}

#[test]
fn json_round_trips() {
    let report = report();
    let json = json(&report);
    assert_eq!(json["version"], VERSION);
    assert_eq!(serde_json::from_value::<RunReport>(json).unwrap(), report);
}

/// Names of all fields, as paths.
fn fields(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                found.push(path.clone());
                fields(value, &path, found);
            }
        }
        Value::Array(all) => all.iter().for_each(|value| fields(value, &format!("{path}[]"), found)),
        _ => {}
    }
}

#[test]
fn json_fields_equal_the_documented_ones() {
    let text = include_str!("../../../docs/output.md");
    let (_, section) = text.split_once("### Fields").unwrap();
    let section = section.split("\n#").next().unwrap();
    let documented: Vec<&str> =
        section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut found = Vec::new();
    fields(&json(&report()), "", &mut found);
    found.sort();
    found.dedup();
    let mut sorted = documented.clone();
    sorted.sort();
    assert_eq!(sorted, found);
}

fn seconds() -> impl Strategy<Value = Seconds> {
    prop_oneof![Just(0.0), Just(f64::MAX), any::<f64>()].prop_map(Seconds)
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), any::<u64>()]
}

prop_compose! {
    fn any_report()(
        (name, error) in any::<(String, Option<String>)>(),
        (events, fragments, payload, duration) in (number(), number(), number(), seconds()),
        memcpy in prop::option::of((number(), seconds())),
        trigger in prop::option::of((number(), number(), number())),
        (accepted, stored, read) in (number(), number(), number()),
        outcomes in prop::collection::vec(
            (prop::sample::select(&FragmentOutcome::ALL[..]), any::<String>(), number(), number()), 0..4),
        unit in (any::<String>(), number(), number(), number(), prop::option::of(number())),
    ) -> RunReport {
        RunReport {
            name,
            error,
            events,
            fragments,
            payload_bytes: Bytes(payload),
            duration_s: duration,
            memcpy_baseline: memcpy.map(|(block, rate)| MemcpyBaseline {
                block_bytes: Bytes(block),
                bytes_per_s: BytesPerSecond(rate.0),
            }),
            trigger: trigger.map(|(decisions_compared, decisions_matching, decisions_set)| TriggerComparison {
                kernel: "any".into(), decisions_compared, decisions_matching, decisions_set,
            }),
            accepted_events: accepted,
            stored_events: stored,
            fragment_accounting: FragmentAccounting {
                fragments_read: read,
                outcomes: outcomes
                    .into_iter()
                    .map(|(outcome, reason, events, fragments)| OutcomeCount { outcome, reason, events, fragments })
                    .collect(),
                ..FragmentAccounting::default()
            },
            units: vec![UnitReport {
                name: unit.0,
                events: unit.1,
                fragments: unit.2,
                payload_bytes: Bytes(unit.3),
                peak_memory_bytes: unit.4.map(Bytes),
                cpu_time_s: None,
                exit_status: "done".into(),
            }],
            ..RunReport::default()
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_reports_have_table_and_json(report in any_report()) {
        let table = table::render(&report, Style::Plain);
        prop_assert!(table.contains(&count(report.events)));
        prop_assert!(table.contains(&count(report.accepted_events)));
        let json = json(&report);
        prop_assert_eq!(json["events"].as_u64(), Some(report.events));
        prop_assert_eq!(serde_json::from_value::<RunReport>(json).unwrap(), report);
    }
}
