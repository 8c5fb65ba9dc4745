//! Locks, rings and table entries that threads and processes use without waiting for the kernel.
//!
//! The crate defines the memory layout of shared objects and the order of accesses to them. It is independent
//! of verbs objects, files and mappings. All atomics come from [`sync`]. So the loom model checker compiles
//! this crate unchanged (`make loom`), and Miri runs its unit tests (`make miri`).
//!
//! The crate lies below `millstream-shm`: that crate guards its tables with these locks. The locks use only
//! two kernel interfaces, both in this crate: [`barrier`] (membarrier) and [`process`] (pidfd). A thread that holds a lock must
//! not be cancelled ([`cancellation`]).
//!
//! Locks:
//! - [`SpinLock`]: threads of one process;
//! - [`BiasedLock`]: threads of one process; without cost for the one thread that takes it nearly always;
//! - [`RobustLock`]: processes; a survivor takes it from a holder that has exited;
//! - [`BiasedRobustLock`]: processes; without cost for the one owner that takes it nearly always.
//!
//! Shared memory:
//! - [`shared`]: which types may lie in memory that other processes write;
//! - [`cqe`] and [`cq_ring`]: a completion queue that many producers fill;
//! - [`mr_entry`]: a memory key's entry, read whole or not at all;
//! - [`inflight_op`]: how an initiator announces an operation, and how the target waits for its end;
//! - [`retry_owner`]: the choice of who retries pending requests, a polling application or the progress
//!   thread;
//! - [`srq_limit`]: the limit event of a shared receive queue;
//! - [`timer`]: deadlines of many owners, for a thread that sleeps until the next one;
//! - [`word_ring`]: a ring of 64-bit words with one writer and one reader, and a reader's sleep.
//!
//! Memory accesses:
//! - [`copy_in_order`]: copies whose last bytes become visible last;
//! - [`prefetch`]: hints about cache lines that another core wrote;
//! - [`barrier`]: an asymmetric fence, without cost for the fast side.

pub mod barrier;
mod biased;
mod biased_robust;
pub mod cancellation;
pub mod clock;
mod copy;
pub mod cq_ring;
pub mod cqe;
pub mod inflight_op;
#[cfg(loom)]
pub mod model;
pub mod mr_entry;
pub mod prefetch;
pub mod process;
pub mod retry_owner;
mod robust;
pub mod shared;
mod spin;
pub mod srq_limit;
pub mod sync;
pub mod timer;
pub mod word_ring;

pub use biased::BiasedLock;
pub use biased_robust::{Acquired, BiasedRobustLock, OwnerId};
pub use cancellation::CancelGuard;
pub use clock::Timestamp;
pub use copy::{copy_in_order, store_u64};
pub use robust::{RobustGuard, RobustLock};
pub use shared::Shared;
pub use spin::{SpinGuard, SpinLock};
