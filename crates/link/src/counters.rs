//! Packet counters of a link.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Declares each counter once: the atomic, the snapshot, the name.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: Counter,)* }

        /// A snapshot of the counters.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Counts {
                Counts { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }

        impl Counts {
            /// Name and value of each counter, in order of declaration.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// The sum of the counters of two layers.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

counters! {
    /// Packets passed to the kernel.
    sent,
    /// Bytes sent, from the base transport header to the ICRC.
    sent_bytes,
    /// System calls that sent packets.
    send_calls,
    /// Packets not sent because the socket's send buffer was full.
    send_buffer_full,
    /// Packets that the kernel rejected: no route, or longer than the path MTU.
    send_rejected,
    /// Packets received.
    received,
    /// Bytes received.
    received_bytes,
    /// Datagrams received; with GRO a datagram holds several packets.
    received_datagrams,
    /// Datagrams that the kernel dropped because the receive buffer was full.
    receive_overflow,
    /// Packets shorter than a base transport header and an ICRC.
    truncated,
    /// Packets with an ICRC that matches no IPv4 identification.
    bad_icrc,
    /// Packets forwarded to another process of this host.
    forwarded_out,
    /// Packets for a process that does not exist, or could not take them.
    unknown_destination,
    /// Packets that another process of this host forwarded to this one.
    forwarded_in,
    /// Forwarded packets dropped because this process's queue was full.
    forwarded_in_overflow,
    /// Packets for queue pair 1 dropped because they arrived faster than a process handles them.
    management_dropped,
    /// Packets dropped by fault injection.
    fault_dropped,
    /// Packets duplicated by fault injection.
    fault_duplicated,
    /// Packets reordered by fault injection.
    fault_reordered,
    /// Packets corrupted by fault injection.
    fault_corrupted,
    /// Packets marked as congestion experienced by fault injection.
    fault_marked,
    /// Packets delayed by fault injection.
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

/// One counter.
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
