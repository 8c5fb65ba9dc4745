//! Connection management: what two connection managers say to each other on queue pair 1 (chapter 12), in the
//! way of rdma_cm (annex A11).
//!
//! [`Message`] is what is said, [`Message::parse`] and [`Message::emit`] go from and to the 256 bytes of a
//! management datagram. Alternate paths (LAP, APR) and path migration are not spoken: they are refused as
//! unknown, and a REQ's alternate path is ignored.

mod addresses;
mod layout;
mod message;

pub use addresses::{Addresses, PortSpace, service_id};
pub use layout::{addresses as addresses_header, dreq, mra, pair, rej, rep, req, sidr_rep, sidr_req};
pub use message::{About, Message, Path, Rep, Req, Transport};

/// Bytes of private data of each kind of message.
pub mod private {
    /// In a REQ; rdma_cm leaves 56 of them to programs.
    pub const REQ: usize = 92;
    /// In an MRA.
    pub const MRA: usize = 222;
    /// In a REJ.
    pub const REJ: usize = 148;
    /// In a REP.
    pub const REP: usize = 196;
    /// In an RTU.
    pub const RTU: usize = 224;
    /// In a DREQ.
    pub const DREQ: usize = 220;
    /// In a DREP.
    pub const DREP: usize = 224;
    /// In a SIDR_REQ; rdma_cm leaves 180 of them to programs.
    pub const SIDR_REQ: usize = 216;
    /// In a SIDR_REP.
    pub const SIDR_REP: usize = 136;
}

/// Why a connection is refused (12.6.7.2): those that are used here.
pub mod reason {
    /// Out of resources.
    pub const NO_RESOURCES: u16 = 3;
    /// The other side did not answer.
    pub const TIMEOUT: u16 = 4;
    /// The request asks for what is not offered.
    pub const UNSUPPORTED: u16 = 5;
    /// No such connection.
    pub const INVALID_COMM_ID: u16 = 6;
    /// Nobody listens there.
    pub const INVALID_SERVICE_ID: u16 = 8;
    /// Not this transport service.
    pub const INVALID_TRANSPORT: u16 = 9;
    /// The queue pair is that of a connection that the other side takes for alive.
    pub const STALE_CONNECTION: u16 = 10;
    /// Not this path MTU.
    pub const INVALID_MTU: u16 = 26;
    /// The program says no.
    pub const CONSUMER: u16 = 28;
}
