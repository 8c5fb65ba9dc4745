//! A dataset that grows by rows, with a buffer of unwritten rows.

use hdf5_metno::plist::dataset_create::FillTime;
use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{Dataset, Extent, Group, H5Type, Hyperslab, SimpleExtents, SliceOrIndex};
use ndarray::{ArrayView, IxDyn};

use crate::metadata::text;
use crate::schema::{Compression, ElementType};

/// Maximum size of a chunk with more than one row \[bytes\]. Small chunks keep reads of one event and files with
/// few events small.
const CHUNK_BYTES: usize = 64 << 10;

/// Path, dimensions and attributes of a dataset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DatasetDescription<'a> {
    /// Path in the file, without a leading slash.
    pub(crate) path: &'a str,
    /// Name of the first dimension.
    pub(crate) row_dim: &'a str,
    /// Name and length of each further dimension.
    pub(crate) dims: &'a [(String, usize)],
    /// Empty for numbers without unit.
    pub(crate) unit: &'a str,
    pub(crate) description: &'a str,
}

/// Element type of a dataset.
pub(crate) trait Scalar: H5Type + Copy + Default {
    /// Converts little-endian bytes.
    fn read(from: &[u8], to: &mut [Self]);
}

macro_rules! scalar {
    ($($ty:ty)*) => {$(
        impl Scalar for $ty {
            fn read(from: &[u8], to: &mut [Self]) {
                for (to, from) in to.iter_mut().zip(from.as_chunks().0) {
                    *to = <$ty>::from_le_bytes(*from);
                }
            }
        }
    )*};
}

scalar!(u8 u16 i16 u32 i32 u64);

/// A dataset and its unwritten rows.
#[derive(Debug)]
pub(crate) struct Column<T> {
    dataset: Dataset,
    path: String,
    dims: Vec<usize>,
    /// Elements in a row, at least 1.
    row: usize,
    /// Rows written to the file.
    written: usize,
    /// Unwritten rows.
    pub(crate) buffer: Vec<T>,
}

impl<T: Scalar> Column<T> {
    /// Creates the empty dataset.
    pub(crate) fn create(
        parent: &Group,
        about: DatasetDescription<'_>,
        compression: Compression,
    ) -> hdf5_metno::Result<Self> {
        let dims: Vec<usize> = about.dims.iter().map(|&(_, len)| len).collect();
        let row: usize = dims.iter().product();
        let fitting = (CHUNK_BYTES / (row * size_of::<T>())).max(1);
        // A power of two, as the number of events per write usually is: writes then cover whole chunks.
        let mut chunk = vec![1 << fitting.ilog2()];
        chunk.extend(&dims);
        let extents = std::iter::once(Extent::resizable(0)).chain(dims.iter().map(|&len| len.into()));
        // Every row is written once, so no fill value is needed.
        let builder = parent.new_dataset::<T>().chunk(chunk).fill_time(FillTime::Never);
        let builder = match compression {
            // Without a chunk cache, the buffer is written without another copy.
            Compression::None => builder.chunk_cache(0, 0, 1.0),
            Compression::Gzip(level) => builder.shuffle().deflate(level),
        };
        let dataset = builder.shape(SimpleExtents::from_vec(extents.collect())).create(about.path)?;
        describe(&dataset, about)?;
        Ok(Self { dataset, path: about.path.to_owned(), dims, row, written: 0, buffer: Vec::new() })
    }
}

/// A column of any element type.
pub(crate) trait AnyColumn: std::fmt::Debug + Send {
    /// Path of the dataset.
    fn path(&self) -> &str;
    /// Adds a row of zeros.
    fn add_row(&mut self);
    /// Fills part `part` of the last row; all parts have the length of `bytes`.
    fn fill(&mut self, part: usize, bytes: &[u8]);
    /// Appends elements.
    fn extend(&mut self, bytes: &[u8]);
    /// Writes the buffered rows.
    fn flush(&mut self) -> hdf5_metno::Result<()>;
    /// Rows in the file and in the buffer.
    fn rows(&self) -> usize;
}

impl<T: Scalar + std::fmt::Debug + Send> AnyColumn for Column<T> {
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
        let mut selection = vec![SliceOrIndex::from(self.written..end)];
        selection.extend(self.dims.iter().map(|_| SliceOrIndex::from(..)));
        let rows = ArrayView::from_shape(IxDyn(&shape(rows)), &self.buffer)?;
        self.dataset.write_slice(rows, Hyperslab::from(selection))?;
        self.written = end;
        self.buffer.clear();
        Ok(())
    }

    fn rows(&self) -> usize {
        self.written + self.buffer.len() / self.row
    }
}

/// Creates a column whose element type is known at run time.
pub(crate) fn create_column(
    parent: &Group,
    about: DatasetDescription<'_>,
    element: ElementType,
    compression: Compression,
) -> hdf5_metno::Result<Box<dyn AnyColumn>> {
    Ok(match element {
        ElementType::U8 => Box::new(Column::<u8>::create(parent, about, compression)?),
        ElementType::U16 => Box::new(Column::<u16>::create(parent, about, compression)?),
        ElementType::I16 => Box::new(Column::<i16>::create(parent, about, compression)?),
        ElementType::U32 => Box::new(Column::<u32>::create(parent, about, compression)?),
        ElementType::I32 => Box::new(Column::<i32>::create(parent, about, compression)?),
    })
}

/// Writes the attributes `dimensions`, `unit` and `description`.
pub(crate) fn describe(dataset: &Dataset, about: DatasetDescription<'_>) -> hdf5_metno::Result<()> {
    let dims = std::iter::once(about.row_dim).chain(about.dims.iter().map(|(name, _)| name.as_str()));
    let dims = dims.map(text).collect::<hdf5_metno::Result<Vec<_>>>()?;
    dataset.new_attr_builder().with_data(&dims).create("dimensions")?;
    for (name, value) in [("unit", about.unit), ("description", about.description)] {
        dataset.new_attr::<VarLenUnicode>().create(name)?.write_scalar(&text(value)?)?;
    }
    Ok(())
}
