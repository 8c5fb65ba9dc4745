//! Messages on a standard error that takes none.

use std::fs::File;
use std::process::{Command, Stdio};

use millstream_report::{Progress, eprint_line};

/// What the program of the next test prints.
#[test]
#[ignore = "started by messages_are_lost_on_a_full_disk_and_in_a_pipe_without_a_reader"]
fn messages() {
    eprint_line!("a message of {} words", 5);
    Progress::new("run", 100).print("a line above the bar");
}

#[test]
fn messages_are_lost_on_a_full_disk_and_in_a_pipe_without_a_reader() {
    let status = |stderr: Stdio| {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "messages", "--ignored", "--nocapture"]).stdout(Stdio::null());
        program.stderr(stderr).status().unwrap()
    };
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert!(status(full.into()).success());
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert!(status(writer.into()).success());
}
