//! Temperature and power. An emulated card has no sensors; the registers hold the host's values, marked by a bit.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use millstream_card_abi::codes::{SENSOR_OF_HOST, SENSOR_POWER, SENSOR_TEMPERATURE};
use millstream_card_abi::registers::Registers;

/// The files to read; none if they do not exist or are not readable.
#[derive(Debug, Default)]
pub(crate) struct Sensors {
    /// hwmon, in 0.001 °C.
    temperature: Option<PathBuf>,
    /// RAPL, in µJ, and its wrap-around value.
    energy: Option<(PathBuf, u64)>,
    latest: Option<(Instant, u64)>,
    total_uj: u64,
}

impl Sensors {
    pub(crate) fn find() -> Sensors {
        Sensors::find_under(Path::new("/sys/class"))
    }

    fn find_under(class: &Path) -> Sensors {
        let temperature = children(&class.join("hwmon"))
            .into_iter()
            .map(|chip| chip.join("temp1_input"))
            .chain(children(&class.join("thermal")).into_iter().map(|zone| zone.join("temp")))
            .find(|file| number(file).is_some());
        let energy = children(&class.join("powercap")).into_iter().find_map(|zone| {
            let file = zone.join("energy_uj");
            number(&file)?;
            Some((file, number(&zone.join("max_energy_range_uj")).unwrap_or(u64::MAX)))
        });
        Sensors { temperature, energy, latest: None, total_uj: 0 }
    }

    /// Reads the sensors and publishes their values.
    pub(crate) fn publish(&mut self, registers: &Registers) {
        let mut known = 0;
        if let Some(temperature) = self.temperature.as_deref().and_then(number) {
            registers.temperature_mdeg().store(temperature as u32, Ordering::Relaxed);
            known |= SENSOR_TEMPERATURE | SENSOR_OF_HOST;
        }
        if let Some((file, range)) = &self.energy
            && let Some(energy) = number(file)
        {
            let now = Instant::now();
            if let Some((then, before)) = self.latest {
                let used = if energy >= before { energy - before } else { range - before + energy };
                self.total_uj += used;
                let micros = now.duration_since(then).as_micros().max(1) as u64;
                registers.power_mw().store((used * 1000 / micros) as u32, Ordering::Relaxed);
                registers.energy_uj().store(self.total_uj, Ordering::Relaxed);
                known |= SENSOR_POWER | SENSOR_OF_HOST;
            }
            self.latest = Some((now, energy));
        }
        registers.sensors().store(known, Ordering::Release);
    }
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_sensors_are_published_and_others_are_absent() {
        let registers = Registers::detached().unwrap();
        let class = tempfile::tempdir().unwrap();
        let mut none = Sensors::find_under(class.path());
        none.publish(&registers);
        assert_eq!(registers.sensors().load(Ordering::Relaxed), 0);

        let (chip, zone) = (class.path().join("hwmon/hwmon0"), class.path().join("powercap/intel-rapl:0"));
        fs::create_dir_all(&chip).unwrap();
        fs::create_dir_all(&zone).unwrap();
        fs::write(chip.join("temp1_input"), "41500\n").unwrap();
        fs::write(zone.join("energy_uj"), "900\n").unwrap();
        fs::write(zone.join("max_energy_range_uj"), "1000\n").unwrap();
        let mut sensors = Sensors::find_under(class.path());
        sensors.publish(&registers);
        assert_eq!(registers.sensors().load(Ordering::Relaxed), SENSOR_TEMPERATURE | SENSOR_OF_HOST);
        assert_eq!(registers.temperature_mdeg().load(Ordering::Relaxed), 41500);
        // The counter wraps around.
        fs::write(zone.join("energy_uj"), "50\n").unwrap();
        sensors.publish(&registers);
        assert_eq!(registers.energy_uj().load(Ordering::Relaxed), 150);
        let all = SENSOR_TEMPERATURE | SENSOR_POWER | SENSOR_OF_HOST;
        assert_eq!(registers.sensors().load(Ordering::Relaxed), all);
    }
}
