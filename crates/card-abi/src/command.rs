//! Commands and completions: the 64-byte entries of the two rings in card memory, and the causes of faults.
//!
//! Reserved fields are zero and checked, so that they can get a meaning later.

use std::fmt;
use std::time::Duration;

use crate::MemoryRange;
use crate::layout;
use crate::registers::KernelWords;

/// Size of a descriptor and of a completion entry (bytes).
pub const ENTRY_BYTES: usize = RawDescriptor::BYTES;

/// Most slots of a ring.
pub const MAX_RING_SLOTS: u32 = 1 << 16;

/// Command flag of `cluster7`: check the fragments of each event as `verify` does, in the same
/// pass. `verify` itself accepts no flag.
pub const FLAG_VERIFY: u32 = 1 << 0;

layout! {
    /// The encoding of a descriptor in the command ring.
    pub struct RawDescriptor[64] {
        0 region: u32 = "region whose kernel runs";
        4 flags: u32 = "bits that the kernel defines";
        8 args_offset: u64 = "offset of the arguments (bytes)";
        16 args_len: u64 = "their length (bytes)";
        24 result_offset: u64 = "offset of the result (bytes)";
        32 result_len: u64 = "capacity of the result range (bytes)";
        40 cookie: u64 = "returned in the completion";
        48 reserved: [u64; 2] = "zero";
    }
}

layout! {
    /// The encoding of a completion in the completion ring.
    pub struct RawCompletion[64] {
        0 cookie: u64 = "cookie of the command";
        8 index: u64 = "position of the command since the ring was opened: 0, 1, 2, …";
        16 cause: u32 = "zero on success, else the cause; see Causes";
        20 region: u32 = "region of the command";
        24 detail: u64 = "the offending value";
        32 events: u32 = "events handled";
        36 fragments: u32 = "fragments found for them";
        40 corrupt_fragments: u32 = "fragments whose checksum was wrong";
        44 decisions_set: u32 = "decision bits set";
        48 payload_bytes: u64 = "payload of the fragments read (bytes)";
        56 busy_ns: u64 = "time that the kernel ran (ns)";
    }
}

/// One command for the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Region whose kernel runs.
    pub region: u32,
    /// Bits that the kernel defines.
    pub flags: u32,
    /// Range of the kernel's arguments.
    pub args: MemoryRange,
    /// Range for the kernel's result.
    pub result: MemoryRange,
    /// Returned in the completion.
    pub cookie: u64,
}

impl Descriptor {
    /// Encodes the entry.
    pub fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        RawDescriptor {
            region: self.region,
            flags: self.flags,
            args_offset: self.args.offset,
            args_len: self.args.len,
            result_offset: self.result.offset,
            result_len: self.result.len,
            cookie: self.cookie,
            reserved: [0; 2],
        }
        .to_bytes()
    }

    /// The first five argument words of the kernel's run.
    pub fn arguments(&self) -> [u64; 5] {
        [self.args.offset, self.args.len, self.result.offset, self.result.len, self.flags.into()]
    }

    /// Decodes an entry. Returns the cookie also with a fault, so that the completion reaches its sender.
    pub fn from_bytes(bytes: &[u8; ENTRY_BYTES]) -> Result<Descriptor, (Fault, u64)> {
        let raw = RawDescriptor::from_bytes(bytes);
        if let Some(&reserved) = raw.reserved.iter().find(|&&word| word != 0) {
            return Err((Fault::new(Cause::ReservedNotZero, reserved), raw.cookie));
        }
        Ok(Descriptor {
            region: raw.region,
            flags: raw.flags,
            args: MemoryRange::new(raw.args_offset, raw.args_len),
            result: MemoryRange::new(raw.result_offset, raw.result_len),
            cookie: raw.cookie,
        })
    }
}

