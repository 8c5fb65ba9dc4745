//! Another process: this test program in another role, with one line per message.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::TEST_TIMEOUT;

/// Environment variable with the role of the process.
pub(crate) const ROLE: &str = "MILLSTREAM_TEST_ROLE";

/// Marks lines to the parent among those of the test harness.
const MARK: &str = "@@ ";

/// A process in a role; killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    /// Starts this program in the role `role`.
    pub(crate) fn start(role: &str) -> Self {
        Self::start_with(role, |command| command)
    }

    /// Starts this program in the role `role`, after `prepare` has changed the command.
    pub(crate) fn start_with(role: &str, prepare: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a test program has a path"));
        command.args(["--ignored", "--exact", "other_process", "--nocapture"]);
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = prepare(&mut command).spawn().expect("this program starts again");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(MARK)
                    && sender.send(line.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        let stdin = child.stdin.take();
        Self { child, stdin, lines }
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends one line.
    pub(crate) fn send_line(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("open until the end");
        writeln!(stdin, "{line}").expect("the other process listens");
    }

    /// Waits for the next line.
    pub(crate) fn recv_line(&mut self) -> String {
        self.recv_line_within(TEST_TIMEOUT)
    }

    /// Waits for the next line, at most this long.
    pub(crate) fn recv_line_within(&mut self, time: Duration) -> String {
        self.lines.recv_timeout(time).unwrap_or_else(|error| {
            let status = self.child.try_wait();
            panic!("no answer from process {}: {error}; exit: {status:?}", self.id())
        })
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a plain system call on our own child, which is not reaped yet.
        assert_eq!(unsafe { libc::kill(self.id() as i32, signal) }, 0);
    }

    /// Stops all threads of the process until a [`libc::SIGCONT`].
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.id());
        super::wait_for("the stop", || {
            std::fs::read_dir(&tasks).expect("our own child").flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
            })
        });
    }

    /// Waits until the process executes this program.
    pub(crate) fn wait_for_program(&self, name: &str) {
        let comm = format!("/proc/{}/comm", self.id());
        super::wait_for("another program", || {
            std::fs::read_to_string(&comm).is_ok_and(|running| running.trim_end() == name)
        });
    }

    /// Kills the process and waits for its end.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }

    /// Closes the process's input, which makes it exit, and waits for the exit.
    pub(crate) fn finish(&mut self) -> ExitStatus {
        self.stdin = None;
        self.child.wait().expect("our own child")
    }
}

impl Process {
    /// Waits for the exit, and returns the signal that killed the process, if any.
    pub(crate) fn signal_of_death(&mut self) -> Option<i32> {
        self.child.wait().expect("our own child").signal()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Works for a stopped process, too. It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the other process: sends one line to the parent.
pub(crate) fn send_to_parent(line: &str) {
    // The test harness may have printed an unfinished line.
    println!("\n{MARK}{line}");
}

/// In the other process: the parent's next line, None at the end.
pub(crate) fn recv_from_parent() -> Option<String> {
    let mut line = String::new();
    let n = std::io::stdin().read_line(&mut line).ok()?;
    (n != 0).then(|| line.trim_end().to_owned())
}
