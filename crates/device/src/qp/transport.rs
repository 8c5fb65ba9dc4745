//! The transport of a queue pair: shared memory or packets. It is chosen once, at the transition to RTR.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_quantity::Qpn;

use super::datagram::DatagramTransport;
use super::local_transport::LocalTransport;
use super::state::QpAttr;
use super::wire_transport::{Route, WireTransport};
use super::{Qp, QpType};
use crate::errno::{Errno, Result};
use crate::gid::{self, GidKind};
use crate::gid_table::GidTable;
use crate::path::{self, PathKind, PathPreference};
use crate::peer::Peer;

/// The transport of a queue pair.
#[derive(Debug, Default)]
#[allow(
    clippy::large_enum_variant,
    reason = "the fast path reads the local transport without an indirection"
)]
pub(super) enum Transport {
    /// Before RTR.
    #[default]
    Unconnected,
    /// The peer is on this host: requests are executed in its memory.
    Local(LocalTransport),
    /// The peer is reached by RoCE v2 packets.
    Wire(Box<WireTransport>),
    /// Datagrams; the address of each one determines its path.
    Datagram(DatagramTransport),
}

/// A transport that was checked and is not yet set up. Setting it up cannot fail.
#[derive(Debug)]
pub(super) enum TransportPlan {
    /// Through shared memory. An unreachable peer is on another host and packets are forbidden.
    Local { reachable: bool },
    /// By RoCE v2 packets.
    Wire(Route),
    /// Datagrams, by packets as well if `wire` is set.
    Datagram { wire: bool },
}

impl TransportPlan {
    /// The transport of a queue pair with these attributes.
    ///
    /// # Errors
    /// EINVAL for a source GID or a path MTU that the interface does not have; what opening the UDP port
    /// reported.
    pub(super) fn new(qp: &Qp, attributes: &QpAttr) -> Result<Self> {
        let preference = path::preference()?;
        if qp.kind == QpType::Ud {
            return match preference {
                PathPreference::Shm => Ok(Self::Datagram { wire: false }),
                // Without a port, datagrams reach this host only.
                PathPreference::Auto => Ok(Self::Datagram { wire: qp.adapter.port.open().is_ok() }),
                PathPreference::Wire => qp.adapter.port.open().map(|_| Self::Datagram { wire: true }),
            };
        }
        match preference.path_to(&attributes.path.dgid) {
            // The other side uses packets, too.
            PathKind::Shm
                if preference == PathPreference::Auto && uses_packets_only(qp, attributes.dest_qpn) => {}
            PathKind::Shm => return Ok(Self::Local { reachable: true }),
            PathKind::Unreachable => return Ok(Self::Local { reachable: false }),
            PathKind::Wire => {}
        }
        let table = GidTable::current();
        let source = table.get(attributes.path.sgid_index.into());
        let source = source.filter(|source| source.kind == GidKind::RoceV2).ok_or(Errno::INVAL)?;
        let mtu = gid::interface_mtu(source.ifindex).and_then(gid::path_mtu).unwrap_or(gid::MTU_4096);
        let path = &attributes.path;
        let route = Route::new(&source.raw, &path.dgid, source.ifindex, path.traffic_class);
        let route = route.filter(|_| attributes.path_mtu <= mtu).ok_or(Errno::INVAL)?;
        qp.adapter.port.open()?;
        Ok(Self::Wire(route))
    }

    /// The route, if the transport uses packets: for a connection that keeps its transport and changes its path.
    ///
    /// # Errors
    /// EINVAL if the connection has another transport: `by_packets` is whether it uses packets.
    pub(super) fn path_of_same(self, by_packets: bool) -> Result<Option<Route>> {
        match (self, by_packets) {
            (Self::Wire(route), true) => Ok(Some(route)),
            (Self::Local { reachable: true }, false) => Ok(None),
            _ => Err(Errno::INVAL),
        }
    }
}

/// Longest wait for a process of this host before the choice of the transport, which is for good.
const CHOICE_TIME: Duration = Duration::from_secs(1);

/// Whether the owner of a queue pair on this host is reached by packets only: its process says so, or runs in another PID
/// namespace, such as that of a container.
fn uses_packets_only(qp: &Qp, number: Qpn) -> bool {
    let deadline = Instant::now() + CHOICE_TIME;
    loop {
        match qp.adapter.peer_of(number) {
            Ok(peer) => return peer.wire,
            // Each further call waits for a moment.
            Err(error) if error.kind() == ErrorKind::TimedOut && Instant::now() < deadline => {}
            Err(error) => return error.kind() == ErrorKind::Unsupported,
        }
    }
}

impl Transport {
    /// Sets up the transport of a queue pair in its transition to RTR.
    pub(super) fn connect(qp: &Qp, attributes: &QpAttr, plan: TransportPlan) -> Self {
        let (transport, dest_qpn) = match plan {
            TransportPlan::Datagram { wire } => return Self::Datagram(DatagramTransport::new(qp, wire)),
            TransportPlan::Local { reachable } => {
                let local = LocalTransport::connect(qp, attributes.dest_qpn, reachable);
                (Self::Local(local), attributes.dest_qpn)
            }
            TransportPlan::Wire(route) => {
                let transport = match WireTransport::new(qp, attributes, route) {
                    Some(wire) => Self::Wire(Box::new(wire)),
                    None => Self::Local(LocalTransport::connect(qp, attributes.dest_qpn, false)),
                };
                // No process that maps the arena is the peer.
                (transport, Qpn::default())
            }
        };
        qp.entry.dest_qpn.store(dest_qpn.get(), Ordering::Release);
        transport
    }

    /// Takes the attributes of the transition to RTS.
    pub(super) fn start(&mut self, qp: &Qp, attributes: &QpAttr) {
        match self {
            Self::Unconnected | Self::Local(_) => {}
            Self::Wire(wire) => wire.start(qp, attributes),
            Self::Datagram(datagram) => datagram.start(qp, attributes.sq_psn),
        }
    }

    /// Whether it uses packets.
    pub(super) fn is_wire(&self) -> bool {
        matches!(self, Self::Wire(_))
    }

    /// The process of the connected peer, if it is on this host and was found.
    pub(super) fn peer(&self) -> Option<&Arc<Peer>> {
        match self {
            Self::Local(local) => local.peer.as_ref(),
            Self::Unconnected | Self::Wire(_) | Self::Datagram(_) => None,
        }
    }

    /// Takes out what refers to processes that have exited, besides the connected peer: a queue pair may send to any number
    /// of processes, one after another. The caller drops it without the lock of the send queue, because that unmaps memory.
    pub(super) fn take_dead(&mut self) -> Option<Box<dyn Send>> {
        match self {
            Self::Local(local) => Some(Box::new(local.shared_queues.take_dead())),
            Self::Datagram(datagrams) => Some(Box::new(datagrams.take_dead())),
            Self::Unconnected | Self::Wire(_) => None,
        }
    }

    /// The process that accesses our memory for the connected peer, if it is known, and the peer's queue pair.
    pub(super) fn initiator(&self) -> (Option<Arc<Peer>>, Qpn) {
        match self {
            Self::Local(local) => (local.peer.clone(), local.dest_qpn),
            // This process executes the packets' requests.
            Self::Wire(wire) => (Some(wire.own_process().clone()), Qpn::default()),
            Self::Unconnected | Self::Datagram(_) => (None, Qpn::default()),
        }
    }
}
