//! Power and price of a site's devices.
//!
//! A device has `power.idle` and `power.active` in watts, and `price` in a currency of the user's choice. Sums count every
//! socket, PCIe device and network switch of the site; devices without a value are listed.
//!
//! Between both ends ([`Load`]), the power of a processor depends on utilisation, clock and sleep states:
//! ```text
//!   P = idle + (active − idle) · (2u − u^1.4) · (s + (1 − s) · f³)
//! ```
//! The dependence on the utilisation `u` is that of Fan, Weber and Barroso (ISCA 2007, section 4); dynamic power goes with the
//! cube of the clock `f` (Mudge, IEEE Computer 34(4), 2001), a share `s` of it does not (`power.static.share`). Without deep
//! sleep states, idle cores stay in C1: `power.shallow` takes the place of `power.idle`. Other devices are linear in `u`.

use crate::parameters::Parameters;
use millstream_site::{Host, Site};
use std::collections::BTreeSet;
use std::str::FromStr;

/// Power.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Watts(pub f64);

/// State of all devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    /// Without work.
    Idle,
    /// At full load.
    Active,
}

/// Sleep states of cores without work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleStates {
    /// All of them: the package sleeps, too.
    #[default]
    Deep,
    /// C1 at most, as low-latency settings ask for (`intel_idle.max_cstate=1`, /dev/cpu_dma_latency).
    Shallow,
}

impl FromStr for IdleStates {
    type Err = String;

    fn from_str(text: &str) -> Result<IdleStates, String> {
        match text {
            "deep" => Ok(IdleStates::Deep),
            "shallow" => Ok(IdleStates::Shallow),
            other => Err(format!("idle states {other:?}: one of deep, shallow")),
        }
    }
}

/// What the devices of a site do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Share of the cores that work; a core that polls works.
    pub cores: f64,
    /// Clock of the cores relative to that of `power.active`.
    pub frequency: f64,
    /// Sleep states of the other cores.
    pub idle: IdleStates,
    /// Share of their rate that adapters, cards, disks and switches carry.
    pub transfers: f64,
}

impl Load {
    /// All devices at full load.
    pub const FULL: Load = Load { cores: 1.0, frequency: 1.0, idle: IdleStates::Deep, transfers: 1.0 };

    /// Checks shares and clock.
    ///
    /// # Errors
    /// The value that is out of range.
    pub fn check(self) -> Result<Load, String> {
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        if !is_share(self.cores) || !is_share(self.transfers) {
            let [cores, transfers] = [self.cores, self.transfers];
            return Err(format!("shares of cores {cores} and of transfers {transfers}: must be 0 to 1"));
        }
        if !(0.1..=2.0).contains(&self.frequency) {
            return Err(format!("frequency {}: must be 0.1 to 2 of the clock at full load", self.frequency));
        }
        Ok(self)
    }
}

/// Exponent of the utilisation (Fan, Weber and Barroso).
const UTILIZATION_EXPONENT: f64 = 1.4;

/// Power of a device under a load; none if the library lacks its values.
#[must_use]
pub fn device_power(p: &Parameters, id: &str, load: Load) -> Option<Watts> {
    let value = |name: &str| p.device(id, name);
    let (idle, active) = (value("power.idle")?, value("power.active")?);
    let Some(fixed) = value("power.static.share") else {
        return Some(Watts(idle + (active - idle) * load.transfers));
    };
    let idle = match load.idle {
        IdleStates::Deep => idle,
        IdleStates::Shallow => value("power.shallow")?,
    };
    let busy = 2.0 * load.cores - load.cores.powf(UTILIZATION_EXPONENT);
    let clock = fixed + (1.0 - fixed) * load.frequency.powi(3);
    Some(Watts(idle + (active - idle) * busy * clock))
}

