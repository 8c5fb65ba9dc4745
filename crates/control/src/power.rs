//! Energy, temperatures, frequency governor, idle states and throttling of the host, from sysfs.
//!
//! | value | files below `/sys` |
//! |---|---|
//! | energy | `class/powercap/intel-rapl:N/energy_uj`, `max_energy_range_uj` |
//! | temperature, fans' and supplies' power | `class/hwmon/hwmonN/{temp,power}N_input` |
//! | governor, frequency | `devices/system/cpu/cpuN/cpufreq/{scaling_governor,scaling_cur_freq}` |
//! | idle states | `devices/system/cpu/cpu0/cpuidle/stateN/name` |
//! | throttling | `devices/system/cpu/cpuN/thermal_throttle/{core,package}_throttle_count` |
//!
//! Many virtual machines have none of these files, and energy counters may be readable by root only. Each value that is
//! missing has its reason.

use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Reads the host's power state.
#[derive(Clone, Debug)]
pub struct PowerMeter {
    sysfs: PathBuf,
}

/// A value, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading<T> {
    /// The value.
    Value(T),
    /// Why there is none.
    Missing(String),
}

/// The host's power state at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerReading {
    /// Energy counters of the processor packages.
    pub energy: Reading<Vec<EnergyCounter>>,
    /// Temperatures.
    pub temperatures: Reading<Vec<Sensor>>,
    /// Frequency governors in use, in alphabetical order.
    pub governors: Reading<Vec<String>>,
    /// Mean frequency of the processors \[Hz\].
    pub frequency_hz: Reading<f64>,
    /// Idle states, the lightest first.
    pub idle_states: Reading<Vec<String>>,
    /// Throttling events since boot, of all cores and packages.
    pub throttle_events: Reading<u64>,
}

/// An energy counter. It wraps at `range_uj`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnergyCounter {
    /// Its name, as in `package-0`.
    pub name: String,
    /// The energy \[µJ\].
    pub energy_uj: u64,
    /// The largest value \[µJ\].
    pub range_uj: u64,
}

/// A sensor's value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sensor {
    /// Chip and label, as in `coretemp Package id 0`; with the chip's number if several have this name, as in
    /// `coretemp Core 0 (hwmon3)`, and with the input if several of the chip have it, as in `nct6798 temp (hwmon3 temp2)`.
    pub name: String,
    /// Its value \[°C\].
    pub celsius: f64,
}

impl<T> Reading<T> {
    /// The value.
    pub fn value(&self) -> Option<&T> {
        match self {
            Reading::Value(value) => Some(value),
            Reading::Missing(_) => None,
        }
    }

    /// Why there is no value.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Reading::Value(_) => None,
            Reading::Missing(reason) => Some(reason),
        }
    }
}

/// The energy that all packages use, summed up over readings. Counters wrap after a few minutes at full power (65 kJ at 400 W:
/// less than three), so there is a reading every [`EnergySum::INTERVAL`].
#[derive(Debug)]
pub struct EnergySum {
    last: Reading<Vec<EnergyCounter>>,
    read: Instant,
    /// Sum \[µJ\]; none if a reading had none.
    sum_uj: Option<u64>,
}

impl EnergySum {
    /// Time between two readings.
    pub const INTERVAL: Duration = Duration::from_secs(30);

    /// Begins with the present reading.
    pub fn begin(meter: &PowerMeter) -> EnergySum {
        EnergySum { last: meter.energy(), read: Instant::now(), sum_uj: Some(0) }
    }

    /// Takes a reading if the latest is old. Returns whether it was.
    pub fn update(&mut self, meter: &PowerMeter) -> bool {
        let is_due = self.read.elapsed() >= EnergySum::INTERVAL;
        if is_due {
            self.add(meter);
        }
        is_due
    }

    /// Takes a reading.
    pub fn add(&mut self, meter: &PowerMeter) {
        let now = meter.energy();
        let used = now.value().zip(self.last.value()).and_then(|(now, last)| used_uj(now, last));
        self.sum_uj = self.sum_uj.zip(used).map(|(sum, used)| sum + used);
        (self.last, self.read) = (now, Instant::now());
    }

    /// The energy until the latest reading \[J\]; `None` if one of the readings had none.
    pub fn joules(&self) -> Option<f64> {
        Some(self.sum_uj? as f64 / 1e6)
    }
}

