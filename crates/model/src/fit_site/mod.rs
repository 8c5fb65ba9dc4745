//! Fits the devices of a site to measurements.
//!
//! Every parameter of the site's devices moves within its range such that the model's results approach the measurements; what
//! the measurements do not determine stays near its value (Gauss-Newton with the ranges as prior).
//!
//! ```text
//!   measurements ─┐
//!   site, ranges ─┴─► steps ─► values with standard deviations ─► device file, settings
//! ```

mod disk;
mod linear;
mod report;

use crate::measure::{BenchmarkError, value};
use crate::measurements::{Measured, Measurement};
use crate::parallel::parallel_map;
use crate::parameters::{Parameter, Parameters};
use crate::ssd::CommandQueue;
use linear::Matrix;
use millstream_site::{DeviceKind, Site};
use std::collections::BTreeSet;

pub use disk::DiskError;
pub use report::{DeviceFile, SiteFitReport};

/// Relative standard deviation of a measurement.
const NOISE: f64 = 0.02;
/// Standard deviations in a range: it holds nine tenths.
const RANGE: f64 = 3.29;
/// Standard deviation after the fit, in those of the range, below which measurements determine a parameter.
const DETERMINED: f64 = 0.5;
/// Standard deviations of the range by which measurements push a parameter to an end of its range.
const PUSHED: f64 = 0.2;
/// Largest number of steps.
const STEPS: u32 = 10;

/// A parameter after the fit.
#[derive(Clone, Debug, PartialEq)]
pub struct FittedParameter {
    /// Name.
    pub name: String,
    /// Value before.
    pub before: f64,
    /// Value after.
    pub after: f64,
    /// Ends of the 90 % interval after the fit.
    pub range: [f64; 2],
    /// Whether the measurements determine it.
    pub is_determined: bool,
    /// Whether measurements push it to an end of its range: the device may be outside.
    pub is_at_end: bool,
    /// The parameter with which its error is most correlated, if the measurements only determine both together.
    pub together_with: Option<String>,
}

/// A measurement with the model's results.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// The measurement.
    pub measurement: Measurement,
    /// The model's result before the fit.
    pub before: f64,
    /// The model's result after the fit.
    pub after: f64,
}

/// Result of a fit.
#[derive(Clone, Debug, PartialEq)]
pub struct SiteFit {
    /// Parameters that affect the measurements.
    pub parameters: Vec<FittedParameter>,
    /// Parameters of the site's devices that no measurement depends on.
    pub without_effect: Vec<String>,
    /// The measurements with the model's results.
    pub compared: Vec<Compared>,
    /// All parameters after the fit.
    pub fitted: Parameters,
}

/// Where measurements ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Places<'a> {
    /// Client and server of benchmarks.
    pub between: Option<(&'a str, &'a str)>,
    /// The disk, `host.ssd`; none for the only disk model of the site.
    pub disk: Option<&'a str>,
}

impl<'a> From<(&'a str, &'a str)> for Places<'a> {
    fn from(between: (&'a str, &'a str)) -> Places<'a> {
        Places { between: Some(between), disk: None }
    }
}

/// Measurements without a benchmark that the site can run.
#[derive(Debug, thiserror::Error)]
pub enum SiteFitError {
    /// The site lacks endpoints or devices.
    #[error(transparent)]
    Benchmark(#[from] BenchmarkError),
    /// A benchmark between two places of which one is not known.
    #[error(
        "the measurement in line {0} is between two places, and the site has fewer than two hosts: name client and server"
    )]
    NoPlaces(usize),
    /// Measurements of a disk that is not one of the site.
    #[error(transparent)]
    Disk(#[from] disk::DiskError),
    /// A benchmark without result.
    #[error("{benchmark} with {size} bytes: the model has no result; leave line {line} out")]
    NoResult {
        /// Name of the benchmark.
        benchmark: &'static str,
        /// Message size.
        size: u64,
        /// Line of the measurement.
        line: usize,
    },
}

/// Value of a parameter `steps` standard deviations of its range away from `from`, within the range.
fn moved(parameter: &Parameter, from: f64, steps: f64) -> f64 {
    let Parameter { low, high, .. } = *parameter;
    let value = if low > 0.0 {
        from * ((high / low).ln() / RANGE * steps).exp()
    } else {
        from + (high - low) / RANGE * steps
    };
    value.clamp(low, high)
}

