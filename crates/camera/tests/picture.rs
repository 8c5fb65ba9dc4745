//! Event displays of recorded events: well-formed, complete, and consistent with the trigger.
//!
//! The tests leave the images in the build directory, for inspection.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use millstream_camera::PixelGeometry;
use millstream_camera::format::{DECISION_STRIDE, PATCHES, SAMPLES, TRIGGER_DECISIONS, WAVEFORMS};
use millstream_camera::picture::{Decision, Event, draw};
use millstream_camera::trigger::TriggerGeometry;
use millstream_fragment::SourceKind;
use millstream_fragment::stream::Stream;
use millstream_fragment::unpack::unpack;
use millstream_report::save;
use proptest::prelude::*;
use roxmltree::{Document, Node};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m")
}

/// The waveforms of an event in stored order, and the decisions of the camera's own trigger.
fn recorded(number: u64) -> (Vec<i16>, Vec<Decision>) {
    let files = unpack(&data(), &Path::new(env!("CARGO_TARGET_TMPDIR")).join("sst1m")).unwrap();
    let streams: Vec<Stream> = files.iter().map(|file| Stream::open(file).unwrap()).collect();
    let sources: Vec<_> = streams.iter().flat_map(Stream::sources).collect();
    let of_kind = |kind: SourceKind| {
        let mut found: Vec<_> = sources.iter().filter(|source| source.kind() == kind).collect();
        found.sort_by_key(|source| source.id());
        found.into_iter().flat_map(|s| s.fragment(s.find(number).unwrap()).unwrap().payload).copied()
    };
    let bytes: Vec<u8> = of_kind(WAVEFORMS).collect();
    let waveforms = bytes.as_chunks().0.iter().map(|&sample| i16::from_le_bytes(sample)).collect();

    let geometry = TriggerGeometry::load(&data().join("patches.csv")).unwrap();
    let patches: Vec<u16> = geometry.patches().collect();
    let bits = of_kind(TRIGGER_DECISIONS)
        .enumerate()
        .flat_map(|(at, byte)| (0..8).map(move |k| (8 * at + k, byte >> k & 1)));
    let set = bits.filter(|&(_, bit)| bit == 1);
    let decision = |(at, _)| Decision { sample: at / (8 * DECISION_STRIDE), patch: patches[at % PATCHES] };
    (waveforms, set.map(decision).collect())
}

fn camera() -> PixelGeometry {
    PixelGeometry::load(&data().join("pixels.csv")).unwrap()
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
fn shower_is_drawn_where_the_camera_triggered() {
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
    let trigger_line = format!(
        "{} patches above the trigger's threshold, first patch {} in sample 9",
        patches.len(),
        triggered[0].patch
    );
    assert!(texts.contains(&trigger_line.as_str()), "{texts:?} lacks {trigger_line:?}");
    assert!(texts.iter().any(|text| text.contains("samples 8–14 summed")), "{texts:?}");

    // All pixels are inside the image, in many colours.
    let pixels: Vec<Node<'_, '_>> =
        group(&document, "pixels").unwrap().children().filter(Node::is_element).collect();
    assert_eq!(pixels.len(), camera.pixels().len());
    let centre = |pixel: &Node<'_, '_>| -> (f64, f64) {
        let corners = corners(pixel.attribute("d").unwrap());
        assert_eq!(corners.len(), 6);
        assert!(corners.iter().all(|&(x, y)| (20.0..700.0).contains(&x) && (80.0..750.0).contains(&y)));
        let sum = corners.iter().fold((0.0, 0.0), |sum, corner| (sum.0 + corner.0, sum.1 + corner.1));
        (sum.0 / 6.0, sum.1 / 6.0)
    };
    let centres: Vec<(f64, f64)> = pixels.iter().map(centre).collect();
    let colours: BTreeSet<&str> = pixels.iter().map(|pixel| pixel.attribute("fill").unwrap()).collect();
    assert!(colours.len() > 100);

    // The brightest pixel is close to a triggered patch.
    let brightest = pixels.iter().position(|pixel| pixel.attribute("fill") == Some("#fde725")).unwrap();
    let near = |at: &(f64, f64)| (at.0 - centres[brightest].0).hypot(at.1 - centres[brightest].1) < 60.0;
    let triggered_pixels =
        camera.pixels().iter().zip(&centres).filter(|(pixel, _)| patches.contains(&pixel.patch));
    assert!(triggered_pixels.map(|(_, centre)| centre).any(near));

    // The corners of the outline are corners of triggered pixels.
    let outline = group(&document, "triggered").unwrap();
    let outline = corners(outline.first_element_child().unwrap().attribute("d").unwrap());
    for corner in outline {
        let distance = camera
            .pixels()
            .iter()
            .zip(&centres)
            .filter(|(pixel, _)| patches.contains(&pixel.patch))
            .map(|(_, centre)| (centre.0 - corner.0).hypot(centre.1 - corner.1))
            .fold(f64::INFINITY, f64::min);
        assert!((8.0..11.0).contains(&distance), "{distance}");
    }
}

#[test]
fn event_without_trigger_has_no_outline() {
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
fn waveforms_of_another_shape_are_refused() {
    let event = Event { run: "", number: 0, waveforms: &[0; 100], samples: SAMPLES, triggered: &[] };
    let error = draw(&camera(), &event).unwrap_err();
    assert_eq!(error.to_string(), "100 samples, expected 1296 pixels × 50");
    assert!(draw(&camera(), &Event { waveforms: &[], samples: 0, ..event }).is_err());
}

proptest! {
    #[test]
    fn arbitrary_events_are_drawn(seed: i16, run: String, number: u64, sample: usize, patch: u16) {
        let waveforms: Vec<i16> = (0..1296 * 2).map(|k: i32| (k as i16).wrapping_mul(seed)).collect();
        let triggered = [Decision { sample, patch }];
        let event = Event { run: &run, number, waveforms: &waveforms, samples: 2, triggered: &triggered };
        Document::parse(&draw(&camera(), &event).unwrap()).unwrap();
    }
}
