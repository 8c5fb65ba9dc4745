//! The kinds of card memory, as one writes them.

use std::fmt;
use std::str::FromStr;

use crate::region::codes::MemoryKind;

/// A kind of card memory: `emulated`, `pci:DDDD:BB:DD.F`, `pci:DDDD:BB:DD.F/barN`, `cuda:N`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Memory of the host.
    #[default]
    Emulated,
    /// A BAR of a PCIe device.
    Pci(PciBar),
    /// Memory of the GPU with this number.
    Cuda(u32),
}

/// A BAR of a PCIe device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciBar {
    /// The device.
    pub address: PciAddress,
    /// The BAR, 0 to 5; none: the largest one with memory.
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

/// A text that names no kind of card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no kind of card: expected emulated, pci:DDDD:BB:DD.F or pci:DDDD:BB:DD.F/barN (hexadecimal, as lspci -D \
     shows it), or cuda:N"
)]
pub struct BadKind(String);

impl Kind {
    /// Its number in the registers.
    pub fn number(&self) -> MemoryKind {
        match self {
            Kind::Emulated => MemoryKind::Emulated,
            Kind::Pci(_) => MemoryKind::Pci,
            Kind::Cuda(_) => MemoryKind::Cuda,
        }
    }
}

impl FromStr for Kind {
    type Err = BadKind;

    fn from_str(text: &str) -> Result<Kind, BadKind> {
        let kind = match text.split_once(':') {
            None if text == "emulated" => Some(Kind::Emulated),
            Some(("pci", place)) => pci(place).map(Kind::Pci),
            Some(("cuda", number)) if is_decimal(number) => number.parse().ok().map(Kind::Cuda),
            _ => None,
        };
        kind.ok_or_else(|| BadKind(text.to_owned()))
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
        // Domains past 65535 exist: those of VMD.
        domain: number(domain, 4..=8)?,
        bus: number(bus, 2..=2)? as u8,
        device: number(device, 2..=2).filter(|device| *device < 32)? as u8,
        function: number(function, 1..=1).filter(|function| *function < 8)? as u8,
    };
    Some(PciBar { address, bar })
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Emulated => f.write_str("emulated"),
            Kind::Pci(PciBar { address, bar: None }) => write!(f, "pci:{address}"),
            Kind::Pci(PciBar { address, bar: Some(bar) }) => write!(f, "pci:{address}/bar{bar}"),
            Kind::Cuda(index) => write!(f, "cuda:{index}"),
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
    fn kinds_come_back_as_they_are_written() {
        for text in [
            "emulated",
            "pci:0000:01:00.0",
            "pci:10000:e1:1f.7/bar4",
            "pci:0000:01:00.0/bar0",
            "cuda:0",
            "cuda:15",
        ] {
            assert_eq!(text.parse::<Kind>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_names_no_kind_is_refused_with_what_does() {
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
            let refused = text.parse::<Kind>().unwrap_err().to_string();
            assert!(refused.contains(&format!("{text:?}")) && refused.contains("expected"), "{refused}");
        }
    }
}
