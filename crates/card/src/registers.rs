//! The register file of a card, BAR0, written down once.
//!
//! `register_map!` below is the only list of registers. It generates the accessors of
//! [`Registers`], the table [`REGISTERS`] and, through [`crate::reference`], the page
//! `docs/registers.md`.
//!
//! A register is a 32- or 64-bit little-endian word in a page that card and users share. Registers
//! of one writer share cache lines with each other and with nobody else's. The card keeps its own
//! state privately and only publishes it here: whatever a user scribbles over the card's registers
//! misleads that user, never the card.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millstream_shm::Mapping;

/// Size of BAR0 [bytes].
pub const BAR0_BYTES: usize = 64 << 10;

/// First byte of the kernel directory in BAR0: [`KERNEL_ENTRY_BYTES`] per kernel.
pub const KERNEL_DIRECTORY: usize = 0x1000;

/// One entry of the kernel directory [bytes]: a `u32` identifier, then the name, padded with zeros.
pub const KERNEL_ENTRY_BYTES: usize = 32;

/// Most kernels that the directory holds.
pub const MAX_KERNELS: usize = 64;

/// Content of the `magic` register: "MSTRCARD", read as bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MSTRCARD");

/// Version of the register map, the command format and the connection messages.
pub const VERSION: u32 = 1;

/// Width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 32 bits.
    U32,
    /// 64 bits.
    U64,
}

impl Width {
    /// Size [bytes].
    pub const fn bytes(self) -> usize {
        match self {
            Width::U32 => 4,
            Width::U64 => 8,
        }
    }
}

/// The side that writes a register; the other side reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The card, at any time.
    Card,
    /// The user of the card.
    User,
    /// Both, by atomic read-modify-write only.
    Both,
}

/// One register of the map.
#[derive(Clone, Copy, Debug)]
pub struct Register {
    /// Place in BAR0 [bytes].
    pub offset: usize,
    /// Name, as in the accessor and the documentation.
    pub name: &'static str,
    /// Width.
    pub width: Width,
    /// Who writes it.
    pub writer: Writer,
    /// What it holds.
    pub doc: &'static str,
}

/// A group of registers with one purpose.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Title in the documentation.
    pub title: &'static str,
    /// The registers, by offset.
    pub registers: &'static [Register],
}

macro_rules! register_map {
    ($($title:literal { $(
        $offset:literal $name:ident: $width:ident $writer:ident = $($doc:literal)+;
    )+ })+) => {
        /// Every register, by group.
        pub const REGISTERS: &[Group] = &[$(Group {
            title: $title,
            registers: &[$(Register {
                offset: $offset,
                name: stringify!($name),
                width: Width::$width,
                writer: Writer::$writer,
                doc: concat!($($doc),+),
            }),+],
        }),+];

        impl Registers {
            $($(
                #[doc = concat!($($doc),+)]
                pub fn $name(&self) -> register_map!(@type $width) {
                    register_map!(@word self, $width, $offset)
                }
            )+)+
        }
    };
    (@type U32) => { &AtomicU32 };
    (@type U64) => { &AtomicU64 };
    (@word $self:ident, U32, $offset:literal) => { $self.mapping.word32($offset) };
    (@word $self:ident, U64, $offset:literal) => { $self.mapping.word64($offset) };
}

register_map! {
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
    }
    "State" {
        0x040 status: U32 Card = "What the card does now; see Status.";
        0x044 error_cause: U32 Card = "Cause of the latest error; see Causes.";
        0x048 error_detail: U64 Card = "The offending value of the latest error.";
        0x050 errors: U64 Card = "Errors since the card started.";
        0x058 heartbeat: U64 Card = "Grows while the card is alive: with each event that a kernel "
            "handles and at least every heartbeat period while it waits.";
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
}

/// Accesses to registers that the map does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// No register starts at this offset.
    #[error("BAR0 has no register at {0:#x}")]
    NoSuchRegister(usize),
    /// The register belongs to the card.
    #[error("register {0} is written by the card only")]
    ReadOnly(&'static str),
    /// The value has more bits than the register.
    #[error("register {name} is 32 bits wide, {value:#x} is not")]
    TooWide {
        /// The register's name.
        name: &'static str,
        /// The value refused.
        value: u64,
    },
}

/// Finds a register by its offset.
pub fn find(offset: usize) -> Option<&'static Register> {
    all().find(|register| register.offset == offset)
}

/// Every register in the order of the map.
pub fn all() -> impl Iterator<Item = &'static Register> {
    REGISTERS.iter().flat_map(|group| group.registers)
}

/// BAR0 of one card, mapped.
#[derive(Debug)]
pub struct Registers {
    mapping: Mapping,
}

impl Registers {
    pub(crate) fn new(mapping: Mapping) -> Registers {
        assert_eq!(mapping.len(), BAR0_BYTES, "checked when the card was opened");
        Registers { mapping }
    }

