//! UDP sockets: options, and many packets in one system call.
//!
//! Linux splits a large buffer into packets behind the socket (generic segmentation offload, `UDP_SEGMENT`) and
//! coalesces them before it (`UDP_GRO`). One socket of family IPv6 carries both families. Packets
//! leave with "don't fragment" set and, the socket being unconnected, with identification zero; when the kernel splits a
//! buffer it counts up from there.

mod message;
mod options;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use millstream_shm::EventFd;

use crate::counters::Counters;
use crate::datagram::{Inbox, Origin, Outgoing, destination_qpn};
use crate::fork::Ours;
use crate::group::{self, JoinError, Member, Neighbours};
use crate::{Counts, Link, QPN_INDEX_BITS, icrc};
use millstream_wire::UDP_PORT;

pub(crate) use message::receive;
pub(crate) use options::{bind_shared, holders};

/// Packets that the kernel splits one buffer into, at most: `UDP_MAX_SEGMENTS` of the oldest kernels.
pub const MAX_SEGMENTS: usize = 64;

/// Bytes in one buffer, at most: an IP packet's, without its headers.
pub const MAX_BATCH: usize = 65_535 - 40 - 8;

/// Queue pair number of multicast datagrams (IBTA volume 1, 9.6.1.3: destination QP of multicast packets).
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// UDP between hosts. See docs/wire-link.md for how processes share the port.
#[derive(Debug)]
pub struct Udp {
    /// Sends, from a port of its own: so networks see a flow for each process.
    outward: Ours,
    source_port: u16,
    /// Where everybody receives.
    port: u16,
    inward: Arc<Ours>,
    offload: AtomicBool,
    /// What the kernel had dropped at the socket for its former owner.
    dropped_before: u64,
    shared: Arc<Shared>,
    neighbours: Neighbours,
    _member: Member,
}

/// What the member's thread and the receiving threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// High bits of this process's queue pair numbers.
    pub(crate) block: u16,
    pub(crate) counters: Counters,
    /// Packets that came by way of other processes, or by the socket that all share.
    queue: Mutex<VecDeque<(Origin, Vec<u8>)>>,
    /// Whether the queue holds any: looked at on every receive.
    queued: AtomicBool,
    arrived: EventFd,
}

/// Passed-on packets that wait to be received, at most.
const QUEUE: usize = 4096;

impl Shared {
    /// Takes a packet that another process received.
    pub(crate) fn enqueue(&self, origin: Origin, packet: &[u8]) {
        self.counters.passed_in.add(1);
        self.enqueue_own(origin, packet);
    }

    /// Takes a packet for the next receive.
    pub(crate) fn enqueue_own(&self, origin: Origin, packet: &[u8]) {
        let mut queue = self.queue.lock().expect("no panic under this lock");
        if queue.len() >= QUEUE {
            self.counters.passed_in_overflow.add(1);
            return;
        }
        queue.push_back((origin, packet.to_vec()));
        self.queued.store(true, Ordering::Release);
        drop(queue);
        self.arrived.signal();
    }

    fn dequeue(&self, inbox: &mut Inbox) {
        if !self.queued.load(Ordering::Acquire) {
            return;
        }
        let mut queue = self.queue.lock().expect("no panic under this lock");
        while inbox.vacant() != 0 {
            let Some((origin, packet)) = queue.pop_front() else {
                self.queued.store(false, Ordering::Release);
                self.arrived.clear();
                return;
            };
            inbox.push(origin, packet.len(), &packet);
        }
    }

    /// Whether a packet is for this process: for its queue pairs, for the special ones, or multicast. One for another
    /// process is passed on.
    pub(crate) fn keep(&self, neighbours: &Neighbours, origin: &Origin, packet: &[u8]) -> bool {
        let Some(qpn) = destination_qpn(packet) else {
            self.counters.too_short.add(1);
            return false;
        };
        let block = (qpn >> QPN_INDEX_BITS) as u16;
        if block == self.block || block == 0 || qpn == MULTICAST_QPN {
            return true;
        }
        // What finds nobody, or no room, is lost and counted.
        let _ = self.pass_on(neighbours, block, origin, packet);
        false
    }

    fn pass_on(&self, neighbours: &Neighbours, block: u16, origin: &Origin, packet: &[u8]) -> io::Result<()> {
        let passed = neighbours.pass_on(block, origin, packet);
        if passed.is_ok() { &self.counters.passed_on } else { &self.counters.misdirected }.add(1);
        passed
    }
}

impl Udp {
    /// Joins the processes of this host that receive on the RoCEv2 port, as the one whose queue pair numbers
    /// start with `block`.
    ///
    /// # Errors
    /// [`JoinError`] says who is in the way.
    pub fn join(block: u16) -> Result<Self, JoinError> {
        Self::join_port(block, UDP_PORT)
    }

    /// The same on another port, for tests.
    ///
    /// # Errors
    /// As for [`Udp::join`].
    pub fn join_port(block: u16, port: u16) -> Result<Self, JoinError> {
        let (outward, source_port) = options::outward()?;
        let shared = Arc::new(Shared {
            block,
            counters: Counters::default(),
            queue: Mutex::default(),
            queued: AtomicBool::new(false),
            arrived: EventFd::latch()?,
        });
        let neighbours = Neighbours::new(port)?;
        let (member, inward) = group::join(port, shared.clone(), neighbours.clone())?;
        let dropped_before = options::dropped(inward.as_fd());
        Ok(Self {
            outward: outward.into(),
            source_port,
            port,
            inward,
            offload: AtomicBool::new(true),
            dropped_before,
            shared,
            neighbours,
            _member: member,
        })
    }

