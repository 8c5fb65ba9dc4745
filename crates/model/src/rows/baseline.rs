//! Answers without model: the nearest calibrated row, or a line rate.

use super::spec::{Program, RowSpec, spec};
use super::{Category, Row};
use crate::component::pcie;
use crate::parameters::Parameters;
use crate::path::{data_path, pcie_line_rate};
use crate::sites::shipped;
use serde::Deserialize;

/// An answer without model.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Value in the row's unit.
    pub value: f64,
    /// The row, or the formula.
    pub source: String,
}

impl Baseline {
    /// Checks an answer that a file gives.
    ///
    /// # Errors
    /// The field and what it must be.
    pub(super) fn check(&self) -> Result<(), String> {
        let is_valid = self.value.is_finite() && self.value > 0.0 && !self.source.is_empty();
        let message = "field `baseline`: `value` must be above 0, and `source` say where it is from";
        if is_valid { Ok(()) } else { Err(message.to_owned()) }
    }
}

/// Whether the answer is bytes of messages per time.
fn is_bandwidth(program: Program) -> bool {
    matches!(program, Program::IbWriteBw | Program::IbReadBw | Program::IbSendBw | Program::OsuBw)
}

fn is_dma(program: Program) -> bool {
    matches!(program, Program::DmaReadBw | Program::DmaWriteBw | Program::DmaRwBw)
}

/// Payload rate of the adapter's PCIe link less the headers of packets, in the row's unit.
fn dma_line_rate(spec: &RowSpec) -> Option<f64> {
    let site = spec.site_with(None)?;
    let (host, device) = site.device(spec.client.as_deref()?)?;
    let link = site.hosts[host.0].devices[device.0].pcie;
    let size = spec.size?;
    let (writes, reads) = (pcie::write_ceiling(&link, size).0, pcie::read_ceiling(&link, size).0);
    let rate = match spec.program {
        Program::DmaReadBw => reads,
        Program::DmaWriteBw => writes,
        _ => reads.min(writes),
    };
    Some(rate * unit(spec))
}

/// Factor from the program's own unit to the row's.
fn unit(spec: &RowSpec) -> f64 {
    spec.unit.convert(1.0) * spec.scale.unwrap_or(1.0) * spec.percent_of.map_or(1.0, |whole| 100.0 / whole)
}

/// Rate of the slowest link of a row's path: payload share of network packets and of PCIe writes, in the row's unit.
#[must_use]
pub fn line_rate(row: &Row, p: &Parameters) -> Option<f64> {
    let spec = spec(&row.id)?;
    if is_dma(spec.program) {
        return dma_line_rate(spec);
    }
    if !is_bandwidth(spec.program) {
        return None;
    }
    let site = spec.site_with(None)?;
    let client = spec.client.as_deref().unwrap_or(&site.hosts[0].name);
    let path = data_path(&site, p, client, spec.server.as_deref()?).ok()?;
    let payload = f64::from(path.mtu.min(u32::try_from(spec.size?).unwrap_or(u32::MAX)));
    let network = path.link_rate.0 * payload / (payload + f64::from(path.overhead[0]));
    let pcie = pcie_line_rate(&path, 0).0.min(pcie_line_rate(&path, 1).0);
    let both = if spec.bidirectional == Some(true) { 2.0 } else { 1.0 };
    Some(network.min(pcie) * both * unit(spec))
}

/// Distance of two rows of one program: sizes, then sites and memory.
fn distance(a: &RowSpec, b: &RowSpec) -> Option<f64> {
    if a.program != b.program || a.pattern != b.pattern {
        return None;
    }
    let ratio = |x: f64, y: f64| (x / y).log2().abs();
    let sizes = ratio(a.size.unwrap_or(1) as f64, b.size.unwrap_or(1) as f64);
    let channels =
        ratio(f64::from(a.pseudo_channels.unwrap_or(1)), f64::from(b.pseudo_channels.unwrap_or(1)));
    let place = |spec: &RowSpec| spec.server.as_deref().is_some_and(|server| server.contains('.'));
    let other = f64::from(a.site != b.site) + f64::from(place(a) != place(b));
    Some(sizes + 4.0 * channels + 2.0 * other)
}

