//! The device library: processors, adapters, cards and switches with the numbers that the model needs.
//!
//! `devices/*.toml` ships with the program; `[device.ID]` in a site file adds devices of one's own. A site names a device by
//! its model, for example `model = "ConnectX-5"`. A name that no device has is an error that lists the nearest ones.
//!
//! ```text
//!   [connectx-5]                      id: first word of the parameters, connectx-5.message.gap
//!   kind = "adapter"
//!   names = ["ConnectX-5*", "MT4119"] models of site files; * and ? stand for any characters
//!   like = "connectx"                 device whose values apply where this one has none
//!   [connectx-5.values]
//!   "message.gap" = { value = 110.0, low = 60.0, high = 200.0, unit = "ns", source = "…" }
//! ```

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

/// What a device is; sites look names up among devices of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A processor with its root complex.
    Processor,
    /// A PCIe switch.
    PcieSwitch,
    /// A network adapter.
    Adapter,
    /// An accelerator card: FPGA or GPU.
    Card,
    /// A network switch.
    NetworkSwitch,
    /// A solid-state disk.
    Ssd,
    /// A memory device behind a CXL link.
    CxlMemory,
    /// A CXL switch.
    CxlSwitch,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Processor => "processor",
            Kind::PcieSwitch => "PCIe switch",
            Kind::Adapter => "adapter",
            Kind::Card => "card",
            Kind::NetworkSwitch => "network switch",
            Kind::Ssd => "SSD",
            Kind::CxlMemory => "CXL memory",
            Kind::CxlSwitch => "CXL switch",
        })
    }
}

/// One number of a device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Value {
    /// Value.
    pub value: f64,
    /// Smallest plausible value.
    pub low: f64,
    /// Largest plausible value.
    pub high: f64,
    /// Unit of value and range.
    pub unit: String,
    /// Meaning, and where the value is from.
    pub source: String,
    /// Calibrated rows that it is fitted to.
    #[serde(default)]
    pub fitted_to: Vec<String>,
}

/// Whether nothing moves where this value is 0: a rate, or a factor of one.
#[must_use]
pub fn is_rate(name: &str, unit: &str) -> bool {
    let is_factor = ["efficiency", "utilization", "socket.links"].iter().any(|what| name.contains(what));
    matches!(unit, "GB/s" | "kIOPS" | "1/us") || name.ends_with("rate") || is_factor
}

/// Numbers that the model computes with: rates and factors from a thousandth on, times up to a second.
#[must_use]
pub fn limits(name: &str, unit: &str) -> RangeInclusive<f64> {
    let low = if is_rate(name, unit) { 1e-3 } else { 0.0 };
    let high = match unit {
        "ns" => 1e9,
        "us" => 1e6,
        _ => 1e12,
    };
    low..=high
}

/// A device of the library.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceModel {
    /// What it is.
    pub kind: Kind,
    /// Models that site files call it; `*` and `?` stand for any characters. Empty: only for `like`.
    pub names: Vec<String>,
    /// Device whose values apply where this one has none.
    pub like: Option<String>,
    /// Lanes of its PCIe link; of a PCIe switch, those of all its ports together.
    pub lanes: Option<u32>,
    /// Numbers by name.
    #[serde(default)]
    pub values: BTreeMap<String, Value>,
}

/// A device file with an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {message}")]
pub struct LibraryError {
    /// Name of the file.
    pub file: String,
    /// Device, field and error.
    pub message: String,
}

/// No device has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no {kind} {name:?} in the device library; nearest: {}. Add it with [device.ID], or to devices/*.toml",
    .near.join(", ")
)]
pub struct UnknownDevice {
    /// Kind that the site needs.
    pub kind: Kind,
    /// The given name.
    pub name: String,
    /// Names of devices of this kind, most similar first.
    pub near: Vec<String>,
}

/// Devices by id; values of `like` are copied into each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Library {
    devices: BTreeMap<String, DeviceModel>,
    /// Ids that a site file defines.
    own: BTreeSet<String>,
}

