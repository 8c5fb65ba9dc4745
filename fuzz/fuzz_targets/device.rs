//! Operations on a device, and against it: requests, stores into what peers share, messages. The partner is this
//! program again.

#![no_main]

#[path = "../../crates/device/tests/device/operations.rs"]
mod operations;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};

use libfuzzer_sys::fuzz_target;
use operations::Stage;

/// Set for the partner.
const PARTNER: &str = "MILLSTREAM_FUZZ_PARTNER";

type Talk = Box<dyn FnMut(&str) -> String + Send>;
static STAGE: OnceLock<Mutex<Stage<Talk>>> = OnceLock::new();

fn be_the_partner() -> ! {
    let hear = || {
        let mut line = String::new();
        let n = std::io::stdin().read_line(&mut line).expect("the player's end of a pipe");
        (n != 0).then(|| line.trim_end().to_owned())
    };
    operations::partner(|line| println!("{line}"), hear);
    std::process::exit(0);
}

fn talk() -> Talk {
    let mut command = Command::new(std::env::current_exe().expect("a program has a path"));
    command.env(PARTNER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("this program starts again");
    let mut to = child.stdin.take().expect("piped");
    let mut from = BufReader::new(child.stdout.take().expect("piped"));
    Box::new(move |line| {
        writeln!(to, "{line}").expect("the partner lives");
        let mut answer = String::new();
        from.read_line(&mut answer).expect("the partner lives");
        assert!(!answer.is_empty(), "the partner is dead: {:?}", child.wait());
        answer.trim_end().to_owned()
    })
}

fuzz_target!(
    init: {
        if std::env::var_os(PARTNER).is_some() {
            be_the_partner();
        }
        assert!(STAGE.set(Mutex::new(Stage::new(talk()))).is_ok());
    },
    |bytes: &[u8]| {
        let mut stage = STAGE.get().expect("made at first").lock().expect("a panic ends the process");
        stage.play(bytes);
    }
);
