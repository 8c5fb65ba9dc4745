//! The native module of the Python package `millstream`: `millstream._millstream`.
//!
//! Python code of the package wraps it: it converts arguments to NumPy arrays and finds the soft device before this module
//! is loaded. All calls that wait release the interpreter.

mod arguments;
mod card;
mod errors;
mod packets;
mod payload;
mod streams;

use pyo3::prelude::*;

/// Registers classes, functions and exceptions.
#[pymodule]
fn _millstream(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("FormatError", py.get_type::<errors::FormatError>())?;
    let card_error = py.get_type::<errors::CardError>();
    // Of errors that no operation of the card has caused.
    card_error.setattr("fatal", false)?;
    module.add("CardError", card_error)?;
    module.add_class::<streams::StreamReader>()?;
    module.add_class::<streams::StreamWriter>()?;
    module.add_class::<card::Connection>()?;
    module.add_function(wrap_pyfunction!(packets::parse_packet, module)?)?;
    module.add_function(wrap_pyfunction!(packets::build_packet, module)?)?;
    module.add_function(wrap_pyfunction!(card::verbs_library, module)?)?;
    Ok(())
}
