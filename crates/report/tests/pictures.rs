//! The pictures: well-formed, complete, and true to their numbers.
//!
//! They are also left in the test's folder of the build directory, to be looked at.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use millstream_fragment::stream::Stream;
use millstream_fragment::unpack::unpack;
use millstream_report::camera::{Decision, Event, Geometry, draw};
use millstream_report::{Bytes, BytesPerSecond, Memcpy, RunReport, Sample, Seconds, save, throughput};
use proptest::prelude::*;
use roxmltree::{Document, Node};

const SAMPLES: usize = 50;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m")
}

/// The waveforms of an event in stored order, and what the camera's trigger decided.
fn recorded(number: u64) -> (Vec<i16>, Vec<Decision>) {
    let files = unpack(&data(), &Path::new(env!("CARGO_TARGET_TMPDIR")).join("sst1m")).unwrap();
    let streams: Vec<Stream> = files.iter().map(|file| Stream::open(file).unwrap()).collect();
    let sources: Vec<_> = streams.iter().flat_map(Stream::sources).collect();
    let of_kind = |kind: u32| {
        let mut found: Vec<_> = sources.iter().filter(|source| source.kind().0 == kind).collect();
        found.sort_by_key(|source| source.id());
        found.into_iter().flat_map(|s| s.fragment(s.find(number).unwrap()).unwrap().payload).copied()
    };
    let bytes: Vec<u8> = of_kind(1).collect();
    let waveforms = bytes.as_chunks().0.iter().map(|&sample| i16::from_le_bytes(sample)).collect();

    let patches = std::fs::read_to_string(data().join("patches.csv")).unwrap();
    let patch_of_bit: HashMap<usize, u16> = patches
        .lines()
        .skip(1)
        .map(|line| line.split(',').collect::<Vec<_>>())
        .map(|cells| (cells[3].parse().unwrap(), cells[0].parse().unwrap()))
        .collect();
    let bits = of_kind(3).enumerate().flat_map(|(at, byte)| (0..8).map(move |k| (8 * at + k, byte >> k & 1)));
    let set = bits.filter(|&(_, bit)| bit == 1);
    let decision = |(at, _)| Decision { sample: at / 432, patch: patch_of_bit[&(at % 432)] };
    (waveforms, set.map(decision).collect())
}

fn camera() -> Geometry {
    Geometry::load(&data().join("pixels.csv")).unwrap()
}

fn keep(name: &str, svg: &str) {
    save(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), svg).unwrap();
}

fn texts<'a>(document: &'a Document<'_>) -> Vec<&'a str> {
    document.descendants().filter(|node| node.has_tag_name("text")).filter_map(|node| node.text()).collect()
}

fn group<'a>(document: &'a Document<'a>, id: &str) -> Option<Node<'a, 'a>> {
    document.descendants().find(|node| node.attribute("id") == Some(id))
}

/// Corners of all closed lines in the data of a path.
fn corners(data: &str) -> Vec<(f64, f64)> {
    data.split(['M', 'L', 'Z'])
        .filter(|point| !point.is_empty())
        .map(|point| point.split_once(' ').unwrap())
        .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
        .collect()
}

#[test]
fn a_shower_is_seen_where_the_trigger_saw_it() {
    let (waveforms, triggered) = recorded(1_027_911);
    assert_eq!(triggered.len(), 12);
    let event = Event {
        run: "SST-1M, 22 August 2018",
        number: 1_027_911,
        waveforms: &waveforms,
        samples: SAMPLES,
        triggered: &triggered,
    };
    let camera = camera();
    let svg = draw(&camera, &event).unwrap();
    keep("event.svg", &svg);

    let document = Document::parse(&svg).unwrap();
    let texts = texts(&document);
    for expected in ["SST-1M, 22 August 2018: event 1027911", "charge", "[ADC count]", "200 mm"] {
        assert!(texts.contains(&expected), "{texts:?} lacks {expected:?}");
    }
    let patches: BTreeSet<u16> = triggered.iter().map(|decision| decision.patch).collect();
    let told = format!(
        "{} patches above the trigger's threshold, first patch {} in sample 9",
        patches.len(),
        triggered[0].patch
    );
    assert!(texts.contains(&told.as_str()), "{texts:?} lacks {told:?}");
    assert!(texts.iter().any(|text| text.contains("samples 8–14 summed")), "{texts:?}");

    // All pixels, all in the picture, in more than a few colours.
    let pixels: Vec<Node<'_, '_>> =
        group(&document, "pixels").unwrap().children().filter(Node::is_element).collect();
    assert_eq!(pixels.len(), camera.pixels().len());
    let place = |pixel: &Node<'_, '_>| -> (f64, f64) {
        let corners = corners(pixel.attribute("d").unwrap());
        assert_eq!(corners.len(), 6);
        assert!(corners.iter().all(|&(x, y)| (20.0..700.0).contains(&x) && (80.0..750.0).contains(&y)));
        let sum = corners.iter().fold((0.0, 0.0), |sum, corner| (sum.0 + corner.0, sum.1 + corner.1));
        (sum.0 / 6.0, sum.1 / 6.0)
    };
    let places: Vec<(f64, f64)> = pixels.iter().map(place).collect();
    let colours: BTreeSet<&str> = pixels.iter().map(|pixel| pixel.attribute("fill").unwrap()).collect();
    assert!(colours.len() > 100);

    // The brightest pixel is close to a triggered patch: the camera and its trigger see the same thing.
    let brightest = pixels.iter().position(|pixel| pixel.attribute("fill") == Some("#fde725")).unwrap();
    let near = |at: &(f64, f64)| (at.0 - places[brightest].0).hypot(at.1 - places[brightest].1) < 60.0;
    let triggered_pixels =
        camera.pixels().iter().zip(&places).filter(|(pixel, _)| patches.contains(&pixel.patch));
    assert!(triggered_pixels.map(|(_, place)| place).any(near));

    // The outline runs around the triggered patches: its corners are corners of their pixels.
    let outline = group(&document, "triggered").unwrap();
    let outline = corners(outline.first_element_child().unwrap().attribute("d").unwrap());
    for corner in outline {
        let distance = camera
            .pixels()
            .iter()
            .zip(&places)
            .filter(|(pixel, _)| patches.contains(&pixel.patch))
            .map(|(_, place)| (place.0 - corner.0).hypot(place.1 - corner.1))
            .fold(f64::INFINITY, f64::min);
        assert!((8.0..11.0).contains(&distance), "{distance}");
    }
}

