//! Fits the devices of a site to measurements.
//!
//! Every parameter of the site's devices moves within its range such that the model's results approach the measurements; what
//! the measurements do not determine stays near its value (Gauss-Newton with the ranges as prior).
//!
//! ```text
//!   measurements ─┐
//!   site, ranges ─┴─► steps ─► values with standard deviations ─► device file, settings
//! ```

mod linear;
mod report;

use crate::measure::{Benchmark, BenchmarkError, value};
use crate::measurements::{Measured, Measurement};
use crate::parallel::parallel_map;
use crate::parameters::{Parameter, Parameters};
use linear::Matrix;
use millstream_site::Site;
use std::collections::BTreeSet;

pub use report::{DeviceFile, SiteFitReport};

/// Relative standard deviation of a measurement.
const NOISE: f64 = 0.02;
/// Standard deviations in a range: it holds nine tenths.
const RANGE: f64 = 3.29;
/// Standard deviation after the fit, in those of the range, below which measurements determine a parameter.
const DETERMINED: f64 = 0.5;
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
    /// Simulated measurements.
    pub compared: Vec<Compared>,
    /// Largest measured rates of disks: reads and writes, in bytes per second.
    pub disk: [Option<f64>; 2],
    /// All parameters after the fit.
    pub fitted: Parameters,
}

/// Measurements without a benchmark that the site can run.
#[derive(Debug, thiserror::Error)]
pub enum SiteFitError {
    /// The site lacks endpoints or devices.
    #[error(transparent)]
    Benchmark(#[from] BenchmarkError),
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

/// First words of the parameters that the site's devices, PCIe and MPI have.
fn owners(site: &Site) -> BTreeSet<String> {
    let mut ids: BTreeSet<String> = ["pcie", "mpi-ucx"].map(str::to_owned).into();
    for host in &site.hosts {
        ids.extend(host.sockets.iter().map(|socket| socket.id.clone()));
        ids.extend(host.devices.iter().map(|device| device.id.clone()));
    }
    ids
}

/// A fit in progress.
struct Fit<'a> {
    site: &'a Site,
    between: (&'a str, &'a str),
    cases: Vec<(&'a Measurement, Benchmark)>,
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

    fn results(&self, p: &Parameters) -> Result<Vec<f64>, SiteFitError> {
        let all = parallel_map(&self.cases, |(measurement, benchmark)| {
            let result = value(self.site, p, *benchmark, self.between, measurement.size)?;
            if result > 0.0 && result.is_finite() {
                return Ok(result);
            }
            let (benchmark, size, line) = (benchmark.info().name, measurement.size, measurement.line);
            Err(SiteFitError::NoResult { benchmark, size, line })
        });
        all.into_iter().collect()
    }

    /// Logarithms of measured to modelled values.
    fn deviations(&self, results: &[f64]) -> Vec<f64> {
        self.cases.iter().zip(results).map(|((m, _), result)| (m.value / result).ln()).collect()
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

/// Largest rate of disks in one direction.
fn disk_rate(measurements: &[Measurement], what: &Measured) -> Option<f64> {
    let rates = measurements.iter().filter(|m| m.what == *what).map(|m| m.value);
    rates.max_by(f64::total_cmp)
}

/// Fits the devices of a site to measurements between two of its places.
///
/// # Errors
/// [`SiteFitError`] if the site cannot run a measured benchmark.
pub fn fit_site(
    site: &Site,
    p: &Parameters,
    measurements: &[Measurement],
    between: (&str, &str),
) -> Result<SiteFit, SiteFitError> {
    let start = p.with_devices(&site.devices).into_owned();
    let cases: Vec<_> = (measurements.iter())
        .filter_map(|m| match m.what {
            Measured::Benchmark(benchmark) => Some((m, benchmark)),
            Measured::DiskRead | Measured::DiskWrite => None,
        })
        .collect();
    let owners = owners(site);
    let candidates = (start.iter())
        .filter(|(name, q)| {
            q.low < q.high && name.split_once('.').is_some_and(|(owner, _)| owners.contains(owner))
        })
        .map(|(name, _)| name.to_owned());
    let mut fit = Fit { site, between, cases, names: candidates.collect(), start };
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
        .map(|((m, _), (&before, &after))| Compared { measurement: (*m).clone(), before, after })
        .collect();
    let disk = [Measured::DiskRead, Measured::DiskWrite].map(|what| disk_rate(measurements, &what));
    Ok(SiteFit { parameters, without_effect, compared, disk, fitted })
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
        Some(FittedParameter {
            name: name.clone(),
            before: q.value,
            after: moved(q, q.value, steps[i]),
            range: [end(-1.0), end(1.0)],
            is_determined,
            together_with: other.filter(|_| !is_determined).map(|j| fit.names[j].clone()),
        })
    };
    fit.names.iter().enumerate().filter_map(one).collect()
}
