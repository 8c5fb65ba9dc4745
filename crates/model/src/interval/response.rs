//! Spread of a result over the ranges of all parameters.
//!
//! The result is computed with each parameter at either end of its range; samples add up the changes (as logarithms, linear
//! between value and end). A thousand samples so need some dozens of simulations, and every figure and sweep can have intervals.
//! Combined effects of several parameters are not in the samples.

use super::Spread;
use crate::parallel::parallel_map;
use crate::parameters::Parameters;

/// Change of each result, as a logarithm, with one parameter at the low and at the high end.
struct Response {
    name: String,
    ends: [Vec<f64>; 2],
}

/// Spreads of the results of `run` over `samples` samples; none if `run` has no results.
#[must_use]
pub fn spreads(
    p: &Parameters,
    samples: u64,
    run: impl Fn(&Parameters) -> Option<Vec<f64>> + Sync,
) -> Vec<Spread> {
    let (nominal, names) = Parameters::reads_of(|| run(p));
    let Some(nominal) = nominal else { return Vec::new() };
    let changes = |q: &Parameters| -> Vec<f64> {
        let ratio = |(now, before): (&f64, &f64)| Some((now / before).ln()).filter(|x| x.is_finite());
        let results = run(q).unwrap_or_default();
        let mut all: Vec<f64> = results.iter().zip(&nominal).map(|pair| ratio(pair).unwrap_or(0.0)).collect();
        all.resize(nominal.len(), 0.0);
        all
    };
    let names: Vec<String> = names.into_iter().collect();
    let response = |name: &String| {
        let q = p.parameter(name).filter(|q| q.low < q.high)?;
        let ends = [q.low, q.high]
            .map(|end| if end == q.value { vec![0.0; nominal.len()] } else { changes(&p.with(name, end)) });
        let response = Response { name: name.clone(), ends };
        Some(response).filter(|r| r.ends.iter().flatten().any(|change| *change != 0.0))
    };
    let responses: Vec<Response> = parallel_map(&names, response).into_iter().flatten().collect();
    // The same positions serve all results.
    let positions: Vec<Vec<(bool, f64)>> = (1..=samples)
        .map(|seed| responses.iter().map(|response| Parameters::position(&response.name, seed)).collect())
        .collect();
    let sample = |i: usize, positions: &[(bool, f64)]| -> f64 {
        let change = |(response, &(is_low, share)): (&Response, &(bool, f64))| {
            share * response.ends[usize::from(!is_low)][i]
        };
        responses.iter().zip(positions).map(change).sum::<f64>().exp()
    };
    (0..nominal.len()).map(|i| Spread::new(1.0, positions.iter().map(|at| sample(i, at)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::benchmarks::perftest::latency;
    use crate::path::{Verb, data_path};
    use crate::sites::shipped;

    #[test]
    fn samples_of_the_response_are_like_those_of_the_simulation() {
        let (p, site) = (Parameters::shipped(), shipped("edr-pair"));
        let run = |p: &Parameters| {
            let path = data_path(&site, p, "node0", "node1").ok()?;
            Some([64, 4096].map(|size| latency(&path, Verb::Write, size).seconds()).to_vec())
        };
        let fast = spreads(&p, 1000, run);
        let drawn: Vec<Vec<f64>> = (1..=1000).filter_map(|seed| run(&p.sample(seed))).collect();
        let nominal = run(&p).unwrap();
        for i in 0..2 {
            let direct = Spread::new(nominal[i], drawn.iter().map(|draw| draw[i]));
            for (fast, direct) in [(fast[i].below, direct.below), (fast[i].above, direct.above)] {
                assert!((fast / direct - 1.0).abs() < 0.25, "{fast} and {direct}");
            }
        }
    }

    #[test]
    fn a_result_that_reads_no_parameter_has_no_spread() {
        let p = Parameters::shipped();
        assert_eq!(spreads(&p, 10, |_| Some(vec![1.0])), [Spread::default()]);
        assert!(spreads(&p, 10, |_| None).is_empty());
    }
}
