//! The lease as a state machine, without threads, memory or a clock.
//!
//! ```text
//!            lease word (e, client)               release, revocation, expiry, disconnect
//!   Free ─────────────────────────► Held by client ───────────────────────────────► Clearing
//!    ▲                                                                                  │
//!    └─────────────── epoch e + 1, keys invalid and memory cleared ─────────────────────┘
//! ```
//!
//! Clients read the lease word and change it by compare-and-swap. The word is untrusted input: the card keeps its
//! own state and restores any word that contradicts it. The epoch is a fence: a request with an older epoch
//! belongs to an ended lease.

use std::time::Duration;

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::lease::{MAX_DURATION, MIN_DURATION, pack, unpack};

/// Values of the registers that clients write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inputs {
    /// The lease word.
    pub(crate) word: u64,
    /// `lease_revoke`.
    pub(crate) revoke: u64,
    /// `lease_heartbeat`.
    pub(crate) heartbeat: u64,
    /// `lease_duration_ns`.
    pub(crate) duration_ns: u64,
    /// `lease_release`.
    pub(crate) release: u64,
    /// `lease_transfer`.
    pub(crate) transfer: u64,
    /// `lease_detached`.
    pub(crate) detached: u64,
    /// The holder is on this host: its connection is its heartbeat.
    pub(crate) is_local: bool,
}

/// An operation that the lease requires of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Register the windows for this client.
    Grant {
        /// The holder.
        client: u32,
        /// Epoch of its lease.
        epoch: u32,
    },
    /// Another client holds the same lease: store the new word and send messages to it.
    Transfer {
        /// The new holder.
        client: u32,
        /// Epoch of the lease, which does not change.
        epoch: u32,
        /// The word to be replaced by compare-and-swap.
        seen: u64,
    },
    /// Deregister the windows, stop everything, clear memory; then call [`Lease::cleared`].
    End {
        /// The former holder.
        client: u32,
        /// Epoch of its lease.
        epoch: u32,
        /// Why, unless the holder released it.
        cause: Option<Fault>,
    },
    /// A client wrote an invalid word: restore this one.
    Restore {
        /// The word to be replaced by compare-and-swap.
        seen: u64,
        /// The valid word.
        to: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Held { client: u32, heartbeat: u64, renewed: Duration, duration: Duration },
    Clearing,
}

/// The lease of one card.
#[derive(Debug)]
pub(crate) struct Lease {
    epoch: u32,
    state: State,
    default: Duration,
}

impl Lease {
    /// A free card. `default` is the duration of a lease whose holder does not set one.
    pub(crate) fn new(default: Duration) -> Lease {
        Lease { epoch: 1, state: State::Free, default: default.clamp(MIN_DURATION, MAX_DURATION) }
    }

    /// The valid lease word.
    pub(crate) fn word(&self) -> u64 {
        match self.state {
            State::Held { client, .. } => pack(self.epoch, client),
            State::Free | State::Clearing => pack(self.epoch, 0),
        }
    }

    /// Epoch of the current lease, or of the next one.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The holder.
    pub(crate) fn holder(&self) -> Option<u32> {
        match self.state {
            State::Held { client, .. } => Some(client),
            State::Free | State::Clearing => None,
        }
    }

    /// When the lease expires without a further heartbeat.
    pub(crate) fn expires(&self) -> Option<Duration> {
        match self.state {
            State::Held { renewed, duration, .. } => Some(renewed + duration),
            State::Free | State::Clearing => None,
        }
    }

    /// Duration of the current lease.
    pub(crate) fn duration(&self) -> Option<Duration> {
        match self.state {
            State::Held { duration, .. } => Some(duration),
            State::Free | State::Clearing => None,
        }
    }

    /// Whether a client can acquire the lease.
    pub(crate) fn is_free(&self) -> bool {
        self.state == State::Free
    }

