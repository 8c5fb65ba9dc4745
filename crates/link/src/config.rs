//! What the environment asks of a link: faults and captures in any program.
//!
//! ```text
//! MILLSTREAM_LINK=drop=0.01,duplicate=0.001,delay=0.02:2ms,corrupt=#7+19,seed=42,side=both
//! MILLSTREAM_PCAP=wire-%p.pcap
//! ```

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Variable with faults.
pub const LINK_VARIABLE: &str = "MILLSTREAM_LINK";
/// Variable with the name of a capture file.
pub const PCAP_VARIABLE: &str = "MILLSTREAM_PCAP";

/// What is wrong with a setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {field}={value:?}: {reason}")]
pub struct ConfigError {
    /// The variable.
    pub variable: &'static str,
    /// The field in it.
    pub field: String,
    /// Its value.
    pub value: String,
    /// What it should be.
    pub reason: &'static str,
}

/// Which packets something happens to.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Chosen {
    /// None.
    #[default]
    Never,
    /// Each with this probability.
    Probability(f64),
    /// These, counted from one on each side.
    Numbered(Vec<u64>),
}

impl FromStr for Chosen {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(list) = text.strip_prefix('#') {
            let numbers: Result<Vec<u64>, _> = list.split('+').map(str::parse).collect();
            return match numbers {
                Ok(numbers) if !numbers.contains(&0) => Ok(Self::Numbered(numbers)),
                _ => Err("packets are numbered #1, #2 …; several as #3+17"),
            };
        }
        match text.parse() {
            Ok(p) if (0.0..=1.0).contains(&p) => Ok(Self::Probability(p)),
            _ => Err("a probability from 0 to 1, or packets by number such as #3+17"),
        }
    }
}

/// The faults to inject.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Packets that are not delivered.
    pub drop: Chosen,
    /// Packets that are delivered twice.
    pub duplicate: Chosen,
    /// Packets that are delivered after the next one.
    pub reorder: Chosen,
    /// Packets that are delivered with one wrong bit.
    pub corrupt: Chosen,
    /// Packets that are delivered with a mark, as by a congested switch (ECN).
    pub mark: Chosen,
    /// Packets that are delivered late.
    pub delay: Chosen,
    /// By how much.
    pub delay_by: Duration,
    /// Start of the random numbers.
    pub seed: u64,
    /// What happens to packets that are sent, and to those that are received.
    pub side: Side,
}

/// Where faults happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Side {
    /// To what is sent.
    #[default]
    Send,
    /// To what is received.
    Receive,
    /// To both.
    Both,
}

impl Faults {
    /// Whether there is anything to do.
    #[must_use]
    pub fn any(&self) -> bool {
        [&self.drop, &self.duplicate, &self.reorder, &self.corrupt, &self.mark, &self.delay]
            .into_iter()
            .any(|chosen| *chosen != Chosen::Never)
    }
}

impl FromStr for Faults {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut faults = Self { seed: 1, ..Self::default() };
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (field, value) = part.split_once('=').unwrap_or((part, ""));
            let set = match field {
                "drop" => value.parse().map(|chosen| faults.drop = chosen),
                "duplicate" => value.parse().map(|chosen| faults.duplicate = chosen),
                "reorder" => value.parse().map(|chosen| faults.reorder = chosen),
                "corrupt" => value.parse().map(|chosen| faults.corrupt = chosen),
                "mark" => value.parse().map(|chosen| faults.mark = chosen),
                "delay" => parse_delay(value).map(|(chosen, by)| {
                    (faults.delay, faults.delay_by) = (chosen, by);
                }),
                "seed" => {
                    value.parse().map(|seed| faults.seed = seed).map_err(|_| "a number from 0 to 2^64 - 1")
                }
                "side" => match value {
                    "send" => Ok(Side::Send),
                    "receive" => Ok(Side::Receive),
                    "both" => Ok(Side::Both),
                    _ => Err("send, receive or both"),
                }
                .map(|side| faults.side = side),
                _ => Err("fields are drop, duplicate, reorder, corrupt, mark, delay, seed and side"),
            };
            set.map_err(|reason| ConfigError {
                variable: LINK_VARIABLE,
                field: field.into(),
                value: value.into(),
                reason,
            })?;
        }
        Ok(faults)
    }
}

fn parse_delay(text: &str) -> Result<(Chosen, Duration), &'static str> {
    const REASON: &str = "which packets, a colon, and how long: 0.01:2ms, #7:50us, 1:1s";
    let (chosen, by) = text.split_once(':').ok_or(REASON)?;
    let digits = by.find(|c: char| !c.is_ascii_digit()).ok_or(REASON)?;
    let number: u32 = by[..digits].parse().map_err(|_| REASON)?;
    let unit = match &by[digits..] {
        "us" => Duration::from_micros(1),
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        _ => return Err(REASON),
    };
    Ok((chosen.parse()?, unit * number))
}

/// A link's settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Faults to inject.
    pub faults: Faults,
    /// Where to write what passes.
    pub capture: Option<PathBuf>,
}

impl Config {
    /// What the environment says.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn from_environment() -> Result<Self, ConfigError> {
        let faults = match std::env::var(LINK_VARIABLE) {
            Ok(text) => text.parse()?,
            Err(std::env::VarError::NotPresent) => Faults::default(),
            Err(std::env::VarError::NotUnicode(text)) => {
                return Err(ConfigError {
                    variable: LINK_VARIABLE,
                    field: String::new(),
                    value: text.to_string_lossy().into(),
                    reason: "not text",
                });
            }
        };
        let capture = std::env::var_os(PCAP_VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
        Ok(Self { faults, capture })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_field() {
        let faults: Faults =
            "drop=0.25, duplicate=#1,reorder=#3+17,corrupt=1,mark=#2,delay=0.5:20ms,seed=9,side=both"
                .parse()
                .unwrap();
        assert_eq!(
            faults,
            Faults {
                drop: Chosen::Probability(0.25),
                duplicate: Chosen::Numbered(vec![1]),
                reorder: Chosen::Numbered(vec![3, 17]),
                mark: Chosen::Numbered(vec![2]),
                corrupt: Chosen::Probability(1.0),
                delay: Chosen::Probability(0.5),
                delay_by: Duration::from_millis(20),
                seed: 9,
                side: Side::Both,
            }
        );
        assert!(faults.any());
        assert!(!"".parse::<Faults>().unwrap().any());
    }

    #[test]
    fn errors_name_the_field() {
        for (text, field, value) in [
            ("drop=1.5", "drop", "1.5"),
            ("drop=NaN", "drop", "NaN"),
            ("drop=0.1,dup=1", "dup", "1"),
            ("corrupt=#0", "corrupt", "#0"),
            ("delay=0.1", "delay", "0.1"),
            ("delay=0.1:5", "delay", "0.1:5"),
            ("delay=0.1:5h", "delay", "0.1:5h"),
            ("side=left", "side", "left"),
            ("seed", "seed", ""),
        ] {
            let error = text.parse::<Faults>().unwrap_err();
            assert_eq!((error.field.as_str(), error.value.as_str()), (field, value), "{error}");
        }
    }
}
