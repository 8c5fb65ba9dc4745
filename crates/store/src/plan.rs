//! The schema, checked: where each source's fragments go.

use std::collections::BTreeSet;

use millstream_fragment::SourceId;

use crate::schema::{Array, Compression, Constant, Decisions, Options, Schema, Source, Values};
use crate::{Event, Refusal, SchemaError};

/// Longest row of an array, in bytes. HDF5 cannot have a chunk of 4 GiB, and a row is at least a chunk.
const MAX_ROW: usize = 1 << 30;

/// Where the fragments go.
#[derive(Debug)]
pub(crate) struct Plan {
    /// All sources, by ascending id: the columns of `/events/fragment_…`.
    pub(crate) slots: Vec<Slot>,
    /// Length of a decision map, in bytes; 0 without a trigger.
    pub(crate) decision_bytes: usize,
    arrays: Vec<String>,
}

/// One source.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) source: Source,
    pub(crate) place: Place,
}

/// Where the fragments of one source go.
#[derive(Debug)]
pub(crate) enum Place {
    /// Into a row of an array: its index, the position among its sources, and the length of each
    /// fragment, in bytes.
    Part { array: usize, part: usize, bytes: usize },
    /// Behind one another, in the flat dataset with this index.
    Flat { flat: usize, group: String },
}

impl Plan {
    /// Checks everything in the schema that can be checked without the file.
    pub(crate) fn check(schema: &Schema, options: &Options) -> Result<Self, SchemaError> {
        if let Compression::Gzip(level @ (0 | 10..)) = options.compression {
            let problem = format!("level {level}, expected 1 to 9");
            return Err(SchemaError::new("options.compression", problem));
        }
        let mut sources = schema.sources.clone();
        sources.sort_by_key(|source| source.id);
        if let Some(twice) = sources.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(SchemaError::new("sources", format!("{} is there twice", twice[0].id)));
        }
        if sources.is_empty() {
            return Err(SchemaError::new("sources", "none"));
        }

        let mut parts: Vec<Option<Place>> = sources.iter().map(|_| None).collect();
        for (index, array) in schema.arrays.iter().enumerate() {
            place_array(index, array, &sources, &mut parts)?;
        }
        let mut flats = 0;
        let mut slots = Vec::with_capacity(sources.len());
        for (source, part) in sources.into_iter().zip(parts) {
            let place = match part {
                Some(place) => place,
                None => {
                    let group = flat_group(&source)?;
                    flats += 1;
                    Place::Flat { flat: flats - 1, group }
                }
            };
            slots.push(Slot { source, place });
        }
        let decision_bytes = schema.decisions.as_ref().map_or(Ok(0), check_decisions)?;
        for (index, constant) in schema.constants.iter().enumerate() {
            check_constant(&format!("constants[{index}]"), constant)?;
        }
        check_paths(schema, &slots)?;
        let arrays = schema.arrays.iter().map(|array| array.dataset.clone()).collect();
        Ok(Self { slots, decision_bytes, arrays })
    }

    /// Path of the dataset of an array.
    pub(crate) fn array(&self, index: usize) -> &str {
        &self.arrays[index]
    }

    /// Finds the place of each fragment: `seats[slot]` becomes the index of that source's fragment in the
    /// event, or nothing if the event has none.
    pub(crate) fn seat(&self, event: &Event<'_>, seats: &mut Vec<Option<usize>>) -> Result<(), Refusal> {
        let number = event.number;
        seats.clear();
        seats.resize(self.slots.len(), None);
        for (index, &(source_id, ref fragment)) in event.fragments.iter().enumerate() {
            // Fragments usually come in the order of the sources.
            let slot = match self.slots.get(index) {
                Some(slot) if slot.source.id == source_id => index,
                _ => self
                    .slots
                    .binary_search_by_key(&source_id, |slot| slot.source.id)
                    .map_err(|_| Refusal::UnknownSource { event: number, source_id })?,
            };
            if seats[slot].replace(index).is_some() {
                return Err(Refusal::Twice { event: number, source_id });
            }
            if fragment.event != number {
                return Err(Refusal::OtherEvent { event: number, source_id, found: fragment.event });
            }
            if let Place::Part { array, bytes, .. } = self.slots[slot].place {
                let found = fragment.payload.len();
                if found != bytes && found != 0 {
                    let array = self.array(array).to_owned();
                    return Err(Refusal::Length { event: number, source_id, found, array, expected: bytes });
                }
            }
        }
        let found = event.decisions.len();
        if found != self.decision_bytes {
            return Err(Refusal::Decisions { event: number, found, expected: self.decision_bytes });
        }
        Ok(())
    }
}

