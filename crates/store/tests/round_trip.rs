//! Arbitrary events round-trip through a file.

use std::num::NonZeroUsize;

use hdf5_metno::{File, H5Type};
use millstream_fragment::{Fragment, SourceId, SourceKind};
use millstream_store::{
    Compression, Decision, DecisionSchema, ElementType, Event, EventReader, EventWriter, FragmentArray, Run,
    Schema, Source, WriteOptions,
};
use proptest::prelude::*;

const ELEMENTS_PER_FRAGMENT: usize = 3;

/// One source's fragment in an event.
#[derive(Clone, Debug)]
enum Part {
    Missing,
    Empty,
    Intact(Vec<u8>),
    Corrupt(Vec<u8>),
}

impl Part {
    fn payload(&self) -> &[u8] {
        match self {
            Self::Missing | Self::Empty => &[],
            Self::Intact(payload) | Self::Corrupt(payload) => payload,
        }
    }

    fn state(&self) -> u8 {
        match self {
            Self::Missing => 0,
            Self::Empty | Self::Intact(_) => 1,
            Self::Corrupt(_) => 2,
        }
    }
}

fn part(len: impl Strategy<Value = usize> + 'static) -> impl Strategy<Value = Part> {
    let payload = len.prop_flat_map(|len| prop::collection::vec(any::<u8>(), len)).boxed();
    prop_oneof![
        1 => Just(Part::Missing),
        1 => Just(Part::Empty),
        5 => payload.clone().prop_map(Part::Intact),
        1 => payload.prop_map(Part::Corrupt),
    ]
}

/// Fragments of three sources in an array, then of two sources outside arrays; the decision map.
type Recorded = (Vec<Part>, [u8; 4]);

fn recorded(element: ElementType) -> impl Strategy<Value = Recorded> {
    let fixed = prop::collection::vec(part(Just(ELEMENTS_PER_FRAGMENT * element.size())), 3);
    let flat = prop::collection::vec(part(0..40usize), 2);
    let parts = (fixed, flat).prop_map(|(fixed, flat)| [fixed, flat].concat());
    (parts, any::<[u8; 4]>())
}

fn elements() -> impl Strategy<Value = ElementType> {
    prop::sample::select(vec![
        ElementType::U8,
        ElementType::U16,
        ElementType::I16,
        ElementType::U32,
        ElementType::I32,
    ])
}

fn schema(element: ElementType) -> Schema {
    let source = |id| Source { id: SourceId(id), kind: SourceKind(id % 2), name: format!("s{id}") };
    Schema {
        run: Run::default(),
        sources: (0..5).map(source).collect(),
        arrays: vec![FragmentArray {
            dataset: "any/array".into(),
            element,
            dims: vec![("a".into(), 3), ("b".into(), ELEMENTS_PER_FRAGMENT)],
            // Not the order of the ids.
            sources: [2, 0, 1].map(SourceId).to_vec(),
            unit: "count".into(),
            description: "numbers".into(),
        }],
        decisions: Some(DecisionSchema {
            samples: 2,
            dims: vec![("byte".into(), 2)],
            patch_of_bit: (100..116).collect(),
        }),
        constants: Vec::new(),
    }
}

fn read<T: H5Type>(file: &File, dataset: &str) -> Vec<T> {
    file.dataset(dataset).unwrap().as_reader().no_convert().read_raw().unwrap()
}

