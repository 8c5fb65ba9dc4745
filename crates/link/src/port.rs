//! A link with its checksums.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::config::Config;
use crate::counters::Counters;
use crate::faulty::Faulty;
use crate::icrc;
use crate::pcap::Pcap;
use crate::{Counts, Inbox, JoinError, Link, Origin, Outgoing, Udp};

/// What a device sends and receives by: packets leave with their ICRC, and only those arrive whose ICRC can be
/// right. See [`icrc`](crate::icrc) for what "can be" means.
#[derive(Debug)]
pub struct Port {
    /// The socket, wrapped or not.
    link: Box<dyn Link>,
    udp: Arc<Udp>,
    counters: Counters,
}

impl Port {
    /// Joins the processes of this host on the RoCEv2 port, as the one whose queue pair numbers start with `block`,
    /// with what the environment asks for.
    ///
    /// # Errors
    /// [`JoinError`] says who is in the way, or what is wrong with the environment.
    pub fn join(block: u16) -> Result<Self, JoinError> {
        Self::join_with(block, &Config::from_environment()?)
    }

    /// The same with settings of the caller's.
    ///
    /// # Errors
    /// [`JoinError`] says who is in the way.
    pub fn join_with(block: u16, config: &Config) -> Result<Self, JoinError> {
        let udp = Arc::new(Udp::join(block)?);
        // Faults come first, so that a capture shows what the other side sees.
        let mut link: Box<dyn Link> = Box::new(udp.clone());
        if let Some(path) = &config.capture {
            link = Box::new(Pcap::new(link, path)?);
        }
        if config.faults.any() {
            link = Box::new(Faulty::new(link, &config.faults));
        }
        Ok(Self { link, udp, counters: Counters::default() })
    }

    /// Seals the packets and sends them; says how many batches were taken. The others found no room and may be sent
    /// again.
    ///
    /// # Errors
    /// What makes the port unusable; InvalidInput for addresses of two families.
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

    /// Sends packets that bear their ICRC already: for [`source_port`](Self::source_port), and for the identifications
    /// that [`counts_identifications`](Self::counts_identifications) says. Otherwise as [`send`](Self::send).
    ///
    /// # Errors
    /// What makes the port unusable.
    pub fn send_sealed(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        self.link.send(batches)
    }

    /// UDP port that packets leave from.
    #[must_use]
    pub fn source_port(&self) -> u16 {
        self.link.source_port()
    }

    /// Whether the IPv4 identifications of a batch's packets count from zero, rather than all being zero.
    #[must_use]
    pub fn counts_identifications(&self) -> bool {
        self.link.identification(1) == 1
    }

    /// Receives what is there; says how many datagrams. Packets with a wrong ICRC are counted and not shown.
    ///
    /// # Errors
    /// What makes the port unusable.
    pub fn receive(&self, inbox: &mut Inbox) -> io::Result<usize> {
        let received = self.link.receive(inbox)?;
        let mut last = inbox.last;
        inbox.retain(|origin, place, packet| {
            if packet.len() < icrc::MIN_PACKET {
                self.counters.too_short.add(1);
                return false;
            }
            // Senders like this one count from zero in what was sent, and so received, as one.
            last = match last {
                Some((known, flow)) if known == *origin => Some((known, flow)),
                _ => icrc::flow(origin.source, origin.source_port, origin.destination)
                    .map(|flow| (*origin, flow)),
            };
            let right =
                last.is_some_and(|(_, flow)| icrc::identification(&flow, place as u16, packet).is_some());
            if !right {
                self.counters.bad_icrc.add(1);
            }
            right
        });
        inbox.last = last;
        Ok(received)
    }

    /// The sockets: for multicast groups, and for packets that another process is to have.
    #[must_use]
    pub fn udp(&self) -> &Udp {
        &self.udp
    }

    /// One of them is readable when something has been received, see [`Udp::descriptors`].
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        self.udp.descriptors()
    }

    /// Gives a packet to another process of this host, as if it had received it.
    ///
    /// # Errors
    /// ECONNREFUSED if there is none, EAGAIN if it has no room.
    pub fn pass_on(&self, block: u16, origin: &Origin, packet: &[u8]) -> io::Result<()> {
        self.udp.pass_on(block, origin, packet)
    }

    /// What happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.link.counts().plus(&self.counters.snapshot())
    }
}
