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
//! An eager message longer than the library's buffers is sent in fragments: copies and transfers overlap. Above a limit, the
//! adapter fetches the sender's buffer itself, and only the receiver copies.

use crate::component::adapter::{RECEIVED, connect, label, message};
use crate::engine::{BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Picos, Route, Simulation};
use crate::parameters::Parameters;
use crate::path::{BandwidthResult, DataPath, Verb};
use crate::precision::Precision;

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
    /// Longest message of the eager protocol in non-blocking sends.
    pub eager_limit: u32,
    /// Longest message of the eager protocol in blocking sends.
    pub blocking_eager_limit: u32,
    /// Rate of the eager protocol's copies.
    pub copy_rate: BytesPerSecond,
    /// Longest eager message that the sender copies.
    pub sender_copy_limit: u32,
    /// Bytes of a buffer: longer eager messages are sent in fragments.
    pub fragment: u32,
    /// Rate at which the receiver copies fragments.
    pub fragment_copy_rate: BytesPerSecond,
}

/// An MPI library with its transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MpiLibrary {
    /// Open MPI or MPICH over UCX, also as part of HPC-X.
    #[default]
    Ucx,
    /// MVAPICH2 over verbs.
    Mvapich2,
    /// Open MPI over verbs (`openib`), before UCX.
    OpenIb,
}

impl MpiLibrary {
    /// First part of its parameters' names.
    fn prefix(self) -> &'static str {
        match self {
            MpiLibrary::Ucx => "mpi-ucx",
            MpiLibrary::Mvapich2 => "mpi-mvapich2",
            MpiLibrary::OpenIb => "mpi-openib",
        }
    }
}

