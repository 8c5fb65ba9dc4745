//! Communication management: the messages that connection managers exchange on queue pair 1 (chapter 12), as
//! rdma_cm uses them (annex A11).
//!
//! [`Message::parse`] and [`Message::emit`] convert between [`Message`] and the 256 bytes of a management
//! datagram. Alternate paths (LAP, APR) and path migration are not supported: their messages are rejected as
//! unknown, and the alternate path of a REQ is ignored.

mod addresses;
mod layout;
mod message;

pub use addresses::{Addresses, PortSpace, service_id};
pub use layout::{addresses as addresses_header, comm_ids, dreq, mra, rej, rep, req, sidr_rep, sidr_req};
pub use message::{Message, MessageType, Path, Rep, Req, Transport};

/// Private data length of each message, in bytes.
pub mod private {
    /// REQ; rdma_cm leaves 56 of them to programs.
    pub const REQ: usize = 92;
    /// MRA.
    pub const MRA: usize = 222;
    /// REJ.
    pub const REJ: usize = 148;
    /// REP.
    pub const REP: usize = 196;
    /// RTU.
    pub const RTU: usize = 224;
    /// DREQ.
    pub const DREQ: usize = 220;
    /// DREP.
    pub const DREP: usize = 224;
    /// SIDR_REQ; rdma_cm leaves 180 of them to programs.
    pub const SIDR_REQ: usize = 216;
    /// SIDR_REP.
    pub const SIDR_REP: usize = 136;
}

/// Rejection reasons (12.6.7.2) that are used here.
pub mod reason {
    /// No resources.
    pub const NO_RESOURCES: u16 = 3;
    /// Timeout.
    pub const TIMEOUT: u16 = 4;
    /// Unsupported request.
    pub const UNSUPPORTED: u16 = 5;
    /// Invalid communication ID.
    pub const INVALID_COMM_ID: u16 = 6;
    /// Invalid service ID: no listener.
    pub const INVALID_SERVICE_ID: u16 = 8;
    /// Invalid transport service type.
    pub const INVALID_TRANSPORT: u16 = 9;
    /// Stale connection: the queue pair belongs to a connection that the receiver considers alive.
    pub const STALE_CONNECTION: u16 = 10;
    /// Invalid path MTU.
    pub const INVALID_MTU: u16 = 26;
    /// Consumer reject: rejected by the program.
    pub const CONSUMER: u16 = 28;
}
