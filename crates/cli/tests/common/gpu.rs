//! Drivers of a GPU for programs that tests start.

#[path = "../../../card-server/tests/card/gpu_driver.rs"]
mod gpu_driver;

use std::path::Path;

/// Builds the drivers of a GPU in `folder`, under the names that programs load.
pub(crate) fn link_drivers(folder: &Path) {
    let drivers = gpu_driver::build(folder);
    for name in ["libcuda.so.1", "libvulkan.so.1"] {
        std::os::unix::fs::symlink(&drivers, folder.join(name)).unwrap();
    }
}
