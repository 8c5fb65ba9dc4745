//! pcie-bench: DMA read, write and read/write bandwidth, and DMA read latency (Neugebauer et al., SIGCOMM 2018).
//!
//! ```text
//!   workers ─ one operation each ─► DMA engine (a stage per packet) ─► upstream link ─► root complex ─► memory
//!      ▲                                                                                      │
//!      └──── internal bus, when the operation is complete ◄─ downstream link ◄─ completions ──┘
//! ```

use crate::component::completer::{Completer, CompleterTiming, read_tag};
use crate::component::pcie::{self, MEMORY_READ, MEMORY_WRITE};
use crate::engine::{
    BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Pcie, Picos, Route, Simulation,
};
use millstream_site::schema::PcieLink;
use std::collections::VecDeque;

/// A bandwidth test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaTest {
    /// `BW_DMA_RD`: bytes read per time.
    Read,
    /// `BW_DMA_WR`: bytes written per time.
    Write,
    /// `BW_DMA_RW`: alternating reads and writes; bytes of one direction per time.
    ReadWrite,
}

/// DMA engine of the adapter under test.
#[derive(Clone, Copy, Debug)]
pub struct DmaEngine {
    /// Operations in flight.
    pub workers: u32,
    /// Read requests in flight (PCIe tags).
    pub tags: u32,
    /// Issue time of a read request.
    pub read_issue: Picos,
    /// Issue time of a write packet.
    pub write_issue: Picos,
    /// Random share of the issue times, 0 to 1.
    pub variation: f64,
    /// Payload bytes buffered between engine and link.
    pub fifo: u64,
    /// Rate at which the engine loads the payload of a write.
    pub write_rate: BytesPerSecond,
    /// Rate of the bus to the adapter's memory, shared by both directions.
    pub internal: BytesPerSecond,
    /// Time per operation outside link and host: start and completion handling.
    pub overhead: Picos,
}

/// The host under test.
#[derive(Clone, Copy, Debug)]
pub struct DmaHost {
    /// Root complex and memory.
    pub memory: CompleterTiming,
    /// Rate from the root complex to memory.
    pub write_rate: BytesPerSecond,
    /// Mean time of page walks per write; those of reads are in `memory`.
    pub write_walk: Picos,
    /// Latency of one link direction.
    pub link_latency: Picos,
    /// Share of the link rate that DLLPs leave.
    pub efficiency: f64,
}

/// Posted payload bytes that the root complex buffers.
const WRITE_BUFFER: u64 = 4096;

struct Workers {
    test: DmaTest,
    size: u32,
    request: u32,
    payload: u32,
    tags: u32,
    operations: u64,
    reading: Route<Pcie>,
    writing: Route<Pcie>,
    internal: Route<Internal>,
    reply: Route<Pcie>,
    overhead: Picos,
    tags_used: u32,
    /// Requests that wait for tags: worker and length.
    waiting: VecDeque<(u32, u32)>,
    /// Bytes outstanding per worker.
    missing: Vec<u32>,
    writes_next: Vec<bool>,
    done: u64,
    bytes: u64,
    measure_start: Picos,
    bytes_at_start: u64,
    measure_end: Picos,
}

const FROM_LINK: u16 = 0;
const FROM_INTERNAL: u16 = 1;
const WRITTEN: u16 = 2;

/// Lengths of a transfer's packets of at most `most` bytes.
fn split(size: u32, most: u32) -> impl Iterator<Item = u32> {
    (0..size.div_ceil(most)).map(move |i| most.min(size - i * most))
}

impl Workers {
    fn begin(&mut self, worker: u32, context: &mut Context<'_>) {
        let writes_next = &mut self.writes_next[worker as usize];
        let write = match self.test {
            DmaTest::Read => false,
            DmaTest::Write => true,
            DmaTest::ReadWrite => *writes_next,
        };
        *writes_next = !*writes_next;
        self.missing[worker as usize] = self.size;
        if write {
            context.send(self.internal, Packet::new(MEMORY_WRITE, self.size, u64::from(worker) << 32));
        } else {
            self.waiting.extend(split(self.size, self.request).map(|length| (worker, length)));
            self.request(context);
        }
    }

    fn request(&mut self, context: &mut Context<'_>) {
        while self.tags_used < self.tags {
            let Some((worker, length)) = self.waiting.pop_front() else { return };
            self.tags_used += 1;
            let packet = Packet::new(MEMORY_READ, 0, read_tag(worker, length)).with_reply(self.reply);
            context.send(self.reading, packet);
        }
    }

