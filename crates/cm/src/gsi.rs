//! This process's share of queue pair 1 (GSI), through which its connection manager exchanges datagrams with
//! other hosts.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use millstream_device::{gid, gsi};
use millstream_link::{Outgoing, Port, RxBuffers, destination_qpn};
use millstream_shm::random_u64;
use millstream_shm::socket::BoundSocket;
use millstream_wire::{Packet, cm};

use crate::remote::{CmEvent, RemoteConnections};

/// Datagrams received per system call.
const DATAGRAMS: usize = 4;

/// The queue pair 1 endpoint of this process.
#[derive(Debug)]
pub(crate) struct GsiPort {
    pub(crate) remote: RemoteConnections,
    /// The QPN prefix under which this process has joined the port.
    pub(crate) qpn_prefix: u16,
    port: Port,
    inbox: RxBuffers,
    psn: u32,
    /// Reserves the prefix, so that no queue pair gets it.
    _claim: BoundSocket,
}

impl GsiPort {
    pub(crate) fn open() -> io::Result<Self> {
        let (qpn_prefix, claim) = gsi::claim()?;
        let port = Port::join(qpn_prefix).map_err(|error| {
            tracing::warn!("no connections to or from other hosts: {error}");
            io::Error::from_raw_os_error(libc::EHOSTUNREACH)
        })?;
        Ok(Self {
            remote: RemoteConnections::new(qpn_prefix, gid::node_guid(), random_u64() as u32),
            qpn_prefix,
            port,
            inbox: RxBuffers::new(DATAGRAMS),
            psn: random_u64() as u32,
            _claim: claim,
        })
    }

    /// The receiving descriptors: at least one is readable when a packet has arrived.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        self.port.descriptors()
    }

    /// Sends the queued datagrams. Datagrams that do not fit are lost and retransmitted.
    pub(crate) fn flush(&mut self) {
        for sent in self.remote.take_outgoing() {
            self.psn = self.psn.wrapping_add(1);
            let mut bytes = gsi::packet(self.psn, &sent.bytes);
            let outgoing = Outgoing {
                source: sent.from,
                destination: sent.to,
                interface: 0,
                tos: 0,
                segment: bytes.len(),
                bytes: &mut bytes,
            };
            let _ = self.port.send(&mut [outgoing]);
        }
    }

    /// Receives datagrams: returns those for this process, forwards those of other processes.
    pub(crate) fn receive(&mut self) -> Vec<CmEvent> {
        let mut events = Vec::new();
        let now = Instant::now();
        while self.port.receive(&mut self.inbox).is_ok_and(|n| n != 0) {
            for received in self.inbox.received() {
                for (_, bytes) in received.packets() {
                    if destination_qpn(bytes) != Some(gsi::QPN) {
                        continue;
                    }
                    let Ok(packet) = Packet::new_checked(bytes) else { continue };
                    let Some(datagram) = gsi::payload(&packet) else { continue };
                    let Ok((_, message)) = cm::Message::parse(datagram) else { continue };
                    let info = received.info;
                    match gsi::receiver(&message) {
                        Some(qpn_prefix)
                            if qpn_prefix != self.qpn_prefix
                                && gsi::pass_on(&self.port, qpn_prefix, &info, bytes) => {}
                        // Datagrams without a receiver are handled by the process that received them: it
                        // rejects requests, and replies to DREQs of connections whose process has ended.
                        _ => {
                            let (own, peer) = (info.destination, info.source);
                            events.extend(self.remote.receive(own, peer, datagram, now));
                        }
                    }
                }
            }
        }
        events
    }
}
