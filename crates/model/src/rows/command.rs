//! The command that computes the answer to a row again.

use super::spec::{Program, RowSpec};
use crate::benchmarks::osu::MpiLibrary;

/// Name of the benchmark for `millstream model measure`, if the program of a row is one with its default arguments.
fn benchmark(spec: &RowSpec) -> Option<&'static str> {
    let is_default = spec.queue_depth.is_none() && spec.bidirectional != Some(true) && spec.sweep.is_none();
    if !is_default || spec.iommu_window.is_some() {
        return None;
    }
    let is_ucx = spec.mpi.unwrap_or_default() == MpiLibrary::Ucx;
    Some(match spec.program {
        Program::IbWriteBw => "ib_write_bw",
        Program::IbReadBw => "ib_read_bw",
        Program::IbSendBw => "ib_send_bw",
        Program::IbWriteLat => "ib_write_lat",
        Program::IbSendLat => "ib_send_lat",
        Program::IbReadLat => "ib_read_lat",
        Program::OsuLatency if is_ucx => "osu_latency",
        Program::OsuBw if is_ucx => "osu_bw",
        Program::DmaReadBw => "dma_read_bw",
        Program::DmaWriteBw => "dma_write_bw",
        Program::DmaRwBw => "dma_rw_bw",
        Program::DmaReadLat => "dma_read_lat",
        _ => return None,
    })
}

/// Arguments of `millstream model` that print what a row's answer is computed from, without factors and units.
#[must_use]
pub(super) fn command(spec: &RowSpec) -> Option<String> {
    let site = spec.site.as_deref()?;
    let mut words = if let (Program::Flows, Some(flows)) = (spec.program, &spec.flows) {
        let flows: Vec<String> = flows.iter().map(|flow| format!("'{flow}'")).collect();
        format!("flows sites/{site}.toml {}", flows.join(" "))
    } else {
        let (name, server, size) = (benchmark(spec)?, spec.server.as_deref()?, spec.size?);
        let first = crate::sites::shipped(site).hosts[0].name.clone();
        let client = spec.client.as_deref().unwrap_or(&first);
        format!("measure {name} sites/{site}.toml {client} {server} --sizes {size}")
    };
    for (path, value) in &spec.set {
        words += &format!(" --set '{path}={value}'");
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::command;
    use crate::measure::{self, Benchmark};
    use crate::rows::spec::spec;
    use crate::rows::{Answer, answer, questions, questions_2};
    use crate::{Parameters, sites, sweep};

    /// Splits at spaces outside of quotes.
    fn words(text: &str) -> Vec<String> {
        let quoted = text.split('\'').enumerate();
        quoted
            .flat_map(|(i, part)| match i % 2 {
                1 => vec![part.to_owned()],
                _ => part.split_whitespace().map(str::to_owned).collect(),
            })
            .collect()
    }

    #[test]
    fn commands_compute_the_answers_again() {
        let mut checked = 0;
        for row in questions_2().iter().chain(&questions()) {
            // Every fourth row: all simulations take minutes.
            let Some(spec) = spec(&row.id) else { continue };
            let Some(text) = command(spec) else { continue };
            checked += 1;
            if checked % 4 != 0 || text.starts_with("flows") || row.reference().is_some() {
                continue;
            }
            let words = words(&text);
            let settings: Vec<(&str, &str)> = words.iter().filter_map(|word| word.split_once('=')).collect();
            let name = words[2].strip_prefix("sites/").and_then(|name| name.strip_suffix(".toml")).unwrap();
            let shipped = sites::SHIPPED.iter().find(|(known, _)| *known == name).unwrap().1;
            let (site, p) = sweep::apply(name, shipped, &settings).unwrap();
            let benchmark: Benchmark = words[1].parse().unwrap();
            let size = words[6].parse().unwrap();
            let value = measure::value(&site, &p, benchmark, (&words[3], &words[4]), size).unwrap();
            let factors = spec.factors.iter().fold(spec.scale.unwrap_or(1.0), |all, name| all * p.get(name));
            let percent = spec.percent_of.map_or(1.0, |whole| 100.0 / whole);
            let Answer::Values { values, .. } = answer(row, &Parameters::shipped()) else {
                panic!("{row:?}")
            };
            let expected = spec.unit.convert(value) * factors * percent;
            assert!((expected / values[0] - 1.0).abs() < 1e-9, "{}: {text}: {expected} {values:?}", row.id);
        }
        assert!(checked > 100, "{checked}");
    }
}
