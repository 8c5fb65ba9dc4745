//! Arguments of `millstream stencil`.

use std::path::PathBuf;

use clap::Args;
use millstream_offload::file::GridFile;

use crate::stencil::GridSize;

#[derive(Debug, Args)]
pub(crate) struct StencilOptions {
    /// Generate a grid of this size
    #[arg(long, value_name = "ROWSxCOLUMNS", conflicts_with = "input")]
    pub(crate) grid: Option<GridSize>,
    /// Initial grid: NAME.npy, or NAME.h5:DATASET [default dataset: grid]
    #[arg(long, value_name = "FILE")]
    pub(crate) input: Option<GridFile>,
    /// File for the result, in the same formats
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<GridFile>,
    /// Number of sweeps
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub(crate) iterations: u64,
    /// Cards, by name in the site file or host:port, in the order of their tiles
    #[arg(long, value_delimiter = ',', value_name = "CARD,…")]
    pub(crate) cards: Vec<String>,
    /// Spare cards, which replace lost cards in this order
    #[arg(long, value_delimiter = ',', value_name = "CARD,…", requires = "cards")]
    pub(crate) spares: Vec<String>,
    /// The site file that names cards [default: site.toml, or MILLSTREAM_SITE]
    #[arg(long, value_name = "FILE")]
    pub(crate) site: Option<PathBuf>,
    /// Without --cards: start this many emulated cards on this host
    #[arg(long, default_value_t = 2, value_name = "N", conflicts_with = "cards")]
    pub(crate) local: usize,
    /// Sweeps between two halo exchanges, 1 to 16 [default: as many as the tiles allow]
    #[arg(long, value_name = "N")]
    pub(crate) depth: Option<u64>,
    /// Sweeps between two checkpoints of the grid on this host, from which a job that loses a card continues. 0: no
    /// checkpoints, such a job restarts
    #[arg(long, default_value_t = 512, value_name = "SWEEPS")]
    pub(crate) checkpoint: u64,
    /// Generate float64 instead of float32
    #[arg(long, conflicts_with = "input")]
    pub(crate) float64: bool,
    /// Seed of the generated grid
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// Compute the same grid on this host, point by point, and compare every bit
    #[arg(long)]
    pub(crate) verify: bool,
    /// Write the report as JSON; `-` for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the steps of each card over time
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Serve a card with this many bytes of memory until standard input ends; jobs start these
    #[arg(long, hide = true)]
    pub(crate) serve_card: Option<u64>,
}
