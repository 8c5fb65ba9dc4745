//! A fit as text, and as a device file.

use super::{Compared, FittedParameter, SiteFit, disk};
use crate::measurements::Measured;
use millstream_site::Site;
use millstream_site::device::{DeviceModel, Library, Value};
use std::collections::BTreeMap;
use std::fmt;

/// Relative deviation after the fit above which the report counts a row.
const OFF: f64 = 0.1;

/// A fit for readers.
#[derive(Debug)]
pub struct SiteFitReport<'a>(pub &'a SiteFit);

impl fmt::Display for SiteFitReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fit = self.0;
        writeln!(f, "benchmark        bytes  depth      measured        before           after")?;
        for row in &fit.compared {
            let (name, depth) = match &row.measurement.what {
                Measured::Benchmark(benchmark) => (benchmark.info().name, String::new()),
                Measured::Disk { access, outstanding } => (disk::name(*access), outstanding.to_string()),
            };
            let off = |value: f64| 100.0 * (value / row.measurement.value - 1.0);
            writeln!(
                f,
                "{name:<14} {:>8}  {depth:>5}  {:>12.4e}  {:>+9.1} %     {:>+9.1} %",
                row.measurement.size,
                row.measurement.value,
                off(row.before),
                off(row.after)
            )?;
        }
        let is_off = |row: &&Compared| (row.after / row.measurement.value - 1.0).abs() > OFF;
        let off = fit.compared.iter().filter(is_off).count();
        if off > 0 {
            writeln!(f, "{off} of {} rows are off by more than 10 % after the fit", fit.compared.len())?;
        }
        writeln!(f, "\nparameter                          before      after       90 % interval")?;
        for q in &fit.parameters {
            let [low, high] = q.range;
            let verdict = match (&q.together_with, q.is_determined) {
                _ if q.is_at_end => "at the end of its range: is the range right?".to_owned(),
                (_, true) => "determined".to_owned(),
                (Some(other), false) => format!("not determined, only together with {other}"),
                (None, false) => "not determined".to_owned(),
            };
            writeln!(
                f,
                "{:<34} {:<10.5}  {:<10.5}  {low:.5} to {high:.5}: {verdict}",
                q.name, q.before, q.after
            )?;
        }
        if !fit.without_effect.is_empty() {
            writeln!(f, "\nno measurement depends on: {}", fit.without_effect.join(", "))?;
        }
        Ok(())
    }
}

/// A fit as `[device.ID]` tables for a site file.
#[derive(Debug)]
pub struct DeviceFile<'a> {
    /// The fit.
    pub fit: &'a SiteFit,
    /// The site, whose own devices are kept.
    pub site: &'a Site,
    /// Name of the measurements.
    pub source: &'a str,
}

/// A string as TOML.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn write_value(f: &mut fmt::Formatter<'_>, name: &str, value: &Value) -> fmt::Result {
    let Value { value: number, low, high, .. } = value;
    writeln!(
        f,
        "{} = {{ value = {number:?}, low = {low:?}, high = {high:?}, unit = {}, source = {} }}",
        quoted(name),
        quoted(&value.unit),
        quoted(&value.source)
    )
}

impl DeviceFile<'_> {
    fn write_device(
        &self,
        f: &mut fmt::Formatter<'_>,
        id: &str,
        device: &DeviceModel,
        found: &BTreeMap<&str, &FittedParameter>,
    ) -> fmt::Result {
        let names: Vec<String> = device.names.iter().map(|name| quoted(name)).collect();
        writeln!(f, "\n[device.{id}]\nkind = {}\nnames = [{}]", quoted(kind(device)), names.join(", "))?;
        if let Some(lanes) = device.lanes {
            writeln!(f, "lanes = {lanes}")?;
        }
        writeln!(f, "\n[device.{id}.values]")?;
        for (name, value) in &device.values {
            match found.get(name.as_str()) {
                None => write_value(f, name, value)?,
                Some(q) => {
                    let [low, high] = q.range;
                    let source = format!("{}; fitted to {}", value.source, self.source);
                    let ends = (low.min(q.after), high.max(q.after));
                    let new = Value { value: q.after, low: ends.0, high: ends.1, source, ..value.clone() };
                    write_value(f, name, &new)?;
                }
            }
        }
        Ok(())
    }
}

/// Name of a device's kind in TOML.
fn kind(device: &DeviceModel) -> &'static str {
    use millstream_site::device::Kind;
    match device.kind {
        Kind::Processor => "processor",
        Kind::PcieSwitch => "pcie-switch",
        Kind::Adapter => "adapter",
        Kind::Card => "card",
        Kind::NetworkSwitch => "network-switch",
        Kind::Ssd => "ssd",
        Kind::CxlMemory => "cxl-memory",
        Kind::CxlSwitch => "cxl-switch",
    }
}

impl fmt::Display for DeviceFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Devices fitted to {}. Append this to the site file.", self.source)?;
        let mut devices: BTreeMap<&str, BTreeMap<&str, &FittedParameter>> = BTreeMap::new();
        let known = self
            .fit
            .parameters
            .iter()
            .filter(|q| q.is_determined || q.is_at_end || q.together_with.is_some());
        for q in known {
            let Some((owner, value)) = q.name.split_once('.') else { continue };
            devices.entry(owner).or_default().insert(value, q);
        }
        for (id, found) in &devices {
            match self.site.devices.get(*id).or_else(|| Library::shipped().get(id)) {
                Some(device) => self.write_device(f, id, device, found)?,
                // Parameters of protocols and software belong to no device.
                None => found.values().try_for_each(|q| writeln!(f, "# --set {}={}", q.name, q.after))?,
            }
        }
        Ok(())
    }
}
