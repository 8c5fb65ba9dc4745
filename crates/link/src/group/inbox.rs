//! The inbox of a member: a pair of datagram sockets, whose sending end the other members hold.
//!
//! It carries packets that arrived at the wrong process, and notices about members and services. It has no name: a
//! process gets the sending end over a connection whose peer's user was checked, so that another user can neither
//! receive nor send here.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use millstream_shm::fork::CloseOnForkFd;
use millstream_wire::gid;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use super::directory::Service;
use crate::datagram::{PacketInfo, SLOT};

/// Magic number and version of forwarded packets.
const PACKET: [u8; 4] = *b"MLP2";
/// Magic number and version of notices.
const NOTICE: [u8; 4] = *b"MLN3";
/// Magic, type of service, reserved, source port, interface, addresses.
const PACKET_HEADER: usize = 44;
/// Magic, type, QPN prefix, reserved, service ID and address.
const NOTICE_LEN: usize = 32;
/// Longest message: a header and a packet of a full slot.
pub(super) const MAX_MESSAGE: usize = PACKET_HEADER + SLOT;

/// A notice of a member about itself.
#[derive(Debug)]
pub(super) enum Notice {
    /// The member has this inbox.
    Member { qpn_prefix: u16, inbox: CloseOnForkFd },
    /// The member's connection manager provides a service, or no longer does.
    Service { qpn_prefix: u16, service: Service, provided: bool },
}

/// A message in an inbox.
#[derive(Debug)]
pub(super) enum Received<'a> {
    Packet(PacketInfo, &'a [u8]),
    Notice(Notice),
}

/// The sending end of an inbox.
#[derive(Clone, Debug)]
pub(crate) struct InboxSender(Arc<CloseOnForkFd>);

impl From<CloseOnForkFd> for InboxSender {
    fn from(socket: CloseOnForkFd) -> Self {
        Self(Arc::new(socket))
    }
}

impl AsFd for InboxSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl InboxSender {
    fn send(&self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        rustix::net::sendmsg(&self.0, parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Whether the other value is of the same inbox.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sends a message that the receiver drops.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub(super) fn probe(&self) -> io::Result<()> {
        self.send(&[], &[])
    }

    /// Forwards a packet.
    ///
    /// # Errors
    /// EAGAIN if the inbox is full; any other error means that its process has exited.
    pub(super) fn forward(&self, info: &PacketInfo, packet: &[u8]) -> io::Result<()> {
        let mut header = [0; PACKET_HEADER];
        header[..4].copy_from_slice(&PACKET);
        header[4] = info.tos;
        header[6..8].copy_from_slice(&info.source_port.to_be_bytes());
        header[8..12].copy_from_slice(&info.interface.to_be_bytes());
        header[12..28].copy_from_slice(&gid(info.source).octets());
        header[28..44].copy_from_slice(&gid(info.destination).octets());
        self.send(&[IoSlice::new(&header), IoSlice::new(packet)], &[])
    }

    fn notify(
        &self,
        kind: u8,
        qpn_prefix: u16,
        service: Option<Service>,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut notice = [0; NOTICE_LEN];
        notice[..4].copy_from_slice(&NOTICE);
        notice[4] = kind;
        notice[6..8].copy_from_slice(&qpn_prefix.to_be_bytes());
        if let Some(service) = service {
            notice[8..16].copy_from_slice(&service.id.to_be_bytes());
            notice[16..].copy_from_slice(&service.address());
        }
        self.send(&[IoSlice::new(&notice)], fds)
    }

    /// Sends [`Notice::Member`].
    pub(super) fn notify_member(&self, qpn_prefix: u16, inbox: &Self) -> io::Result<()> {
        self.notify(1, qpn_prefix, None, &[inbox.as_fd()])
    }

    /// Sends [`Notice::Service`].
    pub(super) fn notify_service(&self, qpn_prefix: u16, service: Service, provided: bool) -> io::Result<()> {
        self.notify(if provided { 2 } else { 3 }, qpn_prefix, Some(service), &[])
    }
}

/// The receiving end of this process's inbox.
#[derive(Debug)]
pub(super) struct Inbox(CloseOnForkFd);

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A new inbox: its receiving and its sending end.
pub(super) fn inbox() -> io::Result<(Inbox, InboxSender)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let ((), ends) = CloseOnForkFd::open_several(2, || {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
            .map(|(receiver, sender)| ((), vec![receiver, sender]))
    })?;
    let [receiver, sender] = <[CloseOnForkFd; 2]>::try_from(ends).expect("a pair");
    Ok((Inbox(receiver), sender.into()))
}

impl Inbox {
    /// Receives the next message into `buffer`; `None` if there is none. Malformed messages are dropped.
    pub(super) fn receive<'a>(&self, buffer: &'a mut [u8]) -> Option<Received<'a>> {
        loop {
            let (len, fd) = self.receive_any(buffer)?;
            if len >= PACKET_HEADER && buffer[..4] == PACKET {
                return Some(packet(&buffer[..len]));
            }
            if len == NOTICE_LEN
                && buffer[..4] == NOTICE
                && let Some(notice) = notice(&buffer[..len], fd)
            {
                return Some(Received::Notice(notice));
            }
        }
    }

    fn receive_any(&self, buffer: &mut [u8]) -> Option<(usize, Option<CloseOnForkFd>)> {
        let (len, fds) = CloseOnForkFd::open_several(1, || self.receive_descriptors(buffer)).ok()?;
        Some((len, fds.into_iter().next()))
    }

    fn receive_descriptors(&self, buffer: &mut [u8]) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            match rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received?,
            }
        };
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        Ok((received.bytes, fds.flatten().collect()))
    }
}

