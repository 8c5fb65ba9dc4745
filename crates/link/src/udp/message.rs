//! `sendmmsg` and `recvmmsg` with control messages; `sendmsg` and `recvmsg`, which are cheaper, for a single
//! batch or datagram.
//!
//! rustix has no such calls. The C library's functions are thread cancellation points, which costs two locked
//! instructions per call. A thread must not be cancelled here either, because it holds locks. So these are
//! direct system calls.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::options::DEFAULT_TOS;
use crate::datagram::{Outgoing, PacketInfo, ReceivedDatagram, RxBuffers, SLOT};

const UDP_SEGMENT: libc::c_int = 103;
const UDP_GRO: libc::c_int = 104;

/// Most batches per system call.
const BATCHES: usize = 32;

/// Space for the control messages of one batch: IPv6 packet info, type of service, segment size.
type Control = [MaybeUninit<u64>; 16];

/// A socket address and its length.
fn socket_address(address: IpAddr, port: u16, scope: u32) -> (libc::sockaddr_in6, libc::socklen_t) {
    // SAFETY: plain data.
    let mut v6: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    match address {
        IpAddr::V6(address) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = port.to_be();
            v6.sin6_addr.s6_addr = address.octets();
            v6.sin6_scope_id = scope;
            (v6, size_of::<libc::sockaddr_in6>() as u32)
        }
        IpAddr::V4(address) => {
            let v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the larger structure holds the smaller one; both are plain data of the same alignment or more.
            unsafe { ptr::from_mut(&mut v6).cast::<libc::sockaddr_in>().write(v4) };
            (v6, size_of::<libc::sockaddr_in>() as u32)
        }
    }
}

/// Appends control messages to a buffer.
struct Writer<'a> {
    buffer: &'a mut Control,
    used: usize,
}

impl Writer<'_> {
    fn put<T>(&mut self, level: libc::c_int, kind: libc::c_int, value: &T) {
        let len = size_of::<T>() as u32;
        // SAFETY: plain arithmetic.
        let (space, head) = unsafe { (libc::CMSG_SPACE(len) as usize, libc::CMSG_LEN(len) as usize) };
        assert!(self.used + space <= size_of::<Control>());
        // SAFETY: the space was checked; the buffer is aligned for headers, whose sizes keep it so.
        unsafe {
            let at = self.buffer.as_mut_ptr().cast::<u8>().add(self.used);
            ptr::write_bytes(at, 0, space);
            at.cast::<libc::cmsghdr>().write(libc::cmsghdr {
                cmsg_len: head as _,
                cmsg_level: level,
                cmsg_type: kind,
            });
            at.add(libc::CMSG_LEN(0) as usize).cast::<T>().write_unaligned(ptr::read(value));
        }
        self.used += space;
    }
}

fn write_control(batch: &Outgoing<'_>, buffer: &mut Control) -> usize {
    let mut control = Writer { buffer, used: 0 };
    // The socket's default needs no message.
    let tos = Some(batch.tos).filter(|tos| *tos != DEFAULT_TOS).map(libc::c_int::from);
    match batch.source {
        IpAddr::V4(source) => {
            let pktinfo = libc::in_pktinfo {
                ipi_ifindex: batch.interface as libc::c_int,
                ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(source.octets()) },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            control.put(libc::IPPROTO_IP, libc::IP_PKTINFO, &pktinfo);
            tos.iter().for_each(|tos| control.put(libc::IPPROTO_IP, libc::IP_TOS, tos));
        }
        IpAddr::V6(source) => {
            let pktinfo = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr: source.octets() },
                ipi6_ifindex: batch.interface,
            };
            control.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &pktinfo);
            tos.iter().for_each(|tos| control.put(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, tos));
        }
    }
    if batch.count() > 1 {
        control.put(libc::SOL_UDP, UDP_SEGMENT, &(batch.segment as u16));
    }
    control.used
}

