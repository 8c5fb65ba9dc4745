//! `millstream bench`.

mod evb;
mod scale;

use std::error::Error;
use std::process::ExitCode;

use crate::args::{BenchOptions, BenchWhat};
use crate::run::library_dir;

pub(crate) fn run(options: &BenchOptions) -> Result<ExitCode, Box<dyn Error>> {
    let (name, table) = match &options.what {
        BenchWhat::Verbs { rounds } => ("verbs", millstream_bench::verbs::run(&library_dir()?, *rounds)?),
        BenchWhat::Evb { rounds, seconds } => ("evb", evb::run(&options.out, *rounds, *seconds)?),
        BenchWhat::Scale { rounds } => ("scale", scale::run(*rounds)?),
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