    /// Evaluates the registers at time `now`; `is_client` tells whether an id is that of a connected client.
    pub(crate) fn poll(
        &mut self,
        now: Duration,
        inputs: Inputs,
        is_client: impl Fn(u32) -> bool,
    ) -> Option<Action> {
        let to = self.word();
        match self.state {
            State::Free => {
                let (epoch, client) = unpack(inputs.word);
                if inputs.word == to {
                    return None;
                }
                if epoch != self.epoch || !is_client(client) {
                    return Some(Action::Restore { seen: inputs.word, to });
                }
                // The registers have been cleared, so the first heartbeat may be any value.
                let duration = self.requested_duration(inputs.duration_ns);
                self.state = State::Held { client, heartbeat: inputs.heartbeat, renewed: now, duration };
                Some(Action::Grant { client, epoch })
            }
            // An invalid word keeps no lease from its end, which sets the word.
            State::Held { client, heartbeat, renewed, .. } => {
                let epoch = u64::from(self.epoch);
                if inputs.release == epoch {
                    return self.end(None);
                }
                if inputs.revoke == epoch {
                    return self.end(Some(Cause::LeaseRevoked));
                }
                let successor = u32::try_from(inputs.transfer).unwrap_or(0);
                if successor != 0 && successor != client && is_client(successor) {
                    let duration = self.requested_duration(inputs.duration_ns);
                    let heartbeat = inputs.heartbeat;
                    self.state = State::Held { client: successor, heartbeat, renewed: now, duration };
                    return Some(Action::Transfer {
                        client: successor,
                        epoch: self.epoch,
                        seen: inputs.word,
                    });
                }
                if !is_client(client) && inputs.detached == 0 {
                    return self.end(Some(Cause::HolderDisconnected));
                }
                let duration = self.requested_duration(inputs.duration_ns);
                let renewed = if inputs.heartbeat == heartbeat && !inputs.is_local { renewed } else { now };
                self.state = State::Held { client, heartbeat: inputs.heartbeat, renewed, duration };
                if now > renewed + duration {
                    return self.end(Some(Cause::LeaseExpired));
                }
                (inputs.word != to).then_some(Action::Restore { seen: inputs.word, to })
            }
            // [`Lease::cleared`] sets the word.
            State::Clearing => None,
        }
    }

    /// The controller has removed all traces of the ended lease: the card is free under a new epoch. Returns the
    /// new lease word.
    pub(crate) fn cleared(&mut self) -> u64 {
        // Epoch zero is skipped so that a lease word of zero is never valid.
        self.epoch = self.epoch.checked_add(1).unwrap_or(1);
        self.state = State::Free;
        self.word()
    }

    fn end(&mut self, cause: Option<Cause>) -> Option<Action> {
        let client = self.holder()?;
        self.state = State::Clearing;
        let epoch = self.epoch;
        Some(Action::End { client, epoch, cause: cause.map(|cause| Fault::new(cause, epoch.into())) })
    }