/// First words of the parameters that the site's devices, PCIe and MPI have, without disks.
fn owners(site: &Site) -> BTreeSet<String> {
    let mut ids: BTreeSet<String> = ["pcie", "mpi-ucx"].map(str::to_owned).into();
    for host in &site.hosts {
        ids.extend(host.sockets.iter().map(|socket| socket.id.clone()));
        let others = host.devices.iter().filter(|device| device.kind != DeviceKind::Ssd);
        ids.extend(others.map(|device| device.id.clone()));
    }
    ids
}

/// Parameters that measurements can depend on: those of the site's devices for benchmarks, the queues of the disk for its rates.
fn candidates(site: &Site, p: &Parameters, cases: &[Measurement], disk: Option<&str>) -> Vec<String> {
    let has_benchmark = cases.iter().any(|m| matches!(m.what, Measured::Benchmark(_)));
    let owners = if has_benchmark { owners(site) } else { BTreeSet::new() };
    let is_candidate = |name: &str| {
        name.split_once('.').is_some_and(|(owner, value)| {
            owners.contains(owner) || (Some(owner) == disk && CommandQueue::has_value(value))
        })
    };
    let varied = p.iter().filter(|(name, q)| q.low < q.high && is_candidate(name));
    varied.map(|(name, _)| name.to_owned()).collect()
}

/// A fit in progress.
struct Fit<'a> {
    site: &'a Site,
    between: Option<(&'a str, &'a str)>,
    /// Library id of the disk.
    disk: Option<String>,
    cases: &'a [Measurement],
    start: Parameters,
    names: Vec<String>,
}

impl Fit<'_> {
    /// The parameters after these steps from the start.
    fn at(&self, steps: &[f64]) -> Parameters {
        self.names.iter().zip(steps).fold(self.start.clone(), |p, (name, &steps)| {
            let parameter = self.start.parameter(name);
            parameter.map_or_else(|| p.clone(), |q| p.with(name, moved(q, q.value, steps)))
        })
    }

    fn result(&self, p: &Parameters, case: &Measurement) -> Result<f64, SiteFitError> {
        let (name, result) = match &case.what {
            Measured::Benchmark(benchmark) => {
                let between = self.between.ok_or(SiteFitError::NoPlaces(case.line))?;
                (benchmark.info().name, value(self.site, p, *benchmark, between, case.size)?)
            }
            Measured::Disk { access, outstanding } => {
                let queue = self.disk.as_deref().and_then(|id| CommandQueue::new(p, id, *access));
                let rate = queue.map_or(0.0, |queue| queue.bandwidth(case.size, *outstanding).0);
                (disk::name(*access), rate)
            }
        };
        if result > 0.0 && result.is_finite() {
            return Ok(result);
        }
        Err(SiteFitError::NoResult { benchmark: name, size: case.size, line: case.line })
    }

    fn results(&self, p: &Parameters) -> Result<Vec<f64>, SiteFitError> {
        parallel_map(self.cases, |case| self.result(p, case)).into_iter().collect()
    }

    /// Logarithms of measured to modelled values.
    fn deviations(&self, results: &[f64]) -> Vec<f64> {
        self.cases.iter().zip(results).map(|(m, result)| (m.value / result).ln()).collect()
    }

    /// Change of each logarithm per step of each parameter.
    fn slopes(&self, steps: &[f64]) -> Result<Matrix, SiteFitError> {
        let mut columns = Vec::new();
        for i in 0..steps.len() {
            let beside = |by: f64| {
                let mut steps = steps.to_vec();
                steps[i] += by;
                self.results(&self.at(&steps))
            };
            let (up, down) = (beside(0.3)?, beside(-0.3)?);
            columns.push(up.iter().zip(&down).map(|(up, down)| (up / down).ln() / 0.6).collect());
        }
        Ok(Matrix::from_columns(columns))
    }

    fn cost(&self, steps: &[f64], results: &[f64]) -> f64 {
        let squares = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>();
        squares(&self.deviations(results)) / (NOISE * NOISE) + squares(steps)
    }

    /// Steps of the smallest cost, with their covariance.
    fn solve(&self) -> Result<(Vec<f64>, Matrix), SiteFitError> {
        let mut steps = vec![0.0; self.names.len()];
        let mut results = self.results(&self.start)?;
        let mut slopes = self.slopes(&steps)?;
        for _ in 0..STEPS {
            let system = slopes.normal(1.0 / (NOISE * NOISE));
            let mut right = slopes.transposed_times(&self.deviations(&results));
            right.iter_mut().zip(&steps).for_each(|(right, step)| *right = *right / (NOISE * NOISE) - step);
            let Some(change) = system.solve(&right) else { break };
            let cost = self.cost(&steps, &results);
            let mut share = 1.0;
            let better = loop {
                let tried: Vec<f64> = steps.iter().zip(&change).map(|(step, by)| step + share * by).collect();
                let results = self.results(&self.at(&tried))?;
                if self.cost(&tried, &results) < cost {
                    break Some((tried, results));
                }
                share /= 2.0;
                if share < 0.1 {
                    break None;
                }
            };
            let Some((tried, new)) = better else { break };
            let gain = cost - self.cost(&tried, &new);
            (steps, results) = (tried, new);
            if gain < 0.001 * cost {
                break;
            }
            slopes = self.slopes(&steps)?;
        }
        let covariance = slopes.normal(1.0 / (NOISE * NOISE)).inverse();
        Ok((steps, covariance))
    }
}

