//! Reads the recorded events of a partial file back, before the file counts as recovered.
//!
//! HDF5 overwrites its superblock, object headers and chunk indexes in place. After a crash of the host, the disk can have
//! pages of them from different times, so that rows that were durable cannot be found. The checksums of the fragments tell.

use std::ops::Range;
use std::path::Path;

use hdf5_metno::types::{IntSize, TypeDescriptor, VarLenUnicode};
use hdf5_metno::{Dataset, File, H5Type, Hyperslab, SliceOrIndex};
use ndarray::IxDyn;

use crate::FileError;
use crate::error::error_text;
use crate::layout::MAX_ROW;
use crate::reader::open_file;
use crate::recover::event_columns;
use crate::writer::FragmentState;

/// Rows that are read at once, and about how many bytes.
const BLOCK_ROWS: usize = 1024;
const BLOCK_BYTES: usize = 16 << 20;

/// Compares the first `events` rows with their checksums.
///
/// # Errors
/// [`FileError::UnreadableRow`] for the first row that cannot be read or differs; also if the file cannot be read at all.
pub(crate) fn check_rows(path: &Path, events: u64) -> Result<(), FileError> {
    let file = open_file(path)?;
    let failed = |problem: String| FileError::Hdf5 {
        path: path.to_owned(),
        operation: "read back",
        object: "datasets".to_owned(),
        cause: problem,
    };
    let rows = StoredRows::open(&file).map_err(|cause| failed(error_text(&cause)))?;
    rows.check_shapes().map_err(failed)?;
    let events = usize::try_from(events).unwrap_or(usize::MAX);
    let block = rows.rows_per_block();
    let mut first = 0;
    while first < events {
        let range = first..events.min(first + block);
        first = range.end;
        if rows.check(range.clone()).is_ok() {
            continue;
        }
        // The first row of the block that differs.
        let mut problems = range.filter_map(|row| Some((row, rows.check(row..row + 1).err()?)));
        if let Some((row, problem)) = problems.next() {
            return Err(FileError::UnreadableRow { path: path.to_owned(), row, rows: events, problem });
        }
    }
    Ok(())
}

/// The datasets with one row per event.
struct StoredRows {
    status: Dataset,
    state: Dataset,
    length: Dataset,
    crc32: Dataset,
    arrays: Vec<Array>,
    bytes: Vec<FragmentBytes>,
    /// All others: they have no checksums.
    others: Vec<Dataset>,
    n_sources: usize,
}

/// An array of equal parts, one of each of its sources, in an order that the file does not tell.
struct Array {
    dataset: Dataset,
    sources: Vec<usize>,
}

/// Concatenated fragments of one source.
struct FragmentBytes {
    source: usize,
    data: Dataset,
    offset: Dataset,
    length: Dataset,
}

impl StoredRows {
    fn open(file: &File) -> hdf5_metno::Result<Self> {
        let datasets = file.dataset("sources/dataset")?.read_raw::<VarLenUnicode>()?;
        let mut arrays: Vec<Array> = Vec::new();
        let mut bytes = Vec::new();
        for (source, path) in datasets.iter().enumerate() {
            if path.starts_with("fragments/") {
                let dataset = |name| file.dataset(&format!("{path}/{name}"));
                let (data, offset, length) = (dataset("data")?, dataset("offset")?, dataset("length")?);
                bytes.push(FragmentBytes { source, data, offset, length });
                continue;
            }
            let dataset = file.dataset(path)?;
            match arrays.iter_mut().find(|array| array.dataset.name() == dataset.name()) {
                Some(array) => array.sources.push(source),
                None => arrays.push(Array { dataset, sources: vec![source] }),
            }
        }
        let event = |name: &str| file.dataset(&format!("events/{name}"));
        let (state, length) = (event("fragment_state")?, event("fragment_length")?);
        let (status, crc32) = (event("status")?, event("fragment_crc32")?);
        let mut others = Vec::new();
        event_columns(file, &mut others)?;
        let checked = [&status, &state, &length, &crc32].into_iter();
        let checked = checked.chain(arrays.iter().map(|array| &array.dataset));
        let checked: Vec<String> = checked
            .chain(bytes.iter().flat_map(|source| [&source.offset, &source.length]))
            .map(|dataset| dataset.name())
            .collect();
        others.retain(|dataset| !checked.contains(&dataset.name()));
        Ok(Self { status, state, length, crc32, arrays, bytes, others, n_sources: datasets.len() })
    }

