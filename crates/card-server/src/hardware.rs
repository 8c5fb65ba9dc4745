//! Memory and registers of a card, and the descriptors behind them.
//!
//! BAR0 and BAR2 are host memory for every kind of card memory.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use millstream_card_abi::command::{CAPABILITY_INTERRUPT_FD, CAPABILITY_VECTOR, Cause, Fault};
use millstream_card_abi::registers::{BAR0_BYTES, MAGIC, MAX_CHUNKS, Registers, VERSION};
use millstream_card_abi::{IoContext as _, SyscallError};
use millstream_shm::EventFd;

use crate::backing::{self, AllocationOptions, BackingError, BackingKind, DevicePaths, EmulatedMemory};
use crate::kernel::outside;
use crate::memory::Memory;

/// Smallest chunk of the dirty bitmap (bytes).
const MIN_CHUNK_BYTES: u64 = 2 << 20;

/// Why memory or registers could not be created.
#[derive(Debug, thiserror::Error)]
pub enum HardwareError {
    /// No memory of the requested kind.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] SyscallError),
}

/// Memory and registers of a card.
pub(crate) struct Hardware {
    pub(crate) registers: Arc<Registers>,
    /// The memory of BAR0, to be registered.
    pub(crate) bar0: EmulatedMemory,
    pub(crate) bar2: Arc<Memory>,
    pub(crate) interrupt_fd: Arc<EventFd>,
    memory: RwLock<Arc<Memory>>,
    /// Counts replacements of the memory.
    generation: AtomicU32,
    /// Generation up to which users of replaced memory have been disconnected.
    disconnected: AtomicU32,
    /// Signalled when the memory is replaced.
    pub(crate) replaced: EventFd,
}

/// Kind and size of memory.
#[derive(Clone, Debug)]
pub(crate) struct HardwareConfig<'a> {
    pub(crate) memory_kind: &'a BackingKind,
    pub(crate) device_paths: &'a DevicePaths,
    pub(crate) bank_bytes: u64,
    pub(crate) bank_count: u32,
    pub(crate) bar2_bytes: u64,
    pub(crate) prefault: bool,
    pub(crate) huge_pages: bool,
    /// Network adapters, not the soft device, access the memory.
    pub(crate) for_adapter: bool,
}

impl Hardware {
    pub(crate) fn new(config: &HardwareConfig<'_>) -> Result<Hardware, HardwareError> {
        let HardwareConfig { bank_bytes, bank_count, prefault, huge_pages, for_adapter, .. } = *config;
        let memory_bytes = bank_bytes * u64::from(bank_count);
        let options = AllocationOptions { bytes: memory_bytes, prefault, huge_pages, for_adapter };
        let memory = backing::open(config.memory_kind, config.device_paths, options)?;
        let small = |bytes| AllocationOptions { for_adapter, ..AllocationOptions::small(bytes) };
        let bar2 = EmulatedMemory::new("millstream-card-bar2", small(config.bar2_bytes))?;
        let bar0 = EmulatedMemory::new("millstream-card-bar0", small(BAR0_BYTES as u64))?;
        let registers = Registers::new(bar0.map_again()?);
        let interrupt_fd = EventFd::latch().context("create the interrupt descriptor")?;
        let set = Ordering::Relaxed;
        let mut capabilities = CAPABILITY_INTERRUPT_FD;
        if millstream_camera::trigger::has_avx2() {
            capabilities |= CAPABILITY_VECTOR;
        }
        registers.version().store(VERSION, set);
        registers.pid().store(std::process::id(), set);
        registers.capabilities().store(capabilities, set);
        registers.memory_kind().store(config.memory_kind.code() as u32, set);
        registers.memory_bytes().store(memory_bytes, set);
        registers.bank_bytes().store(bank_bytes, set);
        registers.bank_count().store(bank_count, set);
        registers.dirty_chunk_bytes().store(chunk_bytes(memory_bytes), set);
        Ok(Hardware {
            registers: Arc::new(registers),
            bar0,
            bar2: Arc::new(Memory::new(Box::new(bar2))),
            interrupt_fd: Arc::new(interrupt_fd),
            memory: RwLock::new(Arc::new(Memory::new(memory))),
            generation: AtomicU32::new(0),
            disconnected: AtomicU32::new(0),
            replaced: EventFd::latch().context("create an event descriptor")?,
        })
    }

