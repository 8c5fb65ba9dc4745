//! `millstream torus simulate`: all nodes on one thread.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use millstream_fabric::Notification;
use millstream_torus::engine::{EngineOptions, Event, Operation, Request, Span};
use millstream_torus::in_process::InProcessTorus;
use millstream_torus::memory::Memory;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::Port;

use super::TorusSimulateOptions;

pub(super) fn run(options: &TorusSimulateOptions) -> Result<ExitCode, Box<dyn Error>> {
    let torus = options.dimensions;
    let nodes = torus.nodes();
    let before = resident_bytes();
    let mut network = InProcessTorus::new(torus, options.engine.options(EngineOptions::default()))?;
    let source = memory(options.bytes)?;
    let mut regions = Vec::new();
    for engine in &mut network.nodes {
        regions.push(engine.regions.add(memory(options.bytes)?));
    }
    let start = Instant::now();
    for round in 0..options.rounds {
        for (here, from) in network.nodes.iter_mut().zip(torus.all()) {
            for (to, &region) in torus.all().zip(&regions).filter(|&(to, _)| to != from) {
                let source = Span { memory: Arc::clone(&source), offset: 0 };
                let (length, notification) = (options.bytes, Notification::None);
                let request = Request::Put { region, offset: 0, source, length, notification };
                here.post(Port::Local, Operation { target: to, request, cookie: round });
            }
        }
        settle(&mut network, start)?;
    }
    let elapsed = start.elapsed();
    let counters: Vec<_> = network.nodes.iter().map(TrafficCounters::of).collect();
    let total = TrafficCounters::total(&counters);
    if !total.is_balanced() || total.on_links() != 0 {
        return Err(format!("the packet counters do not balance: {total}").into());
    }
    let hops = total.transmitted as f64 / elapsed.as_secs_f64();
    let memory = resident_bytes().saturating_sub(before) / nodes as u64;
    if options.json {
        let report = serde_json::json!({
            "dimensions": torus.to_string(),
            "nodes": nodes,
            "seconds": elapsed.as_secs_f64(),
            "packets_per_second": hops,
            "memory_bytes_per_node": memory,
            "counters": total,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{torus}: {total}");
        println!(
            "{nodes} nodes on one thread: {:.2} million packets per second over links, {} KiB of memory a node",
            hops / 1e6,
            memory >> 10
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn memory(bytes: u32) -> std::io::Result<Arc<Memory>> {
    Ok(Arc::new(Memory::allocate("millstream-torus-region", bytes.max(1) as usize, None)?.0))
}

/// Runs until all operations have completed.
fn settle(network: &mut InProcessTorus, start: Instant) -> Result<(), String> {
    loop {
        let now = millstream_quantity::Instant::from_nanos(start.elapsed().as_nanos() as u64);
        let moved = network.step(now);
        for engine in &mut network.nodes {
            while let Some(event) = engine.poll_event(Port::Local) {
                if let Event::Completed { failure: Some(failure), .. } = event {
                    return Err(format!("{}: a put failed: {failure:?}", engine.here()));
                }
            }
        }
        if !moved && network.nodes.iter().all(|engine| engine.is_idle()) {
            return Ok(());
        }
    }
}

/// Resident memory of this process; 0 where `/proc` is not available.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
