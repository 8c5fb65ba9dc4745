//! RoCEv2 packets: the payload of UDP datagrams to port 4791.
//!
//! Each header is a module with two types. `Packet` is a view of a buffer; its accessors do not panic after
//! `check_len` succeeded. `Repr` is the header as a value; it is [parsed](bth::Repr::parse) from a view and
//! emitted into one. [`Packet`] is a whole packet; the table of [`Opcode`] lists which headers follow the
//! BTH. [`icrc`] computes the invariant CRC, [`cm`] holds the messages of connection managers.
//!
//! No I/O, no clock, no unsafe code. Layouts follow the InfiniBand Architecture Specification, volume 1:
//! transport headers in chapter 9, communication management in chapter 12, management datagrams in chapter
//! 13, RoCEv2 in annex A17.

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
