//! `millstream bench`.

mod evb;
mod scale;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use millstream_bench::lean::{self, Loop};
use millstream_bench::{Table, verbs};

use crate::args::{BenchOptions, BenchWhat, LeanOptions};
use crate::run::library_dir;

pub(crate) fn run(options: &BenchOptions) -> Result<ExitCode, Box<dyn Error>> {
    let (name, table) = match &options.what {
        BenchWhat::Verbs { rounds } => {
            ("verbs", verbs::run(&std::env::current_exe()?, &library_dir()?, *rounds)?)
        }
        BenchWhat::Evb { rounds, seconds } => ("evb", evb::run(&options.out, *rounds, *seconds)?),
        BenchWhat::Stencil { side, rounds, python } => {
            ("stencil", stencil(&options.out, *side, *rounds, python.as_deref())?)
        }
        BenchWhat::Scale { rounds } => ("scale", scale::run(*rounds)?),
        BenchWhat::Lean(options) => return lean(options).map(|()| ExitCode::SUCCESS),
        BenchWhat::ScaleClient { address, pairs } => {
            return scale::client(address, *pairs).map(|()| ExitCode::SUCCESS);
        }
    };
    print!("{table}");
    let path = options.out.join(format!("{name}.jsonl"));
    table.write(&path)?;
    println!("written to {}", path.display());
    Ok(ExitCode::SUCCESS)
}

fn lean(options: &LeanOptions) -> Result<(), Box<dyn Error>> {
    let LeanOptions { operation, size, list, inline, port, .. } = *options;
    let what = Loop { operation, size, list, inline };
    match &options.host {
        None => lean::serve(port, &what),
        Some(host) => lean::measure(host, port, &what),
    }
}

fn stencil(
    out: &Path,
    side: usize,
    rounds: usize,
    python: Option<&Path>,
) -> Result<Table, millstream_bench::stencil::StencilError> {
    let python = python.map(Path::to_owned).or_else(|| millstream_bench::stencil::python_in(out));
    let folder = out.join("stencil");
    let (table, notes) =
        millstream_bench::stencil::run(&millstream_bench::stencil::Options { side, rounds, folder, python })?;
    notes.iter().for_each(|note| println!("{note}"));
    Ok(table)
}