/// The energy counters without their wraps, for metrics. A counter that wraps twice between two readings loses one range.
#[derive(Debug, Default)]
pub struct EnergyTotals {
    packages: Vec<PackageEnergy>,
}

#[derive(Debug)]
struct PackageEnergy {
    last: EnergyCounter,
    /// What the counter had with the first reading, and the energy since \[µJ\].
    total_uj: u64,
}

impl EnergyTotals {
    /// Takes a reading. Returns the energy of each package \[J\]; none if the host shows none now.
    pub fn read(&mut self, meter: &PowerMeter) -> Vec<(String, f64)> {
        let counters = meter.energy();
        let counters = counters.value().into_iter().flatten();
        counters.map(|counter| (counter.name.clone(), self.add(counter) as f64 / 1e6)).collect()
    }

    fn add(&mut self, counter: &EnergyCounter) -> u64 {
        match self.packages.iter_mut().find(|package| package.last.name == counter.name) {
            Some(package) => {
                package.total_uj += counter.since(package.last.energy_uj);
                package.last = counter.clone();
                package.total_uj
            }
            None => {
                self.packages.push(PackageEnergy { last: counter.clone(), total_uj: counter.energy_uj });
                counter.energy_uj
            }
        }
    }
}

impl EnergyCounter {
    /// Energy since the counter had a value \[µJ\], if it has wrapped at most once.
    fn since(&self, last_uj: u64) -> u64 {
        let wrapped = || self.range_uj.saturating_sub(last_uj) + self.energy_uj;
        self.energy_uj.checked_sub(last_uj).unwrap_or_else(wrapped)
    }
}

/// Energy between two readings \[µJ\], if each counter is in both.
fn used_uj(now: &[EnergyCounter], last: &[EnergyCounter]) -> Option<u64> {
    let used = |counter: &EnergyCounter| {
        let last = last.iter().find(|last| last.name == counter.name)?;
        Some(counter.since(last.energy_uj))
    };
    now.iter().map(used).sum()
}

impl PowerMeter {
    /// The host's.
    pub fn host() -> PowerMeter {
        PowerMeter::at(Path::new("/sys"))
    }

    /// That of another sysfs tree.
    pub fn at(sysfs: &Path) -> PowerMeter {
        PowerMeter { sysfs: sysfs.to_owned() }
    }

    /// Reads all values.
    pub fn read(&self) -> PowerReading {
        PowerReading {
            energy: self.energy(),
            temperatures: self.temperatures(),
            governors: self.governors(),
            frequency_hz: self.frequency(),
            idle_states: self.idle_states(),
            throttle_events: self.throttle_events(),
        }
    }

    /// Packages. Their subdomains are parts of them, and the platform (`psys`) contains them.
    fn energy(&self) -> Reading<Vec<EnergyCounter>> {
        let folder = self.sysfs.join("class/powercap");
        let is_package = |name: &str| name.starts_with("intel-rapl:") && name.matches(':').count() == 1;
        let mut counters = Vec::new();
        for zone in entries(&folder, is_package) {
            let name = text(&zone.join("name")).unwrap_or_else(|_| file_name(&zone));
            if name == "psys" {
                continue;
            }
            let (energy, range) =
                (number(&zone.join("energy_uj")), number(&zone.join("max_energy_range_uj")));
            match (energy, range) {
                (Ok(energy_uj), Ok(range_uj)) => counters.push(EnergyCounter { name, energy_uj, range_uj }),
                (Err(reason), _) | (_, Err(reason)) => return Reading::Missing(reason),
            }
        }
        some(counters, || format!("no RAPL package in {}", folder.display()))
    }

