//! Plasticity by the timing of spikes, in integers.
//!
//! A trace of 0.1 begins when a spike arrives at a synapse, and decays by 0.95 a step. A spike of the target adds the trace
//! of the step before to the synapse's derivative. A trace of 0.12 begins when the target fires. An arrival subtracts it.
//! Once a second a weight grows by 0.01 and the derivative, and stays within 0 to 10 mV. The derivative decays by 0.9.

use crate::network::UNITS_PER_MV;

/// Steps after which both traces have decayed below one unit.
const LENGTH: usize = 320;

/// Traces by age, in units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlasticityTables {
    potentiation: Vec<i32>,
    depression: Vec<i32>,
}

impl Default for PlasticityTables {
    fn default() -> PlasticityTables {
        let table = |start: f64| {
            let units = |trace: &f64| (trace * f64::from(UNITS_PER_MV)).round() as i32;
            let traces = std::iter::successors(Some(start), |trace| Some(trace * 0.95));
            traces.take(LENGTH).collect::<Vec<_>>().iter().map(units).collect()
        };
        PlasticityTables { potentiation: table(0.1), depression: table(0.12) }
    }
}

impl PlasticityTables {
    /// What the target's spike adds, a number of steps after the step that follows the arrival.
    #[must_use]
    pub fn potentiation(&self, age: u32) -> i32 {
        self.potentiation.get(age as usize).copied().unwrap_or(0)
    }

    /// What an arrival subtracts, a number of steps after the target's last spike.
    #[must_use]
    pub fn depression(&self, age: u32) -> i32 {
        self.depression.get(age as usize).copied().unwrap_or(0)
    }

    /// Weight and derivative after a second.
    #[must_use]
    pub fn after_second(weight: i32, derivative: i32) -> (i32, i32) {
        /// 0.01 mV.
        const GROWTH: i32 = 10_486;
        let weight = weight.saturating_add(GROWTH).saturating_add(derivative).clamp(0, 10 * UNITS_PER_MV);
        (weight, (i64::from(derivative) * 9 / 10) as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_begin_as_published_and_end_before_the_table() {
        let tables = PlasticityTables::default();
        assert_eq!((tables.potentiation(0), tables.depression(0)), (104_858, 125_829));
        assert_eq!(tables.potentiation(1), 99_615);
        assert_eq!(tables.depression(LENGTH as u32 - 1), 0);
        assert_eq!(tables.depression(u32::MAX), 0);
        assert_eq!(PlasticityTables::after_second(0, -20_000), (0, -18_000));
        assert_eq!(PlasticityTables::after_second(10 * UNITS_PER_MV - 1, 5).0, 10 * UNITS_PER_MV);
    }
}
