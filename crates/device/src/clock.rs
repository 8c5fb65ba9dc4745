//! The device's clock, with which completions are stamped.
//!
//! It is the host's raw monotonic clock, so the stamps of all processes on the host can be compared, and
//! nothing adjusts its rate between two of them.

/// Ticks of the clock in a millisecond: what `ibv_query_device_ex` calls kHz.
pub const CLOCK_KHZ: u64 = 1_000_000;

/// A reading of the clock, or the time of a completion: nanoseconds since some moment of this boot.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(pub u64);

impl Stamp {
    /// The time now.
    #[must_use]
    pub fn now() -> Self {
        Self(read(libc::CLOCK_MONOTONIC_RAW))
    }
}

/// What the device's clock showed at a moment of the wall clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct WallClock {
    device: Stamp,
    /// Nanoseconds since 1970.
    wall: u64,
}

impl WallClock {
    /// Reads both clocks, as nearly at once as can be told: the closest of some tries.
    #[must_use]
    pub fn read() -> Self {
        let tries = (0..3).map(|_| {
            let before = Stamp::now().0;
            let wall = read(libc::CLOCK_REALTIME);
            let took = Stamp::now().0 - before;
            (took, Self { device: Stamp(before + took / 2), wall })
        });
        tries.min_by_key(|(took, _)| *took).expect("three tries").1
    }

    /// The wall clock at a time that lies near this reading, nanoseconds since 1970.
    #[must_use]
    pub fn at(&self, time: Stamp) -> u64 {
        self.wall.wrapping_add(time.0.wrapping_sub(self.device.0))
    }
}

/// Nanoseconds on the clock that timers go by.
pub(crate) fn monotonic() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a writable struct; these clocks exist on every Linux.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_rise_and_have_a_place_on_the_wall_clock() {
        let first = Stamp::now();
        let clock = WallClock::read();
        let second = Stamp::now();
        assert!(first <= second);
        assert_eq!(clock.at(second) - clock.at(first), second.0 - first.0);
        // Stamps from before the reading are as good.
        assert!(clock.at(first) <= clock.wall && clock.wall <= clock.at(second));
        let now = read(libc::CLOCK_REALTIME);
        assert!(now.abs_diff(clock.at(Stamp::now())) < 1_000_000_000);
    }
}
