//! A spin glass on the nodes of a torus.

mod card;
pub mod halo;
pub mod picture;
mod resume;
mod sites;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use millstream_application::checkpoint::{CheckpointFolder, RunIdentity};
use millstream_application::{ApplicationError, FailAt, NodeGroup, NodeTimes, TimeSplit, TorusApplication};
use millstream_fabric::Fabric;
use serde::{Deserialize, Serialize};

use crate::block::Block;
use crate::geometry::{Extent, Geometry};
use crate::lattice::Lattice;
use crate::measure::{Measurement, Sums};
use crate::real::Real;
use sites::Sites;

/// How long a node waits for another one.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Most sites of a picture's plane along each axis.
const PICTURE_SITES: usize = 96;

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct GlassOptions {
    /// The lattice.
    pub lattice: Lattice,
    /// Sweeps in all.
    pub sweeps: u64,
    /// Sweeps between exchanges of halos.
    pub depth: usize,
    /// Threads of a node.
    pub threads: usize,
    /// Sweeps between measurements; the first and the last state are always measured.
    pub measure_every: u64,
    /// Folder of checkpoints.
    pub checkpoint: Option<PathBuf>,
    /// Sweeps between checkpoints.
    pub checkpoint_every: u64,
    /// Whether to begin with the folder's checkpoint.
    pub resume: bool,
    /// A node that fails on purpose.
    pub fail_at: Option<FailAt>,
    /// Whether to gather the spins of the plane z = 0.
    pub plane: bool,
    /// Whether the spins are in the memory of the nodes' cards, whose kernel `spin` computes. The fabric registers memory of
    /// the card, as [`OnCard`](millstream_fabric::OnCard) does.
    pub on_card: bool,
}

/// A site of the plane z = 0, and its spin.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlaneSite {
    /// x.
    pub x: u32,
    /// y.
    pub y: u32,
    /// The spin.
    pub spin: [f32; 3],
}

/// What a run found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GlassReport {
    /// Sites on each axis.
    pub lattice: [usize; 3],
    /// The seed.
    pub seed: u64,
    /// Type of the spins.
    pub element: String,
    /// Nodes on each axis.
    pub dimensions: String,
    /// Threads of a node.
    pub threads: usize,
    /// Sweeps between exchanges.
    pub depth: usize,
    /// Sweeps in all.
    pub sweeps: u64,
    /// The sweep that this run began after.
    pub resumed_after: Option<u64>,
    /// Time from the first sweep of this run to the last spin in place, without measurements and checkpoints (s).
    pub wall_s: f64,
    /// Time of a spin update (ps).
    pub ps_per_update: f64,
    /// The measurements.
    pub measurements: Vec<Measurement>,
    /// |E(t) − E(0)| of a spin.
    pub energy_drift: f64,
    /// The times of the nodes.
    pub nodes: Vec<NodeTimes>,
    /// Sites of the plane z = 0.
    #[serde(skip)]
    pub plane: Vec<PlaneSite>,
}

impl GlassReport {
    /// The last measurement.
    #[must_use]
    pub fn last(&self) -> Option<&Measurement> {
        self.measurements.last()
    }
}

/// A run with spins of a type, as an application.
#[derive(Clone, Debug)]
pub struct GlassRun<'o, E> {
    options: &'o GlassOptions,
    element: PhantomData<E>,
}

impl<'o, E> GlassRun<'o, E> {
    /// A run.
    #[must_use]
    pub fn new(options: &'o GlassOptions) -> GlassRun<'o, E> {
        GlassRun { options, element: PhantomData }
    }
}

impl<E: Real> TorusApplication for GlassRun<'_, E> {
    type Report = GlassReport;

    fn run<F: Fabric>(&self, fabric: F) -> Result<GlassReport, ApplicationError> {
        run::<E, F>(fabric, self.options)
    }
}

