//! The sockets of the peer and of another host, and connections to them.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd as _, FromRawFd as _};

use millstream_device::gid;
use millstream_device::qp::state::{AddressVector, QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpType};
use millstream_quantity::{Qkey, Qpn};
use millstream_wire::icrc::Flow;
use millstream_wire::{ICRC_LEN, Packet, UDP_PORT, bth};

use super::QKEY;
use super::memory::SECRET;

/// Addresses of the device, of the peer, and of a further host.
pub(super) const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
pub(crate) const PEER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
pub(super) const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
/// Modifies a queue pair from RESET to RTS. Its sequence numbers start at zero in both directions.
pub(crate) fn connect(qp: &Qp, peer: Ipv4Addr, dest: u32) {
    let of = |yes: bool, mask: u32| if yes { mask } else { 0 };
    let kind = qp.kind();
    let ud = kind == QpType::Ud;
    // Both ends of an XRC connection take all attributes of a reliable connection.
    let reliable = !ud && kind != QpType::Uc;
    let rtr = attr::AV | attr::PATH_MTU | attr::DEST_QPN | attr::RQ_PSN;
    let responder = attr::MAX_DEST_RD_ATOMIC | attr::MIN_RNR_TIMER;
    let requester = attr::TIMEOUT | attr::RETRY_CNT | attr::RNR_RETRY | attr::MAX_QP_RD_ATOMIC;
    let is_loopback = |entry: &gid::GidEntry| entry.raw == HERE.to_ipv6_mapped().octets();
    let sgid_index = millstream_device::gid_table::GidTable::current()
        .index_of(is_loopback)
        .expect("a loopback interface") as u8;
    for (state, needs) in [
        (QpState::Init, attr::PKEY_INDEX | attr::PORT | if ud { attr::QKEY } else { attr::ACCESS_FLAGS }),
        (QpState::Rtr, of(!ud, rtr) | of(reliable, responder)),
        (QpState::Rts, attr::SQ_PSN | of(reliable, requester)),
    ] {
        let dgid = peer.to_ipv6_mapped().octets();
        let attributes = QpAttr {
            state,
            access: 14,
            port: 1,
            path_mtu: 1,
            dest_qpn: Qpn::new(dest),
            max_rd_atomic: 2,
            max_dest_rd_atomic: 2,
            min_rnr_timer: 1,
            // 4.2 seconds: forged acknowledgements come earlier.
            timeout: 20,
            retry_cnt: 1,
            rnr_retry: 1,
            qkey: Qkey::new(QKEY),
            path: AddressVector { is_global: true, dgid, sgid_index, port: 1, ..AddressVector::default() },
            ..QpAttr::default()
        };
        qp.modify(&attributes, attr::STATE | needs).expect("the usual way from RESET");
    }
}

/// A socket on a port of an address. The RoCE port is shared with the device's socket, which is bound to all addresses.
pub(crate) fn shared_socket(address: Ipv4Addr, port: u16) -> UdpSocket {
    let on: libc::c_int = 1;
    let name = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: a new descriptor without another owner; option and name are on the stack.
    unsafe {
        let socket =
            UdpSocket::from_raw_fd(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0));
        let (fd, len) = (socket.as_raw_fd(), size_of_val(&on) as u32);
        assert_eq!(
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, (&raw const on).cast(), len),
            0
        );
        assert_eq!(libc::bind(fd, (&raw const name).cast(), size_of_val(&name) as u32), 0);
        socket
    }
}

/// A socket of the peer or of another host.
pub(crate) struct Sender {
    socket: UdpSocket,
    flow: Flow,
}

impl Sender {
    /// A socket that does not block, from [`shared_socket`].
    pub(crate) fn new(address: Ipv4Addr, port: u16) -> Self {
        let socket = shared_socket(address, port);
        socket.set_nonblocking(true).expect("a socket");
        let port = socket.local_addr().expect("bound").port();
        let flow = Flow::new((IpAddr::V4(address), port), (IpAddr::V4(HERE), UDP_PORT)).expect("one family");
        Self { socket, flow }
    }

    /// Sends a packet, with the right invariant CRC if it is `sealed`.
    pub(crate) fn send(&self, packet: &mut [u8], sealed: bool) {
        // The invariant CRC covers a whole base transport header.
        if sealed && packet.len() >= bth::LEN + ICRC_LEN {
            let covered = packet.len() - ICRC_LEN;
            let icrc = self.flow.icrc(&packet[..covered], 0);
            packet[covered..].copy_from_slice(&icrc);
        }
        // A full queue drops the packet, as a network may.
        let _ = self.socket.send_to(packet, (HERE, UDP_PORT));
    }

    /// Receives all packets of the device, and checks that none contains secret memory.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> u64 {
        let mut received = 0;
        while let Ok(len) = self.socket.recv(buffer) {
            received += 1;
            let Ok(packet) = Packet::new_checked(&buffer[..len]) else {
                panic!("an invalid packet of the device")
            };
            let leaked = packet.payload().windows(8).any(|window| window == [SECRET; 8]);
            assert!(
                !leaked,
                "{:?} of the device contains memory that the peer may not read",
                packet.opcode()
            );
        }
        received
    }
}
