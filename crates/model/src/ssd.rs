//! Command queues of a solid-state disk: commands per time against block size and queue depth.
//!
//! ```text
//!   outstanding commands ─► command and PCIe interface ─► flash channels (each has its own queue) ─► flash ─┐
//!            ▲                                                                                              │
//!            └──────────────────────────────── completions ─────────────────────────────────────────────────┘
//! ```
//! A closed network of queues, solved by exact mean value analysis (Reiser & Lavenberg, J. ACM 27(2), 1980): with few
//! commands outstanding, Little's law holds with the latency of one command; with many, the busiest station is the limit.

use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;

/// Whether commands read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads of flash.
    Read,
    /// Writes into the disk's buffer, which flash drains.
    Write,
}

/// Stations of a disk for one kind of access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CommandQueue {
    /// Time of one small command with nothing else in the disk, without its transfer.
    pub latency: Picos,
    /// Smallest time between two commands.
    pub command: Picos,
    /// Rate of the interface, or of all flash together.
    pub rate: BytesPerSecond,
    /// Flash channels; a fit gives any number.
    pub channels: f64,
    /// Rate of one channel.
    pub channel_rate: BytesPerSecond,
}

impl Access {
    /// First word of its values in the device library.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "write",
        }
    }
}

impl CommandQueue {
    /// Values of the device library behind the reads of a disk; those of writes are alike.
    pub const VALUES: [&str; 5] = ["read.latency", "read.iops", "read.rate", "channels", "channel.rate"];

    /// Names of the values behind the reads or the writes of a disk.
    #[must_use]
    pub fn value_names(access: Access) -> String {
        let prefix = format!("{}.", access.name());
        CommandQueue::VALUES.map(|value| value.replace("read.", &prefix)).join(", ")
    }

    /// Whether a value of the device library is behind the reads or the writes of a disk.
    #[must_use]
    pub fn has_value(name: &str) -> bool {
        let read = name.strip_prefix("write.").map_or_else(|| name.to_owned(), |of| format!("read.{of}"));
        CommandQueue::VALUES.contains(&read.as_str())
    }

    /// The stations of a device; none if the library lacks one of its values.
    #[must_use]
    pub fn new(p: &Parameters, id: &str, access: Access) -> Option<CommandQueue> {
        let value = |name: &str| p.device(id, &format!("{}.{name}", access.name()));
        Some(CommandQueue {
            latency: Picos::from_seconds(value("latency")? * 1e-6),
            command: Picos::from_seconds(1e-3 / value("iops")?),
            rate: BytesPerSecond::gigabytes(value("rate")?),
            channels: p.device(id, "channels")?.max(1.0),
            channel_rate: BytesPerSecond::gigabytes(p.device(id, "channel.rate")?),
        })
    }

    /// Time of the interface, and of one channel, per command.
    fn demands(&self, block: u64) -> (f64, f64) {
        let interface = self.command.seconds().max(block as f64 / self.rate.0);
        (interface, block as f64 / self.channel_rate.0 / self.channels)
    }

    /// Time of a command that is alone in the disk.
    #[must_use]
    pub fn latency_of(&self, block: u64) -> Picos {
        let (interface, channel) = self.demands(block);
        Picos::from_seconds(self.latency.seconds() + interface + self.channels * channel)
    }

    /// Commands per second with one outstanding, two, and so on.
    pub fn rates(&self, block: u64) -> impl Iterator<Item = f64> {
        let (interface, channel) = self.demands(block);
        let (latency, channels) = (self.latency.seconds(), self.channels);
        let (mut at_interface, mut at_channel) = (0.0, 0.0);
        (1_u32..).map(move |commands| {
            let times = (interface * (1.0 + at_interface), channel * (1.0 + at_channel));
            let rate = f64::from(commands) / (latency + times.0 + channels * times.1);
            (at_interface, at_channel) = (rate * times.0, rate * times.1);
            rate
        })
    }

    /// Commands per second with this many outstanding.
    #[must_use]
    pub fn commands_per_second(&self, block: u64, outstanding: u32) -> f64 {
        self.rates(block).take(outstanding as usize).last().unwrap_or(0.0)
    }

    /// Payload per second with this many commands outstanding.
    #[must_use]
    pub fn bandwidth(&self, block: u64, outstanding: u32) -> BytesPerSecond {
        BytesPerSecond(self.commands_per_second(block, outstanding) * block as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shipped(id: &str, access: Access) -> CommandQueue {
        CommandQueue::new(&Parameters::shipped(), id, access).expect("the library has all values")
    }

    #[test]
    fn one_command_takes_its_latency_and_many_reach_the_limit() {
        for id in ["p3700", "pm1753"] {
            for access in [Access::Read, Access::Write] {
                let queue = shipped(id, access);
                for block in [512, 4096, 65536, 1 << 20] {
                    let alone = queue.commands_per_second(block, 1) * queue.latency_of(block).seconds();
                    assert!((alone - 1.0).abs() < 1e-6, "{id} {access:?} {block}: {alone}");
                }
                // Short commands are limited by their number, long ones by bytes.
                let short = queue.commands_per_second(512, 4096) * queue.command.seconds();
                assert!((0.98..=1.0 + 1e-9).contains(&short), "{id} {access:?}: {short}");
                let long = queue.bandwidth(1 << 20, 512).0 / queue.rate.0;
                assert!((0.9..=1.0 + 1e-9).contains(&long), "{id} {access:?}: {long}");
            }
        }
    }

    #[test]
    fn slow_channels_are_the_limit_below_the_interface() {
        let queue = CommandQueue {
            channels: 4.0,
            channel_rate: BytesPerSecond(0.5e9),
            ..shipped("p3700", Access::Read)
        };
        let rate = queue.bandwidth(1 << 17, 512).0;
        assert!((1.9e9..=2.0e9).contains(&rate), "{rate}");
    }

    proptest! {
        /// Asymptotic bounds (Little's law and the busiest station), and more commands never lower the rate.
        #[test]
        fn rates_obey_the_bounds_of_closed_networks(
            block in 512_u64..1 << 20,
            outstanding in 1_u32..256,
            channels in 1.0_f64..32.0,
            latency in 1.0_f64..200.0,
        ) {
            let queue = CommandQueue {
                channels,
                latency: Picos::from_seconds(latency * 1e-6),
                ..shipped("pm1753", Access::Read)
            };
            let rate = queue.commands_per_second(block, outstanding);
            let (interface, channel) = queue.demands(block);
            let little = f64::from(outstanding) / queue.latency_of(block).seconds();
            prop_assert!(rate <= little * (1.0 + 1e-6));
            prop_assert!(rate * interface.max(channel) <= 1.0 + 1e-9);
            prop_assert!(rate <= queue.commands_per_second(block, outstanding + 1) * (1.0 + 1e-9));
        }
    }
}
