//! UDP sockets with segmentation and receive offload.
//!
//! Linux splits a large buffer into packets below the socket (GSO, `UDP_SEGMENT`) and coalesces received
//! packets (`UDP_GRO`). One IPv6 socket carries both address families. Packets leave with "do not fragment"
//! set and, as the socket is unconnected, with identification zero; in a split buffer the identification
//! counts up from zero.

mod memberships;
mod message;
mod options;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use millstream_quantity::Qpn;
use millstream_shm::EventFd;
use millstream_shm::fork::CloseOnForkFd;

use crate::counters::Counters;
use crate::datagram::{Outgoing, PacketInfo, RxBuffers, destination_qpn};
use crate::group::{self, Directory, JoinError, ManagementRoute, Member, Service, is_management};
use crate::rate_limit::RateLimit;
use crate::{Counts, Link, QPN_INDEX_BITS, icrc};
use millstream_wire::UDP_PORT;

pub(crate) use memberships::leave_all_groups;
pub(crate) use message::receive;
pub(crate) use options::{bind_shared, port_owners};

/// Most packets per buffer: `UDP_MAX_SEGMENTS` of the oldest kernels.
pub const MAX_SEGMENTS: usize = 64;

/// Most bytes per buffer: an IP packet without its headers.
pub const MAX_BATCH: usize = 65_535 - 40 - 8;

/// Destination queue pair number of multicast datagrams (IBTA volume 1, 9.6.1.3).
pub const MULTICAST_QPN: Qpn = Qpn::new(0xff_ffff);

/// The UDP link. docs/wire-link.md describes how processes share the port.
#[derive(Debug)]
pub struct Udp {
    /// Sending socket with its own port, so that networks see one flow per process.
    tx: CloseOnForkFd,
    source_port: u16,
    /// The port that all processes receive on.
    port: u16,
    rx: Arc<CloseOnForkFd>,
    offload: AtomicBool,
    /// Datagrams that the kernel had dropped for the former owner of the socket.
    dropped_before: u64,
    shared: Arc<Shared>,
    _member: Member,
}

/// State shared by the member's thread and the receiving threads.
#[derive(Debug)]
pub(crate) struct Shared {
    /// High bits of this process's queue pair numbers.
    pub(crate) qpn_prefix: u16,
    pub(crate) counters: Counters,
    /// The other processes on the port.
    pub(crate) directory: Arc<Directory>,
    management: Mutex<RateLimit>,
    /// Forwarded packets and packets from the shared socket.
    queue: Mutex<VecDeque<(PacketInfo, Vec<u8>)>>,
    /// Whether the queue holds packets; read on every receive.
    queued: AtomicBool,
    arrived: EventFd,
}

/// Most packets for queue pair 1 that a process handles per second, and at once. Senders repeat what is dropped.
const MANAGEMENT_RATE: u32 = 20_000;
const MANAGEMENT_BURST: u32 = 2_000;

/// Capacity of the queue in packets.
const QUEUE: usize = 4096;

impl Shared {
    /// Queues a packet that another process forwarded.
    pub(crate) fn enqueue(&self, info: PacketInfo, packet: &[u8]) {
        self.counters.forwarded_in.add(1);
        self.enqueue_own(info, packet);
    }

    /// Queues a packet for the next receive.
    pub(crate) fn enqueue_own(&self, info: PacketInfo, packet: &[u8]) {
        let mut queue = self.queue.lock().expect("no panic under this lock");
        if queue.len() >= QUEUE {
            self.counters.forwarded_in_overflow.add(1);
            return;
        }
        queue.push_back((info, packet.to_vec()));
        self.queued.store(true, Ordering::Release);
        // Under the lock: `dequeue` clears the signals of all packets that it has taken.
        self.arrived.signal();
    }

    fn dequeue(&self, inbox: &mut RxBuffers) {
        if !self.queued.load(Ordering::Acquire) {
            return;
        }
        let mut queue = self.queue.lock().expect("no panic under this lock");
        while inbox.empty_slots() != 0 {
            let Some((info, packet)) = queue.pop_front() else {
                self.queued.store(false, Ordering::Release);
                self.arrived.clear();
                return;
            };
            inbox.push(info, packet.len(), &packet);
        }
    }

    /// Whether a packet is for this process: for its queue pairs, queue pairs 0 and 1, or multicast. Packets
    /// for another process are forwarded.
    pub(crate) fn deliver_or_forward(&self, info: &PacketInfo, packet: &[u8]) -> bool {
        let Some(qpn) = destination_qpn(packet) else {
            self.counters.truncated.add(1);
            return false;
        };
        if is_management(packet) {
            if !self.management.lock().expect("no panic under this lock").admit(Instant::now()) {
                self.counters.management_dropped.add(1);
                return false;
            }
            let route = self.directory.forward_management(info, packet);
            match route {
                ManagementRoute::Own => {}
                ManagementRoute::Forwarded => self.counters.forwarded_out.add(1),
                ManagementRoute::Unknown => self.counters.unknown_destination.add(1),
            }
            return route == ManagementRoute::Own;
        }
        let qpn_prefix = (qpn.get() >> QPN_INDEX_BITS) as u16;
        if qpn_prefix == self.qpn_prefix || qpn_prefix == 0 || qpn == MULTICAST_QPN {
            return true;
        }
        // A packet without a receiver, or without room, is lost and counted.
        let _ = self.forward(qpn_prefix, info, packet);
        false
    }

