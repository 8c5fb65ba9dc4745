//! The throughput charts are well-formed, complete, and drawn to scale.
//!
//! The tests leave the charts in the build directory, for inspection.

use std::path::Path;

use millstream_report::{
    Bytes, BytesPerSecond, MemcpyBaseline, ProgressSample, RunReport, Seconds, save, throughput,
};
use proptest::prelude::*;
use roxmltree::Document;

fn keep(name: &str, svg: &str) {
    save(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), svg).unwrap();
}

fn texts<'a>(document: &'a Document<'_>) -> Vec<&'a str> {
    document.descendants().filter(|node| node.has_tag_name("text")).filter_map(|node| node.text()).collect()
}

/// Corners of all closed lines in the data of a path.
fn corners(data: &str) -> Vec<(f64, f64)> {
    data.split(['M', 'L', 'Z'])
        .filter(|point| !point.is_empty())
        .map(|point| point.split_once(' ').unwrap())
        .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
        .collect()
}

/// A replay of some seconds, with a slow start and a dip.
fn replay() -> RunReport {
    let rate = |k: u32| -> f64 {
        let wave = (f64::from(k) * 0.37).sin() * 0.15 + (f64::from(k) * 0.113).cos() * 0.1;
        let level = if k < 3 {
            5.0
        } else if (100..104).contains(&k) {
            4.2
        } else {
            8.4
        };
        (level + wave) * 1e9
    };
    let mut payload = 0;
    let samples: Vec<ProgressSample> = (1..=192)
        .map(|k| {
            payload += (rate(k) * 0.1) as u64;
            ProgressSample {
                elapsed_s: Seconds(f64::from(k) * 0.1),
                events: payload / 158_400,
                payload_bytes: Bytes(payload),
            }
        })
        .collect();
    RunReport {
        name: "sst1m replay".into(),
        payload_bytes: Bytes(payload),
        duration_s: Seconds(19.2),
        memcpy_baseline: Some(MemcpyBaseline {
            block_bytes: Bytes(1 << 20),
            bytes_per_s: BytesPerSecond(12.1e9),
        }),
        samples,
        ..RunReport::default()
    }
}

#[test]
fn throughput_is_drawn_to_scale() {
    let report = replay();
    let svg = throughput::draw(&report);
    keep("throughput.svg", &svg);
    let document = Document::parse(&svg).unwrap();
    let texts = texts(&document);
    for expected in
        ["sst1m replay: throughput", "GB/s", "time since the start [s]", "memcpy, blocks of 1 MiB: 12.1 GB/s"]
    {
        assert!(texts.contains(&expected), "{texts:?} lacks {expected:?}");
    }

    // Two tick marks give the scale of the axis; the memcpy line must be at its value.
    let marks: Vec<(f64, f64)> = document
        .descendants()
        .filter(|node| node.attribute("text-anchor") == Some("end"))
        .filter_map(|node| {
            Some((node.text()?.parse().ok()?, node.attribute("y")?.parse::<f64>().ok()? - 4.5))
        })
        .collect();
    let (first, last) = (marks[0], marks[marks.len() - 1]);
    let value = |y: f64| first.0 + (y - first.1) / (last.1 - first.1) * (last.0 - first.0);
    let dashed = document.descendants().find(|node| node.has_attribute("stroke-dasharray")).unwrap();
    let memcpy = value(dashed.attribute("y1").unwrap().parse().unwrap());
    assert!((memcpy - 12.1).abs() < 0.02, "{memcpy}");

    // The mean of the curve is the mean rate.
    let curve = document.descendants().find(|node| node.attribute("stroke-width") == Some("2")).unwrap();
    let curve = corners(curve.attribute("d").unwrap());
    assert_eq!(curve.len(), 2 * 192);
    let area: f64 = curve.windows(2).map(|pair| (pair[1].0 - pair[0].0) * value(pair[0].1)).sum();
    let mean = area / (curve[curve.len() - 1].0 - curve[0].0);
    let expected = report.derived().payload_bytes_per_s.unwrap().0 / 1e9;
    assert!((mean - expected).abs() < 0.03, "{mean}, expected {expected}");
}

#[test]
fn short_and_empty_runs_have_charts() {
    let document = throughput::draw(&RunReport::default());
    assert!(texts(&Document::parse(&document).unwrap()).contains(&"no payload was transferred"));
    let short = RunReport {
        name: "32 events".into(),
        payload_bytes: Bytes(5_068_800),
        duration_s: Seconds(0.0047),
        ..RunReport::default()
    };
    let svg = throughput::draw(&short);
    keep("throughput-short.svg", &svg);
    let document = Document::parse(&svg).unwrap();
    assert!(texts(&document).contains(&"time since the start [ms]"));
}

proptest! {
    #[test]
    fn arbitrary_runs_have_charts(
        name: String,
        payload: u64,
        duration: f64,
        memcpy in prop::option::of(any::<(u64, f64)>()),
        samples in prop::collection::vec(any::<(f64, u64)>(), 0..20),
    ) {
        let report = RunReport {
            name,
            payload_bytes: Bytes(payload),
            duration_s: Seconds(duration),
            memcpy_baseline: memcpy.map(|(block, rate)| MemcpyBaseline { block_bytes: Bytes(block), bytes_per_s: BytesPerSecond(rate) }),
            samples: samples
                .into_iter()
                .map(|(at, bytes)| ProgressSample { elapsed_s: Seconds(at), events: bytes, payload_bytes: Bytes(bytes) })
                .collect(),
            ..RunReport::default()
        };
        Document::parse(&throughput::draw(&report)).unwrap();
    }
}