const FILES: &[(&str, &str)] = &[
    ("devices/adapters.toml", include_str!("../devices/adapters.toml")),
    ("devices/cards.toml", include_str!("../devices/cards.toml")),
    ("devices/cxl-memory.toml", include_str!("../devices/cxl-memory.toml")),
    ("devices/cxl-switches.toml", include_str!("../devices/cxl-switches.toml")),
    ("devices/gpus.toml", include_str!("../devices/gpus.toml")),
    ("devices/network-switches.toml", include_str!("../devices/network-switches.toml")),
    ("devices/processors.toml", include_str!("../devices/processors.toml")),
    ("devices/ssds.toml", include_str!("../devices/ssds.toml")),
    ("devices/switches.toml", include_str!("../devices/switches.toml")),
];

/// Values that the model reads and no shipped device has: prices, completions to peers, transports in software, node
/// processes of a torus.
const OPTIONAL: [&str; 11] = [
    "price",
    "peer.read.rate",
    "core.copy.rate",
    "core.message.time",
    "core.packet.time",
    "core.ack.time",
    "torus.end.latency",
    "torus.hop.latency",
    "torus.packet.time",
    "torus.copy.rate",
    "torus.cores",
];

static SHIPPED: LazyLock<Library> = LazyLock::new(|| {
    let mut library = Library::default();
    for (file, text) in FILES {
        library.read(file, text).unwrap_or_else(|error| panic!("a test reads the shipped library: {error}"));
    }
    library
});

