//! Packets built and handled per second, with memcpy and CRC of the payload as the baseline. Rounds
//! alternate; results are medians. No sockets.
//!
//! cargo run --release -p millstream-proto --example packets
//!
//! Writes one line per result into target/bench/proto.jsonl.

use std::hint::black_box;
use std::io::Write;
use std::time::Instant as Clock;

use millstream_proto::{
    Access, Atomic, Config, Connection, DeliveryError, Event, Instant, Memory, Mtu, NakReason, ReceiveId,
    SendConfig, SendOp, SendRequest, Service, Status, TransmitLimits, WorkId,
};
use millstream_wire::icrc::Flow;
use millstream_wire::{Packet, Pkey, Psn, Qpn, Rkey};

const MESSAGE: usize = 1 << 20;
const BUFFER: usize = 65_000;
const ROUNDS: usize = 21;

/// One megabyte of memory for all requests.
struct Plain(Vec<u8>);

impl Memory for Plain {
    fn gather(&mut self, _: WorkId, offset: u32, into: &mut [u8]) -> Result<(), Status> {
        into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
        Ok(())
    }
    fn scatter(&mut self, _: WorkId, offset: u32, from: &[u8]) -> Result<(), Status> {
        self.0[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }
    fn local(&mut self, _: WorkId) -> Result<(), Status> {
        Ok(())
    }
    fn take_receive(&mut self) -> Option<ReceiveId> {
        Some(ReceiveId(0))
    }
    fn deliver(&mut self, _: ReceiveId, offset: u32, from: &[u8]) -> Result<(), DeliveryError> {
        self.0[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }
    fn check(&mut self, _: Rkey, va: u64, len: u32, _: Access) -> Result<(), NakReason> {
        let room = MESSAGE.checked_sub(va as usize).ok_or(NakReason::RemoteAccess)?;
        if len as usize <= room { Ok(()) } else { Err(NakReason::RemoteAccess) }
    }
    fn write(&mut self, rkey: Rkey, va: u64, from: &[u8]) -> Result<(), NakReason> {
        self.check(rkey, va, from.len() as u32, Access::Write)?;
        self.0[va as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }
    fn write_atomically(&mut self, rkey: Rkey, va: u64, bytes: [u8; 8]) -> Result<(), NakReason> {
        self.write(rkey, va, &bytes)
    }
    fn read(&mut self, rkey: Rkey, va: u64, into: &mut [u8]) -> Result<(), NakReason> {
        self.check(rkey, va, into.len() as u32, Access::Read)?;
        into.copy_from_slice(&self.0[va as usize..][..into.len()]);
        Ok(())
    }
    fn atomic(&mut self, _: Rkey, _: u64, _: Atomic) -> Result<u64, NakReason> {
        Err(NakReason::RemoteOperational)
    }
    fn invalidate(&mut self, _: Rkey) -> Result<(), NakReason> {
        Err(NakReason::RemoteAccess)
    }
}

fn connection(flow: Flow, qps: [u32; 2], mtu: Mtu) -> Connection {
    let mut connection = Connection::new(Config {
        service: Service::Rc,
        flow,
        local_qp: Qpn::new(qps[0]),
        remote_qp: Qpn::new(qps[1]),
        pkey: Pkey::DEFAULT,
        mtu,
        receive_psn: Psn::new(0),
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 12,
    });
    connection.start(SendConfig {
        send_psn: Psn::new(0),
        max_rd_atomic: 16,
        ack_timeout: 14,
        retry_count: 7,
        rnr_retry: 7,
        window: 1 << 16,
        probe: None,
    });
    connection
}

/// Seconds for building and handling the packets of some requests, and their number.
#[derive(Clone, Copy, Default)]
struct Spent {
    build: f64,
    verify: f64,
    take: f64,
    packets: u32,
}

/// Delivers all packets of both ends, and measures the direction with payload.
fn carry(
    ends: &mut [Connection; 2],
    memories: &mut [Plain; 2],
    buffer: &mut [u8],
    data_from: usize,
) -> Spent {
    let now = Instant::from_nanos(0);
    let mut spent = Spent::default();
    loop {
        let mut moved = false;
        for from in [0, 1] {
            loop {
                let start = Clock::now();
                let Some(sent) =
                    ends[from].poll_transmit(now, &mut memories[from], TransmitLimits::NONE, buffer)
                else {
                    break;
                };
                let built = Clock::now();
                let flow = *ends[from].flow();
                for packet in buffer[..sent.len].chunks(sent.segment) {
                    let packet = Packet::new_checked(packet).expect("a packet");
                    assert!(flow.verify(&packet, 0));
                }
                let verified = Clock::now();
                for packet in buffer[..sent.len].chunks(sent.segment) {
                    let packet = Packet::new_checked(packet).expect("a packet");
                    ends[1 - from].handle_datagram(
                        now,
                        (flow.source(), 50_000).into(),
                        &packet,
                        &mut memories[1 - from],
                    );
                    while ends[1 - from].handle_reordered(&mut memories[1 - from]) {}
                }
                if from == data_from {
                    spent.build += (built - start).as_secs_f64();
                    spent.verify += (verified - built).as_secs_f64();
                    spent.take += verified.elapsed().as_secs_f64();
                    spent.packets += sent.packets;
                }
                moved = true;
            }
        }
        if !moved {
            return spent;
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> std::io::Result<()> {
    let addresses = ["10.0.0.1", "10.0.0.2"].map(|address| address.parse().expect("an address"));
    let flow =
        |from: usize| Flow::new((addresses[from], 50_000), (addresses[1 - from], 4791)).expect("one family");
    std::fs::create_dir_all("target/bench")?;
    let mut file = std::fs::File::create("target/bench/proto.jsonl")?;
    let mut figure = |name: String, nanos: f64, baseline: f64| {
        println!("{name:<34} {nanos:>8.1} ns   {:>6.2} x memcpy", nanos / baseline);
        let ratio = nanos / baseline;
        writeln!(
            file,
            r#"{{"name":"{name}","value":{nanos:.2},"unit":"ns","baseline":{baseline:.2},"ratio":{ratio:.3}}}"#
        )
    };
    println!("a packet of a 1 MiB message, in memory");
    for mtu in [Mtu::B1024, Mtu::B4096] {
        let payload = mtu.bytes() as usize;
        for (name, data_from) in [("write", 0), ("read", 1)] {
            let mut ends = [connection(flow(0), [1, 2], mtu), connection(flow(1), [2, 1], mtu)];
            let mut memories = [Plain(vec![1; MESSAGE]), Plain(vec![2; MESSAGE])];
            let mut buffer = vec![0; BUFFER];
            let source = vec![3_u8; MESSAGE];
            let mut target = vec![4_u8; BUFFER];
            let mut results = [const { Vec::new() }; 5];
            for round in 0..ROUNDS + 2 {
                let start = Clock::now();
                for chunk in source.chunks(payload) {
                    black_box(&mut target)[..chunk.len()].copy_from_slice(black_box(chunk));
                }
                let memcpy = start.elapsed().as_secs_f64() / (MESSAGE / payload) as f64;
                let start = Clock::now();
                for chunk in source.chunks(payload) {
                    black_box(flow(0).icrc(black_box(chunk), 0));
                }
                let crc = start.elapsed().as_secs_f64() / (MESSAGE / payload) as f64;
                let work = match name {
                    "write" => SendOp::Write { va: 0, rkey: Rkey::new(1), immediate: None },
                    _ => SendOp::Read { va: 0, rkey: Rkey::new(1) },
                };
                let request =
                    SendRequest { id: WorkId(0), work, len: MESSAGE as u32, fence: false, solicited: false };
                ends[0].post(request).expect("taken");
                let spent = carry(&mut ends, &mut memories, &mut buffer, data_from);
                let done = ends[0].poll_event();
                assert!(matches!(done, Some(Event::Completed { status: Status::Success, .. })), "{done:?}");
                if round >= 2 {
                    let each = |seconds: f64| seconds * 1e9 / f64::from(spent.packets);
                    let times =
                        [memcpy * 1e9, crc * 1e9, each(spent.build), each(spent.verify), each(spent.take)];
                    for (all, time) in results.iter_mut().zip(times) {
                        all.push(time);
                    }
                }
            }
            let [memcpy, crc, build, verify, take] = results.map(median);
            println!("{name}, {payload} bytes a packet: memcpy {memcpy:.1} ns");
            figure(format!("{name}_{payload}_icrc"), crc, memcpy)?;
            figure(format!("{name}_{payload}_build"), build, memcpy)?;
            figure(format!("{name}_{payload}_verify"), verify, memcpy)?;
            figure(format!("{name}_{payload}_take"), take, memcpy)?;
            println!("{:<34} {:>8.2} GB/s", "build, one core", payload as f64 / build);
            println!("{:<34} {:>8.2} GB/s", "verify and take, one core", payload as f64 / (verify + take));
        }
    }
    Ok(())
}