/// Power of hosts between which data flows: on each, `polling` cores poll, and the devices carry `transfers` of their rate.
///
/// None if the library lacks the power of a device.
#[must_use]
pub fn power_of_hosts(p: &Parameters, hosts: &[&Host], polling: u32, transfers: f64) -> Option<Watts> {
    let mut sum = 0.0;
    for host in hosts {
        for (i, socket) in host.sockets.iter().enumerate() {
            let busy = if i == 0 { polling.min(socket.cores) } else { 0 };
            let cores = f64::from(busy) / f64::from(socket.cores.max(1));
            sum += device_power(p, &socket.id, Load { cores, transfers, ..Load::FULL })?.0;
        }
        for device in &host.devices {
            sum += device_power(p, &device.id, Load { transfers, ..Load::FULL })?.0;
        }
    }
    Some(Watts(sum))
}

/// Sums over the devices of a site.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// Power of all devices without work.
    pub idle: Watts,
    /// Power of all devices at full load.
    pub active: Watts,
    /// Price of all devices that have one.
    pub price: f64,
    /// Devices without power.
    pub without_power: BTreeSet<String>,
    /// Devices without price.
    pub without_price: BTreeSet<String>,
}

/// Library ids of all devices of a site, one for each piece.
fn devices(site: &Site) -> Vec<String> {
    let sockets = site.hosts.iter().flat_map(|host| host.sockets.iter().map(|socket| socket.id.clone()));
    let pcie = site.hosts.iter().flat_map(|host| host.devices.iter().map(|device| device.id.clone()));
    let switches = site.switches.iter().map(|switch| switch.id.clone());
    sockets.chain(pcie).chain(switches).collect()
}

impl Inventory {
    /// Sums over a site.
    #[must_use]
    pub fn new(site: &Site, p: &Parameters) -> Inventory {
        let p = p.with_devices(&site.devices);
        let mut all = Inventory::default();
        for id in devices(site) {
            match (p.device(&id, "power.idle"), p.device(&id, "power.active")) {
                (Some(idle), Some(active)) => {
                    all.idle.0 += idle;
                    all.active.0 += active;
                }
                _ => drop(all.without_power.insert(id.clone())),
            }
            match p.device(&id, "price") {
                Some(price) => all.price += price,
                None => drop(all.without_price.insert(id)),
            }
        }
        all
    }

    /// Power of all devices of a site under a load; devices without power are left out.
    #[must_use]
    pub fn power_of(site: &Site, p: &Parameters, load: Load) -> Watts {
        let p = p.with_devices(&site.devices);
        Watts(devices(site).iter().filter_map(|id| device_power(&p, id, load)).map(|power| power.0).sum())
    }

