//! Selection of the verbs library. It happens before `main`, so each case is a separate process.

use std::process::{Command, Output};

use millstream_rdma::loader::{self, VerbsLibrary};
use millstream_rdma::{DeviceSelector, device};

/// Runs one of the ignored tests below in a new process.
fn run(test: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env(loader::ENV_DEVICE, "auto");
    command.envs(environment.iter().copied()).output().unwrap()
}

fn succeeds(test: &str, environment: &[(&str, &str)]) {
    let output = run(test, environment);
    assert!(
        output.status.success(),
        "{test} with {environment:?}:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_environment_chooses_the_library() {
    succeeds("has_the_soft_device", &[(loader::ENV_DEVICE, "soft")]);
    succeeds("has_the_soft_device", &[(loader::ENV_DEVICE, "no-such-adapter")]);
    succeeds("has_no_soft_device", &[(loader::ENV_DEVICE, "hardware")]);
    let automatic = match loader::hardware_devices().is_empty() {
        true => "has_the_soft_device",
        false => "has_no_soft_device",
    };
    succeeds(automatic, &[]);
    succeeds(automatic, &[(loader::ENV_DEVICE, "auto")]);
}

#[test]
fn other_programs_get_the_soft_device_by_its_directory() {
    let directory = loader::library_dir().expect("run `make lib` first");
    assert!(directory.join(loader::SONAME).is_file());
    // The library path takes precedence over the search of the program and over the selection of hardware.
    let path = [("LD_LIBRARY_PATH", directory.to_str().unwrap()), (loader::ENV_DEVICE, "hardware")];
    succeeds("has_the_soft_device", &path);
}

#[test]
fn a_program_restarts_itself_for_the_other_library() {
    succeeds("asks_for_the_soft_device", &[(loader::ENV_DEVICE, "hardware")]);
    let directory = loader::library_dir().expect("run `make lib` first");
    let path = [("LD_LIBRARY_PATH", directory.to_str().unwrap()), (loader::ENV_DEVICE, "soft")];
    succeeds("asks_for_hardware", &path);
}

#[test]
fn a_missing_library_is_reported_when_a_device_is_opened() {
    let soft = (loader::ENV_DEVICE, "soft");
    succeeds("reports_what_was_not_found", &[soft, (loader::ENV_LIBRARY, "/nonexistent/lib.so")]);
    let broken = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(broken.path(), "not a library").unwrap();
    succeeds("reports_what_was_not_found", &[soft, (loader::ENV_LIBRARY, broken.path().to_str().unwrap())]);
}

#[test]
fn the_devices_are_listed_with_their_attributes() {
    let devices = device::devices().unwrap_or_else(|error| panic!("run `make lib` first: {error}"));
    assert!(!devices.is_empty());
    for each in &devices {
        assert!(!each.name.is_empty() && each.library.is_file(), "{each:?}");
        assert!(each.limits.queue_depth > 0 && each.limits.region_bytes > 0, "{each:?}");
        assert!(each.ports.iter().all(|port| !port.gids.is_empty()) && !each.ports.is_empty(), "{each:?}");
    }
    let opened = device::open(&DeviceSelector::Named(devices[0].name.clone())).unwrap();
    assert_eq!((opened.name(), opened.is_soft()), (devices[0].name.as_str(), devices[0].soft));
    assert!(devices[0].ports[0].gids.contains(&opened.gid()));
}

#[test]
fn a_device_that_does_not_exist_is_refused_with_those_that_do() {
    let devices = device::devices().unwrap_or_else(|error| panic!("run `make lib` first: {error}"));
    let error = device::open(&DeviceSelector::Named("nosuch9".to_owned())).unwrap_err().to_string();
    assert!(error.contains("\"nosuch9\"") && error.contains(&devices[0].name), "{error}");
}

#[test]
#[ignore = "a process of the tests above"]
fn has_the_soft_device() {
    let loaded = loader::loaded();
    assert!(matches!(loaded, VerbsLibrary::Soft(_)), "run `make lib` first: this process uses {loaded}");
    assert!(device::open(&DeviceSelector::Soft).unwrap().is_soft());
    assert!(device::open(&DeviceSelector::Hardware).is_err());
}

#[test]
#[ignore = "a process of the tests above"]
fn has_no_soft_device() {
    let loaded = loader::loaded();
    assert!(!matches!(loaded, VerbsLibrary::Soft(_)), "this process uses {loaded}");
}

#[test]
#[ignore = "a process of the tests above"]
fn asks_for_the_soft_device() {
    loader::ensure(&DeviceSelector::Soft).unwrap_or_else(|error| panic!("run `make lib` first: {error}"));
    has_the_soft_device();
}

#[test]
#[ignore = "a process of the tests above"]
fn asks_for_hardware() {
    // Without rdma-core there is no library to restart for; the program must not restart endlessly.
    if let Err(error) = loader::ensure(&DeviceSelector::Hardware) {
        assert!(error.to_string().contains("restarted for it"), "{error}");
    }
    has_no_soft_device();
}

#[test]
#[ignore = "a process of the tests above"]
fn reports_what_was_not_found() {
    let wanted = std::env::var(loader::ENV_LIBRARY).unwrap();
    let error = device::open(&DeviceSelector::Soft).unwrap_err().to_string();
    let why = if wanted.starts_with("/nonexistent") { "make lib" } else { "does not load" };
    assert!(error.contains(&wanted) && error.contains(why), "{error}");
}
