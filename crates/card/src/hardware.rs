//! What an emulated card is made of: memory, registers, and the descriptors behind both.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use millstream_shm::{EventFd, Memfd};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::command::{CAPABILITY_INTERRUPT_FD, CAPABILITY_VECTOR};
use crate::memory::{Memory, Span};
use crate::os::{Doing, OsError};
use crate::registers::{BAR0_BYTES, MAGIC, MAX_CHUNKS, Registers, VERSION};

/// Smallest chunk that `written_chunks` tells about [bytes].
const CHUNK_BYTES: u64 = 2 << 20;

/// Memory and registers of a card.
pub(crate) struct Hardware {
    pub(crate) registers: Arc<Registers>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) dma: Arc<Memory>,
    pub(crate) bar0_fd: Memfd,
    pub(crate) memory_fd: Memfd,
    pub(crate) dma_fd: Memfd,
    pub(crate) interrupt_fd: Arc<EventFd>,
    /// Whether pages keep their memory when they are cleared.
    keep_pages: bool,
}

/// Its size and make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Make {
    pub(crate) bank_bytes: u64,
    pub(crate) bank_count: u32,
    pub(crate) dma_bytes: u64,
    pub(crate) prefault: bool,
    pub(crate) huge_pages: bool,
}

impl Hardware {
    pub(crate) fn new(make: Make) -> Result<Hardware, OsError> {
        let memory_bytes = make.bank_bytes * u64::from(make.bank_count);
        let bar0_fd = Memfd::sealed("millstream-card-bar0", BAR0_BYTES).doing("make the registers")?;
        let memory_fd =
            Memfd::sealed("millstream-card-memory", memory_bytes as usize).doing("make card memory")?;
        let mapping = memory_fd.map().doing("map card memory")?;
        if make.huge_pages {
            mapping.advise_huge_pages();
        }
        if make.prefault {
            mapping.prefault(0, mapping.len()).doing("give memory to the pages of a card")?;
        }
        let dma_fd =
            Memfd::sealed("millstream-card-dma", make.dma_bytes as usize).doing("make the DMA window")?;
        let dma = Memory::new(dma_fd.map().doing("map the DMA window")?);
        let registers = Registers::new(bar0_fd.map().doing("map the registers")?);
        let interrupt_fd = EventFd::latch().doing("create the interrupt descriptor")?;
        let set = Ordering::Relaxed;
        let mut capabilities = CAPABILITY_INTERRUPT_FD;
        if crate::kernel::vectorised() {
            capabilities |= CAPABILITY_VECTOR;
        }
        registers.version().store(VERSION, set);
        registers.process().store(std::process::id(), set);
        registers.capabilities().store(capabilities, set);
        registers.memory_bytes().store(memory_bytes, set);
        registers.bank_bytes().store(make.bank_bytes, set);
        registers.bank_count().store(make.bank_count, set);
        registers.chunk_bytes().store(chunk_bytes(memory_bytes), set);
        Ok(Hardware {
            registers: Arc::new(registers),
            memory: Arc::new(Memory::new(mapping)),
            dma: Arc::new(dma),
            bar0_fd,
            memory_fd,
            dma_fd,
            interrupt_fd: Arc::new(interrupt_fd),
            keep_pages: make.prefault,
        })
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

    /// Zeros card memory and the DMA window. Memory that was never written costs nothing.
    pub(crate) fn clear(&self) {
        for (memory, fd) in [(&self.memory, &self.memory_fd), (&self.dma, &self.dma_fd)] {
            if !self.keep_pages {
                fd.punch(0, fd.len());
                continue;
            }
            match written(fd) {
                Ok(ranges) => ranges.into_iter().for_each(|range| memory.zero(range)),
                Err(_) => memory.zero(Span::new(0, memory.size())),
            }
        }
    }

    /// Sets the bits of all chunks that were ever written and returns how many bytes those have.
    pub(crate) fn show_written(&self) -> u64 {
        let chunk = chunk_bytes(self.memory.size());
        let whole = vec![Span::new(0, self.memory.size())];
        let ranges = written(&self.memory_fd).unwrap_or(whole);
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

/// Duplicates a descriptor for a registration.
pub(crate) fn duplicate(fd: &impl AsFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}

/// The ranges that have memory: everything else reads as zeros.
fn written(fd: &Memfd) -> io::Result<Vec<Span>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    loop {
        let start = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(ranges),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(fd, SeekFrom::Hole(start))?;
        ranges.push(Span::new(start, end - start));
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_that_was_written_is_found_and_cleared() {
        for prefault in [false, true] {
            let make =
                Make { bank_bytes: 8 * MIB, bank_count: 2, dma_bytes: MIB, prefault, huge_pages: false };
            let hardware = Hardware::new(make).unwrap();
            hardware.memory.write(5 * MIB, &[1; 10]).unwrap();
            hardware.memory.write(16 * MIB - 1, &[1]).unwrap();
            hardware.dma.write(7, &[1]).unwrap();
            let bytes = hardware.show_written();
            let chunks = hardware.registers.written_chunks(0).load(Ordering::Relaxed);
            let (expected_chunks, expected) =
                if prefault { (0xff, 16 * MIB) } else { (0b1000_0100, 2 * 4096) };
            assert_eq!((chunks, bytes), (expected_chunks, expected));
            hardware.clear();
            assert_eq!(hardware.memory.read_array::<10>(5 * MIB).unwrap(), [0; 10]);
            assert_eq!(hardware.memory.read_array::<1>(16 * MIB - 1).unwrap(), [0]);
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