/// Counters of one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCounters {
    /// Events handled.
    pub events: u32,
    /// Fragments found for them.
    pub fragments: u32,
    /// Fragments whose checksum was wrong.
    pub corrupt_fragments: u32,
    /// Decision bits set.
    pub decisions_set: u32,
    /// Payload of the fragments read (bytes).
    pub payload_bytes: u64,
}

impl EventCounters {
    /// The first five result words of an event kernel.
    pub fn to_words(self) -> [u64; 5] {
        let EventCounters { events, fragments, corrupt_fragments, decisions_set, payload_bytes } = self;
        let [events, fragments, corrupt, decisions] =
            [events, fragments, corrupt_fragments, decisions_set].map(u64::from);
        [events, fragments, corrupt, decisions, payload_bytes]
    }

    /// Reads the first five result words.
    pub fn from_words(words: &KernelWords) -> EventCounters {
        let [events, fragments, corrupt_fragments, decisions_set, payload_bytes, ..] = *words;
        EventCounters {
            events: events as u32,
            fragments: fragments as u32,
            corrupt_fragments: corrupt_fragments as u32,
            decisions_set: decisions_set as u32,
            payload_bytes,
        }
    }
}

/// The end of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The cookie of the command.
    pub cookie: u64,
    /// Position of the command since the ring was opened: 0, 1, 2, …
    pub index: u64,
    /// Region of the command.
    pub region: u32,
    /// Success, or the fault that ended the kernel. After a fault the result is undefined.
    pub outcome: Result<(), Fault>,
    /// Counters of the run, up to a fault: the kernel's first five result words.
    pub counters: EventCounters,
    /// Time that the kernel ran.
    pub busy: Duration,
}

impl Completion {
    /// Encodes the entry.
    pub fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let (cause, detail) = match self.outcome {
            Ok(()) => (0, 0),
            Err(fault) => (fault.cause.code(), fault.detail),
        };
        RawCompletion {
            cookie: self.cookie,
            index: self.index,
            cause,
            region: self.region,
            detail,
            events: self.counters.events,
            fragments: self.counters.fragments,
            corrupt_fragments: self.counters.corrupt_fragments,
            decisions_set: self.counters.decisions_set,
            payload_bytes: self.counters.payload_bytes,
            busy_ns: nanos(self.busy),
        }
        .to_bytes()
    }

    /// Decodes an entry.
    pub fn from_bytes(bytes: &[u8; ENTRY_BYTES]) -> Completion {
        let raw = RawCompletion::from_bytes(bytes);
        let outcome = match raw.cause {
            0 => Ok(()),
            code => Err(Fault::new(Cause::from_code(code), raw.detail)),
        };
        Completion {
            cookie: raw.cookie,
            index: raw.index,
            region: raw.region,
            outcome,
            counters: EventCounters {
                events: raw.events,
                fragments: raw.fragments,
                corrupt_fragments: raw.corrupt_fragments,
                decisions_set: raw.decisions_set,
                payload_bytes: raw.payload_bytes,
            },
            busy: Duration::from_nanos(raw.busy_ns),
        }
    }
}

/// A duration in whole nanoseconds, as encoded in registers and completions.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A rejected or failed operation: the cause and the offending value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause} ({detail:#x})")]
pub struct Fault {
    /// The cause.
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
    /// Its meaning.
    pub doc: &'static str,
}

macro_rules! causes {
    ($($code:literal $name:ident = $doc:literal, $detail:literal;)+) => {
        /// Why a command, or the rings, failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Cause {
            $(#[doc = concat!($doc, "; detail: ", $detail)] $name,)+
            /// A cause that this version does not know.
            Unknown(u32),
        }

        /// Every cause, for the documentation.
        pub const CAUSES: &[Code] = &[$(Code {
            code: $code,
            name: stringify!($name),
            doc: concat!($doc, "; detail: ", $detail),
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

        impl Cause {
            /// What happened.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Cause::$name => $doc,)+
                    Cause::Unknown(_) => "unknown cause",
                }
            }
        }

        impl fmt::Display for Cause {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Cause::Unknown(code) => write!(f, "unknown cause {code}"),
                    known => f.write_str(known.text()),
                }
            }
        }
    };
}

