//! Accelerator cards: register map, memory, kernels, and the emulated card process.
//!
//! A card has memory in banks, a register file (BAR0) and kernels that compute on its memory. The
//! emulated card is a process of its own, [`serve`]; its memory and registers are memfds, which it
//! hands to local users as a real card's driver hands out dma-bufs. A user opens a [`Card`],
//! registers its memory with a verbs device so that other nodes write into it, and gives it
//! commands through a [`Ring`].
//!
//! ```
//! use std::time::Duration;
//!
//! use millstream_card::command::Descriptor;
//! use millstream_card::kernel::{Registry, slot, verify};
//! use millstream_card::{Card, CardName, Config, End, Lifetime, Ring, RingPlaces, Span, serve};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let patience = Duration::from_secs(5);
//! let name: CardName = format!("example-{}", std::process::id()).parse()?;
//! let mut config = Config::new(name.clone(), 1 << 20, Registry::builtin());
//! config.lifetime = Lifetime::Owner { claim_within: patience };
//! // A thread will do for an example; usually this is a process of its own.
//! let process = std::thread::spawn(|| serve(config));
//!
//! let card = Card::open_as_owner(&name, patience)?;
//! let mut ring = Ring::open(&card, RingPlaces::at(0, 16))?;
//!
//! // A slot with one place, to which no packet has come.
//! let place = slot::Place { offset: 0x10000, capacity: 0x10000, source: 7, reserved: 0 };
//! let mut args = Vec::new();
//! verify::VerifyArgs { first_event: 100, n_events: 2, n_sources: 1 }.append_to(&[place], &mut args);
//! card.memory().write(0x4000, &args)?;
//! ring.submit(&Descriptor {
//!     kernel: card.kernel(verify::NAME)?,
//!     flags: 0,
//!     args: Span::new(0x4000, args.len() as u64),
//!     result: Span::new(0x8000, 2 * slot::Summary::BYTES as u64),
//!     cookie: 1,
//! })?;
//! let completion = ring.wait(patience)?;
//! assert_eq!((completion.outcome, completion.tally.events), (Ok(()), 2));
//! let second = slot::Summary::from_bytes(&card.memory().read_array(0x8000 + 32)?);
//! assert_eq!((second.event, second.missing), (101, 1));
//!
//! drop((ring, card));
//! assert_eq!(process.join().expect("no panic")?, End::OwnerGone);
//! # Ok(())
//! # }
//! ```
//!
//! Read first: [`registers`] (the map), [`command`] (what stands in the rings), `docs/registers.md`
//! (both, generated).

pub mod backing;
mod card;
pub mod command;
mod engine;
mod handshake;
mod hardware;
pub mod kernel;
pub mod layout;
pub mod lease;
mod memory;
mod name;
pub mod net;
mod os;
pub mod reference;
pub mod region;
pub mod registers;
mod ring;
mod sensors;
mod serve;
mod warden;

pub use card::{Card, NoSuchKernel, OpenError, UseError};
pub use handshake::Refusal;
pub use memory::{AccessError, Memory, PrefaultError, Span};
pub use name::{BadCardName, CardName};
pub use os::OsError;
pub use ring::{Ring, RingError, RingPlaces};
pub use serve::{Config, End, Lifetime, Network, ServeError, serve, serve_with};
