//! This process's share of queue pair 1 (GSI), through which its connection manager exchanges datagrams with
//! other hosts.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use millstream_device::{gid, gsi};
use millstream_link::{Outgoing, PacketInfo, Port, RxBuffers, Service, destination_qpn};
use millstream_shm::random_u64;
use millstream_shm::socket::BoundSocket;
use millstream_wire::{Packet, Psn};

use crate::remote::{CmEvent, RemoteConnections};

/// Datagrams received per system call.
const DATAGRAMS: usize = 4;

/// Most receiving system calls in a row. The descriptors stay readable while datagrams wait.
const MAX_RECEIVES: usize = 16;

/// The queue pair 1 endpoint of this process.
#[derive(Debug)]
pub(crate) struct GsiPort {
    pub(crate) remote: RemoteConnections,
    port: Port,
    inbox: RxBuffers,
    psn: Psn,
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
            port,
            inbox: RxBuffers::new(DATAGRAMS),
            psn: Psn::new(random_u64() as u32),
            _claim: claim,
        })
    }

    /// The descriptors of a thread that sleeps until it must receive.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.port.descriptors().into_iter().flatten()
    }

    /// Sends the queued datagrams. Datagrams that do not fit are lost and retransmitted.
    pub(crate) fn flush(&mut self) {
        for sent in self.remote.take_outgoing() {
            self.psn = self.psn.plus(1);
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

    /// Tells the other processes on the port whether this one provides a service.
    pub(crate) fn set_service(&self, service: Service, provided: bool) {
        self.port.udp().set_service(service, provided);
    }

    /// Receives datagrams, of a bounded number of system calls: other threads may wait for the caller's lock.
    pub(crate) fn receive(&mut self) -> Vec<CmEvent> {
        let mut events = Vec::new();
        let now = Instant::now();
        for _ in 0..MAX_RECEIVES {
            if !self.port.receive(&mut self.inbox).is_ok_and(|n| n != 0) {
                break;
            }
            for received in self.inbox.received() {
                for (_, bytes) in received.packets() {
                    if destination_qpn(bytes) != Some(gsi::QPN) {
                        continue;
                    }
                    let Ok(packet) = Packet::new_checked(bytes) else { continue };
                    let Some(datagram) = gsi::payload(&packet) else { continue };
                    let PacketInfo { source, destination, .. } = received.info;
                    // The link forwards datagrams of other connection managers. What it leaves here is for this one,
                    // or for a process that has exited: requests are rejected, DREQs are answered.
                    events.extend(self.remote.receive(destination, source, datagram, now));
                }
            }
        }
        events
    }
}
