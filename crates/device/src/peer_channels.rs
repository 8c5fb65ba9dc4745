//! The event descriptors of a peer's completion channels, as its process handed them out.
//!
//! The numbers of channels are not used again, and nobody reports that a channel is closed. So the descriptors are forgotten from
//! time to time, and requested again for the next signal. That takes an answer of the peer, so the more of them are in use, the
//! more are kept.

use std::collections::{HashMap, HashSet};

use millstream_shm::EventFd;

/// Most descriptors of channels that may be closed.
const MAX_UNUSED: usize = 64;

/// Most numbers of forgotten channels that are remembered.
const MAX_FORGOTTEN: usize = 4096;

/// Descriptors by the number of the channel.
#[derive(Debug, Default)]
pub(crate) struct PeerChannels {
    events: HashMap<u32, EventFd>,
    forgotten: HashSet<u32>,
    /// Channels that were requested again since the descriptors were forgotten.
    used_again: usize,
}

impl PeerChannels {
    pub(crate) fn get(&self, channel: u32) -> Option<&EventFd> {
        self.events.get(&channel)
    }

    pub(crate) fn insert(&mut self, channel: u32, event: EventFd) {
        if self.forgotten.remove(&channel) {
            self.used_again += 1;
        }
        if self.events.len() >= MAX_UNUSED + 2 * self.used_again {
            if self.forgotten.len() >= MAX_FORGOTTEN {
                self.forgotten.clear();
            }
            self.forgotten.extend(self.events.drain().map(|(channel, _)| channel));
            self.used_again = 0;
        }
        self.events.insert(channel, event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Signals channels, and returns how many had to be requested.
    fn requested(channels: &mut PeerChannels, numbers: impl Iterator<Item = u32>) -> usize {
        let unknown = |number: &u32| {
            let unknown = channels.get(*number).is_none();
            if unknown {
                channels.insert(*number, EventFd::new().expect("a descriptor"));
            }
            unknown
        };
        numbers.filter(unknown).count()
    }

    #[test]
    fn few_descriptors_of_closed_channels_are_kept() {
        let mut channels = PeerChannels::default();
        // Each number is used once; ten channels are used all the time.
        for number in 100..20_000 {
            requested(&mut channels, (0..10).chain([number]));
            assert!(channels.events.len() <= MAX_UNUSED + 2 * 10);
            assert!(channels.forgotten.len() <= MAX_FORGOTTEN + MAX_UNUSED + 2 * 10);
        }
    }

    #[test]
    fn many_channels_in_use_are_kept() {
        let mut channels = PeerChannels::default();
        let mut round = || requested(&mut channels, 0..300);
        (0..2).for_each(|_| _ = round());
        assert_eq!([round(), round()], [0, 0]);
    }
}
