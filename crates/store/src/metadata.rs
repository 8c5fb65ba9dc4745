//! What a file says about itself: everything that is written once, before the first event.

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{Group, H5Type, Location};

use crate::column::{Meaning, describe};
use crate::plan::{Place, Plan};
use crate::schema::{Attribute, Decisions, Run, Schema, Values};

/// Value of the root's attribute `format`.
pub(crate) const FORMAT: &str = "millstream events";
/// Value of the root's attribute `version`: changes when a reader of the old files cannot read the new.
pub(crate) const VERSION: u32 = 1;

/// What could not be written, and why.
pub(crate) type Failure = (String, hdf5_metno::Error);

/// Writes `/run`, `/sources`, the constants and the attributes of the root.
pub(crate) fn write(root: &Group, schema: &Schema, plan: &Plan) -> Result<(), Failure> {
    attribute(root, "format", &Attribute::Text(FORMAT.into()))?;
    scalar(root, "version", &VERSION).map_err(at("attribute version"))?;
    run(root, &schema.run)?;
    sources(root, plan)?;
    for constant in &schema.constants {
        let meaning = Meaning {
            path: &constant.dataset,
            rows: &constant.dim,
            dims: &[],
            unit: &constant.unit,
            description: &constant.description,
        };
        match &constant.values {
            Values::U16(values) => fixed(root, values, meaning)?,
            Values::I32(values) => fixed(root, values, meaning)?,
            Values::F64(values) => fixed(root, values, meaning)?,
        }
    }
    if let Some(decisions) = &schema.decisions {
        patches(root, decisions)?;
    }
    Ok(())
}

fn run(root: &Group, run: &Run) -> Result<(), Failure> {
    let group = root.create_group("run").map_err(at("run"))?;
    attribute(&group, "name", &Attribute::Text(run.name.clone()))?;
    scalar(&group, "replay", &run.replay).map_err(at("attribute replay"))?;
    attribute(&group, "software", &Attribute::Text(run.software.clone()))?;
    for (name, value) in &run.attributes {
        attribute(&group, name, value)?;
    }
    let meaning = |path, unit, description| Meaning { path, rows: "input", dims: &[], unit, description };
    let names = texts("run/inputs/name", run.inputs.iter().map(|input| input.name.as_str()))?;
    fixed(root, &names, meaning("run/inputs/name", "", "file that fragments were read from"))?;
    let bytes: Vec<u64> = run.inputs.iter().map(|input| input.bytes).collect();
    fixed(root, &bytes, meaning("run/inputs/bytes", "B", "length of the file"))?;
    let sums = texts("run/inputs/checksum", run.inputs.iter().map(|input| input.checksum.as_str()))?;
    fixed(root, &sums, meaning("run/inputs/checksum", "", "algorithm and checksum of the file"))
}

fn sources(root: &Group, plan: &Plan) -> Result<(), Failure> {
    let meaning = |path, description| Meaning { path, rows: "source", dims: &[], unit: "", description };
    let ids: Vec<u32> = plan.slots.iter().map(|slot| slot.source.id.0).collect();
    fixed(root, &ids, meaning("sources/id", "id of the source"))?;
    let kinds: Vec<u32> = plan.slots.iter().map(|slot| slot.source.kind.0).collect();
    fixed(root, &kinds, meaning("sources/kind", "layout of the source's fragments"))?;
    let names = texts("sources/name", plan.slots.iter().map(|slot| slot.source.name.as_str()))?;
    fixed(root, &names, meaning("sources/name", "name of the source"))?;
    let datasets: Vec<String> = plan
        .slots
        .iter()
        .map(|slot| match &slot.place {
            Place::Part { array, .. } => plan.array(*array).to_owned(),
            Place::Flat { group, .. } => format!("fragments/{group}"),
        })
        .collect();
    let datasets = texts("sources/dataset", datasets.iter().map(String::as_str))?;
    fixed(root, &datasets, meaning("sources/dataset", "where the source's fragments are"))
}

fn patches(root: &Group, decisions: &Decisions) -> Result<(), Failure> {
    let meaning = Meaning {
        path: "trigger/patch_of_bit",
        rows: "bit",
        dims: &[],
        unit: "",
        description: "trigger patch of each bit in the decision map of a sample",
    };
    fixed(root, &decisions.patch_of_bit, meaning)
}

fn fixed<T: H5Type>(root: &Group, values: &[T], meaning: Meaning<'_>) -> Result<(), Failure> {
    let dataset = root.new_dataset_builder().with_data(values).create(meaning.path);
    dataset.and_then(|dataset| describe(&dataset, meaning)).map_err(at(meaning.path))
}

fn attribute(owner: &Location, name: &str, value: &Attribute) -> Result<(), Failure> {
    let written = match value {
        Attribute::Text(value) => text(value).and_then(|value| scalar(owner, name, &value)),
        Attribute::Integer(value) => scalar(owner, name, value),
        Attribute::Real(value) => scalar(owner, name, value),
    };
    written.map_err(at(&format!("attribute {name}")))
}

fn scalar<T: H5Type>(owner: &Location, name: &str, value: &T) -> hdf5_metno::Result<()> {
    owner.new_attr::<T>().create(name)?.write_scalar(value)
}

/// A string as HDF5 has them. Fails for one with a zero byte.
pub(crate) fn text(text: &str) -> hdf5_metno::Result<VarLenUnicode> {
    text.parse().map_err(|_| hdf5_metno::Error::from(format!("{text:?} has a zero byte")))
}

fn texts<'a>(path: &str, all: impl Iterator<Item = &'a str>) -> Result<Vec<VarLenUnicode>, Failure> {
    all.map(text).collect::<hdf5_metno::Result<_>>().map_err(at(path))
}

fn at(object: &str) -> impl Fn(hdf5_metno::Error) -> Failure + use<'_> {
    move |cause| (object.to_owned(), cause)
}
