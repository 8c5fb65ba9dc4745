//! The register file of a card: BAR0.
//!
//! `map.rs` is the only list of registers. It generates the accessors of [`Registers`] and [`Region`], and the
//! offsets that remote nodes use ([`at`], [`region_at`]). [`crate::reference`] generates the page
//! `docs/registers.md` and the header `include/millstream_card_registers.h` from it.
//!
//! A register is a 32- or 64-bit little-endian word in memory that card and users share. A cache line holds
//! registers of one writer only. The card keeps its state privately and publishes copies here. A user that
//! overwrites the card's registers misleads users, not the card.

mod map;

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millstream_shm::Mapping;

pub use map::{
    BLOCKS, CONTROL_WINDOW, DMA_DESCRIPTOR_BYTES, DMA_RING, DMA_RING_SLOTS, KERNEL_WORDS, KernelWords,
    LEASE_PAGE, MAX_BANKS, MAX_CHUNKS, MAX_PEERS, MAX_REGIONS, PEER_BYTES, PEER_TABLE, REGION_CONTROL,
    REGION_CONTROL_REGISTERS, REGION_STATE, REGION_STATE_REGISTERS, REGION_STRIDE, REGISTERS, at, control_at,
    region_at, state_at,
};

/// Size of BAR0 (bytes).
pub const BAR0_BYTES: usize = 64 << 10;

/// Offset of the kernel directory in BAR0: [`KERNEL_ENTRY_BYTES`] per kernel.
pub const KERNEL_DIRECTORY: usize = 0x1000;

/// One entry of the kernel directory (bytes): a `u32` identifier, then the name, padded with zeros.
pub const KERNEL_ENTRY_BYTES: usize = 32;

/// Most kernels in the directory.
pub const MAX_KERNELS: usize = 64;

/// Content of the `magic` register: "MSTRCARD", read as bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MSTRCARD");

/// Version of the register map, the command format and the connection messages.
pub const VERSION: u32 = 5;

/// Width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 32 bits.
    U32,
    /// 64 bits.
    U64,
}

impl Width {
    /// Size (bytes).
    pub const fn bytes(self) -> usize {
        match self {
            Width::U32 => 4,
            Width::U64 => 8,
        }
    }
}

/// The side that writes a register; the other side only reads it.
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
    /// Offset in BAR0 (bytes).
    pub offset: usize,
    /// Name, as in the accessor and the documentation.
    pub name: &'static str,
    /// Width of one word.
    pub width: Width,
    /// Number of consecutive words.
    pub count: usize,
    /// The side that writes it.
    pub writer: Writer,
    /// Its meaning.
    pub doc: &'static str,
}

impl Register {
    /// Size of all words (bytes).
    pub const fn bytes(&self) -> usize {
        self.width.bytes() * self.count
    }
}

/// Registers with a common purpose.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Title in the documentation.
    pub title: &'static str,
    /// The registers, by offset.
    pub registers: &'static [Register],
}

/// An access that the register map does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// No register starts at this offset.
    #[error("BAR0 has no register at {0:#x}")]
    NoSuchRegister(usize),
    /// Only the card writes the register.
    #[error("register {0} is written by the card only")]
    ReadOnly(&'static str),
    /// The value has more bits than the register.
    #[error("value {value:#x} does not fit into the 32 bits of register {name}")]
    TooWide {
        /// The register's name.
        name: &'static str,
        /// The value.
        value: u64,
    },
}

/// Groups of registers, once or as an array with a stride.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Title in the documentation.
    pub title: &'static str,
    /// Name of one element of the array.
    pub name: &'static str,
    /// Offset of the first element in BAR0 (bytes).
    pub base: usize,
    /// Distance of the elements (bytes).
    pub stride: usize,
    /// Number of elements.
    pub count: usize,
    /// The registers; offsets are relative to the element.
    pub groups: &'static [Group],
}

