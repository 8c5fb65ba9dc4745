//! Programs of libfabric and MPI on tori of processes.
//!
//! This program is also every node process: `node …`, and what watches it: `monitor …`, `supervise …`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_health::NodeState;
use millstream_torus::launch::{LaunchedTorus, Launcher, ProcessArguments};
use millstream_torus::service::supervisor;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus::{monitor, node};
use millstream_torus_core::NodeNumber;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some(result) = words.first().and_then(|role| run_process(role, &words)) {
        return match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut trials = vec![
        trial("fi_info_lists_the_provider", fi_info_lists_the_provider),
        trial("without_a_torus_the_provider_offers_nothing", without_a_torus_the_provider_offers_nothing),
        trial("remote_memory_and_atomic_operations_are_right", remote_memory_and_atomic_operations_are_right),
        trial("endpoints_are_opened_anew_and_lost", endpoints_are_opened_anew_and_lost),
        trial("sends_to_a_closed_endpoint_fail", sends_to_a_closed_endpoint_fail),
        trial("a_node_that_comes_back_misses_no_message", a_node_that_comes_back_misses_no_message),
    ];
    for (name, arguments) in [
        ("fi_pingpong_sends_messages_of_all_sizes", "-m msg -I 10 -S all"),
        ("fi_pingpong_sends_tagged_messages", "-m tagged -I 50"),
    ] {
        trials.push(trial(name, move || fi_pingpong(arguments)));
    }
    for case in ["point-to-point", "one-sided", "collectives"] {
        trials.push(trial(&format!("mpi_{}_is_right", case.replace('-', "_")), move || mpi(case)));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn trial(name: &str, run: impl FnOnce() -> TestResult + Send + 'static) -> Trial {
    Trial::test(name, || run().map_err(|error| Failed::from(error.to_string())))
}

/// What this program runs as a process of a torus. None if it is the test.
fn run_process(role: &str, words: &[String]) -> Option<TestResult> {
    let arguments = ProcessArguments(words);
    match role {
        "node" => Some(arguments.node().map_err(Into::into).and_then(|options| Ok(node::run(&options)?))),
        "monitor" => {
            Some(arguments.monitor().map_err(Into::into).and_then(|options| Ok(monitor::run(&options)?)))
        }
        "supervise" => Some(
            arguments.supervisor().map_err(Into::into).and_then(|options| Ok(supervisor::run(&options)?)),
        ),
        _ => None,
    }
}

fn launcher(dimensions: &str) -> Result<Launcher, Box<dyn std::error::Error>> {
    let launcher = Launcher::new(dimensions.parse()?, std::env::current_exe()?);
    Ok(Launcher { device: Some("soft".to_owned()), ..launcher })
}

fn launch(dimensions: &str) -> Result<LaunchedTorus, Box<dyn std::error::Error>> {
    Ok(launcher(dimensions)?.launch()?)
}

/// Ends the torus, whose account must balance without loss.
fn finish(torus: LaunchedTorus, least: u64) -> TestResult {
    let total = TrafficCounters::total(&torus.finish()?);
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    assert!(total.delivered_bytes >= least, "the program did not use the torus: {total}");
    Ok(())
}

/// A folder with the provider, as `FI_PROVIDER_PATH` names it.
fn provider() -> Result<tempfile::TempDir, Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let built = std::env::current_exe()?.with_file_name("libmillstream_libfabric.so");
    std::fs::copy(&built, folder.path().join("libmillstream-fi.so"))
        .map_err(|error| format!("{}: {error}", built.display()))?;
    Ok(folder)
}

/// A shell script in a folder that also has the provider. Its output goes to `output`.
fn script(folder: &Path, text: &str) -> [OsString; 3] {
    let folder = folder.display();
    let script = format!(
        "cd {folder} && export FI_PROVIDER_PATH={folder} FI_PROVIDER=millstream && ({text}) >>output 2>&1"
    );
    ["sh".into(), "-c".into(), script.into()]
}

fn output(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("output")).unwrap_or_default()
}

