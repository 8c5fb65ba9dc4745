//! Queue pair 1, the general services interface: demultiplexing of connection management datagrams.
//!
//! All processes of a host share queue pair 1, and any of them may receive a datagram for it. The high 12 bits of a
//! communication id are the prefix of the process that it belongs to, as with queue pair numbers. Requests name a service;
//! a process that listens for it holds an abstract socket name with the service id.

use std::io;

use millstream_link::{Outgoing, PacketInfo, Port};
use millstream_shm::random_u64;
use millstream_shm::socket::{BoundSocket, listening_names};
use millstream_wire::cm::Message;
use millstream_wire::{Opcode, Packet, Pkey, Psn, Qkey, Qpn, Repr, bth, deth, mad};

use crate::ipc;

/// The Q_Key of queue pair 1 (IBTA volume 1, 10.2.5).
pub const QKEY: u32 = 0x8001_0000;
/// Its number.
pub const QPN: u32 = 1;
/// Low bits of a communication id. The high bits are the prefix of the process.
pub const ID_BITS: u32 = 20;

/// Takes a free prefix for a connection manager, which shares the port like any other process.
///
/// # Errors
/// What the system reports; EADDRINUSE if no prefix is free.
pub fn claim() -> io::Result<(u16, BoundSocket)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for _ in 0..256 {
        let qpn_prefix = 1 + (random_u64() % 0xffe) as u32;
        match BoundSocket::bind(&ipc::socket_name(qpn_prefix)) {
            Ok(bound) => return Ok((qpn_prefix as u16, bound)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The socket name of a process that listens for a service.
#[must_use]
pub fn service_name(service: u64, qpn_prefix: u16) -> String {
    format!("{}{qpn_prefix:03x}", service_prefix(service))
}

fn service_prefix(service: u64) -> String {
    format!("{}gsi/{service:x}/", ipc::socket_name_prefix())
}

/// The process that listens for a service.
fn provider(service: u64) -> Option<u16> {
    let prefix = service_prefix(service);
    listening_names(&prefix).iter().find_map(|name| u16::from_str_radix(name.strip_prefix(&prefix)?, 16).ok())
}

/// The process that a message is for, if there is one.
#[must_use]
pub fn receiver(message: &Message<'_>) -> Option<u16> {
    let owner = |id: u32| Some((id >> ID_BITS) as u16).filter(|qpn_prefix| *qpn_prefix != 0);
    match message {
        Message::Req(request) => provider(request.service_id),
        Message::SidrReq { service_id, .. } => provider(*service_id),
        Message::Rep(reply) => owner(reply.remote_id),
        Message::SidrRep { request_id, .. } => owner(*request_id),
        Message::Mra { remote_id, .. }
        | Message::Rej { remote_id, .. }
        | Message::Rtu { remote_id, .. }
        | Message::Dreq { remote_id, .. }
        | Message::Drep { remote_id, .. } => owner(*remote_id),
    }
}

/// The management datagram in a packet for queue pair 1.
#[must_use]
pub fn payload<'a>(packet: &'a Packet<&'a [u8]>) -> Option<&'a [u8]> {
    let key = packet.deth()?.qkey().get();
    let right = packet.bth().pkey().matches(Pkey::DEFAULT) && key == QKEY;
    right.then(|| packet.payload())
}

/// A packet from queue pair 1 to queue pair 1, without its ICRC.
#[must_use]
pub fn packet(psn: u32, datagram: &[u8]) -> Vec<u8> {
    let header = bth::Repr::new(Opcode::UD_SEND_ONLY, Qpn::new(QPN), Psn::new(psn));
    let deth = deth::Repr { qkey: Qkey::new(QKEY), src_qp: Qpn::new(QPN) };
    let repr = Repr { deth: Some(deth), ..Repr::new(header, datagram) };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut bytes);
    bytes
}

/// The DREP that answers a DREQ for an unknown connection (IBTA volume 1, 12.9.8.3.3).
#[must_use]
pub fn reply_to_dreq(transaction: u64, message: &Message<'_>) -> Option<[u8; mad::LEN]> {
    let Message::Dreq { local_id, remote_id, .. } = *message else { return None };
    let reply = Message::Drep { local_id: remote_id, remote_id: local_id, private: &[] };
    Some(reply.emit(transaction))
}

/// Passes a packet for queue pair 1 to the connection manager that it is for; false if that has exited.
pub fn pass_on(port: &Port, qpn_prefix: u16, info: &PacketInfo, bytes: &[u8]) -> bool {
    // A full socket exists: the sender retransmits.
    !port
        .forward(qpn_prefix, info, bytes)
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Passes a packet for queue pair 1 to the connection manager that it is for. Another process answers for a
/// manager that has exited, as a kernel does.
pub(crate) fn forward(port: &Port, info: &PacketInfo, bytes: &[u8]) {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let Some(Ok((transaction, message))) = payload(&packet).map(Message::parse) else { return };
    if receiver(&message).is_some_and(|qpn_prefix| pass_on(port, qpn_prefix, info, bytes)) {
        return;
    }
    if any_manager(&message).is_some_and(|qpn_prefix| pass_on(port, qpn_prefix, info, bytes)) {
        return;
    }
    if let Some(reply) = reply_to_dreq(transaction, &message) {
        let mut bytes = self::packet(random_u64() as u32, &reply);
        // If the socket is full, the request is retransmitted.
        let _ = port.send(&mut [Outgoing {
            source: info.destination,
            destination: info.source,
            interface: 0,
            tos: 0,
            segment: bytes.len(),
            bytes: &mut bytes,
        }]);
    }
}

/// Any connection manager, which can reject a request for a service without listener.
fn any_manager(message: &Message<'_>) -> Option<u16> {
    let asks = matches!(message, Message::Req(_) | Message::SidrReq { .. });
    let names =
        if asks { listening_names(&format!("{}gsi/", ipc::socket_name_prefix())) } else { Vec::new() };
    names.iter().find_map(|name| u16::from_str_radix(name.rsplit('/').next()?, 16).ok())
}
