//! Programs in C on tori of processes: `examples/7-torus-c`, and one that calls everything.
//!
//! This program is also every node process: `node …`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_torus::launch::{Launcher, ProcessArguments};
use millstream_torus::node;
use millstream_torus::node::SeventhOptions;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::NodeNumber;

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
        Trial::test("a_host_outside_of_the_torus_uses_it_from_c", || {
            failed(a_host_outside_of_the_torus_uses_it_from_c())
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

/// The nodes' programs wait for the host of the example; before it, another host tries what is refused.
fn a_host_outside_of_the_torus_uses_it_from_c() -> TestResult {
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let example = compile(&here().join("../../examples/7-torus-c/outside.c"), folders[0].path())?;
    let errors = compile(&here().join("tests/c/outside_errors.c"), folders[1].path())?;
    let seventh = SeventhOptions { listen: "127.0.0.1:0".to_owned(), key: 0xc0 };
    let mut torus = Launcher { seventh: Some(seventh), ..launcher("2x2x1") }.launch()?;
    let (address, key) = torus.gateway(NodeNumber(0)).ok_or("node 0 has no seventh port")?;
    let host = |program: &Path| {
        let mut command = Command::new(program);
        command.env("MILLSTREAM_DEVICE", "soft").env("MILLSTREAM_LIB", verbs_library());
        command.env("MILLSTREAM_TORUS_GATEWAY", address);
        command.env("MILLSTREAM_TORUS_GATEWAY_KEY", format!("{key:016x}"));
        command
    };
    let (mut refused, mut example_host) = (host(&errors), host(&example));
    let hosts = std::thread::spawn(move || -> std::io::Result<[Output; 2]> {
        Ok([refused.output()?, example_host.output()?])
    });
    torus.run(&[example.into()])?;
    let [refused, printed] = hosts.join().expect("no panic")?;
    for output in [&refused, &printed] {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let readme = include_str!("../../../examples/7-torus-c/README.md");
    let printed = String::from_utf8_lossy(&printed.stdout);
    assert!(!printed.is_empty() && readme.contains(&format!("    {printed}")), "{printed}");
    let total = TrafficCounters::total(&torus.finish()?);
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    Ok(())
}

/// The soft device that this test's own process loads: beside the profile's folder.
fn verbs_library() -> PathBuf {
    std::env::var_os("MILLSTREAM_LIB").map_or_else(|| here().join("../../target/lib"), PathBuf::from)
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
