//! One direction's link, judged by the frames that arrive and never by this side's own completions.

use crate::registers::LinkState;
use crate::timers::Timers;

const FIRST_BACK_OFF: u64 = 100;
const LONGEST_BACK_OFF: u64 = 5000;
/// Windows without many errors before a sick link counts as up.
const CLEAN_WINDOWS: u32 = 3;

/// What happens on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The queue pair is connected.
    Connected,
    /// A frame arrived.
    Frame,
    /// A frame was wrong: bad checksum, bad header, or credits that do not add up.
    Error,
    /// The queue pair failed.
    QueuePairError,
    /// The monitor disables the link.
    Disable,
    /// The monitor wants the link back.
    Enable,
}

/// State of one link. Times in milliseconds since any origin.
#[derive(Clone, Debug)]
pub struct LinkMonitor {
    state: LinkState,
    silence: u64,
    window: u64,
    threshold: u32,
    last_frame: u64,
    window_start: u64,
    errors: u32,
    clean: u32,
    back_off: u64,
    retry_at: u64,
}

impl LinkMonitor {
    /// A link that exists and is not connected. More than `threshold` errors in `window` ms make it sick.
    #[must_use]
    pub fn new(timers: &Timers, window: u64, threshold: u32) -> LinkMonitor {
        LinkMonitor {
            state: LinkState::Training,
            silence: timers.link_bound(),
            window: window.max(1),
            threshold,
            last_frame: 0,
            window_start: 0,
            errors: 0,
            clean: 0,
            back_off: FIRST_BACK_OFF,
            retry_at: 0,
        }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> LinkState {
        self.state
    }

    /// Something happened. Returns the state if it changed.
    pub fn handle_event(&mut self, event: LinkEvent, now: u64) -> Option<LinkState> {
        let before = self.state;
        let working = matches!(self.state, LinkState::Up | LinkState::Sick);
        match event {
            LinkEvent::Disable if self.state != LinkState::Absent => self.state = LinkState::Disabled,
            LinkEvent::Enable if self.state == LinkState::Disabled => self.state = LinkState::Training,
            LinkEvent::Connected if self.state == LinkState::Training => {
                self.state = LinkState::Up;
                (self.last_frame, self.window_start) = (now, now);
                (self.errors, self.clean) = (0, 0);
            }
            LinkEvent::Frame if working => {
                self.last_frame = now;
                self.back_off = FIRST_BACK_OFF;
            }
            LinkEvent::Error if working => self.errors += 1,
            LinkEvent::QueuePairError if working || self.state == LinkState::Training => self.fail(now),
            _ => {}
        }
        (self.state != before).then_some(self.state)
    }

    /// Time passed. Returns the state if it changed.
    pub fn handle_timeout(&mut self, now: u64) -> Option<LinkState> {
        let before = self.state;
        match self.state {
            LinkState::Up | LinkState::Sick if now >= self.last_frame + self.silence => self.fail(now),
            LinkState::Up | LinkState::Sick => self.judge_window(now),
            LinkState::Broken if now >= self.retry_at => self.state = LinkState::Training,
            _ => {}
        }
        (self.state != before).then_some(self.state)
    }

    fn judge_window(&mut self, now: u64) {
        if self.errors > self.threshold {
            self.state = LinkState::Sick;
            self.clean = 0;
        }
        if now < self.window_start + self.window {
            return;
        }
        self.clean = if self.errors > self.threshold { 0 } else { self.clean + 1 };
        if self.clean >= CLEAN_WINDOWS {
            self.state = LinkState::Up;
        }
        (self.errors, self.window_start) = (0, now);
    }

    fn fail(&mut self, now: u64) {
        self.state = LinkState::Broken;
        self.retry_at = now + self.back_off;
        self.back_off = (2 * self.back_off).min(LONGEST_BACK_OFF);
    }
}
