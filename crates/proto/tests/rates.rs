//! Rates between two processors, in virtual time: sending or receiving a packet takes 200 ns, the network 5 µs.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::*;
use millstream_proto::{Config, Instant, Mtu, SendConfig, SendOp, Status};
use millstream_wire::Rkey;

const PACKET: Duration = Duration::from_nanos(200);
const LATENCY: Duration = Duration::from_micros(5);
/// Packets that an end receives before it sends.
const BATCH: u32 = 64;
const MESSAGE: usize = 1 << 20;
const MESSAGES: u64 = 300;
const RKEY: Rkey = Rkey::new(7);

/// Two ends, each busy until a time.
struct Processors {
    pair: Pair,
    busy_until: [Instant; 2],
    /// Whether an end has sent something, and may have more to send.
    sends: [bool; 2],
    arrivals: [BTreeMap<(Instant, u64), Vec<u8>>; 2],
    sent: u64,
    loss: f64,
}

impl Processors {
    fn new(loss: f64) -> Self {
        let config = |end| Config { max_dest_rd_atomic: 16, ..config(end, Mtu::B1024) };
        let send = |end| SendConfig {
            window: 2048,
            max_rd_atomic: 16,
            ack_timeout: 14,
            probe: Some(Duration::from_millis(4)),
            ..send_config(end)
        };
        let mut pair = Pair::with([config(A), config(B)], [send(A), send(B)], 1);
        pair.ends[B].world.region(RKEY.get(), 0, MESSAGE);
        let busy_until = [pair.now; 2];
        Self { pair, busy_until, sends: [false; 2], arrivals: Default::default(), sent: 0, loss }
    }

    /// The next time at which an end has something to do.
    fn next(&self, end: usize) -> Option<Instant> {
        let arrival = self.arrivals[end].first_key_value().map(|(key, _)| key.0);
        let timeout = self.pair.ends[end].connection.poll_timeout();
        let sends = self.sends[end].then_some(self.busy_until[end]);
        [arrival, timeout, sends].into_iter().flatten().min().map(|at| at.max(self.busy_until[end]))
    }

    /// Lets the end that is first receive a batch, and send a burst.
    fn step(&mut self) {
        let first = [A, B].into_iter().filter_map(|end| Some((self.next(end)?, end))).min();
        let (now, end) = first.expect("something is left to do");
        self.pair.now = now;
        for _ in 0..BATCH {
            let Some(first) = self.arrivals[end].first_entry().filter(|first| first.key().0 <= self.pair.now)
            else {
                break;
            };
            let bytes = first.remove();
            self.pair.now = self.pair.now + PACKET;
            self.pair.give(end, &bytes);
        }
        self.pair.wait(end, Duration::ZERO);
        self.send(end);
    }

    fn send(&mut self, from: usize) {
        let mut buffer = vec![0; 65536];
        let end = &mut self.pair.ends[from];
        let burst =
            end.connection.poll_transmit(self.pair.now, &mut end.world, self.pair.limits, &mut buffer);
        self.sends[from] = burst.is_some();
        if let Some(burst) = burst {
            for packet in buffer[..burst.len].chunks(burst.segment) {
                self.pair.now = self.pair.now + PACKET;
                self.sent += 1;
                if !self.pair.random.happens(self.loss) {
                    let arrival = (self.pair.now + LATENCY, self.sent);
                    self.arrivals[1 - from].insert(arrival, packet.to_vec());
                }
            }
        }
        self.pair.take_kept(from);
        self.busy_until[from] = self.pair.now;
    }
}

/// Time of a transfer as a multiple of what its packets take one end.
fn slowdown(work: SendOp, loss: f64) -> f64 {
    let mut ends = Processors::new(loss);
    let start = ends.pair.now;
    let mut done = 0;
    while done < MESSAGES {
        for id in ends.pair.ends[A].world.work.len() as u64..MESSAGES.min(done + 16) {
            ends.pair.post(A, id, work, vec![0; MESSAGE]);
            ends.pair.now = ends.busy_until[A];
            ends.send(A);
        }
        ends.step();
        let completions = ends.pair.ends[A].completions();
        assert!(completions.iter().all(|(_, status)| *status == Status::Success), "{completions:?}");
        done = completions.len() as u64;
    }
    let packets = MESSAGES as f64 * (MESSAGE / 1024) as f64;
    ends.busy_until[A].since(start).as_secs_f64() / (packets * PACKET.as_secs_f64())
}

/// The fewest possible packets take 1 / (1 - loss) of the time.
#[test]
fn losses_cost_little_more_than_the_lost_packets() {
    let write = SendOp::Write { va: 0, rkey: RKEY, immediate: None };
    let read = SendOp::Read { va: 0, rkey: RKEY };
    for (name, work, loss, most) in [
        ("WRITE", write, 0.0, 1.05),
        ("WRITE", write, 0.01, 1.1),
        ("WRITE", write, 0.05, 1.25),
        ("READ", read, 0.0, 1.05),
        ("READ", read, 0.01, 1.15),
        ("READ", read, 0.05, 2.0),
    ] {
        let slowdown = slowdown(work, loss);
        println!("{name}, {loss} of the packets lost: {slowdown:.3}");
        assert!(slowdown < most, "{name}, {loss} of the packets lost: {slowdown:.3}, not {most}");
    }
}
