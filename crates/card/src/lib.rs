//! The client side of accelerator cards.
//!
//! - [`Card`]: a card of this host, whose registers and memory this process maps. A [`Ring`] submits commands.
//! - [`RemoteCard`]: a card on the network, used by RDMA and messages.
//! - [`RemoteMap`]: loads and stores to the memory of a remote card.
//! - [`checkpoint`]: saves and restores a remote card.
//!
//! The crate `millstream-card-abi` defines registers, commands and messages; `docs/cards.md` describes cards.
#![forbid(unsafe_code)]

mod card;
pub mod checkpoint;
pub mod control;
pub mod info;
pub mod map;
pub mod remote;
mod ring;
mod run;

pub use card::{Card, CommandError, MemoryAccess, NoSuchKernel, OpenError};
pub use map::RemoteMap;
pub use remote::{HeldLease, LeaseToken, RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions, Snapshot};
pub use ring::{Ring, RingError, RingLayout};
