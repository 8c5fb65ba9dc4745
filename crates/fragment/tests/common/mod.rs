//! Generated streams for tests.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::ops::Range;
use std::path::Path;

use millstream_fragment::stream::{Stream, StreamWriter};
use millstream_fragment::{Alignment, SourceId, SourceKind};
use proptest::prelude::*;

/// One source of a file.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    pub(crate) id: SourceId,
    pub(crate) kind: SourceKind,
    pub(crate) name: String,
    /// In ascending order of events.
    pub(crate) fragments: Vec<(u64, Vec<u8>)>,
}

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) alignment: Alignment,
    pub(crate) events: Range<u64>,
    pub(crate) sources: Vec<Input>,
}

impl File {
    pub(crate) fn write(&self, path: &Path) {
        let mut writer = StreamWriter::create(path, self.events.clone(), self.alignment).unwrap();
        for input in &self.sources {
            let mut source = writer.source(input.id, input.kind, &input.name).unwrap();
            for (event, payload) in &input.fragments {
                source.push(*event, payload).unwrap();
            }
        }
        writer.finish().unwrap();
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.mfs");
        self.write(&path);
        std::fs::read(path).unwrap()
    }

    /// The file, parsed from memory.
    pub(crate) fn stream(&self) -> Stream<Vec<u8>> {
        Stream::parse("some.mfs", self.bytes()).unwrap()
    }
}

/// Three sources, four events: one with a gap, one with an empty fragment, one without fragments.
pub(crate) fn small() -> File {
    let input = |id, name: &str, fragments: &[(u64, &[u8])]| Input {
        id: SourceId(id),
        kind: SourceKind(id + 100),
        name: name.to_owned(),
        fragments: fragments.iter().map(|&(event, payload)| (event, payload.to_vec())).collect(),
    };
    File {
        alignment: Alignment::MIN,
        events: 1000..1004,
        sources: vec![
            input(1, "gap", &[(1000, b"alpha"), (1001, b"beta and more"), (1003, b"delta")]),
            input(2, "", &[(1002, b"")]),
            input(7, "sixteen bytes ok", &[]),
        ],
    }
}

pub(crate) fn alignments() -> impl Strategy<Value = Alignment> {
    (3..=12_u32).prop_map(|log| Alignment::new(1 << log).unwrap())
}

/// Files of up to 5 sources and 12 events, with fragments of up to 200 bytes, one in six missing.
pub(crate) fn files() -> impl Strategy<Value = File> {
    let first = prop_oneof![Just(0), 1..2_000_000_u64, Just(u64::MAX - 12)];
    (alignments(), first, 1..=12_usize).prop_flat_map(|(alignment, first, n_events)| {
        let payload = prop::option::weighted(5.0 / 6.0, prop::collection::vec(any::<u8>(), 0..200));
        let source = (1..9_u32, any::<u32>(), "[a-zß]{0,8}", prop::collection::vec(payload, n_events));
        prop::collection::vec(source, 1..=5).prop_map(move |sources| {
            let mut id = 0;
            let input = |(step, kind, name, payloads): (u32, u32, String, Vec<Option<Vec<u8>>>)| {
                id += step;
                let fragments =
                    payloads.into_iter().zip(first..).filter_map(|(payload, event)| Some((event, payload?)));
                Input { id: SourceId(id), kind: SourceKind(kind), name, fragments: fragments.collect() }
            };
            File {
                alignment,
                events: first..first + n_events as u64,
                sources: sources.into_iter().map(input).collect(),
            }
        })
    })
}
