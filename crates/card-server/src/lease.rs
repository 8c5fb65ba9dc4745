//! Who may use the card: the rules of the lease, without threads, memory or a clock.
//!
//! ```text
//!            lease word (e, node)                 release, revoke, expiry, node gone
//!   Free ─────────────────────────► Held by node ─────────────────────────────────► Clearing
//!    ▲                                                                                  │
//!    └──────────────────────── epoch e + 1, everything invalid and zero ────────────────┘
//! ```
//!
//! The lease word is what nodes see and change by compare-and-swap. It is input: the card believes its own
//! state and puts back any word that this state does not explain. The epoch fences: whatever names an older
//! epoch belongs to a lease that has ended.

use std::time::Duration;

use crate::command::{Cause, Fault};

/// Longest time from a heartbeat to the end of a lease.
pub const LONGEST: Duration = Duration::from_secs(3600);

/// Shortest time; below it a busy machine alone would end leases.
pub const SHORTEST: Duration = Duration::from_millis(50);

/// The lease word for an epoch and a holder; holder 0 is nobody.
pub const fn word(epoch: u32, node: u32) -> u64 {
    (epoch as u64) << 32 | node as u64
}

/// Epoch and holder of a lease word.
pub const fn unpack(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// What stands in the registers that nodes write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// The lease word.
    pub word: u64,
    /// `lease_revoke`.
    pub revoke: u64,
    /// `lease_heartbeat`.
    pub heartbeat: u64,
    /// `lease_duration_ns`.
    pub duration_ns: u64,
    /// `lease_release`.
    pub release: u64,
    /// `lease_hand_over`.
    pub hand_over: u64,
    /// `lease_detached`.
    pub detached: u64,
    /// The holder is on this host and known to live: its connection is its heartbeat.
    pub alive: bool,
}

/// What the card has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Give the windows to this node.
    Grant {
        /// The holder.
        node: u32,
        /// Epoch of its lease.
        epoch: u32,
    },
    /// Another node holds the same lease from now on: write the new word, send messages there.
    HandOver {
        /// The new holder.
        node: u32,
        /// Epoch of the lease, which stays.
        epoch: u32,
        /// The word seen, to be swapped out.
        seen: u64,
    },
    /// Take the windows back, stop everything, clear memory; then call [`Lease::cleared`].
    End {
        /// The former holder.
        node: u32,
        /// Epoch of its lease.
        epoch: u32,
        /// Why, unless the holder gave it back.
        cause: Option<Fault>,
    },
    /// Somebody wrote a word that makes no sense: put this one in its place.
    Restore {
        /// The word seen, to be swapped out.
        seen: u64,
        /// The word that belongs there.
        to: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Held { node: u32, heartbeat: u64, renewed: Duration, duration: Duration },
    Clearing,
}

/// The lease of one card.
#[derive(Debug)]
pub struct Lease {
    epoch: u32,
    state: State,
    default: Duration,
}

impl Lease {
    /// A free card. `default` is the duration of a lease whose holder does not ask for another.
    pub fn new(default: Duration) -> Lease {
        Lease { epoch: 1, state: State::Free, default: default.clamp(SHORTEST, LONGEST) }
    }

    /// The word that belongs into the register now.
    pub fn word(&self) -> u64 {
        match self.state {
            State::Held { node, .. } => word(self.epoch, node),
            State::Free | State::Clearing => word(self.epoch, 0),
        }
    }

    /// Epoch of the lease that runs, or of the next one.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The holder.
    pub fn holder(&self) -> Option<u32> {
        match self.state {
            State::Held { node, .. } => Some(node),
            State::Free | State::Clearing => None,
        }
    }

    /// When the lease ends if nothing renews it.
    pub fn expires(&self) -> Option<Duration> {
        match self.state {
            State::Held { renewed, duration, .. } => Some(renewed + duration),
            State::Free | State::Clearing => None,
        }
    }

    /// Duration of the lease that runs.
    pub fn duration(&self) -> Option<Duration> {
        match self.state {
            State::Held { duration, .. } => Some(duration),
            State::Free | State::Clearing => None,
        }
    }

    /// Whether nobody has it, and whoever asks may.
    pub fn is_free(&self) -> bool {
        self.state == State::Free
    }

