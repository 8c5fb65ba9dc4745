//! Operations on and against a device: requests, stores into shared memory, messages. The peer process is another
//! instance of this program.

#![no_main]

#[path = "../../crates/device/tests/device/operations.rs"]
mod operations;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};

use libfuzzer_sys::fuzz_target;
use operations::FuzzSession;

/// Environment variable that marks the peer process.
const PEER_VARIABLE: &str = "MILLSTREAM_FUZZ_PEER";

type PeerCall = Box<dyn FnMut(&str) -> String + Send>;
static SESSION: OnceLock<Mutex<FuzzSession<PeerCall>>> = OnceLock::new();

fn run_peer() -> ! {
    let read_line = || {
        let mut line = String::new();
        let n = std::io::stdin().read_line(&mut line).expect("the player's end of a pipe");
        (n != 0).then(|| line.trim_end().to_owned())
    };
    operations::peer(|line| println!("{line}"), read_line);
    std::process::exit(0);
}

fn start_peer() -> PeerCall {
    let mut command = Command::new(std::env::current_exe().expect("a program has a path"));
    command.env(PEER_VARIABLE, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("this program starts again");
    let mut to = child.stdin.take().expect("piped");
    let mut from = BufReader::new(child.stdout.take().expect("piped"));
    Box::new(move |line| {
        writeln!(to, "{line}").expect("the peer process runs");
        let mut answer = String::new();
        from.read_line(&mut answer).expect("the peer process runs");
        assert!(!answer.is_empty(), "the peer process ended: {:?}", child.wait());
        answer.trim_end().to_owned()
    })
}

fuzz_target!(
    init: {
        if std::env::var_os(PEER_VARIABLE).is_some() {
            run_peer();
        }
        assert!(SESSION.set(Mutex::new(FuzzSession::new(start_peer()))).is_ok());
    },
    |bytes: &[u8]| {
        let mut session = SESSION.get().expect("made at first").lock().expect("a panic ends the process");
        session.run(bytes);
    }
);
