//! Power and price of a site's devices.
//!
//! A device has `power.idle` and `power.active` in watts, and `price` in a currency of the user's choice. Sums count every
//! socket, PCIe device and network switch of the site; devices without a value are listed.

use crate::parameters::Parameters;
use millstream_site::Site;
use millstream_site::device::{Kind, Library};
use std::collections::BTreeSet;

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
    let switches = site.switches.iter().map(|switch| {
        let id = Library::shipped().find(Kind::NetworkSwitch, &switch.model);
        id.map_or_else(|_| "network-switch".to_owned(), str::to_owned)
    });
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
