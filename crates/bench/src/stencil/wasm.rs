//! The stencil as a WebAssembly kernel: the example in `examples/kernels`, against the native kernel.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_card_abi::registers::KernelWords;
use millstream_card_server::kernel::KernelLoader as _;

use super::NativeKernel;
use super::region_kernel::BareKernel;
use crate::{Figure, Table, median};

/// Rows and columns of the grid, and its sweeps. The example makes one sweep per pass over memory.
const SIDE: u64 = 1024;
const SWEEPS: u64 = 100;

/// The example's source files, as in the repository.
const SOURCES: [(&str, &str); 2] = [
    ("jacobi.rs", include_str!("../../kernels/jacobi.rs")),
    ("millstream.rs", include_str!("../../kernels/millstream.rs")),
];

/// Compiles the example with the command that its first lines name.
pub(super) fn compile(folder: &Path) -> Result<Vec<u8>, String> {
    let write = |(name, text): (&str, &str)| std::fs::write(folder.join(name), text);
    SOURCES.into_iter().try_for_each(write).map_err(|error| error.to_string())?;
    let image: PathBuf = folder.join("jacobi.wasm");
    let output = Command::new("rustc")
        .args(["--edition", "2024", "--target", "wasm32-unknown-unknown", "-O", "-C", "panic=abort"])
        .args(["-C", "strip=debuginfo", "-C", "target-feature=+simd128", "--crate-type", "cdylib", "-o"])
        .arg(&image)
        .arg(folder.join("jacobi.rs"))
        .output()
        .map_err(|error| format!("rustc: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    std::fs::read(image).map_err(|error| error.to_string())
}

/// Measures the compiled example in turn with the native kernel: on one thread with one sweep per pass, and unrestricted.
pub(super) fn measure(table: &mut Table, image: &[u8], rounds: usize) -> Result<(), Box<dyn Error>> {
    let kernel = millstream_wasm::Wasm::default().load(image)?.kernel;
    let mut wasm = BareKernel::new(kernel, SIDE, SWEEPS, |plane| {
        let mut arguments = KernelWords::default();
        arguments[..5].copy_from_slice(&[SIDE, SIDE, 0, plane, SWEEPS]);
        arguments
    })?;
    let mut native = BareKernel::native(SIDE, SWEEPS)?;
    let mut one_thread = NativeKernel::<f32>::new(SIDE as usize, 1, SWEEPS as usize, 1)?;
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    // The first round is a warm-up.
    for round in 0..=rounds {
        let measured =
            [wasm.points_per_second()?, one_thread.points_per_second(), native.points_per_second()?];
        if round > 0 {
            rates.iter_mut().zip(measured).for_each(|(rates, rate)| rates.push(rate));
        }
    }
    let [wasm, one_thread, native] = rates.map(|rates| median(&rates).unwrap_or(0.0) / 1e9);
    let name = |native| format!("WebAssembly kernel, {SIDE}×{SIDE}, vs native kernel{native}");
    let restricted = name(", 1 thread, one sweep per pass");
    table.push(Figure::with_baseline(restricted, wasm, "G points/s", one_thread));
    table.push(Figure::with_baseline(name(""), wasm, "G points/s", native));
    Ok(())
}
