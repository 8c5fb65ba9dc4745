//! Credits: how many frames each side may send, so that none ever arrives without a buffer waiting for it.
//!
//! Each side posts as many receive buffers as its window is wide and tells the other side so when they
//! connect. Sending a frame costs a credit; when the receiver has worked a frame off and posted its buffer
//! again, it owes the credit back. What is owed travels in the header of the next frame, whatever that frame
//! is for. If there is none, a frame without messages returns the credits as soon as half a window is owed.
//!
//! Such a frame costs a credit too, so one credit is reserved for it: a frame with messages needs two. This
//! cannot deadlock. A side's last credit is spent only on a frame that returns at least half a window, which
//! is two or more. Were both sides without credit and nothing under way, then the side that received the
//! other's last frame would have gained two credits by it, and would have spent its own last credit later
//! than the other side did; and the same holds the other way round.
#![forbid(unsafe_code)]

use super::frame::FrameError;

/// Windows below this width have no half that frees the other side.
pub(super) const MIN_WINDOW: u16 = 4;

/// The credits of one side.
#[derive(Debug, Clone, Copy)]
pub(super) struct CreditWindow {
    /// Frames that the peer can take now.
    credits: u32,
    /// Frames that the peer can take when it has worked off all.
    peer_width: u32,
    /// Buffers posted again here, of which the peer does not know.
    owed: u16,
    /// Owed buffers that are worth a frame of their own.
    worth_a_frame: u16,
}

impl CreditWindow {
    pub(super) fn new(width: u16, peer_width: u16) -> CreditWindow {
        CreditWindow {
            credits: peer_width.into(),
            peer_width: peer_width.into(),
            owed: 0,
            worth_a_frame: (width / 2).max(1),
        }
    }

    /// Whether a frame with messages may be sent.
    pub(super) fn may_send(&self) -> bool {
        self.credits > 1
    }

    /// Whether a frame that only returns credits should be sent, and may.
    pub(super) fn should_return(&self) -> bool {
        self.owed >= self.worth_a_frame && self.credits > 0
    }

    /// Pays for a frame that is sent now; returns the credits to put into its header.
    pub(super) fn send(&mut self) -> u16 {
        // Asked for by `may_send` or `should_return`.
        self.credits -= 1;
        std::mem::take(&mut self.owed)
    }

    /// Takes the credits of a frame that was received.
    pub(super) fn returned(&mut self, credits: u16) -> Result<(), FrameError> {
        let missing = self.peer_width - self.credits;
        if u32::from(credits) > missing {
            return Err(FrameError::Credits { credits, missing });
        }
        self.credits += u32::from(credits);
        Ok(())
    }

    /// A buffer has been posted again.
    pub(super) fn reposted(&mut self) {
        self.owed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// One side: its window, what it has still to say, and the frames on their way to it (credits, is there a
    /// message).
    struct Side {
        window: CreditWindow,
        width: u16,
        to_say: u32,
        heard: u32,
        inbox: VecDeque<(u16, bool)>,
        unposted: u16,
    }

    impl Side {
        fn new(width: u16, peer_width: u16, to_say: u32) -> Side {
            Side {
                window: CreditWindow::new(width, peer_width),
                width,
                to_say,
                heard: 0,
                inbox: VecDeque::new(),
                unposted: 0,
            }
        }

        /// Sends one frame if it may; whether it did.
        fn send(&mut self, peer: &mut Side) -> bool {
            let message = self.to_say > 0 && self.window.may_send();
            if !message && !self.window.should_return() {
                return false;
            }
            self.to_say -= u32::from(message);
            peer.inbox.push_back((self.window.send(), message));
            let taken = peer.inbox.len() + usize::from(peer.unposted);
            assert!(taken <= usize::from(peer.width), "frame without a buffer");
            true
        }

        /// Takes one frame out of the buffer; whether there was one.
        fn receive(&mut self) -> bool {
            let Some((credits, message)) = self.inbox.pop_front() else { return false };
            self.window.returned(credits).unwrap();
            self.heard += u32::from(message);
            self.unposted += 1;
            true
        }

        /// Posts one buffer again; whether there was one.
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
        /// Whatever the order of events, no frame arrives without a buffer, and everything is said in the
        /// end.
        #[test]
        fn no_overrun_and_no_deadlock(
            widths in (MIN_WINDOW..12, MIN_WINDOW..12),
            to_say in (0u32..60, 0u32..60),
            actions in prop::collection::vec(0u8..6, 0..400),
        ) {
            let mut a = Side::new(widths.0, widths.1, to_say.0);
            let mut b = Side::new(widths.1, widths.0, to_say.1);
            for action in actions {
                step(&mut a, &mut b, action);
            }
            // From here on everything that can happen does; when nothing can, all must have been heard.
            let mut steps = 0;
            while (0..6).any(|action| step(&mut a, &mut b, action)) {
                steps += 1;
                prop_assert!(steps < 10_000, "credits go to and fro for ever");
            }
            prop_assert_eq!((a.heard, b.heard), (to_say.1, to_say.0));
        }
    }

    #[test]
    fn a_peer_that_returns_too_much_is_noticed() {
        let mut window = CreditWindow::new(8, 8);
        window.send();
        assert_eq!(window.returned(2), Err(FrameError::Credits { credits: 2, missing: 1 }));
        assert_eq!(window.returned(1), Ok(()));
    }
}
