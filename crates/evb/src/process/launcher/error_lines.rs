//! Standard error of a process: its lines for the observer of the run, and the last ones for its failure.

use super::{ChildOutput, RunProcess};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines of a failed process's standard error that are reported.
const LINES: usize = 10;
/// Lines of a process that the observer gets in each [`INTERVAL`].
const MAX_FORWARDED: u64 = 100;
const INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait for the end of standard error once the process has ended: a child of it may hold the other end for ever.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Reads standard error on a thread. It keeps the last lines, and forwards lines at a bounded rate: a run may last for months,
/// and a process may write one for each connection that it refuses.
pub(super) struct ErrorLines {
    last: Arc<Mutex<VecDeque<String>>>,
    thread: JoinHandle<()>,
}

impl ErrorLines {
    pub(super) fn read(
        stderr: impl Read + Send + 'static,
        process: RunProcess,
        outputs: Sender<ChildOutput>,
    ) -> ErrorLines {
        let last = Arc::new(Mutex::new(VecDeque::with_capacity(LINES)));
        let lines = Arc::clone(&last);
        let thread = std::thread::spawn(move || {
            let mut forwarder =
                Forwarder { process, outputs, since: Instant::now(), forwarded: 0, dropped: 0 };
            // A software trigger may write anything.
            for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                forwarder.forward(&line);
                let mut last = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if last.len() == LINES {
                    last.pop_front();
                }
                last.push_back(line);
            }
            forwarder.name_dropped();
        });
        ErrorLines { last, thread }
    }

    /// The last lines of a process that has ended.
    pub(super) fn take(self) -> String {
        let until = Instant::now() + TIMEOUT;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        let last = std::mem::take(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner));
        Vec::from(last).join("\n")
    }
}

/// Forwards lines to the thread of the run.
struct Forwarder {
    process: RunProcess,
    outputs: Sender<ChildOutput>,
    /// Begin of the present interval.
    since: Instant,
    /// Lines forwarded and dropped in it.
    forwarded: u64,
    dropped: u64,
}

impl Forwarder {
    fn forward(&mut self, line: &str) {
        if self.since.elapsed() >= INTERVAL {
            self.name_dropped();
            (self.since, self.forwarded) = (Instant::now(), 0);
        }
        if self.forwarded == MAX_FORWARDED {
            self.dropped += 1;
            return;
        }
        self.forwarded += 1;
        self.send(line.to_owned());
    }

    fn name_dropped(&mut self) {
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            self.send(format!("{dropped} further lines of its standard error were dropped"));
        }
    }

    /// A run that has ended takes no line.
    fn send(&self, line: String) {
        let _ = self.outputs.send(ChildOutput::ErrorLine(self.process.clone(), line));
    }
}
