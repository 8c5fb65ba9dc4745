//! Model parameters: physical quantities with a plausible range.
//!
//! `data/parameters.toml` has those of protocols and software, `devices/*.toml` those of devices ([`Library`]): value `V` of
//! device `D` is parameter `D.V`. A fitted parameter lists its rows; a parameter with a single row was fitted to one published
//! number.

use crate::engine::{BytesPerSecond, Picos, Random};
use millstream_site::device::{self, DeviceModel, Library};
use serde::Deserialize;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// The interval from one refresh of an HBM to the next, and the time that it takes.
const REFRESH: [&str; 2] = ["hbm.refresh.interval", "hbm.refresh.cycle"];

/// One parameter.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Value.
    pub value: f64,
    /// Smallest plausible value.
    pub low: f64,
    /// Largest plausible value.
    pub high: f64,
    /// Unit of value and range.
    pub unit: String,
    /// Meaning, and reason for the range.
    pub description: String,
    /// Calibrated rows that it is fitted to.
    #[serde(default)]
    pub fitted_to: Vec<String>,
}

impl Parameter {
    /// Whether nothing moves with a 0: a rate, or a factor of a rate.
    fn is_rate(&self, name: &str) -> bool {
        self.low > 0.0 && device::is_rate(name, &self.unit)
    }
}

/// All parameters by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    all: BTreeMap<String, Parameter>,
    /// Seed of the sample that this is; devices of a site are sampled with it, too.
    drawn: Option<u64>,
    /// Devices of a site file that are already here.
    of_site: BTreeSet<String>,
}

/// A parameter that cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// No parameter has this name.
    #[error("no parameter {name:?}; similar names: {near}")]
    Unknown {
        /// The given name.
        name: String,
        /// Parameters with the same first word.
        near: String,
    },
    /// The setting is not `name=number`.
    #[error("{0:?}: expected NAME=NUMBER")]
    Form(String),
    /// The number is invalid.
    #[error("{name} = {value:?}: must be a number {range}")]
    Value {
        /// Name of the parameter.
        name: String,
        /// The given value.
        value: String,
        /// Valid numbers.
        range: String,
    },
}

thread_local! {
    /// Parameters that a run reads, while someone asks for them.
    static READS: RefCell<Option<BTreeSet<String>>> = const { RefCell::new(None) };
}

fn record(name: &str) {
    READS.with_borrow_mut(|reads| {
        if let Some(reads) = reads
            && !reads.contains(name)
        {
            reads.insert(name.to_owned());
        }
    });
}

impl Default for Parameters {
    fn default() -> Self {
        Self::shipped()
    }
}

impl Parameters {
    /// The shipped parameters.
    ///
    /// # Panics
    /// Never: a test reads the shipped file.
    #[must_use]
    pub fn shipped() -> Parameters {
        let all = toml::from_str(include_str!("../data/parameters.toml"))
            .expect("a test reads the shipped parameters");
        let mut parameters = Parameters { all, drawn: None, of_site: BTreeSet::new() };
        Library::shipped().iter().for_each(|(id, device)| parameters.add_device(id, device));
        parameters
    }

    fn add_device(&mut self, id: &str, device: &DeviceModel) {
        for (name, value) in &device.values {
            let parameter = Parameter {
                value: value.value,
                low: value.low,
                high: value.high,
                unit: value.unit.clone(),
                description: value.source.clone(),
                fitted_to: value.fitted_to.clone(),
            };
            self.all.insert(format!("{id}.{name}"), parameter);
        }
    }

