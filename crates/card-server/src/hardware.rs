//! What a card is made of: memory of some kind, registers, and the descriptors behind both.
//!
//! Registers and the DMA window are memory of the host for every kind of card: the process plays them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

use millstream_shm::EventFd;

use crate::backing::{self, Emulated, Kind, Roots, Wanted};
use crate::command::{CAPABILITY_INTERRUPT_FD, CAPABILITY_VECTOR, Cause, Fault};
use crate::kernel::outside;
use crate::memory::Memory;
use crate::os::Doing;
use crate::registers::{BAR0_BYTES, MAGIC, MAX_CHUNKS, Registers, VERSION};
use crate::serve::ServeError;

/// Smallest chunk that `written_chunks` tells about [bytes].
const CHUNK_BYTES: u64 = 2 << 20;

/// Memory and registers of a card.
pub(crate) struct Hardware {
    pub(crate) registers: Arc<Registers>,
    /// BAR0 once more, as something to register.
    pub(crate) bar0: Emulated,
    pub(crate) dma: Arc<Memory>,
    pub(crate) interrupt_fd: Arc<EventFd>,
    memory: RwLock<Arc<Memory>>,
    /// Grows when the memory is replaced.
    generation: AtomicU32,
    /// Which of them those who mapped an earlier one were parted for.
    parted: AtomicU32,
    /// Tells those who keep descriptors of the memory.
    pub(crate) replaced: EventFd,
}

/// Its size and make.
#[derive(Clone, Debug)]
pub(crate) struct Make<'a> {
    pub(crate) kind: &'a Kind,
    pub(crate) roots: &'a Roots,
    pub(crate) bank_bytes: u64,
    pub(crate) bank_count: u32,
    pub(crate) dma_bytes: u64,
    pub(crate) prefault: bool,
    pub(crate) huge_pages: bool,
}

impl Hardware {
    pub(crate) fn new(make: &Make<'_>) -> Result<Hardware, ServeError> {
        let Make { kind, roots, bank_bytes, bank_count, prefault, huge_pages, .. } = *make;
        let memory_bytes = bank_bytes * u64::from(bank_count);
        let memory = backing::open(kind, roots, Wanted { bytes: memory_bytes, prefault, huge_pages })?;
        let small = |bytes| Wanted { bytes, prefault: false, huge_pages: false };
        let dma = Emulated::new("millstream-card-dma", small(make.dma_bytes))?;
        let bar0 = Emulated::new("millstream-card-bar0", small(BAR0_BYTES as u64))?;
        let registers = Registers::new(bar0.map_again()?);
        let interrupt_fd = EventFd::latch().doing("create the interrupt descriptor")?;
        let set = Ordering::Relaxed;
        let mut capabilities = CAPABILITY_INTERRUPT_FD;
        if crate::kernel::vectorised() {
            capabilities |= CAPABILITY_VECTOR;
        }
        registers.version().store(VERSION, set);
        registers.process().store(std::process::id(), set);
        registers.capabilities().store(capabilities, set);
        registers.memory_kind().store(kind.number() as u32, set);
        registers.memory_bytes().store(memory_bytes, set);
        registers.bank_bytes().store(bank_bytes, set);
        registers.bank_count().store(bank_count, set);
        registers.chunk_bytes().store(chunk_bytes(memory_bytes), set);
        Ok(Hardware {
            registers: Arc::new(registers),
            bar0,
            dma: Arc::new(Memory::new(Box::new(dma))),
            interrupt_fd: Arc::new(interrupt_fd),
            memory: RwLock::new(Arc::new(Memory::new(memory))),
            generation: AtomicU32::new(0),
            parted: AtomicU32::new(0),
            replaced: EventFd::latch().doing("create a wake-up")?,
        })
    }