    /// Gives a packet to another process of this host, as if it had received it.
    ///
    /// # Errors
    /// ECONNREFUSED if there is none, EAGAIN if it has no room.
    pub fn pass_on(&self, block: u16, origin: &Origin, packet: &[u8]) -> io::Result<()> {
        self.shared.pass_on(&self.neighbours, block, origin, packet)
    }

    /// Receives datagrams for a multicast group from now on, by one interface (zero: by the routes).
    ///
    /// # Errors
    /// What `setsockopt` reports; EADDRINUSE if it does already.
    pub fn join_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        options::membership(self.inward.as_fd(), group, interface, true)
    }

    /// Ends what [`join_multicast`](Udp::join_multicast) began.
    ///
    /// # Errors
    /// What `setsockopt` reports.
    pub fn leave_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        options::membership(self.inward.as_fd(), group, interface, false)
    }

    /// Whether what is sent to multicast groups reaches members on this host, too. It does if this is never called.
    ///
    /// # Errors
    /// What `setsockopt` reports.
    pub fn set_multicast_loop(&self, on: bool) -> io::Result<()> {
        options::set_multicast_loop(self.outward.as_fd(), on)
    }

    /// One of them is readable when something has been received: the socket, or what says that packets came by way of
    /// other processes. Not one descriptor for both: a set that watches the socket would be told of each packet, by the
    /// sender's system call on the same machine, even while nobody waits.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.inward.as_fd(), self.shared.arrived.as_fd()]
    }

    /// Bytes that the kernel keeps for this process until it reads them, as far as it granted them.
    #[must_use]
    pub fn receive_room(&self) -> usize {
        options::receive_room(self.inward.as_fd())
    }

    /// Whether the kernel splits batches into packets.
    #[must_use]
    pub fn segmentation_offload(&self) -> bool {
        self.offload.load(Ordering::Relaxed)
    }

    /// Sends every packet of a batch by itself. For those that find no room the batch counts as taken: networks
    /// lose packets.
    fn send_separately(&self, batch: &mut Outgoing<'_>) -> io::Result<()> {
        let flow = icrc::flow(batch.source, self.source_port, batch.destination);
        let Outgoing { source, destination, interface, tos, segment, .. } = *batch;
        for packet in batch.bytes.chunks_mut(segment.max(1)) {
            if let Some(flow) = flow.as_ref().filter(|_| packet.len() >= icrc::MIN_PACKET) {
                // It was sealed as part of a batch.
                icrc::seal(flow, 0, packet);
            }
            let one = Outgoing { source, destination, interface, tos, segment: packet.len(), bytes: packet };
            let _ = self.send_some(&mut [one])?;
        }
        Ok(())
    }

    /// Sends the first of these batches, or more; how many were taken, zero if there is no room.
    fn send_some(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let counters = &self.shared.counters;
        let error = match message::send(self.outward.as_fd(), self.port, batches) {
            Ok(taken) => {
                counters.send_calls.add(1);
                for batch in &batches[..taken] {
                    counters.sent.add(batch.count() as u64);
                    counters.sent_bytes.add(batch.bytes.len() as u64);
                }
                return Ok(taken);
            }
            Err(error) => error,
        };
        let first = &mut batches[0];
        match error.raw_os_error() {
            Some(libc::EINTR) => self.send_some(batches),
            Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                counters.send_full.add(first.count() as u64);
                Ok(0)
            }
            Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT) => Err(error),
            // The way there cannot split buffers (or the kernel cannot, and never will); or a packet is too long.
            Some(code) if first.count() > 1 => {
                if matches!(code, libc::EIO | libc::EOPNOTSUPP | libc::ENOPROTOOPT) {
                    self.offload.store(false, Ordering::Relaxed);
                }
                self.send_separately(first).map(|()| 1)
            }
            _ => {
                counters.send_refused.add(1);
                Ok(1)
            }
        }
    }
}

impl Link for Udp {
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let mut done = 0;
        while done < batches.len() {
            let rest = &mut batches[done..];
            let taken = if self.segmentation_offload() {
                self.send_some(rest)?
            } else if rest[0].count() > 1 {
                self.send_separately(&mut rest[0])?;
                1
            } else {
                let single = rest.iter().take_while(|batch| batch.count() <= 1).count();
                self.send_some(&mut rest[..single])?
            };
            if taken == 0 {
                break;
            }
            done += taken;
        }
        Ok(done)
    }

    fn receive(&self, inbox: &mut Inbox) -> io::Result<usize> {
        inbox.filled.clear();
        self.shared.dequeue(inbox);
        let detoured = inbox.filled.len();
        message::receive(self.inward.as_fd(), inbox)?;
        if inbox.filled.is_empty() {
            return Ok(0);
        }
        let counters = &self.shared.counters;
        counters.received_datagrams.add((inbox.filled.len() - detoured) as u64);
        let (mut packets, mut bytes, mut index) = (0, 0, 0);
        inbox.retain(|origin, place, packet| {
            index += usize::from(place == 0);
            if index <= detoured {
                // Counted by who received it.
                return true;
            }
            packets += 1;
            bytes += packet.len() as u64;
            self.shared.keep(&self.neighbours, origin, packet)
        });
        counters.received.add(packets);
        counters.received_bytes.add(bytes);
        Ok(inbox.filled.len())
    }

    fn source_port(&self) -> u16 {
        self.source_port
    }

    fn identification(&self, index: usize) -> u16 {
        if self.segmentation_offload() { index as u16 } else { 0 }
    }

    fn counts(&self) -> Counts {
        let dropped = options::dropped(self.inward.as_fd());
        self.shared.counters.receive_overflow.set(dropped.saturating_sub(self.dropped_before));
        self.shared.counters.snapshot()
    }
}
