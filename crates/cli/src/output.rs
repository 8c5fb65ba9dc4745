//! Paths of results.

use std::path::Path;

/// Whether a path of results is `-`, standard output.
pub(crate) fn is_standard_output(path: &Path) -> bool {
    path.as_os_str() == "-"
}
