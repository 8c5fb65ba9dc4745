//! `millstream torus neurons`.

use std::error::Error;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::str::FromStr;

use clap::Args;
use millstream_application::time_table;
use millstream_neurons::simulation::{SimulationOptions, SimulationReport, picture};
use millstream_neurons::{Model, Network, UNITS_PER_MV};

use super::application::{self, ApplicationArguments, NodeMemory};

#[derive(Debug, Args)]
pub(crate) struct TorusNeuronsOptions {
    /// Columns along x and y
    #[arg(long, default_value = "3x3", value_name = "XxY")]
    columns: Grid,
    /// Neurons of a column; four fifths are excitatory
    #[arg(long, default_value_t = 1000)]
    neurons: u32,
    /// Synapses of a neuron
    #[arg(long, default_value_t = 200)]
    synapses: u32,
    /// Thousandths of an excitatory neuron's synapses in its own column and in the rings 1, 2, 3 around it
    #[arg(
        long,
        default_value = "760,120,80,40",
        value_name = "N,N,N,N",
        value_delimiter = ',',
        num_args = 1
    )]
    shares: Vec<u32>,
    /// Initial weight of excitatory synapses in mV [default: 600 / synapses, at most 6]
    #[arg(long, value_name = "MV", value_parser = millivolts)]
    excitatory: Option<f64>,
    /// Weight of inhibitory synapses in mV [default: -500 / synapses, at least -5]
    #[arg(long, value_name = "MV", allow_negative_numbers = true, value_parser = millivolts)]
    inhibitory: Option<f64>,
    /// Keep all weights
    #[arg(long)]
    fixed: bool,
    /// Let each neuron fire once in this many ms, whatever it gets, to measure delivery alone
    #[arg(long, value_name = "MS")]
    period: Option<u32>,
    /// Duration in ms
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    duration: u64,
    /// Seed of synapses and inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds of the network between checkpoints
    #[arg(long, default_value_t = 1, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    /// Last part of the run in the picture's raster, in ms
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    raster: u64,
    #[command(flatten)]
    application: ApplicationArguments,
}

/// Columns along x and y.
#[derive(Clone, Copy, Debug)]
struct Grid([u32; 2]);

impl FromStr for Grid {
    type Err = String;

    fn from_str(text: &str) -> Result<Grid, String> {
        let sides = text.split_once(['x', '×']).map(|(x, y)| (x.parse(), y.parse()));
        match sides {
            Some((Ok(x), Ok(y))) => Ok(Grid([x, y])),
            _ => Err("expected XxY, for example 4x4".to_owned()),
        }
    }
}

fn millivolts(text: &str) -> Result<f64, String> {
    let number = text.parse().map_err(|error| format!("{error}"))?;
    if f64::is_finite(number) { Ok(number) } else { Err("not a finite number".to_owned()) }
}

fn network(options: &TorusNeuronsOptions) -> Result<Network, Box<dyn Error>> {
    let shares = <[u32; 4]>::try_from(options.shares.as_slice());
    let synapses = f64::from(options.synapses.max(1));
    // The published weights are for 100 synapses.
    let units = |mv: f64| (mv * f64::from(UNITS_PER_MV)).round() as i32;
    let network = Network {
        grid: options.columns.0,
        neurons: options.neurons,
        synapses: options.synapses,
        shares: shares.map_err(|_| "--shares needs four numbers, which add up to 1000")?,
        longest_delay: 20,
        excitatory_weight: units(options.excitatory.unwrap_or((600.0 / synapses).min(6.0))),
        inhibitory_weight: units(options.inhibitory.unwrap_or((-500.0 / synapses).max(-5.0))),
        is_plastic: !options.fixed,
        model: options.period.map_or(Model::Izhikevich, |period| Model::IgnoreAndFire { period }),
        seed: options.seed,
    };
    network.check()?;
    Ok(network)
}

pub(super) fn run(options: &TorusNeuronsOptions) -> Result<ExitCode, Box<dyn Error>> {
    let arguments = &options.application;
    let simulation = SimulationOptions {
        network: network(options)?,
        steps: options.duration,
        checkpoint: arguments.checkpoint.clone(),
        checkpoint_every: options.checkpoint_every,
        resume: arguments.resume,
        fail_at: arguments.fail,
        raster: options.raster,
        on_card: arguments.memory == NodeMemory::Card,
    };
    if let Some(report) = application::run(arguments, &simulation)? {
        let output = (arguments.json, arguments.svg.as_deref());
        application::show(output, &report, || table(&report), || picture::draw(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(report: &SimulationReport) -> String {
    let mut out = String::new();
    let [x, y] = report.network.grid;
    let plasticity = if report.network.is_plastic { "plastic" } else { "fixed" };
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "neurons  {x}x{y} columns, {} neurons, {} {plasticity} synapses, {} ms on {} nodes",
        report.neurons, report.synapses, report.steps, report.dimensions
    );
    if let Some(step) = report.resumed_after {
        let _ = writeln!(out, "  resumed after {step} ms");
    }
    out.push('\n');
    out.push_str(&time_table(&report.nodes));
    let header = ["ms", "spikes", "excitatory Hz", "inhibitory Hz", "events", "raster"];
    let _ = writeln!(
        out,
        "\n  {:>8}{:>10}{:>15}{:>15}{:>14}{:>18}",
        header[0], header[1], header[2], header[3], header[4], header[5]
    );
    for s in &report.seconds {
        let _ = writeln!(
            out,
            "  {:>8}{:>10}{:>15.2}{:>15.2}{:>14}  {:016x}",
            s.step, s.spikes, s.excitatory_hz, s.inhibitory_hz, s.events, s.raster
        );
    }
    let _ = writeln!(
        out,
        "\n  {:.2} million synaptic events/s, {:.1} ns per event, {:.4} s per second and Hz; state {:016x}",
        report.events_per_s / 1e6,
        report.ns_per_event,
        report.wall_s_per_s_per_hz,
        report.state
    );
    out
}