    /// Address of the first byte, for calls that take a pointer. Valid as long as this value lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.base()
    }

    /// Reads the register at `offset`, widened to 64 bits.
    pub fn reg_read(&self, offset: usize) -> Result<u64, RegisterError> {
        let register = find(offset).ok_or(RegisterError::NoSuchRegister(offset))?;
        Ok(match register.width {
            Width::U32 => self.mapping.word32(offset).load(Ordering::Acquire).into(),
            Width::U64 => self.mapping.word64(offset).load(Ordering::Acquire),
        })
    }

    /// Writes the register at `offset` as a user may: registers of the card are refused.
    pub fn reg_write(&self, offset: usize, value: u64) -> Result<(), RegisterError> {
        let register = find(offset).ok_or(RegisterError::NoSuchRegister(offset))?;
        if register.writer == Writer::Card {
            return Err(RegisterError::ReadOnly(register.name));
        }
        match register.width {
            Width::U32 => {
                let value = u32::try_from(value)
                    .map_err(|_| RegisterError::TooWide { name: register.name, value })?;
                self.mapping.word32(offset).store(value, Ordering::Release);
            }
            Width::U64 => self.mapping.word64(offset).store(value, Ordering::Release),
        }
        Ok(())
    }

    /// Publishes entry `index` of the kernel directory.
    ///
    /// # Panics
    /// If there are more than [`MAX_KERNELS`] or the name does not fit; the registry checks both.
    pub(crate) fn set_kernel(&self, index: usize, id: u32, name: &str) {
        assert!(index < MAX_KERNELS && name.len() <= KERNEL_ENTRY_BYTES - 4);
        let mut entry = [0u8; KERNEL_ENTRY_BYTES];
        entry[..4].copy_from_slice(&id.to_le_bytes());
        entry[4..4 + name.len()].copy_from_slice(name.as_bytes());
        for (at, word) in entry.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes(word.try_into().expect("chunks of four"));
            self.mapping
                .word32(KERNEL_DIRECTORY + index * KERNEL_ENTRY_BYTES + 4 * at)
                .store(word, Ordering::Relaxed);
        }
    }

    /// The kernel directory: identifiers and names, in the card's order.
    pub fn kernels(&self) -> Vec<(u32, String)> {
        let count = self.kernel_count().load(Ordering::Acquire) as usize;
        (0..count.min(MAX_KERNELS))
            .map(|index| {
                let mut entry = [0u8; KERNEL_ENTRY_BYTES];
                for (at, bytes) in entry.chunks_exact_mut(4).enumerate() {
                    let offset = KERNEL_DIRECTORY + index * KERNEL_ENTRY_BYTES + 4 * at;
                    let word = self.mapping.word32(offset).load(Ordering::Relaxed);
                    bytes.copy_from_slice(&word.to_le_bytes());
                }
                let (id, name) = entry.split_at(4);
                let end = name.iter().position(|&byte| byte == 0);
                (
                    u32::from_le_bytes(id.try_into().expect("split at four")),
                    String::from_utf8_lossy(&name[..end.unwrap_or(name.len())]).into_owned(),
                )
            })
            .collect()
    }
}

/// A register file without a card, for tests of what runs inside one.
#[cfg(test)]
pub(crate) fn detached() -> Registers {
    let bar0 = millstream_shm::Memfd::sealed("millstream-card-test", BAR0_BYTES).unwrap();
    Registers::new(bar0.map().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_aligned_apart_and_one_writer_to_a_cache_line() {
        let mut end = 0;
        let mut line_owner = std::collections::HashMap::new();
        for register in all() {
            assert!(register.offset >= end, "{} overlaps", register.name);
            assert_eq!(register.offset % register.width.bytes(), 0, "{}", register.name);
            end = register.offset + register.width.bytes();
            let by_card = register.writer == Writer::Card;
            let owner = *line_owner.entry(register.offset / 64).or_insert(by_card);
            assert_eq!(owner, by_card, "{} shares a line with the other side", register.name);
        }
        assert!(end <= KERNEL_DIRECTORY);
    }

    #[test]
    fn access_by_offset_obeys_the_map() {
        let registers = detached();
        let producer = all().find(|r| r.name == "producer").unwrap().offset;
        registers.reg_write(producer, 7).unwrap();
        assert_eq!(registers.producer().load(Ordering::Relaxed), 7);
        assert_eq!(registers.reg_read(producer), Ok(7));
        assert_eq!(registers.reg_read(0x004), Err(RegisterError::NoSuchRegister(4)));
        assert_eq!(registers.reg_write(0, 1), Err(RegisterError::ReadOnly("magic")));
        assert!(matches!(
            registers.reg_write(0x0c8, 1 << 32),
            Err(RegisterError::TooWide { name: "doorbell", .. })
        ));
    }

    #[test]
    fn the_kernel_directory_reads_back() {
        let registers = detached();
        registers.set_kernel(0, 1, "verify");
        registers.set_kernel(1, 9, "a-name-of-twenty-eight-bytes");
        registers.kernel_count().store(2, Ordering::Relaxed);
        let expected = [(1, "verify"), (9, "a-name-of-twenty-eight-bytes")];
        assert_eq!(registers.kernels(), expected.map(|(id, name)| (id, name.to_owned())));
    }
}
