//! `millstream torus spin`, `torus neurons` and `torus bfs` alone and as the program of `torus run`, and the death of a node's process.

#[path = "common/running.rs"]
mod running;

use std::path::Path;
use std::process::{Command, Output};

use running::Running;

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

const BFS: [&str; 6] = ["torus", "bfs", "--scale", "11", "--roots", "5"];

fn with<'w>(application: &[&'w str], more: &[&'w str]) -> Vec<&'w str> {
    application.iter().chain(more).copied().collect()
}

/// What does not depend on the shape.
fn results(report: &serde_json::Value) -> serde_json::Value {
    let fields = ["measurements", "seconds", "state"].map(|field| report[field].clone());
    let searches = report["roots"].as_array().into_iter().flatten().map(|root| {
        ["root", "edges", "levels", "directions", "levels_hash", "parents_hash"]
            .map(|field| root[field].clone())
            .to_vec()
            .into()
    });
    fields.into_iter().chain(searches).collect::<Vec<_>>().into()
}

#[test]
fn processes_give_the_same_bits_as_threads() {
    for application in [&SPIN[..], &NEURONS[..], &BFS[..]] {
        let alone = report(&with(application, &["--json"]));
        let threads = report(&with(application, &["--json", "--dimensions", "2x2x1"]));
        let processes = report(&words(&on_processes("2x2x1", &with(application, &["--json"]))));
        assert_ne!(results(&alone), serde_json::json!([null, null, null]));
        assert_eq!(results(&threads), results(&alone));
        assert_eq!(results(&processes), results(&alone));
        assert_eq!(processes["dimensions"], "2x2x1");
        if application == BFS {
            assert_eq!(processes["nodes"], 4);
            continue;
        }
        let nodes = processes["nodes"].as_array().expect("the nodes' times");
        assert!(
            nodes.len() == 4 && nodes.iter().all(|node| node["messages"].as_u64() > Some(0)),
            "{nodes:?}"
        );
    }
}

#[test]
fn a_full_mesh_of_processes_gives_the_same_bits_as_threads() {
    for application in [&SPIN[..], &NEURONS[..], &BFS[..]] {
        let alone = report(&with(application, &["--json"]));
        let mut run = on_processes("2x1x1", &with(application, &["--json"]));
        run.splice(2..2, ["--network".to_owned(), "direct".to_owned()]);
        let mesh = report(&words(&run));
        assert_eq!(mesh["dimensions"], "2x1x1");
        assert_eq!(results(&mesh), results(&alone));
    }
}

/// Emulated cards of a torus, one process each.
struct Cards(Vec<Running>);

impl Cards {
    /// Returns the pattern of their names, too.
    fn serve(test: &str, nodes: usize, memory: &str) -> (Cards, String) {
        let pattern = format!("torus-{test}-{}-{{node}}", std::process::id());
        let mut cards = Cards(Vec::new());
        for node in 0..nodes {
            let process = Command::new(env!("CARGO_BIN_EXE_millstream"))
                .args(["card", "--json", "serve", &pattern.replace("{node}", &node.to_string())])
                .args(["--listen", "127.0.0.1:0", "--memory", memory])
                .stdout(std::process::Stdio::piped())
                .spawn();
            let mut process = Running(process.expect("the program starts"));
            let output = process.0.stdout.take().expect("piped");
            cards.0.push(process);
            let mut line = String::new();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).expect("a line");
            assert!(line.contains("address"), "{line}");
        }
        (cards, pattern)
    }
}

#[test]
fn card_memory_gives_the_same_bits_as_host_memory() {
    let (_cards, pattern) = Cards::serve("applications", 4, "64MiB");
    let run = ["torus", "run", "--dimensions", "2x2x1", "--card", &pattern, "--"];
    for application in [&SPIN[..], &NEURONS[..], &BFS[..]] {
        let expected = report(&with(application, &["--json"]));
        let mut arguments = with(&run, &[env!("CARGO_BIN_EXE_millstream")]);
        arguments.extend(application);
        arguments.extend(["--json", "--memory"]);
        for memory in ["card", "card-messages"] {
            let on_cards = report(&with(&arguments, &[memory]));
            assert_eq!(results(&on_cards), results(&expected), "{memory}");
            assert_eq!(on_cards["dimensions"], "2x2x1");
        }
    }
    let output = millstream(&with(&SPIN, &["--memory", "card"]));
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && err.contains("torus run --card NAME"), "{err}");
}

/// A run whose spins are on cards continues in host memory, and the other way round.
#[test]
fn a_card_that_is_too_small_ends_the_run_with_an_error() {
    let (_cards, pattern) = Cards::serve("small", 2, "16MiB");
    let program = env!("CARGO_BIN_EXE_millstream");
    let run = ["torus", "run", "--dimensions", "2x1x1", "--card", &pattern, "--", program];
    let output = millstream(&with(&with(&run, &BFS), &["--memory", "card-messages"]));
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && err.contains("are not memory of a card of node"), "{err}");
}

