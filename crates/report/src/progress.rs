//! Progress bars, and lines at an interval where there is no terminal.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::eprint_line;
use crate::quantity::count;
use millstream_quantity::{Bytes, Seconds};

/// Interval of lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// A progress bar on standard error, or a line every five seconds if that is not a terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    lines: Option<Lines>,
}

/// Lines of progress.
#[derive(Debug)]
struct Lines {
    title: String,
    events: u64,
    latest: Mutex<Instant>,
}

impl Lines {
    /// The line that is due now, if there is one.
    fn due(&self, done: u64, rate: &str, now: Instant) -> Option<String> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if now - *latest < LINE_INTERVAL {
            return None;
        }
        *latest = now;
        let percent = if self.events == 0 { 100.0 } else { done as f64 / self.events as f64 * 100.0 };
        Some(format!("{}: {} events, {percent:.0} %{rate}", self.title, count(done)))
    }
}

impl Progress {
    /// A bar for `events` events, or other steps. `title` is a short text, such as the name of the run.
    pub fn new(title: &str, events: u64) -> Self {
        // indicatif hides the bar if standard error is not a terminal.
        let lines = Lines { title: title.to_owned(), events, latest: Mutex::new(Instant::now()) };
        let lines = (!std::io::stderr().is_terminal()).then_some(lines);
        let mut progress = Self::on(ProgressDrawTarget::stderr_with_hz(10), title, events);
        progress.lines = lines;
        progress
    }

    fn on(target: ProgressDrawTarget, title: &str, events: u64) -> Self {
        const TEMPLATE: &str = "{prefix} {bar:30.blue} {percent:>3} %  {msg}  {eta} left";
        let bar = ProgressBar::with_draw_target(Some(events), target).with_prefix(title.to_owned());
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        Self { bar, lines: None }
    }

    /// Sets the number of steps done.
    pub fn set_position(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Sets the events and payload done after `elapsed`. Cheap enough to call for every event.
    pub fn update(&self, events: u64, payload: Bytes, elapsed: Duration) {
        let rate = payload.per(Seconds(elapsed.as_secs_f64()));
        let rate = rate.map_or(String::new(), |rate| format!("  {rate}"));
        if let Some(line) = self.lines.as_ref().and_then(|lines| lines.due(events, &rate, Instant::now())) {
            eprint_line!("{line}");
        }
        self.bar.set_message(format!("{} events{rate}", count(events)));
        self.bar.set_position(events);
    }

    /// Prints a line on standard error, above the bar.
    pub fn print(&self, line: &str) {
        self.bar.suspend(|| eprint_line!("{line}"));
    }
}

impl Drop for Progress {
    /// Removes the bar: later output starts on an empty line.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;

    #[test]
    fn bar_shows_events_and_rate_until_dropped() {
        let terminal = InMemoryTerm::new(4, 100);
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let progress = Progress::on(target, "sst1m", 1000);
        progress.update(250, Bytes(39_600_000), Duration::from_millis(10));
        progress.bar.tick();
        let shown = terminal.contents();
        for part in ["sst1m ━━━", " 25 %", "250 events  3.96 GB/s", " left"] {
            assert!(shown.contains(part), "{shown:?} lacks {part:?}");
        }
        drop(progress);
        assert_eq!(terminal.contents(), "");
    }

    #[test]
    fn without_a_terminal_there_is_a_line_at_an_interval() {
        let begin = Instant::now();
        let lines = Lines { title: "sst1m".to_owned(), events: 1000, latest: Mutex::new(begin) };
        assert_eq!(lines.due(10, "", begin + LINE_INTERVAL / 2), None);
        let line = lines.due(250, "  3.96 GB/s", begin + LINE_INTERVAL).unwrap();
        assert_eq!(line, "sst1m: 250 events, 25 %  3.96 GB/s");
        assert_eq!(lines.due(260, "", begin + LINE_INTERVAL), None);
    }

    #[test]
    fn more_events_than_announced_and_none_at_all_are_shown_too() {
        let terminal = InMemoryTerm::new(4, 100);
        for (announced, events) in [(0, 0), (0, u64::MAX), (5, 7)] {
            let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
            let progress = Progress::on(target, "any", announced);
            progress.update(events, Bytes(u64::MAX), Duration::ZERO);
            progress.bar.tick();
            assert!(terminal.contents().contains(&format!("{} events", count(events))));
        }
    }
}