/// The answer of somebody without model, who knows `known` rows.
///
/// A bandwidth is that of the slowest link, or for short messages the message rate of the nearest row if that is lower.
/// Everything else is the value of the nearest row of the same program. Where there is none, the row file has the answer.
#[must_use]
pub fn baseline(row: &Row, p: &Parameters, known: &[Row]) -> Option<Baseline> {
    let own = spec(&row.id)?;
    if own.no_baseline.is_some() {
        return None;
    }
    if let Some(given) = &own.baseline {
        return Some(given.clone());
    }
    let limit = line_rate(row, p);
    let is_long = matches!(own.category, Some(Category::Bandwidth | Category::PeerToPeer));
    if let (Some(value), true) = (limit, is_long) {
        return Some(Baseline { value, source: "rate of the slowest link".to_owned() });
    }
    let near = known.iter().filter_map(|other| {
        let theirs = spec(&other.id)?;
        Some((distance(own, theirs)?, theirs, other))
    });
    let nearest = match own.reference.as_deref() {
        Some(id) => known.iter().find(|row| row.id == id).and_then(|row| Some((0.0, spec(&row.id)?, row))),
        None => near.min_by(|a, b| a.0.total_cmp(&b.0)),
    };
    let from_row = nearest.and_then(|(_, theirs, other)| {
        let mut value = other.value.parse::<f64>().ok()? / unit(theirs) * unit(own);
        if is_bandwidth(own.program) {
            value *= own.size? as f64 / theirs.size? as f64;
        }
        Some(Baseline { value, source: format!("row {}", other.id) })
    });
    match (from_row, limit) {
        (Some(near), Some(limit)) if near.value > limit => {
            Some(Baseline { value: limit, source: "rate of the slowest link".to_owned() })
        }
        (Some(near), _) => Some(near),
        (None, limit) => limit.map(|value| Baseline { value, source: "rate of the slowest link".to_owned() }),
    }
}

/// Why a row has no answer without model, if the row file says so.
#[must_use]
pub fn why_no_baseline(row: &str) -> Option<&'static str> {
    spec(row)?.no_baseline.as_deref()
}

/// Site of a row's program.
#[must_use]
pub fn site_of(row: &Row) -> Option<&'static str> {
    spec(&row.id)?.site.as_deref()
}

/// The parameters with the devices that the site of a row defines.
#[must_use]
pub fn with_devices_of(row: &Row, p: &Parameters) -> Parameters {
    match site_of(row) {
        Some(name) => p.with_devices(&shipped(name).devices).into_owned(),
        None => p.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::{baseline, spec};
    use crate::Parameters;
    use crate::rows::estimate::estimate;
    use crate::rows::{calibration, questions, questions_2};

    #[test]
    fn a_baseline_from_a_row_has_its_value() {
        let rows = calibration();
        let mut count = 0;
        for question in questions_2() {
            let given = spec(&question.id).and_then(|spec| spec.baseline.as_ref());
            let by_hand = || estimate(&question.id).and_then(|estimate| estimate.baseline.as_ref());
            let Some(baseline) = given.or_else(by_hand) else { continue };
            let Some(id) = baseline.source.strip_prefix("row ") else { continue };
            let row = rows.iter().find(|row| row.id == id).unwrap_or_else(|| panic!("{}: {id}", question.id));
            let value: f64 = row.value.parse().unwrap();
            let (value, unit) =
                if row.unit == "ns" { (value * 1e-3, "us") } else { (value, row.unit.as_str()) };
            assert_eq!((value, unit), (baseline.value, question.unit.as_str()), "{}: {id}", question.id);
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn a_baseline_from_several_rows_is_their_formula() {
        let (rows, p) = (calibration(), Parameters::shipped());
        let row = |id: &str| -> f64 { rows.iter().find(|row| row.id == id).unwrap().value.parse().unwrap() };
        // A packet of 4 KiB takes the time of the software, or of the channel.
        let translation = row("A21") * 1e-6 / (4096.0 / (row("A06") * 1e9)) - 1.0;
        for (id, expected) in [
            ("C05", 4.0 / row("C02") + 4.0 / row("C04") + 4.0 / row("C03")),
            ("A01", 50.0),
            ("A02", 100.0 * translation),
            ("A24", 100.0 * translation),
            ("L04", 54.3 / 8.0 * row("D06")),
            ("N02", 1.6),
        ] {
            let question = questions().into_iter().find(|question| question.id == id).unwrap();
            let given = baseline(&question, &p, &rows).unwrap();
            assert!((given.value / expected - 1.0).abs() < 0.005, "{id}: {} of {expected}", given.value);
        }
    }
}