    /// Whether it has ended and [`Lease::cleared`] is awaited.
    pub fn is_clearing(&self) -> bool {
        self.state == State::Clearing
    }

    /// Looks at the registers at time `now`; `is_node` tells whether a number is that of a connected node.
    pub fn look(&mut self, now: Duration, inputs: Inputs, is_node: impl Fn(u32) -> bool) -> Option<Action> {
        let to = self.word();
        match self.state {
            State::Free => {
                let (epoch, node) = unpack(inputs.word);
                if inputs.word == to {
                    return None;
                }
                if epoch != self.epoch || !is_node(node) {
                    return Some(Action::Restore { seen: inputs.word, to });
                }
                // Registers that a former holder wrote were cleared; the first heartbeat may be any value.
                let duration = self.asked(inputs.duration_ns);
                self.state = State::Held { node, heartbeat: inputs.heartbeat, renewed: now, duration };
                Some(Action::Grant { node, epoch })
            }
            State::Held { node, heartbeat, renewed, .. } => {
                if inputs.word != to {
                    return Some(Action::Restore { seen: inputs.word, to });
                }
                let epoch = u64::from(self.epoch);
                if inputs.release == epoch {
                    return self.end(None);
                }
                if inputs.revoke == epoch {
                    return self.end(Some(Cause::LeaseRevoked));
                }
                let wished = u32::try_from(inputs.hand_over).unwrap_or(0);
                if wished != 0 && wished != node && is_node(wished) {
                    let duration = self.asked(inputs.duration_ns);
                    let heartbeat = inputs.heartbeat;
                    self.state = State::Held { node: wished, heartbeat, renewed: now, duration };
                    return Some(Action::HandOver { node: wished, epoch: self.epoch, seen: inputs.word });
                }
                if !is_node(node) && inputs.detached == 0 {
                    return self.end(Some(Cause::HolderLost));
                }
                let duration = self.asked(inputs.duration_ns);
                let renewed = if inputs.heartbeat == heartbeat && !inputs.alive { renewed } else { now };
                self.state = State::Held { node, heartbeat: inputs.heartbeat, renewed, duration };
                if now > renewed + duration {
                    return self.end(Some(Cause::LeaseExpired));
                }
                None
            }
            // The word is put right when everything is clear.
            State::Clearing => None,
        }
    }

    /// Everything of the lease that has ended is invalid and clear: the card is free under a new epoch. The
    /// new word is to be written over whatever stands there.
    pub fn cleared(&mut self) -> u64 {
        // An epoch of zero would make a word of zero mean something.
        self.epoch = self.epoch.checked_add(1).unwrap_or(1);
        self.state = State::Free;
        self.word()
    }

    fn end(&mut self, cause: Option<Cause>) -> Option<Action> {
        let node = self.holder()?;
        self.state = State::Clearing;
        let epoch = self.epoch;
        Some(Action::End { node, epoch, cause: cause.map(|cause| Fault::new(cause, epoch.into())) })
    }

