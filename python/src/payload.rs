//! Payload from Python: the bytes of several fragments without a gap.

use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Fragments as NumPy arrays: their events, their lengths, and the bytes of all of them.
pub(crate) struct Fragments<'a> {
    pub(crate) events: &'a [u64],
    pub(crate) lengths: &'a [u64],
    pub(crate) payload: &'a [u8],
}

impl<'a> Fragments<'a> {
    pub(crate) fn new(
        events: &'a PyReadonlyArray1<'_, u64>,
        lengths: &'a PyReadonlyArray1<'_, u64>,
        payload: &'a PyReadonlyArray1<'_, u8>,
    ) -> PyResult<Self> {
        Ok(Self { events: events.as_slice()?, lengths: lengths.as_slice()?, payload: payload.as_slice()? })
    }

    /// Calls `each` with the event and the bytes of each fragment. The error of an inconsistent count names the source.
    pub(crate) fn try_for_each(
        &self,
        source: u32,
        mut each: impl FnMut(u64, &'a [u8]) -> PyResult<()>,
    ) -> PyResult<()> {
        let refuse = |text: String| Err(PyValueError::new_err(format!("source {source}: {text}")));
        if self.events.len() != self.lengths.len() {
            return refuse(format!("{} events and {} fragments", self.events.len(), self.lengths.len()));
        }
        let mut rest = self.payload;
        for (event, len) in self.events.iter().zip(self.lengths) {
            let Some((fragment, tail)) =
                usize::try_from(*len).ok().and_then(|len| rest.split_at_checked(len))
            else {
                return refuse(format!("the payload ends in event {event}"));
            };
            each(*event, fragment)?;
            rest = tail;
        }
        if rest.is_empty() { Ok(()) } else { refuse(format!("{} bytes after the last fragment", rest.len())) }
    }
}
