//! Generates Rust bindings of `millstream_fabric.h`: types, constants, and declarations that the definitions must match.

use std::process::ExitCode;

use millstream_bindings::Header;

fn main() -> ExitCode {
    // The library's name for programs that are linked with it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmillstream_fabric.so");
    let header = Header {
        header: "include/millstream_fabric.h",
        file: "fabric.rs",
        requirement: "the bindings need libclang: apt-get install libclang-dev",
    };
    header.generate(|builder| {
        builder
            .allowlist_function("ms_fabric_.*")
            .allowlist_type("ms_fabric_.*")
            .allowlist_var("MS_FABRIC_.*")
    })
}
