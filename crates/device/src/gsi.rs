//! Queue pair 1: whom a connection manager's datagram is for.
//!
//! All processes of a host share queue pair 1, and any of them may be the one that receives a datagram for it. The
//! names that managers give to connections say whose they are, as queue pair numbers do: their high 12 bits are the
//! number of a process. Requests name a service; who offers it holds an abstract socket name that says so.

use std::io;

use millstream_link::{Origin, Port};
use millstream_shm::random_u64;
use millstream_shm::socket::{Bound, names_with};
use millstream_wire::cm::Message;
use millstream_wire::{Opcode, Packet, Pkey, Psn, Qkey, Qpn, Repr, bth, deth};

use crate::greeting;

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
pub fn claim() -> io::Result<(u16, Bound)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for _ in 0..256 {
        let block = 1 + (random_u64() % 0xffe) as u32;
        match Bound::bind(&greeting::name(block)) {
            Ok(bound) => return Ok((block as u16, bound)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The name that says that the process `block` offers a service.
#[must_use]
pub fn service_name(service: u64, block: u16) -> String {
    format!("{}{block:03x}", service_prefix(service))
}

fn service_prefix(service: u64) -> String {
    format!("{}gsi/{service:x}/", greeting::name_prefix())
}

/// Who offers a service.
fn provider(service: u64) -> Option<u16> {
    let prefix = service_prefix(service);
    names_with(&prefix).iter().find_map(|name| u16::from_str_radix(name.strip_prefix(&prefix)?, 16).ok())
}

/// The process that a message is for; None if there is none.
#[must_use]
pub fn receiver(message: &Message<'_>) -> Option<u16> {
    let owner = |id: u32| Some((id >> ID_BITS) as u16).filter(|block| *block != 0);
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

/// Passes a packet for queue pair 1 on to the manager that it is for. What is for none is lost: only managers
/// answer.
pub(crate) fn forward(port: &Port, origin: &Origin, bytes: &[u8]) {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let message = payload(&packet).and_then(|datagram| Message::parse(datagram).ok());
    if let Some(block) = message.and_then(|(_, message)| receiver(&message).or_else(|| any_manager(&message)))
    {
        port.pass_on(block, origin, bytes);
    }
}

/// Somebody who can refuse a request for what nobody offers.
fn any_manager(message: &Message<'_>) -> Option<u16> {
    let asks = matches!(message, Message::Req(_) | Message::SidrReq { .. });
    let names = if asks { names_with(&format!("{}gsi/", greeting::name_prefix())) } else { Vec::new() };
    names.iter().find_map(|name| u16::from_str_radix(name.rsplit('/').next()?, 16).ok())
}
