//! Random operations in both directions over a faulty network: each message arrives exactly once, in order,
//! with the right data, and every request completes.

mod common;

use std::collections::VecDeque;
use std::time::Duration;

use common::{A, B, Network, Pair, Random, config, send_config};
use millstream_proto::{
    Config, Event, Mtu, ReceivedKind, SendConfig, SendModifier, SendOp, Status, TransmitLimits, WorkId,
};
use millstream_wire::{Psn, Rkey};
use proptest::prelude::*;

/// R_Key of memory that is never written: READ results are known.
const CONSTANT: Rkey = Rkey::new(0xc0);
/// R_Key of memory that WRITEs target, each in its own part.
const WRITTEN: Rkey = Rkey::new(0x33);
const COUNTER: Rkey = Rkey::new(0x44);
const VA: u64 = !0x7fff_ffff;
const CONSTANT_LEN: usize = 1 << 18;

/// The expected result of a send request.
enum Expected {
    /// Data in the requester's memory.
    Bytes(Vec<u8>),
    Nothing,
}

/// The expected completion of a receive request.
struct Message {
    kind: ReceivedKind,
    bytes: Vec<u8>,
    len: usize,
    immediate: Option<[u8; 4]>,
}

struct Side {
    random: Random,
    next_work: u64,
    open: VecDeque<(u64, Expected)>,
    /// Messages at the other end, in order.
    messages: VecDeque<Message>,
    /// Memory of the other end.
    written: Vec<u8>,
    write_at: usize,
    counter: u64,
    next_receive: u64,
    events_seen: usize,
    received_seen: usize,
}

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
struct Setting {
    seed: u64,
    mtu: Mtu,
    network: Network,
    window: u32,
    depth: u8,
    probe: bool,
    /// Buffer size for packets, in bytes.
    buffer: usize,
    /// The longest message in packets.
    longest: u64,
}

impl Setting {
    fn of(seed: u64) -> Self {
        let mut random = Random(seed ^ 0x5eed);
        let mut chance = |most: f64| most * random.below(4) as f64 / 3.0;
        let network = Network {
            loss: chance(0.05),
            duplication: chance(0.05),
            reordering: chance(0.1),
            corruption: chance(0.02),
            latency: Duration::from_micros(7),
        };
        let mtu = Mtu::ALL[random.below(5) as usize];
        let depth = [1, 2, 4, 16][random.below(4) as usize];
        Self {
            seed,
            mtu,
            network,
            window: [1, 2, 8, 64, 1000][random.below(5) as usize],
            depth,
            probe: random.below(2) == 0,
            buffer: [4096 + 64, 20_000, 65_000][random.below(3) as usize],
            longest: [2, 10, 60][random.below(3) as usize],
        }
    }

    fn pair(&self) -> Pair {
        let mut random = Random(self.seed);
        let psns = [Psn::new(random.next() as u32), Psn::new(0xff_fff0 + random.below(16) as u32)];
        let config = |end: usize| Config {
            receive_psn: psns[1 - end],
            max_dest_rd_atomic: self.depth,
            min_rnr_timer: 1,
            ..config(end, self.mtu)
        };
        let send = |end: usize| SendConfig {
            send_psn: psns[end],
            max_rd_atomic: self.depth,
            window: self.window,
            probe: self.probe.then_some(Duration::from_micros(60)),
            ..send_config(end)
        };
        let mut pair = Pair::with([config(A), config(B)], [send(A), send(B)], self.seed);
        pair.network = self.network;
        pair.buffer = self.buffer;
        if self.seed.is_multiple_of(3) {
            pair.limits = TransmitLimits { packets: 5, ..TransmitLimits::NONE };
        }
        pair
    }
}

impl Side {
    fn new(seed: u64, written: usize) -> Self {
        Self {
            random: Random(seed),
            next_work: 0,
            open: VecDeque::new(),
            messages: VecDeque::new(),
            written: vec![0; written],
            write_at: 0,
            counter: 0,
            next_receive: 0,
            events_seen: 0,
            received_seen: 0,
        }
    }

