//! What a link counts.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// One list: the counter, its snapshot, its name.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Events on a link, counted as they happen.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: Counter,)* }

        /// The counts at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Counts {
                Counts { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }

        impl Counts {
            /// Name and value of each, in the order of the declaration.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// The sum of two layers' counts.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    /// Packets given to the kernel.
    sent,
    /// Their bytes, from the base transport header to the ICRC.
    sent_bytes,
    /// System calls that sent something.
    send_calls,
    /// Packets that the kernel had no room for; they were not sent.
    send_full,
    /// Packets that the kernel refused (no route, longer than the path allows); they were not sent.
    send_refused,
    /// Packets that came in.
    received,
    /// Their bytes.
    received_bytes,
    /// Datagrams that came in; with receive offload one may carry many packets.
    received_datagrams,
    /// Datagrams that the kernel dropped because nobody had read the socket in time.
    receive_overflow,
    /// Packets shorter than a base transport header and an ICRC.
    too_short,
    /// Packets whose ICRC fits no identification that the sender may have used.
    bad_icrc,
    /// Packets for another process of this host, which were passed on to it.
    passed_on,
    /// Packets for a process that does not exist, or that could not take them.
    misdirected,
    /// Packets that another process of this host passed on to this one.
    passed_in,
    /// Packets that were passed on to this process and found its queue full.
    passed_in_overflow,
    /// Packets that a fault was injected into: not delivered.
    fault_dropped,
    /// Delivered twice.
    fault_duplicated,
    /// Delivered after a later one.
    fault_reordered,
    /// Delivered with a wrong bit.
    fault_corrupted,
    /// Marked as by a congested switch.
    fault_marked,
    /// Delivered late.
    fault_delayed,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (name, value) in self.iter().filter(|(_, value)| *value != 0) {
            write!(f, "{}{name}={value}", if first { "" } else { " " })?;
            first = false;
        }
        if first { f.write_str("nothing") } else { Ok(()) }
    }
}

/// One count.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
}
