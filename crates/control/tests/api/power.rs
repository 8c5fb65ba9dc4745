//! The host's power state from a made sysfs tree.

use millstream_control::power::{EnergySum, PowerMeter, Reading};
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
    // The platform, which contains the packages.
    write(root, "class/powercap/intel-rapl:2/name", "psys\n");
    write(root, "class/powercap/intel-rapl:2/energy_uj", "77\n");
    write(root, "class/powercap/intel-rapl:2/max_energy_range_uj", "10000000\n");
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
    let mut energy = EnergySum::begin(&meter);
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
    energy.add(&meter);
    assert_eq!(energy.joules(), Some(3.5));
    // Both wrap once more.
    write(folder.path(), "class/powercap/intel-rapl:0/energy_uj", "0");
    write(folder.path(), "class/powercap/intel-rapl:1/energy_uj", "0");
    energy.add(&meter);
    assert_eq!(energy.joules(), Some(3.5 + 7.0 + 9.5));
    std::fs::remove_file(folder.path().join("class/powercap/intel-rapl:1/energy_uj")).unwrap();
    energy.add(&meter);
    assert_eq!(energy.joules(), None, "a part of the energy is unknown");
}

#[test]
fn sensors_of_one_name_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    for (chip, name) in [(0, "nvme"), (3, "coretemp"), (4, "coretemp")] {
        let chip = format!("class/hwmon/hwmon{chip}");
        write(folder.path(), &format!("{chip}/name"), name);
        write(folder.path(), &format!("{chip}/temp1_input"), "40000");
        write(folder.path(), &format!("{chip}/temp1_label"), "Core 0");
    }
    write(folder.path(), "class/hwmon/hwmon4/temp2_input", "40000");
    write(folder.path(), "class/hwmon/hwmon4/temp2_label", "Core 0");
    let reading = PowerMeter::at(folder.path()).read();
    let names: Vec<_> = reading.temperatures.value().unwrap().iter().map(|sensor| &sensor.name).collect();
    let inputs = ["coretemp Core 0 (hwmon4 temp1)", "coretemp Core 0 (hwmon4 temp2)"];
    assert_eq!(names, ["nvme Core 0", "coretemp Core 0 (hwmon3)", inputs[0], inputs[1]]);
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
    let mut energy = EnergySum::begin(&PowerMeter::at(folder.path()));
    energy.add(&PowerMeter::at(folder.path()));
    assert_eq!(energy.joules(), None);
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