impl Library {
    /// The shipped library.
    #[must_use]
    pub fn shipped() -> &'static Library {
        &SHIPPED
    }

    /// Adds the devices of a file.
    ///
    /// # Errors
    /// [`LibraryError`] names the file, the device and the field.
    pub fn read(&mut self, file: &str, text: &str) -> Result<(), LibraryError> {
        let fail = |message: String| LibraryError { file: file.to_owned(), message };
        let devices: BTreeMap<String, DeviceModel> =
            toml::from_str(text).map_err(|error| fail(error.to_string().trim_end().to_owned()))?;
        self.add(devices).map_err(fail)
    }

    /// Adds devices of a site file; they replace shipped ones of the same id, and their names come first.
    pub(crate) fn replace(&mut self, devices: BTreeMap<String, DeviceModel>) -> Result<(), String> {
        for (id, device) in &devices {
            self.check_value_names(id, device)?;
        }
        for id in devices.keys() {
            self.devices.remove(id);
            self.own.insert(id.clone());
        }
        self.add(devices)
    }

    /// Checks that a device has values of its kind only: a misspelt one would have no effect.
    fn check_value_names(&self, id: &str, device: &DeviceModel) -> Result<(), String> {
        let of_kind = self.devices.values().filter(|known| known.kind == device.kind);
        let known: BTreeSet<&str> = of_kind
            .flat_map(|known| known.values.keys().map(String::as_str))
            .chain(OPTIONAL.iter().copied())
            .collect();
        let Some(unknown) = device.values.keys().find(|name| !known.contains(name.as_str())) else {
            return Ok(());
        };
        let mut near: Vec<&str> = known.into_iter().collect();
        near.sort_by_cached_key(|name| distance(name, unknown));
        near.truncate(3);
        Err(format!(
            "device {id:?}: no value {unknown:?} for devices of kind {}; nearest: {}",
            device.kind,
            near.join(", ")
        ))
    }

    /// Adds devices, which may be like each other.
    fn add(&mut self, devices: BTreeMap<String, DeviceModel>) -> Result<(), String> {
        let mut waiting: Vec<(String, DeviceModel)> = devices.into_iter().collect();
        while !waiting.is_empty() {
            let before = waiting.len();
            let mut left = Vec::new();
            for (id, device) in waiting {
                match &device.like {
                    Some(base) if !self.devices.contains_key(base) => left.push((id, device)),
                    _ => self.add_one(id, device)?,
                }
            }
            if left.len() == before {
                let (id, device) = &left[0];
                let base = device.like.as_deref().unwrap_or_default();
                return Err(format!("device {id:?}: field `like`: no device {base:?}, or a cycle"));
            }
            waiting = left;
        }
        Ok(())
    }

    fn add_one(&mut self, id: String, mut device: DeviceModel) -> Result<(), String> {
        if id.is_empty() || !id.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-') {
            return Err(format!("device {id:?}: an id has lower-case letters, digits and - only"));
        }
        if self.devices.contains_key(&id) {
            return Err(format!("device {id:?} is defined twice"));
        }
        for (name, value) in &device.values {
            let Value { value, low, high, ref unit, .. } = *value;
            if is_rate(name, unit) && (value <= 0.0 || low <= 0.0) {
                return Err(format!(
                    "device {id:?}: {name:?} = {value} with low = {low}: both must be above 0, nothing moves at a rate of 0"
                ));
            }
            if !(low <= value && value <= high) {
                return Err(format!(
                    "device {id:?}: {name:?} = {value}: not within its range {low} to {high}"
                ));
            }
            let limits = limits(name, unit);
            if let Some(end) = [low, high].iter().find(|end| !limits.contains(end)) {
                let (least, most) = limits.into_inner();
                return Err(format!("device {id:?}: {name:?}: {end} {unit}: must be {least} to {most}"));
            }
        }
        if let Some(base) = device.like.as_ref().and_then(|base| self.devices.get(base)) {
            if base.kind != device.kind {
                return Err(format!("device {id:?}: a {} cannot be like a {}", device.kind, base.kind));
            }
            device.lanes = device.lanes.or(base.lanes);
            for (name, value) in &base.values {
                // A value that was fitted to rows of another device is only an estimate for this one.
                let inherited = Value { fitted_to: Vec::new(), ..value.clone() };
                device.values.entry(name.clone()).or_insert(inherited);
            }
        }
        self.devices.insert(id, device);
        Ok(())
    }

    /// All devices with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &DeviceModel)> {
        self.devices.iter().map(|(id, device)| (id.as_str(), device))
    }

    /// A device by its id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&DeviceModel> {
        self.devices.get(id)
    }

    /// Id of the device of a kind with this model name. A device of the site file comes first. Among those and among the shipped
    /// ones, the longest matching name wins: `ConnectX-4 Lx` before `ConnectX-4*`.
    ///
    /// # Errors
    /// [`UnknownDevice`] lists the nearest names.
    pub fn find(&self, kind: Kind, name: &str) -> Result<&str, UnknownDevice> {
        let of_kind = || self.iter().filter(|(_, device)| device.kind == kind);
        let found = of_kind()
            .flat_map(|(id, device)| device.names.iter().map(move |pattern| (id, pattern)))
            .filter(|(id, pattern)| matches(pattern, name) || *id == name)
            .max_by_key(|(id, pattern)| {
                (self.own.contains(*id), pattern.chars().filter(|c| !"*?".contains(*c)).count())
            });
        match found {
            Some((id, _)) => Ok(id),
            None => {
                let mut near: Vec<&String> = of_kind().flat_map(|(_, device)| &device.names).collect();
                near.sort_by_cached_key(|pattern| distance(&pattern.to_lowercase(), &name.to_lowercase()));
                let near = near.into_iter().take(5).cloned().collect();
                Err(UnknownDevice { kind, name: name.to_owned(), near })
            }
        }
    }
}

/// Whether a name matches a pattern with `*` and `?`, without regard to case.
fn matches(pattern: &str, name: &str) -> bool {
    fn rest(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern.first(), name.first()) {
            (None, None) => true,
            (Some(b'*'), _) => rest(&pattern[1..], name) || (!name.is_empty() && rest(pattern, &name[1..])),
            (Some(b'?'), Some(_)) => rest(&pattern[1..], &name[1..]),
            (Some(a), Some(b)) if a.eq_ignore_ascii_case(b) => rest(&pattern[1..], &name[1..]),
            _ => false,
        }
    }
    rest(pattern.as_bytes(), name.as_bytes())
}