    /// The current card memory.
    pub(crate) fn memory(&self) -> Arc<Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of replacements of [`Hardware::memory`].
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Replaces card memory by zeroed memory; current users keep the old one. False if this kind of memory cannot
    /// be replaced.
    pub(crate) fn replace_memory(&self) -> bool {
        let Some(Ok(other)) = self.memory().backing().allocate_another() else { return false };
        *self.memory.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Memory::new(other));
        self.generation.fetch_add(1, Ordering::Release);
        self.replaced.signal();
        true
    }

    /// All users of memory before this generation have been disconnected.
    pub(crate) fn set_disconnected(&self, generation: u32) {
        self.disconnected.store(generation, Ordering::Release);
    }

    /// Whether all users of replaced memory have been disconnected.
    pub(crate) fn users_are_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::Acquire) == self.generation()
    }

    /// Publishes the kernel directory, and then that the card is initialised.
    pub(crate) fn publish_directory(&self, kernels: &[(u32, &str)]) {
        for (index, (id, name)) in kernels.iter().enumerate() {
            self.registers.set_kernel(index, *id, name);
        }
        self.registers.kernel_count().store(kernels.len() as u32, Ordering::Relaxed);
        self.registers.magic().store(MAGIC, Ordering::Release);
    }

    /// Zeros card memory and BAR2.
    pub(crate) fn clear(&self) -> Result<(), Fault> {
        self.memory().backing().clear().map_err(outside(Cause::MemoryFailed))?;
        self.bar2.backing().clear().map_err(outside(Cause::MemoryFailed))
    }

    /// Publishes the dirty bitmap and returns the number of dirty bytes.
    pub(crate) fn publish_dirty(&self) -> u64 {
        let memory = self.memory();
        let chunk = chunk_bytes(memory.size());
        let ranges = memory.backing().written_ranges();
        let mut words = [0u64; MAX_CHUNKS / 64];
        let mut bytes = 0;
        for span in &ranges {
            let chunks: Range<u64> = span.offset / chunk..(span.offset + span.len).div_ceil(chunk);
            chunks.for_each(|index| words[index as usize / 64] |= 1 << (index % 64));
            bytes += span.len;
        }
        for (index, word) in words.iter().enumerate() {
            self.registers.dirty_bitmap(index).store(*word, Ordering::Relaxed);
        }
        self.registers.dirty_bytes().store(bytes, Ordering::Relaxed);
        bytes
    }
}

/// Bytes per bit of the dirty bitmap.
fn chunk_bytes(memory: u64) -> u64 {
    memory.div_ceil(MAX_CHUNKS as u64).next_power_of_two().max(MIN_CHUNK_BYTES)
}

#[cfg(test)]
impl Hardware {
    /// Emulated memory in one bank, for tests.
    pub(crate) fn emulated(bank_bytes: u64) -> Arc<Hardware> {
        let config = HardwareConfig {
            memory_kind: &BackingKind::Emulated,
            device_paths: &DevicePaths::default(),
            bank_bytes,
            bank_count: 1,
            bar2_bytes: 4096,
            prefault: false,
            huge_pages: false,
            for_adapter: false,
        };
        Arc::new(Hardware::new(&config).unwrap())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn hardware(prefault: bool, for_adapter: bool) -> Hardware {
        let config = HardwareConfig {
            memory_kind: &BackingKind::Emulated,
            device_paths: &DevicePaths::default(),
            bank_bytes: 8 * MIB,
            bank_count: 2,
            bar2_bytes: MIB,
            prefault,
            huge_pages: false,
            for_adapter,
        };
        Hardware::new(&config).unwrap()
    }

    #[test]
    fn replaced_memory_stays_with_its_users_and_the_new_one_is_zero() {
        let hardware = hardware(false, false);
        let old = hardware.memory();
        old.write(7, &[1; 9]).unwrap();
        assert!(hardware.replace_memory());
        assert_eq!(hardware.generation(), 1);
        assert!(!hardware.users_are_disconnected());
        hardware.set_disconnected(1);
        assert!(hardware.users_are_disconnected());
        assert_eq!(hardware.memory().read_array::<9>(7).unwrap(), [0; 9]);
        old.write(100, &[2; 9]).unwrap();
        assert_eq!(hardware.memory().read_array::<9>(100).unwrap(), [0; 9]);
        assert_eq!((hardware.memory().size(), old.read_array::<9>(7).unwrap()), (old.size(), [1; 9]));
    }

    #[test]
    fn written_memory_is_in_the_dirty_bitmap_and_cleared() {
        for prefault in [false, true] {
            let hardware = hardware(prefault, false);
            hardware.memory().write(5 * MIB, &[1; 10]).unwrap();
            hardware.memory().write(16 * MIB - 1, &[1]).unwrap();
            hardware.bar2.write(7, &[1]).unwrap();
            let bytes = hardware.publish_dirty();
            let chunks = hardware.registers.dirty_bitmap(0).load(Ordering::Relaxed);
            let (expected_chunks, expected) =
                if prefault { (0xff, 16 * MIB) } else { (0b1000_0100, 2 * 4096) };
            assert_eq!((chunks, bytes), (expected_chunks, expected));
            hardware.clear().unwrap();
            assert_eq!(hardware.memory().read_array::<10>(5 * MIB).unwrap(), [0; 10]);
            assert_eq!(hardware.memory().read_array::<1>(16 * MIB - 1).unwrap(), [0]);
            assert_eq!(hardware.bar2.read_array::<1>(7).unwrap(), [0]);
        }
    }

    #[test]
    fn pages_that_an_adapter_may_have_pinned_are_zeroed_in_place() {
        let hardware = hardware(false, true);
        let memory = hardware.memory();
        for memory in [&memory, &hardware.bar2] {
            memory.write(7, &[1; 9]).unwrap();
            let pages = memory.backing().written_ranges();
            assert_ne!(pages, []);
            hardware.clear().unwrap();
            assert_eq!(memory.read_array::<9>(7).unwrap(), [0; 9]);
            assert_eq!(memory.backing().written_ranges(), pages);
        }
    }

    #[test]
    fn the_dirty_bitmap_covers_any_memory() {
        for memory in [4096u64, 8 << 30, 1 << 40, 1 << 46] {
            assert!(memory.div_ceil(chunk_bytes(memory)) <= MAX_CHUNKS as u64);
        }
        assert_eq!(chunk_bytes(8 << 30), MIN_CHUNK_BYTES);
    }
}
