//! The C API of accelerator cards, built as `libmillstream_memory.so.1` by `make lib`.
//!
//! - `include/millstream_memory.h`: a card of this host. Its memory is mapped and allocated, so that MPI and verbs
//!   programs communicate from and into it.
//! - `include/millstream_card.h`: a card on the network. The calls are those of `millstream_card::RemoteCard`.
//!
//! The headers document the functions. A function that fails returns -1 or a null pointer, sets `errno`, and keeps a
//! sentence for `millstream_error`. A null handle fails with `EINVAL`; any other invalid handle is undefined behaviour.

mod card;
mod error;
mod heap;
mod memory;

pub use card::*;
pub use error::millstream_error;
pub use memory::*;