    fn forward(&self, qpn_prefix: u16, info: &PacketInfo, packet: &[u8]) -> io::Result<()> {
        let passed = self.directory.forward(qpn_prefix, info, packet);
        if passed.is_ok() { &self.counters.forwarded_out } else { &self.counters.unknown_destination }.add(1);
        passed
    }
}

impl Udp {
    /// Joins the processes of this host that receive on the RoCEv2 port. `qpn_prefix` is the high part of
    /// this process's queue pair numbers.
    ///
    /// # Errors
    /// [`JoinError`] with the conflict.
    pub fn join(qpn_prefix: u16) -> Result<Self, JoinError> {
        Self::join_port(qpn_prefix, UDP_PORT)
    }

    /// Joins on another port, for tests.
    ///
    /// # Errors
    /// As for [`Udp::join`].
    pub fn join_port(qpn_prefix: u16, port: u16) -> Result<Self, JoinError> {
        let (tx, source_port) = options::tx()?;
        let arrived = EventFd::latch()?;
        let shared = |directory| {
            Arc::new(Shared {
                qpn_prefix,
                counters: Counters::default(),
                directory,
                management: Mutex::new(RateLimit::new(MANAGEMENT_RATE, MANAGEMENT_BURST)),
                queue: Mutex::default(),
                queued: AtomicBool::new(false),
                arrived,
            })
        };
        let group::Joined { member, socket: rx, shared } = group::join(port, qpn_prefix, shared)?;
        let dropped_before = options::dropped(rx.as_fd());
        Ok(Self {
            tx,
            source_port,
            port,
            rx,
            offload: AtomicBool::new(true),
            dropped_before,
            shared,
            _member: member,
        })
    }

    /// Tells the processes on the port whether this one's connection manager provides a service: they forward
    /// requests for it.
    pub fn set_service(&self, service: Service, provided: bool) {
        self.shared.directory.set_service(service, provided);
    }

    /// Forwards a packet to another process of this host, which receives it as if from the network.
    ///
    /// # Errors
    /// ECONNREFUSED if there is no such process, EAGAIN if its queue is full.
    pub fn forward(&self, qpn_prefix: u16, info: &PacketInfo, packet: &[u8]) -> io::Result<()> {
        self.shared.forward(qpn_prefix, info, packet)
    }

    /// Joins a multicast group on one interface; zero for the interface of the routing table.
    ///
    /// # Errors
    /// The error of `setsockopt`; EADDRINUSE if it is joined already.
    pub fn join_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        options::membership(self.rx.as_fd(), group, interface, true)
    }

    /// Leaves a multicast group.
    ///
    /// # Errors
    /// The error of `setsockopt`.
    pub fn leave_multicast(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        options::membership(self.rx.as_fd(), group, interface, false)
    }

    /// Sets whether sent multicast packets reach members on this host; the default is yes.
    ///
    /// # Errors
    /// The error of `setsockopt`.
    pub fn set_multicast_loop(&self, on: bool) -> io::Result<()> {
        options::set_multicast_loop(self.tx.as_fd(), on)
    }

    /// The receiving descriptors: the socket, and an eventfd for forwarded packets. At least one is readable
    /// when packets have arrived. A sender's system call on this host would notify a common epoll descriptor
    /// of every packet, even without a waiter.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.rx.as_fd(), self.shared.arrived.as_fd()]
    }

    /// Receive buffer size that the kernel granted, in bytes.
    #[must_use]
    pub fn receive_buffer_size(&self) -> usize {
        options::receive_buffer_size(self.rx.as_fd())
    }

    /// Whether the kernel splits batches into packets (GSO).
    #[must_use]
    pub fn segmentation_offload(&self) -> bool {
        self.offload.load(Ordering::Relaxed)
    }

    /// Sends each packet of a batch on its own. Packets without room are lost, but the batch counts as taken.
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

    /// Sends the first batches; returns how many were taken, zero if there is no room.
    fn send_some(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let counters = &self.shared.counters;
        let error = match message::send(self.tx.as_fd(), self.port, batches) {
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
                counters.send_buffer_full.add(first.count() as u64);
                Ok(0)
            }
            Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT) => Err(error),
            // The route cannot split buffers, or the kernel has no GSO, or a packet is too long.
            Some(code) if first.count() > 1 => {
                if matches!(code, libc::EIO | libc::EOPNOTSUPP | libc::ENOPROTOOPT) {
                    self.offload.store(false, Ordering::Relaxed);
                }
                self.send_separately(first).map(|()| 1)
            }
            _ => {
                counters.send_rejected.add(1);
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

    fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize> {
        inbox.filled.clear();
        self.shared.dequeue(inbox);
        let forwarded = inbox.filled.len();
        message::receive(self.rx.as_fd(), inbox)?;
        if inbox.filled.is_empty() {
            return Ok(0);
        }
        let counters = &self.shared.counters;
        counters.received_datagrams.add((inbox.filled.len() - forwarded) as u64);
        let (mut packets, mut bytes, mut datagrams) = (0, 0, 0);
        inbox.retain(|info, index, packet| {
            datagrams += usize::from(index == 0);
            if datagrams <= forwarded {
                // The process that received it has counted it.
                return true;
            }
            packets += 1;
            bytes += packet.len() as u64;
            self.shared.deliver_or_forward(info, packet)
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
        let dropped = options::dropped(self.rx.as_fd());
        self.shared.counters.receive_overflow.set(dropped.saturating_sub(self.dropped_before));
        self.shared.counters.snapshot()
    }
}
