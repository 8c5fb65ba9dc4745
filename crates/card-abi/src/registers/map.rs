//! The list of registers: every register of BAR0, once.
//!
//! [`Registers`] and [`Region`] get an accessor per line; [`BLOCKS`] is what `docs/registers.md` and the C
//! header are written from. BAR0 is laid out by who may write, in pages, because a page is the finest grain
//! of what a card registers with its adapter:
//!
//! | from | what | remote access |
//! |---|---|---|
//! | 0x0000 | the card, its rings for local users | read |
//! | 0x1000 | kernel directory | read |
//! | 0x2000 | lease words | read, atomics, for every node |
//! | 0x4000 | monitoring and progress | read |
//! | 0x5000 | copy descriptors | read and write for the holder of the lease |
//! | 0x7000 | control | read and write for the holder of the lease |
//! | 0x8000 | control of each region | read and write for the holder of the lease |
//! | 0x9000 | state of each region | read |
//! | 0xa000 | which chunks of memory were ever written | read |
//! | 0xb000 | what became of copies, by slot | read |

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::{Block, Group, Region, Register, Registers, Width, Writer};

/// Most banks that a card has: a kernel's banks are the bits of one word.
pub const MAX_BANKS: u32 = 64;

/// Most regions that a card has.
pub const MAX_REGIONS: usize = 8;

/// Argument, result, resume and state words of a region each.
pub const WORDS: usize = 16;

/// Most peers of a card: other cards that it copies to and from.
pub const MAX_PEERS: usize = 8;

/// Slots of the ring of copy descriptors in BAR0.
pub const COPY_SLOTS: usize = 256;

/// First byte of the lease words in BAR0.
pub const LEASE_PAGE: Range<usize> = 0x2000..0x3000;

/// What the holder of the lease may write.
pub const CONTROL_WINDOW: Range<usize> = 0x5000..0x9000;

/// First byte of the addresses of peers: [`PEER_BYTES`] for each.
pub const PEER_TABLE: usize = 0x7100;

/// One entry of the table of peers: `host:port` as text, padded with zeros.
pub const PEER_BYTES: usize = 64;

/// First byte of the ring of copy descriptors.
pub const COPY_RING: usize = 0x5000;

/// One copy descriptor [bytes]; two to a cache line, which is what bringing them from the node that writes them costs.
pub const COPY_BYTES: usize = 32;

/// First byte of the control registers of region 0.
pub const REGION_CONTROL: usize = 0x8000;

/// First byte of the state registers of region 0.
pub const REGION_STATE: usize = 0x9000;

/// From a region's registers to those of the next one.
pub const REGION_STRIDE: usize = 0x200;

/// Chunks of memory that `written_chunks` has a bit for.
pub const MAX_CHUNKS: usize = 0x1000 * 8;

