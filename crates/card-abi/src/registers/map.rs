//! The list of registers: every register of BAR0, once.
//!
//! The list generates an accessor of [`Registers`] or [`Region`] per line. [`BLOCKS`] generates
//! `docs/registers.md` and the C header. A page is the unit of memory registration, so registers are grouped
//! in pages by write permission:
//!
//! | from | content | remote access |
//! |---|---|---|
//! | 0x0000 | identity, command queue of local users | read |
//! | 0x1000 | kernel directory | read |
//! | 0x2000 | lease words | read and atomics, for every client |
//! | 0x4000 | lease, monitoring, counters | read |
//! | 0x5000 | DMA descriptors | read and write for the holder of the lease |
//! | 0x7000 | control | read and write for the holder of the lease |
//! | 0x8000 | control of each region | read and write for the holder of the lease |
//! | 0x9000 | state of each region | read |
//! | 0xa000 | dirty bitmap | read |
//! | 0xb000 | DMA status by slot | read |

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::{Block, Group, Region, Register, Registers, Width, Writer};

/// Most banks of a card: a kernel's banks are the bits of one word.
pub const MAX_BANKS: u32 = 64;

/// Most regions of a card.
pub const MAX_REGIONS: usize = 8;

/// Number of argument, result and state words of a region each.
pub const KERNEL_WORDS: usize = 16;

/// Argument, result or state words of a region.
pub type KernelWords = [u64; KERNEL_WORDS];

/// Most peers of a card: other cards that its DMA engine reaches.
pub const MAX_PEERS: usize = 8;

/// Slots of the ring of DMA descriptors in BAR0.
pub const DMA_RING_SLOTS: usize = 256;

/// The page of the lease words in BAR0.
pub const LEASE_PAGE: Range<usize> = 0x2000..0x3000;

/// The range of BAR0 that the holder of the lease may write.
pub const CONTROL_WINDOW: Range<usize> = 0x5000..0x9000;

/// Offset of the peer table: [`PEER_BYTES`] per peer.
pub const PEER_TABLE: usize = 0x7100;

/// One entry of the peer table: `host:port` as text, padded with zeros.
pub const PEER_BYTES: usize = 64;

/// Offset of the ring of DMA descriptors.
pub const DMA_RING: usize = 0x5000;

/// Size of a DMA descriptor (bytes). Two descriptors share a cache line, the unit in which the card fetches them.
pub const DMA_DESCRIPTOR_BYTES: usize = 32;

/// Offset of the control registers of region 0.
pub const REGION_CONTROL: usize = 0x8000;

/// Offset of the state registers of region 0.
pub const REGION_STATE: usize = 0x9000;

/// Distance from a region's registers to those of the next one.
pub const REGION_STRIDE: usize = 0x200;

/// Number of bits of the dirty bitmap.
pub const MAX_CHUNKS: usize = 0x1000 * 8;

macro_rules! register_map {
    ($blocks:ident for $owner:ty, $at:ident { $($title:literal { $(
        $offset:literal $name:ident: $width:tt $writer:ident = $($doc:literal)+;
    )+ })+ }) => {
        /// Registers by group.
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
        #[inline]
        pub fn $name(&self) -> &AtomicU32 { self.word32($offset) }
    };
    (@accessor U64 $offset:literal $name:ident $($doc:literal)+) => {
        #[doc = concat!($($doc),+)]
        #[inline]
        pub fn $name(&self) -> &AtomicU64 { self.word64($offset) }
    };
    (@accessor [U32; $n:expr] $offset:literal $name:ident $($doc:literal)+) => {
        #[doc = concat!($($doc),+)]
        ///
        /// # Panics
        /// If there is no such word.
        #[inline]
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
        #[inline]
        pub fn $name(&self, index: usize) -> &AtomicU64 {
            assert!(index < $n as usize, "register {} has {} words", stringify!($name), $n);
            self.word64($offset + 8 * index)
        }
    };
}