causes! {
    1 BadRingSlots = "number of ring slots is not a power of two, zero or too large", "`ring_slots`";
    2 BadRingAddress = "ring is misaligned or outside card memory", "base of the ring";
    3 RingsOverlap = "command ring and completion ring overlap", "`completion_base`";
    4 RingOverrun = "producer is further ahead of the consumer than the ring has slots", "`producer`";
    5 ReservedNotZero = "reserved field is not zero", "the field";
    6 UnknownKernel = "card has no kernel with this number", "the number";
    7 UnknownFlags = "kernel does not know these flags", "the flags";
    8 ArgsOutsideMemory = "arguments are outside card memory", "offset of the arguments";
    9 ArgsLength = "arguments have the wrong length", "length of the arguments";
    10 ResultOutsideMemory = "result is outside card memory", "offset of the result";
    11 ResultTooSmall = "range for the result is too small", "length of the range";
    12 EventCount = "number of events is zero or too large", "the number";
    13 SourceCount = "number of sources is zero or too large", "the number";
    14 PacketOutsideMemory = "packet is outside card memory", "offset of the packet";
    15 DuplicateSource = "two packets name the same source", "the source";
    16 TraceSourceMissing = "trace source has no packet", "the source";
    17 GeometryOutsideMemory = "geometry table is outside card memory", "offset of the table";
    18 GeometryEntry = "geometry table has an entry out of range", "offset of the entry in the table";
    19 DecisionsOutsideMemory = "decision maps are outside card memory", "offset of the maps";
    20 ResultsOverlap = "ranges of results overlap each other or an input", "offset of the result";
    21 EventNumberOverflow = "event numbers exceed 64 bits", "first event";
    22 Interrupted = "run was stopped", "zero";
    23 KernelFailed = "kernel panicked", "the kernel, or the region";
    24 KernelTrapped = "kernel trapped", "number of the trap, see docs/kernels.md";
    25 FuelExhausted = "kernel used up its fuel", "fuel granted";
    26 DeadlineExceeded = "kernel ran longer than its timeout", "the timeout (ns)";
    27 AccessViolation = "kernel accessed memory outside its banks", "offset of the access";
    28 KernelTooLarge = "kernel, or its memory, is too large", "its size (bytes)";
    29 KernelFormat = "no loader of this card recognises the image", "its first 8 bytes, or zero";
    30 KernelHash = "image does not have the hash in the control registers", "hash of the image";
    31 ImageOutsideMemory = "kernel image is outside card memory", "offset of the image";
    32 NoSuchBank = "card does not have all of these banks", "the banks";
    33 RegionBusy = "kernel of the region is running", "zero";
    34 RegionEmpty = "region has no kernel loaded", "zero";
    35 UnknownCommand = "unknown command code", "the doorbell";
    36 InvalidArgument = "kernel rejected an argument", "index of the argument word";
    37 NoSuchRegion = "card does not have the region", "number of the region";
    38 KernelNotResumable = "kernel cannot resume from these state words", "the first of them";
    39 DmaOperation = "DMA descriptor has an unknown operation", "the operation";
    40 DmaOutsideMemory = "DMA transfer is outside card memory", "offset of the range";
    41 DmaPeerNotConnected = "DMA descriptor names a peer that is not connected", "number of the peer";
    42 DmaRemoteAccess = "the peer denied the access: its key is invalid or does not cover the range", "zero";
    43 DmaPeerLost = "connection to the peer card lost", "zero";
    44 DmaRingOverrun = "DMA producer is further ahead of the consumer than the ring has slots", "`dma_producer`";
    45 PeerAddress = "address of a peer is not `host:port`", "number of the peer";
    46 PeerUnreachable = "peer could not be reached, or refused the connection", "number of the peer";
    47 LeaseExpired = "holder did not renew the lease", "epoch of the lease";
    48 LeaseRevoked = "lease was revoked", "epoch of the lease";
    49 HolderDisconnected = "connection of the lease holder ended", "epoch of the lease";
    50 InvalidLeaseWord = "lease word was written without permission", "the word";
    51 WindowRegistration = "device refused to register a window", "errno";
    52 BanksNotGranted = "kernel needs banks that the run was not granted", "the banks";
    53 MemoryFailed = "access to card memory failed", "error code of its driver";
    54 MemoryNotMapped = "kernel needs mapped memory, and this kind of card memory cannot be mapped", "the banks";
    55 KernelHung = "kernel did not reach a safe point; its region is out of service until it does", "time waited (ns)";
    56 GpuFailed = "GPU or its driver failed to run the kernel", "error code of the driver (`CUresult`)";
    57 WindowInUse = "a process that was stopped in the middle of a transfer keeps a window of the ended lease in use", "zero";
}