    /// These parameters and those of the devices that a site file defines.
    #[must_use]
    pub fn with_devices(&self, devices: &BTreeMap<String, DeviceModel>) -> Cow<'_, Parameters> {
        let new: Vec<_> = devices.iter().filter(|(id, _)| !self.of_site.contains(*id)).collect();
        if new.is_empty() {
            return Cow::Borrowed(self);
        }
        let mut other = self.clone();
        for (id, device) in new {
            other.add_device(id, device);
            other.of_site.insert(id.clone());
            if let Some(seed) = self.drawn {
                let names = device.values.keys().map(|value| format!("{id}.{value}"));
                names.for_each(|name| other.sample_one(&name, seed));
            }
        }
        Cow::Owned(other)
    }

    /// Value of a device, if the library has it.
    #[must_use]
    pub fn device(&self, id: &str, value: &str) -> Option<f64> {
        let name = format!("{id}.{value}");
        let found = self.all.get(&name)?;
        record(&name);
        Some(found.value)
    }

    /// All parameters with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Parameter)> {
        self.all.iter().map(|(name, parameter)| (name.as_str(), parameter))
    }

    /// Value of a parameter.
    ///
    /// # Panics
    /// If no parameter has this name: the code only uses shipped names.
    #[must_use]
    pub fn get(&self, name: &str) -> f64 {
        record(name);
        self.all.get(name).unwrap_or_else(|| panic!("no parameter {name}")).value
    }

    /// A time given in nanoseconds.
    #[must_use]
    pub fn nanos(&self, name: &str) -> Picos {
        Picos::from_nanos(self.get(name))
    }

    /// A rate given in GB/s.
    #[must_use]
    pub fn gigabytes(&self, name: &str) -> BytesPerSecond {
        BytesPerSecond::gigabytes(self.get(name))
    }

    /// A positive integer.
    #[must_use]
    pub fn count(&self, name: &str) -> u32 {
        self.get(name).round().max(1.0) as u32
    }

    /// A parameter by name.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.all.get(name)
    }

    /// Whether a parameter has this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    /// A copy with another value for one parameter.
    #[must_use]
    pub fn with(&self, name: &str, value: f64) -> Parameters {
        let mut other = self.clone();
        if let Some(parameter) = other.all.get_mut(name) {
            parameter.value = value;
        }
        other
    }

    /// A copy with another value for a parameter and for the devices that inherit it through `like`.
    #[must_use]
    pub fn with_heirs(&self, name: &str, value: f64) -> Parameters {
        let mut other = self.with(name, value);
        let Some((device, what)) = name.split_once('.') else { return other };
        let Some(old) = self.all.get(name) else { return other };
        let is_like = |id: &str| {
            let like = |id: &str| Library::shipped().get(id)?.like.clone();
            std::iter::successors(like(id), |id| like(id)).any(|base| base == device)
        };
        for (id, _) in Library::shipped().iter().filter(|(id, _)| is_like(id)) {
            let Some(heir) = other.all.get_mut(&format!("{id}.{what}")) else { continue };
            if (heir.value, heir.low, heir.high) == (old.value, old.low, old.high) {
                heir.value = value;
            }
        }
        other
    }

    /// Value of a fitted parameter without its rows: that of the same value of a similar device, or the middle of the range.
    #[must_use]
    pub(crate) fn without_rows(&self, name: &str, left_out: &BTreeSet<String>) -> f64 {
        let Some(parameter) = self.all.get(name) else { return f64::NAN };
        let middle = if parameter.low > 0.0 {
            (parameter.low * parameter.high).sqrt()
        } else {
            f64::midpoint(parameter.low, parameter.high)
        };
        let similar = name.split_once('.').and_then(|(device, value)| {
            let like = Library::shipped().get(device)?.like.as_ref()?;
            let similar = self.all.get(&format!("{like}.{value}"))?;
            // A value that only these rows fit is no other knowledge.
            let is_known =
                similar.fitted_to.is_empty() || similar.fitted_to.iter().any(|id| !left_out.contains(id));
            is_known.then_some(similar.value)
        });
        similar.unwrap_or(middle).clamp(parameter.low, parameter.high)
    }

    /// Sets a parameter from `name=number`.
    ///
    /// # Errors
    /// [`ParameterError`] if the name or the number is invalid.
    pub fn set(&mut self, text: &str) -> Result<(), ParameterError> {
        let (name, value) = text.split_once('=').ok_or_else(|| ParameterError::Form(text.to_owned()))?;
        let number: Option<f64> = value.trim().parse().ok().filter(|v: &f64| v.is_finite() && *v >= 0.0);
        let invalid = |range: &str| ParameterError::Value {
            name: name.to_owned(),
            value: value.to_owned(),
            range: range.to_owned(),
        };
        let number = number.ok_or_else(|| invalid("of 0 or more"))?;
        let Some(parameter) = self.all.get_mut(name.trim()) else {
            let first = name.split('.').next().unwrap_or_default();
            let near: Vec<&str> =
                self.all.keys().filter(|k| k.starts_with(first)).map(String::as_str).collect();
            let near = if near.is_empty() {
                "none; `millstream model calibrate` lists all".to_owned()
            } else {
                near.join(", ")
            };
            return Err(ParameterError::Unknown { name: name.to_owned(), near });
        };
        if number == 0.0 && parameter.is_rate(name) {
            return Err(invalid("above 0"));
        }
        let limits = device::limits(name.trim(), &parameter.unit);
        if number != 0.0 && !limits.contains(&number) {
            let (least, most) = limits.into_inner();
            return Err(invalid(&format!("from {least} to {most} ({})", parameter.unit)));
        }
        let before = std::mem::replace(&mut parameter.value, number);
        // A memory that refreshes all the time transfers nothing.
        let [interval, cycle] =
            REFRESH.map(|name| self.all.get(name).map_or(0.0, |parameter| parameter.value));
        if REFRESH.contains(&name.trim()) && interval > 0.0 && interval <= cycle {
            if let Some(parameter) = self.all.get_mut(name.trim()) {
                parameter.value = before;
            }
            return Err(invalid(&format!(
                "so that {} ({interval} ns) is above {} ({cycle} ns), or 0",
                REFRESH[0], REFRESH[1]
            )));
        }
        Ok(())
    }

    /// Samples all parameters from their ranges: below or above the value with equal probability, uniformly on each side.
    ///
    /// Each parameter has a random sequence of its own, whose seed contains its name. An added parameter therefore does not
    /// change the samples of the others.
    #[must_use]
    pub fn sample(&self, seed: u64) -> Parameters {
        let mut other = Parameters { drawn: Some(seed), ..self.clone() };
        self.all.keys().for_each(|name| other.sample_one(name, seed));
        other
    }

    fn sample_one(&mut self, name: &str, seed: u64) {
        let Some(parameter) = self.all.get_mut(name) else { return };
        let (is_low, share) = Parameters::position(name, seed);
        let end = if is_low { parameter.low } else { parameter.high };
        parameter.value += (end - parameter.value) * share;
    }

    /// Where a sample of a parameter is: on the low side of its value or not, and the share of the way to that end.
    pub(crate) fn position(name: &str, seed: u64) -> (bool, f64) {
        let mut random = Random::new(seed_of(name, seed));
        let is_low = random.uniform() < 0.5;
        (is_low, random.uniform())
    }

    /// The result of `run`, and the names of the parameters that it reads on this thread.
    pub(crate) fn reads_of<T>(run: impl FnOnce() -> T) -> (T, BTreeSet<String>) {
        let before = READS.replace(Some(BTreeSet::new()));
        let result = run();
        (result, READS.replace(before).unwrap_or_default())
    }
}

