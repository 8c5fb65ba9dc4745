//! Commands and completions: the 64-byte entries of the two rings in card memory, and the causes
//! that a card names when something is wrong.
//!
//! All fields are little-endian. Reserved bytes are zero and checked, so that they can get a
//! meaning later.

use std::fmt;
use std::time::Duration;

use crate::memory::Span;

/// Size of a descriptor and of a completion entry [bytes].
pub const ENTRY_BYTES: usize = 64;

/// Most slots of a ring.
pub const MAX_RING_SLOTS: u32 = 1 << 16;

/// Number by which a card knows one of its kernels; see the kernel directory in BAR0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelId(pub u32);

/// Command flag of `cluster7`: check the fragments of each event as `verify` does, in the same
/// pass. `verify` itself accepts no flag.
pub const FLAG_VERIFY: u32 = 1 << 0;

/// One command for the card.
///
/// ```text
///   0  kernel          u32    8  args offset    u64   24  result offset  u64
///   4  flags           u32   16  args length    u64   32  result length  u64
///  40  cookie          u64   48  reserved       16 bytes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Kernel to run.
    pub kernel: KernelId,
    /// Bits that the kernel defines.
    pub flags: u32,
    /// Where the kernel's arguments are.
    pub args: Span,
    /// Where the kernel puts its result.
    pub result: Span,
    /// Comes back in the completion.
    pub cookie: u64,
}

impl Descriptor {
    /// The entry as it stands in the ring.
    pub fn to_bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.kernel.0.to_le_bytes());
        put(4, &self.flags.to_le_bytes());
        put(8, &self.args.offset.to_le_bytes());
        put(16, &self.args.len.to_le_bytes());
        put(24, &self.result.offset.to_le_bytes());
        put(32, &self.result.len.to_le_bytes());
        put(40, &self.cookie.to_le_bytes());
        bytes
    }

    /// Reads an entry; the cookie comes back even if the rest is refused, so that its sender learns
    /// about it.
    pub fn from_bytes(bytes: &[u8; ENTRY_BYTES]) -> Result<Descriptor, (Fault, u64)> {
        let cookie = u64_at(bytes, 40);
        for at in [48, 56] {
            let reserved = u64_at(bytes, at);
            if reserved != 0 {
                return Err((Fault::new(Cause::ReservedNotZero, reserved), cookie));
            }
        }
        Ok(Descriptor {
            kernel: KernelId(u32_at(bytes, 0)),
            flags: u32_at(bytes, 4),
            args: Span::new(u64_at(bytes, 8), u64_at(bytes, 16)),
            result: Span::new(u64_at(bytes, 24), u64_at(bytes, 32)),
            cookie,
        })
    }
}

/// What a kernel counted while it ran one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Events handled.
    pub events: u32,
    /// Fragments found for them.
    pub fragments: u32,
    /// Fragments whose checksum was wrong.
    pub corrupt_fragments: u32,
    /// Decision bits set.
    pub decisions_set: u32,
    /// Payload of the fragments read [bytes].
    pub payload_bytes: u64,
}

/// The end of one command.
///
/// ```text
///   0  cookie          u64   24  detail            u64   44  decisions set  u32
///   8  index           u64   32  events            u32   48  payload bytes  u64
///  16  cause           u32   36  fragments         u32   56  busy time      u64 [ns]
///  20  kernel          u32   40  corrupt fragments u32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The cookie of the command.
    pub cookie: u64,
    /// Position of the command since the ring was opened: 0, 1, 2, …
    pub index: u64,
    /// Kernel that the command named.
    pub kernel: KernelId,
    /// Nothing if the kernel ran to its end, else what was wrong. After a fault the result is
    /// undefined.
    pub outcome: Result<(), Fault>,
    /// What the kernel counted, up to the fault if there was one.
    pub tally: Tally,
    /// Time that the kernel ran.
    pub busy: Duration,
}