    fn requested_duration(&self, nanos: u64) -> Duration {
        match nanos {
            0 => self.default,
            nanos => Duration::from_nanos(nanos).clamp(MIN_DURATION, MAX_DURATION),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn is_connected(id: u32) -> bool {
        (1..=3).contains(&id)
    }

    fn granted(to: u32) -> (Lease, Inputs) {
        let mut lease = Lease::new(SECOND);
        let inputs = Inputs { word: pack(1, to), ..Inputs::default() };
        let action = lease.poll(Duration::ZERO, inputs, is_connected);
        assert_eq!(action, Some(Action::Grant { client: to, epoch: 1 }));
        (lease, inputs)
    }

    #[test]
    fn heartbeats_renew_a_lease() {
        let (mut lease, mut inputs) = granted(2);
        for beat in 1..10u64 {
            inputs.heartbeat = beat;
            assert_eq!(lease.poll(beat as u32 * SECOND * 3 / 4, inputs, is_connected), None);
        }
        let last = 9 * SECOND * 3 / 4;
        assert_eq!(lease.expires(), Some(last + SECOND));
        assert_eq!(lease.poll(last + SECOND, inputs, is_connected), None);
        let ended = lease.poll(last + SECOND + Duration::from_nanos(1), inputs, is_connected);
        let cause = Some(Fault::new(Cause::LeaseExpired, 1));
        assert_eq!(ended, Some(Action::End { client: 2, epoch: 1, cause }));
        assert_eq!(lease.cleared(), pack(2, 0));
    }

    #[test]
    fn a_lease_ends_by_release_revocation_and_disconnect_and_the_epoch_is_a_fence() {
        for (change, connected, cause) in [
            (Inputs { release: 1, ..Inputs::default() }, true, None),
            (Inputs { revoke: 1, ..Inputs::default() }, true, Some(Cause::LeaseRevoked)),
            (Inputs::default(), false, Some(Cause::HolderDisconnected)),
        ] {
            let (mut lease, inputs) = granted(3);
            let stale = Inputs { release: 7, revoke: 7, ..inputs };
            assert_eq!(lease.poll(Duration::ZERO, stale, is_connected), None);
            let inputs = Inputs { word: inputs.word, ..change };
            let Some(Action::End { cause: found, .. }) =
                lease.poll(Duration::ZERO, inputs, |id| connected && is_connected(id))
            else {
                panic!("still held");
            };
            assert_eq!(found.map(|fault| fault.cause), cause);
            assert_eq!(
                lease.poll(Duration::ZERO, inputs, is_connected),
                None,
                "nothing is granted while clearing"
            );
            lease.cleared();
            // A word of the old epoch acquires nothing.
            let seen = Inputs { word: pack(1, 1), ..Inputs::default() };
            let restored = Action::Restore { seen: seen.word, to: pack(2, 0) };
            assert_eq!(lease.poll(Duration::ZERO, seen, is_connected), Some(restored));
        }
    }

    #[test]
    fn an_invalid_word_is_restored_and_keeps_no_lease_from_its_end() {
        let invalid = pack(7, 7);
        let restored = Some(Action::Restore { seen: invalid, to: pack(1, 2) });
        for (change, at, connected, cause) in [
            (Inputs { release: 1, ..Inputs::default() }, SECOND, true, None),
            (Inputs { revoke: 1, ..Inputs::default() }, SECOND, true, Some(Cause::LeaseRevoked)),
            (Inputs::default(), SECOND, false, Some(Cause::HolderDisconnected)),
            (Inputs::default(), 3 * SECOND, true, Some(Cause::LeaseExpired)),
        ] {
            let (mut lease, _) = granted(2);
            let renewed = Inputs { word: invalid, heartbeat: 1, ..Inputs::default() };
            assert_eq!(lease.poll(SECOND, renewed, is_connected), restored);
            assert_eq!(lease.expires(), Some(2 * SECOND), "the heartbeat counts");
            let inputs = Inputs { word: invalid, heartbeat: 1, ..change };
            let Some(Action::End { cause: found, .. }) =
                lease.poll(at, inputs, |id| connected && is_connected(id))
            else {
                panic!("still held: {cause:?}");
            };
            assert_eq!(found.map(|fault| fault.cause), cause);
        }
        let (mut lease, _) = granted(2);
        let transfer = Inputs { word: invalid, transfer: 3, ..Inputs::default() };
        let transferred = Action::Transfer { client: 3, epoch: 1, seen: invalid };
        assert_eq!(lease.poll(SECOND, transfer, is_connected), Some(transferred));
    }

    #[test]
    fn a_detached_lease_outlives_its_holder_and_can_be_transferred() {
        let (mut lease, inputs) = granted(1);
        let only_2 = |id: u32| id == 2;
        let detached = Inputs { detached: 1, ..inputs };
        assert_eq!(lease.poll(SECOND / 2, detached, only_2), None);
        // A transfer to an unknown client is ignored.
        assert_eq!(lease.poll(SECOND / 2, Inputs { transfer: 3, ..detached }, only_2), None);
        let transferred = lease.poll(SECOND / 2, Inputs { transfer: 2, ..detached }, only_2);
        assert_eq!(transferred, Some(Action::Transfer { client: 2, epoch: 1, seen: pack(1, 1) }));
        assert_eq!((lease.holder(), lease.word()), (Some(2), pack(1, 2)));
        let inputs = Inputs { word: pack(1, 2), transfer: 2, ..detached };
        assert_eq!(lease.poll(SECOND, inputs, only_2), None);
        assert!(matches!(lease.poll(2 * SECOND, inputs, only_2), Some(Action::End { client: 2, .. })));
    }

    proptest! {
        /// For any register values, at most one connected client holds the card, and the epoch grows with
        /// each lease. A lease ends only by release, revocation, expiry or disconnect.
        #[test]
        fn the_lease_is_consistent_for_any_register_values(
            steps in prop::collection::vec((0u64..40, 0u32..5, 0u32..6, 0u64..4, 0u64..4, 0u64..3), 1..200),
        ) {
            let mut lease = Lease::new(SECOND);
            let (mut register, mut now, mut latest) = (lease.word(), Duration::ZERO, 0);
            for (passed, epoch, client, revoke, release, heartbeat) in steps {
                now += Duration::from_millis(passed * 50);
                if epoch != 0 {
                    register = pack(epoch, client);
                }
                let held = lease.holder();
                let inputs = Inputs { word: register, revoke, heartbeat, release, ..Inputs::default() };
                match lease.poll(now, inputs, is_connected) {
                    Some(Action::Grant { client: holder, epoch }) => {
                        prop_assert!(held.is_none() && is_connected(holder) && epoch > latest);
                        latest = epoch;
                    }
                    Some(Action::End { client: holder, epoch, cause }) => {
                        prop_assert_eq!(held, Some(holder));
                        prop_assert_eq!(epoch, latest);
                        prop_assert!(cause.is_some() || release == u64::from(epoch));
                        register = lease.cleared();
                    }
                    Some(Action::Transfer { .. }) => prop_assert!(false, "no transfer was requested"),
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