/// Runs this node's part. All nodes return the same report.
///
/// # Errors
/// [`ApplicationError`] of this node, or if another one is lost.
pub fn run<E: Real, F: Fabric>(fabric: F, options: &GlassOptions) -> Result<GlassReport, ApplicationError> {
    let torus = fabric.dimensions();
    // Each node checks all, so that none waits for one that refused.
    for node in torus.all() {
        let extent = options.lattice.extent(torus, node, options.depth);
        extent.map_err(|error| ApplicationError::Parameters(error.to_string()))?;
    }
    let extent = options.lattice.extent(torus, fabric.here(), options.depth);
    let extent = extent.map_err(|error| ApplicationError::Parameters(error.to_string()))?;
    let mut group = NodeGroup::new(fabric, TIMEOUT)?;
    let geometry = Geometry::new(options.lattice, extent, options.depth);
    let sites = Sites::<E>::new(&mut group, geometry, options.depth, options.threads, options.on_card)?;
    let mut node = Node { group, sites, options, times: TimeSplit::default(), wall: Duration::ZERO };
    node.run()
}

/// The state of a node during a run.
struct Node<'o, E, F> {
    group: NodeGroup<F>,
    sites: Sites<E>,
    options: &'o GlassOptions,
    times: TimeSplit,
    wall: Duration,
}

