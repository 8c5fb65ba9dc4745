//! Programs in C on tori of processes: `examples/7-torus-c`, and one that calls everything.
//!
//! This program is also every node process: `node …`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_rdma::device::DeviceSelector;
use millstream_torus::account::Account;
use millstream_torus::engine::EngineOptions;
use millstream_torus::launch::Launcher;
use millstream_torus::node::{self, NodeOptions};
use millstream_torus_core::NodeNumber;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().map(String::as_str) == Some("node") {
        return match node::run(&node_options(&words)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let trials = vec![
        Trial::test("the_example_prints_what_its_readme_says", || {
            failed(the_example_prints_what_its_readme_says())
        }),
        Trial::test("every_call_works_on_two_nodes", || failed(every_call_works("2x1x1"))),
        Trial::test("every_call_works_on_eight_nodes", || failed(every_call_works("2x2x2"))),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn failed(result: TestResult) -> Result<(), Failed> {
    result.map_err(|error| error.to_string().into())
}

fn node_options(words: &[String]) -> NodeOptions {
    let value = |name: &str| {
        let at = words.iter().position(|word| word == name).expect("given by the launcher");
        words[at + 1].as_str()
    };
    NodeOptions {
        dimensions: value("--dimensions").parse().expect("valid"),
        node: NodeNumber(value("--node").parse().expect("valid")),
        key: u64::from_str_radix(value("--key"), 16).expect("valid"),
        listen: "127.0.0.1:0".to_owned(),
        peers: None,
        rejoin: false,
        device: DeviceSelector::Soft,
        engine: EngineOptions::default(),
        spin: Duration::ZERO,
        supervisors: Vec::new(),
        card: None,
        timers: None,
    }
}

fn launcher(dimensions: &str) -> Launcher {
    Launcher {
        dimensions: dimensions.parse().expect("valid"),
        program: std::env::current_exe().expect("known"),
        arguments: Vec::new(),
        node_arguments: Vec::new(),
        device: Some("soft".to_owned()),
        card: None,
        launcher: None,
        addresses: Vec::new(),
        supervisor_address: None,
        supervisors: 0,
        period_factor: 1,
    }
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Compiles a program against the header and the library that cargo has built beside this test.
fn compile(source: &Path, folder: &Path) -> Result<PathBuf, Box<dyn std::error::Error>> {
    let built = std::env::current_exe()?.with_file_name("libmillstream_fabric_capi.so");
    std::fs::copy(&built, folder.join("libmillstream_fabric.so"))
        .map_err(|error| format!("{}: {error}", built.display()))?;
    let program = folder.join("program");
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-o"])
        .args([&program, source])
        .arg("-I")
        .arg(here().join("include"))
        .arg("-L")
        .arg(folder)
        .args(["-lmillstream_fabric", "-Wl,-rpath,$ORIGIN"])
        .output()
        .map_err(|error| format!("cc: {error}: apt-get install gcc libc6-dev"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(program)
}

fn the_example_prints_what_its_readme_says() -> TestResult {
    let folder = tempfile::tempdir()?;
    let program = compile(&here().join("../../examples/7-torus-c/main.c"), folder.path())?;
    let output = folder.path().join("output");
    let mut torus = launcher("2x2x2").launch()?;
    let script = format!("exec {} >> {}", program.display(), output.display());
    torus.run(&["sh".into(), "-c".into(), script.into()])?;
    torus.finish()?;
    let printed = std::fs::read_to_string(&output)?;
    let readme = include_str!("../../../examples/7-torus-c/README.md");
    assert!(readme.contains(&format!("    {printed}")), "{printed}");
    Ok(())
}

fn every_call_works(dimensions: &str) -> TestResult {
    let folder = tempfile::tempdir()?;
    let program = compile(&here().join("tests/c/every_call.c"), folder.path())?;
    let mut torus = launcher(dimensions).launch()?;
    torus.run(&[program.into()])?;
    let total = Account::total(&torus.finish()?);
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    Ok(())
}
