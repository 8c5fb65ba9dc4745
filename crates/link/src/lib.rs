//! Sends and receives RoCEv2 packets over UDP (InfiniBand Architecture Specification, annex A17).
//!
//! A [`Link`] carries batches of packets without interpreting them. Read in this order:
//!
//! - [`datagram`](Outgoing): outgoing and received packets;
//! - [`Udp`]: the sockets, and one port shared by all processes of a host without a daemon
//!   (docs/wire-link.md);
//! - [`icrc`]: computing and checking the invariant CRC;
//! - [`Port`]: a link with its ICRCs, as a device uses it;
//! - [`dcqcn`]: congestion control;
//! - [`config`]: fault injection and capture, set by environment variables.

pub mod config;
mod counters;
mod datagram;
pub mod dcqcn;
mod faulty;
mod group;
pub mod icrc;
#[cfg(test)]
mod memory;
mod pcap;
mod port;
mod rate_limit;
mod release_timer;
mod sockopt;
mod udp;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use config::Config;
pub use counters::Counts;
pub use datagram::{Outgoing, PacketInfo, Received, RxBuffers, destination_qpn};
pub use group::{COMMUNICATION_ID_INDEX_BITS, JoinError, Service};
pub use port::Port;
pub use udp::{MAX_BATCH, MAX_SEGMENTS, MULTICAST_QPN, Udp};

/// Low bits of a queue pair number: the index in the table of its process. The high bits are the QPN prefix
/// of the process.
pub const QPN_INDEX_BITS: u32 = 12;

/// A transport of packets. Methods may be called from any thread, and do not block.
pub trait Link: Send + Sync + std::fmt::Debug {
    /// Sends batches in order; returns how many were taken. Fewer than all are taken only when there is no
    /// room. A batch that the network cannot carry counts as taken and as refused.
    ///
    /// # Errors
    /// If the link is unusable.
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize>;

    /// Empties the inbox and receives into it; returns the number of datagrams.
    ///
    /// # Errors
    /// If the link is unusable.
    fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize>;

    /// UDP source port of sent packets.
    fn source_port(&self) -> u16;

    /// IPv4 identification of packet `index` of a batch.
    fn identification(&self, index: usize) -> u16;

    /// Counters of this layer and those below.
    fn counts(&self) -> Counts;

    /// A descriptor that is readable when a call of `receive` is due because of packets that the link holds back.
    fn release_timer(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

macro_rules! forward {
    ($($pointer:ident)*) => {$(
        impl<L: Link + ?Sized> Link for $pointer<L> {
            fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
                (**self).send(batches)
            }

            fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize> {
                (**self).receive(inbox)
            }

            fn source_port(&self) -> u16 {
                (**self).source_port()
            }

            fn identification(&self, index: usize) -> u16 {
                (**self).identification(index)
            }

            fn counts(&self) -> Counts {
                (**self).counts()
            }

            fn release_timer(&self) -> Option<BorrowedFd<'_>> {
                (**self).release_timer()
            }
        }
    )*};
}
forward! { Arc Box }
