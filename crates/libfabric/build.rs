//! Generates Rust bindings of the libfabric headers that a provider implements.

use std::process::ExitCode;

use millstream_bindings::Header;

fn main() -> ExitCode {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let header = Header {
        header: "wrapper.h",
        file: "libfabric.rs",
        requirement: "the bindings need the headers of libfabric 1.17 and libclang: \
                      apt-get install libfabric-dev libclang-dev",
    };
    header.generate(|builder| {
        builder
            .ignore_functions()
            .allowlist_type("fi_.*|fid.*")
            .allowlist_var("FI_.*|MS_FI_.*")
            .derive_default(true)
    })
}