    fn complete(&mut self, worker: u32, context: &mut Context<'_>) {
        self.done += 1;
        self.bytes += u64::from(self.size);
        // The first fifth is warm-up.
        if self.done == self.operations / 5 {
            self.measure_start = context.now();
            self.bytes_at_start = self.bytes;
        }
        if self.done >= self.operations {
            self.measure_end = context.now();
            context.stop();
        } else {
            context.set_timer(self.overhead, u64::from(worker));
        }
    }
}

impl Endpoint for Workers {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        let worker = (packet.tag >> 32) as u32;
        if port == FROM_INTERNAL && packet.kind == MEMORY_WRITE {
            for size in split(self.size, self.payload) {
                context.send(self.writing, Packet::new(MEMORY_WRITE, size, packet.tag));
            }
            return;
        }
        if port == FROM_INTERNAL {
            self.complete(worker, context);
            return;
        }
        if port == FROM_LINK && packet.tag & 0xffff_ffff == 0 {
            self.tags_used -= 1;
            self.request(context);
        }
        let missing = &mut self.missing[worker as usize];
        *missing -= packet.size;
        if *missing == 0 {
            if port == WRITTEN {
                self.complete(worker, context);
            } else {
                context.send(self.internal, Packet::new(0, self.size, packet.tag));
            }
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        self.begin(token as u32, context);
    }
}

/// Runs operations; returns their bandwidth and the time of the last completion.
fn run(
    engine: &DmaEngine,
    host: &DmaHost,
    link: &PcieLink,
    test: DmaTest,
    size: u32,
    operations: u64,
) -> (BytesPerSecond, Picos) {
    let mut simulation = Simulation::new(7);
    let fifo = engine.fifo;
    let lanes = pcie::add_link(&mut simulation, "pcie", link, host.efficiency, host.link_latency, fifo);
    let memory = simulation.add_endpoint(Completer::new(host.memory));
    let memory_port = simulation.port(memory, 0);
    let workers = simulation.reserve_endpoint();
    let stage = |name: &str, time: Picos| {
        let random = Picos((time.0 as f64 * engine.variation) as u64);
        Channel::stage(name, time - random).jitter(random)
    };
    let host_writes = simulation.add_channel(
        Channel::new("host writes", host.write_rate).gap(host.write_walk).capacity(WRITE_BUFFER),
    );
    let read_engine = simulation.add_channel(stage("read engine", engine.read_issue));
    let write_engine = simulation
        .add_channel(Channel { rate: engine.write_rate, ..stage("write engine", engine.write_issue) });
    let internal = simulation.add_channel(Channel::new("internal bus", engine.internal));
    let link_port = simulation.port(workers, FROM_LINK);
    let internal_port = simulation.port(workers, FROM_INTERNAL);
    // A posted write is complete when the root complex has accepted it.
    let written_port = simulation.port(workers, WRITTEN);
    let reply = simulation.route(&[lanes.downstream], link_port);
    let code = Workers {
        test,
        size,
        request: link.max_read_request.0,
        payload: link.max_payload.0,
        tags: engine.tags,
        operations,
        reading: simulation.route(&[read_engine, lanes.upstream], memory_port),
        writing: simulation.route(&[write_engine, lanes.upstream, host_writes], written_port),
        internal: simulation.route(&[internal], internal_port),
        reply,
        overhead: engine.overhead,
        tags_used: 0,
        waiting: VecDeque::new(),
        missing: vec![0; engine.workers as usize],
        writes_next: (0..engine.workers).map(|worker| worker % 2 == 1).collect(),
        done: 0,
        bytes: 0,
        measure_start: Picos::ZERO,
        bytes_at_start: 0,
        measure_end: Picos::ZERO,
    };
    simulation.install(workers, code);
    for worker in 0..engine.workers {
        simulation.set_timer(workers, Picos::ZERO, u64::from(worker));
    }
    simulation.run(Picos(u64::MAX));
    let code: &Workers = simulation.get(workers);
    let span = code.measure_end - code.measure_start;
    let both = if test == DmaTest::ReadWrite { 2.0 } else { 1.0 };
    (BytesPerSecond((code.bytes - code.bytes_at_start) as f64 / span.seconds() / both), code.measure_end)
}

/// Bandwidth of a test.
#[must_use]
pub fn bandwidth(
    engine: &DmaEngine,
    host: &DmaHost,
    link: &PcieLink,
    test: DmaTest,
    size: u32,
) -> BytesPerSecond {
    run(engine, host, link, test, size, 3000).0
}

/// `LAT_DMA_RD`: latency of one read, from the worker's start to its completion handling.
#[must_use]
pub fn read_latency(engine: &DmaEngine, host: &DmaHost, link: &PcieLink, size: u32) -> Picos {
    let alone = DmaEngine { workers: 1, variation: 0.0, ..*engine };
    run(&alone, host, link, DmaTest::Read, size, 1).1 + engine.overhead
}
