//! The layout of an event file: a checked schema with the target of each source's fragments.

use std::collections::BTreeSet;

use millstream_fragment::SourceId;

use crate::schema::{
    Compression, ConstantDataset, ConstantValues, DecisionSchema, FragmentArray, Schema, Source, WriteOptions,
};
use crate::{Event, EventError, SchemaError};

/// Maximum length of a row \[bytes\]. A chunk holds at least one row and must be shorter than 4 GiB.
pub(crate) const MAX_ROW: usize = 1 << 30;

/// The layout of an event file.
#[derive(Debug)]
pub(crate) struct FileLayout {
    /// All sources by ascending id, as in the columns of `/events/fragment_…`.
    pub(crate) slots: Vec<SourceSlot>,
    /// Length of a decision map \[bytes\]; 0 without a trigger.
    pub(crate) decision_bytes: usize,
    arrays: Vec<String>,
    /// Length of an event's rows in all arrays and of its decision map \[bytes\].
    pub(crate) row_bytes: u64,
}

/// A source and the target of its fragments.
#[derive(Debug)]
pub(crate) struct SourceSlot {
    pub(crate) source: Source,
    pub(crate) target: SourceTarget,
}

/// Target of the fragments of one source.
#[derive(Debug)]
pub(crate) enum SourceTarget {
    /// A part of each row of an array: index of the array, index of the part, and length of a fragment.
    ArrayPart { array: usize, part: usize, bytes: usize },
    /// A concatenation of bytes: index among the byte datasets, and name of its group.
    Bytes { index: usize, group: String },
}

impl FileLayout {
    /// Checks the schema and assigns a target to each source.
    pub(crate) fn check(schema: &Schema, options: &WriteOptions) -> Result<Self, SchemaError> {
        if let Compression::Gzip(level @ (0 | 10..)) = options.compression {
            let problem = format!("level {level}, expected 1 to 9");
            return Err(SchemaError::new("options.compression", problem));
        }
        let mut sources = schema.sources.clone();
        sources.sort_by_key(|source| source.id);
        if let Some(duplicate) = sources.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(SchemaError::new("sources", format!("{} is listed twice", duplicate[0].id)));
        }
        if sources.is_empty() {
            return Err(SchemaError::new("sources", "empty list"));
        }

        let mut parts: Vec<Option<SourceTarget>> = sources.iter().map(|_| None).collect();
        for (index, array) in schema.arrays.iter().enumerate() {
            assign_array(index, array, &sources, &mut parts)?;
        }
        let mut byte_datasets = 0;
        let mut slots = Vec::with_capacity(sources.len());
        for (source, part) in sources.into_iter().zip(parts) {
            let target = match part {
                Some(target) => target,
                None => {
                    let group = group_name(&source)?;
                    byte_datasets += 1;
                    SourceTarget::Bytes { index: byte_datasets - 1, group }
                }
            };
            slots.push(SourceSlot { source, target });
        }
        let decision_bytes = schema.decisions.as_ref().map_or(Ok(0), check_decisions)?;
        for (index, constant) in schema.constants.iter().enumerate() {
            check_constant(&format!("constants[{index}]"), constant)?;
        }
        check_paths(schema, &slots)?;
        let arrays = schema.arrays.iter().map(|array| array.dataset.clone()).collect();
        let parts = slots.iter().map(|slot| match slot.target {
            SourceTarget::ArrayPart { bytes, .. } => bytes as u64,
            SourceTarget::Bytes { .. } => 0,
        });
        let row_bytes = parts.sum::<u64>() + decision_bytes as u64;
        Ok(Self { slots, decision_bytes, arrays, row_bytes })
    }

    /// Path of the dataset of an array.
    pub(crate) fn array(&self, index: usize) -> &str {
        &self.arrays[index]
    }

    /// Finds the fragment of each source: `fragment_of_slot[slot]` becomes its index in the event, or None.
    pub(crate) fn assign_fragments(
        &self,
        event: &Event<'_>,
        fragment_of_slot: &mut Vec<Option<usize>>,
    ) -> Result<(), EventError> {
        let number = event.number;
        fragment_of_slot.clear();
        fragment_of_slot.resize(self.slots.len(), None);
        for (index, &(source_id, ref fragment)) in event.fragments.iter().enumerate() {
            // Fragments are usually in the order of the sources.
            let slot = match self.slots.get(index) {
                Some(slot) if slot.source.id == source_id => index,
                _ => self
                    .slots
                    .binary_search_by_key(&source_id, |slot| slot.source.id)
                    .map_err(|_| EventError::UnknownSource { event: number, source_id })?,
            };
            if fragment_of_slot[slot].replace(index).is_some() {
                return Err(EventError::DuplicateSource { event: number, source_id });
            }
            if fragment.event != number {
                return Err(EventError::WrongEvent { event: number, source_id, found: fragment.event });
            }
        }
        let found = event.decisions.len();
        if found != self.decision_bytes {
            return Err(EventError::WrongDecisions { event: number, found, expected: self.decision_bytes });
        }
        Ok(())
    }
}