register_map! { REGISTERS for Registers, at {
    "Identity" {
        0x000 magic: U64 Card = "The bytes `MSTRCARD`, written last: a card with this magic is initialised.";
        0x008 version: U32 Card = "Version of this map and of the command format.";
        0x00c pid: U32 Card = "Process id of the card process.";
        0x010 capabilities: U64 Card = "Capability bits; see Capabilities.";
        0x018 memory_bytes: U64 Card = "Size of card memory (bytes).";
        0x020 bank_bytes: U64 Card = "Size of one memory bank (bytes).";
        0x028 bank_count: U32 Card = "Number of memory banks; bank `i` starts at `i` × `bank_bytes`.";
        0x02c kernel_count: U32 Card = "Entries of the kernel directory.";
        0x030 region_count: U32 Card = "Number of regions.";
        0x034 memory_kind: U32 Card = "Kind of card memory; see Memory kinds.";
        0x038 card_id: U64 Card = "Random number that identifies the card, chosen at its start.";
    }
    "State" {
        0x040 status: U32 Card = "State of the command queue; see Status.";
        0x044 error_cause: U32 Card = "Cause of the latest error; see Causes.";
        0x048 error_detail: U64 Card = "Offending value of the latest error.";
        0x050 errors: U64 Card = "Errors since the card started.";
        0x058 heartbeat: U64 Card = "Changes while the card is alive: with each event that a kernel "
            "processes, and at least every heartbeat period.";
        0x060 default_command_timeout_ns: U64 Card = "Longest time of one command unless `command_timeout_ns` is set (ns).";
    }
    "Ring configuration" {
        0x080 command_base: U64 User = "Offset of the command ring in card memory (bytes), a multiple of 64.";
        0x088 completion_base: U64 User = "Offset of the completion ring in card memory (bytes), a "
            "multiple of 64.";
        0x090 ring_slots: U32 User = "Entries of each of the two rings, a power of two.";
        0x094 ring_generation: U32 User = "A new non-zero value makes the card read this configuration and "
            "start with empty rings; zero closes the rings. Ring the doorbell afterwards.";
        0x098 command_timeout_ns: U64 User = "Longest time of one command (ns); zero: "
            "`default_command_timeout_ns`. The card reads it when a command begins.";
    }
    "Doorbell" {
        0x0c0 producer: U64 User = "Commands written since the rings were opened.";
        0x0c8 doorbell: U32 User = "Increment it after each change of `producer` or of the "
            "configuration; then, if `sleeping` is set, wake the word as a shared futex.";
        0x0cc interrupt_waiters: U32 Both = "Number of processes that sleep on `interrupt_sequence`. At zero the "
            "card saves a system call per completion.";
        0x0d0 interrupt_arm: U32 Both = "Set to one for one signal on the interrupt descriptor at "
            "the next completion; the card clears it.";
    }
    "Ring progress" {
        0x100 ring_active: U32 Card = "The `ring_generation` that the card serves.";
        0x104 ring_fault: U32 Card = "Why the card does not serve these rings, zero if it does; see Causes.";
        0x108 consumer: U64 Card = "Commands fetched since the rings were opened.";
        0x110 completed: U64 Card = "Completion entries written since the rings were opened; entry "
            "`n` is at `n` modulo `ring_slots`.";
        0x118 interrupt_sequence: U32 Card = "Changes with every completion and every change of the rings; "
            "wait on it as a shared futex.";
        0x11c sleeping: U32 Card = "One while the card sleeps on `doorbell`.";
    }
    "Performance counters" {
        0x140 commands: U64 Card = "Commands completed, including failed ones.";
        0x148 failed_commands: U64 Card = "Commands completed with an error.";
        0x150 events: U64 Card = "Events that commands have processed.";
        0x158 fragments: U64 Card = "Fragments found for these events.";
        0x160 payload_bytes: U64 Card = "Payload of the fragments read (bytes).";
        0x168 corrupt_fragments: U64 Card = "Fragments with a wrong checksum.";
        0x170 decisions_set: U64 Card = "Decision bits set.";
        0x178 kernel_busy_ns: U64 Card = "Time that commands ran (ns).";
        0x180 doorbells: U64 Card = "Doorbells seen.";
        0x188 interrupts: U64 Card = "Interrupts raised.";
    }
    "Lease words (0x2000, for every client)" {
        0x2000 lease_word: U64 Both = "High half: epoch, low half: id of the client that holds the "
            "lease, zero if the card is free. A client acquires the lease by compare-and-swap from (epoch, 0) to "
            "(epoch, id). The card increments the epoch at the end of the lease.";
        0x2008 lease_revoke: U64 Both = "Write the epoch of a lease to end it.";
    }
    "Lease" {
        0x4000 lease_epoch: U64 Card = "Epoch of the current lease, or of the next one.";
        0x4008 lease_holder: U32 Card = "Id of the client that holds the lease, zero: none.";
        0x400c lease_state: U32 Card = "See Lease states.";
        0x4010 lease_expires_ns: U64 Card = "When the lease expires without a further heartbeat, by `clock_ns`.";
        0x4018 lease_default_ns: U64 Card = "Time from a heartbeat to the expiry of the lease, unless the "
            "holder sets another one (ns).";
        0x4020 lease_grants: U64 Card = "Leases granted.";
        0x4028 lease_end_cause: U32 Card = "Why the latest lease ended; see Causes, zero: released.";
        0x402c client_count: U32 Card = "Connected clients.";
        0x4030 lease_rejects: U64 Card = "Invalid lease words that the card overwrote.";
        0x4038 clients_refused: U64 Card = "Connections on the network that ended before the client was accepted: "
            "too many, too slow, or not of a client.";
    }
    "Monitoring" {
        0x4080 clock_ns: U64 Card = "Clock of the card, since its start (ns).";
        0x4088 sensors: U32 Card = "Which sensor registers are valid, and their origin; see Sensors.";
        0x408c temperature_mdeg: U32 Card = "Temperature [0.001 °C].";
        0x4090 power_mw: U32 Card = "Power (mW).";
        0x4098 energy_uj: U64 Card = "Energy since the card started (µJ).";
        0x40a0 card_state: U32 Card = "See Card states.";
        0x40a8 card_command_ack: U64 Card = "The latest `card_command` that was executed.";
        0x40b0 card_command_cause: U32 Card = "Cause of its failure, zero if it succeeded; see Causes.";
        0x40b8 dirty_bytes: U64 Card = "Memory written since it was last cleared (bytes), as of the latest pause.";
        0x40c0 dirty_chunk_bytes: U64 Card = "Memory per bit of `dirty_bitmap` (bytes).";
        0x40c8 messages_sent: U64 Card = "Messages sent to clients (interrupts over the network).";
        0x40d0 messages_dropped: U64 Card = "Messages dropped, because the client had disconnected or had no receive posted.";
        0x40d8 immediate_doorbells: U64 Card = "Doorbells received as immediate data.";
        0x40e0 hung_kernels: U64 Card = "Kernels declared hung.";
    }
    "DMA engine" {
        0x4140 dma_consumer: U64 Card = "DMA descriptors fetched.";
        0x4148 dma_completed: U64 Card = "DMA descriptors completed, including failed ones.";
        0x4150 dma_failed: U64 Card = "DMA descriptors completed with an error.";
        0x4158 dma_bytes: U64 Card = "Bytes transferred.";
        0x4160 dma_busy_ns: U64 Card = "Time with a transfer outstanding (ns).";
        0x4168 dma_polling: U32 Card = "One while the engine polls `dma_producer`. Read it after a write of "
            "`dma_producer`; if it is zero, ring by immediate data.";
        0x41c0 peer_state: [U32; MAX_PEERS] Card = "By peer; see Peer states.";
        0x41e0 peer_cause: [U32; MAX_PEERS] Card = "By peer: cause of its failed connection; see Causes.";
    }
    "Traffic by BAR and bank" {
        0x4400 bank_written: [U64; MAX_BANKS] Card = "By bank: written by kernels that count traffic, and by the DMA "
            "engine (bytes).";
        0x4600 bank_read: [U64; MAX_BANKS] Card = "By bank: bytes read by kernels and DMA (bytes).";
        0x4800 bank_rdma_written: [U64; MAX_BANKS] Card = "By bank: written by clients through BAR4, as they report "
            "with their heartbeat (bytes).";
        0x4a00 bank_rdma_read: [U64; MAX_BANKS] Card = "By bank: bytes read by clients through BAR4 (bytes).";
        0x4c00 bar2_written: U64 Card = "Written to BAR2 by the DMA engine (bytes).";
        0x4c08 bar2_read: U64 Card = "Read from BAR2 by the DMA engine (bytes).";
        0x4c10 bar2_rdma_written: U64 Card = "Written by clients through BAR2, as they report (bytes).";
        0x4c18 bar2_rdma_read: U64 Card = "Read by clients through BAR2, as they report (bytes).";
    }
    "Control (0x7000, for the holder of the lease)" {
        0x7000 lease_heartbeat: U64 User = "Any change renews the lease.";
        0x7008 lease_duration_ns: U64 User = "Time from a heartbeat to the expiry of the lease (ns), at most seven "
            "days; zero: `lease_default_ns`.";
        0x7010 lease_release: U64 User = "Write the epoch of the lease to release it.";
        0x7018 lease_transfer: U64 User = "Id of the client that holds the lease from now on, zero: no transfer. "
            "Any process with the control key may write it; messages go to the new holder.";
        0x7020 lease_detached: U64 User = "Non-zero: the lease outlives the connection of its holder.";
        0x7028 lease_accesses: U64 User = "Accesses to mapped card memory in progress, counted by processes of the "
            "card's host. The card clears memory when it is zero, or after the grace period.";
        0x7040 card_command: U64 User = "Low 8 bits: see Card commands; the rest: an unused sequence number. "
            "The card answers in `card_command_ack`.";
        0x7080 dma_producer: U64 User = "DMA descriptors written.";
        0x7088 peer_command: U64 User = "Low 8 bits: number of the peer to connect, by its address in the "
            "peer table; the rest: an unused sequence number.";
        0x7b00 report_written: [U64; MAX_BANKS] User = "By bank: bytes written by the holder since its lease began "
            "(bytes).";
        0x7d00 report_read: [U64; MAX_BANKS] User = "By bank: bytes read by the holder (bytes).";
        0x7f00 report_bar2_written: U64 User = "Bytes written by the holder through BAR2 since its lease began.";
        0x7f08 report_bar2_read: U64 User = "Bytes read by the holder through BAR2 since its lease began.";
    }
    "Dirty bitmap" {
        0xa000 dirty_bitmap: [U64; 512] Card = "One bit per chunk of memory, set if it was written since memory was "
            "last cleared, as of the latest pause. Chunks with a clear bit read as zeros.";
    }
    "DMA status" {
        0xb000 dma_cause: [U32; DMA_RING_SLOTS] Card = "By ring slot: why the latest transfer failed, zero if it "
            "succeeded; see Causes.";
        0xb400 dma_detail: [U64; DMA_RING_SLOTS] Card = "By ring slot: the offending value.";
    }
}}