/// Defines an enumeration of values in registers or messages, and its table.
macro_rules! numbered {
    ($(#[$meta:meta])* $enum:ident $table:ident { $($code:literal $name:ident = $doc:literal;)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $enum {
            $(#[doc = $doc] $name = $code,)+
        }

        #[doc = concat!("Every value of [`", stringify!($enum), "`], for the documentation.")]
        pub const $table: &[$crate::command::Code] = &[$($crate::command::Code {
            code: $code,
            name: stringify!($name),
            doc: $doc,
        }),+];

        impl $enum {
            /// The value with this number, if there is one.
            pub const fn from_code(code: u32) -> Option<$enum> {
                match code {
                    $($code => Some($enum::$name),)+
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use numbered;

numbered! {
    /// State of the command queue.
    Status STATUSES {
    0 Starting = "the card is not ready yet";
    1 Closed = "no rings are open";
    2 Idle = "waiting for commands";
    3 Busy = "running a command";
    4 Faulted = "the rings failed, see `ring_fault`; a new configuration recovers";
    5 Stopped = "the card has ended";
    6 Hung = "a command is hung; rings can be opened when it has ended";
}}

/// Defines the bits of a register or field, one constant each, and their table.
macro_rules! bits {
    ($(#[$meta:meta])* $table:ident: $type:ident { $($bit:literal $name:ident = $doc:literal;)+ }) => {
        $(
            #[doc = concat!("Bit ", $bit, ": ", $doc, ".")]
            pub const $name: $type = 1 << $bit;
        )+

        $(#[$meta])*
        pub const $table: &[$crate::command::Code] = &[$($crate::command::Code {
            code: 1 << $bit,
            name: stringify!($name),
            doc: $doc,
        }),+];
    };
}

pub(crate) use bits;

bits! {
    /// Every bit of `capabilities`, for the documentation.
    CAPABILITIES: u64 {
        0 CAPABILITY_INTERRUPT_FD = "completions can signal a file descriptor (`interrupt_arm`)";
        1 CAPABILITY_VECTOR = "the kernels use the vector unit of the processor";
        2 CAPABILITY_NETWORK = "the card has a verbs device and serves clients over the network";
        3 CAPABILITY_POLLING = "the card polls its doorbells; without it, a doorbell over RDMA needs immediate data";
    }
}

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
            region: u32, flags: u32, args: (u64, u64), result: (u64, u64), cookie: u64,
        ) {
            let descriptor = Descriptor {
                region,
                flags,
                args: MemoryRange::new(args.0, args.1),
                result: MemoryRange::new(result.0, result.1),
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
                region: small[0],
                outcome: match cause {
                    0 => Ok(()),
                    code => Err(Fault::new(Cause::from_code(code), detail)),
                },
                counters: EventCounters {
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