/// A word of BAR0: its register, and its position in the register and the block.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// The register.
    pub register: &'static Register,
    /// Element of the block.
    pub instance: usize,
    /// Word of the register.
    pub index: usize,
}

/// Finds the word at this offset of BAR0.
pub fn find(offset: usize) -> Option<Word> {
    words().find(|(at, _)| *at == offset).map(|(_, word)| word)
}

/// Every register once, in the order of the map.
pub fn all() -> impl Iterator<Item = &'static Register> {
    BLOCKS.iter().flat_map(|block| block.groups).flat_map(|group| group.registers)
}

/// Every word of every register, with its offset in BAR0.
pub fn words() -> impl Iterator<Item = (usize, Word)> {
    BLOCKS.iter().flat_map(|block| {
        (0..block.count).flat_map(move |instance| {
            block.groups.iter().flat_map(|group| group.registers).flat_map(move |register| {
                (0..register.count).map(move |index| {
                    let within = register.offset + index * register.width.bytes();
                    (block.base + instance * block.stride + within, Word { register, instance, index })
                })
            })
        })
    })
}

/// BAR0 of one card, mapped.
#[derive(Debug)]
pub struct Registers {
    mapping: Mapping,
}

impl Registers {
    /// The registers in `mapping`.
    ///
    /// # Panics
    /// If the mapping does not have [`BAR0_BYTES`].
    pub fn new(mapping: Mapping) -> Registers {
        assert_eq!(mapping.len(), BAR0_BYTES, "BAR0 has another size");
        Registers { mapping }
    }

    /// The 32-bit word at `offset`.
    #[inline]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        self.mapping.word32(offset)
    }

    /// The 64-bit word at `offset`.
    #[inline]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        self.mapping.word64(offset)
    }

    /// The registers of a region.
    ///
    /// # Panics
    /// If `index` is not below [`MAX_REGIONS`].
    #[inline]
    pub fn region(&self, index: usize) -> Region<'_> {
        assert!(index < MAX_REGIONS, "a card has at most {MAX_REGIONS} regions");
        Region { registers: self, base: REGION_CONTROL + index * REGION_STRIDE }
    }

    /// Copies bytes out of BAR0, word by word.
    ///
    /// # Panics
    /// If the range is not in BAR0 or not of whole words of 8 bytes.
    #[inline]
    pub fn read_bytes(&self, offset: usize, out: &mut [u8]) {
        let words = self.mapping.words64(offset, out.len() / 8);
        for (word, bytes) in words.iter().zip(out.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
    }

    /// Prefetches the cache line at `offset`.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        millstream_lockfree::prefetch::for_load(self.mapping.base().wrapping_add(offset));
    }

    /// Address of the first byte, for calls that take a pointer. Valid as long as this value lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.base()
    }

    /// Reads the register at `offset`, widened to 64 bits.
    pub fn reg_read(&self, offset: usize) -> Result<u64, RegisterError> {
        let Word { register, .. } = find(offset).ok_or(RegisterError::NoSuchRegister(offset))?;
        Ok(match register.width {
            Width::U32 => self.mapping.word32(offset).load(Ordering::Acquire).into(),
            Width::U64 => self.mapping.word64(offset).load(Ordering::Acquire),
        })
    }

    /// Writes the register at `offset` as a user; registers of the card are refused.
    pub fn reg_write(&self, offset: usize, value: u64) -> Result<(), RegisterError> {
        let Word { register, .. } = find(offset).ok_or(RegisterError::NoSuchRegister(offset))?;
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
    /// If the index is not below [`MAX_KERNELS`], or the name is too long.
    pub fn set_kernel(&self, index: usize, id: u32, name: &str) {
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

    /// The kernel directory: numbers and names.
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

/// The registers of one region of a card.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    registers: &'a Registers,
    base: usize,
}

impl Region<'_> {
    #[inline]
    fn word32(&self, offset: usize) -> &AtomicU32 {
        self.registers.word32(self.base + offset)
    }

    #[inline]
    fn word64(&self, offset: usize) -> &AtomicU64 {
        self.registers.word64(self.base + offset)
    }
}