    /// Compares the shapes of the datasets with those that a writer makes. Returns the problem.
    fn check_shapes(&self) -> Result<(), String> {
        if self.n_sources == 0 {
            return Err("there is no source".to_owned());
        }
        let of_sources =
            [&self.state, &self.length, &self.crc32].map(|dataset| (dataset, Some(self.n_sources)));
        let bytes = self.bytes.iter().flat_map(|source| [&source.data, &source.offset, &source.length]);
        let plain = bytes.chain([&self.status]).map(|dataset| (dataset, None));
        for (dataset, columns) in of_sources.into_iter().chain(plain) {
            let shape = dataset.shape();
            if shape.len() != 1 + usize::from(columns.is_some()) || shape.get(1) != columns.as_ref() {
                return Err(format!("{} has shape {shape:?}", dataset.name()));
            }
        }
        for dataset in self.arrays.iter().map(|array| &array.dataset).chain(&self.others) {
            if dataset.ndim() == 0 || row_bytes(dataset).is_none_or(|len| len > MAX_ROW) {
                return Err(format!("{} has shape {:?}", dataset.name(), dataset.shape()));
            }
        }
        Ok(())
    }

    fn rows_per_block(&self) -> usize {
        let row = |dataset: &Dataset| row_bytes(dataset).unwrap_or(MAX_ROW);
        let arrays = self.arrays.iter().map(|array| &array.dataset);
        let longest = arrays.chain(&self.others).map(row).max().unwrap_or(0);
        (BLOCK_BYTES / longest.max(1)).clamp(1, BLOCK_ROWS)
    }

    /// Compares a range of rows. Returns the problem.
    fn check(&self, rows: Range<usize>) -> Result<(), String> {
        let status: Vec<u8> = read(&self.status, &rows)?;
        let state: Vec<u8> = read(&self.state, &rows)?;
        let length: Vec<u32> = read(&self.length, &rows)?;
        let crc32: Vec<u32> = read(&self.crc32, &rows)?;
        for (status, states) in status.iter().zip(state.chunks(self.n_sources)) {
            let has = |state: FragmentState| states.contains(&(state as u8));
            let expected = u8::from(has(FragmentState::Missing)) | u8::from(has(FragmentState::Corrupt)) << 1;
            if status & 3 != expected {
                return Err(format!("events/status is {status}, and events/fragment_state says {expected}"));
            }
        }
        // The checksum of a source's fragment, if it was intact when it was stored.
        let expected = |row: usize, source: usize| {
            let at = row * self.n_sources + source;
            (state[at] == FragmentState::Intact as u8 && length[at] > 0).then_some(crc32[at])
        };
        for array in &self.arrays {
            let bytes = read_bytes(&array.dataset, &rows)?;
            let part = bytes.len() / rows.len() / array.sources.len();
            if part == 0 {
                return Err(format!(
                    "{} has no bytes for {} sources",
                    array.dataset.name(),
                    array.sources.len()
                ));
            }
            for (row, bytes) in bytes.chunks(bytes.len() / rows.len()).enumerate() {
                let parts = bytes.chunks(part);
                let mut found: Vec<u32> = parts.map(crc32fast::hash).collect();
                for crc in array.sources.iter().filter_map(|&source| expected(row, source)) {
                    let place = found.iter().position(|&found| found == crc);
                    found.swap_remove(place.ok_or_else(|| {
                        format!("{} has no fragment with the recorded CRC-32 {crc:08x}", array.dataset.name())
                    })?);
                }
            }
        }
        for source in &self.bytes {
            let lengths = |row: usize| length[row * self.n_sources + source.source];
            source.check(&rows, lengths, |row| expected(row, source.source))?;
        }
        self.others.iter().try_for_each(|dataset| read_bytes(dataset, &rows).map(drop))
    }
}

