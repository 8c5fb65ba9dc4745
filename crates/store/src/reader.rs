//! Reads single events, for event displays and checks. Analysis reads the file with any HDF5 library.

use std::path::{Path, PathBuf};

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{File, H5Type, Hyperslab, OpenMode, SliceOrIndex};
use millstream_fragment::file::IoError;
use ndarray::IxDyn;

use crate::error::{FileError, error_text};
use crate::metadata::{FORMAT, INSTANCE, VERSION};
use crate::recover::RECOVERED;

/// Gzip makes data at most about 1000 times shorter.
const MAX_COMPRESSION: u64 = 1100;

/// Reads an event file.
#[derive(Debug)]
pub struct EventReader {
    path: PathBuf,
    file: File,
    numbers: Vec<u64>,
}

/// The trigger's decisions on an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriggerDecisions {
    /// The decision map: the bits of all samples, least significant bit first.
    pub decisions: Vec<u8>,
    /// The positive decisions, in the order of the map: sample by sample.
    pub set: Vec<Decision>,
}

/// A positive decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The sample.
    pub sample: usize,
    /// The trigger patch.
    pub patch: u16,
}

impl EventReader {
    /// Opens the file and reads its event numbers. Of a partial file, these are the events flushed so far.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FileError> {
        EventReader::open_from(path.as_ref(), 0)
    }

    /// Opens the file and reads the event numbers of the rows from `first` on. [`numbers`](Self::numbers) starts there.
    pub(crate) fn open_from(path: &Path, first: u64) -> Result<Self, FileError> {
        let file = open_file(path)?;
        let path = path.to_owned();
        let fail = |object: &str, cause: hdf5_metno::Error| read_error(&path, object, &cause);
        let wrong_format = |field: &str, found: String, expected: String| FileError::WrongFormat {
            path: path.clone(),
            field: format!("attribute {field}"),
            found,
            expected,
        };
        let format = file.attr("format").and_then(|format| format.read_scalar::<VarLenUnicode>());
        match &format {
            Ok(format) if format.as_str() == FORMAT => {}
            Ok(format) => return Err(wrong_format("format", format!("{format:?}"), format!("{FORMAT:?}"))),
            Err(_) => return Err(wrong_format("format", "missing".into(), format!("{FORMAT:?}"))),
        }
        let version = file.attr("version").and_then(|version| version.read_scalar::<u32>());
        let version = version.map_err(|cause| fail("attribute version", cause))?;
        if version != VERSION {
            return Err(wrong_format("version", version.to_string(), VERSION.to_string()));
        }
        let numbers = file.dataset("events/number").and_then(|numbers| {
            let (rows, stored) = (numbers.size(), numbers.storage_size());
            if (rows as u64).saturating_mul(8) > stored.saturating_mul(MAX_COMPRESSION) {
                return Ok(Err(format!("{rows} rows in {stored} bytes")));
            }
            let rows = usize::try_from(first).unwrap_or(usize::MAX).min(rows)..;
            Ok(Ok(numbers.read_slice_1d::<u64, _>(rows)?.to_vec()))
        });
        let numbers = numbers.map_err(|cause| fail("events/number", cause))?;
        let numbers = numbers.map_err(|found| FileError::WrongFormat {
            path: path.clone(),
            field: "events/number".to_owned(),
            found,
            expected: "rows that were written".to_owned(),
        })?;
        Ok(Self { path, file, numbers })
    }

    /// Event number of each row.
    pub fn numbers(&self) -> &[u64] {
        &self.numbers
    }

    /// Whether this is the recovered file of a writer that ended early.
    pub fn is_recovered(&self) -> bool {
        self.file.attr(RECOVERED).is_ok()
    }

    /// What tells the run from others with its name; empty if nothing does.
    pub(crate) fn instance(&self) -> Result<String, FileError> {
        let run = self.file.group("run").map_err(|cause| read_error(&self.path, "run", &cause))?;
        match run.attr(INSTANCE) {
            Ok(instance) => {
                let instance = instance.read_scalar::<VarLenUnicode>();
                let instance = instance.map_err(|cause| read_error(&self.path, "attribute instance", &cause));
                Ok(instance?.as_str().to_owned())
            }
            Err(_) => Ok(String::new()),
        }
    }

    /// The event numbers that were read.
    pub(crate) fn into_numbers(self) -> Vec<u64> {
        self.numbers
    }

    /// One event's row of an `i16` dataset, such as `camera/waveforms`, in C order.
    pub fn row_i16(&self, dataset: &str, row: usize) -> Result<Vec<i16>, FileError> {
        self.row(dataset, row)
    }

    /// One event's row of a `u8` dataset, in C order.
    pub fn row_u8(&self, dataset: &str, row: usize) -> Result<Vec<u8>, FileError> {
        self.row(dataset, row)
    }

    /// The trigger's decisions on the event, if the file has decisions.
    pub fn trigger(&self, row: usize) -> Result<Option<TriggerDecisions>, FileError> {
        if !self.file.link_exists("trigger") {
            return Ok(None);
        }
        let patches = self.file.dataset("trigger/patch_of_bit").and_then(|patches| patches.read_raw());
        let patches: Vec<u16> =
            patches.map_err(|cause| read_error(&self.path, "trigger/patch_of_bit", &cause))?;
        let decisions: Vec<u8> = self.row("trigger/decisions", row)?;
        let bits = decisions.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
        let samples = patches.iter().enumerate().cycle();
        let mut sample = 0;
        let mut set = Vec::new();
        for ((bit, &patch), is_set) in samples.zip(bits) {
            if is_set {
                set.push(Decision { sample, patch });
            }
            sample += usize::from(bit + 1 == patches.len());
        }
        Ok(Some(TriggerDecisions { decisions, set }))
    }

    fn row<T: H5Type>(&self, dataset: &str, row: usize) -> Result<Vec<T>, FileError> {
        let rows = self.numbers.len();
        if row >= rows {
            return Err(FileError::NoRow { path: self.path.clone(), row, rows });
        }
        let read = || {
            let dataset = self.file.dataset(dataset)?;
            let mut selection = vec![SliceOrIndex::from(row..row + 1)];
            selection.extend((1..dataset.ndim()).map(|_| SliceOrIndex::from(..)));
            let row =
                dataset.as_reader().no_convert().read_slice::<T, _, IxDyn>(Hyperslab::from(selection))?;
            Ok(row.into_raw_vec_and_offset().0)
        };
        read().map_err(|cause| read_error(&self.path, dataset, &cause))
    }
}

/// Opens a complete or partial file.
pub(crate) fn open_file(path: &Path) -> Result<File, FileError> {
    // The library's message for a missing file has many lines.
    std::fs::metadata(path).map_err(IoError::of(path, "open"))?;
    // A file with its final name never changes; a partial one grows.
    let is_partial = path.extension().is_some_and(|found| found == "partial");
    let mode = if is_partial { OpenMode::ReadSWMR } else { OpenMode::Read };
    let file = File::with_options().with_fapl(|access| access.file_locking(false)).open_as(path, mode);
    file.map_err(|cause| read_error(path, "file", &cause))
}

fn read_error(path: &Path, object: &str, cause: &hdf5_metno::Error) -> FileError {
    let (path, object) = (path.to_owned(), object.to_owned());
    FileError::Hdf5 { path, operation: "read", object, cause: error_text(cause) }
}