#[test]
fn checkpoints_move_between_card_and_host_memory() {
    let (_cards, pattern) = Cards::serve("checkpoints", 4, "64MiB");
    let program = env!("CARGO_BIN_EXE_millstream");
    let on_cards = ["torus", "run", "--dimensions", "2x1x2", "--card", &pattern, "--", program];
    let spin = with(&SPIN, &["--element", "f64", "--json"]);
    let expected = report(&spin);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let picture = folder.path().join("spin.svg");
    let saving = ["--checkpoint", path, "--checkpoint-every", "7"];
    let card = ["--memory", "card", "--svg", picture.to_str().unwrap()];
    // The last sweep is not a multiple: a run that resumes has sweeps to make.
    let first = report(&with(&with(&with(&on_cards, &spin), &saving), &card));
    assert_eq!(results(&first), results(&expected));
    assert!(std::fs::read_to_string(&picture).unwrap().contains("</svg>"));
    let resumed = report(&with(&with(&spin, &saving), &["--resume", "--dimensions", "1x3x1"]));
    assert_eq!(resumed["resumed_after"], 21);
    assert_eq!(results(&resumed), results(&expected));
    let resumed = report(&with(&with(&with(&on_cards, &spin), &saving), &["--resume", "--memory", "card"]));
    assert_eq!(resumed["resumed_after"], 21);
    assert_eq!(results(&resumed), results(&expected));
}

/// The graph is in the memory of eight cards. The death of a process leaves the searches that are done; the others are made
/// in host memory.
#[test]
fn searches_on_cards_go_on_in_host_memory_after_the_death_of_a_process() {
    let (_cards, pattern) = Cards::serve("searches", 8, "64MiB");
    let program = env!("CARGO_BIN_EXE_millstream");
    let run = ["torus", "run", "--dimensions", "2x2x2", "--card", &pattern, "--", program];
    let folder = tempfile::tempdir().unwrap();
    for columns in ["32", "48"] {
        let search = with(&BFS, &["--json", "--columns", columns]);
        let expected = report(&search);
        assert_eq!(expected["roots"].as_array().map(Vec::len), Some(5));
        let file = folder.path().join(columns);
        let kept = with(&search, &["--checkpoint", file.to_str().unwrap()]);
        let on_cards = with(&with(&run, &kept), &["--memory", "card"]);
        let killed = millstream(&with(&on_cards, &["--fail", "5@2"]));
        let err = String::from_utf8_lossy(&killed.stderr);
        assert!(!killed.status.success(), "{err}");
        assert!(err.contains("the application of node 5 ended with signal: 9"), "{err}");
        // After the parameters. Node 0 may not have learnt the end of the second search.
        let done = read(&file).lines().count() - 1;
        assert!((1..=2).contains(&done), "{done}");
        let resumed = report(&with(&kept, &["--dimensions", "3x1x1"]));
        assert_eq!(results(&resumed), results(&expected));
        for root in 0..5 {
            let nodes = if root < done { "2x2x2" } else { "3x1x1" };
            assert_eq!(resumed["roots"][root]["nodes"], nodes, "root {root}");
        }
    }
}

/// A network on cards saves what one in host memory saves.
#[test]
fn checkpoints_of_a_network_move_between_card_and_host_memory() {
    let (_cards, pattern) = Cards::serve("network", 2, "64MiB");
    let program = env!("CARGO_BIN_EXE_millstream");
    let on_cards = ["torus", "run", "--dimensions", "2x1x1", "--card", &pattern, "--", program];
    let network = with(&NEURONS, &["--json"]);
    let expected = report(&network);
    let folder = tempfile::tempdir().unwrap();
    let saving = ["--checkpoint", folder.path().to_str().unwrap()];
    let first = report(&with(&with(&with(&on_cards, &network), &saving), &["--memory", "card"]));
    assert_eq!(results(&first), results(&expected));
    let resumed = report(&with(&with(&network, &saving), &["--resume", "--dimensions", "1x2x1"]));
    let on_cards =
        report(&with(&with(&with(&on_cards, &network), &saving), &["--resume", "--memory", "card"]));
    for report in [resumed, on_cards] {
        assert_eq!(report["resumed_after"], 1000);
        assert_eq!(results(&report), results(&expected));
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
    for application in ["spin", "neurons", "bfs"] {
        refused(&["torus", application, "--fail", "9@1"], "--fail 9@1: a torus of 1x1x1 has no node 9");
    }
    refused(&["torus", "neurons", "--synapses", "900"], "synapses of a neuron is 900");
    refused(&["torus", "neurons", "--shares", "1,2"], "four numbers");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&["torus", "spin", "--checkpoint", path, "--resume"], "no checkpoint here");
}
