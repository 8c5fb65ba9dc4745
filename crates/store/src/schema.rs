//! What a file is to contain: the caller's side.
//!
//! Everything here is plain data; [`EventWriter::create`](crate::EventWriter::create) checks it.

use std::num::NonZeroUsize;

use millstream_fragment::{SourceId, SourceKind, stream};

/// What a file contains.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    /// The run that the events are from.
    pub run: Run,
    /// All sources, in any order. Those that no array names keep their fragments as flat bytes.
    pub sources: Vec<Source>,
    /// Arrays that sources with fragments of one length make up.
    pub arrays: Vec<Array>,
    /// The trigger's decisions, if there are any.
    pub decisions: Option<Decisions>,
    /// Numbers that are the same for all events.
    pub constants: Vec<Constant>,
}

/// Where the events come from. Becomes attributes and datasets of `/run`.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Name of the run.
    pub name: String,
    /// How many times the input was repeated.
    pub replay: u64,
    /// Program that wrote the file, and its version.
    pub software: String,
    /// The files that the fragments were read from.
    pub inputs: Vec<Input>,
    /// Anything else worth keeping, such as the trigger's threshold: name and value.
    pub attributes: Vec<(String, Attribute)>,
}

/// A file that fragments were read from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// Its length, in bytes.
    pub bytes: u64,
    /// Its checksum with the name of the algorithm, as in `sha256:68c1…`.
    pub checksum: String,
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// Stored as a UTF-8 string.
    Text(String),
    /// Stored as i64.
    Integer(i64),
    /// Stored as f64.
    Real(f64),
}

/// A source of fragments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its id.
    pub id: SourceId,
    /// Layout of its payload, the experiment's number.
    pub kind: SourceKind,
    /// What people call it. Names the group of its fragments unless an array takes them; there, an empty
    /// name becomes `source_` and the id.
    pub name: String,
}

impl<'a> From<stream::Source<'a>> for Source {
    fn from(source: stream::Source<'a>) -> Self {
        Self { id: source.id(), kind: source.kind(), name: source.name().to_owned() }
    }
}

/// Type of the numbers in an array. Fragments hold them with the low byte first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
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

impl Element {
    /// Size of one number, in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
        }
    }
}

/// A dataset with one row per event, made of the fragments of one or more sources.
///
/// A row is the fragments of its sources one after the other, read as numbers, in the shape `dims`. So all
/// fragments of these sources have one length, the row's divided by the number of sources.
#[derive(Clone, Debug)]
pub struct Array {
    /// Path of the dataset, without a leading slash, as in `camera/waveforms`.
    pub dataset: String,
    /// Type of the numbers.
    pub element: Element,
    /// Name and length of each dimension of a row, the slowest first. The file has `event` before them.
    pub dims: Vec<(String, usize)>,
    /// The sources, in the order in which they make up a row.
    pub sources: Vec<SourceId>,
    /// Unit of the numbers.
    pub unit: String,
    /// What the numbers are.
    pub description: String,
}

/// The map of decisions that the trigger made for an event: bits, least significant first.
#[derive(Clone, Debug)]
pub struct Decisions {
    /// Decisions in time: number of maps per event.
    pub samples: usize,
    /// Shape of the map of one sample, the last dimension in bytes: name and length of each dimension.
    pub dims: Vec<(String, usize)>,
    /// The trigger patch that each bit of one sample's map stands for.
    pub patch_of_bit: Vec<u16>,
}

/// A dataset that does not depend on the event: one number per place.
#[derive(Clone, Debug)]
pub struct Constant {
    /// Path of the dataset, without a leading slash, as in `camera/pixel_id`.
    pub dataset: String,
    /// The numbers.
    pub values: Values,
    /// Name of the only dimension.
    pub dim: String,
    /// Unit of the numbers.
    pub unit: String,
    /// What the numbers are.
    pub description: String,
}

/// Numbers of a [`Constant`].
#[derive(Clone, Debug)]
pub enum Values {
    /// Unsigned, 2 bytes.
    U16(Vec<u16>),
    /// Signed, 4 bytes.
    I32(Vec<i32>),
    /// Floating point, 8 bytes.
    F64(Vec<f64>),
}

/// How the file is written.
#[derive(Clone, Debug)]
pub struct Options {
    /// Events that are collected before they are written in one go. Memory: this many rows of all
    /// datasets.
    pub block: NonZeroUsize,
    /// Compression of everything that has one row per event.
    pub compression: Compression,
    /// Whether the finished file may replace one of the same name.
    pub replace: bool,
}

impl Default for Options {
    fn default() -> Self {
        let block = const { NonZeroUsize::new(64).unwrap() };
        Self { block, compression: Compression::None, replace: false }
    }
}

/// Compression of datasets. Any HDF5 reader undoes it by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// As fast as the disk.
    #[default]
    None,
    /// Bytes of numbers sorted by significance, then gzip with this level, 1 (fast) to 9 (small).
    Gzip(u8),
}
