//! `millstream bench proto`: building and handling RoCEv2 packets, without sockets.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant as Clock;

use millstream_proto::{
    Access, Atomic, Config, Connection, DeliveryError, Event, Instant, Memory, Mtu, NakReason, ReceiveId,
    SendConfig, SendOp, SendRequest, Service, Status, TransmitLimits, WorkId,
};
use millstream_wire::icrc::Flow;
use millstream_wire::{Packet, Pkey, Psn, Qpn, Rkey};

use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "proto",
    title: "RoCE v2 packets without sockets",
    measures: "Time of one packet of a 1 MiB message between two connections in one process: its ICRC alone, building it with \
               headers, payload and ICRC, verifying it, and handling it at the other end.",
    baseline: "memcpy of the payload of a packet",
    values: "medians over the rounds",
    command: "make bench-proto",
};

const MESSAGE: usize = 1 << 20;
const BUFFER: usize = 65_000;
/// Rounds before those that are measured.
const WARM_UP: usize = 2;

/// Measures all figures.
#[must_use]
pub fn run(rounds: usize) -> Table {
    let mut table = Table::new(BENCHMARK, rounds);
    for mtu in [Mtu::B1024, Mtu::B4096] {
        for (name, data_from) in [("WRITE", 0), ("READ", 1)] {
            let [memcpy, times @ ..] =
                measure(mtu, data_from, rounds).map(|times| median(&times).unwrap_or(0.0));
            for (what, time) in ["ICRC alone", "build", "verify", "handle"].into_iter().zip(times) {
                let name = format!("{name}, MTU {}: {what}", mtu.bytes());
                table.push(Figure::with_baseline(name, time, "ns", memcpy));
            }
        }
    }
    table
}

/// Times of memcpy, ICRC, building, verifying and handling (ns a packet), one a round. `data_from` sends the payload: 0 in a
/// WRITE, 1 in a READ.
fn measure(mtu: Mtu, data_from: usize, rounds: usize) -> [Vec<f64>; 5] {
    let addresses = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)].map(IpAddr::from);
    let flow =
        |from: usize| Flow::new((addresses[from], 50_000), (addresses[1 - from], 4791)).expect("one family");
    let payload = mtu.bytes() as usize;
    let mut ends = [connection(flow(0), [1, 2], mtu), connection(flow(1), [2, 1], mtu)];
    let mut memories = [Plain(vec![1; MESSAGE]), Plain(vec![2; MESSAGE])];
    let mut buffer = vec![0; BUFFER];
    let source = vec![3_u8; MESSAGE];
    let mut target = vec![4_u8; BUFFER];
    let mut results = [const { Vec::new() }; 5];
    for round in 0..rounds + WARM_UP {
        let memcpy = seconds_per_packet(&source, payload, |chunk| {
            black_box(&mut target)[..chunk.len()].copy_from_slice(chunk);
        });
        let crc = seconds_per_packet(&source, payload, |chunk| _ = black_box(flow(0).icrc(chunk, 0)));
        let work = match data_from {
            0 => SendOp::Write { va: 0, rkey: Rkey::new(1), immediate: None },
            _ => SendOp::Read { va: 0, rkey: Rkey::new(1) },
        };
        let request =
            SendRequest { id: WorkId(0), work, len: MESSAGE as u32, fence: false, solicited: false };
        ends[0].post(request).expect("the queue is empty");
        let spent = carry(&mut ends, &mut memories, &mut buffer, data_from);
        let done = ends[0].poll_event();
        assert!(matches!(done, Some(Event::Completed { status: Status::Success, .. })), "{done:?}");
        if round >= WARM_UP {
            let each = |seconds: f64| seconds / f64::from(spent.packets);
            let times = [memcpy, crc, each(spent.build), each(spent.verify), each(spent.take)];
            results.iter_mut().zip(times).for_each(|(all, time)| all.push(time * 1e9));
        }
    }
    results
}

/// Time of `work` on the payload of each packet, divided by their number.
fn seconds_per_packet(message: &[u8], payload: usize, mut work: impl FnMut(&[u8])) -> f64 {
    let start = Clock::now();
    message.chunks(payload).for_each(|chunk| work(black_box(chunk)));
    start.elapsed().as_secs_f64() / (message.len() / payload) as f64
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_writes_and_reads_are_measured() {
        let table = run(1);
        assert_eq!(table.figures().len(), 16, "{table}");
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
    }
}
