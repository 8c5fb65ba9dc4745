//! OSU micro-benchmarks over MPI: `osu_latency`, `osu_bw`, `osu_bibw`.
//!
//! Definitions of OMB 5.3 (rows B01 to B03); MB/s are 10⁶ bytes per second:
//! - `osu_latency`: half a round trip of blocking sends and receives.
//! - `osu_bw`: 64 non-blocking sends, then a reply of 4 bytes; payload per round.
//! - `osu_bibw`: 64 receives and 64 sends on both sides; payload of both directions per round.
//!
//! All rounds after the first are equal, so a few rounds replace the 20 to 10,000 of the real programs.
//!
//! MPI sends short messages eagerly through a buffer at each end. Long messages use the rendezvous protocol:
//! ```text
//!   eager       copy ─► payload ─► copy             rendezvous     RTS ─► match ─► CTS ─► payload, without copies
//! ```

use crate::component::adapter::{RECEIVED, connect, label, message};
use crate::engine::{BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Picos, Route, Simulation};
use crate::parameters::Parameters;
use crate::path::{BandwidthResult, DataPath, Verb};

/// One of the benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OsuTest {
    /// `osu_latency`.
    Latency,
    /// `osu_bw`.
    Bandwidth,
    /// `osu_bibw`.
    Bidirectional,
}

/// Cost model of the MPI library.
#[derive(Clone, Copy, Debug)]
pub struct Mpi {
    /// Processor time per message sent, and per message received.
    pub overhead: Picos,
    /// Longest message of the eager protocol.
    pub eager_limit: u32,
    /// Rate of the eager protocol's copies.
    pub copy_rate: BytesPerSecond,
}

impl Mpi {
    /// Reads the parameters.
    #[must_use]
    pub fn new(p: &Parameters) -> Mpi {
        Mpi {
            overhead: p.nanos("mpi.overhead"),
            eager_limit: p.count("mpi.eager"),
            copy_rate: p.gigabytes("mpi.copy.rate"),
        }
    }
}

/// Messages per round of `osu_bw` and `osu_bibw`.
const WINDOW: u32 = 64;
/// Warm-up rounds.
const WARMUP_ROUNDS: u32 = 2;
/// Bytes of an RTS or CTS.
const RENDEZVOUS_HEADER: u32 = 64;
/// Bytes of the reply in `osu_bw`.
const REPLY_SIZE: u32 = 4;

// Message types.
const EAGER: u16 = 1;
const RTS: u16 = 2;
const CTS: u16 = 3;
const PAYLOAD: u16 = 4;
const REPLY: u16 = 5;

// Ports of a rank.
const FROM_ADAPTER: u16 = 0;
const RECEIVE_DONE: u16 = 1;
const SEND_DONE: u16 = 2;

/// An MPI rank.
struct Rank {
    test: OsuTest,
    first: bool,
    size: u32,
    mpi: Mpi,
    rounds: u32,
    post: Route<Internal>,
    /// Largest inline message of the adapter.
    max_inline: u32,
    /// Processor stage for received messages, and for sent ones.
    receiving: Route<Internal>,
    sending: Route<Internal>,
    /// Messages of this round that are received, and sent.
    received: u32,
    sent: u32,
    round: u32,
    begin: Picos,
    end: Picos,
}

impl Rank {
    fn send(&self, label: u16, context: &mut Context<'_>) {
        let copied_bytes = if label == EAGER { self.size } else { 0 };
        context.send(self.sending, Packet::new(0, copied_bytes, u64::from(label)));
    }

    /// Starts one message of the test.
    fn send_payload(&self, context: &mut Context<'_>) {
        self.send(if self.size <= self.mpi.eager_limit { EAGER } else { RTS }, context);
    }

    fn begin_round(&mut self, context: &mut Context<'_>) {
        (self.received, self.sent) = (0, 0);
        let count = match (self.test, self.first) {
            (OsuTest::Latency, true) => 1,
            (OsuTest::Bandwidth, true) | (OsuTest::Bidirectional, _) => WINDOW,
            (OsuTest::Latency | OsuTest::Bandwidth, false) => 0,
        };
        (0..count).for_each(|_| self.send_payload(context));
    }

    fn end_round(&mut self, context: &mut Context<'_>) {
        self.round += 1;
        if self.round == WARMUP_ROUNDS {
            self.begin = context.now();
        }
        if self.round == WARMUP_ROUNDS + self.rounds {
            self.end = context.now();
            if self.first {
                context.stop();
            }
            return;
        }
        self.begin_round(context);
    }

