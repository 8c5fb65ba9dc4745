//! The last lines of a process's standard error.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines of a failed process's standard error that are reported.
const LINES: usize = 10;
/// How long to wait for the end of standard error once the process has ended: a child of it may hold the other end for ever.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Reads standard error on a thread. It keeps the last lines: a run may last for months, and a process may write one for
/// each connection that it refuses.
pub(super) struct ErrorLines {
    last: Arc<Mutex<VecDeque<String>>>,
    thread: JoinHandle<()>,
}

impl ErrorLines {
    pub(super) fn read(stderr: impl Read + Send + 'static) -> ErrorLines {
        let last = Arc::new(Mutex::new(VecDeque::with_capacity(LINES)));
        let lines = Arc::clone(&last);
        let thread = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut last = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if last.len() == LINES {
                    last.pop_front();
                }
                last.push_back(line);
            }
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