impl Completion {
    /// The entry as it stands in the ring.
    pub fn to_bytes(&self) -> [u8; ENTRY_BYTES] {
        let (cause, detail) = match self.outcome {
            Ok(()) => (0, 0),
            Err(fault) => (fault.cause.code(), fault.detail),
        };
        let mut bytes = [0; ENTRY_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.cookie.to_le_bytes());
        put(8, &self.index.to_le_bytes());
        put(16, &cause.to_le_bytes());
        put(20, &self.kernel.0.to_le_bytes());
        put(24, &detail.to_le_bytes());
        put(32, &self.tally.events.to_le_bytes());
        put(36, &self.tally.fragments.to_le_bytes());
        put(40, &self.tally.corrupt_fragments.to_le_bytes());
        put(44, &self.tally.decisions_set.to_le_bytes());
        put(48, &self.tally.payload_bytes.to_le_bytes());
        put(56, &nanos(self.busy).to_le_bytes());
        bytes
    }

    /// Reads an entry.
    pub fn from_bytes(bytes: &[u8; ENTRY_BYTES]) -> Completion {
        let outcome = match u32_at(bytes, 16) {
            0 => Ok(()),
            code => Err(Fault::new(Cause::from_code(code), u64_at(bytes, 24))),
        };
        Completion {
            cookie: u64_at(bytes, 0),
            index: u64_at(bytes, 8),
            kernel: KernelId(u32_at(bytes, 20)),
            outcome,
            tally: Tally {
                events: u32_at(bytes, 32),
                fragments: u32_at(bytes, 36),
                corrupt_fragments: u32_at(bytes, 40),
                decisions_set: u32_at(bytes, 44),
                payload_bytes: u64_at(bytes, 48),
            },
            busy: Duration::from_nanos(u64_at(bytes, 56)),
        }
    }
}

/// A duration in whole nanoseconds, as registers and completions carry it.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The little-endian `u32` at `at`, which lies inside `bytes`.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The little-endian `u64` at `at`, which lies inside `bytes`.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Something the card refused or could not finish: the cause and the offending value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause} ({detail:#x})")]
pub struct Fault {
    /// What was wrong.
    pub cause: Cause,
    /// The offending value; its meaning depends on the cause.
    pub detail: u64,
}

impl Fault {
    /// A fault with its offending value.
    pub const fn new(cause: Cause, detail: u64) -> Fault {
        Fault { cause, detail }
    }
}

/// A number with a name and a line of documentation.
#[derive(Clone, Copy, Debug)]
pub struct Code {
    /// The number, or the bit.
    pub code: u64,
    /// Its name.
    pub name: &'static str,
    /// What it means.
    pub doc: &'static str,
}

macro_rules! causes {
    ($($code:literal $name:ident = $doc:literal;)+) => {
        /// Why a command, or the rings, failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Cause {
            $(#[doc = $doc] $name,)+
            /// A cause that this version does not know.
            Unknown(u32),
        }

        /// Every cause, for the documentation.
        pub const CAUSES: &[Code] = &[$(Code {
            code: $code,
            name: stringify!($name),
            doc: $doc,
        }),+];

        impl Cause {
            /// The number in registers and completions; never zero.
            pub const fn code(self) -> u32 {
                match self {
                    $(Cause::$name => $code,)+
                    Cause::Unknown(code) => code,
                }
            }

            /// The cause with this number.
            pub const fn from_code(code: u32) -> Cause {
                match code {
                    $($code => Cause::$name,)+
                    code => Cause::Unknown(code),
                }
            }
        }

        impl fmt::Display for Cause {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Cause::$name => f.write_str($doc),)+
                    Cause::Unknown(code) => write!(f, "unknown cause {code}"),
                }
            }
        }
    };
}

causes! {
    1 BadRingSlots = "number of ring slots is not a power of two, zero or too large";
    2 RingMisplaced = "ring is misaligned or outside card memory";
    3 RingsOverlap = "command ring and completion ring overlap";
    4 RingOverrun = "producer is further ahead of the card than the ring has slots";
    5 ReservedNotZero = "reserved field is not zero";
    6 UnknownKernel = "card has no kernel with this number";
    7 UnknownFlags = "kernel does not know these flags";
    8 ArgsOutsideMemory = "arguments are outside card memory";
    9 ArgsLength = "arguments have the wrong length";
    10 ResultOutsideMemory = "result is outside card memory";
    11 ResultTooSmall = "result does not fit into its place";
    12 TooManyEvents = "command names more events than a kernel takes";
    13 TooManySources = "command names more sources than a kernel takes";
    14 PlaceOutsideMemory = "place of a packet is outside card memory";
    15 TraceSourceMissing = "trace source has no place among the packets";
    16 GeometryOutsideMemory = "geometry table is outside card memory";
    17 GeometryEntry = "geometry table has an entry out of range";
    18 DecisionsOutsideMemory = "decision maps are outside card memory";
    19 ResultsOverlap = "places of results overlap each other or an input";
    20 EventNumberOverflow = "event numbers of the command exceed 64 bits";
    21 Interrupted = "card was stopped while the command ran";
    22 KernelFailed = "kernel failed by a fault of its own";
}

