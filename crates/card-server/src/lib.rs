//! The card process: an accelerator card with memory in banks, a register file (BAR0), and regions that run
//! kernels.
//!
//! [`serve`] runs a card in the calling process. Memory and registers of an emulated card are memfds. The
//! card passes them to local users as a driver passes dma-bufs. A card with a verbs device is also used over
//! the network.
//!
//! ```
//! use std::time::Duration;
//!
//! use millstream_card::{Card, Ring, RingLayout};
//! use millstream_card_abi::command::Descriptor;
//! use millstream_card_abi::events::{EventSummary, PacketBuffer, VERIFY, VerifyArgs};
//! use millstream_card_abi::{CardName, MemoryRange};
//! use millstream_card_server::{CardConfig, ExitReason, Lifetime, serve};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let timeout = Duration::from_secs(5);
//! let name: CardName = format!("example-{}", std::process::id()).parse()?;
//! let mut config = CardConfig::new(name.clone(), 1 << 20);
//! config.lifetime = Lifetime::Owner { claim_timeout: timeout };
//! // A card is usually a separate process; a thread is enough for an example.
//! let process = std::thread::spawn(|| serve(config));
//!
//! let card = Card::open_as_owner(&name, timeout)?;
//! card.load(0, VERIFY)?;
//! let mut ring = Ring::open(&card, RingLayout::at(0, 16))?;
//!
//! // A batch with the buffer of one packet, which has not arrived.
//! let packet = PacketBuffer { offset: 0x10000, capacity: 0x10000, source: 7, reserved: 0 };
//! let mut args = Vec::new();
//! VerifyArgs { first_event: 100, n_events: 2, n_sources: 1 }.append_to(&[packet], &mut args);
//! card.memory().write(0x4000, &args)?;
//! ring.submit(&Descriptor {
//!     region: 0,
//!     flags: 0,
//!     args: MemoryRange::new(0x4000, args.len() as u64),
//!     result: MemoryRange::new(0x8000, 2 * EventSummary::BYTES as u64),
//!     cookie: 1,
//! })?;
//! let completion = ring.wait(timeout)?;
//! assert_eq!((completion.outcome, completion.counters.events), (Ok(()), 2));
//! let second = EventSummary::from_bytes(&card.memory().read_array(0x8000 + 32)?);
//! assert_eq!((second.event, second.missing), (101, 1));
//!
//! drop((ring, card));
//! assert_eq!(process.join().expect("no panic")?, ExitReason::OwnerDisconnected);
//! # Ok(())
//! # }
//! ```
//!
//! Read first: `docs/cards.md`, then [`kernel`] and [`serve`].

pub mod backing;
mod hardware;
pub mod kernel;
mod lease;
mod lease_controller;
mod memory;
mod net;
mod notification;
mod polling;
mod queue;
mod region;
mod sensors;
mod serve;
mod windows;

pub use hardware::HardwareError;
pub use memory::Memory;
pub use serve::{CardConfig, ExitReason, Lifetime, NetworkConfig, ServeError, serve, serve_with};
