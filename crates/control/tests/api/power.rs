//! The host's power state from a made sysfs tree.

use millstream_control::power::{PowerMeter, Reading};
use std::path::Path;

fn write(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn host(root: &Path) {
    for (package, energy) in [(0, "1000000"), (1, "9000000")] {
        let zone = format!("class/powercap/intel-rapl:{package}");
        write(root, &format!("{zone}/name"), &format!("package-{package}\n"));
        write(root, &format!("{zone}/energy_uj"), energy);
        write(root, &format!("{zone}/max_energy_range_uj"), "10000000\n");
        // A subdomain, which is part of its package.
        let part = format!("class/powercap/intel-rapl:{package}:0");
        write(root, &format!("{part}/energy_uj"), "500");
    }
    write(root, "class/hwmon/hwmon2/name", "coretemp\n");
    write(root, "class/hwmon/hwmon2/temp1_input", "45500\n");
    write(root, "class/hwmon/hwmon2/temp1_label", "Package id 0\n");
    write(root, "class/hwmon/hwmon2/temp2_input", "garbage");
    for (cpu, governor, kilohertz) in [(0, "powersave", "1000000"), (1, "performance", "3000000")] {
        let cpu = format!("devices/system/cpu/cpu{cpu}");
        write(root, &format!("{cpu}/cpufreq/scaling_governor"), governor);
        write(root, &format!("{cpu}/cpufreq/scaling_cur_freq"), kilohertz);
        write(root, &format!("{cpu}/thermal_throttle/core_throttle_count"), "3");
        write(root, &format!("{cpu}/thermal_throttle/package_throttle_count"), "1");
    }
    write(root, "devices/system/cpu/cpufreq/boost", "1");
    write(root, "devices/system/cpu/cpu0/cpuidle/state0/name", "POLL");
    write(root, "devices/system/cpu/cpu0/cpuidle/state10/name", "C6");
    write(root, "devices/system/cpu/cpu0/cpuidle/state2/name", "C1E");
}

#[test]
fn all_values_are_read() {
    let folder = tempfile::tempdir().unwrap();
    host(folder.path());
    let meter = PowerMeter::at(folder.path());
    let before = meter.read();
    assert_eq!(before.governors.value().unwrap(), &["performance", "powersave"]);
    assert_eq!(before.frequency_hz, Reading::Value(2e9));
    assert_eq!(before.idle_states.value().unwrap(), &["POLL", "C1E", "C6"]);
    assert_eq!(before.throttle_events, Reading::Value(8));
    let sensors = before.temperatures.value().unwrap();
    assert_eq!(
        (sensors.len(), sensors[0].name.as_str(), sensors[0].celsius),
        (1, "coretemp Package id 0", 45.5)
    );
    // Package 0 uses 2 J; package 1 wraps: 1 J to the range, and 0.5 J.
    write(folder.path(), "class/powercap/intel-rapl:0/energy_uj", "3000000");
    write(folder.path(), "class/powercap/intel-rapl:1/energy_uj", "500000");
    assert_eq!(meter.read().energy_since(&before), Some(3.5));
}

#[test]
fn missing_values_have_reasons() {
    let folder = tempfile::tempdir().unwrap();
    let reading = PowerMeter::at(folder.path()).read();
    let reasons = [
        (reading.energy.reason(), "no RAPL package in"),
        (reading.temperatures.reason(), "no temperature sensor in"),
        (reading.governors.reason(), "no cpufreq driver"),
        (reading.frequency_hz.reason(), "no cpufreq driver"),
        (reading.idle_states.reason(), "no cpuidle driver"),
        (reading.throttle_events.reason(), "no thermal_throttle counters"),
    ];
    for (reason, expected) in reasons {
        assert!(reason.is_some_and(|reason| reason.starts_with(expected)), "{reason:?}");
    }
    assert_eq!(reading.energy_since(&reading), None);
    write(folder.path(), "class/powercap/intel-rapl:0/energy_uj", "many");
    let reading = PowerMeter::at(folder.path()).read();
    let reason = reading.energy.reason().unwrap();
    assert!(reason.ends_with("energy_uj: \"many\" is not a number"), "{reason}");
}

#[test]
fn the_real_host_is_read_without_an_error() {
    let reading = PowerMeter::host().read();
    for reason in [reading.energy.reason(), reading.governors.reason(), reading.throttle_events.reason()] {
        println!("{}", reason.unwrap_or("has a value"));
        assert_ne!(reason, Some(""));
    }
}
