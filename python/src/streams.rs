//! Stream files.

use std::path::PathBuf;

use millstream_fragment::stream::{IndexEntry, Stream, StreamWriter as Writer};
use millstream_fragment::{Alignment, SourceId, SourceKind};
use numpy::ndarray::ArrayView1;
use numpy::{IntoPyArray as _, PyArray1, PyArrayMethods as _, PyReadonlyArray1};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;

use crate::arguments::Unsigned;
use crate::errors::{invalid, read_failed, write_failed};
use crate::payload::Fragments;

/// An open stream file. Its payload is mapped.
#[pyclass(frozen)]
pub(crate) struct StreamReader {
    stream: Stream,
}

/// Fields of a source table entry: id, kind, name, number of fragments, longest fragment (bytes), range of the payload in
/// the file.
type SourceFields = (u32, u32, String, usize, u32, (u64, u64));

/// The columns of a fragment index: event, offset, length, CRC-32.
type IndexColumns<'py> = (
    Bound<'py, PyArray1<u64>>,
    Bound<'py, PyArray1<u64>>,
    Bound<'py, PyArray1<u32>>,
    Bound<'py, PyArray1<u32>>,
);

#[pymethods]
impl StreamReader {
    #[new]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let stream = py.detach(|| Stream::open(path)).map_err(|error| read_failed(&error))?;
        Ok(Self { stream })
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.stream.path().to_owned()
    }

    #[getter]
    fn alignment(&self) -> u32 {
        self.stream.alignment().get()
    }

    /// First event, and the event after the last one.
    #[getter]
    fn events(&self) -> (u64, u64) {
        let events = self.stream.events();
        (events.start, events.end)
    }

    #[getter]
    fn n_fragments(&self) -> u64 {
        self.stream.n_fragments()
    }

    /// The source table.
    fn sources(&self) -> Vec<SourceFields> {
        self.stream
            .sources()
            .map(|source| {
                let payload = source.payload();
                (
                    source.id().0,
                    source.kind().0,
                    source.name().to_owned(),
                    source.len(),
                    source.max_len(),
                    (payload.start, payload.end),
                )
            })
            .collect()
    }

    /// The fragment index of a source.
    fn index<'py>(&self, py: Python<'py>, source: u32) -> PyResult<IndexColumns<'py>> {
        let found = self.stream.source(SourceId(source)).ok_or_else(|| {
            PyKeyError::new_err(format!("{}: no source {source}", self.stream.path().display()))
        })?;
        let entries: Vec<IndexEntry> = found.entries(0..found.len()).collect();
        let events: Vec<u64> = entries.iter().map(|entry| entry.event).collect();
        let offsets: Vec<u64> = entries.iter().map(|entry| entry.offset).collect();
        let lengths: Vec<u32> = entries.iter().map(|entry| entry.len).collect();
        let checksums: Vec<u32> = entries.iter().map(|entry| entry.crc).collect();
        Ok((
            events.into_pyarray(py),
            offsets.into_pyarray(py),
            lengths.into_pyarray(py),
            checksums.into_pyarray(py),
        ))
    }

    /// The bytes of the file, without a copy. The array keeps the file mapped and cannot be written.
    fn mapping<'py>(this: Bound<'py, Self>) -> Bound<'py, PyArray1<u8>> {
        let view = ArrayView1::from(this.get().stream.mapping());
        // SAFETY: the array holds a reference to the frozen object that owns the mapping, so the bytes stay mapped and
        // in place while the array exists. Nothing in this process writes the read-only mapping.
        let array = unsafe { PyArray1::borrow_from_array(&view, this.clone().into_any()) };
        drop(array.try_readwrite().map(numpy::PyReadwriteArray::make_nonwriteable));
        array
    }

    /// Compares all payload with its checksums.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.stream.verify_payload()).map_err(|error| read_failed(&error))
    }
}

/// A stream file that is being written.
#[pyclass]
pub(crate) struct StreamWriter {
    /// None after `finish` or `discard`.
    writer: Option<Writer>,
}

#[pymethods]
impl StreamWriter {
    #[new]
    fn create(
        path: PathBuf,
        first_event: Unsigned<u64>,
        n_events: Unsigned<u64>,
        alignment: Unsigned<u32>,
    ) -> PyResult<Self> {
        let (first_event, n_events) = (first_event.0, n_events.0);
        let alignment = Alignment::new(alignment.0).map_err(invalid)?;
        let end = first_event.checked_add(n_events).ok_or_else(|| {
            PyValueError::new_err(format!("{n_events} events from event {first_event} exceed 64 bits"))
        })?;
        let writer =
            Writer::create(path, first_event..end, alignment).map_err(|error| write_failed(&error))?;
        Ok(Self { writer: Some(writer) })
    }

    /// Appends a source. Fragment `i` has the event `events[i]`, the next `lengths[i]` bytes of `payload`, and the CRC-32
    /// `checksums[i]`, by default that of its bytes.
    #[allow(clippy::too_many_arguments, reason = "the fields of a source in Python")]
    fn append(
        &mut self,
        py: Python<'_>,
        source: Unsigned<u32>,
        kind: Unsigned<u32>,
        name: &str,
        events: PyReadonlyArray1<'_, u64>,
        lengths: PyReadonlyArray1<'_, u64>,
        payload: PyReadonlyArray1<'_, u8>,
        checksums: Option<PyReadonlyArray1<'_, u32>>,
    ) -> PyResult<()> {
        let writer = self.writer.as_mut().ok_or_else(|| PyValueError::new_err("the file is complete"))?;
        let fragments = Fragments::new(&events, &lengths, &payload, checksums.as_ref())?;
        py.detach(|| {
            let mut out = writer
                .source(SourceId(source.0), SourceKind(kind.0), name)
                .map_err(|error| write_failed(&error))?;
            fragments.try_for_each(source.0, |fragment| {
                out.push_fragment(fragment).map_err(|error| write_failed(&error))
            })
        })
    }

    /// Completes the file under its name.
    fn finish(&mut self, py: Python<'_>) -> PyResult<()> {
        let writer = self.writer.take().ok_or_else(|| PyValueError::new_err("the file is complete"))?;
        py.detach(|| writer.finish()).map_err(|error| write_failed(&error))
    }

    /// Removes the unfinished file.
    fn discard(&mut self) {
        self.writer = None;
    }

    fn __repr__(&self) -> &'static str {
        if self.writer.is_some() { "<StreamWriter, open>" } else { "<StreamWriter, closed>" }
    }
}
