//! Link settings from the environment: fault injection and packet capture in any program.
//!
//! ```text
//! MILLSTREAM_LINK=drop=0.01,duplicate=0.001,delay=0.02:2ms,corrupt=#7+19,seed=42,side=both
//! MILLSTREAM_PCAP=wire-%p.pcap
//! ```

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Environment variable with the faults.
pub const LINK_VARIABLE: &str = "MILLSTREAM_LINK";
/// Environment variable with the name of the capture file.
pub const PCAP_VARIABLE: &str = "MILLSTREAM_PCAP";

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {field}={value:?}: {reason}")]
pub struct ConfigError {
    /// The environment variable.
    pub variable: &'static str,
    /// The field.
    pub field: String,
    /// The value of the field.
    pub value: String,
    /// The valid values.
    pub reason: &'static str,
}

/// The packets that a fault affects.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum PacketSelector {
    /// No packet.
    #[default]
    Never,
    /// Each packet with this probability.
    Probability(f64),
    /// These packets, counted from one on each side.
    Numbered(Vec<u64>),
}

impl FromStr for PacketSelector {
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

/// Faults to inject.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Packets to drop.
    pub drop: PacketSelector,
    /// Packets to deliver twice.
    pub duplicate: PacketSelector,
    /// Packets to deliver after the next one.
    pub reorder: PacketSelector,
    /// Packets to deliver with one inverted bit.
    pub corrupt: PacketSelector,
    /// Packets to mark as congestion experienced (ECN).
    pub mark: PacketSelector,
    /// Packets to deliver late.
    pub delay: PacketSelector,
    /// Delay of those packets.
    pub delay_by: Duration,
    /// Seed of the random number generator.
    pub seed: u64,
    /// Direction that faults affect.
    pub side: Side,
}

/// Direction of injected faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Side {
    /// Sent packets.
    #[default]
    Send,
    /// Received packets.
    Receive,
    /// Both.
    Both,
}

impl Faults {
    /// Whether any fault is configured.
    #[must_use]
    pub fn any(&self) -> bool {
        [&self.drop, &self.duplicate, &self.reorder, &self.corrupt, &self.mark, &self.delay]
            .into_iter()
            .any(|selector| *selector != PacketSelector::Never)
    }
}

impl FromStr for Faults {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut faults = Self { seed: 1, ..Self::default() };
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (field, value) = part.split_once('=').unwrap_or((part, ""));
            let set = match field {
                "drop" => value.parse().map(|selector| faults.drop = selector),
                "duplicate" => value.parse().map(|selector| faults.duplicate = selector),
                "reorder" => value.parse().map(|selector| faults.reorder = selector),
                "corrupt" => value.parse().map(|selector| faults.corrupt = selector),
                "mark" => value.parse().map(|selector| faults.mark = selector),
                "delay" => parse_delay(value).map(|(selector, by)| {
                    (faults.delay, faults.delay_by) = (selector, by);
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

fn parse_delay(text: &str) -> Result<(PacketSelector, Duration), &'static str> {
    const REASON: &str = "which packets, a colon, and how long: 0.01:2ms, #7:50us, 1:1s";
    let (selector, by) = text.split_once(':').ok_or(REASON)?;
    let digits = by.find(|c: char| !c.is_ascii_digit()).ok_or(REASON)?;
    let number: u32 = by[..digits].parse().map_err(|_| REASON)?;
    let unit = match &by[digits..] {
        "us" => Duration::from_micros(1),
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        _ => return Err(REASON),
    };
    Ok((selector.parse()?, unit * number))
}

/// Settings of a link.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Faults to inject.
    pub faults: Faults,
    /// Capture file.
    pub capture: Option<PathBuf>,
}

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    /// The first invalid setting.
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
        let capture = capture_file(std::env::var_os(PCAP_VARIABLE), millstream_shm::has_gained_privileges());
        Ok(Self { faults, capture })
    }
}

/// The capture file. A program that runs with more rights than its caller must not write where the caller says.
fn capture_file(name: Option<OsString>, has_gained_privileges: bool) -> Option<PathBuf> {
    name.filter(|name| !name.is_empty() && !has_gained_privileges).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_gained_privileges_captures_nothing() {
        let name = || Some(OsString::from("wire.pcap"));
        assert_eq!(capture_file(name(), false), Some(PathBuf::from("wire.pcap")));
        assert_eq!(capture_file(name(), true), None);
        assert_eq!(capture_file(Some(OsString::new()), false), None);
    }

    #[test]
    fn reads_every_field() {
        let faults: Faults =
            "drop=0.25, duplicate=#1,reorder=#3+17,corrupt=1,mark=#2,delay=0.5:20ms,seed=9,side=both"
                .parse()
                .unwrap();
        assert_eq!(
            faults,
            Faults {
                drop: PacketSelector::Probability(0.25),
                duplicate: PacketSelector::Numbered(vec![1]),
                reorder: PacketSelector::Numbered(vec![3, 17]),
                mark: PacketSelector::Numbered(vec![2]),
                corrupt: PacketSelector::Probability(1.0),
                delay: PacketSelector::Probability(0.5),
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
