//! Builds the drivers of a GPU for machines without one: `gpu_driver.cpp`. Tests of other crates include this file.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the drivers; the library, in `folder`.
pub(crate) fn build(folder: &Path) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../card-server");
    let library = folder.join("libgpu.so");
    let kernels = crate_folder.join("src/kernel/gpu");
    let function = crate_folder.join("../../examples/kernels/decide_events.cu");
    let built = Command::new("c++")
        .args(["-std=c++17", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg("-I")
        .arg(&kernels)
        .arg("-DEVENTS=\"events.cu\"")
        .arg(format!("-DFUNCTION=\"{}\"", function.display()))
        .arg(crate_folder.join("tests/card/gpu_driver.cpp"))
        .status();
    assert!(built.expect("run c++").success(), "c++ cannot compile the drivers");
    library
}
