//! Programs started by `millstream run`.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_bench::tools::retry_faults;
use millstream_shm::ports;

const LIMIT: Duration = Duration::from_secs(120);
/// Time for a server after its client has failed.
const LIMIT_WITHOUT_CLIENT: Duration = Duration::from_secs(5);

pub(crate) fn start(program: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["--device", "soft", "run", "--"])
        .args(program)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// Waits until server and client end, and returns their output.
pub(crate) fn finish_both(server: Child, client: Child) -> [Result<String, String>; 2] {
    let client = finish(client);
    let limit = if client.is_ok() { LIMIT } else { LIMIT_WITHOUT_CLIENT };
    [finish_within(server, limit), client]
}

/// Waits until a program ends, and returns its output. Kills it after two minutes.
pub(crate) fn finish(child: Child) -> Result<String, String> {
    finish_within(child, LIMIT)
}

fn finish_within(mut child: Child, limit: Duration) -> Result<String, String> {
    // Read while the program runs: a program that has filled a pipe waits.
    let printed = [
        child.stdout.take().map(|from| Box::new(from) as Box<dyn Read + Send>),
        child.stderr.take().map(|from| Box::new(from) as Box<dyn Read + Send>),
    ]
    .map(|from| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            from.map(|mut from| from.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let deadline = Instant::now() + limit;
    while child.try_wait().expect("our own child").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("our own child");
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let status = child.wait().expect("our own child");
    let text: String = printed.map(|text| text.join().expect("a reader does not panic")).concat();
    if status.success() { Ok(text) } else { Err(format!("{status}\n{text}")) }
}

/// Output of programs that failed by their own faults, as in `conformance/*/cases.toml`.
const FAULTS_OF_PROGRAMS: [&str; 4] = [
    // perftest calibrates its clock after the measurement; other load disturbs it.
    "Correlation coefficient r^2",
    // rping closes the event channel while another thread still reads it.
    "rdma_get_cm_event: Bad file descriptor",
    // perftest's client asks for its second connection, or address, before the server listens for it.
    "RDMA_CM_EVENT_REJECTED; error: 8.",
    "RDMA_CM_EVENT_UNREACHABLE; error: 1.",
];

/// The output of server and client, which must both succeed.
pub(crate) fn both(what: &str, sides: impl Fn() -> [Result<String, String>; 2]) -> [String; 2] {
    let ended = retry_faults(&FAULTS_OF_PROGRAMS, || match sides() {
        [Ok(server), Ok(client)] => Ok([server, client]),
        ends => Err(format!("{what}: server and client: {ends:?}")),
    });
    ended.unwrap_or_else(|error| panic!("{error}"))
}

/// A free TCP port, which is most likely free for the connection manager, too.
pub(crate) fn free_port() -> String {
    ports::unused().expect("a port").to_string()
}
