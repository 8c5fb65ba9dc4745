//! Programs started by `millstream run`.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_bench::pair::{CLOCK_ATTEMPTS, clock_was_disturbed};
use millstream_shm::ports;

const LIMIT: Duration = Duration::from_secs(60);

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

/// Waits for the end, and says what was printed; after a minute the program is killed.
pub(crate) fn finish(mut child: Child) -> Result<String, String> {
    // Read all the time: a program that has filled a pipe waits.
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
    let deadline = Instant::now() + LIMIT;
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

/// What server and client said, which must both end well. Perftest fails by itself where others disturb its clock, and is run again.
pub(crate) fn both(what: &str, sides: impl Fn() -> [Result<String, String>; 2]) -> [String; 2] {
    for attempt in 1.. {
        let ends = sides();
        if let [Ok(server), Ok(client)] = ends {
            return [server, client];
        }
        let disturbed = ends.iter().any(|end| end.as_ref().is_err_and(|said| clock_was_disturbed(said)));
        assert!(disturbed && attempt < CLOCK_ATTEMPTS, "{what}: server and client: {ends:?}");
    }
    unreachable!("one of the attempts was the last")
}

/// A port that is free for TCP, and so most likely for the connection manager.
pub(crate) fn free_port() -> String {
    ports::free().expect("a port").to_string()
}
