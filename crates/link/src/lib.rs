//! Carries RoCEv2 packets between hosts (InfiniBand Architecture Specification, annex A17): UDP port 4791.
//!
//! A [`Link`] takes batches of packets and gives batches of packets; what they mean is not its business. Read
//! in this order:
//!
//! - [`datagram`](Outgoing): packets on their way out and in;
//! - [`Udp`]: the sockets, and one port for all processes of a host without a daemon (docs/wire-link.md);
//! - [`icrc`]: the checksum over a packet and the IP header that it will have;
//! - [`Port`]: a link with its checksums, as a device uses it;
//! - [`dcqcn`]: rates of senders that share a network;
//! - [`config`]: faults and captures, by the environment of any program.

pub mod config;
mod counters;
mod datagram;
pub mod dcqcn;
mod faulty;
mod fork;
mod group;
pub mod icrc;
#[cfg(test)]
mod memory;
mod pcap;
mod port;
mod udp;

use std::io;
use std::sync::Arc;

pub use config::Config;
pub use counters::Counts;
pub use datagram::{Inbox, Origin, Outgoing, Received, destination_qpn};
pub use group::JoinError;
pub use port::Port;
pub use udp::{MAX_BATCH, MAX_SEGMENTS, MULTICAST_QPN, Udp};

/// Low bits of a queue pair number, a place in its process's table. The high bits are the process's *block*.
pub const QPN_INDEX_BITS: u32 = 12;

/// Something that carries packets. All methods may be called from any thread, and none waits.
pub trait Link: Send + Sync + std::fmt::Debug {
    /// Sends batches in order; says how many were taken. One that the network cannot carry counts as taken
    /// and as refused; fewer than all are taken only when there is no room.
    ///
    /// # Errors
    /// What makes the link unusable.
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize>;

    /// Empties the inbox and receives what is there; says how many datagrams.
    ///
    /// # Errors
    /// What makes the link unusable.
    fn receive(&self, inbox: &mut Inbox) -> io::Result<usize>;

    /// UDP port that packets leave from.
    fn source_port(&self) -> u16;

    /// IPv4 identification that packet `index` of a batch leaves with.
    fn identification(&self, index: usize) -> u16;

    /// What happened so far, here and below.
    fn counts(&self) -> Counts;
}

macro_rules! forward {
    ($($pointer:ident)*) => {$(
        impl<L: Link + ?Sized> Link for $pointer<L> {
            fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
                (**self).send(batches)
            }

            fn receive(&self, inbox: &mut Inbox) -> io::Result<usize> {
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
        }
    )*};
}
forward! { Arc Box }
