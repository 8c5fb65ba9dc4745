//! Queue pair 1: whom a connection manager's datagram is for.
//!
//! All processes of a host share queue pair 1, and any of them may be the one that receives a datagram for it. The
//! names that managers give to connections say whose they are, as queue pair numbers do: their high 12 bits are the
//! number of a process. Requests name a service; who offers it holds an abstract socket name that says so.

use std::io;

use millstream_link::{Origin, Outgoing, Port};
use millstream_shm::random_u64;
use millstream_shm::socket::{BoundSocket, listening_names};
use millstream_wire::cm::Message;
use millstream_wire::{Opcode, Packet, Pkey, Psn, Qkey, Qpn, Repr, bth, deth, mad};

use crate::ipc;

/// The key of queue pair 1 (IBTA volume 1, 10.2.5).
pub const QKEY: u32 = 0x8001_0000;
/// Its number.
pub const QPN: u32 = 1;
/// Low bits of a manager's name for a connection; the high ones are the process's number.
pub const ID_BITS: u32 = 20;

/// Takes a number for a manager, which is a process on the port like any other.
///
/// # Errors
/// What the system reports; EADDRINUSE if no number is free.
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

/// The name that says that the process `qpn_prefix` offers a service.
#[must_use]
pub fn service_name(service: u64, qpn_prefix: u16) -> String {
    format!("{}{qpn_prefix:03x}", service_prefix(service))
}

fn service_prefix(service: u64) -> String {
    format!("{}gsi/{service:x}/", ipc::socket_name_prefix())
}

/// Who offers a service.
fn provider(service: u64) -> Option<u16> {
    let prefix = service_prefix(service);
    listening_names(&prefix).iter().find_map(|name| u16::from_str_radix(name.strip_prefix(&prefix)?, 16).ok())
}

/// The process that a message is for; None if there is none.
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

/// What answers a wish to end a connection that nobody here knows (any more): whoever asks shall not wait (IBTA
/// volume 1, 12.9.8.3.3).
#[must_use]
pub fn agreement(transaction: u64, message: &Message<'_>) -> Option<[u8; mad::LEN]> {
    let Message::Dreq { local_id, remote_id, .. } = *message else { return None };
    let agreed = Message::Drep { local_id: remote_id, remote_id: local_id, private: &[] };
    Some(agreed.emit(transaction))
}

/// Gives a packet for queue pair 1 to the manager of this host that it is for; false if that has ended.
pub fn pass_on(port: &Port, qpn_prefix: u16, origin: &Origin, bytes: &[u8]) -> bool {
    // One that has no room is there, and the sender repeats itself.
    !port
        .pass_on(qpn_prefix, origin, bytes)
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Passes a packet for queue pair 1 on to the manager that it is for. For one that has ended somebody else answers, as
/// a kernel does for its processes.
pub(crate) fn forward(port: &Port, origin: &Origin, bytes: &[u8]) {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let Some(Ok((transaction, message))) = payload(&packet).map(Message::parse) else { return };
    if receiver(&message).is_some_and(|qpn_prefix| pass_on(port, qpn_prefix, origin, bytes)) {
        return;
    }
    if any_manager(&message).is_some_and(|qpn_prefix| pass_on(port, qpn_prefix, origin, bytes)) {
        return;
    }
    if let Some(agreed) = agreement(transaction, &message) {
        let mut bytes = self::packet(random_u64() as u32, &agreed);
        // If there is no room for it, the wish is repeated.
        let _ = port.send(&mut [Outgoing {
            source: origin.destination,
            destination: origin.source,
            interface: 0,
            tos: 0,
            segment: bytes.len(),
            bytes: &mut bytes,
        }]);
    }
}

/// Somebody who can refuse a request for what nobody offers.
fn any_manager(message: &Message<'_>) -> Option<u16> {
    let asks = matches!(message, Message::Req(_) | Message::SidrReq { .. });
    let names =
        if asks { listening_names(&format!("{}gsi/", ipc::socket_name_prefix())) } else { Vec::new() };
    names.iter().find_map(|name| u16::from_str_radix(name.rsplit('/').next()?, 16).ok())
}