    fn asked(&self, nanos: u64) -> Duration {
        match nanos {
            0 => self.default,
            nanos => Duration::from_nanos(nanos).clamp(SHORTEST, LONGEST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn node(number: u32) -> bool {
        (1..=3).contains(&number)
    }

    fn taken(by: u32) -> (Lease, Inputs) {
        let mut lease = Lease::new(SECOND);
        let inputs = Inputs { word: word(1, by), ..Inputs::default() };
        let granted = lease.look(Duration::ZERO, inputs, node);
        assert_eq!(granted, Some(Action::Grant { node: by, epoch: 1 }));
        (lease, inputs)
    }

    #[test]
    fn a_lease_lives_by_its_heartbeat() {
        let (mut lease, mut inputs) = taken(2);
        for beat in 1..10u64 {
            inputs.heartbeat = beat;
            assert_eq!(lease.look(beat as u32 * SECOND * 3 / 4, inputs, node), None);
        }
        let last = 9 * SECOND * 3 / 4;
        assert_eq!(lease.expires(), Some(last + SECOND));
        assert_eq!(lease.look(last + SECOND, inputs, node), None);
        let ended = lease.look(last + SECOND + Duration::from_nanos(1), inputs, node);
        let cause = Some(Fault::new(Cause::LeaseExpired, 1));
        assert_eq!(ended, Some(Action::End { node: 2, epoch: 1, cause }));
        assert_eq!(lease.cleared(), word(2, 0));
    }

    #[test]
    fn it_ends_by_release_revocation_and_death_and_the_epoch_fences() {
        for (change, alive, cause) in [
            (Inputs { release: 1, ..Inputs::default() }, true, None),
            (Inputs { revoke: 1, ..Inputs::default() }, true, Some(Cause::LeaseRevoked)),
            (Inputs::default(), false, Some(Cause::HolderLost)),
        ] {
            let (mut lease, inputs) = taken(3);
            let stale = Inputs { release: 7, revoke: 7, ..inputs };
            assert_eq!(lease.look(Duration::ZERO, stale, node), None);
            let inputs = Inputs { word: inputs.word, ..change };
            let Some(Action::End { cause: found, .. }) =
                lease.look(Duration::ZERO, inputs, |number| alive && node(number))
            else {
                panic!("still held");
            };
            assert_eq!(found.map(|fault| fault.cause), cause);
            assert!(lease.is_clearing());
            assert_eq!(lease.look(Duration::ZERO, inputs, node), None, "nobody gets in while it is cleared");
            lease.cleared();
            // The word of the old epoch takes nothing.
            let seen = Inputs { word: word(1, 1), ..Inputs::default() };
            let restored = Action::Restore { seen: seen.word, to: word(2, 0) };
            assert_eq!(lease.look(Duration::ZERO, seen, node), Some(restored));
        }
    }

    #[test]
    fn a_detached_lease_outlives_its_holder_and_is_handed_over() {
        let (mut lease, inputs) = taken(1);
        let gone = |number: u32| number == 2;
        let detached = Inputs { detached: 1, ..inputs };
        assert_eq!(lease.look(SECOND / 2, detached, gone), None);
        // To a node that is not there, it is not handed over.
        assert_eq!(lease.look(SECOND / 2, Inputs { hand_over: 3, ..detached }, gone), None);
        let handed = lease.look(SECOND / 2, Inputs { hand_over: 2, ..detached }, gone);
        assert_eq!(handed, Some(Action::HandOver { node: 2, epoch: 1, seen: word(1, 1) }));
        assert_eq!((lease.holder(), lease.word()), (Some(2), word(1, 2)));
        let inputs = Inputs { word: word(1, 2), hand_over: 2, ..detached };
        assert_eq!(lease.look(SECOND, inputs, gone), None);
        assert!(matches!(lease.look(2 * SECOND, inputs, gone), Some(Action::End { node: 2, .. })));
    }

    proptest! {
        /// Whatever is written into the registers: at any time at most one node holds the card, it is a
        /// connected one, the epoch grows with each lease, and a holder keeps the card unless one of the four
        /// reasons is given.
        #[test]
        fn words_of_any_kind_mislead_nobody(
            steps in prop::collection::vec((0u64..40, 0u32..5, 0u32..6, 0u64..4, 0u64..4, 0u64..3), 1..200),
        ) {
            let mut lease = Lease::new(SECOND);
            let (mut register, mut now, mut latest) = (lease.word(), Duration::ZERO, 0);
            for (passed, epoch, node_number, revoke, release, heartbeat) in steps {
                now += Duration::from_millis(passed * 50);
                if epoch != 0 {
                    register = word(epoch, node_number);
                }
                let held = lease.holder();
                let inputs = Inputs { word: register, revoke, heartbeat, release, ..Inputs::default() };
                match lease.look(now, inputs, node) {
                    Some(Action::Grant { node: holder, epoch }) => {
                        prop_assert!(held.is_none() && node(holder) && epoch > latest);
                        latest = epoch;
                    }
                    Some(Action::End { node: holder, epoch, cause }) => {
                        prop_assert_eq!(held, Some(holder));
                        prop_assert_eq!(epoch, latest);
                        prop_assert!(cause.is_some() || release == u64::from(epoch));
                        register = lease.cleared();
                    }
                    Some(Action::HandOver { .. }) => prop_assert!(false, "nobody wished it"),
                    Some(Action::Restore { seen, to }) => {
                        prop_assert_eq!(seen, register);
                        register = to;
                        prop_assert_eq!(held, lease.holder());
                    }
                    None => prop_assert_eq!(held, lease.holder()),
                }
                prop_assert_eq!(lease.word(), register);
            }
        }
    }
}
