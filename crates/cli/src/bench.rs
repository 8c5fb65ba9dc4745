//! `millstream bench`.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use millstream_bench::stencil::jobs;
use millstream_bench::verbs::raw_verbs::{self, Loop};
use millstream_bench::wire::raw_udp::{self, Manner};
use millstream_bench::{card, evb, model, scale, verbs, wire};

use crate::args::{BenchOptions, BenchWhat, Datagrams, DatagramsOptions, LeanOptions};
use crate::demo::find_data;
use crate::run::library_dir;

pub(crate) fn run(options: &BenchOptions) -> Result<ExitCode, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let mut failed = Vec::new();
    let (name, table) = match &options.what {
        BenchWhat::Verbs { rounds } => ("verbs", verbs::run(&program, &library_dir()?, *rounds)?),
        BenchWhat::Evb { rounds, seconds } => {
            let packed = find_data().ok_or("no data/sst1m here or above the program")?;
            ("evb", evb::run(&program, &packed, &options.out, *rounds, *seconds)?)
        }
        BenchWhat::Stencil { side, rounds, jobs: true, .. } => {
            ("stencil-jobs", jobs::run_jobs(&program, *side as u64, *rounds)?)
        }
        BenchWhat::Stencil { side, rounds, python, .. } => {
            ("stencil", jobs::run(&program, &options.out, *side, *rounds, python.as_deref())?)
        }
        BenchWhat::Card { rounds, only } => ("card", card::run(&program, *rounds, only)?),
        BenchWhat::Model { rounds } => ("model", model::run(&program, &options.out, *rounds)?),
        BenchWhat::ModelCase { what, size, messages, bytes } => {
            model::case(*what, *size, *messages, *bytes);
            return Ok(ExitCode::SUCCESS);
        }
        BenchWhat::Scale { rounds } => ("scale", scale::run(&program, *rounds)?),
        BenchWhat::Wire { rounds, mtu, only } => {
            let (mtus, only) = (mtu.clone(), only.clone());
            let options = wire::Options { program, library_dir: library_dir()?, rounds: *rounds, mtus, only };
            let (table, lacks) = wire::run(&options)?;
            failed = lacks;
            ("wire", table)
        }
        BenchWhat::Datagrams(options) => return datagrams(options).map(|()| ExitCode::SUCCESS),
        BenchWhat::Lean(options) => return lean(options).map(|()| ExitCode::SUCCESS),
        BenchWhat::ScaleClient { address, pairs } => {
            return scale::client(address, *pairs).map(|()| ExitCode::SUCCESS);
        }
    };
    print!("{table}");
    let path = options.out.join(format!("{name}.jsonl"));
    table.write(&path)?;
    println!("written to {}", path.display());
    for row in &failed {
        eprintln!("not measured: {row}");
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One side of the bare link; a result is a line that starts with that word.
fn datagrams(options: &DatagramsOptions) -> Result<(), Box<dyn Error>> {
    let DatagramsOptions { what, payload, offload, seal, from, to } = *options;
    let manner = Manner { payload, offload, seal };
    match what {
        Datagrams::Serve => raw_udp::serve(manner)?,
        Datagrams::Bandwidth => {
            println!("result {}", raw_udp::bandwidth(from, to, manner, Duration::from_secs(1))? / 1e9);
        }
        Datagrams::Latency => println!("result {}", raw_udp::latency(from, to, manner, 20_000)? * 1e6),
    }
    Ok(())
}

fn lean(options: &LeanOptions) -> Result<(), Box<dyn Error>> {
    let LeanOptions { operation, size, list, inline, private, port, .. } = *options;
    let what = Loop { operation, size, list, inline, private };
    match &options.host {
        None => raw_verbs::serve(port, &what),
        Some(host) => raw_verbs::measure(host, port, &what),
    }
}
