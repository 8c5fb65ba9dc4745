//! Names of the kinds of card memory.

use std::fmt;
use std::str::FromStr;

use millstream_card_abi::codes::MemoryKind;

/// A kind of card memory: `emulated`, `pci:DDDD:BB:DD.F`, `pci:DDDD:BB:DD.F/barN`, `cuda:N`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackingKind {
    /// Host memory.
    #[default]
    Emulated,
    /// A BAR of a PCIe device.
    Pci(PciBar),
    /// Memory of the GPU with this index.
    Cuda(u32),
}

/// A BAR of a PCIe device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciBar {
    /// The device.
    pub address: PciAddress,
    /// The BAR, 0 to 5; none: the largest memory BAR.
    pub bar: Option<u8>,
}

/// Address of a PCIe function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    /// The domain (segment).
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device, 0 to 31.
    pub device: u8,
    /// The function, 0 to 7.
    pub function: u8,
}

/// A text that is not a kind of card memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a kind of card memory: expected emulated, pci:DDDD:BB:DD.F or pci:DDDD:BB:DD.F/barN (hexadecimal, as lspci -D \
     shows it), or cuda:N"
)]
pub struct ParseBackingError(String);

impl BackingKind {
    /// The code of this kind in the registers.
    pub fn code(&self) -> MemoryKind {
        match self {
            BackingKind::Emulated => MemoryKind::Emulated,
            BackingKind::Pci(_) => MemoryKind::Pci,
            BackingKind::Cuda(_) => MemoryKind::Cuda,
        }
    }
}

impl FromStr for BackingKind {
    type Err = ParseBackingError;

    fn from_str(text: &str) -> Result<BackingKind, ParseBackingError> {
        let kind = match text.split_once(':') {
            None if text == "emulated" => Some(BackingKind::Emulated),
            Some(("pci", place)) => pci(place).map(BackingKind::Pci),
            Some(("cuda", number)) if is_decimal(number) => number.parse().ok().map(BackingKind::Cuda),
            _ => None,
        };
        kind.ok_or_else(|| ParseBackingError(text.to_owned()))
    }
}

fn is_decimal(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn pci(text: &str) -> Option<PciBar> {
    let (address, bar) = match text.split_once('/') {
        None => (text, None),
        Some((address, bar)) => {
            let number = bar.strip_prefix("bar").filter(|number| is_decimal(number))?;
            (address, Some(number.parse().ok().filter(|bar| *bar <= 5)?))
        }
    };
    let (rest, function) = address.split_once('.')?;
    let parts: Vec<_> = rest.split(':').collect();
    let [domain, bus, device] = parts[..] else { return None };
    let number = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        let legal = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        legal.then(|| u32::from_str_radix(text, 16).ok()).flatten()
    };
    let address = PciAddress {
        // VMD domains exceed 65535.
        domain: number(domain, 4..=8)?,
        bus: number(bus, 2..=2)? as u8,
        device: number(device, 2..=2).filter(|device| *device < 32)? as u8,
        function: number(function, 1..=1).filter(|function| *function < 8)? as u8,
    };
    Some(PciBar { address, bar })
}

impl fmt::Display for BackingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackingKind::Emulated => f.write_str("emulated"),
            BackingKind::Pci(PciBar { address, bar: None }) => write!(f, "pci:{address}"),
            BackingKind::Pci(PciBar { address, bar: Some(bar) }) => write!(f, "pci:{address}/bar{bar}"),
            BackingKind::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_round_trip() {
        for text in [
            "emulated",
            "pci:0000:01:00.0",
            "pci:10000:e1:1f.7/bar4",
            "pci:0000:01:00.0/bar0",
            "cuda:0",
            "cuda:15",
        ] {
            assert_eq!(text.parse::<BackingKind>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "fpga",
            "emulated:",
            "pci",
            "pci:",
            "pci:01:00.0",
            "pci:0000:01:00",
            "pci:0000:01:20.0",
            "pci:0000:01:00.8",
            "pci:0000:01:00.0/bar6",
            "pci:0000:01:00.0/4",
            "pci:0000:1:00.0",
            "pci:+000:01:00.0",
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:99999999999",
        ] {
            let refused = text.parse::<BackingKind>().unwrap_err().to_string();
            assert!(refused.contains(&format!("{text:?}")) && refused.contains("expected"), "{refused}");
        }
    }
}