#[test]
fn an_event_without_a_trigger_has_no_outline() {
    let (waveforms, triggered) = recorded(1_027_892);
    assert!(triggered.is_empty());
    let event =
        Event { run: "test", number: 1_027_892, waveforms: &waveforms, samples: SAMPLES, triggered: &[] };
    let svg = draw(&camera(), &event).unwrap();
    keep("event-without-trigger.svg", &svg);
    let document = Document::parse(&svg).unwrap();
    assert!(group(&document, "triggered").is_none());
    assert!(texts(&document).contains(&"no patch above the trigger's threshold"));
}

#[test]
fn other_cameras_waveforms_are_refused() {
    let event = Event { run: "", number: 0, waveforms: &[0; 100], samples: SAMPLES, triggered: &[] };
    let error = draw(&camera(), &event).unwrap_err();
    assert_eq!(error.to_string(), "100 samples, expected 1296 pixels × 50");
    assert!(draw(&camera(), &Event { waveforms: &[], samples: 0, ..event }).is_err());
}

/// A replay as it might be: some seconds, with a start, a dip and an end.
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
    let samples: Vec<Sample> = (1..=192)
        .map(|k| {
            payload += (rate(k) * 0.1) as u64;
            Sample {
                at_s: Seconds(f64::from(k) * 0.1),
                events: payload / 158_400,
                payload_bytes: Bytes(payload),
            }
        })
        .collect();
    RunReport {
        name: "sst1m replay".into(),
        payload_bytes: Bytes(payload),
        duration_s: Seconds(19.2),
        memcpy: Some(Memcpy { block_bytes: Bytes(1 << 20), bytes_per_s: BytesPerSecond(12.1e9) }),
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

    // Two marks of the axis give its scale; the line for memcpy has to be where its number is.
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

    // So does the curve: its mean is the mean rate.
    let curve = document.descendants().find(|node| node.attribute("stroke-width") == Some("2")).unwrap();
    let curve = corners(curve.attribute("d").unwrap());
    assert_eq!(curve.len(), 2 * 192);
    let area: f64 = curve.windows(2).map(|pair| (pair[1].0 - pair[0].0) * value(pair[0].1)).sum();
    let mean = area / (curve[curve.len() - 1].0 - curve[0].0);
    let expected = report.derived().payload_bytes_per_s.unwrap().0 / 1e9;
    assert!((mean - expected).abs() < 0.03, "{mean}, expected {expected}");
}

#[test]
fn short_and_empty_runs_have_pictures_too() {
    let document = throughput::draw(&RunReport::default());
    assert!(texts(&Document::parse(&document).unwrap()).contains(&"nothing was moved"));
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
    fn any_run_has_a_picture(
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
            memcpy: memcpy.map(|(block, rate)| Memcpy { block_bytes: Bytes(block), bytes_per_s: BytesPerSecond(rate) }),
            samples: samples
                .into_iter()
                .map(|(at, bytes)| Sample { at_s: Seconds(at), events: bytes, payload_bytes: Bytes(bytes) })
                .collect(),
            ..RunReport::default()
        };
        Document::parse(&throughput::draw(&report)).unwrap();
    }

    #[test]
    fn any_event_has_a_picture(seed: i16, run: String, number: u64, sample: usize, patch: u16) {
        let waveforms: Vec<i16> = (0..1296 * 2).map(|k: i32| (k as i16).wrapping_mul(seed)).collect();
        let triggered = [Decision { sample, patch }];
        let event = Event { run: &run, number, waveforms: &waveforms, samples: 2, triggered: &triggered };
        Document::parse(&draw(&camera(), &event).unwrap()).unwrap();
    }
}