    /// Ends the round if its messages are complete.
    fn advance(&mut self, context: &mut Context<'_>) {
        match (self.test, self.first) {
            (OsuTest::Latency, true) if self.received == 1 => self.end_round(context),
            (OsuTest::Latency, false) if self.received == 1 => {
                self.received = 0;
                self.send_payload(context);
            }
            (OsuTest::Bandwidth, false) if self.received == WINDOW => {
                self.received = 0;
                self.send(REPLY, context);
            }
            (OsuTest::Bidirectional, _) if self.received >= WINDOW && self.sent == WINDOW => {
                // The peer may be one round ahead: its messages count for the next round.
                let ahead = self.received - WINDOW;
                self.end_round(context);
                self.received = ahead;
            }
            _ => {}
        }
    }
}

impl Endpoint for Rank {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        let what = packet.tag as u16;
        match (port, what) {
            (FROM_ADAPTER, _) if packet.kind == RECEIVED => {
                let label = label(&packet);
                let copied_bytes = if label == EAGER { self.size } else { 0 };
                context.send(self.receiving, Packet::new(0, copied_bytes, u64::from(label)));
                return;
            }
            (SEND_DONE, _) => {
                let size = match what {
                    EAGER | PAYLOAD => self.size,
                    REPLY => REPLY_SIZE,
                    _ => RENDEZVOUS_HEADER,
                };
                context.send(self.post, message(size, what, self.max_inline));
                self.sent += u32::from(matches!(what, EAGER | PAYLOAD));
            }
            (RECEIVE_DONE, EAGER | PAYLOAD) => self.received += 1,
            (RECEIVE_DONE, RTS) => self.send(CTS, context),
            (RECEIVE_DONE, CTS) => self.send(PAYLOAD, context),
            (RECEIVE_DONE, REPLY) => {
                self.end_round(context);
                return;
            }
            _ => return,
        }
        self.advance(context);
    }

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        self.begin_round(context);
    }
}

/// Duration of a round, with the counters of all channels.
fn run(path: &DataPath, mpi: &Mpi, test: OsuTest, size: u32) -> (Picos, BandwidthResult) {
    let mut simulation = Simulation::new(17);
    let ids = [simulation.reserve_endpoint(), simulation.reserve_endpoint()];
    let posts = connect(&mut simulation, path, Verb::Send, ids);
    let rounds = if test == OsuTest::Latency || size < 1 << 16 { 8 } else { 2 };
    for (i, (&id, post)) in ids.iter().zip(posts).enumerate() {
        let name = ["client", "server"][i];
        let core = Channel { gap: mpi.overhead, ..Channel::new(format!("{name} MPI"), mpi.copy_rate) };
        let core = simulation.add_channel(core);
        let (received, sent) = (simulation.port(id, RECEIVE_DONE), simulation.port(id, SEND_DONE));
        let rank = Rank {
            test,
            first: i == 0,
            size,
            mpi: *mpi,
            rounds,
            post,
            max_inline: path.ends[i].adapter.max_inline,
            receiving: simulation.route(&[core], received),
            sending: simulation.route(&[core], sent),
            received: 0,
            sent: 0,
            round: 0,
            begin: Picos::ZERO,
            end: Picos::ZERO,
        };
        simulation.install(id, rank);
        simulation.set_timer(id, Picos::ZERO, 0);
    }
    simulation.run(Picos(u64::MAX));
    let rank: &Rank = simulation.get(ids[0]);
    let time = Picos((rank.end - rank.begin).0 / u64::from(rounds));
    let messages = match test {
        OsuTest::Latency => 1,
        OsuTest::Bandwidth => WINDOW,
        OsuTest::Bidirectional => 2 * WINDOW,
    };
    let bytes = f64::from(messages) * f64::from(size);
    let rate = BytesPerSecond(bytes / time.seconds().max(1e-12));
    (time, BandwidthResult { rate, channels: simulation.channel_reports().collect() })
}

/// `osu_latency`.
#[must_use]
pub fn latency(path: &DataPath, mpi: &Mpi, size: u32) -> Picos {
    Picos(run(path, mpi, OsuTest::Latency, size).0.0 / 2)
}

/// `osu_bw`; `osu_bibw` if `both`.
#[must_use]
pub fn bandwidth(path: &DataPath, mpi: &Mpi, size: u32, both: bool) -> BandwidthResult {
    run(path, mpi, if both { OsuTest::Bidirectional } else { OsuTest::Bandwidth }, size).1
}