/// Edit distance (Levenshtein) of two texts.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut above_left = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = above_left + usize::from(x != *y);
            above_left = row[j + 1];
            row[j + 1] = replaced.min(above_left + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{Kind, Library};

    #[test]
    fn models_of_site_files_find_their_device() {
        let library = Library::shipped();
        for (kind, name, id) in [
            (Kind::Processor, "Xeon E5-2620 v2", "ivybridge-ep"),
            (Kind::Processor, "EPYC 7452", "rome"),
            (Kind::Processor, "EPYC 7763", "milan"),
            (Kind::Adapter, "ConnectX-4 Lx", "connectx-4-lx"),
            (Kind::Adapter, "ConnectX-6", "connectx-6"),
            (Kind::Adapter, "connectx-6 dx", "connectx-6-dx"),
            (Kind::Card, "Alveo U280", "u280"),
            (Kind::PcieSwitch, "PEX88096", "pex88096"),
        ] {
            assert_eq!(library.find(kind, name), Ok(id), "{name}");
        }
    }

    #[test]
    fn an_unknown_device_is_an_error_that_lists_the_nearest() {
        let library = Library::shipped();
        let error = library.find(Kind::Adapter, "ConectX-6").unwrap_err();
        assert_eq!(error.near[0], "ConnectX-6");
        assert!(error.to_string().contains("no adapter \"ConectX-6\""), "{error}");
        // A processor is no adapter.
        assert!(library.find(Kind::Adapter, "EPYC 7452").is_err());
        assert!(library.find(Kind::Processor, "EPYC 1").is_err());
    }

    #[test]
    fn values_are_inherited_without_the_rows_they_were_fitted_to() {
        let library = Library::shipped();
        let (base, device) = (library.get("connectx").unwrap(), library.get("connectx-5").unwrap());
        let (base, device) = (&base.values["outstanding.reads"], &device.values["outstanding.reads"]);
        assert_eq!(base.value, device.value);
        assert!(device.fitted_to.is_empty());
    }

    #[test]
    fn invalid_device_files_are_refused_with_the_reason() {
        let value = "value = 1.0, unit = \"ns\", source = \"s\"";
        for (text, why) in [
            ("[a]\nkind = \"adapter\"\nnames = []\nlike = \"b\"", "no device \"b\""),
            ("[a]\nkind = \"toaster\"\nnames = []", "toaster"),
            ("[a]\nkind = \"adapter\"\nnames = []\ncolour = 3", "colour"),
            ("[A]\nkind = \"adapter\"\nnames = []", "lower-case"),
            (
                &format!(
                    "[a]\nkind = \"adapter\"\nnames = []\nvalues.x = {{ {value}, low = 2.0, high = 3.0 }}"
                ),
                "range",
            ),
            (
                "[a]\nkind = \"adapter\"\nnames = []\n\
                 values.\"write.rate\" = { value = 0.0, low = 0.0, high = 3.0, unit = \"GB/s\", source = \"s\" }",
                "\"write.rate\" = 0 with low = 0: both must be above 0",
            ),
            (
                "[a]\nkind = \"adapter\"\nnames = []\n\
                 values.\"link.efficiency\" = { value = 0.5, low = 0.0, high = 1.0, unit = \"1\", source = \"s\" }",
                "with low = 0",
            ),
            (
                "[a]\nkind = \"adapter\"\nnames = []\n\
                 values.\"link.efficiency\" = { value = 0.5, low = 1e-300, high = 1.0, unit = \"1\", source = \"s\" }",
                "must be 0.001 to 1000000000000",
            ),
            (
                "[a]\nkind = \"adapter\"\nnames = []\n\
                 values.\"tx.latency\" = { value = 1.0, low = 0.0, high = inf, unit = \"ns\", source = \"s\" }",
                "\"tx.latency\": inf ns: must be 0 to 1000000000",
            ),
        ] {
            let error = Library::default().read("mine.toml", text).unwrap_err().to_string();
            assert!(error.starts_with("mine.toml: ") && error.contains(why), "{error}");
        }
    }
}
