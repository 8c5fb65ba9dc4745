//! Quantities with one type each, so that a bare integer crosses no function boundary.
//!
//! - [`number`]: numbers of the RDMA transport (PSN, queue pair number, keys), with their width in bits;
//! - [`time`]: points in time, durations in the units that the crates count in, frequencies;
//! - [`data`]: sizes and rates of data; [`binary`]: sizes with KiB, MiB and GiB; [`length`]: lengths of cables;
//! - [`si`]: how quantities are printed.
//!
//! Durations that need no particular unit are [`core::time::Duration`].

#![forbid(unsafe_code)]

pub mod binary;
pub mod data;
pub mod length;
pub mod number;
pub mod si;
pub mod time;

pub use binary::NotASize;
pub use data::{Bytes, BytesPerSecond};
pub use length::Metres;
pub use number::{Lkey, Msn, Pkey, Psn, Qkey, Qpn, Rkey, Srqn};
pub use time::{Hertz, Instant, Picos, Seconds, ack_timeout};
