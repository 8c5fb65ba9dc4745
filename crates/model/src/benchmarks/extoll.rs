//! Benchmarks of network-attached accelerators on EXTOLL.

use crate::engine::BytesPerSecond;
use crate::parameters::Parameters;
use crate::sites::shipped;

/// `osu_bw` of large messages between two accelerators.
#[must_use]
pub fn bandwidth(p: &Parameters) -> BytesPerSecond {
    let site = shipped("extoll-booster");
    let wire = site.links.last().map_or(0.0, |wire| wire.rate.0);
    BytesPerSecond(wire * p.get("extoll.payload.efficiency") * p.get("extoll.mic.efficiency"))
}

/// Relative time saved in one halo exchange, against two accelerators in one host with the vendor's stack.
#[must_use]
pub fn exchange_gain(p: &Parameters) -> f64 {
    let bytes = p.get("lammps.halo") * 1e3;
    let time = |latency: &str, rate: f64| p.get(latency) * 1e-6 + bytes / rate;
    let here = time("extoll.latency", bandwidth(p).0);
    let there = time("vendor.mic.latency", p.gigabytes("vendor.mic.rate").0);
    1.0 - here / there
}
