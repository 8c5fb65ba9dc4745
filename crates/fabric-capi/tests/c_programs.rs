//! Programs in C on tori of processes: `examples/7-torus-c`, and one that calls everything.
//!
//! This program is also every node process: `node …`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_torus::launch::{Launcher, ProcessArguments};
use millstream_torus::node;
use millstream_torus::traffic::TrafficCounters;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().map(String::as_str) == Some("node") {
        return match run_node(&words) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
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

fn run_node(words: &[String]) -> TestResult {
    Ok(node::run(&ProcessArguments(words).node()?)?)
}

fn launcher(dimensions: &str) -> Launcher {
    let launcher = Launcher::new(dimensions.parse().expect("valid"), std::env::current_exe().expect("known"));
    Launcher { device: Some("soft".to_owned()), ..launcher }
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
    let total = TrafficCounters::total(&torus.finish()?);
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    Ok(())
}