register_map! { REGION_CONTROL_REGISTERS for Region<'_>, control_at {
    "Control of a region" {
        0x000 kernel: U64 User = "Number of a kernel of the directory; zero: the image that follows.";
        0x008 image_base: U64 User = "Offset of the kernel's image in card memory (bytes).";
        0x010 image_bytes: U64 User = "Length of the image (bytes).";
        0x018 image_hash: U64 User = "First 8 bytes of its SHA-256, little-endian; zero: not checked.";
        0x020 banks: U64 User = "One bit per bank that the kernel may use.";
        0x028 fuel: U64 User = "Limit of the work of one run, in units of the kernel; zero: none.";
        0x030 run_timeout_ns: U64 User = "Longest time of one run (ns); zero: no limit.";
        0x040 arguments: [U64; KERNEL_WORDS] User = "Arguments of the kernel, which defines their meaning.";
        0x0c0 resume_state: [U64; KERNEL_WORDS] User = "State words of another run, for `Resume`.";
        0x140 doorbell: U64 User = "Low 8 bits: see Region commands; the rest: an unused sequence number. "
            "Written last, in one write of 8 bytes.";
    }
}}

register_map! { REGION_STATE_REGISTERS for Region<'_>, state_at {
    "State of a region" {
        0x1000 doorbell_ack: U64 Card = "The latest `doorbell` that was executed; for a start: that has begun.";
        0x1008 status: U32 Card = "See Region states.";
        0x100c cause: U32 Card = "Why the latest command or run failed, zero if it succeeded; see Causes.";
        0x1010 detail: U64 Card = "The offending value.";
        0x1018 loaded_kernel: U64 Card = "Number of the loaded kernel, zero: none, or from an image.";
        0x1020 loaded_hash: U64 Card = "First 8 bytes of the SHA-256 of the loaded image, or of a built-in "
            "kernel's name.";
        0x1028 runs: U64 Card = "Runs completed that the region's doorbell started.";
        0x1030 failed_runs: U64 Card = "Runs completed with an error.";
        0x1038 busy_ns: U64 Card = "Time of all runs (ns).";
        0x1040 progress: U64 Card = "Progress of the run, in units of the kernel.";
        0x1048 fuel_used: U64 Card = "Work of the latest run, in units of the kernel.";
        0x1050 safe_points: U64 Card = "Safe points reached.";
        0x1058 region_sleeping: U32 Card = "One while the region sleeps and a doorbell has to wake it.";
        0x1060 started: U64 Card = "The latest `doorbell` of a start that has begun or was refused. A stop discards a start "
            "that the region has not read yet.";
        0x1080 results: [U64; KERNEL_WORDS] Card = "Results of the latest run.";
        0x1100 safe_point_state: [U64; KERNEL_WORDS] Card = "State words of the latest safe point, from which another run "
            "can resume.";
        0x1180 kernel_name: [U64; 4] Card = "Name of the loaded kernel, text padded with zeros.";
    }
}}

/// Offsets of a region's registers, relative to [`REGION_CONTROL`] + region × [`REGION_STRIDE`].
pub mod region_at {
    pub use super::control_at::*;
    pub use super::state_at::*;
}

/// All of BAR0, from which `docs/registers.md` and the C header are generated.
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

const _: () =
    assert!(DMA_RING == CONTROL_WINDOW.start && DMA_RING + DMA_RING_SLOTS * DMA_DESCRIPTOR_BYTES <= 0x7000);
const _: () = assert!(REGION_STATE - REGION_CONTROL == 0x1000 && MAX_REGIONS * REGION_STRIDE == 0x1000);
