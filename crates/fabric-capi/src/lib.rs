//! The C interface of the torus: the functions of `millstream_fabric.h` over [`TorusNode`](millstream_torus::TorusNode), and
//! over [`OutsideHost`](millstream_torus::OutsideHost) for hosts outside of the torus.
//!
//! The header is the definition: [`sys`] is generated from it, and a test compares the declarations with these functions.
//! Read first: the header, then `handle` (setup), `outside` (hosts outside), `transfer` (operations of one node) and `together` (of all nodes).

mod error;
mod handle;
mod outside;
#[allow(missing_docs, clippy::all, reason = "generated; the header has the documentation")]
pub mod sys;
mod together;
mod transfer;

pub use error::ms_fabric_error_message;
pub use handle::{
    ms_fabric_close, ms_fabric_deregister, ms_fabric_dimensions, ms_fabric_open, ms_fabric_publish,
    ms_fabric_rank, ms_fabric_register, ms_fabric_register_card,
};
pub use outside::{ms_fabric_find, ms_fabric_open_outside};
pub use together::{ms_fabric_allreduce, ms_fabric_barrier, ms_fabric_exchange};
pub use transfer::{
    ms_fabric_compare_swap, ms_fabric_counter, ms_fabric_fetch_add, ms_fabric_flush, ms_fabric_get,
    ms_fabric_get_region, ms_fabric_lost_events, ms_fabric_lost_node, ms_fabric_poll_event, ms_fabric_put,
    ms_fabric_put_region, ms_fabric_wait_counter,
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails to compile if a function differs from its declaration in the header.
    macro_rules! same_signature {
        ($($name:ident)*) => {{
            $(let _ = [sys::$name, super::$name];)*
            vec![$(stringify!($name)),*]
        }};
    }

    #[test]
    fn every_function_of_the_header_is_defined_with_its_signature() {
        let defined = same_signature!(
            ms_fabric_open ms_fabric_open_outside ms_fabric_find ms_fabric_close ms_fabric_error_message ms_fabric_dimensions ms_fabric_rank
            ms_fabric_register ms_fabric_register_card ms_fabric_publish ms_fabric_deregister ms_fabric_put ms_fabric_put_region
            ms_fabric_get ms_fabric_get_region ms_fabric_fetch_add ms_fabric_compare_swap ms_fabric_flush
            ms_fabric_counter ms_fabric_wait_counter ms_fabric_poll_event ms_fabric_lost_events
            ms_fabric_lost_node ms_fabric_exchange ms_fabric_barrier ms_fabric_allreduce
        );
        let header = include_str!("../include/millstream_fabric.h");
        let is_declaration = |line: &&str| {
            line.starts_with("int ") || line.starts_with("void ") || line.starts_with("const char")
        };
        assert_eq!(header.lines().filter(is_declaration).count(), defined.len());
        defined.iter().for_each(|name| assert!(header.contains(&format!("{name}(")), "{name}"));
    }
}