    fn post(&mut self, end: usize, pair: &mut Pair, setting: &Setting) {
        let random = &mut self.random;
        let packets = random.below(setting.longest) as usize;
        let most = setting.mtu.bytes() as usize;
        let len = packets * most + random.below(most as u64 + 1) as usize;
        let id = self.next_work;
        self.next_work += 1;
        let immediate = (random.below(3) == 0).then(|| (id as u32).to_be_bytes());
        let fence = random.below(4) == 0;
        let (work, memory, expected) = match random.below(10) {
            0..=2 => {
                let bytes = random.bytes(len);
                let trailer = immediate.map_or(SendModifier::None, SendModifier::Immediate);
                let message = Message { kind: ReceivedKind::Send, bytes: bytes.clone(), len, immediate };
                self.messages.push_back(message);
                (SendOp::Send(trailer), bytes, Expected::Nothing)
            }
            3..=5 => {
                let len = len.min(self.written.len() - self.write_at);
                let bytes = random.bytes(len);
                let va = VA + self.write_at as u64;
                self.written[self.write_at..self.write_at + len].copy_from_slice(&bytes);
                self.write_at += len;
                if immediate.is_some() {
                    let message = Message { kind: ReceivedKind::Write, bytes: vec![], len, immediate };
                    self.messages.push_back(message);
                }
                (SendOp::Write { va, rkey: WRITTEN, immediate }, bytes, Expected::Nothing)
            }
            // Data that was just written, or constant data.
            6 if self.write_at > 0 => {
                let at = random.below(self.write_at as u64) as usize;
                let len = len.min(self.write_at - at);
                let bytes = self.written[at..at + len].to_vec();
                (SendOp::Read { va: VA + at as u64, rkey: WRITTEN }, vec![0; len], Expected::Bytes(bytes))
            }
            6 | 7 => {
                let at = random.below((CONSTANT_LEN - len) as u64) as usize;
                let bytes = pair.ends[1 - end].world.regions[&CONSTANT].bytes[at..at + len].to_vec();
                (SendOp::Read { va: VA + at as u64, rkey: CONSTANT }, vec![0; len], Expected::Bytes(bytes))
            }
            8 => {
                let before = self.counter;
                let work = if random.below(2) == 0 {
                    self.counter += 3;
                    SendOp::FetchAdd { va: VA, rkey: COUNTER, add: 3 }
                } else {
                    self.counter ^= 0xff00;
                    SendOp::CompareSwap { va: VA, rkey: COUNTER, compare: before, swap: self.counter }
                };
                (work, vec![0; 8], Expected::Bytes(before.to_ne_bytes().to_vec()))
            }
            _ if random.below(2) == 0 => (SendOp::Local, vec![], Expected::Nothing),
            _ => {
                self.counter = random.next();
                let bytes = self.counter.to_ne_bytes().to_vec();
                (SendOp::AtomicWrite { va: VA, rkey: COUNTER }, bytes, Expected::Nothing)
            }
        };
        self.open.push_back((id, expected));
        pair.post_with(end, id, work, memory, fence);
    }

    /// Checks new events.
    fn check(&mut self, end: usize, pair: &mut Pair) {
        let this = &mut pair.ends[end];
        for event in &this.events[self.events_seen..] {
            match *event {
                Event::Completed { id, status } => {
                    assert_eq!(status, Status::Success, "{:?}", this.events.last());
                    let (expected_id, expected) = self.open.pop_front().expect("completed once");
                    assert_eq!(id.0, expected_id, "completions are in order");
                    let memory = this.world.work.remove(&WorkId(expected_id)).unwrap();
                    if let Expected::Bytes(bytes) = expected {
                        assert!(memory == bytes, "the data of request {expected_id}");
                    }
                }
                Event::Received(_) => {}
                ref event => panic!("{event:?}"),
            }
        }
        self.events_seen = this.events.len();
        let other = &mut pair.ends[1 - end];
        for (received, memory) in &other.received[self.received_seen..] {
            let message = self.messages.pop_front().expect("delivered once");
            assert_eq!(received.status, Status::Success);
            assert_eq!((received.kind, received.immediate), (message.kind, message.immediate));
            assert_eq!(received.len as usize, message.len);
            assert!(memory[..message.bytes.len()] == message.bytes, "the message");
        }
        self.received_seen = other.received.len();
    }
}