impl FragmentBytes {
    /// Compares the fragments of a range of rows, whose lengths and checksums are given.
    fn check(
        &self,
        rows: &Range<usize>,
        recorded: impl Fn(usize) -> u32,
        expected: impl Fn(usize) -> Option<u32>,
    ) -> Result<(), String> {
        let offset: Vec<u64> = read(&self.offset, rows)?;
        let length: Vec<u32> = read(&self.length, rows)?;
        let end = self.data.shape().first().copied().unwrap_or(0) as u64;
        let name = self.data.name();
        let mut next = None;
        let mut row = 0;
        while row < offset.len() {
            // As many fragments as fit into a block.
            let first = row;
            let mut bytes = 0;
            while row < offset.len() && (row == first || bytes + length[row] as usize <= BLOCK_BYTES) {
                let stop = offset[row].checked_add(length[row].into()).filter(|&stop| stop <= end);
                let follows = next.is_none_or(|next| next == offset[row]);
                if length[row] != recorded(row) || !follows || stop.is_none() {
                    return Err(format!("{name} has no fragment of {} B at {}", recorded(row), offset[row]));
                }
                bytes += length[row] as usize;
                next = stop;
                row += 1;
            }
            let start = offset[first] as usize;
            let data: Vec<u8> = read(&self.data, &(start..start + bytes))?;
            let mut rest = &data[..];
            for (row, &len) in (first..row).zip(&length[first..row]) {
                let (fragment, behind) = rest.split_at(len as usize);
                rest = behind;
                let found = crc32fast::hash(fragment);
                if let Some(crc) = expected(row).filter(|&crc| crc != found) {
                    return Err(format!("{name} has CRC-32 {found:08x}, recorded {crc:08x}"));
                }
            }
        }
        Ok(())
    }
}

/// Length of a row.
fn row_bytes(dataset: &Dataset) -> Option<usize> {
    let element = dataset.dtype().map_or(1, |dtype| dtype.size());
    dataset.shape().iter().skip(1).try_fold(element, |len, &dim| len.checked_mul(dim))
}

/// Reads rows of a dataset with this element type, in C order.
fn read<T: H5Type>(dataset: &Dataset, rows: &Range<usize>) -> Result<Vec<T>, String> {
    let shape = dataset.shape();
    let found = shape.first().copied().unwrap_or(0);
    if found < rows.end {
        return Err(format!("{} has {found} rows", dataset.name()));
    }
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let mut selection = vec![SliceOrIndex::from(rows.clone())];
    selection.extend(shape[1..].iter().map(|_| SliceOrIndex::from(..)));
    let read = dataset.as_reader().no_convert().read_slice::<T, _, IxDyn>(Hyperslab::from(selection));
    let rows = read.map_err(|cause| format!("{}: {}", dataset.name(), error_text(&cause)))?;
    Ok(rows.into_raw_vec_and_offset().0)
}

/// Reads rows of a dataset of integers as little-endian bytes.
fn read_bytes(dataset: &Dataset, rows: &Range<usize>) -> Result<Vec<u8>, String> {
    macro_rules! bytes {
        ($ty:ty) => {
            Ok(read::<$ty>(dataset, rows)?.into_iter().flat_map(<$ty>::to_le_bytes).collect())
        };
    }
    let descriptor = dataset.dtype().and_then(|dtype| dtype.to_descriptor());
    match descriptor.map_err(|cause| format!("{}: {}", dataset.name(), error_text(&cause)))? {
        TypeDescriptor::Unsigned(IntSize::U1) => read(dataset, rows),
        TypeDescriptor::Unsigned(IntSize::U2) => bytes!(u16),
        TypeDescriptor::Unsigned(IntSize::U4) => bytes!(u32),
        TypeDescriptor::Unsigned(IntSize::U8) => bytes!(u64),
        TypeDescriptor::Integer(IntSize::U2) => bytes!(i16),
        TypeDescriptor::Integer(IntSize::U4) => bytes!(i32),
        other => Err(format!("{} has elements of type {other}", dataset.name())),
    }
}
