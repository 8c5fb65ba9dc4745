//! Parameter sweeps: other values for parameters and for fields of the site.
//!
//! ```text
//!   NAME=VALUE        one value
//!   NAME=V,V,V        list
//!   NAME=A..B         every integer from A to B
//!   NAME=A..B+STEP    arithmetic sequence
//!   NAME=A..B*FACTOR  geometric sequence
//! ```
//! Numbers of a range can have a unit: `250 MHz..450 MHz+50`. `NAME` is a parameter or a path into the site file
//! ([`millstream_site::edit`]). Several settings form all combinations.

use crate::parameters::{ParameterError, Parameters};
use millstream_site::device::DeviceModel;
use millstream_site::edit::{self, EditError};
use millstream_site::{Site, SiteError};
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// A name with the values of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Parameter, or path into the site file.
    pub name: String,
    /// Values as text.
    pub values: Vec<String>,
}

/// A setting that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SweepError {
    /// The syntax is wrong.
    #[error("{text:?}: {why}")]
    Form {
        /// The setting.
        text: String,
        /// The error in it.
        why: String,
    },
    /// Two settings have one name.
    #[error("{0} is set twice: give it several values, {0}=A,B")]
    Repeated(String),
    /// The settings have too many combinations.
    #[error("the settings have more than {MAX_POINTS} combinations")]
    TooMany,
    /// A path into a site file, for a command that does not edit its site.
    #[error("{0}: this command takes parameters only")]
    NoSite(String),
    /// The parameter is invalid.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// The path or its value is invalid.
    #[error(transparent)]
    Path(#[from] EditError),
    /// The site is invalid with this value.
    #[error(transparent)]
    Site(#[from] SiteError),
}

/// Limit of combinations, and of values per setting.
const MAX_POINTS: usize = 10_000;

/// Parses a number with an optional unit.
fn parse_quantity(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-'))).unwrap_or(text.len());
    // An exponent is part of the number: 1e-3.
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

/// Parses a number with an optional unit; the error names the text.
fn number(text: &str) -> Result<(f64, &str), String> {
    parse_quantity(text).ok_or_else(|| format!("{:?} is not a number", text.trim()))
}

/// The values of a range.
fn range(low: &str, rest: &str) -> Result<Vec<String>, String> {
    let (high, step) = match rest.find(['+', '*']) {
        Some(at) => (&rest[..at], Some((&rest[at..=at], &rest[at + 1..]))),
        None => (rest, None),
    };
    let ((low, unit), (high, other)) = (number(low)?, number(high)?);
    if !other.is_empty() && !unit.is_empty() && other != unit {
        return Err(format!("a range from {unit:?} to {other:?}: use one unit"));
    }
    let unit = if unit.is_empty() { other } else { unit };
    if high < low {
        return Err(format!("{low}..{high} is descending: write the smaller number first"));
    }
    let show = |value: f64| {
        // Rounds away binary errors of repeated steps.
        let value: f64 = format!("{value:.11e}").parse().unwrap_or(value);
        if unit.is_empty() { value.to_string() } else { format!("{value} {unit}") }
    };
    let next: Box<dyn Fn(usize) -> f64> = match step {
        None if low.fract() != 0.0 || high.fract() != 0.0 => {
            return Err(format!("{low}..{high} needs a step: {low}..{high}+{}", (high - low) / 10.0));
        }
        None => Box::new(move |i| low + i as f64),
        Some((sign, step)) => {
            let (step, other) = number(step)?;
            if !other.is_empty() && (sign == "*" || other != unit) {
                return Err(format!(
                    "a step in {other:?} of a range in {unit:?}: use one unit, and none for a factor"
                ));
            }
            match sign {
                "+" if step > 0.0 => Box::new(move |i| low + step * i as f64),
                "*" if step > 1.0 && low > 0.0 => Box::new(move |i| low * step.powi(i as i32)),
                "+" => return Err(format!("a step of {step}: must be above 0")),
                _ => {
                    return Err(format!(
                        "from {low} in factors of {step}: needs a start above 0 and a factor above 1"
                    ));
                }
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

/// Parses settings, each of another name.
///
/// # Errors
/// [`SweepError::Form`] names the setting and the error, [`SweepError::Repeated`] the name.
pub fn settings(texts: &[String]) -> Result<Vec<Setting>, SweepError> {
    let all: Vec<Setting> = texts.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    match all.iter().find(|setting| !names.insert(&setting.name)) {
        Some(again) => Err(SweepError::Repeated(again.name.clone())),
        None => Ok(all),
    }
}

/// All combinations of values; the last setting varies fastest. No settings give one empty combination.
///
/// # Errors
/// [`SweepError::TooMany`] above 10,000 combinations.
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

/// A setting of a parameter with one value, as text for [`Parameters::set`].
fn single_parameter(setting: &Setting) -> Result<String, SweepError> {
    let [value] = setting.values.as_slice() else {
        let why = "several values: only `explain` and `measure` accept them".to_owned();
        return Err(SweepError::Form { text: format!("{}={}", setting.name, setting.values.join(",")), why });
    };
    if edit::is_path(&setting.name) {
        return Err(SweepError::NoSite(setting.name.clone()));
    }
    Ok(format!("{}={value}", setting.name))
}

/// The shipped parameters with these settings, one value each.
///
/// # Errors
/// [`SweepError`] if a setting has several values or no parameter has its name.
pub fn parameters(settings: &[Setting]) -> Result<Parameters, SweepError> {
    let [parameters] = parameters_of(settings, [&BTreeMap::new()])?;
    Ok(parameters)
}

/// The parameters of sites with these devices of their own, with these settings, one value each. A device of one site only is
/// set there.
///
/// # Errors
/// [`SweepError`] if a setting has several values or no site has a parameter of its name.
pub fn parameters_of<const SITES: usize>(
    settings: &[Setting],
    devices: [&BTreeMap<String, DeviceModel>; SITES],
) -> Result<[Parameters; SITES], SweepError> {
    let mut all = devices.map(|devices| Parameters::shipped().with_devices(devices).into_owned());
    for setting in settings {
        let text = single_parameter(setting)?;
        let is_known = all.iter().any(|parameters| parameters.has(&setting.name));
        for parameters in &mut all {
            if !is_known || parameters.has(&setting.name) {
                parameters.set(&text)?;
            }
        }
    }
    Ok(all)
}

/// A site with one combination of values, and the parameters with it and with the site's own devices.
///
/// # Errors
/// [`SweepError`] if a name or value is invalid, or the site is invalid with it.
pub fn apply(name: &str, text: &str, point: &[(&str, &str)]) -> Result<(Site, Parameters), SweepError> {
    let (mut changed, mut named) = (None, name.to_owned());
    let (paths, values): (Vec<_>, Vec<_>) = point.iter().partition(|(name, _)| edit::is_path(name));
    for (path, value) in paths {
        changed = Some(edit::set(changed.as_deref().unwrap_or(text), path, value)?);
        named = format!("{named} with {path}={value}");
    }
    let site = match changed {
        None => millstream_site::parse(name, text)?,
        // Line numbers of the edited text mean nothing to the user.
        Some(text) => {
            millstream_site::parse(&named, &text).map_err(|error| SiteError { line: None, ..error })?
        }
    };
    let mut parameters = Parameters::shipped().with_devices(&site.devices).into_owned();
    for (name, value) in values {
        parameters.set(&format!("{name}={value}"))?;
    }
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
        assert_eq!(values("a=1e-12..1e-10*10"), ["0.000000000001", "0.00000000001", "0.0000000001"]);
        assert_eq!(values("a=1 GHz..2 GHz+1 GHz"), ["1 GHz", "2 GHz"]);
    }

    #[test]
    fn invalid_ranges_are_refused_with_the_reason() {
        for (text, why) in [
            ("a", "expected NAME=VALUE"),
            ("=3", "expected NAME=VALUE"),
            ("a=", "expected NAME=VALUE"),
            ("a=1,,2", "empty"),
            ("a=4..1", "descending"),
            ("a=1..x", "\"x\" is not a number"),
            ("a=0.5..1", "needs a step"),
            ("a=1..4+0", "above 0"),
            ("a=0..4*2", "above 0"),
            ("a=1..4*1", "above 1"),
            ("a=1..1000000", "more than 10000 values"),
            ("a=1 GHz..3 MHz+1", "one unit"),
            ("a=1 GHz..3 GHz+50 MHz", "one unit"),
            ("a=1 GHz..3 GHz*2 GHz", "one unit"),
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
        let twice = settings(&["a=1..3".into(), "b=x".into(), " a =4".into()]).unwrap_err();
        assert_eq!(twice.to_string(), "a is set twice: give it several values, a=A,B");
        let many = settings(&["a=1..1000".into(), "b=1..1000".into()]).unwrap();
        assert_eq!(combinations(&many), Err(SweepError::TooMany));
    }

    #[test]
    fn site_paths_need_a_site() {
        let one = |text: &str| parameters(&settings(&[text.to_owned()]).unwrap());
        assert_eq!(one("u280.reads=3").unwrap().get("u280.reads"), 3.0);
        assert!(one("u280.reads=3..4").unwrap_err().to_string().contains("several values"));
        for (text, range) in [
            ("connectx-5.link.efficiency=1e-300", "from 0.001 to"),
            ("connectx-5.tx.latency=1e300", "from 0 to 1000000000 (ns)"),
        ] {
            let error = one(text).unwrap_err().to_string();
            let (name, value) = text.split_once('=').unwrap();
            assert!(error.contains(name) && error.contains(value) && error.contains(range), "{error}");
        }
        assert!(one("link.0.rate=EDR").unwrap_err().to_string().contains("parameters only"));
    }

    #[test]
    fn devices_of_a_site_file_are_parameters() {
        let text = crate::sites::SHIPPED.iter().find(|(name, _)| *name == "roce100-cx5").unwrap().1;
        let own = "connectx-5-function.link.efficiency";
        let (site, p) = apply("own", text, &[(own, "0.5"), ("link.0.rate", "EDR")]).unwrap();
        assert_eq!((site.links[0].rate.0, p.get(own)), (12.5e9, 0.5));
        // A path with these parameters keeps the setting.
        assert_eq!(p.with_devices(&site.devices).get(own), 0.5);
        // A device that replaces a shipped one.
        let text = text.replace("connectx-5-function", "connectx-5").replace("like = \"connectx-5\"\n", "");
        let (site, p) = apply("replaced", &text, &[("connectx-5.inline", "2")]).unwrap();
        assert_eq!(p.with_devices(&site.devices).get("connectx-5.inline"), 2.0);
    }

    #[test]
    fn a_device_of_one_of_two_sites_is_set_there() {
        let (first, second) = (crate::sites::shipped("roce100-cx5"), crate::sites::shipped("edr-pair"));
        let of_both = |text: &str| {
            parameters_of(&settings(&[text.to_owned()]).unwrap(), [&first.devices, &second.devices])
        };
        let [one, other] = of_both("connectx-5-function.inline=2").unwrap();
        assert_eq!(
            (one.get("connectx-5-function.inline"), other.has("connectx-5-function.inline")),
            (2.0, false)
        );
        assert!(of_both("connectx-5-function.nothing=2").is_err());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z.=0-9,+* eMHz-]{0,24}") {
            let _ = text.parse::<Setting>();
        }
    }
}
