//! `millstream torus spin`.

use std::error::Error;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use millstream_application::time_table;
use millstream_spin::Lattice;
use millstream_spin::glass::{GlassOptions, GlassReport, GlassRun, picture};

use super::application::{self, ApplicationArguments, NodeMemory};

#[derive(Debug, Args)]
pub(crate) struct TorusSpinOptions {
    /// Sites: one number for a cube, or XxYxZ; each even
    #[arg(long, default_value = "64", value_name = "SITES")]
    lattice: LatticeSize,
    /// Sweeps
    #[arg(long, default_value_t = 100)]
    sweeps: u64,
    /// Sweeps between exchanges of halos
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    depth: u16,
    /// Type of the spins
    #[arg(long, value_enum, default_value_t = Element::F32)]
    element: Element,
    /// Seed of spins and couplings
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads of each node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Sweeps between measurements of energy and order
    #[arg(long, default_value_t = 10, value_name = "SWEEPS", value_parser = clap::value_parser!(u64).range(1..))]
    measure_every: u64,
    /// Sweeps between checkpoints
    #[arg(long, default_value_t = 100, value_name = "SWEEPS", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    #[command(flatten)]
    application: ApplicationArguments,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Element {
    F32,
    F64,
}

/// Sites on each axis.
#[derive(Clone, Copy, Debug)]
struct LatticeSize([usize; 3]);

impl FromStr for LatticeSize {
    type Err = String;

    fn from_str(text: &str) -> Result<LatticeSize, String> {
        let numbers: Result<Vec<usize>, _> = text.split(['x', '×']).map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[side]) => Ok(LatticeSize([side; 3])),
            Ok(&[x, y, z]) => Ok(LatticeSize([x, y, z])),
            _ => Err("expected one number or XxYxZ, for example 128 or 128x128x64".to_owned()),
        }
    }
}

pub(super) fn run(options: &TorusSpinOptions) -> Result<ExitCode, Box<dyn Error>> {
    let arguments = &options.application;
    let glass = GlassOptions {
        lattice: Lattice::new(options.lattice.0, options.seed)?,
        sweeps: options.sweeps,
        depth: options.depth.into(),
        threads: options.threads.into(),
        measure_every: options.measure_every,
        checkpoint: arguments.checkpoint.clone(),
        checkpoint_every: options.checkpoint_every,
        resume: arguments.resume,
        fail_at: arguments.fail,
        plane: arguments.svg.is_some(),
        on_card: arguments.memory == NodeMemory::Card,
    };
    let report = match options.element {
        Element::F32 => application::run(arguments, &GlassRun::<f32>::new(&glass))?,
        Element::F64 => application::run(arguments, &GlassRun::<f64>::new(&glass))?,
    };
    if let Some(report) = report {
        let output = (arguments.json, arguments.svg.as_deref());
        application::show(output, &report, || table(&report), || picture::draw(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(report: &GlassReport) -> String {
    let mut out = String::new();
    let [x, y, z] = report.lattice;
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "spin  {x}x{y}x{z} {}, seed {}, {} sweeps on {} nodes, {} between exchanges",
        report.element, report.seed, report.sweeps, report.dimensions, report.depth
    );
    if let Some(sweep) = report.resumed_after {
        let _ = writeln!(out, "  resumed after sweep {sweep}");
    }
    out.push('\n');
    out.push_str(&time_table(&report.nodes));
    let _ = writeln!(
        out,
        "\n  {:>8}{:>14}{:>16}{:>12}{:>18}",
        "sweep", "energy/spin", "magnetisation", "overlap", "norm deviation"
    );
    for m in &report.measurements {
        let _ = writeln!(
            out,
            "  {:>8}{:>14.9}{:>16.6}{:>12.6}{:>18.1e}",
            m.sweep, m.energy, m.magnetisation, m.overlap, m.norm_deviation
        );
    }
    let checksum = report.last().map_or(0, |m| m.checksum);
    let _ = writeln!(
        out,
        "\n  {:.0} ps per spin update; |E(t) - E(0)|/N = {:.1e}; checksum {checksum:016x}",
        report.ps_per_update, report.energy_drift
    );
    out
}