    fn temperatures(&self) -> Reading<Vec<Sensor>> {
        let folder = self.sysfs.join("class/hwmon");
        let mut sensors = Vec::new();
        for chip in entries(&folder, |name| name.starts_with("hwmon")) {
            let chip_name = text(&chip.join("name")).unwrap_or_else(|_| file_name(&chip));
            for input in entries(&chip, |name| name.starts_with("temp") && name.ends_with("_input")) {
                let file = file_name(&input);
                let label = text(&chip.join(file.replace("_input", "_label")));
                let label = label.unwrap_or_else(|_| file.trim_end_matches("_input").to_owned());
                // A sensor that cannot be read now is left out.
                if let Ok(Ok(millidegrees)) = text(&input).map(|value| value.parse::<f64>()) {
                    let name = format!("{chip_name} {label}");
                    let place = [file_name(&chip), file.trim_end_matches("_input").to_owned()];
                    sensors.push((place, Sensor { name, celsius: millidegrees / 1000.0 }));
                }
            }
        }
        // Two processors or disks have sensors of the same name, and so have some chips.
        let known: Vec<_> =
            sensors.iter().map(|([chip, _], sensor)| (chip.clone(), sensor.name.clone())).collect();
        let named = sensors.into_iter().map(|([chip, input], sensor)| {
            let alike = || known.iter().filter(|(_, name)| *name == sensor.name);
            let place = match alike().filter(|(other, _)| *other == chip).count() {
                1 => chip,
                _ => format!("{chip} {input}"),
            };
            let name = if alike().count() == 1 { sensor.name } else { format!("{} ({place})", sensor.name) };
            Sensor { name, ..sensor }
        });
        some(named.collect(), || format!("no temperature sensor in {}", folder.display()))
    }

    fn processors(&self) -> Vec<PathBuf> {
        let is_processor = |name: &str| {
            name.strip_prefix("cpu")
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
        };
        entries(&self.sysfs.join("devices/system/cpu"), is_processor)
    }

    fn governors(&self) -> Reading<Vec<String>> {
        let all = self.processors().into_iter().map(|cpu| text(&cpu.join("cpufreq/scaling_governor")));
        let mut governors: Vec<String> = all.flatten().collect();
        governors.sort_unstable();
        governors.dedup();
        some(governors, || "no cpufreq driver: the host or its hypervisor sets the frequency".to_owned())
    }

    fn frequency(&self) -> Reading<f64> {
        let all = self.processors().into_iter().map(|cpu| number(&cpu.join("cpufreq/scaling_cur_freq")));
        let kilohertz: Vec<u64> = all.flatten().collect();
        if kilohertz.is_empty() {
            return Reading::Missing("no cpufreq driver: the frequency is unknown".to_owned());
        }
        Reading::Value(kilohertz.iter().sum::<u64>() as f64 * 1000.0 / kilohertz.len() as f64)
    }

    fn idle_states(&self) -> Reading<Vec<String>> {
        let folder = self.sysfs.join("devices/system/cpu/cpu0/cpuidle");
        let states = entries(&folder, |name| name.starts_with("state"));
        let names = states.iter().filter_map(|state| text(&state.join("name")).ok()).collect();
        some(names, || "no cpuidle driver: the hypervisor handles idle processors".to_owned())
    }

    fn throttle_events(&self) -> Reading<u64> {
        let processors = self.processors();
        let counts = processors.iter().flat_map(|cpu| {
            ["core_throttle_count", "package_throttle_count"]
                .map(|file| number(&cpu.join("thermal_throttle").join(file)))
        });
        let counts: Vec<u64> = counts.flatten().collect();
        if counts.is_empty() {
            return Reading::Missing("no thermal_throttle counters: the processor shows none".to_owned());
        }
        Reading::Value(counts.iter().sum())
    }
}

fn some<T>(values: Vec<T>, reason: impl FnOnce() -> String) -> Reading<Vec<T>> {
    if values.is_empty() { Reading::Missing(reason()) } else { Reading::Value(values) }
}

/// Entries of a folder in the order of the numbers in their names; none if it is missing.
fn entries(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut wanted: Vec<PathBuf> = all.filter(|path| is_wanted(&file_name(path))).collect();
    wanted.sort_by_key(|path| {
        let name = file_name(path);
        let digits: String = name.chars().filter(char::is_ascii_digit).take(9).collect();
        (digits.parse::<u32>().unwrap_or(0), name)
    });
    wanted
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn text(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(|cause| match cause.kind() {
        ErrorKind::PermissionDenied => format!("{}: readable by root only", path.display()),
        _ => format!("{}: {cause}", path.display()),
    })
}

fn number(path: &Path) -> Result<u64, String> {
    let text = text(path)?;
    text.parse().map_err(|_| format!("{}: {text:?} is not a number", path.display()))
}