impl<E: Real, F: Fabric> Node<'_, E, F> {
    fn run(&mut self) -> Result<GlassReport, ApplicationError> {
        let options = self.options;
        let folder = options.checkpoint.as_deref().map(CheckpointFolder::create).transpose()?;
        let (mut sweep, mut measurements) = (0, Vec::new());
        if let Some(folder) = folder.as_ref().filter(|_| options.resume) {
            let extent = *self.sites.geometry().extent();
            let mut saved = Block::zeros(Geometry::new(options.lattice, extent, 0));
            (sweep, measurements) = resume::load(folder, &identity::<E>(options), &mut saved)?;
            if sweep > options.sweeps {
                let reason = format!("--sweeps {}: the checkpoint is that of sweep {sweep}", options.sweeps);
                return Err(ApplicationError::Parameters(reason));
            }
            self.sites.set(&mut self.group, &saved)?;
        }
        let start = sweep;
        self.group.barrier()?;
        loop {
            let begin = Instant::now();
            self.sites.exchange(&mut self.group, &mut self.times)?;
            self.wall += begin.elapsed();
            let is_measured = measurements.last().is_some_and(|last: &Measurement| last.sweep == sweep);
            if !is_measured && (sweep.is_multiple_of(options.measure_every) || sweep == options.sweeps) {
                measurements.push(self.measure(sweep)?);
            }
            if let Some(folder) = &folder
                && sweep != start
                && sweep.is_multiple_of(options.checkpoint_every)
            {
                self.save(folder, sweep, &measurements)?;
            }
            if options.fail_at.is_some_and(|fail| fail.step == sweep && fail.node == self.group.here()) {
                return Err(ApplicationError::ToldToFail { step: sweep });
            }
            let sweeps = self.next_stop(sweep) - sweep;
            if sweeps == 0 {
                break;
            }
            let begin = Instant::now();
            let half_sweeps = 2 * sweeps as usize;
            self.times.computing(|| self.sites.sweep(&mut self.group, half_sweeps))?;
            self.wall += begin.elapsed();
            sweep += sweeps;
        }
        self.report(start, measurements)
    }

    /// The next sweep after which something other than sweeps happens.
    fn next_stop(&self, sweep: u64) -> u64 {
        let options = self.options;
        let multiple = |of: u64| (sweep / of + 1).saturating_mul(of);
        let mut next =
            (sweep + options.depth as u64).min(options.sweeps).min(multiple(options.measure_every));
        if options.checkpoint.is_some() {
            next = next.min(multiple(options.checkpoint_every));
        }
        if let Some(fail) = options.fail_at.filter(|fail| fail.step > sweep) {
            next = next.min(fail.step);
        }
        next.max(sweep)
    }

    fn measure(&mut self, sweep: u64) -> Result<Measurement, ApplicationError> {
        let own = self.sites.sums(&mut self.group)?.to_bytes();
        let all = self.group.all_blocks(&own)?;
        let sums = all.iter().map(Sums::from_bytes).fold(Sums::default(), |sum, other| sum.plus(&other));
        Ok(sums.means(sweep, self.options.lattice.sites()))
    }

    fn save(
        &mut self,
        folder: &CheckpointFolder,
        sweep: u64,
        measurements: &[Measurement],
    ) -> Result<(), ApplicationError> {
        let inside = self.sites.geometry().inside();
        let bytes = self.sites.pack(&mut self.group, &inside)?;
        let identity = identity::<E>(self.options);
        // Measurements are plain data.
        let progress = || serde_json::to_value(measurements).unwrap_or_default();
        folder.save(&mut self.group, &identity, sweep, &bytes, progress)
    }

    fn report(
        &mut self,
        start: u64,
        measurements: Vec<Measurement>,
    ) -> Result<GlassReport, ApplicationError> {
        let options = self.options;
        let walls = self.group.all_blocks(&(self.wall.as_nanos() as u64).to_le_bytes())?;
        let wall = walls.into_iter().map(u64::from_le_bytes).max().unwrap_or(0) as f64 / 1e9;
        let nodes = self.group.all_blocks(&self.times.to_bytes())?;
        let updates = (options.sweeps - start) as f64 * options.lattice.sites() as f64;
        let plane = if options.plane { self.plane()? } else { Vec::new() };
        let energy = |measurement: Option<&Measurement>| measurement.map_or(0.0, |m| m.energy);
        let energy_drift = (energy(measurements.last()) - energy(measurements.first())).abs();
        Ok(GlassReport {
            lattice: options.lattice.size,
            seed: options.lattice.seed,
            element: E::NAME.to_owned(),
            dimensions: self.group.dimensions().to_string(),
            threads: options.threads,
            depth: options.depth,
            sweeps: options.sweeps,
            resumed_after: (start > 0).then_some(start),
            wall_s: wall,
            ps_per_update: if updates > 0.0 { wall * 1e12 / updates } else { 0.0 },
            measurements,
            energy_drift,
            nodes: nodes.iter().map(NodeTimes::from_bytes).collect(),
            plane,
        })
    }

    /// The spins of some sites of the plane z = 0, from all nodes.
    fn plane(&mut self) -> Result<Vec<PlaneSite>, ApplicationError> {
        let extent = *self.sites.geometry().extent();
        let [width, height, _] = self.options.lattice.size;
        let step = width.max(height).div_ceil(PICTURE_SITES);
        let [xs, ys, _] = extent.size;
        let mut own = Vec::new();
        if extent.origin[2] == 0 {
            // A block of one plane, with the spins of this one's first.
            let first = Extent { size: [xs, ys, 1], ..extent };
            let mut plane = Block::<E>::zeros(Geometry::new(self.options.lattice, first, 0));
            let part = plane.inside();
            let bytes = self.sites.pack(&mut self.group, &part)?;
            // The plane has as many spins as were packed.
            let _ = plane.unpack(&part, &bytes);
            for y in (0..ys).filter(|y| (extent.origin[1] + y).is_multiple_of(step)) {
                for x in (0..xs).filter(|x| (extent.origin[0] + x).is_multiple_of(step)) {
                    own.extend_from_slice(&((extent.origin[0] + x) as u32).to_le_bytes());
                    own.extend_from_slice(&((extent.origin[1] + y) as u32).to_le_bytes());
                    for component in plane.spin([x as isize, y as isize, 0]) {
                        own.extend_from_slice(&(component.to_f64() as f32).to_le_bytes());
                    }
                }
            }
        }
        let all = self.group.gather(&own)?;
        let sites = all.iter().flat_map(|bytes| bytes.as_chunks::<20>().0);
        let word =
            |site: &[u8; 20], i: usize| [site[4 * i], site[4 * i + 1], site[4 * i + 2], site[4 * i + 3]];
        Ok(sites
            .map(|site| PlaneSite {
                x: u32::from_le_bytes(word(site, 0)),
                y: u32::from_le_bytes(word(site, 1)),
                spin: [2, 3, 4].map(|i| f32::from_le_bytes(word(site, i))),
            })
            .collect())
    }
}

/// What a run must have in common with another to resume it.
fn identity<E: Real>(options: &GlassOptions) -> RunIdentity<'static> {
    let parameters = serde_json::json!({
        "lattice": options.lattice.size,
        "seed": options.lattice.seed,
        "element": E::NAME,
    });
    RunIdentity { application: "spin", parameters }
}
