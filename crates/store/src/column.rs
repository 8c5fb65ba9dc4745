//! A dataset that grows by rows, with the rows not yet written.

use hdf5_metno::plist::dataset_create::FillTime;
use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{Dataset, Extent, Group, H5Type, Hyperslab, SimpleExtents, SliceOrIndex};
use ndarray::{ArrayView, IxDyn};

use crate::metadata::text;
use crate::schema::{Compression, Element};

/// Chunks are at most this large unless a row is longer, in bytes: reading one event reads little more, and
/// a file of few events, whose last chunks are mostly reserve, stays small.
const CHUNK_BYTES: usize = 64 << 10;

/// Name and meaning of a dataset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meaning<'a> {
    /// Path in the file, without a leading slash.
    pub(crate) path: &'a str,
    /// What the first dimension counts.
    pub(crate) rows: &'a str,
    /// Name and length of each further dimension.
    pub(crate) dims: &'a [(String, usize)],
    /// Empty for plain numbers.
    pub(crate) unit: &'a str,
    pub(crate) description: &'a str,
}

/// A number that a dataset is made of.
pub(crate) trait Number: H5Type + Copy + Default {
    /// Reads numbers that have the low byte first.
    fn read(from: &[u8], to: &mut [Self]);
}

macro_rules! number {
    ($($ty:ty)*) => {$(
        impl Number for $ty {
            fn read(from: &[u8], to: &mut [Self]) {
                for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
                    *to = <$ty>::from_le_bytes(*from);
                }
            }
        }
    )*};
}

number!(u8 u16 i16 u32 i32 u64);

/// The dataset and the rows to come.
#[derive(Debug)]
pub(crate) struct Column<T> {
    dataset: Dataset,
    path: String,
    dims: Vec<usize>,
    /// Numbers in a row, at least 1.
    row: usize,
    /// Rows in the file.
    written: usize,
    /// Whole rows to come.
    pub(crate) buffer: Vec<T>,
}

impl<T: Number> Column<T> {
    /// Creates the empty dataset.
    pub(crate) fn create(
        parent: &Group,
        meaning: Meaning<'_>,
        compression: Compression,
    ) -> hdf5_metno::Result<Self> {
        let dims: Vec<usize> = meaning.dims.iter().map(|&(_, len)| len).collect();
        let row: usize = dims.iter().product();
        let fitting = (CHUNK_BYTES / (row * size_of::<T>())).max(1);
        // A power of two, so that blocks, which are usually one too, consist of whole chunks.
        let mut chunk = vec![1 << fitting.ilog2()];
        chunk.extend(&dims);
        let extents = std::iter::once(Extent::resizable(0)).chain(dims.iter().map(|&len| len.into()));
        // Rows are written once and never read back before the end, so nothing is filled in first.
        let builder = parent.new_dataset::<T>().chunk(chunk).fill_time(FillTime::Never);
        let builder = match compression {
            // Without a cache, blocks go from the buffer to the file without another copy.
            Compression::None => builder.chunk_cache(0, 0, 1.0),
            Compression::Gzip(level) => builder.shuffle().deflate(level),
        };
        let dataset = builder.shape(SimpleExtents::from_vec(extents.collect())).create(meaning.path)?;
        describe(&dataset, meaning)?;
        Ok(Self { dataset, path: meaning.path.to_owned(), dims, row, written: 0, buffer: Vec::new() })
    }
}

/// What the writer needs of any column.
pub(crate) trait Rows: std::fmt::Debug + Send {
    /// Path of the dataset.
    fn path(&self) -> &str;
    /// Adds a row of zeros.
    fn add_row(&mut self);
    /// Fills one of the `parts` equal parts of the last row.
    fn fill(&mut self, part: usize, bytes: &[u8]);
    /// Adds numbers.
    fn extend(&mut self, bytes: &[u8]);
    /// Writes the rows to come.
    fn flush(&mut self) -> hdf5_metno::Result<()>;
    /// Bytes to come.
    fn buffered(&self) -> usize;
    /// Rows in the file and to come.
    fn rows(&self) -> usize;
}

impl<T: Number + std::fmt::Debug + Send> Rows for Column<T> {
    fn path(&self) -> &str {
        &self.path
    }

    fn add_row(&mut self) {
        self.buffer.resize(self.buffer.len() + self.row, T::default());
    }

    fn fill(&mut self, part: usize, bytes: &[u8]) {
        let numbers = bytes.len() / size_of::<T>();
        let start = self.buffer.len() - self.row + part * numbers;
        T::read(bytes, &mut self.buffer[start..start + numbers]);
    }

    fn extend(&mut self, bytes: &[u8]) {
        let start = self.buffer.len();
        self.buffer.resize(start + bytes.len() / size_of::<T>(), T::default());
        T::read(bytes, &mut self.buffer[start..]);
    }

    fn flush(&mut self) -> hdf5_metno::Result<()> {
        let rows = self.buffer.len() / self.row;
        if rows == 0 {
            return Ok(());
        }
        let end = self.written + rows;
        let shape = |rows: usize| -> Vec<usize> { std::iter::once(rows).chain(self.dims.clone()).collect() };
        self.dataset.resize(shape(end))?;
        let mut place = vec![SliceOrIndex::from(self.written..end)];
        place.extend(self.dims.iter().map(|_| SliceOrIndex::from(..)));
        let rows = ArrayView::from_shape(IxDyn(&shape(rows)), &self.buffer)?;
        self.dataset.write_slice(rows, Hyperslab::from(place))?;
        self.written = end;
        self.buffer.clear();
        Ok(())
    }

    fn buffered(&self) -> usize {
        size_of_val(self.buffer.as_slice())
    }

    fn rows(&self) -> usize {
        self.written + self.buffer.len() / self.row
    }
}

/// A column for numbers whose type is known at run time.
pub(crate) fn create_rows(
    parent: &Group,
    meaning: Meaning<'_>,
    element: Element,
    compression: Compression,
) -> hdf5_metno::Result<Box<dyn Rows>> {
    Ok(match element {
        Element::U8 => Box::new(Column::<u8>::create(parent, meaning, compression)?),
        Element::U16 => Box::new(Column::<u16>::create(parent, meaning, compression)?),
        Element::I16 => Box::new(Column::<i16>::create(parent, meaning, compression)?),
        Element::U32 => Box::new(Column::<u32>::create(parent, meaning, compression)?),
        Element::I32 => Box::new(Column::<i32>::create(parent, meaning, compression)?),
    })
}

/// Writes the meaning of a dataset into its attributes.
pub(crate) fn describe(dataset: &Dataset, meaning: Meaning<'_>) -> hdf5_metno::Result<()> {
    let dims = std::iter::once(meaning.rows).chain(meaning.dims.iter().map(|(name, _)| name.as_str()));
    let dims = dims.map(text).collect::<hdf5_metno::Result<Vec<_>>>()?;
    dataset.new_attr_builder().with_data(&dims).create("dimensions")?;
    for (name, value) in [("unit", meaning.unit), ("description", meaning.description)] {
        dataset.new_attr::<VarLenUnicode>().create(name)?.write_scalar(&text(value)?)?;
    }
    Ok(())
}