fn assign_array(
    index: usize,
    array: &FragmentArray,
    sources: &[Source],
    targets: &mut [Option<SourceTarget>],
) -> Result<(), SchemaError> {
    let field = |name: &str| format!("arrays[{index}].{name}");
    let elements = product(&array.dims).ok_or_else(|| {
        SchemaError::new(field("dims"), format!("{:?}, expected positive lengths", array.dims))
    })?;
    if array.sources.is_empty() {
        return Err(SchemaError::new(field("sources"), "empty list"));
    }
    let row = elements.checked_mul(array.element.size()).filter(|&row| row <= MAX_ROW);
    let row = row.ok_or_else(|| {
        SchemaError::new(field("dims"), format!("{elements} elements in a row, more than {MAX_ROW} bytes"))
    })?;
    if elements % array.sources.len() != 0 {
        let problem =
            format!("{elements} elements in a row are not divisible by {} sources", array.sources.len());
        return Err(SchemaError::new(field("sources"), problem));
    }
    for (part, id) in array.sources.iter().enumerate() {
        let slot = find(sources, *id).ok_or_else(|| {
            SchemaError::new(field("sources"), format!("{id} is not a source of the schema"))
        })?;
        if targets[slot].is_some() {
            return Err(SchemaError::new(field("sources"), format!("{id} is part of another array")));
        }
        targets[slot] =
            Some(SourceTarget::ArrayPart { array: index, part, bytes: row / array.sources.len() });
    }
    Ok(())
}

fn find(sources: &[Source], id: SourceId) -> Option<usize> {
    sources.binary_search_by_key(&id, |source| source.id).ok()
}

/// Number of elements in the shape; None if it is zero or overflows.
fn product(dims: &[(String, usize)]) -> Option<usize> {
    dims.iter().try_fold(1usize, |all, &(_, len)| all.checked_mul(len)).filter(|&all| all > 0)
}

