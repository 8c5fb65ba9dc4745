//! Programs started by `millstream run`.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

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

pub(crate) fn finish(mut child: Child) -> Result<String, String> {
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().expect("our own child").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("our own child");
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().expect("our own child");
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    if status.success() { Ok(text) } else { Err(format!("{status}\n{text}")) }
}

/// A port that is free for TCP, and so most likely for the connection manager.
pub(crate) fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}