impl Mpi {
    /// Reads a library's parameters.
    #[must_use]
    pub fn new(p: &Parameters, library: MpiLibrary) -> Mpi {
        let name = |what: &str| format!("{}.{what}", library.prefix());
        Mpi {
            overhead: p.nanos(&name("overhead")),
            eager_limit: p.count(&name("eager")),
            blocking_eager_limit: p.count(&name("eager.blocking")),
            copy_rate: p.gigabytes(&name("copy.rate")),
            sender_copy_limit: p.count(&name("sender.copy")),
            fragment: p.count(&name("fragment")),
            fragment_copy_rate: p.gigabytes(&name("fragment.copy.rate")),
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
/// A fragment of an eager message that is not its last.
const FRAGMENT: u16 = 6;

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
    /// Messages per round of a bandwidth test.
    window: u32,
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
        let copied = if self.is_eager(label) && self.size <= self.mpi.sender_copy_limit {
            self.payload(label)
        } else {
            0
        };
        context.send(self.sending, Packet::new(part(label), copied, u64::from(label)));
    }

    fn is_eager(&self, label: u16) -> bool {
        matches!(label, EAGER | FRAGMENT)
    }

    /// Payload bytes of a network message.
    fn payload(&self, label: u16) -> u32 {
        match label {
            FRAGMENT => self.mpi.fragment,
            EAGER => match self.size % self.mpi.fragment {
                0 => self.size.min(self.mpi.fragment),
                last => last,
            },
            PAYLOAD => self.size,
            REPLY => REPLY_SIZE,
            _ => RENDEZVOUS_HEADER,
        }
    }

    /// Bytes of the receiver's copy, scaled to the rate of unfragmented messages.
    fn received_copy(&self, label: u16) -> u32 {
        let bytes = self.payload(label);
        if self.size <= self.mpi.fragment {
            return bytes;
        }
        (f64::from(bytes) * self.mpi.copy_rate.0 / self.mpi.fragment_copy_rate.0).round() as u32
    }

    /// Starts one message of the test.
    fn send_payload(&self, context: &mut Context<'_>) {
        // `osu_latency` sends blocking, the bandwidth tests do not.
        let limit = match self.test {
            OsuTest::Latency => self.mpi.blocking_eager_limit,
            OsuTest::Bandwidth | OsuTest::Bidirectional => self.mpi.eager_limit,
        };
        if self.size > limit {
            self.send(RTS, context);
            return;
        }
        let fragments = self.size.div_ceil(self.mpi.fragment).max(1);
        (1..fragments).for_each(|_| self.send(FRAGMENT, context));
        self.send(EAGER, context);
    }

    fn begin_round(&mut self, context: &mut Context<'_>) {
        (self.received, self.sent) = (0, 0);
        let count = match (self.test, self.first) {
            (OsuTest::Latency, true) => 1,
            (OsuTest::Bandwidth, true) | (OsuTest::Bidirectional, _) => self.window,
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
            (OsuTest::Bandwidth, false) if self.received == self.window => {
                self.received = 0;
                self.send(REPLY, context);
            }
            (OsuTest::Bidirectional, _) if self.received >= self.window && self.sent == self.window => {
                // The peer may be one round ahead: its messages count for the next round.
                let ahead = self.received - self.window;
                self.end_round(context);
                self.received = ahead;
            }
            _ => {}
        }
    }
}

/// Kind of a processor step: it selects the library's time.
fn part(label: u16) -> u16 {
    u16::from(label == FRAGMENT)
}

impl Endpoint for Rank {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        let what = packet.tag as u16;
        match (port, what) {
            (FROM_ADAPTER, _) if packet.kind == RECEIVED => {
                let label = label(&packet);
                let copied = if self.is_eager(label) { self.received_copy(label) } else { 0 };
                context.send(self.receiving, Packet::new(part(label), copied, u64::from(label)));
                return;
            }
            (SEND_DONE, _) => {
                context.send(self.post, message(self.payload(what), what, self.max_inline));
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
fn run(
    precision: Precision,
    path: &DataPath,
    mpi: &Mpi,
    test: OsuTest,
    size: u32,
) -> (Picos, BandwidthResult) {
    let mut simulation = Simulation::new(17);
    let ids = [simulation.reserve_endpoint(), simulation.reserve_endpoint()];
    let posts = connect(&mut simulation, path, Verb::Send, ids);
    let is_long = test != OsuTest::Latency && size >= 1 << 16;
    let rounds = if is_long { precision.pick(2, 1) } else { precision.pick(8, 4) };
    let window = if is_long { precision.pick(WINDOW, WINDOW / 8) } else { WINDOW };
    for (i, (&id, post)) in ids.iter().zip(posts).enumerate() {
        let name = ["client", "server"][i];
        // Only the last part of a message takes the library's time; at this rate, bytes are copies.
        let overhead = [(mpi.overhead.seconds() * mpi.copy_rate.0).round() as u32, 0, 0, 0];
        let core = Channel { overhead, ..Channel::new(format!("{name} MPI"), mpi.copy_rate) };
        let core = simulation.add_channel(core);
        let (received, sent) = (simulation.port(id, RECEIVE_DONE), simulation.port(id, SEND_DONE));
        let rank = Rank {
            test,
            first: i == 0,
            size,
            mpi: *mpi,
            rounds,
            window,
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
        OsuTest::Bandwidth => window,
        OsuTest::Bidirectional => 2 * window,
    };
    let bytes = f64::from(messages) * f64::from(size);
    let rate = BytesPerSecond(bytes / time.seconds().max(1e-12));
    (time, BandwidthResult { rate, channels: simulation.channel_reports().collect() })
}

/// `osu_latency`.
#[must_use]
pub fn latency(path: &DataPath, mpi: &Mpi, size: u32) -> Picos {
    Picos(run(Precision::Full, path, mpi, OsuTest::Latency, size).0.0 / 2)
}

/// `osu_bw`; `osu_bibw` if `both`.
#[must_use]
pub fn bandwidth(path: &DataPath, mpi: &Mpi, size: u32, both: bool) -> BandwidthResult {
    bandwidth_at(Precision::Full, path, mpi, size, both)
}

/// [`bandwidth`] of a longer or shorter run.
#[must_use]
pub fn bandwidth_at(
    precision: Precision,
    path: &DataPath,
    mpi: &Mpi,
    size: u32,
    both: bool,
) -> BandwidthResult {
    let test = if both { OsuTest::Bidirectional } else { OsuTest::Bandwidth };
    run(precision, path, mpi, test, size).1
}
