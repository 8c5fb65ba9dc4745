//! Power, energy and price of the nodes of a run.
//!
//! A run is between idle and full load ([`crate::power`]): on each node the two threads of its units poll, and devices carry as
//! much of their rate as the busiest receiving link.

use super::RunResult;
use crate::parameters::Parameters;
use crate::power::{Inventory, Load, Watts, device_power, power_of_hosts};
use millstream_site::Site;
use std::fmt;

/// Power and price of a run's nodes and of the site's switches, by what they built.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltCost {
    /// Sums over the devices.
    pub inventory: Inventory,
    /// Power during the run; none if the library lacks that of a device.
    pub running: Option<Watts>,
    /// Events built per second.
    pub event_rate: f64,
    /// Payload built per second, in GB/s.
    pub built: f64,
}

/// Threads of a node that poll: one of the readout unit, one of the builder unit.
const POLLING_THREADS: u32 = 2;

/// Power of a site's hosts and switches at the load of a run.
fn running(site: &Site, p: &Parameters, transfers: f64) -> Option<Watts> {
    let p = &*p.with_devices(&site.devices);
    let hosts: Vec<_> = site.hosts.iter().collect();
    let Watts(hosts) = power_of_hosts(p, &hosts, POLLING_THREADS, transfers)?;
    let load = Load { transfers, ..Load::FULL };
    let switches = site.switches.iter().map(|switch| device_power(p, &switch.id, load).map(|power| power.0));
    Some(Watts(hosts + switches.sum::<Option<f64>>()?))
}

impl BuiltCost {
    /// Cost of the first `nodes` hosts of a site.
    #[must_use]
    pub fn new(site: &Site, p: &Parameters, nodes: u16, run: &RunResult) -> BuiltCost {
        let mut used = site.clone();
        used.hosts.truncate(usize::from(nodes));
        BuiltCost {
            inventory: Inventory::new(&used, p),
            running: running(&used, p, run.peak_link_utilization.clamp(0.0, 1.0)),
            event_rate: run.event_rate(),
            built: run.rate().as_gigabytes(),
        }
    }

    /// Joules per built event, with all devices without work and at full load.
    #[must_use]
    pub fn energy_per_event(&self) -> [f64; 2] {
        [self.inventory.idle, self.inventory.active].map(|Watts(power)| power / self.event_rate)
    }

    /// Joules per built event at the load of the run.
    #[must_use]
    pub fn energy_while_running(&self) -> Option<f64> {
        self.running.map(|Watts(power)| power / self.event_rate)
    }

    /// Price per built GB/s, if devices have prices.
    #[must_use]
    pub fn price_per_rate(&self) -> Option<f64> {
        (self.inventory.price > 0.0).then(|| self.inventory.price / self.built)
    }
}

impl fmt::Display for BuiltCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inventory { idle, active, without_power, without_price, .. } = &self.inventory;
        let without = |names: &std::collections::BTreeSet<String>| match names.len() {
            0 => String::new(),
            _ => format!(" without {}", names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
        };
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| writeln!(f, "  {name:<34} {value}");
        let lacking = without(without_power);
        let power = format!("{:.1} to {:.1} kW, idle to full load{lacking}", idle.0 * 1e-3, active.0 * 1e-3);
        row(f, "power", power)?;
        if let (Some(Watts(power)), Some(energy)) = (self.running, self.energy_while_running()) {
            let value = format!("{:.1} kW, {:.3} mJ per built event", power * 1e-3, energy * 1e3);
            row(f, "power at this load", value)?;
        }
        let [low, high] = self.energy_per_event().map(|energy| energy * 1e3);
        row(f, "energy per built event", format!("{low:.3} to {high:.3} mJ"))?;
        let price = self.price_per_rate().map_or_else(
            || "no prices in the site file (docs/site.md)".to_owned(),
            |price| format!("{price:.1}{}", without(without_price)),
        );
        row(f, "price per built GB/s", price)
    }
}
