//! Multi-fragment packets.

use millstream_fragment::mfp::{self, Packet, Repr};
use millstream_fragment::{Alignment, SourceId, SourceKind};
use numpy::{IntoPyArray as _, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Unsigned;
use crate::errors::{FormatError, invalid};
use crate::payload::Fragments;

/// Parses a packet and compares its payload with the checksums. Returns the fields of the header, and the index of
/// its fragments: events, offsets in the packet, lengths.
#[pyfunction]
pub(crate) fn parse_packet<'py>(
    py: Python<'py>,
    bytes: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyDict>> {
    let packet =
        Packet::new_checked(bytes.as_slice()?).map_err(|error| FormatError::new_err(error.to_string()))?;
    let header = packet.header();
    if let Some(fragment) = packet.fragments().find(|fragment| !fragment.is_intact()) {
        return Err(FormatError::new_err(format!(
            "event {}: payload does not match its crc",
            fragment.event
        )));
    }
    let first = header.first_event();
    let (mut events, mut offsets, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    for entry in header.entries() {
        events.push(entry.event);
        offsets.push(u64::from(entry.offset));
        lengths.push(u64::from(entry.len));
    }
    let out = PyDict::new(py);
    out.set_item("source", header.source().0)?;
    out.set_item("kind", header.kind().0)?;
    out.set_item("first_event", first)?;
    out.set_item("n_events", header.n_events())?;
    out.set_item("total_len", header.total_len())?;
    out.set_item("events", events.into_pyarray(py))?;
    out.set_item("offsets", offsets.into_pyarray(py))?;
    out.set_item("lengths", lengths.into_pyarray(py))?;
    Ok(out)
}

/// Builds a packet. Fragment `i` has the event `events[i]`, the next `lengths[i]` bytes of `payload`, and the CRC-32
/// `checksums[i]`, by default that of its bytes.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the fields of a packet in Python")]
pub(crate) fn build_packet<'py>(
    py: Python<'py>,
    source: Unsigned<u32>,
    kind: Unsigned<u32>,
    first_event: Unsigned<u64>,
    n_events: Unsigned<u32>,
    events: PyReadonlyArray1<'py, u64>,
    lengths: PyReadonlyArray1<'py, u64>,
    payload: PyReadonlyArray1<'py, u8>,
    alignment: Unsigned<u32>,
    checksums: Option<PyReadonlyArray1<'py, u32>>,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let alignment = Alignment::new(alignment.0).map_err(invalid)?;
    let mut fragments = Vec::new();
    Fragments::new(&events, &lengths, &payload, checksums.as_ref())?.try_for_each(source.0, |fragment| {
        fragments.push(fragment);
        Ok(())
    })?;
    let n_fragments = u32::try_from(fragments.len()).map_err(invalid)?;
    let repr = Repr {
        source: SourceId(source.0),
        kind: SourceKind(kind.0),
        first_event: first_event.0,
        n_events: n_events.0,
        n_fragments,
        alignment,
    };
    let padded = fragments
        .iter()
        .map(|fragment| Ok(alignment.padded(u32::try_from(fragment.payload.len()).map_err(invalid)?)))
        .sum::<PyResult<u64>>()?;
    let len = repr.header_len() + padded;
    let len = u32::try_from(len).map_err(|_| {
        PyValueError::new_err(format!("the packet would have {len} bytes; the maximum is 4 GiB"))
    })?;
    let mut buffer = vec![0; len as usize];
    let total = mfp::assemble(&mut buffer, repr, &fragments).map_err(invalid)?;
    buffer.truncate(total as usize);
    Ok(buffer.into_pyarray(py))
}
