//! Generates Rust bindings of `infiniband/verbs.h`: types and constants. This crate defines the functions.

use std::process::ExitCode;

use millstream_bindings::bindgen::callbacks::{DeriveTrait, ImplementsTrait, ParseCallbacks};
use millstream_bindings::{Header, bindgen};

fn main() -> ExitCode {
    let header = Header {
        header: "wrapper.h",
        file: "verbs.rs",
        requirement: "the bindings need the verbs headers and libclang: \
                      apt-get install libibverbs-dev libclang-dev",
    };
    header.generate(|builder| {
        builder
            .parse_callbacks(Box::new(bindgen::CargoCallbacks::new()))
            .parse_callbacks(Box::new(LibcTypes))
            .ignore_functions()
            .allowlist_type("ibv_.*|_ibv_.*|__ibv_.*|verbs_.*")
            .allowlist_type("ib_uverbs_advise_mr_flag|ib_uverbs_ah_attr|ib_uverbs_qp_attr|ib_user_path_rec")
            .allowlist_var("IBV_.*|ETHERNET_LL_SIZE|IB_GRH_.*|IB_ROCE_.*")
            // Pthread and time types are libc's, so that the functions of libc take them.
            .blocklist_type("pthread_mutex_t|pthread_cond_t|timespec|__pthread.*")
            .raw_line("use libc::{pthread_cond_t, pthread_mutex_t, timespec};")
            .derive_default(true)
    })
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
