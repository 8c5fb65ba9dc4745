//! RoCEv2 packets: what a UDP datagram to port 4791 carries between two channel adapters.
//!
//! Every header is a module with the same two words: `Packet` is a view of any buffer, whose accessors do not
//! panic once `check_len` agreed; `Repr` is the header as a value, which [parses](bth::Repr::parse) from a view
//! and emits into one. [`Packet`] is a whole packet: which headers follow each other is said by [`Opcode`]'s
//! table, once. [`icrc`] is the check sum over all of it, [`cm`] what connection managers say to each other.
//!
//! No I/O, no clock, no unsafe code. Layouts follow the InfiniBand Architecture Specification, volume 1:
//! transport headers in chapter 9, management datagrams in chapters 13 and 12, RoCEv2 in annex A17.

#![forbid(unsafe_code)]

#[macro_use]
mod field;

pub mod bth;
pub mod cm;
mod error;
mod extension;
mod gid;
pub mod icrc;
pub mod mad;
mod opcode;
mod packet;

pub use error::{Error, Result};
pub use extension::{
    NakCode, Syndrome, aeth, atomic_ack_eth, atomic_eth, credits, deth, grh, ieth, imm_dt, reth, rnr_nanos,
    xrceth,
};
pub use gid::gid;
pub use millstream_quantity::{Msn, Pkey, Psn, Qkey, Qpn, Rkey, Srqn};
pub use opcode::{Headers, Opcode, Operation, Position, Service};
pub use packet::{CNP_PADDING, Packet, Repr};

/// The UDP port of RoCEv2 (annex A17, 17.4.5.2).
pub const UDP_PORT: u16 = 4791;

/// Bytes of the invariant CRC at the end of each packet.
pub const ICRC_LEN: usize = 4;
