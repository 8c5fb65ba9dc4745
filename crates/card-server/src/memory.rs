//! Card memory on the side of the server: one [`Backing`], mapped or not.

use millstream_card_abi::{AccessError, MappedMemory, MemoryRange, PrefaultError, SyscallError};

use millstream_gpu::CudaMemory;

use crate::backing::{AllocationOptions, Backing, EmulatedMemory};

/// The whole memory of one card.
#[derive(Debug)]
pub struct Memory {
    backing: Box<dyn Backing>,
}

impl Memory {
    pub(crate) fn new(backing: Box<dyn Backing>) -> Memory {
        Memory { backing }
    }

    /// Card memory of `bytes` bytes without a card, to run kernels outside a card process.
    pub fn anonymous(bytes: u64) -> Result<Memory, SyscallError> {
        let memory = EmulatedMemory::new("millstream-card-memory", AllocationOptions::small(bytes))?;
        Ok(Memory::new(Box::new(memory)))
    }

    /// The backing of this memory.
    pub(crate) fn backing(&self) -> &dyn Backing {
        &*self.backing
    }

    /// The memory as GPU memory, if it is: kernels of the GPU work on it.
    pub fn gpu_memory(&self) -> Option<&CudaMemory> {
        self.backing.gpu_memory()
    }

    /// Size (bytes).
    pub fn size(&self) -> u64 {
        self.backing.size()
    }

    /// Address of the first byte, if this process has the memory mapped. Valid as long as this value lives; other
    /// processes and devices write to the memory behind it.
    pub fn as_ptr(&self) -> Option<*mut u8> {
        self.backing.mapped().map(MappedMemory::as_ptr)
    }

    /// Checks that `span` lies inside the memory.
    pub fn check(&self, span: MemoryRange) -> Result<(), AccessError> {
        span.check(self.size())
    }

    /// Copies `out.len()` bytes at `offset` out of card memory.
    ///
    /// A concurrent write can tear the bytes.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        if let Some(mapped) = self.backing.mapped() {
            return mapped.read(offset, out);
        }
        self.check(MemoryRange::new(offset, out.len() as u64))?;
        self.backing.read(offset, out)
    }

    /// Copies an array of `N` bytes out of card memory.
    pub fn read_array<const N: usize>(&self, offset: u64) -> Result<[u8; N], AccessError> {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies `bytes` into card memory at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        if let Some(mapped) = self.backing.mapped() {
            mapped.write(offset, bytes)?;
            self.backing.flush();
            return Ok(());
        }
        self.check(MemoryRange::new(offset, bytes.len() as u64))?;
        self.backing.write(offset, bytes)
    }

    /// Copies inside the memory; the ranges may overlap.
    pub(crate) fn copy_within(&self, from: MemoryRange, to: u64) -> Result<(), AccessError> {
        if let Some(mapped) = self.backing.mapped() {
            mapped.copy_within(from, to)?;
            self.backing.flush();
            return Ok(());
        }
        self.check(from)?;
        self.check(MemoryRange::new(to, from.len))?;
        self.backing.copy_within(from, to)
    }

    /// Allocates the pages of `span`, if the memory is mapped; their content stays.
    pub fn prefault(&self, span: MemoryRange) -> Result<(), PrefaultError> {
        match self.backing.mapped() {
            Some(mapped) => mapped.prefault(span),
            None => Ok(self.check(span)?),
        }
    }
}