/// Fits the devices of a site to measurements.
///
/// # Errors
/// [`SiteFitError`] if the site cannot run a measured benchmark, or lacks the measured disk.
pub fn fit_site<'a>(
    site: &'a Site,
    p: &Parameters,
    measurements: &'a [Measurement],
    places: impl Into<Places<'a>>,
) -> Result<SiteFit, SiteFitError> {
    let places = places.into();
    let start = p.with_devices(&site.devices).into_owned();
    let disk = disk::measured(site, &start, measurements, places.disk)?;
    let names = candidates(site, &start, measurements, disk.as_deref());
    let mut fit = Fit { site, between: places.between, disk, cases: measurements, names, start };
    let before = fit.results(&fit.start)?;
    // Parameters whose whole range changes no result need no further simulation.
    let has_effect = |name: &String| -> Result<bool, SiteFitError> {
        let Some(q) = fit.start.parameter(name) else { return Ok(false) };
        for end in [q.low, q.high] {
            let results = fit.results(&fit.start.with(name, end))?;
            if results.iter().zip(&before).any(|(now, before)| (now / before - 1.0).abs() > 0.002) {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let (mut with, mut without_effect) = (Vec::new(), Vec::new());
    for name in &fit.names {
        if has_effect(name)? { with.push(name.clone()) } else { without_effect.push(name.clone()) }
    }
    fit.names = with;
    let (steps, covariance) = fit.solve()?;
    let fitted = fit.at(&steps);
    let after = fit.results(&fitted)?;
    let parameters = parameters_of(&fit, &steps, &covariance);
    let compared = (fit.cases.iter().zip(before.iter().zip(&after)))
        .map(|(m, (&before, &after))| Compared { measurement: m.clone(), before, after })
        .collect();
    Ok(SiteFit { parameters, without_effect, compared, fitted })
}

fn parameters_of(fit: &Fit<'_>, steps: &[f64], covariance: &Matrix) -> Vec<FittedParameter> {
    let deviation = |i: usize| covariance.at(i, i).max(0.0).sqrt();
    let one = |(i, name): (usize, &String)| {
        let q = fit.start.parameter(name)?;
        let correlation =
            |j: &usize| (covariance.at(i, *j) / (deviation(i) * deviation(*j)).max(1e-12)).abs();
        let other = (0..steps.len()).filter(|j| *j != i);
        let other =
            other.max_by(|a, b| correlation(a).total_cmp(&correlation(b))).filter(|j| correlation(j) > 0.4);
        let is_determined = deviation(i) < DETERMINED;
        let end = |side: f64| moved(q, q.value, steps[i] + side * 1.645 * deviation(i));
        let after = moved(q, q.value, steps[i]);
        Some(FittedParameter {
            name: name.clone(),
            before: q.value,
            after,
            range: [end(-1.0), end(1.0)],
            is_determined,
            is_at_end: steps[i].abs() > PUSHED && (after <= q.low || after >= q.high),
            together_with: other.filter(|_| !is_determined).map(|j| fit.names[j].clone()),
        })
    };
    fit.names.iter().enumerate().filter_map(one).collect()
}
