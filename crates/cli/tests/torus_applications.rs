//! `millstream torus spin` and `torus neurons` alone and as the program of `torus run`, and the death of a node's process.

use std::path::Path;
use std::process::{Command, Output};

fn millstream(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(["--device", "soft"]).args(arguments).output().expect("the program starts")
}

fn report(arguments: &[&str]) -> serde_json::Value {
    let output = millstream(arguments);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
    // `torus run` prints its account after the application's report.
    let mut documents = serde_json::Deserializer::from_str(&out).into_iter();
    documents.next().expect("a report").expect("JSON")
}

/// Runs an application on a torus of processes.
fn on_processes(dimensions: &str, application: &[&str]) -> Vec<String> {
    let run = ["torus", "run", "--dimensions", dimensions, "--", env!("CARGO_BIN_EXE_millstream")];
    run.iter().chain(application).map(|word| (*word).to_owned()).collect()
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

const SPIN: [&str; 8] = ["torus", "spin", "--lattice", "16x12x20", "--sweeps", "24", "--depth", "2"];
const NEURONS: [&str; 10] =
    ["torus", "neurons", "--columns", "3x2", "--neurons", "200", "--synapses", "40", "--duration", "1200"];

fn with<'w>(application: &[&'w str], more: &[&'w str]) -> Vec<&'w str> {
    application.iter().chain(more).copied().collect()
}

/// What does not depend on the shape.
fn results(report: &serde_json::Value) -> serde_json::Value {
    ["measurements", "seconds", "state"].map(|field| report[field].clone()).to_vec().into()
}

#[test]
fn processes_give_the_same_bits_as_threads() {
    for application in [&SPIN[..], &NEURONS[..]] {
        let alone = report(&with(application, &["--json"]));
        let threads = report(&with(application, &["--json", "--dimensions", "2x2x1"]));
        let processes = report(&words(&on_processes("2x2x1", &with(application, &["--json"]))));
        assert_ne!(results(&alone), serde_json::json!([null, null, null]));
        assert_eq!(results(&threads), results(&alone));
        assert_eq!(results(&processes), results(&alone));
        assert_eq!(processes["dimensions"], "2x2x1");
        let nodes = processes["nodes"].as_array().expect("the nodes' times");
        assert!(
            nodes.len() == 4 && nodes.iter().all(|node| node["messages"].as_u64() > Some(0)),
            "{nodes:?}"
        );
    }
}

#[test]
fn a_run_resumes_after_the_death_of_a_process_on_another_shape() {
    for (application, fail, resumed) in [(&SPIN[..], "2@17", 10), (&NEURONS[..], "1@1100", 1000)] {
        let expected = report(&with(application, &["--json"]));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let mut saving = with(application, &["--json", "--checkpoint", path]);
        if application == SPIN {
            saving.extend(["--checkpoint-every", "10"]);
        }
        let killed = millstream(&words(&on_processes("2x2x1", &with(&saving, &["--fail", fail]))));
        let err = String::from_utf8_lossy(&killed.stderr);
        assert!(!killed.status.success(), "{err}");
        let node = fail.split_once('@').unwrap().0;
        assert!(err.contains(&format!("the application of node {node} ended with signal: 9")), "{err}");
        let report = report(&words(&on_processes("3x1x1", &with(&saving, &["--resume"]))));
        assert_eq!(report["resumed_after"], resumed);
        assert_eq!(results(&report), results(&expected));
    }
}

#[test]
fn tables_and_pictures_are_complete() {
    let folder = tempfile::tempdir().unwrap();
    let picture = |name: &str, application: &[&str], expected: &[&str]| {
        let path = folder.path().join(name);
        let svg = path.to_str().unwrap();
        let output = millstream(&with(application, &["--dimensions", "2x1x1", "--svg", svg]));
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(expected.iter().all(|text| table.contains(text)), "{table}");
        read(&path)
    };
    let spin = picture("spin.svg", &SPIN, &["ps per spin update", "compute", "checksum"]);
    // A square for each site of the plane, and three bars a node.
    assert!(spin.matches("hsl(").count() == 16 * 12 && spin.contains("overlap with the start"));
    let neurons = picture("neurons.svg", &NEURONS, &["synaptic events/s", "inhibitory Hz", "state"]);
    assert!(neurons.contains("mean rate [Hz]") && neurons.matches("<rect").count() > 100);
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let refused = |arguments: &[&str], expected: &str| {
        let output = millstream(arguments);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && err.contains(expected), "{arguments:?}: {err}");
    };
    refused(&["torus", "spin", "--lattice", "15"], "15 sites in x");
    refused(&["torus", "spin", "--lattice", "8", "--dimensions", "4x1x1"], "4 nodes cut 8 sites in x");
    refused(&["torus", "spin", "--resume"], "--checkpoint");
    refused(&["torus", "spin", "--fail", "three"], "expected NODE@STEP");
    refused(&["torus", "neurons", "--synapses", "900"], "synapses of a neuron is 900");
    refused(&["torus", "neurons", "--shares", "1,2"], "four numbers");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&["torus", "spin", "--checkpoint", path, "--resume"], "no checkpoint here");
}
