//! The interface of accelerator cards: everything that a card and its users have to agree on.
//!
//! This crate holds the register map, the structures in card memory, command and message formats, and names.
//! It performs no I/O. `millstream-card` is the client side, `millstream-card-server` the card process.
//!
//! Read first: [`registers`] (BAR0), [`command`] (entries of the rings), [`hello`] and [`message`] (the
//! network). `docs/registers.md` is generated from this crate, and so is the C header
//! `include/millstream_card_registers.h`.

pub mod banks;
pub mod codes;
pub mod command;
pub mod dma;
pub mod events;
pub mod hello;
pub mod image;
pub mod ipc;
pub mod layout;
pub mod lease;
mod memory;
pub mod message;
mod name;
mod os;
pub mod reference;
pub mod registers;
pub mod stencil;

pub use memory::{AccessError, MappedMemory, MemoryRange, PrefaultError};
pub use name::{BadCardName, CardName};
pub use os::{IoContext, SyscallError};
