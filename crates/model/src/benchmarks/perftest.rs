//! perftest: `ib_write_bw`, `ib_read_bw`, `ib_send_bw` and the latency test of each.
//!
//! Definitions of perftest (rows B04 to B07): bandwidth is payload per time between completions at the client, after a
//! warm-up. Latency is half a round trip; that of READ is a full one.

use crate::component::adapter::{COMPLETED, RECEIVED, connect, message};
use crate::engine::{
    BytesPerSecond, Context, Endpoint, EndpointId, Internal, Packet, Picos, Route, Simulation,
};
use crate::path::{BandwidthResult, DataPath, Verb};
use crate::precision::Precision;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Keeps `depth` work requests posted.
    Stream,
    /// Answers each message of the peer.
    PingPong,
    /// Posts one work request at a time.
    Single,
    /// Only receives.
    Silent,
}

struct Program {
    role: Role,
    size: u32,
    max_inline: u32,
    depth: u32,
    messages: u32,
    post: Route<Internal>,
    posted: u32,
    done: u32,
    begin: Picos,
    end: Picos,
    starts: bool,
}

impl Program {
    fn post(&mut self, context: &mut Context<'_>) {
        self.posted += 1;
        context.send(self.post, message(self.size, 0, self.max_inline));
    }

    fn count(&mut self, context: &mut Context<'_>) {
        self.done += 1;
        if self.done == self.messages / 4 {
            self.begin = context.now();
        }
        if self.done == self.messages {
            self.end = context.now();
            if self.starts {
                context.stop();
            }
        }
    }

    /// Messages between `begin` and `end`.
    fn counted(&self) -> u32 {
        self.messages - self.messages / 4
    }
}

impl Endpoint for Program {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        match (self.role, packet.kind) {
            (Role::Stream, COMPLETED) => {
                self.count(context);
                // Continues after its own end, so that the other direction has opposing traffic until its
                // end.
                self.post(context);
            }
            (Role::PingPong, RECEIVED) => {
                self.count(context);
                self.post(context);
            }
            (Role::Single, COMPLETED) => {
                self.count(context);
                self.post(context);
            }
            _ => {}
        }
    }

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        let first = match self.role {
            Role::Stream => self.depth,
            Role::PingPong | Role::Single => u32::from(self.starts),
            Role::Silent => 0,
        };
        (0..first).for_each(|_| self.post(context));
    }
}

struct Built {
    simulation: Simulation,
    programs: [EndpointId; 2],
}

fn build(path: &DataPath, verb: Verb, size: u32, depth: u32, messages: u32, roles: [Role; 2]) -> Built {
    let mut simulation = Simulation::new(5);
    let programs = [simulation.reserve_endpoint(), simulation.reserve_endpoint()];
    let posts = connect(&mut simulation, path, verb, programs);
    for (i, (&id, post)) in programs.iter().zip(posts).enumerate() {
        let program = Program {
            role: roles[i],
            size,
            // READs carry no payload in their work requests; perftest's bandwidth tests send none inline.
            max_inline: if verb == Verb::Read || depth > 1 { 0 } else { path.ends[i].adapter.max_inline },
            depth,
            messages,
            post,
            posted: 0,
            done: 0,
            begin: Picos::ZERO,
            end: Picos::ZERO,
            starts: i == 0,
        };
        simulation.install(id, program);
        simulation.set_timer(id, Picos::ZERO, 0);
    }
    Built { simulation, programs }
}

/// Bandwidth of `size`-byte messages with `depth` work requests posted, from client to server; READ moves data from
/// server to client. `both` adds the opposite direction.
#[must_use]
pub fn bandwidth(path: &DataPath, verb: Verb, size: u32, depth: u32, both: bool) -> BandwidthResult {
    bandwidth_at(Precision::Full, path, verb, size, depth, both)
}

/// [`bandwidth`] of a longer or shorter run.
#[must_use]
pub fn bandwidth_at(
    precision: Precision,
    path: &DataPath,
    verb: Verb,
    size: u32,
    depth: u32,
    both: bool,
) -> BandwidthResult {
    // The first quarter is warm-up. It fills the adapter's receive buffer four times, unless messages are so short
    // that the message rate is the limit.
    let buffered = (path.ends[1].adapter.rx_buffer.min(1 << 20) * 16) as u32 / size.max(1);
    let [bytes, least, most, longest] = precision.pick([8 << 20, 24, 400, 8192], [2 << 20, 8, 100, 1024]);
    let messages = (bytes / size.max(1)).clamp(least, most).max(buffered.min(longest));
    let depth = depth.min(messages / 4);
    let roles = [Role::Stream, if both { Role::Stream } else { Role::Silent }];
    let Built { mut simulation, programs } = build(path, verb, size, depth, messages, roles);
    simulation.run(Picos(u64::MAX));
    let rate = |id: EndpointId| {
        let program: &Program = simulation.get(id);
        let (messages, end) = match program.end {
            Picos::ZERO => (program.done.saturating_sub(program.messages / 4), simulation.now()),
            end => (program.counted(), end),
        };
        let span = (end - program.begin).seconds();
        if span > 0.0 { f64::from(messages) * f64::from(size) / span } else { 0.0 }
    };
    let total = rate(programs[0]) + if both { rate(programs[1]) } else { 0.0 };
    BandwidthResult { rate: BytesPerSecond(total), channels: simulation.channel_reports().collect() }
}

/// Latency: half a round trip; of READ a full one.
#[must_use]
pub fn latency(path: &DataPath, verb: Verb, size: u32) -> Picos {
    latency_at(Precision::Full, path, verb, size)
}

/// [`latency`] of a longer or shorter run.
#[must_use]
pub fn latency_at(precision: Precision, path: &DataPath, verb: Verb, size: u32) -> Picos {
    let roles = if verb == Verb::Read { [Role::Single, Role::Silent] } else { [Role::PingPong; 2] };
    let Built { mut simulation, programs } = build(path, verb, size, 1, precision.pick(8, 4), roles);
    simulation.run(Picos(u64::MAX));
    let program: &Program = simulation.get(programs[0]);
    let round = Picos((program.end - program.begin).0 / u64::from(program.counted()));
    if verb == Verb::Read { round } else { Picos(round.0 / 2) }
}
