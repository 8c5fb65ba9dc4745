//! `millstream torus bfs`: Graph500 breadth-first search.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use millstream_application::FailAt;
use millstream_bfs::job::Width;
use millstream_bfs::search::Thresholds;
use millstream_bfs::{BfsError, BfsOptions, BfsReport};
use millstream_fabric::{Fabric, FabricError};
use millstream_report::Progress;
use millstream_torus_core::Dimensions;

use super::application::{self, NodeMemory};
use super::nodes::{self, NodeProgram};

#[derive(Debug, Args)]
pub(crate) struct TorusBfsOptions {
    /// Logarithm of the number of vertices
    #[arg(long, default_value_t = 16, value_name = "SCALE", value_parser = clap::value_parser!(u32).range(1..=47))]
    scale: u32,
    /// Edges per vertex
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    edge_factor: u64,
    /// Number of searches; the rules require 64
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    roots: u32,
    /// Bits of a stored vertex number; the rules require 48
    #[arg(long, default_value = "32", value_name = "BITS")]
    columns: Columns,
    /// Nodes on each axis, one thread each [default: the torus of `torus run`, or 1x1x1]
    #[arg(long, value_name = "XxYxZ")]
    dimensions: Option<Dimensions>,
    /// Search bottom-up if the frontier has more than 1/N of the unexplored edges
    #[arg(long, default_value_t = 15, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    alpha: u64,
    /// Search top-down again if the frontier shrinks below 1/N of the vertices
    #[arg(long, default_value_t = 18, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    beta: u64,
    /// Keep finished searches in this file; a run with the same file goes on from there, on any number of nodes
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    /// End if a node has waited this long for others, in seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,
    /// Where the node's data are; cards need `torus run --card`
    #[arg(long, value_enum, default_value_t = NodeMemory::Host)]
    memory: NodeMemory,
    /// Let a node fail after this many searches, to see what its loss does; a process kills itself
    #[arg(long, value_name = "NODE@SEARCHES", value_parser = application::fail_at)]
    fail: Option<FailAt>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw the rate of each root and the size of each level
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Columns {
    #[value(name = "32")]
    Bits32,
    #[value(name = "48")]
    Bits48,
}

impl TorusBfsOptions {
    fn options(&self) -> BfsOptions {
        BfsOptions {
            edge_factor: self.edge_factor,
            roots: self.roots as usize,
            width: match self.columns {
                Columns::Bits32 => Width::Bits32,
                Columns::Bits48 => Width::Bits48,
            },
            thresholds: Thresholds { alpha: self.alpha, beta: self.beta },
            checkpoint: self.checkpoint.clone(),
            timeout: Duration::from_secs(self.timeout),
            on_card: self.memory == NodeMemory::Card,
            ..BfsOptions::new(self.scale)
        }
    }
}

struct Search {
    options: BfsOptions,
    fail: Option<FailAt>,
}

impl NodeProgram for Search {
    type Output = Result<BfsReport, BfsError>;

    fn check(&self, torus: Dimensions) -> Result<(), String> {
        application::check_fail(self.fail, torus)
    }

    fn run<F: Fabric>(&self, node: &mut F) -> Self::Output {
        let bar = (node.here().0 == 0).then(|| Progress::new("bfs", self.options.roots as u64));
        let fail = self.fail.filter(|fail| fail.node == node.here());
        let mut done = 0;
        millstream_bfs::run(node, &self.options, |_| {
            done += 1;
            if let Some(bar) = &bar {
                bar.set_position(done);
            }
            if fail.is_some_and(|fail| fail.step == done) {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })
    }
}

pub(super) fn run(arguments: &TorusBfsOptions) -> Result<ExitCode, Box<dyn Error>> {
    let outputs = nodes::run(
        &Search { options: arguments.options(), fail: arguments.fail },
        arguments.dimensions,
        arguments.memory,
    )?;
    let mut first = None;
    for (node, output) in outputs {
        match output {
            Ok(report) if node.0 == 0 => first = Some(report),
            Ok(_) => {}
            Err(error @ BfsError::Interrupted { .. }) if arguments.fail.is_some() => {
                return Err(application::fail(error));
            }
            Err(error) => return Err(explain(error, arguments.checkpoint.as_ref())),
        }
    }
    // One process prints.
    if let Some(report) = first {
        let output = (arguments.json, arguments.svg.as_deref());
        application::show(output, &report.to_json(), || report.table(), || report.svg())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn explain(error: BfsError, checkpoint: Option<&PathBuf>) -> Box<dyn Error> {
    let advice = match (&error, checkpoint) {
        (BfsError::Fabric(FabricError::NodeLost { .. }), Some(_)) => {
            "; run again with the same --checkpoint to go on, on any nodes"
        }
        (BfsError::Fabric(FabricError::NodeLost { .. }), None) => {
            "; with --checkpoint FILE, a further run goes on from the searches that are done"
        }
        _ => return Box::new(error),
    };
    format!("{error}{advice}").into()
}