/// Seed of a parameter's random sequence: FNV-1a of its name, combined with the draw's seed.
pub(crate) fn seed_of(name: &str, draw: u64) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // SplitMix64's increment is odd, so different draws of one name never share a seed.
    hash ^ draw.wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_values_are_within_their_ranges() {
        let parameters = Parameters::shipped();
        assert!(parameters.iter().count() > 20);
        for (name, p) in parameters.iter() {
            assert!(
                p.low <= p.value && p.value <= p.high,
                "{name}: {} not in {} to {}",
                p.value,
                p.low,
                p.high
            );
            assert!(!p.description.is_empty() && !p.unit.is_empty(), "{name}");
        }
    }

    #[test]
    fn samples_stay_in_range_and_follow_their_seed() {
        let parameters = Parameters::shipped();
        assert_eq!(parameters.sample(3), parameters.sample(3));
        assert_ne!(parameters.sample(3), parameters.sample(4));
        for (name, p) in parameters.sample(5).iter() {
            assert!(p.low <= p.value && p.value <= p.high, "{name}");
        }
    }

    #[test]
    fn an_added_parameter_does_not_change_the_samples_of_others() {
        let few = Parameters::shipped();
        let mut more = few.clone();
        let added = few.all["pcie.efficiency"].clone();
        more.all.insert("a.first.name".to_owned(), added.clone());
        more.all.insert("m.middle.name".to_owned(), added);
        for seed in 1..20 {
            let (few, more) = (few.sample(seed), more.sample(seed));
            for (name, parameter) in few.iter() {
                assert_eq!(parameter.value, more.get(name), "{name}");
            }
        }
    }

    #[test]
    fn invalid_settings_are_refused_with_the_reason() {
        let mut parameters = Parameters::shipped();
        for (text, why) in [
            ("nonsense", "NAME=NUMBER"),
            ("pcie.nothing=3", "pcie.efficiency"),
            ("pcie.efficiency=fast", "must be a number of 0 or more"),
            ("connectx-5.link.efficiency=0", "must be a number above 0"),
            ("connectx-5.inline.rate=0.0", "must be a number above 0"),
            ("hbm.refresh.interval=200", "hbm.refresh.interval (200 ns) is above hbm.refresh.cycle"),
            ("hbm.refresh.cycle=4000", "is above hbm.refresh.cycle (4000 ns)"),
        ] {
            let error = parameters.set(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(parameters.get("hbm.refresh.interval") > parameters.get("hbm.refresh.cycle"));
        parameters.set("hbm.refresh.interval=0").unwrap();
        parameters.set("connectx-5.message.gap=0").unwrap();
        parameters.set("pcie.efficiency=0.9").unwrap();
        assert_eq!(parameters.get("pcie.efficiency"), 0.9);
    }
}
