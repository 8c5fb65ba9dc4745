//! A link with its ICRCs.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::config::Config;
use crate::counters::Counters;
use crate::faulty::FaultInjector;
use crate::icrc;
use crate::pcap::Pcap;
use crate::{Counts, JoinError, Link, Outgoing, PacketInfo, RxBuffers, Udp};

/// The RoCEv2 port of a device. Packets leave with their ICRC, and packets with an ICRC that cannot be
/// correct are dropped on receive (see [`icrc`](crate::icrc)).
#[derive(Debug)]
pub struct Port {
    /// The UDP socket, possibly wrapped.
    link: Box<dyn Link>,
    udp: Arc<Udp>,
    counters: Counters,
}

impl Port {
    /// Joins the processes of this host on the RoCEv2 port, with the settings of the environment.
    /// `qpn_prefix` is the high part of this process's queue pair numbers.
    ///
    /// # Errors
    /// [`JoinError`] with the conflict or the invalid setting.
    pub fn join(qpn_prefix: u16) -> Result<Self, JoinError> {
        Self::join_with(qpn_prefix, &Config::from_environment()?)
    }

    /// Joins with the given settings.
    ///
    /// # Errors
    /// [`JoinError`] with the conflict.
    pub fn join_with(qpn_prefix: u16, config: &Config) -> Result<Self, JoinError> {
        let udp = Arc::new(Udp::join(qpn_prefix)?);
        // Faults precede the capture, so that a capture has the packets that the peer sees.
        let mut link: Box<dyn Link> = Box::new(udp.clone());
        if let Some(path) = &config.capture {
            link = Box::new(Pcap::new(link, path)?);
        }
        if config.faults.any() {
            link = Box::new(FaultInjector::new(link, &config.faults)?);
        }
        Ok(Self { link, udp, counters: Counters::default() })
    }

    /// Seals and sends packets; returns how many batches were taken. Batches without room may be sent again.
    ///
    /// # Errors
    /// If the port is unusable; InvalidInput for addresses of different families.
    ///
    /// # Panics
    /// If a packet is shorter than a base transport header with its ICRC.
    pub fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let source_port = self.link.source_port();
        for batch in &mut *batches {
            let Some(flow) = icrc::flow(batch.source, source_port, batch.destination) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            let several = batch.count() > 1;
            for (i, packet) in batch.bytes.chunks_mut(batch.segment.max(1)).enumerate() {
                icrc::seal(&flow, if several { self.link.identification(i) } else { 0 }, packet);
            }
        }
        self.link.send(batches)
    }

    /// Sends packets that were sealed for [`source_port`](Self::source_port) and the identifications of
    /// [`counts_identifications`](Self::counts_identifications); otherwise like [`send`](Self::send).
    ///
    /// # Errors
    /// If the port is unusable.
    pub fn send_sealed(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        self.link.send(batches)
    }

    /// UDP source port of sent packets.
    #[must_use]
    pub fn source_port(&self) -> u16 {
        self.link.source_port()
    }

    /// Whether the IPv4 identifications in a batch count from zero; otherwise they are zero.
    #[must_use]
    pub fn counts_identifications(&self) -> bool {
        self.link.identification(1) == 1
    }

    /// Receives datagrams; returns how many. Packets with a wrong ICRC are counted and dropped.
    ///
    /// # Errors
    /// If the port is unusable.
    pub fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize> {
        let received = self.link.receive(inbox)?;
        let mut last = inbox.last;
        inbox.retain(|info, index, packet| {
            if packet.len() < icrc::MIN_PACKET {
                self.counters.truncated.add(1);
                return false;
            }
            // Senders like this one count from zero in each batch, and a batch arrives as a coalesced
            // datagram.
            last = match last {
                Some((known, flow)) if known == *info => Some((known, flow)),
                _ => icrc::flow(info.source, info.source_port, info.destination).map(|flow| (*info, flow)),
            };
            let right =
                last.is_some_and(|(_, flow)| icrc::identification(&flow, index as u16, packet).is_some());
            if !right {
                self.counters.bad_icrc.add(1);
            }
            right
        });
        inbox.last = last;
        Ok(received)
    }

    /// The sockets: for multicast groups, services, and forwarding packets to other processes.
    #[must_use]
    pub fn udp(&self) -> &Udp {
        &self.udp
    }

    /// The descriptors of a thread that sleeps until it must receive: those of [`Udp::descriptors`], and the timer of
    /// packets that the fault injection holds back.
    #[must_use]
    pub fn descriptors(&self) -> [Option<BorrowedFd<'_>>; 3] {
        let [socket, forwarded] = self.udp.descriptors();
        [Some(socket), Some(forwarded), self.link.release_timer()]
    }

    /// Forwards a packet to another process of this host, which receives it as if from the network.
    ///
    /// # Errors
    /// ECONNREFUSED if there is no such process, EAGAIN if its queue is full.
    pub fn forward(&self, qpn_prefix: u16, info: &PacketInfo, packet: &[u8]) -> io::Result<()> {
        self.udp.forward(qpn_prefix, info, packet)
    }

    /// Packet counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.link.counts().plus(&self.counters.snapshot())
    }
}
