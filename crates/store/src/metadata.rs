//! Metadata of an event file, written before the first event.

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{Group, H5Type, Location};

use crate::column::{DatasetDescription, describe};
use crate::layout::{FileLayout, SourceTarget};
use crate::schema::{Attribute, ConstantValues, DecisionSchema, Run, Schema};

/// Value of the root's attribute `format`.
pub(crate) const FORMAT: &str = "millstream events";
/// Value of the root's attribute `version`. It changes when readers of older files cannot read new ones.
pub(crate) const VERSION: u32 = 1;
/// Attribute of `/run` that tells runs with one name apart.
pub(crate) const INSTANCE: &str = "instance";

/// Path of the object that cannot be written, and the cause.
pub(crate) type ObjectError = (String, hdf5_metno::Error);

/// Writes `/run`, `/sources`, the constants and the attributes of the root.
pub(crate) fn write(root: &Group, schema: &Schema, layout: &FileLayout) -> Result<(), ObjectError> {
    attribute(root, "format", &Attribute::Text(FORMAT.into()))?;
    scalar(root, "version", &VERSION).map_err(failed_at("attribute version"))?;
    run(root, &schema.run)?;
    sources(root, layout)?;
    for constant in &schema.constants {
        let about = DatasetDescription {
            path: &constant.dataset,
            row_dim: &constant.dim,
            dims: &[],
            unit: &constant.unit,
            description: &constant.description,
        };
        match &constant.values {
            ConstantValues::U16(values) => write_dataset(root, values, about)?,
            ConstantValues::I32(values) => write_dataset(root, values, about)?,
            ConstantValues::F64(values) => write_dataset(root, values, about)?,
        }
    }
    if let Some(decisions) = &schema.decisions {
        patches(root, decisions)?;
    }
    Ok(())
}

fn run(root: &Group, run: &Run) -> Result<(), ObjectError> {
    let group = root.create_group("run").map_err(failed_at("run"))?;
    attribute(&group, "name", &Attribute::Text(run.name.clone()))?;
    attribute(&group, INSTANCE, &Attribute::Text(run.instance.clone()))?;
    scalar(&group, "replay", &run.replay).map_err(failed_at("attribute replay"))?;
    attribute(&group, "software", &Attribute::Text(run.software.clone()))?;
    for (name, value) in &run.attributes {
        attribute(&group, name, value)?;
    }
    let about =
        |path, unit, description| DatasetDescription { path, row_dim: "input", dims: &[], unit, description };
    let names = texts("run/inputs/name", run.inputs.iter().map(|input| input.name.as_str()))?;
    write_dataset(root, &names, about("run/inputs/name", "", "file with fragments"))?;
    let bytes: Vec<u64> = run.inputs.iter().map(|input| input.bytes).collect();
    write_dataset(root, &bytes, about("run/inputs/bytes", "B", "length of the file"))?;
    let sums = texts("run/inputs/checksum", run.inputs.iter().map(|input| input.checksum.as_str()))?;
    write_dataset(root, &sums, about("run/inputs/checksum", "", "algorithm and checksum of the file"))
}

fn sources(root: &Group, layout: &FileLayout) -> Result<(), ObjectError> {
    let about =
        |path, description| DatasetDescription { path, row_dim: "source", dims: &[], unit: "", description };
    let ids: Vec<u32> = layout.slots.iter().map(|slot| slot.source.id.0).collect();
    write_dataset(root, &ids, about("sources/id", "id of the source"))?;
    let kinds: Vec<u32> = layout.slots.iter().map(|slot| slot.source.kind.0).collect();
    write_dataset(root, &kinds, about("sources/kind", "layout of the source's fragments"))?;
    let names = texts("sources/name", layout.slots.iter().map(|slot| slot.source.name.as_str()))?;
    write_dataset(root, &names, about("sources/name", "name of the source"))?;
    let datasets: Vec<String> = layout
        .slots
        .iter()
        .map(|slot| match &slot.target {
            SourceTarget::ArrayPart { array, .. } => layout.array(*array).to_owned(),
            SourceTarget::Bytes { group, .. } => format!("fragments/{group}"),
        })
        .collect();
    let datasets = texts("sources/dataset", datasets.iter().map(String::as_str))?;
    write_dataset(root, &datasets, about("sources/dataset", "dataset or group with the source's fragments"))
}

fn patches(root: &Group, decisions: &DecisionSchema) -> Result<(), ObjectError> {
    let about = DatasetDescription {
        path: "trigger/patch_of_bit",
        row_dim: "bit",
        dims: &[],
        unit: "",
        description: "trigger patch of each bit in the decision map of a sample",
    };
    write_dataset(root, &decisions.patch_of_bit, about)
}

fn write_dataset<T: H5Type>(
    root: &Group,
    values: &[T],
    about: DatasetDescription<'_>,
) -> Result<(), ObjectError> {
    let dataset = root.new_dataset_builder().with_data(values).create(about.path);
    dataset.and_then(|dataset| describe(&dataset, about)).map_err(failed_at(about.path))
}

fn attribute(owner: &Location, name: &str, value: &Attribute) -> Result<(), ObjectError> {
    let written = match value {
        Attribute::Text(value) => text(value).and_then(|value| scalar(owner, name, &value)),
        Attribute::Integer(value) => scalar(owner, name, value),
        Attribute::Real(value) => scalar(owner, name, value),
    };
    written.map_err(failed_at(&format!("attribute {name}")))
}

fn scalar<T: H5Type>(owner: &Location, name: &str, value: &T) -> hdf5_metno::Result<()> {
    owner.new_attr::<T>().create(name)?.write_scalar(value)
}

/// An HDF5 string. Fails for text with a zero byte.
pub(crate) fn text(text: &str) -> hdf5_metno::Result<VarLenUnicode> {
    text.parse().map_err(|_| hdf5_metno::Error::from(format!("{text:?} contains a zero byte")))
}

fn texts<'a>(path: &str, all: impl Iterator<Item = &'a str>) -> Result<Vec<VarLenUnicode>, ObjectError> {
    all.map(text).collect::<hdf5_metno::Result<_>>().map_err(failed_at(path))
}

fn failed_at(object: &str) -> impl Fn(hdf5_metno::Error) -> ObjectError + use<'_> {
    move |cause| (object.to_owned(), cause)
}
