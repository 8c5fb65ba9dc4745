//! What the OSU micro-benchmarks measure between two hosts over MPI: `osu_latency`, `osu_bw`, `osu_bibw`.
//!
//! Definitions are those of OMB 5.3 (rows B01 to B03), MB/s are 10⁶ bytes a second:
//! - `osu_latency`: blocking sends and receives in turns; half of a round.
//! - `osu_bw`: 64 sends at once, all awaited, then an answer of 4 bytes; payload by the time of a round.
//! - `osu_bibw`: both sides do 64 receives and 64 sends at once; payload of both by the time of a round.
//!
//! Rounds are alike from the second on, so a few of them stand for the 20 to 10,000 of the real programs.
//!
//! MPI sends short messages at once, through a buffer at each end; of a long one it sends a note first, and
//! the payload when the receiver has said where it goes:
//! ```text
//!   eager       copy ─► payload ─► copy             long     note ─► match ─► go ahead ─► payload, to its place
//! ```

use crate::component::adapter::{RECEIVED, connect, label, message};
use crate::engine::{BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Picos, Route, Simulation};
use crate::parameters::Parameters;
use crate::path::{BandwidthResult, DataPath, Verb};

/// Which test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OsuTest {
    /// `osu_latency`.
    Latency,
    /// `osu_bw`.
    Bandwidth,
    /// `osu_bibw`.
    Bidirectional,
}

/// The MPI library.
#[derive(Clone, Copy, Debug)]
pub struct Mpi {
    /// A core's time for each message it sends, and for each it receives.
    pub overhead: Picos,
    /// Longest message that is sent at once.
    pub eager_limit: u32,
    /// Rate of the copies of such messages.
    pub copy_rate: BytesPerSecond,
}

impl Mpi {
    /// As parameters have it.
    #[must_use]
    pub fn new(p: &Parameters) -> Mpi {
        Mpi {
            overhead: p.nanos("mpi.overhead"),
            eager_limit: p.count("mpi.eager_limit"),
            copy_rate: p.gigabytes("mpi.copy_rate.rate"),
        }
    }
}

/// Messages at once in `osu_bw` and `osu_bibw`.
const WINDOW: u32 = 64;
/// Rounds before the clock starts.
const WARMUP_ROUNDS: u32 = 2;
/// Bytes of a note or a go-ahead: a header.
const RENDEZVOUS_HEADER: u32 = 64;
/// Bytes of the answer in `osu_bw`.
const REPLY_SIZE: u32 = 4;

// Labels of messages.
const EAGER: u16 = 1;
const RTS: u16 = 2;
const CTS: u16 = 3;
const PAYLOAD: u16 = 4;
const REPLY: u16 = 5;

// Ports: what the adapter says, and what the core has finished.
const FROM_ADAPTER: u16 = 0;
const RECEIVE_DONE: u16 = 1;
const SEND_DONE: u16 = 2;

/// One rank.
struct Rank {
    test: OsuTest,
    first: bool,
    size: u32,
    mpi: Mpi,
    rounds: u32,
    post: Route<Internal>,
    /// The core's work for a message that has come, and for one that goes.
    receiving: Route<Internal>,
    sending: Route<Internal>,
    /// Of this round: messages that have come whole, and that have left.
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

    /// Starts sending a message of the test.
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

    /// After each thing that happened: whether what the program waits for is there.
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
                // The other side may be ahead: what has come of its next round counts for the next.
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
                context.send(self.post, message(size, what));
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

/// A round's time, and what the lines did.
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

/// `osu_bw`, or `osu_bibw` if in both directions.
#[must_use]
pub fn bandwidth(path: &DataPath, mpi: &Mpi, size: u32, both: bool) -> BandwidthResult {
    run(path, mpi, if both { OsuTest::Bidirectional } else { OsuTest::Bandwidth }, size).1
}
