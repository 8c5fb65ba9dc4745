//! Accelerator cards: register map, memory, kernels, and the emulated card process.
//!
//! A card has memory in banks, a register file (BAR0) and kernels that compute on its memory. The
//! emulated card is a process of its own, [`serve`]; its memory and registers are memfds, which it
//! hands to local users as a real card's driver hands out dma-bufs. A user opens a [`Card`],
//! registers its memory with a verbs device so that other nodes write into it, and gives it
//! commands through a [`Ring`].
//!
//! Read first: [`registers`] (the map), [`command`] (what stands in the rings), `docs/registers.md`
//! (both, generated).

mod card;
pub mod command;
mod engine;
pub mod geometry;
mod handshake;
pub mod kernel;
pub mod layout;
mod memory;
mod name;
mod os;
pub mod reference;
pub mod registers;
mod ring;
mod serve;

pub use card::{Card, NoSuchKernel, OpenError};
pub use handshake::Refusal;
pub use memory::{Memory, OutOfRange, PrefaultError, Span};
pub use name::{BadCardName, CardName};
pub use os::OsError;
pub use ring::{Ring, RingError, RingPlaces};
pub use serve::{Config, End, Lifetime, ServeError, serve};