impl Registers {
    /// Zeroed registers without a card, for tests of its parts.
    pub fn detached() -> io::Result<Registers> {
        let bar0 = millstream_shm::Memfd::sealed("millstream-card-bar0", BAR0_BYTES)?;
        Ok(Registers::new(bar0.map()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_aligned_disjoint_and_one_writer_to_a_cache_line() {
        let mut taken = std::collections::HashSet::new();
        let mut line_owner = std::collections::HashMap::new();
        for (offset, Word { register, .. }) in words() {
            let (width, name) = (register.width.bytes(), register.name);
            assert_eq!(offset % width, 0, "{name}");
            assert!(offset + width <= BAR0_BYTES, "{name}");
            assert!((offset..offset + width).all(|byte| taken.insert(byte)), "{name} overlaps");
            let by_card = register.writer == Writer::Card;
            let owner = *line_owner.entry(offset / 64).or_insert(by_card);
            assert_eq!(owner, by_card, "{name} shares a line with the other side");
        }
        for table in [
            KERNEL_DIRECTORY..KERNEL_DIRECTORY + MAX_KERNELS * KERNEL_ENTRY_BYTES,
            PEER_TABLE..PEER_TABLE + MAX_PEERS * PEER_BYTES,
            DMA_RING..DMA_RING + DMA_RING_SLOTS * DMA_DESCRIPTOR_BYTES,
        ] {
            assert!(table.clone().all(|byte| taken.insert(byte)), "a register lies in the table {table:x?}");
        }
    }

    /// The control window holds the user's registers and no others; every client writes the lease words.
    #[test]
    fn write_permission_follows_pages() {
        for (offset, Word { register, .. }) in words() {
            match register.writer {
                Writer::Card => {
                    assert!(!CONTROL_WINDOW.contains(&offset) && !LEASE_PAGE.contains(&offset));
                }
                Writer::User if offset >= KERNEL_DIRECTORY => assert!(CONTROL_WINDOW.contains(&offset)),
                Writer::Both if offset >= KERNEL_DIRECTORY => assert!(LEASE_PAGE.contains(&offset)),
                // Registers of local users, which map all of BAR0.
                Writer::User | Writer::Both => {}
            }
        }
    }

    #[test]
    fn access_by_offset_follows_the_map() {
        let registers = Registers::detached().unwrap();
        let producer = all().find(|r| r.name == "producer").unwrap().offset;
        registers.reg_write(producer, 7).unwrap();
        assert_eq!(registers.producer().load(Ordering::Relaxed), 7);
        assert_eq!(registers.reg_read(producer), Ok(7));
        assert_eq!(registers.reg_read(0x004), Err(RegisterError::NoSuchRegister(4)));
        registers.region(1).arguments(2).store(9, Ordering::Relaxed);
        let second = REGION_CONTROL + REGION_STRIDE + region_at::arguments + 16;
        assert_eq!(registers.reg_read(second), Ok(9));
        let word = find(second).unwrap();
        assert_eq!((word.register.name, word.instance, word.index), ("arguments", 1, 2));
        assert_eq!(registers.reg_write(0, 1), Err(RegisterError::ReadOnly("magic")));
        assert!(matches!(
            registers.reg_write(0x0c8, 1 << 32),
            Err(RegisterError::TooWide { name: "doorbell", .. })
        ));
    }

    #[test]
    fn the_kernel_directory_reads_back() {
        let registers = Registers::detached().unwrap();
        registers.set_kernel(0, 1, "verify");
        registers.set_kernel(1, 9, "a-name-of-twenty-eight-bytes");
        registers.kernel_count().store(2, Ordering::Relaxed);
        let expected = [(1, "verify"), (9, "a-name-of-twenty-eight-bytes")];
        assert_eq!(registers.kernels(), expected.map(|(id, name)| (id, name.to_owned())));
    }
}