fn array_bytes(file: &File, element: ElementType) -> Vec<u8> {
    let path = "any/array";
    match element {
        ElementType::U8 => read::<u8>(file, path),
        ElementType::U16 => read::<u16>(file, path).iter().flat_map(|number| number.to_le_bytes()).collect(),
        ElementType::I16 => read::<i16>(file, path).iter().flat_map(|number| number.to_le_bytes()).collect(),
        ElementType::U32 => read::<u32>(file, path).iter().flat_map(|number| number.to_le_bytes()).collect(),
        ElementType::I32 => read::<i32>(file, path).iter().flat_map(|number| number.to_le_bytes()).collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn events_round_trip(
        (element, events) in
            elements().prop_flat_map(|e| (Just(e), prop::collection::vec(recorded(e), 0..30))),
        block in 1..12usize,
        level in prop::option::of(1..=9u8),
        backwards: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any.h5");
        let options = WriteOptions {
            events_per_write: NonZeroUsize::new(block).unwrap(),
            compression: level.map_or(Compression::None, Compression::Gzip),
            replace: false,
        };
        let mut writer = EventWriter::create(&path, &schema(element), &options).unwrap();
        for (number, (parts, decisions)) in (70..).zip(&events) {
            let mut fragments = Vec::new();
            for (id, part) in (0..).map(SourceId).zip(parts) {
                let mut fragment = Fragment::new(number, part.payload());
                fragment.crc ^= u32::from(part.state() == 2);
                if !matches!(part, Part::Missing) {
                    fragments.push((id, fragment));
                }
            }
            if backwards {
                fragments.reverse();
            }
            let event =
                Event { number, batch: 1, fragments: &fragments, decisions, readout_lost: number % 3 == 0 };
            writer.append(&event).unwrap();
        }
        let stored = writer.finish().unwrap();

        let all: Vec<&Part> = events.iter().flat_map(|(parts, _)| parts).collect();
        let states: Vec<u8> = all.iter().map(|part| part.state()).collect();
        let count = |state| states.iter().filter(|&&found| found == state).count() as u64;
        prop_assert_eq!(stored.events, events.len() as u64);
        prop_assert_eq!((stored.missing, stored.corrupt), (count(0), count(2)));
        prop_assert_eq!(stored.fragments, count(1) + count(2));
        prop_assert_eq!(stored.payload_bytes, all.iter().map(|part| part.payload().len() as u64).sum::<u64>());

        let file = File::open(&path).unwrap();
        prop_assert_eq!(read::<u64>(&file, "events/number"), (70..70 + stored.events).collect::<Vec<_>>());
        prop_assert_eq!(read::<u8>(&file, "events/fragment_state"), states);
        let status = |(number, (parts, _)): (u64, &Recorded)| {
            let any = |state| u8::from(parts.iter().any(|part| part.state() == state));
            any(0) | any(2) << 1 | u8::from(number % 3 == 0) << 2
        };
        prop_assert_eq!(read::<u8>(&file, "events/status"), (70..).zip(&events).map(status).collect::<Vec<_>>());
        let mut array = Vec::new();
        for (parts, _) in &events {
            for source in [2, 0, 1] {
                let mut part = parts[source].payload().to_vec();
                part.resize(ELEMENTS_PER_FRAGMENT * element.size(), 0);
                array.extend(part);
            }
        }
        prop_assert_eq!(array_bytes(&file, element), array);
        for source in [3, 4] {
            let data = read::<u8>(&file, &format!("fragments/s{source}/data"));
            let offset = read::<u64>(&file, &format!("fragments/s{source}/offset"));
            let length = read::<u32>(&file, &format!("fragments/s{source}/length"));
            for (row, (parts, _)) in events.iter().enumerate() {
                let start = offset[row] as usize;
                prop_assert_eq!(&data[start..start + length[row] as usize], parts[source].payload());
            }
        }
        let bits_set = read::<u32>(&file, "trigger/bits_set");
        let [first_sample, first_bit, first_patch] = ["first_sample", "first_bit", "first_patch"]
            .map(|dataset| read::<i32>(&file, &format!("trigger/{dataset}")));
        drop(file);

        let reader = EventReader::open(&path).unwrap();
        for (row, (_, decisions)) in events.iter().enumerate() {
            let trigger = reader.trigger(row).unwrap().unwrap();
            prop_assert_eq!(&trigger.decisions, decisions);
            let bits = u32::from_le_bytes(*decisions);
            let set = (0..32).filter(|bit| bits >> bit & 1 == 1);
            let set: Vec<Decision> =
                set.map(|bit| Decision { sample: bit / 16, patch: 100 + (bit % 16) as u16 }).collect();
            let first = set.first();
            prop_assert_eq!(bits_set[row], bits.count_ones());
            prop_assert_eq!(first_sample[row], first.map_or(-1, |first| first.sample as i32));
            prop_assert_eq!(first_patch[row], first.map_or(-1, |first| i32::from(first.patch)));
            prop_assert_eq!(first_bit[row], first.map_or(-1, |first| i32::from(first.patch) - 100));
            prop_assert_eq!(trigger.set, set);
        }
        prop_assert!(reader.trigger(events.len()).is_err());
    }
}

#[test]
fn foreign_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let shown = |name: &str| {
        let error = EventReader::open(folder.path().join(name)).unwrap_err().to_string();
        error.strip_prefix(folder.path().to_str().unwrap()).unwrap().to_owned()
    };
    assert_eq!(shown("none.h5"), "/none.h5: cannot open: No such file or directory (os error 2)");
    std::fs::write(folder.path().join("text.h5"), "not HDF5").unwrap();
    assert!(shown("text.h5").starts_with("/text.h5: cannot read file: file signature not found"));

    let create = |name: &str| File::create(folder.path().join(name)).unwrap();
    drop(create("other.h5"));
    let expected = "/other.h5: attribute format is missing, expected \"millstream events\"";
    assert_eq!(shown("other.h5"), expected);

    let newer = create("newer.h5");
    let format: hdf5_metno::types::VarLenUnicode = "millstream events".parse().unwrap();
    newer
        .new_attr::<hdf5_metno::types::VarLenUnicode>()
        .create("format")
        .unwrap()
        .write_scalar(&format)
        .unwrap();
    newer.new_attr::<u32>().create("version").unwrap().write_scalar(&2u32).unwrap();
    drop(newer);
    assert_eq!(shown("newer.h5"), "/newer.h5: attribute version is 2, expected 1");
}
