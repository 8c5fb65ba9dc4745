//! Generates Rust bindings of the libfabric headers that a provider implements.

use std::{env, panic, path::PathBuf, process::ExitCode};

const HEADER: &str = "wrapper.h";
const REMEDY: &str = "the bindings need the headers of libfabric 1.17 and libclang: apt-get install libfabric-dev libclang-dev";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed={HEADER}");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // bindgen panics if it cannot load libclang; the error names the packages to install.
    let bindings = match panic::catch_unwind(generate) {
        Ok(Ok(bindings)) => bindings,
        Ok(Err(error)) => return fail(&error.to_string()),
        Err(_) => return fail("libclang cannot be loaded"),
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    let file = out.join("libfabric.rs");
    match bindings.write_to_file(&file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{}: {error}", file.display())),
    }
}

fn fail(cause: &str) -> ExitCode {
    for line in cause.lines().chain([REMEDY]) {
        println!("cargo::error={line}");
    }
    ExitCode::FAILURE
}

fn generate() -> Result<bindgen::Bindings, bindgen::BindgenError> {
    bindgen::Builder::default()
        .header(HEADER)
        .rust_target(bindgen::RustTarget::stable(88, 0).unwrap_or_else(|_| bindgen::RustTarget::default()))
        .rust_edition(bindgen::RustEdition::Edition2024)
        .ignore_functions()
        .allowlist_type("fi_.*|fid.*")
        .allowlist_var("FI_.*|MS_FI_.*")
        // Enums are integers in the ABI: a caller may pass a value that no header names.
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_debug(false)
        .derive_default(true)
        .generate_comments(false)
        .generate()
}
