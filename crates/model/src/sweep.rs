//! What if: other values for parameters and for fields of the site, one or many.
//!
//! ```text
//!   NAME=VALUE        one value
//!   NAME=V,V,V        each of a list
//!   NAME=A..B         every whole number from A to B
//!   NAME=A..B+STEP    from A to B in steps
//!   NAME=A..B*FACTOR  from A to B, each so many times the one before
//! ```
//! A range's numbers may have a unit: `250 MHz..450 MHz+50`. `NAME` is a parameter, or a path into the site
//! file ([`millstream_site::edit`]). Several settings make all combinations.

use crate::parameters::{ParameterError, Parameters};
use millstream_site::edit::{self, EditError};
use millstream_site::{Site, SiteError};
use std::str::FromStr;

/// A name and the values that it takes, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// A parameter's name, or a path into the site file.
    pub name: String,
    /// Values as texts.
    pub values: Vec<String>,
}

/// A setting that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SweepError {
    /// Not in the form that the module describes.
    #[error("{text:?}: {why}")]
    Form {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// More points than anybody waits for.
    #[error("these settings make more than {MAX_POINTS} combinations")]
    TooMany,
    /// A path into a site where there is none.
    #[error("{0}: this command has no site file; only parameters can be set")]
    NoSite(String),
    /// A parameter's fault.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// A path's fault.
    #[error(transparent)]
    Path(#[from] EditError),
    /// The site is not sound with that value.
    #[error(transparent)]
    Site(#[from] SiteError),
}

/// Combinations, and values of one setting.
const MAX_POINTS: usize = 10_000;

/// A number with the unit behind it.
fn parse_quantity(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-'))).unwrap_or(text.len());
    // An exponent belongs to the number: 1e-3.
    let end = match text[end..].strip_prefix(['e', 'E']) {
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
            let more = rest.find(|c: char| !(c.is_ascii_digit() || c == '-')).unwrap_or(rest.len());
            end + 1 + more
        }
        _ => end,
    };
    let number: f64 = text[..end].parse().ok()?;
    number.is_finite().then_some((number, text[end..].trim()))
}

/// The same, or what is wrong.
fn number(text: &str) -> Result<(f64, &str), String> {
    parse_quantity(text).ok_or_else(|| format!("{:?} is no number", text.trim()))
}

/// A range's values.
fn range(low: &str, rest: &str) -> Result<Vec<String>, String> {
    let (high, step) = match rest.find(['+', '*']) {
        Some(at) => (&rest[..at], Some((&rest[at..=at], &rest[at + 1..]))),
        None => (rest, None),
    };
    let ((low, unit), (high, other)) = (number(low)?, number(high)?);
    if !other.is_empty() && !unit.is_empty() && other != unit {
        return Err(format!("a range from {unit:?} to {other:?}: one unit for both"));
    }
    let unit = if unit.is_empty() { other } else { unit };
    if high < low {
        return Err(format!("{low}..{high} goes down"));
    }
    let show = |value: f64| {
        // Sums of steps as people write them: without the last binary digits.
        let value = (value * 1e9).round() / 1e9;
        if unit.is_empty() { value.to_string() } else { format!("{value} {unit}") }
    };
    let next: Box<dyn Fn(usize) -> f64> = match step {
        None if low.fract() != 0.0 || high.fract() != 0.0 => {
            return Err(format!("{low}..{high} needs a step: {low}..{high}+{}", (high - low) / 10.0));
        }
        None => Box::new(move |i| low + i as f64),
        Some((sign, step)) => {
            let (step, _) = number(step)?;
            match sign {
                "+" if step > 0.0 => Box::new(move |i| low + step * i as f64),
                "*" if step > 1.0 && low > 0.0 => Box::new(move |i| low * step.powi(i as i32)),
                "+" => return Err(format!("a step of {step} leads nowhere")),
                _ => return Err(format!("from {low} in factors of {step} leads nowhere")),
            }
        }
    };
    let slack = (high - low).abs().max(high.abs()) * 1e-9;
    let values: Vec<String> =
        (0..=MAX_POINTS).map(next).take_while(|&v| v <= high + slack).map(show).collect();
    if values.len() > MAX_POINTS { Err(format!("more than {MAX_POINTS} values")) } else { Ok(values) }
}

impl FromStr for Setting {
    type Err = SweepError;

    fn from_str(text: &str) -> Result<Setting, SweepError> {
        let fail = |why: &str| SweepError::Form { text: text.to_owned(), why: why.to_owned() };
        let (name, values) = text.split_once('=').ok_or_else(|| fail("expected NAME=VALUE"))?;
        let (name, values) = (name.trim(), values.trim());
        if name.is_empty() || values.is_empty() {
            return Err(fail("expected NAME=VALUE"));
        }
        let values = match values.split_once("..") {
            Some((low, rest)) => range(low, rest).map_err(|why| fail(&why))?,
            None => values.split(',').map(|value| value.trim().to_owned()).collect(),
        };
        if values.iter().any(String::is_empty) {
            return Err(fail("a value of the list is empty"));
        }
        Ok(Setting { name: name.to_owned(), values })
    }
}

/// Reads settings.
///
/// # Errors
/// [`WhatIfError::Form`] says which, and why not.
pub fn settings(texts: &[String]) -> Result<Vec<Setting>, SweepError> {
    texts.iter().map(|text| text.parse()).collect()
}

/// All combinations of the settings' values, the last one's changing fastest; one without any if there is none.
///
/// # Errors
/// [`WhatIfError::TooMany`].
pub fn combinations(settings: &[Setting]) -> Result<Vec<Vec<(&str, &str)>>, SweepError> {
    let mut all: Vec<Vec<(&str, &str)>> = vec![Vec::new()];
    for setting in settings {
        if all.len().saturating_mul(setting.values.len()) > MAX_POINTS {
            return Err(SweepError::TooMany);
        }
        all = all
            .into_iter()
            .flat_map(|point| {
                setting.values.iter().map(move |value| {
                    let mut point = point.clone();
                    point.push((setting.name.as_str(), value.as_str()));
                    point
                })
            })
            .collect();
    }
    Ok(all)
}

/// The shipped parameters with one value for each setting.
///
/// # Errors
/// [`WhatIfError`] if one has several values, or is none of the parameters.
pub fn parameters(settings: &[Setting]) -> Result<Parameters, SweepError> {
    let mut parameters = Parameters::shipped();
    for setting in settings {
        let [value] = setting.values.as_slice() else {
            let why = "several values; only `explain` and `measure` take more than one".to_owned();
            return Err(SweepError::Form {
                text: format!("{}={}", setting.name, setting.values.join(",")),
                why,
            });
        };
        if edit::is_path(&setting.name) {
            return Err(SweepError::NoSite(setting.name.clone()));
        }
        parameters.set(&format!("{}={value}", setting.name))?;
    }
    Ok(parameters)
}

/// A site and parameters with one combination of values.
///
/// # Errors
/// [`WhatIfError`] if a name or a value cannot be, or the site is not sound with it.
pub fn apply(name: &str, text: &str, point: &[(&str, &str)]) -> Result<(Site, Parameters), SweepError> {
    let mut parameters = Parameters::shipped();
    let (mut changed, mut named) = (None, name.to_owned());
    for (path, value) in point {
        if edit::is_path(path) {
            changed = Some(edit::set(changed.as_deref().unwrap_or(text), path, value)?);
            named = format!("{named} with {path}={value}");
        } else {
            parameters.set(&format!("{path}={value}"))?;
        }
    }
    let site = match changed {
        None => millstream_site::parse(name, text)?,
        // Lines of the changed text would be nobody's.
        Some(text) => {
            millstream_site::parse(&named, &text).map_err(|error| SiteError { line: None, ..error })?
        }
    };
    Ok((site, parameters))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values(text: &str) -> Vec<String> {
        text.parse::<Setting>().unwrap_or_else(|error| panic!("{error}")).values
    }

    #[test]
    fn lists_and_ranges() {
        assert_eq!(values("a=3"), ["3"]);
        assert_eq!(values("a=FDR, EDR,HDR"), ["FDR", "EDR", "HDR"]);
        assert_eq!(values("a=1..4"), ["1", "2", "3", "4"]);
        assert_eq!(values("a=2..32*2"), ["2", "4", "8", "16", "32"]);
        assert_eq!(values("a=0.9..1+0.05"), ["0.9", "0.95", "1"]);
        assert_eq!(values("a=250 MHz..450 MHz+100"), ["250 MHz", "350 MHz", "450 MHz"]);
        assert_eq!(values("a=1e-3..3e-3+1e-3"), ["0.001", "0.002", "0.003"]);
    }

    #[test]
    fn what_is_no_range_says_why() {
        for (text, why) in [
            ("a", "expected NAME=VALUE"),
            ("=3", "expected NAME=VALUE"),
            ("a=", "expected NAME=VALUE"),
            ("a=1,,2", "empty"),
            ("a=4..1", "goes down"),
            ("a=1..x", "\"x\" is no number"),
            ("a=0.5..1", "needs a step"),
            ("a=1..4+0", "leads nowhere"),
            ("a=0..4*2", "leads nowhere"),
            ("a=1..4*1", "leads nowhere"),
            ("a=1..1000000", "more than 10000 values"),
            ("a=1 GHz..3 MHz+1", "one unit"),
        ] {
            let error = text.parse::<Setting>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn settings_combine() {
        let both = settings(&["a=1..3".into(), "b=x,y".into()]).unwrap();
        let all = combinations(&both).unwrap();
        assert_eq!(all.len(), 6);
        assert_eq!(all[1], [("a", "1"), ("b", "y")]);
        assert_eq!(combinations(&[]).unwrap(), [vec![]]);
        let many = settings(&["a=1..1000".into(), "b=1..1000".into()]).unwrap();
        assert_eq!(combinations(&many), Err(SweepError::TooMany));
    }

    #[test]
    fn only_parameters_where_there_is_no_site() {
        let one = |text: &str| parameters(&settings(&[text.to_owned()]).unwrap());
        assert_eq!(one("u280.reads=3").unwrap().get("u280.reads"), 3.0);
        assert!(one("u280.reads=3..4").unwrap_err().to_string().contains("several values"));
        assert!(one("link.0.rate=EDR").unwrap_err().to_string().contains("no site file"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z.=0-9,+* eMHz-]{0,24}") {
            let _ = text.parse::<Setting>();
        }
    }
}
