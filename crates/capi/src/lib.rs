//! The C ABI of the soft device: libibverbs.so.1.
//!
//! A program compiled against `infiniband/verbs.h` calls two sets of functions: the exported ones, listed
//! with their version nodes in `libibverbs.map`, and those behind the pointers of an opened context
//! ([`context`]). Both are defined here, one module per verbs object. A module only translates between C
//! structs and `millstream-device`. Verbs that the device does not support return EOPNOTSUPP by the
//! convention of their signature ([`errno`]).
//!
//! Cargo cannot put symbols on version nodes, so `make lib` links this crate's static library into
//! `libibverbs.so.1`.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of every exported function is verbs.h's: each pointer is an object of the \
              named type that the library or the caller made and has not yet destroyed"
)]

pub mod ah;
pub mod context;
pub mod cq;
pub mod cq_ex;
pub mod device;
pub mod errno;
pub mod event;
pub mod fork;
pub mod marshal;
pub mod mr;
pub mod mw;
pub mod pd;
pub mod port;
pub mod private;
pub mod qp;
pub mod qp_ex;
pub mod rate;
pub mod srq;
pub mod strings;
pub mod sys;
pub mod sysfs;
mod versioned;
pub mod xrc;
