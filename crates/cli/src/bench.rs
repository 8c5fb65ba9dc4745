//! `millstream bench`: the command line of the benchmarks in `millstream-bench`.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use millstream_bench::results::Results;
use millstream_bench::stencil::{self, jobs, python_in};
use millstream_bench::verbs::raw_verbs::{self, RawVerbsOptions};
use millstream_bench::wire::raw_udp::{self, SendMode};
use millstream_bench::{
    bfs, card, evb, evb_load, evb_storage, faults, gpu, model, mpi, neurons, proto, report, scale, spin,
    torus, verbs, wire,
};

use crate::args::bench::{BenchCommand, BenchOptions, RawUdpOptions, RawUdpRole, RawVerbsArguments};
use crate::demo::find_data;
use crate::output::{print, print_line};
use crate::run::library_dir;

pub(crate) fn run(options: BenchOptions) -> Result<ExitCode, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let BenchOptions { command, out } = options;
    let (mut notes, mut selected) = (Vec::new(), Vec::new());
    let table = match command {
        BenchCommand::Verbs { rounds } => verbs::run(&program, &library_dir()?, rounds.rounds)?,
        BenchCommand::Scale { rounds } => scale::run(&program, rounds.rounds)?,
        BenchCommand::Wire { rounds, mtu: mtus, only } => {
            selected.clone_from(&only);
            let library_dir = library_dir()?;
            let options = wire::Options { program, library_dir, rounds: rounds.rounds, mtus, only };
            wire::run(&options)?
        }
        BenchCommand::Evb { rounds, seconds } => {
            let packed = find_data().ok_or("data/sst1m is neither here nor above the program")?;
            evb::run(&program, &packed, &out, rounds.rounds, seconds)?
        }
        BenchCommand::Faults { rounds, only, document } => {
            let table = faults::run(&program, &out, &only, rounds, document.as_deref())?;
            selected = only;
            table
        }
        BenchCommand::EvbLoad { rounds, seconds } => evb_load::run(&program, &out, rounds.rounds, seconds)?,
        BenchCommand::EvbStorage { rounds, megabytes } => {
            evb_storage::run(&program, &out, rounds.rounds, megabytes)?
        }
        BenchCommand::EvbEndurance { seconds } => {
            let packed = find_data().ok_or("data/sst1m is neither here nor above the program")?;
            evb::endurance::run(&program, &packed, &out, seconds)?
        }
        BenchCommand::Card { rounds, only } => {
            let table = card::run(&program, rounds.rounds, &only)?;
            selected = only;
            table
        }
        BenchCommand::Gpu { rounds, memory_kind } => {
            let packed = find_data().ok_or("data/sst1m is neither here nor above the program")?;
            gpu::run(&program, &packed, &out, &memory_kind.to_string(), rounds.rounds)?
        }
        BenchCommand::Mpi { rounds, seconds } => {
            let (table, remarks) = mpi::run(&program, &library_dir()?, &out, rounds.rounds, seconds)?;
            notes = remarks;
            table
        }
        BenchCommand::Stencil { rounds, grid, python } => {
            let (folder, python) = (out.join("stencil"), python.or_else(|| python_in(&out)));
            let options = stencil::Options { side: grid.side, rounds: rounds.rounds, folder, python };
            stencil::run(&options)?
        }
        BenchCommand::StencilJobs { rounds, grid } => jobs::run(&program, grid.side as u64, rounds.rounds)?,
        BenchCommand::Spin { rounds, side, sweeps } => {
            let folder = out.join("spin");
            spin::run(&spin::Options { side, sweeps, rounds: rounds.rounds, folder })?
        }
        BenchCommand::Neurons { rounds, columns, duration, python } => {
            let (folder, python) = (out.join("neurons"), python.or_else(|| python_in(&out)));
            let options =
                neurons::Options { columns, steps: duration, rounds: rounds.rounds, folder, python };
            neurons::run(&options)?
        }
        BenchCommand::Bfs { rounds, scale, roots, python } => {
            let (folder, python) = (out.join("bfs"), python.or_else(|| python_in(&out)));
            let options =
                bfs::Options { scale, roots: roots as usize, rounds: rounds.rounds, folder, python };
            bfs::run(&options)?
        }
        BenchCommand::Proto { rounds } => proto::run(rounds.rounds),
        BenchCommand::Model { rounds } => model::run(&program, &out, rounds.rounds)?,
        BenchCommand::Torus { rounds } => {
            let device = std::env::var(millstream_rdma::loader::ENV_DEVICE).ok();
            let options = torus::Options { program, device, folder: out.clone(), rounds: rounds.rounds };
            let (table, remarks) = torus::run(&options)?;
            notes = remarks;
            table
        }
        BenchCommand::TorusClient { results, traffic, serve_outside } => {
            return torus::client::run(results.as_deref(), traffic, serve_outside)
                .map(|()| ExitCode::SUCCESS);
        }
        BenchCommand::Report { results, document, readme } => {
            for written in report::update(&out, &results, &document, &readme)? {
                print_line!("{}", written.display())?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        BenchCommand::RawUdp(options) => return raw_udp(&options).map(|()| ExitCode::SUCCESS),
        BenchCommand::RawVerbs(options) => return raw_verbs(&options).map(|()| ExitCode::SUCCESS),
        BenchCommand::ModelCase { case, size, messages, bytes } => {
            model::run_case_here(case, size, messages, bytes);
            return Ok(ExitCode::SUCCESS);
        }
        BenchCommand::ScaleRegistration { size } => {
            return scale::registration(&program, size).map(|()| ExitCode::SUCCESS);
        }
        BenchCommand::ScaleReader { address, size } => {
            return scale::reader(&address, size).map(|()| ExitCode::SUCCESS);
        }
        BenchCommand::ScaleClient { address, pairs } => {
            return scale::client(&address, pairs).map(|()| ExitCode::SUCCESS);
        }
    };
    // A tool of the wire benchmark that fails is a failure of the command.
    let has_failed = table.benchmark().name == wire::BENCHMARK.name && !table.unmeasured().is_empty();
    let printed =
        print(format_args!("{table}")).and_then(|()| notes.iter().try_for_each(|note| print_line!("{note}")));
    let path = out.join(format!("{}.jsonl", table.benchmark().name));
    Results::of(&table, &selected).write(&path)?;
    printed?;
    print_line!("written to {}", path.display())?;
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One side of the raw UDP link. A client prints `result`, followed by GB/s or µs.
fn raw_udp(options: &RawUdpOptions) -> Result<(), Box<dyn Error>> {
    let RawUdpOptions { role, payload, segmentation_offload, icrc, from, to } = *options;
    let mode = SendMode { payload, segmentation_offload, icrc };
    match role {
        RawUdpRole::Serve => raw_udp::serve(mode)?,
        RawUdpRole::Bandwidth => {
            println!("result {}", raw_udp::bandwidth(from, to, mode, Duration::from_secs(1))? / 1e9);
        }
        RawUdpRole::Latency => println!("result {}", raw_udp::latency(from, to, mode, 20_000)? * 1e6),
    }
    Ok(())
}

fn raw_verbs(arguments: &RawVerbsArguments) -> Result<(), Box<dyn Error>> {
    let RawVerbsArguments { operation, size, post_list, inline, private, port, .. } = *arguments;
    let options = RawVerbsOptions { operation, size, post_list, inline, private };
    match &arguments.host {
        None => raw_verbs::serve(port, &options),
        Some(host) => raw_verbs::measure(host, port, &options),
    }
}
