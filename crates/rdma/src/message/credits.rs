//! Credit-based flow control: no frame arrives without a posted receive.
//!
//! Each side posts as many receives as its window and announces the window to the peer. A frame costs one
//! credit. A receiver that has read a frame posts its buffer again. It returns the credit in the header of
//! its next frame. Without such a frame, it sends a frame without messages when half a window of credits is
//! unreturned.
//!
//! That frame costs a credit, too. One credit is reserved for it: a frame with messages needs two credits.
//! This cannot deadlock. A side spends its last credit only on a frame that returns at least half a window,
//! which is two or more. Assume that neither side has a credit and no frame is in flight. Each side gained at
//! least two credits from the other's last frame. So each side spent its last credit after the other side
//! did: a contradiction.
#![forbid(unsafe_code)]

use super::frame::FrameError;

/// A smaller window has no half that gives the peer two credits.
pub(super) const MIN_WINDOW: u16 = 4;

/// Credits of one side.
#[derive(Debug, Clone, Copy)]
pub(super) struct CreditWindow {
    /// Frames that the peer can receive now.
    credits: u32,
    /// The peer's window, in frames.
    peer_window: u32,
    /// Reposted receives whose credits are not returned.
    to_return: u16,
    /// Number of unreturned credits that triggers a frame without messages.
    return_threshold: u16,
}

impl CreditWindow {
    pub(super) fn new(window_size: u16, peer_window: u16) -> CreditWindow {
        CreditWindow {
            credits: peer_window.into(),
            peer_window: peer_window.into(),
            to_return: 0,
            return_threshold: (window_size / 2).max(1),
        }
    }

    /// Whether a frame with messages may be sent.
    pub(super) fn may_send(&self) -> bool {
        self.credits > 1
    }

    /// Whether a frame that only returns credits should and may be sent.
    pub(super) fn should_return(&self) -> bool {
        self.to_return >= self.return_threshold && self.credits > 0
    }

    /// Spends a credit on a frame. Returns the credits for its header.
    pub(super) fn send(&mut self) -> u16 {
        // The caller has checked `may_send` or `should_return`.
        self.credits -= 1;
        std::mem::take(&mut self.to_return)
    }

    /// Adds the credits of a received frame.
    pub(super) fn returned(&mut self, credits: u16) -> Result<(), FrameError> {
        let missing = self.peer_window - self.credits;
        if u32::from(credits) > missing {
            return Err(FrameError::Credits { credits, missing });
        }
        self.credits += u32::from(credits);
        Ok(())
    }

    /// A receive was posted again.
    pub(super) fn reposted(&mut self) {
        self.to_return += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// One side: its window, its unsent messages, and the frames in flight to it (credits, has a message).
    struct Side {
        window: CreditWindow,
        window_size: u16,
        unsent: u32,
        received: u32,
        inbox: VecDeque<(u16, bool)>,
        unposted: u16,
    }

    impl Side {
        fn new(window_size: u16, peer_window: u16, unsent: u32) -> Side {
            Side {
                window: CreditWindow::new(window_size, peer_window),
                window_size,
                unsent,
                received: 0,
                inbox: VecDeque::new(),
                unposted: 0,
            }
        }

        /// Sends a frame if possible. Returns whether it did.
        fn send(&mut self, peer: &mut Side) -> bool {
            let message = self.unsent > 0 && self.window.may_send();
            if !message && !self.window.should_return() {
                return false;
            }
            self.unsent -= u32::from(message);
            peer.inbox.push_back((self.window.send(), message));
            let taken = peer.inbox.len() + usize::from(peer.unposted);
            assert!(taken <= usize::from(peer.window_size), "frame without a buffer");
            true
        }

        /// Receives a frame if there is one. Returns whether it did.
        fn receive(&mut self) -> bool {
            let Some((credits, message)) = self.inbox.pop_front() else { return false };
            self.window.returned(credits).unwrap();
            self.received += u32::from(message);
            self.unposted += 1;
            true
        }

        /// Posts a receive again if one is free. Returns whether it did.
        fn repost(&mut self) -> bool {
            let had = self.unposted > 0;
            if had {
                self.unposted -= 1;
                self.window.reposted();
            }
            had
        }
    }

    fn step(a: &mut Side, b: &mut Side, action: u8) -> bool {
        match action {
            0 => a.send(b),
            1 => b.send(a),
            2 => a.receive(),
            3 => b.receive(),
            4 => a.repost(),
            _ => b.repost(),
        }
    }

    proptest! {
        /// In any order of events, no frame arrives without a receive, and all messages arrive.
        #[test]
        fn no_overrun_and_no_deadlock(
            windows in (MIN_WINDOW..12, MIN_WINDOW..12),
            unsent in (0u32..60, 0u32..60),
            actions in prop::collection::vec(0u8..6, 0..400),
        ) {
            let mut a = Side::new(windows.0, windows.1, unsent.0);
            let mut b = Side::new(windows.1, windows.0, unsent.1);
            for action in actions {
                step(&mut a, &mut b, action);
            }
            // Runs all possible steps. When none is possible, all messages must have arrived.
            let mut steps = 0;
            while (0..6).any(|action| step(&mut a, &mut b, action)) {
                steps += 1;
                prop_assert!(steps < 10_000, "credits are exchanged for ever");
            }
            prop_assert_eq!((a.received, b.received), (unsent.1, unsent.0));
        }
    }

    #[test]
    fn excess_credits_are_an_error() {
        let mut window = CreditWindow::new(8, 8);
        window.send();
        assert_eq!(window.returned(2), Err(FrameError::Credits { credits: 2, missing: 1 }));
        assert_eq!(window.returned(1), Ok(()));
    }
}
