//! How far a run is, on the terminal while it lasts.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::quantity::count;
use millstream_quantity::{Bytes, Seconds};

/// A bar on the standard error, if that is a terminal; otherwise nothing at all.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `events` events. `what` is a word or two, such as the name of the run.
    pub fn new(what: &str, events: u64) -> Self {
        // Hidden by itself where the standard error is no terminal.
        Self::on(ProgressDrawTarget::stderr_with_hz(10), what, events)
    }

    fn on(target: ProgressDrawTarget, what: &str, events: u64) -> Self {
        const TEMPLATE: &str = "{prefix} {bar:30.blue} {percent:>3} %  {msg}  {eta} left";
        let bar = ProgressBar::with_draw_target(Some(events), target).with_prefix(what.to_owned());
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        Self { bar }
    }

    /// How many events, or whatever the bar counts, are done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// What has been done after `elapsed`. Cheap: call it as often as there is news.
    pub fn update(&self, events: u64, payload: Bytes, elapsed: Duration) {
        let rate = payload.per(Seconds(elapsed.as_secs_f64()));
        let rate = rate.map_or(String::new(), |rate| format!("  {rate}"));
        self.bar.set_message(format!("{} events{rate}", count(events)));
        self.bar.set_position(events);
    }

    /// Prints a line above the bar, or on the standard error if there is none.
    pub fn say(&self, line: &str) {
        if self.bar.is_hidden() {
            eprintln!("{line}");
        } else {
            self.bar.println(line);
        }
    }
}

impl Drop for Progress {
    /// Removes the bar, so that what comes next starts on a clean line.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;

    #[test]
    fn the_bar_shows_events_and_rate_and_goes_away() {
        let terminal = InMemoryTerm::new(4, 100);
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let progress = Progress::on(target, "sst1m", 1000);
        progress.update(250, Bytes(39_600_000), Duration::from_millis(10));
        progress.bar.tick();
        let shown = terminal.contents();
        for part in ["sst1m ━━━", " 25 %", "250 events  3.96 GB/s", " left"] {
            assert!(shown.contains(part), "{shown:?} lacks {part:?}");
        }
        progress.say("a unit is late");
        assert!(terminal.contents().starts_with("a unit is late\n"));
        drop(progress);
        assert_eq!(terminal.contents(), "a unit is late");
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