    /// Card memory, as it is now.
    pub(crate) fn memory(&self) -> Arc<Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes when [`Hardware::memory`] does.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Puts other memory, which is zero, in the place of card memory: whoever still uses the old one keeps it for
    /// himself. False if this kind of card has no other.
    pub(crate) fn replace_memory(&self) -> bool {
        let Some(Ok(other)) = self.memory().backing().another() else { return false };
        *self.memory.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Memory::new(other));
        self.generation.fetch_add(1, Ordering::Release);
        self.replaced.signal();
        true
    }

    /// Nobody is connected any more who has mapped memory from before this generation.
    pub(crate) fn set_parted(&self, generation: u32) {
        self.parted.store(generation, Ordering::Release);
    }

    /// Whether nobody is connected who has mapped memory that was replaced.
    pub(crate) fn is_parted(&self) -> bool {
        self.parted.load(Ordering::Acquire) == self.generation()
    }

    /// Publishes the kernel directory and says that the card is complete.
    pub(crate) fn complete<'a>(&self, kernels: impl Iterator<Item = (u32, &'a str)>) {
        let mut count = 0;
        for (id, name) in kernels {
            self.registers.set_kernel(count, id, name);
            count += 1;
        }
        self.registers.kernel_count().store(count as u32, Ordering::Relaxed);
        self.registers.magic().store(MAGIC, Ordering::Release);
    }

    /// Zeros card memory and the DMA window.
    pub(crate) fn clear(&self) -> Result<(), Fault> {
        self.memory().backing().clear().map_err(outside(Cause::MemoryFailed))?;
        self.dma.backing().clear().map_err(outside(Cause::MemoryFailed))
    }

    /// Sets the bits of all chunks that were ever written and returns how many bytes those have.
    pub(crate) fn show_written(&self) -> u64 {
        let memory = self.memory();
        let chunk = chunk_bytes(memory.size());
        let ranges = memory.backing().written();
        let mut words = [0u64; MAX_CHUNKS / 64];
        let mut bytes = 0;
        for span in &ranges {
            let chunks: Range<u64> = span.offset / chunk..(span.offset + span.len).div_ceil(chunk);
            chunks.for_each(|index| words[index as usize / 64] |= 1 << (index % 64));
            bytes += span.len;
        }
        for (index, word) in words.iter().enumerate() {
            self.registers.written_chunks(index).store(*word, Ordering::Relaxed);
        }
        self.registers.memory_written_bytes().store(bytes, Ordering::Relaxed);
        bytes
    }
}

/// Bytes that a bit of `written_chunks` stands for.
fn chunk_bytes(memory: u64) -> u64 {
    memory.div_ceil(MAX_CHUNKS as u64).next_power_of_two().max(CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn hardware(prefault: bool) -> Hardware {
        let make = Make {
            kind: &Kind::Emulated,
            roots: &Roots::default(),
            bank_bytes: 8 * MIB,
            bank_count: 2,
            dma_bytes: MIB,
            prefault,
            huge_pages: false,
        };
        Hardware::new(&make).unwrap()
    }

    #[test]
    fn memory_that_is_replaced_is_zero_and_the_old_one_stays_with_who_has_it() {
        let hardware = hardware(false);
        let old = hardware.memory();
        old.write(7, &[1; 9]).unwrap();
        assert!(hardware.replace_memory());
        assert_eq!(hardware.generation(), 1);
        assert!(!hardware.is_parted());
        hardware.set_parted(1);
        assert!(hardware.is_parted());
        assert_eq!(hardware.memory().read_array::<9>(7).unwrap(), [0; 9]);
        old.write(100, &[2; 9]).unwrap();
        assert_eq!(hardware.memory().read_array::<9>(100).unwrap(), [0; 9]);
        assert_eq!((hardware.memory().size(), old.read_array::<9>(7).unwrap()), (old.size(), [1; 9]));
    }

    #[test]
    fn memory_that_was_written_is_found_and_cleared() {
        for prefault in [false, true] {
            let hardware = hardware(prefault);
            hardware.memory().write(5 * MIB, &[1; 10]).unwrap();
            hardware.memory().write(16 * MIB - 1, &[1]).unwrap();
            hardware.dma.write(7, &[1]).unwrap();
            let bytes = hardware.show_written();
            let chunks = hardware.registers.written_chunks(0).load(Ordering::Relaxed);
            let (expected_chunks, expected) =
                if prefault { (0xff, 16 * MIB) } else { (0b1000_0100, 2 * 4096) };
            assert_eq!((chunks, bytes), (expected_chunks, expected));
            hardware.clear().unwrap();
            assert_eq!(hardware.memory().read_array::<10>(5 * MIB).unwrap(), [0; 10]);
            assert_eq!(hardware.memory().read_array::<1>(16 * MIB - 1).unwrap(), [0]);
            assert_eq!(hardware.dma.read_array::<1>(7).unwrap(), [0]);
        }
    }

    #[test]
    fn chunks_fit_the_map_whatever_the_memory() {
        for memory in [4096u64, 8 << 30, 1 << 40, 1 << 46] {
            assert!(memory.div_ceil(chunk_bytes(memory)) <= MAX_CHUNKS as u64);
        }
        assert_eq!(chunk_bytes(8 << 30), CHUNK_BYTES);
    }
}