/// What a card does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Not ready yet.
    Starting = 0,
    /// Running, with no rings open.
    Closed = 1,
    /// Waiting for commands.
    Idle = 2,
    /// Running a kernel.
    Busy = 3,
    /// The rings failed; see `ring_fault`. A new configuration recovers.
    Faulted = 4,
    /// Ended.
    Stopped = 5,
}

/// Every status, for the documentation.
pub const STATUSES: &[Code] = &[
    Code { code: Status::Starting as u64, name: "Starting", doc: "not ready yet" },
    Code { code: Status::Closed as u64, name: "Closed", doc: "running, with no rings open" },
    Code { code: Status::Idle as u64, name: "Idle", doc: "waiting for commands" },
    Code { code: Status::Busy as u64, name: "Busy", doc: "running a kernel" },
    Code {
        code: Status::Faulted as u64,
        name: "Faulted",
        doc: "the rings failed, see `ring_fault`; a new configuration recovers",
    },
    Code { code: Status::Stopped as u64, name: "Stopped", doc: "ended" },
];

/// Bit of `capabilities`: completions can signal a file descriptor (`interrupt_arm`).
pub const CAPABILITY_INTERRUPT_FD: u64 = 1 << 0;

/// Bit of `capabilities`: the kernels use the vector unit of the processor.
pub const CAPABILITY_VECTOR: u64 = 1 << 1;

/// Every capability bit, for the documentation.
pub const CAPABILITIES: &[Code] = &[
    Code {
        code: CAPABILITY_INTERRUPT_FD,
        name: "INTERRUPT_FD",
        doc: "completions can signal a file descriptor (`interrupt_arm`)",
    },
    Code { code: CAPABILITY_VECTOR, name: "VECTOR", doc: "the kernels use the vector unit of the processor" },
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn causes_are_numbered_without_gaps_and_come_back() {
        for (index, cause) in CAUSES.iter().enumerate() {
            assert_eq!(cause.code, index as u64 + 1);
            let code = cause.code as u32;
            assert_eq!(format!("{:?}", Cause::from_code(code)), cause.name);
            assert_eq!(Cause::from_code(code).code(), code);
        }
        assert_eq!(Cause::from_code(4000), Cause::Unknown(4000));
    }

    proptest! {
        #[test]
        fn descriptors_come_back(
            kernel: u32, flags: u32, args: (u64, u64), result: (u64, u64), cookie: u64,
        ) {
            let descriptor = Descriptor {
                kernel: KernelId(kernel),
                flags,
                args: Span::new(args.0, args.1),
                result: Span::new(result.0, result.1),
                cookie,
            };
            prop_assert_eq!(Descriptor::from_bytes(&descriptor.to_bytes()), Ok(descriptor));
        }

        #[test]
        fn reserved_bytes_are_refused_but_the_cookie_survives(at in 48usize..64, value in 1u8..) {
            let mut bytes = [0x33; ENTRY_BYTES];
            bytes[48..].fill(0);
            bytes[at] = value;
            let (fault, cookie) = Descriptor::from_bytes(&bytes).unwrap_err();
            prop_assert_eq!(fault.cause, Cause::ReservedNotZero);
            prop_assert_eq!(cookie, 0x3333_3333_3333_3333);
        }

        #[test]
        fn completions_come_back(
            numbers: [u64; 4], small: [u32; 5], cause in 0u32..30, detail: u64,
        ) {
            let completion = Completion {
                cookie: numbers[0],
                index: numbers[1],
                kernel: KernelId(small[0]),
                outcome: match cause {
                    0 => Ok(()),
                    code => Err(Fault::new(Cause::from_code(code), detail)),
                },
                tally: Tally {
                    events: small[1],
                    fragments: small[2],
                    corrupt_fragments: small[3],
                    decisions_set: small[4],
                    payload_bytes: numbers[2],
                },
                busy: Duration::from_nanos(numbers[3]),
            };
            prop_assert_eq!(Completion::from_bytes(&completion.to_bytes()), completion);
        }
    }
}
