//! The contents of an event file, as the caller describes them.
//!
//! These are plain data types. [`EventWriter::create`](crate::EventWriter::create) checks them.

use std::num::NonZeroUsize;

use millstream_fragment::{SourceId, SourceKind, stream};
use serde::{Deserialize, Serialize};

use crate::schema_text;

/// Contents of an event file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Schema {
    /// The run of the events.
    pub run: Run,
    /// All sources, in any order. Fragments of sources without an array are stored as bytes.
    pub sources: Vec<Source>,
    /// Arrays of fragments with a fixed length.
    pub arrays: Vec<FragmentArray>,
    /// The trigger's decisions, if a trigger runs.
    pub decisions: Option<DecisionSchema>,
    /// Datasets that do not depend on the event.
    pub constants: Vec<ConstantDataset>,
}

/// Origin of the events: the attributes and datasets of `/run`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// Name of the run.
    pub name: String,
    /// Tells the run from others with its name; empty if nothing does.
    #[serde(default)]
    pub instance: String,
    /// Number of passes over the input.
    pub replay: u64,
    /// Program that writes the file, and its version.
    pub software: String,
    /// Files of the fragments.
    pub inputs: Vec<InputFile>,
    /// Further attributes by name, such as the trigger's threshold.
    pub attributes: Vec<(String, Attribute)>,
}

/// A file with fragments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Its name.
    pub name: String,
    /// Its length \[bytes\].
    pub bytes: u64,
    /// Algorithm and checksum, as in `sha256:68c1…`.
    pub checksum: String,
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Attribute {
    /// Stored as a UTF-8 string.
    Text(String),
    /// Stored as i64.
    Integer(i64),
    /// Stored as f64.
    Real(#[serde(with = "schema_text::real")] f64),
}

/// A source of fragments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Its id.
    #[serde(with = "schema_text::source_id")]
    pub id: SourceId,
    /// Layout of its payload, as numbered by the experiment.
    #[serde(with = "schema_text::source_kind")]
    pub kind: SourceKind,
    /// Its name, which also names the group of its fragments outside arrays. An empty name becomes `source_` and
    /// the id.
    pub name: String,
}

impl<'a> From<stream::Source<'a>> for Source {
    fn from(source: stream::Source<'a>) -> Self {
        Self { id: source.id(), kind: source.kind(), name: source.name().to_owned() }
    }
}

/// Type of the elements of an array, little-endian in the fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ElementType {
    /// Unsigned, 1 byte.
    U8,
    /// Unsigned, 2 bytes.
    U16,
    /// Signed, 2 bytes.
    I16,
    /// Unsigned, 4 bytes.
    U32,
    /// Signed, 4 bytes.
    I32,
}

impl ElementType {
    /// Size \[bytes\].
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
        }
    }
}

/// A dataset with one row per event, assembled from the fragments of one or more sources.
///
/// A row is the concatenation of the sources' fragments, in the shape `dims`. All fragments have the same
/// length: that of the row divided by the number of sources.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FragmentArray {
    /// Path of the dataset, without a leading slash, as in `camera/waveforms`.
    pub dataset: String,
    /// Type of the elements.
    pub element: ElementType,
    /// Name and length of each dimension of a row, in C order. The dimension `event` precedes them.
    pub dims: Vec<(String, usize)>,
    /// The sources, in the order of the row.
    #[serde(with = "schema_text::source_ids")]
    pub sources: Vec<SourceId>,
    /// Unit of the elements.
    pub unit: String,
    /// Meaning of the elements.
    pub description: String,
}

/// Shape of an event's decision map: one bit per decision, least significant bit first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DecisionSchema {
    /// Number of samples per event.
    pub samples: usize,
    /// Name and length of each dimension of one sample's map; the last one counts bytes.
    pub dims: Vec<(String, usize)>,
    /// Trigger patch of each bit in one sample's map.
    pub patch_of_bit: Vec<u16>,
}

/// A one-dimensional dataset that does not depend on the event.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ConstantDataset {
    /// Path of the dataset, without a leading slash, as in `camera/pixel_id`.
    pub dataset: String,
    /// The values.
    pub values: ConstantValues,
    /// Name of the dimension.
    pub dim: String,
    /// Unit of the values.
    pub unit: String,
    /// Meaning of the values.
    pub description: String,
}

/// Values of a [`ConstantDataset`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ConstantValues {
    /// Unsigned, 2 bytes.
    U16(Vec<u16>),
    /// Signed, 4 bytes.
    I32(Vec<i32>),
    /// Floating point, 8 bytes.
    F64(#[serde(with = "schema_text::reals")] Vec<f64>),
}

/// Options for writing an event file.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Maximum number of events buffered before a write. The buffer holds this many rows of every dataset, up to 16 MiB of
    /// payload.
    pub events_per_write: NonZeroUsize,
    /// Compression of the datasets with one row per event.
    pub compression: Compression,
    /// Whether the finished file may replace an existing one.
    pub replace: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let events_per_write = const { NonZeroUsize::new(4096).unwrap() };
        Self { events_per_write, compression: Compression::None, replace: false }
    }
}

/// Compression of datasets. HDF5 readers decompress transparently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// The shuffle filter, then gzip with this level, 1 (fast) to 9 (small).
    Gzip(u8),
}
