//! Progress bars.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::quantity::count;
use millstream_quantity::{Bytes, Seconds};

/// A progress bar on standard error; hidden if that is not a terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `events` events, or other steps. `title` is a short text, such as the name of the run.
    pub fn new(title: &str, events: u64) -> Self {
        // indicatif hides the bar if standard error is not a terminal.
        Self::on(ProgressDrawTarget::stderr_with_hz(10), title, events)
    }

    fn on(target: ProgressDrawTarget, title: &str, events: u64) -> Self {
        const TEMPLATE: &str = "{prefix} {bar:30.blue} {percent:>3} %  {msg}  {eta} left";
        let bar = ProgressBar::with_draw_target(Some(events), target).with_prefix(title.to_owned());
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        Self { bar }
    }

    /// Sets the number of steps done.
    pub fn set_position(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Sets the events and payload done after `elapsed`. Cheap enough to call for every event.
    pub fn update(&self, events: u64, payload: Bytes, elapsed: Duration) {
        let rate = payload.per(Seconds(elapsed.as_secs_f64()));
        let rate = rate.map_or(String::new(), |rate| format!("  {rate}"));
        self.bar.set_message(format!("{} events{rate}", count(events)));
        self.bar.set_position(events);
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
