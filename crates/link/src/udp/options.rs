//! Socket creation and socket options.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use libc::c_int;
use millstream_shm::fork::CloseOnForkFd;
use millstream_shm::random_u64;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::sockopt::{get, set};

/// Requested receive buffer \[bytes\]: 25 ms at 2.5 GB/s, the scheduling delay of a busy machine. Unreliable
/// connections have no other flow control. Without privileges the kernel limits it to `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 64 << 20;
/// Requested send buffer \[bytes\].
const SEND_BUFFER: usize = 4 << 20;

/// Whether datagrams of groups joined by other sockets are received.
const IPV6_MULTICAST_ALL: c_int = 29;
/// Accept IPv6 datagrams without a UDP checksum, which peers omit because the ICRC covers more (annex
/// A17.3.1).
const UDP_NO_CHECK6_RX: c_int = 102;
const UDP_GRO: c_int = 104;
const SO_MEMINFO: c_int = 55;
/// Length of SO_MEMINFO, and the index of its drop counter.
const MEMINFO_COUNTERS: usize = 9;
const MEMINFO_DROPS: usize = 8;

const ON: c_int = 1;
const OFF: c_int = 0;

/// Default type of service: ECN-capable transport (RFC 3168).
pub(super) const DEFAULT_TOS: u8 = 0b10;

/// Source port range that annex A17 recommends, so that networks spread flows by source port.
const SOURCE_PORT_BASE: u16 = 0xc000;

/// A dual-stack socket, or an IPv4 socket where the kernel has no IPv6. Returns whether it is dual-stack.
fn new_socket() -> io::Result<(CloseOnForkFd, bool)> {
    let new = |family| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        CloseOnForkFd::open(|| rustix::net::socket_with(family, SocketType::DGRAM, flags, None))
    };
    match new(AddressFamily::INET6) {
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
            Ok((new(AddressFamily::INET)?, false))
        }
        socket => {
            let socket = socket?;
            sockopt::set_ipv6_v6only(&socket, false)?;
            Ok((socket, true))
        }
    }
}

fn bind(socket: &CloseOnForkFd, both: bool, port: u16) -> rustix::io::Result<()> {
    let any: IpAddr = if both { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    rustix::net::bind(socket, &SocketAddr::new(any, port))
}

/// A receiving socket on a port that sockets of the same user share.
pub(crate) fn bind_shared(port: u16) -> io::Result<CloseOnForkFd> {
    let (socket, both) = new_socket()?;
    let fd = socket.as_fd();
    sockopt::set_socket_reuseport(fd, true)?;
    // Beyond the system's limit if privileged, otherwise up to it. The latter cannot fail: the kernel clamps the size.
    let _ = sockopt::set_socket_recv_buffer_size_force(fd, RECEIVE_BUFFER)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(fd, RECEIVE_BUFFER));
    // Report destination address, interface and type of service of each datagram.
    sockopt::set_ip_recvtos(fd, true)?;
    if both {
        // Covers both address families.
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, &ON)?;
        sockopt::set_ipv6_recvtclass(fd, true)?;
    } else {
        set(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, &ON)?;
    }
    set(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, &OFF)?;
    if both {
        set(fd, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, &OFF)?;
        set(fd, libc::SOL_UDP, UDP_NO_CHECK6_RX, &ON)?;
    }
    // Linux 5.0 and later; without it packets arrive one by one.
    let _ = set(fd, libc::SOL_UDP, UDP_GRO, &ON);
    bind(&socket, both, port)?;
    Ok(socket)
}

/// The sending socket and its port.
pub(super) fn tx() -> io::Result<(CloseOnForkFd, u16)> {
    let (socket, both) = new_socket()?;
    let fd = socket.as_fd();
    let _ = sockopt::set_socket_send_buffer_size_force(fd, SEND_BUFFER)
        .or_else(|_| sockopt::set_socket_send_buffer_size(fd, SEND_BUFFER));
    // Nothing is received here.
    let _ = sockopt::set_socket_recv_buffer_size(fd, 0);
    sockopt::set_ip_mtu_discover(fd, Ipv4PathMtuDiscovery::DO)?;
    sockopt::set_ip_tos(fd, DEFAULT_TOS)?;
    if both {
        sockopt::set_ipv6_mtu_discover(fd, Ipv6PathMtuDiscovery::DO)?;
        sockopt::set_ipv6_tclass(fd, DEFAULT_TOS.into())?;
    }
    set_multicast_loop(fd, true)?;
    for _ in 0..64 {
        let port = SOURCE_PORT_BASE | random_u64() as u16;
        match bind(&socket, both, port) {
            Ok(()) => return Ok((socket, port)),
            Err(Errno::ADDRINUSE) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::ADDRINUSE.into())
}

/// Sets whether own multicast datagrams reach this host.
pub(super) fn set_multicast_loop(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    sockopt::set_ip_multicast_loop(socket, on)?;
    match sockopt::set_ipv6_multicast_loop(socket, on) {
        // An IPv4-only socket.
        Err(Errno::NOPROTOOPT) => Ok(()),
        done => Ok(done?),
    }
}

/// Joins or leaves a multicast group on an interface.
pub(super) fn membership(
    socket: BorrowedFd<'_>,
    group: IpAddr,
    interface: u32,
    join: bool,
) -> io::Result<()> {
    let any = &Ipv4Addr::UNSPECIFIED;
    Ok(match (&group, join) {
        (IpAddr::V4(group), true) => {
            sockopt::set_ip_add_membership_with_ifindex(socket, group, any, interface)
        }
        (IpAddr::V4(group), false) => {
            sockopt::set_ip_drop_membership_with_ifindex(socket, group, any, interface)
        }
        (IpAddr::V6(group), true) => sockopt::set_ipv6_add_membership(socket, group, interface),
        (IpAddr::V6(group), false) => sockopt::set_ipv6_drop_membership(socket, group, interface),
    }?)
}

/// Receive buffer size in bytes. The kernel doubles the requested size for its bookkeeping.
pub(super) fn receive_buffer_size(socket: BorrowedFd<'_>) -> usize {
    sockopt::socket_recv_buffer_size(socket).unwrap_or(0) / 2
}

/// Datagrams that the kernel dropped at this socket.
pub(super) fn dropped(socket: BorrowedFd<'_>) -> u64 {
    let counters = get::<MEMINFO_COUNTERS>(socket, libc::SOL_SOCKET, SO_MEMINFO).unwrap_or_default();
    counters[MEMINFO_DROPS].into()
}

/// User IDs of the sockets bound to a UDP port on this host.
pub(crate) fn port_owners(port: u16) -> Vec<u32> {
    let mut users = Vec::new();
    for table in ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"] {
        let table = std::fs::read_to_string(table).unwrap_or_default();
        users.extend(table.lines().skip(1).filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let bound = fields.get(1)?.rsplit_once(':')?.1;
            let uid: u32 = fields.get(7)?.parse().ok()?;
            (u16::from_str_radix(bound, 16) == Ok(port)).then_some(uid)
        }));
    }
    users
}