    /// Power of a state.
    #[must_use]
    pub fn power(&self, state: PowerState) -> Watts {
        match state {
            PowerState::Idle => self.idle,
            PowerState::Active => self.active,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sites::{SHIPPED, shipped};
    use proptest::prelude::*;

    #[test]
    fn every_piece_counts_and_missing_values_are_listed() {
        let p = Parameters::shipped();
        let pair = Inventory::new(&shipped("hdr-fat-tree"), &p);
        let one = |device: &str| p.device(device, "power.active").unwrap();
        let expected = 2.0 * (one("rome") + one("connectx-6")) + one("network-switch");
        assert!((pair.active.0 - expected).abs() < 1e-9 && pair.idle < pair.active, "{pair:?}");
        assert!(pair.without_power.is_empty() && pair.without_price.contains("rome"), "{pair:?}");
        assert_eq!(pair.power(PowerState::Idle), pair.idle);
    }

    #[test]
    fn power_has_the_published_form_between_idle_and_full_load() {
        let p = Parameters::shipped();
        let watts = |id: &str, load: Load| device_power(&p, id, load).unwrap().0;
        let at = |cores: f64, frequency: f64, idle: IdleStates| {
            watts("icelake-sp", Load { cores, frequency, idle, transfers: 0.0 })
        };
        let value = |name: &str| p.device("icelake-sp", name).unwrap();
        let (idle, active) = (value("power.idle"), value("power.active"));
        assert_eq!(at(0.0, 1.0, IdleStates::Deep), idle);
        assert_eq!(at(0.0, 1.0, IdleStates::Shallow), value("power.shallow"));
        assert!((at(1.0, 1.0, IdleStates::Deep) - active).abs() < 1e-9);
        // Fan, Weber and Barroso: half of the cores take 62 % of the dynamic power.
        let half = (at(0.5, 1.0, IdleStates::Deep) - idle) / (active - idle);
        assert!((half - 0.621).abs() < 0.001, "{half}");
        // At half of the clock, one eighth of what depends on it.
        let fixed = value("power.static.share");
        let slow = (at(1.0, 0.5, IdleStates::Deep) - idle) / (active - idle);
        assert!((slow - (fixed + (1.0 - fixed) / 8.0)).abs() < 1e-9, "{slow}");
        let adapter = |transfers| watts("connectx-6", Load { transfers, ..Load::FULL });
        assert!((2.0 * adapter(0.5) - adapter(0.0) - adapter(1.0)).abs() < 1e-9);
        assert_eq!(device_power(&p, "geforce-none", Load::FULL), None);
    }

    #[test]
    fn a_site_at_full_load_has_its_active_power() {
        let p = Parameters::shipped();
        for (name, _) in SHIPPED {
            let site = shipped(name);
            let full = Inventory::power_of(&site, &p, Load::FULL);
            assert!((full.0 - Inventory::new(&site, &p).active.0).abs() < 1e-6, "{name}");
        }
    }

    #[test]
    fn loads_out_of_range_are_refused() {
        for (load, word) in [
            (Load { cores: 1.5, ..Load::FULL }, "1.5"),
            (Load { transfers: -0.1, ..Load::FULL }, "-0.1"),
            (Load { frequency: 3.0, ..Load::FULL }, "3"),
            (Load { frequency: f64::NAN, ..Load::FULL }, "NaN"),
        ] {
            assert!(load.check().unwrap_err().contains(word), "{load:?}");
        }
        assert_eq!(Load::FULL.check(), Ok(Load::FULL));
        assert!("c6".parse::<IdleStates>().unwrap_err().contains("deep, shallow"));
    }

    proptest! {
        /// More work and a higher clock never take less power; sleeping never takes more.
        #[test]
        fn power_grows_with_work_and_clock(
            cores in 0.0_f64..=1.0,
            more in 0.0_f64..=1.0,
            frequency in 0.1_f64..=1.5,
        ) {
            let p = Parameters::shipped();
            for id in ["rome", "icelake-sp", "grace"] {
                let at = |cores: f64, frequency: f64, idle| {
                    device_power(&p, id, Load { cores, frequency, idle, transfers: 0.0 }).unwrap().0
                };
                let here = at(cores, frequency, IdleStates::Deep);
                prop_assert!(at(cores + (1.0 - cores) * more, frequency, IdleStates::Deep) >= here - 1e-9);
                prop_assert!(at(cores, frequency + more, IdleStates::Deep) >= here - 1e-9);
                prop_assert!(at(0.0, frequency, IdleStates::Shallow) >= at(0.0, frequency, IdleStates::Deep));
            }
        }
    }

    #[test]
    fn prices_of_a_site_file_count() {
        let text = SHIPPED.iter().find(|(name, _)| *name == "edr-pair").unwrap().1;
        let own = "\n[device.connectx-4]\nkind = \"adapter\"\nnames = [\"ConnectX-4\"]\nlike = \"connectx\"\n\
                   [device.connectx-4.values]\n\
                   price = { value = 700.0, low = 600.0, high = 800.0, unit = \"EUR\", source = \"offer\" }\n";
        let site = millstream_site::parse("own.toml", &format!("{text}{own}")).unwrap();
        let all = Inventory::new(&site, &Parameters::shipped());
        assert_eq!(all.price, 1400.0);
        assert!(!all.without_price.contains("connectx-4"), "{all:?}");
    }
}
