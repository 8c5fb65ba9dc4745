//! Generates Rust bindings of `infiniband/verbs.h`: types and constants. This crate defines the functions.

use std::{env, panic, path::PathBuf, process::ExitCode};

use bindgen::callbacks::{DeriveTrait, ImplementsTrait, ParseCallbacks};

const HEADER: &str = "wrapper.h";
const REMEDY: &str =
    "the bindings need the verbs headers and libclang: apt-get install libibverbs-dev libclang-dev";

fn main() -> ExitCode {
    // bindgen panics if it cannot load libclang; the error names the package to install.
    let bindings = match panic::catch_unwind(generate) {
        Ok(Ok(bindings)) => bindings,
        Ok(Err(error)) => return fail(&error.to_string()),
        Err(_) => return fail("libclang cannot be loaded"),
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    let file = out.join("verbs.rs");
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
        .parse_callbacks(Box::new(bindgen::CargoCallbacks::new()))
        .parse_callbacks(Box::new(LibcTypes))
        .rust_target(bindgen::RustTarget::stable(88, 0).unwrap_or_else(|_| bindgen::RustTarget::default()))
        .rust_edition(bindgen::RustEdition::Edition2024)
        .ignore_functions()
        .allowlist_type("ibv_.*|_ibv_.*|__ibv_.*|verbs_.*")
        .allowlist_type("ib_uverbs_advise_mr_flag|ib_uverbs_ah_attr|ib_uverbs_qp_attr|ib_user_path_rec")
        .allowlist_var("IBV_.*|ETHERNET_LL_SIZE|IB_GRH_.*|IB_ROCE_.*")
        // Pthread and time types are libc's, so that the functions of libc take them.
        .blocklist_type("pthread_mutex_t|pthread_cond_t|timespec|__pthread.*")
        .raw_line("use libc::{pthread_cond_t, pthread_mutex_t, timespec};")
        // Enums are integers in the ABI: a caller may pass a value that no header names.
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_debug(false)
        .derive_default(true)
        .generate_comments(false)
        .generate()
}

/// Declares to bindgen the traits of types taken from `libc`.
#[derive(Debug)]
struct LibcTypes;

impl ParseCallbacks for LibcTypes {
    fn blocklisted_type_implements_trait(
        &self,
        _name: &str,
        derive_trait: DeriveTrait,
    ) -> Option<ImplementsTrait> {
        match derive_trait {
            DeriveTrait::Copy => Some(ImplementsTrait::Yes),
            _ => Some(ImplementsTrait::Manually),
        }
    }
}
