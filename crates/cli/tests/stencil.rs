//! `millstream stencil` as a program: files, verification, reports, errors.

use std::path::Path;
use std::process::{Command, Output};

/// Debian's Python, which has Debian's numpy.
const PYTHON: &str = "/usr/bin/python3";

fn millstream(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.arg("stencil").args(arguments).current_dir(folder).output().expect("the program starts")
}

fn succeeds(folder: &Path, arguments: &[&str]) -> String {
    let output = millstream(folder, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

fn fails(folder: &Path, arguments: &[&str]) -> String {
    let output = millstream(folder, arguments);
    assert!(!output.status.success(), "{arguments:?} must fail");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn python(folder: &Path, script: &str) {
    let output = Command::new(PYTHON).args(["-c", script]).current_dir(folder).output();
    let output = output.unwrap_or_else(|error| panic!("{PYTHON}: {error}; `make setup` installs it"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn results_from_npy_and_hdf5_files_equal_numpy_in_every_bit() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    python(
        here,
        r#"
import h5py, numpy as np
random = np.random.default_rng(7)
for name, dtype in (("single", np.float32), ("double", np.float64)):
    np.save(f"{name}.npy", random.random((701, 333)).astype(dtype))
with h5py.File("run.h5", "w") as file:
    file["before"] = np.load("double.npy")
"#,
    );
    let common = ["--iterations", "37", "--local", "3"];
    let table =
        succeeds(here, &[&common[..], &["--input", "single.npy", "--output", "single.h5:after"]].concat());
    assert!(table.contains("701x333 float32, 37 sweeps on 3 cards"), "{table}");
    assert!(table.lines().any(|line| line.trim_start().starts_with("total")), "{table}");
    succeeds(here, &[&common[..], &["--input", "run.h5:before", "--output", "after.npy"]].concat());
    python(
        here,
        r#"
import h5py, numpy as np
def sweeps(a):
    for _ in range(37):
        b = a.copy()
        b[1:-1, 1:-1] = a.dtype.type(0.25) * ((a[:-2, 1:-1] + a[2:, 1:-1]) + (a[1:-1, :-2] + a[1:-1, 2:]))
        a = b
    return a
with h5py.File("single.h5") as file:
    single = file["after"][:]
for name, after in (("single", single), ("double", np.load("after.npy"))):
    expected = sweeps(np.load(f"{name}.npy"))
    assert after.dtype == expected.dtype and after.tobytes() == expected.tobytes(), name
"#,
    );
}

#[test]
fn a_generated_grid_is_verified_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        ["--grid", "500x200", "--iterations", "20", "--verify", "--json", "-", "--svg", "timeline.svg"];
    let json = succeeds(folder.path(), &arguments);
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["grid"], serde_json::json!([500, 200]));
    assert_eq!(report["rows"], serde_json::json!([250, 250]));
    assert_eq!(report["bytes"][2], 500 * 200 * 4);
    let sweeps: u64 =
        report["blocks"].as_array().unwrap().iter().map(|block| block["sweeps"].as_u64().unwrap()).sum();
    assert_eq!(sweeps, 20);
    let picture = std::fs::read_to_string(folder.path().join("timeline.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("compute"), "{picture}");
}

#[test]
fn errors_name_the_bad_input() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |arguments: &[&str]| fails(folder.path(), arguments);
    assert!(fails(&[]).contains("--grid"));
    for grid in ["16384", "0x5", "5x", "99999999999x99999999999"] {
        assert!(fails(&["--grid", grid]).contains(grid));
    }
    assert!(fails(&["--input", "none.npy"]).contains("none.npy: No such file"));
    assert!(fails(&["--input", "grid.txt"]).contains("grid.txt: expected a name"));
    let message = fails(&["--grid", "64x64", "--cards", "127.0.0.1:9"]);
    assert!(message.contains("card 127.0.0.1:9, connecting"), "{message}");
    assert!(fails(&["--grid", "10x64", "--local", "20"]).contains("divided into tiles"));
    assert!(fails(&["--grid", "64x64", "--depth", "17"]).contains("depth 17"));
    let endless = fails(&["--grid", "64x64", "--iterations", "18446744073709551615"]);
    assert!(endless.contains("18446744073709551615 sweeps in blocks of"), "{endless}");
    for (output, file) in [("--output", "none/a.npy"), ("--json", "none/a.json"), ("--svg", "none/a.svg")] {
        let message = fails(&["--grid", "64x64", output, file]);
        assert!(message.contains(&format!("{file}: cannot write: No such file")), "{message}");
        assert!(!message.contains("grid of 64x64"), "before the job: {message}");
    }
}
