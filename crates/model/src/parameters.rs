//! Parameters: named, physical, each with a plausible range and the reason for it.
//!
//! `data/parameters.toml` holds them. What a data sheet says is there with its source; what was fitted
//! lists the rows it was fitted to; a parameter that exists for one published number says so by listing one.

use crate::engine::{BytesPerSecond, Picos, Random};
use serde::Deserialize;
use std::collections::BTreeMap;

/// One parameter.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Its value.
    pub value: f64,
    /// The least that is plausible.
    pub low: f64,
    /// The most that is plausible.
    pub high: f64,
    /// Unit of all three.
    pub unit: String,
    /// What it is, and why this range.
    pub description: String,
    /// Rows that it is fitted to.
    #[serde(default)]
    pub fitted_to: Vec<String>,
    /// Whether it came after predictions had been filed.
    #[serde(default)]
    pub sampled_separately: bool,
}

/// All parameters by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    all: BTreeMap<String, Parameter>,
}

/// A parameter that cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// There is none of that name.
    #[error("no parameter {name:?}; near it: {near}")]
    Unknown {
        /// The name.
        name: String,
        /// Names that share its first word.
        near: String,
    },
    /// Not `name=number`.
    #[error("{0:?}: expected name=number")]
    Form(String),
    /// A number that cannot be.
    #[error("{name} = {value}: must be a number from 0 on")]
    Value {
        /// The name.
        name: String,
        /// The text.
        value: String,
    },
}

impl Default for Parameters {
    fn default() -> Self {
        Self::shipped()
    }
}

impl Parameters {
    /// Those that ship.
    ///
    /// # Panics
    /// Never: the file is part of the program, and a test reads it.
    #[must_use]
    pub fn shipped() -> Parameters {
        let all = toml::from_str(include_str!("../data/parameters.toml"))
            .expect("the shipped parameters are sound");
        Parameters { all }
    }

    /// All with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Parameter)> {
        self.all.iter().map(|(name, parameter)| (name.as_str(), parameter))
    }

    /// A parameter's value.
    ///
    /// # Panics
    /// If the model asks for a parameter that does not ship: every name is a word of this program.
    #[must_use]
    pub fn get(&self, name: &str) -> f64 {
        self.all.get(name).unwrap_or_else(|| panic!("parameter {name} ships")).value
    }

    /// A time in nanoseconds.
    #[must_use]
    pub fn nanos(&self, name: &str) -> Picos {
        Picos::from_nanos(self.get(name))
    }

    /// A rate in GB/s.
    #[must_use]
    pub fn gigabytes(&self, name: &str) -> BytesPerSecond {
        BytesPerSecond::gigabytes(self.get(name))
    }

    /// A whole number.
    #[must_use]
    pub fn count(&self, name: &str) -> u32 {
        self.get(name).round().max(1.0) as u32
    }

    /// Whether there is such a parameter.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    /// With another value for one parameter.
    #[must_use]
    pub fn with(&self, name: &str, value: f64) -> Parameters {
        let mut other = self.clone();
        if let Some(parameter) = other.all.get_mut(name) {
            parameter.value = value;
        }
        other
    }

    /// Takes `name=number`.
    ///
    /// # Errors
    /// [`ParameterError`] if that is no parameter or no number.
    pub fn set(&mut self, text: &str) -> Result<(), ParameterError> {
        let (name, value) = text.split_once('=').ok_or_else(|| ParameterError::Form(text.to_owned()))?;
        let number: Option<f64> = value.trim().parse().ok().filter(|v: &f64| v.is_finite() && *v >= 0.0);
        let Some(number) = number else {
            return Err(ParameterError::Value { name: name.to_owned(), value: value.to_owned() });
        };
        let Some(parameter) = self.all.get_mut(name.trim()) else {
            let first = name.split('.').next().unwrap_or_default();
            let near: Vec<&str> =
                self.all.keys().filter(|k| k.starts_with(first)).map(String::as_str).collect();
            let near = if near.is_empty() { "none; see docs/model.md".to_owned() } else { near.join(", ") };
            return Err(ParameterError::Unknown { name: name.to_owned(), near });
        };
        parameter.value = number;
        Ok(())
    }

    /// A draw from all ranges: below the value as often as above it, evenly on each side. Parameters that came
    /// late have a sequence of their own: what was filed before is drawn as it was.
    #[must_use]
    pub fn sample(&self, seed: u64) -> Parameters {
        let (mut random, mut late) = (Random::new(seed), Random::new(!seed));
        let mut other = self.clone();
        for parameter in other.all.values_mut() {
            let random = if parameter.sampled_separately { &mut late } else { &mut random };
            let end = if random.uniform() < 0.5 { parameter.low } else { parameter.high };
            parameter.value += (end - parameter.value) * random.uniform();
        }
        other
    }
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
    fn bad_settings_say_why() {
        let mut parameters = Parameters::shipped();
        for (text, why) in [
            ("nonsense", "name=number"),
            ("pcie.nothing=3", "pcie.efficiency"),
            ("pcie.efficiency=fast", "must be a number"),
        ] {
            let error = parameters.set(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        parameters.set("pcie.efficiency=0.9").unwrap();
        assert_eq!(parameters.get("pcie.efficiency"), 0.9);
    }
}