/// Runs for about `packets` packets; returns how many there were.
fn storm(setting: &Setting, packets: u64) -> u64 {
    let mut pair = setting.pair();
    let written = 1 << 20;
    for end in &mut pair.ends {
        end.world.region(CONSTANT.get(), VA, CONSTANT_LEN).bytes = Random(5).bytes(CONSTANT_LEN);
        end.world.region(WRITTEN.get(), VA, written);
        end.world.region(COUNTER.get(), VA, 8);
    }
    let mut sides = [Side::new(setting.seed, written), Side::new(!setting.seed, written)];
    let longest = (setting.longest as usize + 1) * setting.mtu.bytes() as usize;
    let sum = |pair: &Pair| pair.ends.iter().map(|end| end.connection.counters().sent).sum::<u64>();
    let mut steps = 0_u64;
    loop {
        steps += 1;
        assert!(
            steps < 1000 + packets * 1000,
            "stuck: {:?}",
            pair.ends.each_ref().map(|end| &end.connection)
        );
        let enough = sum(&pair) >= packets;
        for (end, side) in sides.iter_mut().enumerate() {
            while !enough && side.open.len() < 20 && side.random.below(3) > 0 {
                side.post(end, &mut pair, setting);
            }
            // Receive requests are posted late now and then.
            let receiver = &mut pair.ends[1 - end].world;
            if receiver.receives.len() < 4 && side.random.below(4) == 0 {
                for _ in 0..1 + side.random.below(8) {
                    receiver.receive(side.next_receive, longest);
                    side.next_receive += 1;
                }
            }
        }
        let goes_on = pair.step();
        for (end, side) in sides.iter_mut().enumerate() {
            side.check(end, &mut pair);
        }
        if !goes_on && enough && sides.iter().all(|side| side.open.is_empty() && side.messages.is_empty()) {
            break;
        }
    }
    for (end, side) in sides.iter().enumerate() {
        let other = &pair.ends[1 - end].world;
        assert!(other.regions[&WRITTEN].bytes == side.written, "what was written");
        assert_eq!(other.regions[&COUNTER].bytes, side.counter.to_ne_bytes(), "the counter");
        assert!(pair.ends[end].connection.is_idle());
        let local = &pair.ends[end].world.local;
        assert!(local.windows(2).all(|pair| pair[0].0 < pair[1].0), "local operations run once and in order");
        assert_eq!(pair.ends[end].connection.poll_timeout(), None, "no timer runs without a reason");
    }
    sum(&pair)
}

#[test]
fn fixed_seeds() {
    for seed in 0..60 {
        let setting = Setting::of(seed);
        storm(&setting, 1500);
    }
}

/// The long form: `make proto-long`.
#[test]
#[ignore = "minutes"]
fn millions_of_packets() {
    let mut sum = 0;
    for seed in 1000.. {
        let setting = Setting::of(seed);
        sum += storm(&setting, 20_000);
        if seed % 20 == 0 {
            println!("{sum} packets, {} settings", seed - 999);
        }
        if sum > 5_000_000 {
            break;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_setting(
        seed: u64,
        mtu in prop::sample::select(&Mtu::ALL[..]),
        rates in [0.0..0.08_f64, 0.0..0.2, 0.0..0.3, 0.0..0.05],
        window in 1_u32..300,
        depth in 1_u8..20,
        probe: bool,
        longest in 1_u64..40,
    ) {
        let [loss, duplication, reordering, corruption] = rates;
        let network = Network { loss, duplication, reordering, corruption, latency: Duration::from_micros(7) };
        storm(&Setting { seed, mtu, network, window, depth, probe, buffer: 65_000, longest }, 400);
    }
}