fn fi_info_lists_the_provider() -> TestResult {
    let folder = provider()?;
    let mut torus = launch("1x1x1")?;
    torus.run(&script(folder.path(), "fi_info -v"))?;
    let printed = output(folder.path());
    for expected in ["prov_name: millstream", "type: FI_EP_RDM", "FI_TAGGED", "FI_ATOMIC", "name: torus"] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    finish(torus, 0)
}

fn without_a_torus_the_provider_offers_nothing() -> TestResult {
    let folder = provider()?;
    let [program, option, text] = script(folder.path(), "fi_info -p millstream");
    let status = Command::new(program).args([option, text]).env_remove("MILLSTREAM_TORUS_SOCKET").status()?;
    assert!(!status.success());
    // ENODATA
    assert!(output(folder.path()).contains("-61"), "{}", output(folder.path()));
    Ok(())
}

fn fi_pingpong(arguments: &str) -> TestResult {
    let folder = provider()?;
    let port = millstream_shm::ports::unused()?;
    let mut torus = launch("2x1x1")?;
    let program = format!("fi_pingpong -p millstream -e rdm -c {arguments}");
    // The server listens before the client connects; 0A is LISTEN.
    let text = format!(
        "if [ $MILLSTREAM_TORUS_RANK = 0 ]; then {program} -B {port}; else \
         until grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp; do sleep 0.05; done; {program} -P {port} 127.0.0.1; fi"
    );
    torus
        .run(&script(folder.path(), &text))
        .map_err(|error| format!("{error}: {}", output(folder.path())))?;
    let printed = output(folder.path());
    // Every message of the largest size came back: "#sent" equals "#ack".
    assert!(printed.contains("1m ") && printed.contains(" ="), "{printed}");
    assert!(!printed.contains("Error"), "{printed}");
    finish(torus, 10 << 20)
}

fn compile(compiler: &str, source: &Path, program: &Path, arguments: &[&str]) -> TestResult {
    let output = Command::new(compiler)
        .args(["-O1", "-Wall", "-Wextra", "-o"])
        .args([program, source])
        .args(arguments)
        .output()
        .map_err(|error| format!("{compiler}: {error}: make setup installs it"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into()) }
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn remote_memory_and_atomic_operations_are_right() -> TestResult {
    let folder = provider()?;
    compile("cc", &here("tests/c/remote.c"), &folder.path().join("remote"), &["-lfabric"])?;
    let mut torus = launch("2x2x1")?;
    torus
        .run(&script(folder.path(), "./remote $MILLSTREAM_TORUS_RANK $MILLSTREAM_TORUS_SIZE"))
        .map_err(|error| format!("{error}: {}", output(folder.path())))?;
    // A write and a read of each node.
    finish(torus, 4 * 2 * 100_003)
}

fn endpoints_are_opened_anew_and_lost() -> TestResult {
    let folder = provider()?;
    compile("cc", &here("tests/c/reopen.c"), &folder.path().join("reopen"), &["-lfabric"])?;
    // Supervisors tell the nodes which applications have ended. The periods are long, as other tests use the processors.
    let mut torus = Launcher { supervisors: 1, period_factor: 12, ..launcher("2x1x1")? }.launch()?;
    torus
        .run(&script(folder.path(), "timeout 240 ./reopen $MILLSTREAM_TORUS_RANK"))
        .map_err(|error| format!("{error}: {}", output(folder.path())))?;
    Ok(())
}

fn sends_to_a_closed_endpoint_fail() -> TestResult {
    let folder = provider()?;
    compile("cc", &here("tests/c/closed.c"), &folder.path().join("closed-endpoint"), &["-lfabric"])?;
    let mut torus = launch("2x1x1")?;
    torus
        .run(&script(folder.path(), "timeout 120 ./closed-endpoint $MILLSTREAM_TORUS_RANK"))
        .map_err(|error| format!("{error}: {}", output(folder.path())))?;
    Ok(())
}

/// What a test does next to a node that is avoided, and comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Stop,
    Continue,
    SeeBack,
}

