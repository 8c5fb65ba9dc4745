//! Arguments of functions.

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;

/// An unsigned argument. A number outside of its range is a `ValueError`, as documented, not Python's `OverflowError`.
pub(crate) struct Unsigned<T>(pub(crate) T);

impl<'py, T: FromPyObjectOwned<'py, Error = PyErr>> FromPyObject<'_, 'py> for Unsigned<T> {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        value.extract::<T>().map(Unsigned).map_err(|error: PyErr| {
            match error.is_instance_of::<PyOverflowError>(value.py()) {
                true => PyValueError::new_err(format!(
                    "{} is not an unsigned number of {} bits",
                    *value,
                    8 * size_of::<T>()
                )),
                false => error,
            }
        })
    }
}
