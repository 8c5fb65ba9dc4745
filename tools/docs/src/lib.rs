//! Checks of the documentation against the workspace.
//!
//! - [`graph`] renders the crates of the workspace and the arrows between them, from `cargo metadata`.
//! - [`links`] finds links in Markdown files whose target does not exist.
//!
//! `cargo run -p millstream-docs` writes the generated parts; the tests compare them with the files.
#![forbid(unsafe_code)]

pub mod graph;
pub mod links;

use std::path::{Path, PathBuf};

/// The root of the workspace.
pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the manifest lies in the workspace")
}
