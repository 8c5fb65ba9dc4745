//! Fragments from UDP datagrams.

use super::assembly::Assembly;
use super::datagram::{Datagram, HEADER_LEN};
use super::generator::packet;
use super::{Source, SourceStatistics};
use crate::config::UdpConfig;
use crate::core::plan::Batch;
use crate::layout::PacketArea;
use crate::process::ProcessError;
use crate::process::error::IoContext;
use millstream_fragment::packetize::{FileExtent, PacketLayout};
use millstream_fragment::{Fragment, SourceId};
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// Datagrams taken in one poll: others wait in the socket, so that sending goes on.
const BURST: usize = 256;
/// Wanted size of the socket's buffer; the kernel limits it to `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 8 << 20;

/// Receives the fragments of a readout unit.
pub struct UdpReceiver {
    socket: UdpSocket,
    assembly: Assembly,
    sources: Vec<SourceId>,
    kind: u32,
    first_event: u64,
    buffer: Vec<u8>,
}

impl UdpReceiver {
    /// Receives `events` events. `kept` of them may be in batches that are not released.
    pub(super) fn bind(
        config: &UdpConfig,
        areas: &[PacketArea],
        first_event: u64,
        events: u64,
        kept: u64,
    ) -> Result<UdpReceiver, ProcessError> {
        let socket = UdpSocket::bind(&config.listen).context("bind the socket of the UDP source")?;
        socket.set_nonblocking(true).context("configure the socket of the UDP source")?;
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER);
        let ids: Vec<u32> = areas.iter().map(|area| area.source).collect();
        let run = first_event..first_event.saturating_add(events);
        Ok(UdpReceiver {
            socket,
            assembly: Assembly::new(
                &ids,
                run,
                config.buffer_events.max(kept),
                config.max_len,
                config.give_up,
            ),
            sources: ids.into_iter().map(SourceId).collect(),
            kind: config.kind,
            first_event,
            // One byte more than valid, so that longer datagrams, which are cut, count as invalid.
            buffer: vec![0; HEADER_LEN + config.max_len as usize + 1],
        })
    }
}

impl Source for UdpReceiver {
    fn start_at(&mut self, events: u64) {
        self.assembly.start_at(events);
    }

    fn poll_available(&mut self, now: Instant) -> u64 {
        for _ in 0..BURST {
            // An error is that of an earlier datagram, or none has arrived.
            let Ok(len) = self.socket.recv(&mut self.buffer) else { break };
            let bytes = &self.buffer[..len];
            let cut = || if len == self.buffer.len() { Datagram::parse_cut(bytes) } else { None };
            if let Some(datagram) = Datagram::parse(bytes).or_else(cut) {
                self.assembly.handle(&datagram, now);
            }
        }
        self.assembly.available(now)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.assembly.timeout()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn packet(
        &mut self,
        position: usize,
        batch: &Batch,
        buffer: &mut [u8],
        extents: &mut Vec<FileExtent>,
    ) -> Result<PacketLayout, ProcessError> {
        extents.clear();
        debug_assert!(batch.first_event.0 >= self.first_event);
        let end = batch.first_event.0 + u64::from(batch.events);
        let fragments: Vec<Fragment<'_>> =
            self.assembly.fragments(position, batch.first_event.0..end).collect();
        packet(self.sources[position], self.kind, batch, &fragments, buffer)
    }

    fn release(&mut self, batch: &Batch) {
        let first = batch.first_event.0;
        self.assembly.release(first..first + u64::from(batch.events));
    }

    fn statistics(&self) -> Vec<SourceStatistics> {
        self.assembly.statistics()
    }
}
