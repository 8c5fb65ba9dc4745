//! Arbitrary packets at arbitrary times for a connection with outstanding requests.
//!
//! Each packet is a length byte, a time byte, and its bytes; after a length of 0 the second byte is a change of the queue
//! pair instead. Source address and queue pair number are
//! corrected, so that inputs reach the checks behind them. The lowest bit of the second byte selects the UDP
//! source port.

use millstream_proto::{
    Access, Atomic, Changes, Config, Connection, DeliveryError, Event, Instant, Memory, Mtu, NakReason,
    ReceiveId, SendConfig, SendModifier, SendOp, SendRequest, Service, Status, TransmitLimits, WorkId,
};
use millstream_wire::icrc::Flow;
use millstream_wire::{Packet, Pkey, Psn, Qpn, Rkey, Srqn};

const KEY: Rkey = Rkey::new(1);
const WORK: u64 = 6;

/// 4 KiB at address 0, receive requests of 1,000 bytes.
struct World {
    memory: Vec<u8>,
    taken: u64,
}

impl World {
    fn find(&mut self, rkey: Rkey, va: u64, len: usize) -> Result<&mut [u8], NakReason> {
        let room = (self.memory.len() as u64).checked_sub(va).ok_or(NakReason::RemoteAccess)?;
        if rkey != KEY || len as u64 > room {
            return Err(NakReason::RemoteAccess);
        }
        Ok(&mut self.memory[va as usize..][..len])
    }
}

impl Memory for World {
    fn gather(&mut self, _: WorkId, offset: u32, into: &mut [u8]) -> Result<(), Status> {
        assert!(offset as usize + into.len() <= 1000);
        into.fill(7);
        Ok(())
    }
    fn scatter(&mut self, _: WorkId, offset: u32, from: &[u8]) -> Result<(), Status> {
        assert!(offset as usize + from.len() <= 1000, "no more than was asked for");
        Ok(())
    }
    fn select(&mut self, queue: Srqn) -> Result<(), NakReason> {
        if queue.get() < 2 { Ok(()) } else { Err(NakReason::InvalidRequest) }
    }
    fn local(&mut self, _: WorkId) -> Result<(), Status> {
        Ok(())
    }
    fn take_receive(&mut self) -> Option<ReceiveId> {
        self.taken += 1;
        (!self.taken.is_multiple_of(4)).then_some(ReceiveId(self.taken))
    }
    fn deliver(&mut self, _: ReceiveId, offset: u32, from: &[u8]) -> Result<(), DeliveryError> {
        let room = 1000_usize.checked_sub(offset as usize).ok_or(DeliveryError::TooLong)?;
        if from.len() <= room { Ok(()) } else { Err(DeliveryError::TooLong) }
    }
    fn check(&mut self, rkey: Rkey, va: u64, len: u32, _: Access) -> Result<(), NakReason> {
        self.find(rkey, va, len as usize).map(|_| ())
    }
    fn write(&mut self, rkey: Rkey, va: u64, from: &[u8]) -> Result<(), NakReason> {
        self.find(rkey, va, from.len())?.copy_from_slice(from);
        Ok(())
    }
    fn write_atomically(&mut self, rkey: Rkey, va: u64, bytes: [u8; 8]) -> Result<(), NakReason> {
        self.write(rkey, va, &bytes)
    }
    fn read(&mut self, rkey: Rkey, va: u64, into: &mut [u8]) -> Result<(), NakReason> {
        into.copy_from_slice(self.find(rkey, va, into.len())?);
        Ok(())
    }
    fn atomic(&mut self, rkey: Rkey, va: u64, _: Atomic) -> Result<u64, NakReason> {
        assert!(va.is_multiple_of(8));
        self.find(rkey, va, 8).map(|_| 0)
    }
    fn invalidate(&mut self, _: Rkey) -> Result<(), NakReason> {
        Err(NakReason::RemoteAccess)
    }
}