fn check_decisions(decisions: &DecisionSchema) -> Result<usize, SchemaError> {
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

fn check_constant(field: &str, constant: &ConstantDataset) -> Result<(), SchemaError> {
    let empty = match &constant.values {
        ConstantValues::U16(values) => values.is_empty(),
        ConstantValues::I32(values) => values.is_empty(),
        ConstantValues::F64(values) => values.is_empty(),
    };
    if empty { Err(SchemaError::new(format!("{field}.values"), "empty list")) } else { Ok(()) }
}

/// Name of the group with the fragments of a source outside arrays.
fn group_name(source: &Source) -> Result<String, SchemaError> {
    if source.name.is_empty() {
        return Ok(format!("source_{:#x}", source.id.0));
    }
    if !is_component(&source.name) {
        let problem = format!("{:?} of {} is not a valid group name", source.name, source.id);
        return Err(SchemaError::new("sources.name", problem));
    }
    Ok(source.name.clone())
}

fn is_component(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

/// Checks that dataset paths are valid, unique and outside the reserved groups.
fn check_paths(schema: &Schema, slots: &[SourceSlot]) -> Result<(), SchemaError> {
    let mut groups = BTreeSet::new();
    for slot in slots {
        if let SourceTarget::Bytes { group, .. } = &slot.target
            && !groups.insert(group.as_str())
        {
            return Err(SchemaError::new("sources.name", format!("{group:?} is listed twice")));
        }
    }
    let arrays = schema.arrays.iter().enumerate().map(|(k, array)| (format!("arrays[{k}]"), &array.dataset));
    let constants = schema.constants.iter().enumerate().map(|(k, c)| (format!("constants[{k}]"), &c.dataset));
    let mut paths = BTreeSet::new();
    for (owner, path) in arrays.chain(constants) {
        let field = format!("{owner}.dataset");
        if !path.split('/').all(is_component) {
            return Err(SchemaError::new(field, format!("{path:?} is not a path such as group/name")));
        }
        let top = path.split('/').next().unwrap_or_default();
        if ["run", "sources", "events", "fragments", "trigger"].contains(&top) {
            return Err(SchemaError::new(field, format!("{path:?}: the group {top} is reserved")));
        }
        if !paths.insert(path) {
            return Err(SchemaError::new(field, format!("{path:?} is listed twice")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{ElementType, InputFile, Run};
    use millstream_fragment::SourceKind;

    fn source(id: u32, name: &str) -> Source {
        Source { id: SourceId(id), kind: SourceKind(1), name: name.into() }
    }

    fn array(dataset: &str, lens: &[usize], sources: &[u32]) -> FragmentArray {
        FragmentArray {
            dataset: dataset.into(),
            element: ElementType::I16,
            dims: lens.iter().map(|&len| ("place".to_owned(), len)).collect(),
            sources: sources.iter().copied().map(SourceId).collect(),
            unit: String::new(),
            description: String::new(),
        }
    }

    fn schema() -> Schema {
        Schema {
            run: Run { inputs: vec![InputFile::default()], ..Run::default() },
            sources: vec![source(9, ""), source(2, "b"), source(1, "a"), source(3, "c")],
            arrays: vec![array("board/samples", &[6, 5], &[2, 1, 3])],
            decisions: Some(DecisionSchema {
                samples: 4,
                dims: vec![("byte".into(), 2)],
                patch_of_bit: (0..16).collect(),
            }),
            constants: vec![ConstantDataset {
                dataset: "board/id".into(),
                values: ConstantValues::U16(vec![1]),
                dim: "board".into(),
                unit: String::new(),
                description: String::new(),
            }],
        }
    }

    #[test]
    fn every_source_has_one_target() {
        let layout = FileLayout::check(&schema(), &WriteOptions::default()).unwrap();
        let targets: Vec<String> = layout.slots.iter().map(|slot| format!("{:?}", slot.target)).collect();
        assert_eq!(
            targets,
            [
                "ArrayPart { array: 0, part: 1, bytes: 20 }",
                "ArrayPart { array: 0, part: 0, bytes: 20 }",
                "ArrayPart { array: 0, part: 2, bytes: 20 }",
                "Bytes { index: 0, group: \"source_0x9\" }",
            ]
        );
        assert_eq!(layout.decision_bytes, 8);
    }

    #[test]
    fn invalid_schemas_are_refused() {
        let refused = |change: &dyn Fn(&mut Schema), expected: &str| {
            let mut schema = schema();
            change(&mut schema);
            let error = FileLayout::check(&schema, &WriteOptions::default()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        refused(&|s| s.sources.clear(), "sources: empty list");
        refused(&|s| s.sources[3].id = SourceId(2), "sources: source 0x2 is listed twice");
        refused(
            &|s| s.sources[0].name = "x/y".into(),
            "sources.name: \"x/y\" of source 0x9 is not a valid group name",
        );
        refused(
            &|s| s.sources.extend([source(10, "x"), source(11, "x")]),
            "sources.name: \"x\" is listed twice",
        );
        refused(&|s| s.arrays[0].sources.clear(), "arrays[0].sources: empty list");
        refused(
            &|s| s.arrays[0].sources[1] = SourceId(7),
            "arrays[0].sources: source 0x7 is not a source of the schema",
        );
        refused(
            &|s| s.arrays[0].sources[1] = SourceId(2),
            "arrays[0].sources: source 0x2 is part of another array",
        );
        refused(
            &|s| s.arrays[0].dims[0].1 = 4,
            "arrays[0].sources: 20 elements in a row are not divisible by 3 sources",
        );
        refused(
            &|s| s.arrays[0].dims[0].1 = 0,
            "arrays[0].dims: [(\"place\", 0), (\"place\", 5)], expected positive lengths",
        );
        refused(
            &|s| s.arrays[0].dims[0].1 = 600_000_000,
            "arrays[0].dims: 3000000000 elements in a row, more than 1073741824 bytes",
        );
        for path in ["", "/a", "a//b", "a/..", "a/"] {
            let expected = format!("arrays[0].dataset: {path:?} is not a path such as group/name");
            refused(&|s| s.arrays[0].dataset = path.into(), &expected);
        }
        refused(
            &|s| s.arrays[0].dataset = "events/status".into(),
            "arrays[0].dataset: \"events/status\": the group events is reserved",
        );
        refused(
            &|s| s.constants[0].dataset = "board/samples".into(),
            "constants[0].dataset: \"board/samples\" is listed twice",
        );
        refused(&|s| s.constants[0].values = ConstantValues::F64(vec![]), "constants[0].values: empty list");
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
    fn invalid_gzip_levels_are_refused() {
        for level in [0, 10] {
            let options = WriteOptions { compression: Compression::Gzip(level), ..WriteOptions::default() };
            let error = FileLayout::check(&schema(), &options).unwrap_err();
            assert_eq!(error.to_string(), format!("options.compression: level {level}, expected 1 to 9"));
        }
    }
}