macro_rules! register_map {
    ($blocks:ident for $owner:ty, $at:ident { $($title:literal { $(
        $offset:literal $name:ident: $width:tt $writer:ident = $($doc:literal)+;
    )+ })+ }) => {
        /// Registers by group; offsets as the accessors count them.
        pub const $blocks: &[Group] = &[$(Group {
            title: $title,
            registers: &[$(Register {
                offset: $offset,
                name: stringify!($name),
                width: register_map!(@width $width),
                count: register_map!(@count $width),
                writer: Writer::$writer,
                doc: concat!($($doc),+),
            }),+],
        }),+];

        impl $owner {
            $($( register_map!(@accessor $width $offset $name $($doc)+); )+)+
        }

        /// Offsets of registers, by name.
        #[allow(non_upper_case_globals, reason = "named like the registers")]
        pub mod $at {
            $($( #[doc = concat!($($doc),+)] pub const $name: usize = $offset; )+)+
        }
    };
    (@width U32) => { Width::U32 };
    (@width U64) => { Width::U64 };
    (@width [U32; $n:expr]) => { Width::U32 };
    (@width [U64; $n:expr]) => { Width::U64 };
    (@count U32) => { 1 };
    (@count U64) => { 1 };
    (@count [$w:ident; $n:expr]) => { $n as usize };
    (@accessor U32 $offset:literal $name:ident $($doc:literal)+) => {
        #[doc = concat!($($doc),+)]
        pub fn $name(&self) -> &AtomicU32 { self.word32($offset) }
    };
    (@accessor U64 $offset:literal $name:ident $($doc:literal)+) => {
        #[doc = concat!($($doc),+)]
        pub fn $name(&self) -> &AtomicU64 { self.word64($offset) }
    };
    (@accessor [U32; $n:expr] $offset:literal $name:ident $($doc:literal)+) => {
        #[doc = concat!($($doc),+)]
        ///
        /// # Panics
        /// If there is no such word.
        pub fn $name(&self, index: usize) -> &AtomicU32 {
            assert!(index < $n as usize, "register {} has {} words", stringify!($name), $n);
            self.word32($offset + 4 * index)
        }
    };
    (@accessor [U64; $n:expr] $offset:literal $name:ident $($doc:literal)+) => {
        #[doc = concat!($($doc),+)]
        ///
        /// # Panics
        /// If there is no such word.
        pub fn $name(&self, index: usize) -> &AtomicU64 {
            assert!(index < $n as usize, "register {} has {} words", stringify!($name), $n);
            self.word64($offset + 8 * index)
        }
    };
}

register_map! { REGISTERS for Registers, at {
    "Identity" {
        0x000 magic: U64 Card = "The bytes `MSTRCARD`, written last: a card whose magic is right "
            "is complete.";
        0x008 version: U32 Card = "Version of this map and of the command format.";
        0x00c process: U32 Card = "Process id of an emulated card.";
        0x010 capabilities: U64 Card = "What this card can do, one bit each; see Capabilities.";
        0x018 memory_bytes: U64 Card = "Size of card memory [bytes].";
        0x020 bank_bytes: U64 Card = "Size of one memory bank [bytes].";
        0x028 bank_count: U32 Card = "Number of memory banks; bank `i` starts at `i` × `bank_bytes`.";
        0x02c kernel_count: U32 Card = "Entries of the kernel directory.";
        0x030 region_count: U32 Card = "Regions that kernels can be loaded into.";
        0x034 memory_kind: U32 Card = "What card memory is made of; see Kinds of memory.";
        0x038 card_id: U64 Card = "Number that tells this card from all others, drawn at its start.";
    }
    "State" {
        0x040 status: U32 Card = "What the card does now; see Status.";
        0x044 error_cause: U32 Card = "Cause of the latest error; see Causes.";
        0x048 error_detail: U64 Card = "The offending value of the latest error.";
        0x050 errors: U64 Card = "Errors since the card started.";
        0x058 heartbeat: U64 Card = "Grows while the card is alive: with each event that a kernel "
            "handles and at least every heartbeat period while it waits.";
        0x060 command_limit_ns: U64 Card = "Longest time of one command of the rings unless their user sets another [ns].";
    }
    "Ring configuration" {
        0x080 command_base: U64 User = "Place of the command ring in card memory [bytes], a "
            "multiple of 64.";
        0x088 completion_base: U64 User = "Place of the completion ring in card memory [bytes], a "
            "multiple of 64.";
        0x090 ring_slots: U32 User = "Entries of each of the two rings, a power of two.";
        0x094 ring_generation: U32 User = "Any new non-zero value makes the card read this "
            "configuration and start over with empty rings; zero closes the rings. Ring the "
            "doorbell afterwards.";
        0x098 command_deadline_ns: U64 User = "Longest time of one command [ns], zero: `command_limit_ns`. Looked at when "
            "a command begins.";
    }
    "Doorbell" {
        0x0c0 producer: U64 User = "Commands written since the ring was opened.";
        0x0c8 doorbell: U32 User = "Add one after each change of `producer` or of the "
            "configuration; then, if `sleeping` is set, wake the word as a shared futex.";
        0x0cc interrupt_waiters: U32 Both = "Number of processes that sleep on `interrupt`; zero "
            "saves the card a system call per completion.";
        0x0d0 interrupt_arm: U32 Both = "Set to one for one signal on the interrupt descriptor at "
            "the next completion; the card clears it.";
    }
    "Ring progress" {
        0x100 ring_active: U32 Card = "The `ring_generation` that the card has taken up.";
        0x104 ring_fault: U32 Card = "Why the rings of `ring_active` do not run, zero if they do; "
            "see Causes.";
        0x108 consumer: U64 Card = "Commands fetched since the ring was opened.";
        0x110 completed: U64 Card = "Completion entries written since the ring was opened; entry "
            "`n` is at `n` modulo `ring_slots`.";
        0x118 interrupt: U32 Card = "Changes with every completion and every change of the rings; "
            "wait on it as a shared futex.";
        0x11c sleeping: U32 Card = "One while the card sleeps on `doorbell`.";
    }
    "Performance counters" {
        0x140 commands: U64 Card = "Commands completed, failed ones included.";
        0x148 failed_commands: U64 Card = "Commands completed with an error.";
        0x150 events: U64 Card = "Events that kernels have handled.";
        0x158 fragments: U64 Card = "Fragments that kernels have found for them.";
        0x160 payload_bytes: U64 Card = "Payload of the fragments that kernels have read [bytes].";
        0x168 corrupt_fragments: U64 Card = "Fragments whose checksum was wrong.";
        0x170 decisions_set: U64 Card = "Decision bits that kernels have set.";
        0x178 kernel_busy_ns: U64 Card = "Time that kernels ran [ns].";
        0x180 doorbells: U64 Card = "Rings of the doorbell that the card has noticed.";
        0x188 interrupts: U64 Card = "Interrupts raised.";
    }
    "Lease words (0x2000, for every node)" {
        0x2000 lease_word: U64 Both = "High half: epoch, low half: number of the node that holds the "
            "lease, zero if nobody does. Taken by compare-and-swap from (epoch, 0) to (epoch, node); "
            "the card raises the epoch when the lease ends.";
        0x2008 lease_revoke: U64 Both = "Write the epoch of a lease here to end it.";
    }
    "Lease" {
        0x4000 lease_epoch: U64 Card = "Epoch of the lease that runs now, or of the next one.";
        0x4008 lease_holder: U32 Card = "Node that holds the lease, zero: nobody.";
        0x400c lease_state: U32 Card = "See Lease states.";
        0x4010 lease_expires_ns: U64 Card = "When the lease ends unless its holder's heartbeat changes, "
            "by `clock_ns`.";
        0x4018 lease_default_ns: U64 Card = "Time from a heartbeat to the end of the lease unless the "
            "holder asks for another.";
        0x4020 leases: U64 Card = "Leases that nodes have held.";
        0x4028 lease_end_cause: U32 Card = "Why the latest lease ended; see Causes, zero: given back.";
        0x402c lease_nodes: U32 Card = "Nodes connected.";
        0x4030 lease_refusals: U64 Card = "Lease words that the card took back because no node may write them.";
    }
    "Monitoring" {
        0x4080 clock_ns: U64 Card = "Time of the card [ns], from some start; runs with its heartbeat.";
        0x4088 sensors: U32 Card = "Which of the following are known, and from where; see Sensors.";
        0x408c temperature_mdeg: U32 Card = "Temperature [0.001 °C].";
        0x4090 power_mw: U32 Card = "Power [mW].";
        0x4098 energy_uj: U64 Card = "Energy since the card started [µJ].";
        0x40a0 card_state: U32 Card = "See Card states.";
        0x40a8 card_taken: U64 Card = "The latest `card_command` that was carried out.";
        0x40b0 card_cause: U32 Card = "Why it failed, zero if it did not; see Causes.";
        0x40b8 memory_written_bytes: U64 Card = "Memory that was ever written since the latest clearing, at "
            "the latest pause [bytes].";
        0x40c0 chunk_bytes: U64 Card = "Memory per bit of `written_chunks` [bytes].";
        0x40c8 messages_sent: U64 Card = "Messages sent to nodes (interrupts over the network).";
        0x40d0 messages_lost: U64 Card = "Messages that could not be sent, because the node had gone or "
            "did not take them.";
        0x40d8 doorbells_by_message: U64 Card = "Doorbells that came with immediate data.";
        0x40e0 regions_lost: U64 Card = "Kernels that were given up because they did not end.";
    }
    "Copies between cards" {
        0x4140 copy_consumer: U64 Card = "Copy descriptors fetched.";
        0x4148 copy_completed: U64 Card = "Copy descriptors completed.";
        0x4150 copies_failed: U64 Card = "Of them, with an error.";
        0x4158 copy_bytes: U64 Card = "Bytes copied.";
        0x4160 copy_busy_ns: U64 Card = "Time with a copy outstanding [ns].";
        0x4168 copy_watching: U32 Card = "One while the card looks at `copy_producer` by itself. Read it after a "
            "write of `copy_producer`: if it is zero, the card needs immediate data to notice at once.";
        0x41c0 peer_state: [U32; MAX_PEERS] Card = "By peer; see Peer states.";
        0x41e0 peer_cause: [U32; MAX_PEERS] Card = "By peer: why it could not be reached.";
    }
    "Bytes by window and bank" {
        0x4400 bank_written: [U64; MAX_BANKS] Card = "By bank: written by kernels that count and by copies "
            "[bytes].";
        0x4600 bank_read: [U64; MAX_BANKS] Card = "By bank: read by them [bytes].";
        0x4800 window_written: [U64; MAX_BANKS] Card = "By bank: written through BAR4 by nodes, as they report "
            "with their heartbeat [bytes].";
        0x4a00 window_read: [U64; MAX_BANKS] Card = "By bank: read by them [bytes].";
        0x4c00 dma_written: U64 Card = "Written to the DMA window, BAR2, by copies [bytes].";
        0x4c08 dma_read: U64 Card = "Read from it by them [bytes].";
        0x4c10 dma_window_written: U64 Card = "Written through BAR2 by nodes, as they report [bytes].";
        0x4c18 dma_window_read: U64 Card = "Read by them [bytes].";
    }
    "Control (0x7000, for the holder of the lease)" {
        0x7000 lease_heartbeat: U64 User = "Any change keeps the lease.";
        0x7008 lease_duration_ns: U64 User = "Time from a heartbeat to the end of the lease that the "
            "holder wishes, zero: the card's default; at most an hour.";
        0x7010 lease_release: U64 User = "Write the epoch of the lease to give it back.";
        0x7018 lease_hand_over: U64 User = "Number of the node that is to hold the lease from now on, zero: as it "
            "is. Whoever has the key may write it; messages go to the new holder.";
        0x7020 lease_detached: U64 User = "Non-zero: the lease does not end with the connection of its holder.";
        0x7040 card_command: U64 User = "Low 8 bits: see Card commands; the rest: a number that was not "
            "used before. The card answers in `card_taken`.";
        0x7080 copy_producer: U64 User = "Copy descriptors written.";
        0x7088 peer_command: U64 User = "Low 8 bits: connect the peer with this number by its address in the "
            "table; the rest: a number that was not used before.";
        0x7b00 report_written: [U64; MAX_BANKS] User = "By bank: what the holder wrote since its lease began "
            "[bytes].";
        0x7d00 report_read: [U64; MAX_BANKS] User = "By bank: what the holder read [bytes].";
        0x7f00 report_dma_written: U64 User = "What the holder wrote through BAR2 since its lease began [bytes].";
        0x7f08 report_dma_read: U64 User = "What it read [bytes].";
    }
    "Written chunks" {
        0xa000 written_chunks: [U64; 512] Card = "A bit per chunk of memory, set if it was ever written; as "
            "of the latest pause. What is not set reads as zeros.";
    }
    "Outcome of copies" {
        0xb000 copy_cause: [U32; COPY_SLOTS] Card = "By slot: why the latest copy failed, zero if it did "
            "not; see Causes.";
        0xb400 copy_detail: [U64; COPY_SLOTS] Card = "By slot: the offending value.";
    }
}}

register_map! { REGION_CONTROL_REGISTERS for Region<'_>, control_at {
    "Control of a region" {
        0x000 kernel: U64 User = "Number of a kernel of the directory, or zero: the image that follows.";
        0x008 image_base: U64 User = "Where the kernel's image is in card memory [bytes].";
        0x010 image_bytes: U64 User = "Its length [bytes].";
        0x018 image_hash: U64 User = "First 8 bytes of its SHA-256, little-endian; zero: not checked.";
        0x020 banks: U64 User = "A bit per bank that the kernel may use.";
        0x028 fuel: U64 User = "Most units of work of one run, for kernels that count; zero: no limit.";
        0x030 deadline_ns: U64 User = "Longest time of one run [ns]; zero: no limit.";
        0x040 arguments: [U64; WORDS] User = "What the kernel is to do; its own documentation says how.";
        0x0c0 resume: [U64; WORDS] User = "State words of another run, to go on from.";
        0x140 doorbell: U64 User = "Low 8 bits: see Region commands; the rest: a number that was not used "
            "before. Written last, in one write of 8 bytes.";
    }
}}

register_map! { REGION_STATE_REGISTERS for Region<'_>, state_at {
    "State of a region" {
        0x1000 taken: U64 Card = "The latest `doorbell` that was taken up, published when its command has "
            "been carried out or, for a start, has begun.";
        0x1008 status: U32 Card = "See Region states.";
        0x100c cause: U32 Card = "Why the latest command or run failed, zero if it did not; see Causes.";
        0x1010 detail: U64 Card = "The offending value.";
        0x1018 loaded_kernel: U64 Card = "Number of the kernel loaded, zero: none, or from an image.";
        0x1020 loaded_hash: U64 Card = "First 8 bytes of the SHA-256 of the image loaded, or of a built-in "
            "kernel's name.";
        0x1028 runs: U64 Card = "Runs that have ended.";
        0x1030 failed_runs: U64 Card = "Of them, with an error.";
        0x1038 busy_ns: U64 Card = "Time that runs took [ns].";
        0x1040 progress: U64 Card = "What the run has done so far, in the kernel's own measure.";
        0x1048 fuel_used: U64 Card = "Units of work of the latest run, for kernels that count.";
        0x1050 safe_points: U64 Card = "Safe points reached.";
        0x1058 region_sleeping: U32 Card = "One while the region sleeps and a doorbell needs to wake it.";
        0x1080 results: [U64; WORDS] Card = "What the latest run says.";
        0x1100 state: [U64; WORDS] Card = "At the latest safe point: what the kernel needs to go on from "
            "there.";
        0x1180 name: [U64; 4] Card = "Name of the kernel loaded, text, padded with zeros.";
    }
}}

/// Offsets of a region's registers, by name, from [`REGION_CONTROL`] plus the region times
/// [`REGION_STRIDE`].
pub mod region_at {
    pub use super::control_at::*;
    pub use super::state_at::*;
}

/// All of BAR0: what `docs/registers.md` and the C header are written from.
pub const BLOCKS: &[Block] = &[
    Block { title: "Registers", name: "", base: 0, stride: 0, count: 1, groups: REGISTERS },
    Block {
        title: "Regions",
        name: "region",
        base: REGION_CONTROL,
        stride: REGION_STRIDE,
        count: MAX_REGIONS,
        groups: REGION_CONTROL_REGISTERS,
    },
    Block {
        title: "Regions",
        name: "region",
        base: REGION_CONTROL,
        stride: REGION_STRIDE,
        count: MAX_REGIONS,
        groups: REGION_STATE_REGISTERS,
    },
];

const _: () = assert!(COPY_RING == CONTROL_WINDOW.start && COPY_RING + COPY_SLOTS * COPY_BYTES <= 0x7000);
const _: () = assert!(REGION_STATE - REGION_CONTROL == 0x1000 && MAX_REGIONS * REGION_STRIDE == 0x1000);
