//! Socket creation and socket options.

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::c_int;
use millstream_shm::random_u64;

use super::message::socket_address;

/// Requested receive buffer: 25 ms at 2.5 GB/s, the scheduling delay of a busy machine. Unreliable
/// connections have no other flow control. Without privileges the kernel limits it to `net.core.rmem_max`.
const RECEIVE_BUFFER: c_int = 64 << 20;
const SEND_BUFFER: c_int = 4 << 20;

/// Whether datagrams of groups joined by other sockets are received.
const IPV6_MULTICAST_ALL: c_int = 29;
/// Accept IPv6 datagrams without a UDP checksum, which peers omit because the ICRC covers more (annex
/// A17.3.1).
const UDP_NO_CHECK6_RX: c_int = 102;
const UDP_GRO: c_int = 104;
const SO_MEMINFO: c_int = 55;
/// Index of the drop counter in SO_MEMINFO.
const MEMINFO_DROPS: usize = 8;

/// Default type of service: ECN-capable transport (RFC 3168).
pub(super) const DEFAULT_TOS: c_int = 0b10;

/// Source port range that annex A17 recommends, so that networks spread flows by source port.
const SOURCE_PORT_BASE: u16 = 0xc000;

pub(super) fn set(socket: BorrowedFd<'_>, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    set_raw(socket, level, option, &value)
}

fn set_raw<T>(socket: BorrowedFd<'_>, level: c_int, option: c_int, value: &T) -> io::Result<()> {
    // SAFETY: the value is readable for its size.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as u32,
        )
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get<T: Copy>(socket: BorrowedFd<'_>, level: c_int, option: c_int, mut value: T) -> io::Result<T> {
    let mut len = size_of::<T>() as u32;
    // SAFETY: the value is writable for its size, and any bytes are one (used with integers only).
    let failed =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len) };
    if failed == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// A dual-stack socket, or an IPv4 socket where the kernel has no IPv6.
fn new_socket() -> io::Result<(OwnedFd, bool)> {
    for family in [libc::AF_INET6, libc::AF_INET] {
        // SAFETY: creates a new descriptor.
        let fd =
            unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
        if fd >= 0 {
            // SAFETY: as above.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            let both = family == libc::AF_INET6;
            if both {
                set(borrow(&socket), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)?;
            }
            return Ok((socket, both));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EAFNOSUPPORT) {
            return Err(error);
        }
    }
    Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

fn borrow(socket: &OwnedFd) -> BorrowedFd<'_> {
    std::os::fd::AsFd::as_fd(socket)
}

/// Sets an option in each address family of the socket.
fn set_families(
    socket: BorrowedFd<'_>,
    both: bool,
    v4: (c_int, c_int),
    v6: (c_int, c_int),
) -> io::Result<()> {
    set(socket, libc::IPPROTO_IP, v4.0, v4.1)?;
    if both {
        set(socket, libc::IPPROTO_IPV6, v6.0, v6.1)?;
    }
    Ok(())
}

/// Sets a buffer size: beyond the system's limit if privileged, otherwise up to it.
fn set_buffer_size(socket: BorrowedFd<'_>, forced: c_int, limited: c_int, bytes: c_int) {
    if set(socket, libc::SOL_SOCKET, forced, bytes).is_err() {
        // Cannot fail: the kernel clamps the size.
        let _ = set(socket, libc::SOL_SOCKET, limited, bytes);
    }
}

fn bind(socket: &OwnedFd, both: bool, port: u16) -> io::Result<()> {
    let any: IpAddr = if both { Ipv6Addr::UNSPECIFIED.into() } else { [0, 0, 0, 0].into() };
    let (address, len) = socket_address(any, port, 0);
    // SAFETY: the address is valid for `len` bytes.
    if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A receiving socket on a port that sockets of the same user share.
pub(crate) fn bind_shared(port: u16) -> io::Result<OwnedFd> {
    let (socket, both) = new_socket()?;
    let fd = borrow(&socket);
    set(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    set_buffer_size(fd, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, RECEIVE_BUFFER);
    // Report destination address, interface and type of service of each datagram.
    set(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    if both {
        // Covers both address families.
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
    } else {
        set(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    }
    set_families(fd, both, (libc::IP_MULTICAST_ALL, 0), (IPV6_MULTICAST_ALL, 0))?;
    if both {
        set(fd, libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)?;
    }
    // Linux 5.0 and later; without it packets arrive one by one.
    let _ = set(fd, libc::SOL_UDP, UDP_GRO, 1);
    bind(&socket, both, port)?;
    Ok(socket)
}

/// The sending socket and its port.
pub(super) fn tx() -> io::Result<(OwnedFd, u16)> {
    let (socket, both) = new_socket()?;
    let fd = borrow(&socket);
    set_buffer_size(fd, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, SEND_BUFFER);
    // Nothing is received here.
    let _ = set(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 0);
    let discover = (libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO);
    set_families(fd, both, discover, (libc::IPV6_MTU_DISCOVER, libc::IP_PMTUDISC_DO))?;
    set_families(fd, both, (libc::IP_TOS, DEFAULT_TOS), (libc::IPV6_TCLASS, DEFAULT_TOS))?;
    set_multicast_loop(fd, true)?;
    for _ in 0..64 {
        let port = SOURCE_PORT_BASE | random_u64() as u16;
        match bind(&socket, both, port) {
            Ok(()) => return Ok((socket, port)),
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EADDRINUSE))
}

/// Sets whether own multicast datagrams reach this host.
pub(super) fn set_multicast_loop(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, on.into())?;
    match set(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, on.into()) {
        // An IPv4-only socket.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
        done => done,
    }
}

pub(super) fn membership(
    socket: BorrowedFd<'_>,
    group: IpAddr,
    interface: u32,
    join: bool,
) -> io::Result<()> {
    match group {
        IpAddr::V4(group) => {
            let request = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
                imr_address: libc::in_addr { s_addr: 0 },
                imr_ifindex: interface as c_int,
            };
            let option = if join { libc::IP_ADD_MEMBERSHIP } else { libc::IP_DROP_MEMBERSHIP };
            set_raw(socket, libc::IPPROTO_IP, option, &request)
        }
        IpAddr::V6(group) => {
            let request = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                ipv6mr_interface: interface,
            };
            let option = if join { libc::IPV6_ADD_MEMBERSHIP } else { libc::IPV6_DROP_MEMBERSHIP };
            set_raw(socket, libc::IPPROTO_IPV6, option, &request)
        }
    }
}

/// Receive buffer size in bytes. The kernel doubles the requested size for its bookkeeping.
pub(super) fn receive_buffer_size(socket: BorrowedFd<'_>) -> usize {
    let room: c_int = get(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 0).unwrap_or(0);
    usize::try_from(room).unwrap_or(0) / 2
}

/// Datagrams that the kernel dropped at this socket.
pub(super) fn dropped(socket: BorrowedFd<'_>) -> u64 {
    let memory: [u32; 9] = get(socket, libc::SOL_SOCKET, SO_MEMINFO, [0; 9]).unwrap_or_default();
    memory[MEMINFO_DROPS].into()
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