/// Each node in turn is stopped until it is avoided, and goes on, while both send each other numbered messages. The last one
/// is away for so long that operations on it fail.
fn a_node_that_comes_back_misses_no_message() -> TestResult {
    const LONG: Duration = Duration::from_secs(120);
    const LOST: Duration = Duration::from_secs(4);
    let folder = provider()?;
    compile("cc", &here("tests/c/numbered.c"), &folder.path().join("numbered"), &["-lfabric"])?;
    // The periods are long, as other tests use the processors.
    let mut torus = Launcher { supervisors: 1, period_factor: 8, ..launcher("2x1x1")? }.launch()?;
    let program = script(folder.path(), "timeout 300 ./numbered $MILLSTREAM_TORUS_RANK");
    let numbers = |what: &str| -> Vec<u64> {
        let text = std::fs::read_to_string(folder.path().join(what)).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    };
    let mut strikes = [0, 1, 0, 1].map(NodeNumber).into_iter().peekable();
    let (mut next, mut since, mut seen) = (Next::Stop, Instant::now(), [0; 2]);
    let ended = torus.run_surviving(&program, |torus| {
        std::thread::sleep(Duration::from_millis(5));
        let Some(&node) = strikes.peek() else { return };
        let Some(state) = torus.state().filter(|state| state.settled) else { return };
        let is_well = state.nodes.iter().all(|row| row.state == NodeState::Ok && !row.avoided);
        let pid = torus.pid(node).expect("exists");
        let arrived = ["0.arrived", "1.arrived"].map(|what| numbers(what).first().copied().unwrap_or(0));
        // Messages are under way in both directions.
        let goes_on = arrived.iter().zip(seen).all(|(&arrived, seen)| arrived > seen);
        let step = match next {
            Next::Stop if is_well && goes_on => {
                signal(pid, "STOP");
                Some(Next::Continue)
            }
            Next::Continue
                if state.nodes[node.index()].avoided && (strikes.len() > 1 || since.elapsed() > LOST) =>
            {
                signal(pid, "CONT");
                Some(Next::SeeBack)
            }
            Next::SeeBack if is_well => {
                strikes.next();
                Some(Next::Stop)
            }
            _ => None,
        };
        if let Some(step) = step {
            (next, since, seen) = (step, Instant::now(), arrived);
        }
        if strikes.peek().is_none() || since.elapsed() > LONG {
            let _ = std::fs::write(folder.path().join("enough"), "");
        }
        assert!(since.elapsed() < 2 * LONG, "{next:?}: {state:?} {}", output(folder.path()));
    })?;
    let printed = output(folder.path());
    assert!(ended.iter().all(|(_, status)| status.success()), "{ended:?}: {printed}");
    assert!(strikes.peek().is_none(), "{next:?}: {printed}");
    assert!(!numbers("0.failed").is_empty(), "node 1 was lost: {printed}");
    for (source, target) in [("0", "1"), ("1", "0")] {
        let failed = numbers(&format!("{source}.failed"));
        let missing = numbers(&format!("{target}.missing"));
        let silent = missing.iter().filter(|number| !failed.contains(number)).count() as u64;
        // The others have failed receives in their place.
        assert!(silent <= numbers(&format!("{target}.receives"))[0], "{missing:?} {failed:?}: {printed}");
    }
    torus.finish().map(drop).map_err(Into::into)
}

fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().expect("kill");
    assert!(status.success(), "{name}: {status}");
}

/// The conformance client for MPI, which compares every result, with Open MPI's libfabric transport.
fn mpi(case: &str) -> TestResult {
    let folder = provider()?;
    let program = folder.path().join("check");
    compile("mpicc.openmpi", &here("../../conformance/mpi/check.c"), &program, &[])?;
    let mut torus = launch("2x2x1")?;
    let text = format!(
        "timeout 240 mpirun.openmpi --allow-run-as-root --oversubscribe -n 4 --mca pml cm --mca mtl ofi \
         --mca mtl_ofi_provider_include millstream --mca btl self --mca osc pt2pt,rdma ./check {case}"
    );
    torus
        .run_once(&script(folder.path(), &text))
        .map_err(|error| format!("{error}: {}", output(folder.path())))?;
    let printed = output(folder.path());
    assert!(printed.contains(" results right on 4 processes") && !printed.contains("is wrong"), "{printed}");
    finish(torus, 1 << 20)
}
