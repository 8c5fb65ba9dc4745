//! Intel Memory Latency Checker on memory behind a CXL link: dependent loads of one core, and streams of all cores.

use crate::component::cxl::{self, CxlMemory, DATA, LINE, PARTIAL_WRITE, REQUEST, WRITE};
use crate::engine::{BytesPerSecond, Context, Cxl, Endpoint, Packet, Picos, Route, Simulation};
use crate::path::{BandwidthResult, CoreAccess};
use crate::precision::Precision;

/// A test of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlcTest {
    /// `--idle_latency`: dependent loads, one at a time.
    IdleLatency,
    /// `--max_bandwidth`, all reads.
    Reads,
    /// `--max_bandwidth`, two reads to a write.
    ReadsAndWrites,
    /// `--max_bandwidth`, writes that bypass the caches.
    Writes,
}

impl MlcTest {
    /// Reads of three accesses.
    fn reads_of_three(self) -> u32 {
        match self {
            MlcTest::IdleLatency | MlcTest::Reads => 3,
            MlcTest::ReadsAndWrites => 2,
            MlcTest::Writes => 0,
        }
    }
}

/// All cores: each finished access starts the next one.
struct Cores {
    test: MlcTest,
    size: u32,
    /// Both ways between a core and the CXL port, which each access takes before it enters the link.
    latency: Picos,
    m2s: Route<Cxl>,
    s2m: Route<Cxl>,
    lines: u32,
    started: u32,
    done: u32,
    accesses: u32,
    begin: Picos,
    end: Picos,
}

impl Endpoint for Cores {
    fn receive(&mut self, _port: u16, _packet: Packet, context: &mut Context<'_>) {
        self.done += 1;
        if self.done == self.accesses / 4 {
            self.begin = context.now();
        }
        if self.done == self.accesses {
            self.end = context.now();
            context.stop();
        }
        context.set_timer(self.latency, NEXT);
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        let count = if token == FIRST { self.lines } else { 1 };
        for _ in 0..count {
            let is_read = self.started % 3 < self.test.reads_of_three();
            self.started += 1;
            let kind = match is_read {
                true => REQUEST,
                false if self.size < LINE => PARTIAL_WRITE,
                false => WRITE,
            };
            context.send(self.m2s, Packet::new(kind, 0, u64::from(DATA)).with_reply(self.s2m));
        }
    }
}

const FIRST: u64 = 0;
const NEXT: u64 = 1;

fn run(access: &CoreAccess, test: MlcTest, size: u32, lines: u32, accesses: u32) -> (Picos, Simulation) {
    let mut simulation = Simulation::new(11);
    let cores = simulation.reserve_endpoint();
    let links = cxl::add_links(&mut simulation, &format!("{} CXL", access.name), &access.timing);
    let memory = simulation.add_endpoint(CxlMemory::new(access.timing.clone()));
    let [to_memory, to_cores] = [simulation.port(memory, 0), simulation.port(cores, 0)];
    let m2s = simulation.route(&links.m2s, to_memory);
    let s2m = simulation.route(&links.s2m, to_cores);
    let program = Cores {
        test,
        size,
        latency: access.core_latency,
        m2s,
        s2m,
        lines,
        started: 0,
        done: 0,
        accesses,
        begin: Picos::ZERO,
        end: Picos::ZERO,
    };
    simulation.install(cores, program);
    simulation.set_timer(cores, Picos::ZERO, FIRST);
    simulation.run(Picos(u64::MAX));
    let program: &Cores = simulation.get(cores);
    (program.end - program.begin, simulation)
}

/// Bandwidth of all cores: payload of both directions per time. Accesses of less than a line take a whole one on the link.
#[must_use]
pub fn bandwidth(precision: Precision, access: &CoreAccess, test: MlcTest, size: u32) -> BandwidthResult {
    let accesses = precision.pick(24_000, 6_000).max(access.lines * 8);
    let (span, simulation) = run(access, test, size, access.lines, accesses);
    let bytes = f64::from(accesses - accesses / 4) * f64::from(size.min(LINE));
    BandwidthResult {
        rate: BytesPerSecond(bytes / span.seconds()),
        channels: simulation.channel_reports().collect(),
    }
}

/// Latency of a load.
#[must_use]
pub fn idle_latency(access: &CoreAccess) -> Picos {
    const LOADS: u32 = 8;
    let (span, _) = run(access, MlcTest::IdleLatency, LINE, 1, LOADS);
    Picos(span.0 / u64::from(LOADS - LOADS / 4))
}