/// Sends the first batches with one system call; returns how many, at least one.
pub(super) fn send(socket: BorrowedFd<'_>, port: u16, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
    let n = batches.len().min(BATCHES);
    let mut messages: [MaybeUninit<libc::mmsghdr>; BATCHES] = [const { MaybeUninit::uninit() }; BATCHES];
    let mut names: [MaybeUninit<libc::sockaddr_in6>; BATCHES] = [const { MaybeUninit::uninit() }; BATCHES];
    let mut vectors: [MaybeUninit<libc::iovec>; BATCHES] = [const { MaybeUninit::uninit() }; BATCHES];
    let mut controls: [Control; BATCHES] = [[const { MaybeUninit::uninit() }; 16]; BATCHES];
    for (i, batch) in batches[..n].iter_mut().enumerate() {
        let (address, len) = socket_address(batch.destination, port, batch.interface);
        let used = write_control(batch, &mut controls[i]);
        let iov = libc::iovec { iov_base: batch.bytes.as_mut_ptr().cast(), iov_len: batch.bytes.len() };
        // SAFETY: plain data; all zeroes is valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = names[i].write(address) as *mut _ as *mut _;
        header.msg_namelen = len;
        header.msg_iov = vectors[i].write(iov);
        header.msg_iovlen = 1;
        header.msg_control = controls[i].as_mut_ptr().cast();
        header.msg_controllen = used as _;
        messages[i].write(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let (socket, messages) = (socket.as_raw_fd(), messages.as_ptr());
    // SAFETY: the first `n` messages were written, and refer to what outlives the call.
    let sent = unsafe {
        if n == 1 {
            let message = &raw const (*messages.cast::<libc::mmsghdr>()).msg_hdr;
            let len = libc::syscall(libc::SYS_sendmsg, socket, message, flags);
            if len < 0 { len } else { 1 }
        } else {
            libc::syscall(libc::SYS_sendmmsg, socket, messages, n, flags)
        }
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives datagrams into the empty slots of the inbox.
pub(crate) fn receive(socket: BorrowedFd<'_>, inbox: &mut RxBuffers) -> io::Result<()> {
    let n = inbox.next_batch().min(BATCHES);
    if n == 0 {
        return Ok(());
    }
    let mut messages: [MaybeUninit<libc::mmsghdr>; BATCHES] = [const { MaybeUninit::uninit() }; BATCHES];
    let mut names: [MaybeUninit<libc::sockaddr_in6>; BATCHES] = [const { MaybeUninit::uninit() }; BATCHES];
    let mut vectors: [MaybeUninit<libc::iovec>; BATCHES] = [const { MaybeUninit::uninit() }; BATCHES];
    let mut controls: [Control; BATCHES] = [[const { MaybeUninit::uninit() }; 16]; BATCHES];
    let first = inbox.filled.len();
    for (i, memory) in inbox.memory[first * SLOT..].chunks_mut(SLOT).take(n).enumerate() {
        // SAFETY: plain data; all zeroes is valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = names[i].as_mut_ptr().cast();
        header.msg_namelen = size_of::<libc::sockaddr_in6>() as u32;
        header.msg_iov =
            vectors[i].write(libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: SLOT });
        header.msg_iovlen = 1;
        header.msg_control = controls[i].as_mut_ptr().cast();
        header.msg_controllen = size_of::<Control>() as _;
        messages[i].write(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
    }
    let to = messages.as_mut_ptr().cast::<libc::mmsghdr>();
    let (socket, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT);
    // SAFETY: the first `n` messages were written, and refer to what outlives the call.
    let received = unsafe {
        if n == 1 {
            let len = libc::syscall(libc::SYS_recvmsg, socket, &raw mut (*to).msg_hdr, flags);
            (*to).msg_len = len.max(0) as libc::c_uint;
            if len < 0 { len } else { 1 }
        } else {
            libc::syscall(libc::SYS_recvmmsg, socket, to, n, flags, ptr::null_mut::<libc::timespec>())
        }
    };
    let Ok(received) = usize::try_from(received) else {
        let error = io::Error::last_os_error();
        inbox.record_received(n, 0);
        return match error.raw_os_error() {
            // ECONNREFUSED reports an ICMP error about an earlier packet.
            Some(libc::EAGAIN | libc::EINTR | libc::ECONNREFUSED) => Ok(()),
            _ => Err(error),
        };
    };
    inbox.record_received(n, received);
    for i in 0..received {
        // SAFETY: written above, and then by the kernel.
        let message = unsafe { messages[i].assume_init_ref() };
        // SAFETY: the kernel wrote the sender's address, which is of the socket's family.
        let filled = unsafe { read_control(message, names[i].as_ptr()) };
        inbox.filled.push(filled);
    }
    Ok(())
}

/// # Safety
/// The message was filled in by the kernel, and `name` with the sender's address.
unsafe fn read_control(message: &libc::mmsghdr, name: *const libc::sockaddr_in6) -> ReceivedDatagram {
    let len = message.msg_len as usize;
    let unknown = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let mut info = PacketInfo { source: unknown, source_port: 0, destination: unknown, interface: 0, tos: 0 };
    let mut segment = len;
    // SAFETY: the caller's promise; values are read as the types that the kernel's manual gives for them.
    unsafe {
        if i32::from((*name).sin6_family) == libc::AF_INET6 {
            info.source = Ipv6Addr::from((*name).sin6_addr.s6_addr).to_canonical();
            info.source_port = u16::from_be((*name).sin6_port);
        } else {
            let v4 = name.cast::<libc::sockaddr_in>();
            info.source = Ipv4Addr::from((*v4).sin_addr.s_addr.to_ne_bytes()).into();
            info.source_port = u16::from_be((*v4).sin_port);
        }
        let mut header = libc::CMSG_FIRSTHDR(&raw const message.msg_hdr);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let pktinfo = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    info.destination = Ipv6Addr::from(pktinfo.ipi6_addr.s6_addr).to_canonical();
                    info.interface = pktinfo.ipi6_ifindex;
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let pktinfo = data.cast::<libc::in_pktinfo>().read_unaligned();
                    info.destination = Ipv4Addr::from(pktinfo.ipi_addr.s_addr.to_ne_bytes()).into();
                    info.interface = pktinfo.ipi_ifindex as u32;
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => info.tos = *data,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    info.tos = data.cast::<libc::c_int>().read_unaligned() as u8;
                }
                (libc::SOL_UDP, UDP_GRO) => {
                    segment = data.cast::<libc::c_int>().read_unaligned() as usize;
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&raw const message.msg_hdr, header);
        }
    }
    ReceivedDatagram { info, len, segment: segment.max(1), skip: 0 }
}
