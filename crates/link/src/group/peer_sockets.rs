//! Forwarding of packets that arrived at the wrong process.

use std::io::{self, IoSlice};
use std::mem::size_of;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use millstream_shm::socket::own_uid;
use millstream_wire::gid;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::name;
use crate::datagram::{PacketInfo, SLOT};
use crate::fork::CloseOnForkFd;

/// Magic number and version of forwarded packets.
const MAGIC: [u8; 4] = *b"MLP1";
/// Magic, type of service, reserved, source port, interface, addresses.
const HEADER: usize = 44;

/// A datagram socket to the other processes of this user on this host.
#[derive(Clone, Debug)]
pub(crate) struct PeerSockets {
    socket: Arc<CloseOnForkFd>,
    port: u16,
}

fn inbox_address(port: u16, qpn_prefix: u16) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(format!("{}/in", name(port, qpn_prefix)).as_bytes())
}

impl PeerSockets {
    /// A socket that only sends until [`listen`](PeerSockets::listen) is called.
    pub(crate) fn new(port: u16) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        Ok(Self { socket: Arc::new(socket.into()), port })
    }

    /// Receives packets that are forwarded to `qpn_prefix`.
    pub(crate) fn listen(&self, qpn_prefix: u16) -> io::Result<()> {
        set_socket_passcred(&self.socket, true)?;
        Ok(rustix::net::bind(&self.socket, &inbox_address(self.port, qpn_prefix)?)?)
    }

    /// Forwards a packet to a process.
    ///
    /// # Errors
    /// ECONNREFUSED if there is no such process, EAGAIN if its queue is full.
    pub(crate) fn forward(&self, qpn_prefix: u16, info: &PacketInfo, packet: &[u8]) -> io::Result<()> {
        let mut message = [0; HEADER];
        message[..4].copy_from_slice(&MAGIC);
        message[4] = info.tos;
        message[6..8].copy_from_slice(&info.source_port.to_be_bytes());
        message[8..12].copy_from_slice(&info.interface.to_be_bytes());
        message[12..28].copy_from_slice(&gid(info.source).octets());
        message[28..44].copy_from_slice(&gid(info.destination).octets());
        let parts = [IoSlice::new(&message), IoSlice::new(packet)];
        let address = inbox_address(self.port, qpn_prefix)?;
        let (mut control, flags) =
            (SendAncillaryBuffer::default(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        rustix::net::sendmsg_addr(&self.socket, &address, &parts, &mut control, flags)?;
        Ok(())
    }

    /// Receives the next forwarded packet into `buffer`; `None` if there is none. Datagrams of other users
    /// are dropped.
    pub(crate) fn receive<'a>(&self, buffer: &'a mut [u8]) -> Option<(PacketInfo, &'a [u8])> {
        loop {
            let (len, uid) = self.receive_any(buffer)?;
            if uid != Some(own_uid()) || len < HEADER || buffer[..4] != MAGIC {
                continue;
            }
            let (head, packet) = buffer[..len].split_at(HEADER);
            let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let address = |at: usize| {
                let octets: [u8; 16] = head[at..at + 16].try_into().expect("sixteen of 44 bytes");
                Ipv6Addr::from(octets).to_canonical()
            };
            let info = PacketInfo {
                source: address(12),
                source_port: word(4) as u16,
                destination: address(28),
                interface: word(8),
                tos: head[4],
            };
            return Some((info, packet));
        }
    }

    /// Length of the next datagram, and the sender's user ID.
    ///
    /// By libc: rustix's credentials have no value for process id 0, a sender in a foreign PID namespace.
    fn receive_any(&self, buffer: &mut [u8]) -> Option<(usize, Option<u32>)> {
        let mut data = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut control = [0u64; 8];
        // SAFETY: the message refers to `buffer` and `control`, which outlive the call.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut data;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control);
            let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
            let n = libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, flags);
            let len = usize::try_from(n).ok()?;
            let mut uid = None;
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while !header.is_null() {
                match ((*header).cmsg_level, (*header).cmsg_type) {
                    (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                        uid = Some(libc::CMSG_DATA(header).cast::<libc::ucred>().read_unaligned().uid);
                    }
                    // Descriptors are not expected.
                    (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                        let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<i32>();
                        for i in 0..count {
                            libc::close(libc::CMSG_DATA(header).cast::<i32>().add(i).read_unaligned());
                        }
                    }
                    _ => {}
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
            Some((len, uid))
        }
    }
}

impl AsFd for PeerSockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Longest message: header and a packet of a full slot.
pub(super) const MAX_MESSAGE: usize = HEADER + SLOT;