fn place_array(
    index: usize,
    array: &Array,
    sources: &[Source],
    places: &mut [Option<Place>],
) -> Result<(), SchemaError> {
    let field = |name: &str| format!("arrays[{index}].{name}");
    let elements = product(&array.dims).ok_or_else(|| {
        SchemaError::new(field("dims"), format!("{:?}, expected lengths from 1 up", array.dims))
    })?;
    if array.sources.is_empty() {
        return Err(SchemaError::new(field("sources"), "none"));
    }
    let row = elements.checked_mul(array.element.size()).filter(|&row| row <= MAX_ROW);
    let row = row.ok_or_else(|| {
        SchemaError::new(field("dims"), format!("{elements} numbers in a row, more than {MAX_ROW} bytes"))
    })?;
    if elements % array.sources.len() != 0 {
        let problem = format!("{elements} numbers in a row cannot be shared by {}", array.sources.len());
        return Err(SchemaError::new(field("sources"), problem));
    }
    for (part, id) in array.sources.iter().enumerate() {
        let slot = find(sources, *id).ok_or_else(|| {
            SchemaError::new(field("sources"), format!("{id} is not among the schema's sources"))
        })?;
        if places[slot].is_some() {
            return Err(SchemaError::new(field("sources"), format!("{id} is in an array already")));
        }
        places[slot] = Some(Place::Part { array: index, part, bytes: row / array.sources.len() });
    }
    Ok(())
}

fn find(sources: &[Source], id: SourceId) -> Option<usize> {
    sources.binary_search_by_key(&id, |source| source.id).ok()
}

/// Number of places in the shape, if each dimension has some.
fn product(dims: &[(String, usize)]) -> Option<usize> {
    dims.iter().try_fold(1usize, |all, &(_, len)| all.checked_mul(len)).filter(|&all| all > 0)
}

fn check_decisions(decisions: &Decisions) -> Result<usize, SchemaError> {
    let map = product(&decisions.dims);
    let bytes =
        map.and_then(|map| map.checked_mul(decisions.samples)).filter(|bytes| (1..=MAX_ROW).contains(bytes));
    let (Some(map), Some(bytes)) = (map, bytes) else {
        let problem =
            format!("{} samples of {:?}, expected 1 to {MAX_ROW} bytes", decisions.samples, decisions.dims);
        return Err(SchemaError::new("decisions.dims", problem));
    };
    let bits = 8 * map;
    if decisions.patch_of_bit.len() != bits {
        let problem = format!("{} patches for {bits} bits", decisions.patch_of_bit.len());
        return Err(SchemaError::new("decisions.patch_of_bit", problem));
    }
    Ok(bytes)
}

fn check_constant(field: &str, constant: &Constant) -> Result<(), SchemaError> {
    let empty = match &constant.values {
        Values::U16(values) => values.is_empty(),
        Values::I32(values) => values.is_empty(),
        Values::F64(values) => values.is_empty(),
    };
    if empty { Err(SchemaError::new(format!("{field}.values"), "none")) } else { Ok(()) }
}

/// Name of the group of a source with flat fragments.
fn flat_group(source: &Source) -> Result<String, SchemaError> {
    if source.name.is_empty() {
        return Ok(format!("source_{:#x}", source.id.0));
    }
    if !is_component(&source.name) {
        let problem = format!("{:?} of {} cannot name a group", source.name, source.id);
        return Err(SchemaError::new("sources.name", problem));
    }
    Ok(source.name.clone())
}

