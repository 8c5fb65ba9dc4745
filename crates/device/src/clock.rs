//! Conversion of completion timestamps to wall-clock time, and the clock of timers.

use millstream_lockfree::Timestamp;
use millstream_lockfree::clock::read;

/// Frequency of the timestamp clock in kHz, as `ibv_query_device_ex` reports it.
pub const CLOCK_KHZ: u64 = 1_000_000;

/// A simultaneous reading of the timestamp clock and the wall clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct WallClock {
    device: Timestamp,
    /// Nanoseconds since 1970.
    wall: u64,
}

impl WallClock {
    /// Reads both clocks several times and keeps the closest pair.
    #[must_use]
    pub fn read() -> Self {
        let tries = (0..3).map(|_| {
            let before = Timestamp::now().0;
            let wall = read(libc::CLOCK_REALTIME);
            let took = Timestamp::now().0 - before;
            (took, Self { device: Timestamp(before + took / 2), wall })
        });
        tries.min_by_key(|(took, _)| *took).expect("three tries").1
    }

    /// The wall clock at a time near this reading, nanoseconds since 1970.
    #[must_use]
    pub fn at(&self, time: Timestamp) -> u64 {
        self.wall.wrapping_add(time.0.wrapping_sub(self.device.0))
    }
}

/// Nanoseconds on the clock of timers (CLOCK_MONOTONIC).
pub(crate) fn monotonic() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_rise_and_convert_to_the_wall_clock() {
        let first = Timestamp::now();
        let clock = WallClock::read();
        let second = Timestamp::now();
        assert!(first <= second);
        assert_eq!(clock.at(second) - clock.at(first), second.0 - first.0);
        // Timestamps from before the reading can be converted, too.
        assert!(clock.at(first) <= clock.wall && clock.wall <= clock.at(second));
        let before = Timestamp::now();
        let now = read(libc::CLOCK_REALTIME);
        let after = Timestamp::now();
        // The kernel may slew the wall clock meanwhile.
        let slew = 100_000_000;
        assert!((clock.at(before) - slew..=clock.at(after) + slew).contains(&now));
    }
}
