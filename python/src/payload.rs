//! Payload from Python: the bytes of several fragments without a gap.

use millstream_fragment::Fragment;
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Fragments as NumPy arrays: their events, their lengths, and the bytes of all of them.
pub(crate) struct Fragments<'a> {
    events: &'a [u64],
    lengths: &'a [u64],
    payload: &'a [u8],
    /// Those of a recording; without them they are computed.
    checksums: Option<&'a [u32]>,
}

impl<'a> Fragments<'a> {
    pub(crate) fn new(
        events: &'a PyReadonlyArray1<'_, u64>,
        lengths: &'a PyReadonlyArray1<'_, u64>,
        payload: &'a PyReadonlyArray1<'_, u8>,
        checksums: Option<&'a PyReadonlyArray1<'_, u32>>,
    ) -> PyResult<Self> {
        let checksums = checksums.map(|checksums| checksums.as_slice()).transpose()?;
        let (events, lengths) = (events.as_slice()?, lengths.as_slice()?);
        Ok(Self { events, lengths, payload: payload.as_slice()?, checksums })
    }

    /// Calls `each` with each fragment. The error of an inconsistent count names the source.
    pub(crate) fn try_for_each(
        &self,
        source: u32,
        mut each: impl FnMut(Fragment<'a>) -> PyResult<()>,
    ) -> PyResult<()> {
        let refuse = |text: String| Err(PyValueError::new_err(format!("source {source}: {text}")));
        if self.events.len() != self.lengths.len() {
            return refuse(format!("{} events and {} fragments", self.events.len(), self.lengths.len()));
        }
        if let Some(checksums) = self.checksums.filter(|checksums| checksums.len() != self.lengths.len()) {
            return refuse(format!("{} checksums and {} fragments", checksums.len(), self.lengths.len()));
        }
        let mut rest = self.payload;
        for (position, (event, len)) in self.events.iter().zip(self.lengths).enumerate() {
            let Some((payload, tail)) = usize::try_from(*len).ok().and_then(|len| rest.split_at_checked(len))
            else {
                return refuse(format!("the payload ends in event {event}"));
            };
            each(match self.checksums {
                Some(checksums) => Fragment { event: *event, payload, crc: checksums[position] },
                None => Fragment::new(*event, payload),
            })?;
            rest = tail;
        }
        if rest.is_empty() { Ok(()) } else { refuse(format!("{} bytes after the last fragment", rest.len())) }
    }
}