fn packet(message: &[u8]) -> Received<'_> {
    let (header, packet) = message.split_at(PACKET_HEADER);
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let address = |at: usize| {
        let octets: [u8; 16] = header[at..at + 16].try_into().expect("sixteen of 44 bytes");
        Ipv6Addr::from(octets).to_canonical()
    };
    let info = PacketInfo {
        source: address(12),
        source_port: word(4) as u16,
        destination: address(28),
        interface: word(8),
        tos: header[4],
    };
    Received::Packet(info, packet)
}

fn notice(message: &[u8], fd: Option<CloseOnForkFd>) -> Option<Notice> {
    let qpn_prefix = u16::from_be_bytes([message[6], message[7]]);
    let id = u64::from_be_bytes(message[8..16].try_into().ok()?);
    let service = Service::from_parts(id, message[16..32].try_into().ok()?);
    match message[4] {
        1 => Some(Notice::Member { qpn_prefix, inbox: fd? }),
        kind @ (2 | 3) => Some(Notice::Service { qpn_prefix, service, provided: kind == 2 }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_and_notices_arrive_in_order_and_others_are_dropped() {
        let (inbox, sender) = inbox().unwrap();
        let (_other, other_sender) = super::inbox().unwrap();
        let info = PacketInfo {
            source: [10, 1, 2, 3].into(),
            source_port: 50_000,
            destination: Ipv6Addr::LOCALHOST.into(),
            interface: 3,
            tos: 1,
        };
        let mut buffer = vec![0; MAX_MESSAGE];
        assert!(inbox.receive(&mut buffer).is_none());
        for malformed in [&b""[..], b"MLN2", b"MLN2_0123456789a_", b"MLP2"] {
            sender.send(&[IoSlice::new(malformed)], &[]).unwrap();
        }
        // A member without its inbox.
        sender.notify(1, 5, None, &[]).unwrap();
        sender.forward(&info, b"packet").unwrap();
        sender.notify_member(0x123, &other_sender).unwrap();
        let service = Service::new(0x0106_1c2a, info.source);
        sender.notify_service(0x123, service, true).unwrap();
        assert!(matches!(inbox.receive(&mut buffer), Some(Received::Packet(i, b"packet")) if i == info));
        assert!(matches!(
            inbox.receive(&mut buffer),
            Some(Received::Notice(Notice::Member { qpn_prefix: 0x123, .. }))
        ));
        assert!(matches!(
            inbox.receive(&mut buffer),
            Some(Received::Notice(Notice::Service { qpn_prefix: 0x123, service: of, provided: true }))
                if of == service
        ));
        drop(inbox);
        assert!(sender.forward(&info, b"packet").is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock));
    }
}
