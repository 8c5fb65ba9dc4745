//! Generates Rust bindings of `millstream_fabric.h`: types, constants, and declarations that the definitions must match.

use std::{env, panic, path::PathBuf, process::ExitCode};

const HEADER: &str = "include/millstream_fabric.h";
const REMEDY: &str = "the bindings need libclang: apt-get install libclang-dev";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed={HEADER}");
    // The library's name for programs that are linked with it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmillstream_fabric.so");
    // bindgen panics if it cannot load libclang; the error names the package to install.
    let bindings = match panic::catch_unwind(generate) {
        Ok(Ok(bindings)) => bindings,
        Ok(Err(error)) => return fail(&error.to_string()),
        Err(_) => return fail("libclang cannot be loaded"),
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    let file = out.join("fabric.rs");
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
        .allowlist_function("ms_fabric_.*")
        .allowlist_type("ms_fabric_.*")
        .allowlist_var("MS_FABRIC_.*")
        // Enums are integers in the ABI: a caller may pass a value that no header names.
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_debug(false)
        .generate_comments(false)
        .generate()
}
