//! Benchmarks of the APEnet+ torus adapter: DMA engines, address translation in hardware, GPU endpoints, staging.

use crate::benchmarks::dma::{self, DmaEngine, DmaHost, DmaTest};
use crate::component::completer::CompleterTiming;
use crate::engine::{
    BytesPerSecond, Channel, Context, Endpoint, Internal, Network, Packet, Picos, Simulation,
};
use crate::parameters::Parameters;
use crate::path::host_completer;
use crate::sites::shipped;
use millstream_site::schema::{Generation, PayloadSize, PcieLanes, PcieLink};

/// PCIe Gen2 x8 of the adapter.
const PCIE_LINK: PcieLink = PcieLink {
    generation: Generation(2),
    lanes: PcieLanes(8),
    max_payload: PayloadSize(128),
    max_read_request: PayloadSize(512),
};

/// Payload bytes of a torus packet.
pub const PACKET: u32 = 4096;

/// Sustained rate of one torus channel: the site's data rate less word stuffing, headers and credits.
#[must_use]
pub fn link_rate(p: &Parameters) -> BytesPerSecond {
    BytesPerSecond(
        shipped("apenet-torus").tori[0].rate.0
            * p.get("apenet.payload.efficiency")
            * p.get("apenet.protocol.efficiency"),
    )
}

/// The adapter's DMA read engines. Each reads one packet at a time from a prefetched command queue.
#[must_use]
pub fn dma_engine(engines: u32) -> DmaEngine {
    DmaEngine {
        workers: engines,
        tags: 32,
        read_issue: Picos::from_nanos(8.0),
        write_issue: Picos::from_nanos(8.0),
        variation: 0.0,
        fifo: 1024,
        write_rate: BytesPerSecond(f64::INFINITY),
        internal: BytesPerSecond::gigabytes(64.0),
        overhead: Picos::from_nanos(100.0),
    }
}

/// The host whose memory the engines read.
#[must_use]
pub fn dma_host(p: &Parameters) -> DmaHost {
    DmaHost {
        memory: CompleterTiming {
            read_latency: p.nanos("apenet.read.latency"),
            max_completion: 128,
            ..host_completer(p, "processor")
        },
        write_rate: BytesPerSecond(f64::INFINITY),
        write_walk: Picos::ZERO,
        link_latency: p.nanos("pcie.link.latency"),
        efficiency: p.get("pcie.efficiency"),
    }
}

/// Bandwidth of host memory reads by this number of engines.
#[must_use]
pub fn dma_read_bandwidth(p: &Parameters, engines: u32, size: u32) -> BytesPerSecond {
    dma::bandwidth(&dma_engine(engines), &dma_host(p), &PCIE_LINK, DmaTest::Read, size)
}

/// Relative time saved by a second engine, for messages of many packets. A message of one packet gains nothing.
#[must_use]
pub fn gain_of_two_engines(p: &Parameters) -> f64 {
    1.0 - dma_read_bandwidth(p, 1, PACKET).0 / dma_read_bandwidth(p, 2, PACKET).0
}

struct Sink {
    left: u32,
    end: Picos,
}

impl Endpoint for Sink {
    fn receive(&mut self, _port: u16, _packet: Packet, context: &mut Context<'_>) {
        self.left -= 1;
        if self.left == 0 {
            self.end = context.now();
        }
    }
}

struct Forwarder {
    to: crate::engine::Route<Internal>,
}

impl Endpoint for Forwarder {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        context.return_credits(&packet);
        context.send(self.to, packet);
    }
}

struct Burst {
    to: crate::engine::Route<Network>,
    packets: u32,
    size: u32,
}

impl Endpoint for Burst {
    fn receive(&mut self, _port: u16, _packet: Packet, _context: &mut Context<'_>) {}

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        (0..self.packets).for_each(|i| context.send(self.to, Packet::new(0, self.size, u64::from(i))));
    }
}

/// Bandwidth into a node with this translation time per packet.
#[must_use]
pub fn receive_bandwidth(p: &Parameters, translation: Picos) -> BytesPerSecond {
    receive_bandwidth_of(p, translation, PACKET)
}

/// Bandwidth into a node with this translation time per packet, for packets of `size` bytes.
#[must_use]
pub fn receive_bandwidth_of(p: &Parameters, translation: Picos, size: u32) -> BytesPerSecond {
    const PACKETS: u32 = 500;
    let mut simulation = Simulation::new(1);
    let wire = simulation.add_channel(Channel::new("torus link", link_rate(p)));
    let step = simulation.add_channel(Channel::stage("translation", translation));
    let sink = simulation.add_endpoint(Sink { left: PACKETS, end: Picos::ZERO });
    let landed = simulation.port(sink, 0);
    let to = simulation.route(&[step], landed);
    let forwarder = simulation.add_endpoint(Forwarder { to });
    let port = simulation.bounded_port(forwarder, 0, 40_000);
    let to = simulation.route(&[wire], port);
    let burst = simulation.add_endpoint(Burst { to, packets: PACKETS, size });
    simulation.set_timer(burst, Picos::ZERO, 0);
    simulation.run(Picos(u64::MAX));
    BytesPerSecond(f64::from(PACKETS * size) / simulation.get::<Sink>(sink).end.seconds())
}

/// Relative bandwidth gain of address translation in hardware, for full packets.
#[must_use]
pub fn gain_of_hardware_translation(p: &Parameters) -> f64 {
    // The embedded processor does more than translation for each packet; the hardware table replaces all of
    // this work.
    let software =
        Picos::from_nanos(p.get("apenet.translate.software") / p.get("apenet.processor.utilization"));
    receive_bandwidth(p, p.nanos("apenet.translate.hardware")).0 / receive_bandwidth(p, software).0 - 1.0
}

/// Half a round trip of a small message in µs, by memory kind of source and destination.
#[must_use]
pub fn small_latency(p: &Parameters, from_gpu: bool, to_gpu: bool) -> f64 {
    let extra = |gpu: bool, name: &str| if gpu { p.get(name) } else { 0.0 };
    p.get("apenet.latency")
        + extra(from_gpu, "apenet.gpu.read.extra")
        + extra(to_gpu, "apenet.gpu.write.extra")
}

/// Relative increase of the round trip with GPU memory at both ends.
#[must_use]
pub fn gpu_latency_increase(p: &Parameters) -> f64 {
    small_latency(p, true, true) / small_latency(p, false, false) - 1.0
}

/// Message size in bytes from which staging through host memory and InfiniBand is faster than peer-to-peer.
#[must_use]
pub fn staging_crossover(p: &Parameters) -> f64 {
    let head_start = p.get("staged.latency") - small_latency(p, true, true);
    let slope = 1e6 / p.gigabytes("apenet.gpu.read.rate").0 - 1e6 / p.gigabytes("staged.rate").0;
    (head_start / slope).max(0.0)
}