fn is_component(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

/// Datasets of the caller have names of their own, outside the groups that every file has.
fn check_paths(schema: &Schema, slots: &[Slot]) -> Result<(), SchemaError> {
    let mut groups = BTreeSet::new();
    for slot in slots {
        if let Place::Flat { group, .. } = &slot.place
            && !groups.insert(group.as_str())
        {
            return Err(SchemaError::new("sources.name", format!("{group:?} is there twice")));
        }
    }
    let arrays = schema.arrays.iter().enumerate().map(|(k, array)| (format!("arrays[{k}]"), &array.dataset));
    let constants = schema.constants.iter().enumerate().map(|(k, c)| (format!("constants[{k}]"), &c.dataset));
    let mut paths = BTreeSet::new();
    for (owner, path) in arrays.chain(constants) {
        let field = format!("{owner}.dataset");
        if !path.split('/').all(is_component) {
            return Err(SchemaError::new(field, format!("{path:?} is not a path as in group/name")));
        }
        let top = path.split('/').next().unwrap_or_default();
        if ["run", "sources", "events", "fragments", "trigger"].contains(&top) {
            return Err(SchemaError::new(field, format!("{path:?}: the group {top} is taken")));
        }
        if !paths.insert(path) {
            return Err(SchemaError::new(field, format!("{path:?} is there twice")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Element, Input, Run};
    use millstream_fragment::SourceKind;

    fn source(id: u32, name: &str) -> Source {
        Source { id: SourceId(id), kind: SourceKind(1), name: name.into() }
    }

    fn array(dataset: &str, lens: &[usize], sources: &[u32]) -> Array {
        Array {
            dataset: dataset.into(),
            element: Element::I16,
            dims: lens.iter().map(|&len| ("place".to_owned(), len)).collect(),
            sources: sources.iter().copied().map(SourceId).collect(),
            unit: String::new(),
            description: String::new(),
        }
    }

    fn schema() -> Schema {
        Schema {
            run: Run { inputs: vec![Input::default()], ..Run::default() },
            sources: vec![source(9, ""), source(2, "b"), source(1, "a"), source(3, "c")],
            arrays: vec![array("board/samples", &[6, 5], &[2, 1, 3])],
            decisions: Some(Decisions {
                samples: 4,
                dims: vec![("byte".into(), 2)],
                patch_of_bit: (0..16).collect(),
            }),
            constants: vec![Constant {
                dataset: "board/id".into(),
                values: Values::U16(vec![1]),
                dim: "board".into(),
                unit: String::new(),
                description: String::new(),
            }],
        }
    }

    #[test]
    fn every_source_has_one_place() {
        let plan = Plan::check(&schema(), &Options::default()).unwrap();
        let places: Vec<String> = plan.slots.iter().map(|slot| format!("{:?}", slot.place)).collect();
        assert_eq!(
            places,
            [
                "Part { array: 0, part: 1, bytes: 20 }",
                "Part { array: 0, part: 0, bytes: 20 }",
                "Part { array: 0, part: 2, bytes: 20 }",
                "Flat { flat: 0, group: \"source_0x9\" }",
            ]
        );
        assert_eq!(plan.decision_bytes, 8);
    }

    #[test]
    fn a_schema_that_describes_no_file_is_refused() {
        let refused = |change: &dyn Fn(&mut Schema), expected: &str| {
            let mut schema = schema();
            change(&mut schema);
            let error = Plan::check(&schema, &Options::default()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        refused(&|s| s.sources.clear(), "sources: none");
        refused(&|s| s.sources[3].id = SourceId(2), "sources: source 0x2 is there twice");
        refused(
            &|s| s.sources[0].name = "x/y".into(),
            "sources.name: \"x/y\" of source 0x9 cannot name a group",
        );
        refused(
            &|s| s.sources.extend([source(10, "x"), source(11, "x")]),
            "sources.name: \"x\" is there twice",
        );
        refused(&|s| s.arrays[0].sources.clear(), "arrays[0].sources: none");
        refused(
            &|s| s.arrays[0].sources[1] = SourceId(7),
            "arrays[0].sources: source 0x7 is not among the schema's sources",
        );
        refused(
            &|s| s.arrays[0].sources[1] = SourceId(2),
            "arrays[0].sources: source 0x2 is in an array already",
        );
        refused(
            &|s| s.arrays[0].dims[0].1 = 4,
            "arrays[0].sources: 20 numbers in a row cannot be shared by 3",
        );
        refused(
            &|s| s.arrays[0].dims[0].1 = 0,
            "arrays[0].dims: [(\"place\", 0), (\"place\", 5)], expected lengths from 1 up",
        );
        refused(
            &|s| s.arrays[0].dims[0].1 = 600_000_000,
            "arrays[0].dims: 3000000000 numbers in a row, more than 1073741824 bytes",
        );
        for path in ["", "/a", "a//b", "a/..", "a/"] {
            let expected = format!("arrays[0].dataset: {path:?} is not a path as in group/name");
            refused(&|s| s.arrays[0].dataset = path.into(), &expected);
        }
        refused(
            &|s| s.arrays[0].dataset = "events/status".into(),
            "arrays[0].dataset: \"events/status\": the group events is taken",
        );
        refused(
            &|s| s.constants[0].dataset = "board/samples".into(),
            "constants[0].dataset: \"board/samples\" is there twice",
        );
        refused(&|s| s.constants[0].values = Values::F64(vec![]), "constants[0].values: none");
        refused(
            &|s| s.decisions.as_mut().unwrap().samples = 0,
            "decisions.dims: 0 samples of [(\"byte\", 2)], expected 1 to 1073741824 bytes",
        );
        refused(
            &|s| s.decisions.as_mut().unwrap().patch_of_bit.truncate(3),
            "decisions.patch_of_bit: 3 patches for 16 bits",
        );
    }

    #[test]
    fn a_compression_level_that_gzip_does_not_have_is_refused() {
        for level in [0, 10] {
            let options = Options { compression: Compression::Gzip(level), ..Options::default() };
            let error = Plan::check(&schema(), &options).unwrap_err();
            assert_eq!(error.to_string(), format!("options.compression: level {level}, expected 1 to 9"));
        }
    }
}
