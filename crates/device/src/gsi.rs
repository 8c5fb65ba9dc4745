//! Queue pair 1, the general services interface, over which connection managers exchange management datagrams.
//!
//! All processes of a host share queue pair 1, and any of them may receive a datagram for it. The link forwards it to the
//! connection manager that it is for: the one that a communication ID names, or one that provides the requested service.

use std::io;

use millstream_link::{Outgoing, PacketInfo, Port};
use millstream_shm::random_u64;
use millstream_shm::socket::BoundSocket;
use millstream_wire::cm::{Message, MessageType, reason};
use millstream_wire::{Opcode, Packet, Pkey, Psn, Qkey, Qpn, Repr, bth, deth, mad};

use crate::ipc;

/// The Q_Key of queue pair 1 (IBTA volume 1, 10.2.5).
pub const QKEY: Qkey = Qkey::new(0x8001_0000);
/// Its number.
pub const QPN: Qpn = Qpn::GSI;

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

/// The management datagram in a packet for queue pair 1.
#[must_use]
pub fn payload<'a>(packet: &'a Packet<&'a [u8]>) -> Option<&'a [u8]> {
    let key = packet.deth()?.qkey();
    let right = packet.bth().pkey().matches(Pkey::DEFAULT) && key == QKEY;
    right.then(|| packet.payload())
}

/// A packet from queue pair 1 to queue pair 1, without its ICRC.
#[must_use]
pub fn packet(psn: Psn, datagram: &[u8]) -> Vec<u8> {
    let header = bth::Repr::new(Opcode::UD_SEND_ONLY, QPN, psn);
    let deth = deth::Repr { qkey: QKEY, src_qp: QPN };
    let repr = Repr { deth: Some(deth), ..Repr::new(header, datagram) };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut bytes);
    bytes
}

/// The answer to a message for an unknown connection: a DREP to a DREQ (IBTA volume 1, 12.9.8.3.3), a REJ to a REP (12.6.7.2,
/// reason 6).
#[must_use]
pub fn reply_to_unknown(transaction: u64, message: &Message<'_>) -> Option<[u8; mad::LEN]> {
    let reply = match message {
        Message::Dreq { local_id, remote_id, .. } => {
            Message::Drep { local_id: *remote_id, remote_id: *local_id, private: &[] }
        }
        Message::Rep(reply) => Message::Rej {
            local_id: reply.remote_id,
            remote_id: reply.local_id,
            message_type: MessageType::Rep,
            reason: reason::INVALID_COMM_ID,
            additional: &[],
            private: &[],
        },
        _ => return None,
    };
    Some(reply.emit(transaction))
}

/// Handles a packet for queue pair 1 that no connection manager has taken: for a manager that has exited, any process
/// answers a DREQ or a REP, as a kernel does.
pub(crate) fn handle_unclaimed(port: &Port, info: &PacketInfo, bytes: &[u8]) {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let Some(Ok((transaction, message))) = payload(&packet).map(Message::parse) else { return };
    if let Some(reply) = reply_to_unknown(transaction, &message) {
        let mut bytes = self::packet(Psn::new(random_u64() as u32), &reply);
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