fn connection(service: Service) -> Connection {
    let addresses = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse().expect("an address"));
    let mut connection = Connection::new(Config {
        service,
        flow: Flow::new((addresses[0], 50_000), (addresses[1], 4791)).expect("one family"),
        local_qp: Qpn::new(0x11),
        remote_qp: Qpn::new(0x22),
        pkey: Pkey::DEFAULT,
        mtu: Mtu::B256,
        receive_psn: Psn::new(0),
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        max_dest_rd_atomic: 2,
        min_rnr_timer: 1,
    });
    connection.start(SendConfig {
        send_psn: Psn::new(0),
        max_rd_atomic: 2,
        ack_timeout: 1,
        retry_count: 7,
        rnr_retry: 7,
        window: 8,
        probe: Some(std::time::Duration::from_micros(3)),
    });
    connection
}

/// Drains or resumes the send queue, or changes attributes.
fn change(connection: &mut Connection, now: Instant, what: u8) {
    let value = what >> 2;
    match what % 4 {
        0 => connection.drain(),
        1 => connection.resume(),
        _ => connection.modify(
            now,
            &Changes {
                flow: *connection.flow(),
                max_dest_rd_atomic: value % 4,
                min_rnr_timer: value % 32,
                max_rd_atomic: value / 4 % 4,
                ack_timeout: value / 2 % 4,
                retry_count: value % 8,
                rnr_retry: value / 8,
            },
        ),
    }
}

/// Interprets the input; panics if an invariant is violated.
pub(crate) fn play(bytes: &[u8]) {
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let service = match first % 4 {
        0 => Service::Rc,
        1 => Service::Uc,
        2 => Service::XrcInitiator,
        _ => Service::XrcTarget,
    };
    let mut connection = connection(service);
    let mut world = World { memory: vec![0; 4096], taken: 0 };
    let mut posted = 0;
    for id in 0..WORK {
        let (work, len) = match id % 3 {
            0 => (SendOp::Send(SendModifier::None), 1000),
            1 => (SendOp::Read { va: 0, rkey: KEY }, 1000),
            _ => (SendOp::FetchAdd { va: 0, rkey: KEY, add: 1 }, 8),
        };
        posted += u64::from(
            connection
                .post(SendRequest { id: WorkId(id), work, len, fence: id == 4, solicited: false })
                .is_ok(),
        );
    }
    let mut now = Instant::from_nanos(0);
    let mut buffer = vec![0; 2000];
    while let [len, time, after @ ..] = rest {
        while connection.poll_transmit(now, &mut world, TransmitLimits::NONE, &mut buffer).is_some() {}
        if *len == 0 {
            change(&mut connection, now, *time);
            rest = after;
            continue;
        }
        let (packet, behind) = after.split_at(after.len().min(usize::from(*len) * 2));
        rest = behind;
        now = now + std::time::Duration::from_micros((*time).into());
        let mut packet = packet.to_vec();
        // The peer's port, or that of a forger on its host.
        let port = if packet.get(1).is_some_and(|flags| flags & 1 != 0) { 60_000 } else { 50_001 };
        if let Some(fixed) = packet.get_mut(1..8) {
            fixed[0] &= 0xf0;
            fixed[1..3].fill(0xff);
            fixed[4..].copy_from_slice(&[0, 0, 0x11]);
        }
        if let Ok(packet) = Packet::new_checked(&packet[..]) {
            connection.handle_datagram(
                now,
                (std::net::Ipv4Addr::new(10, 0, 0, 2), port).into(),
                &packet,
                &mut world,
            );
            while connection.handle_reordered(&mut world) {}
        }
        connection.handle_timeout(now);
    }
    connection.fail();
    let mut completed = 0;
    while let Some(event) = connection.poll_event() {
        completed += u64::from(matches!(event, Event::Completed { .. }));
    }
    assert_eq!(completed, posted, "each request ends once");
    assert_eq!(connection.poll_timeout(), None);
}
