//! One direction's link, judged by the frames that arrive and never by this side's own completions.

use crate::registers::LinkState;
use crate::timers::Timers;

/// What happens on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The queue pair is connected.
    Connected,
    /// A frame arrived.
    Frame,
    /// The queue pair failed.
    QueuePairError,
}

/// State of one link. Times in milliseconds since any origin.
///
/// A connection alone does not bring a link up: its first frame does. So a link whose connections carry no frames stays
/// broken.
#[derive(Clone, Debug)]
pub struct LinkMonitor {
    state: LinkState,
    silence: u64,
    connected: bool,
    /// The time of the connection, before its first frame.
    last_frame: u64,
}

impl LinkMonitor {
    /// A link that exists and is not connected.
    #[must_use]
    pub fn new(timers: &Timers) -> LinkMonitor {
        LinkMonitor {
            state: LinkState::Training,
            silence: timers.link_bound(),
            connected: false,
            last_frame: 0,
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
        match event {
            LinkEvent::Connected => (self.connected, self.last_frame) = (true, now),
            LinkEvent::Frame if self.connected => {
                (self.state, self.last_frame) = (LinkState::Up, now);
            }
            LinkEvent::QueuePairError => self.fail(),
            LinkEvent::Frame => {}
        }
        (self.state != before).then_some(self.state)
    }

    /// Time passed. Returns whether the connection has been silent for too long: it is given up.
    pub fn handle_timeout(&mut self, now: u64) -> bool {
        let is_silent = self.connected && now >= self.last_frame + self.silence;
        if is_silent {
            self.fail();
        }
        is_silent
    }

    fn fail(&mut self) {
        (self.state, self.connected) = (LinkState::Broken, false);
    }
}
