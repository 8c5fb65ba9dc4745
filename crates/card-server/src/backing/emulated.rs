//! Host memory in place of a card's: a memfd, sparse until it is written.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use millstream_card_abi::{AccessError, IoContext as _, MappedMemory, MemoryRange, SyscallError};
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::{Mapping, Memfd};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{AllocationOptions, Backing, register_descriptor};

/// A sealed memfd and its mapping.
#[derive(Debug)]
pub(crate) struct EmulatedMemory {
    fd: Memfd,
    mapped: MappedMemory,
    name: &'static str,
    options: AllocationOptions,
}

impl EmulatedMemory {
    pub(crate) fn new(
        name: &'static str,
        options: AllocationOptions,
    ) -> Result<EmulatedMemory, SyscallError> {
        let len = usize::try_from(options.bytes).unwrap_or(usize::MAX);
        let fd = Memfd::sealed(name, len).context("allocate card memory")?;
        let mapping = fd.map().context("map card memory")?;
        if options.huge_pages {
            mapping.advise_huge_pages();
        }
        if options.prefault {
            mapping.prefault(0, mapping.len()).context("prefault the pages of a card")?;
        }
        Ok(EmulatedMemory { fd, mapped: MappedMemory::new(Arc::new(mapping)), name, options })
    }

    /// Registers a part of it. Addresses of the region are offsets into the memory.
    pub(crate) fn register_part(
        &self,
        device: &Device,
        offset: u64,
        len: usize,
        access: Access,
    ) -> Result<Region, MemoryError> {
        // A memfd is not a dma-buf; only the soft device accepts it. An adapter pins the pages.
        if !device.is_soft() {
            return Region::mapped(device, self.mapped.mapping().clone(), offset, len, access);
        }
        register_descriptor(device, self.fd(), offset, len, access)
    }

    /// A second mapping.
    pub(crate) fn map_again(&self) -> Result<Mapping, SyscallError> {
        self.fd.map().context("map card memory")
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Backing for EmulatedMemory {
    fn size(&self) -> u64 {
        self.fd.len() as u64
    }

    fn mapped(&self) -> Option<&MappedMemory> {
        Some(&self.mapped)
    }

    fn clear(&self) -> Result<(), AccessError> {
        // Hole punching frees the pages; memory that was never written has none. An adapter would go on with the freed
        // pages, which it has pinned, while all others get new ones.
        if !self.options.prefault && !self.options.for_adapter {
            self.fd.punch_hole(0, self.fd.len());
        }
        // Prefaulted and pinned pages stay, and so do pages that the system did not free.
        self.written_ranges().into_iter().for_each(|range| self.mapped.zero(range));
        Ok(())
    }

    fn written_ranges(&self) -> Vec<MemoryRange> {
        data(&self.fd).unwrap_or_else(|_| vec![MemoryRange::new(0, self.size())])
    }

    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError> {
        self.register_part(device, 0, self.fd.len(), access)
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd())
    }

    fn allocate_another(&self) -> Option<io::Result<Box<dyn Backing>>> {
        let other = EmulatedMemory::new(self.name, self.options);
        Some(other.map(|other| Box::new(other) as Box<dyn Backing>).map_err(io::Error::other))
    }
}

/// The ranges that have pages; all others read as zeros.
fn data(fd: &Memfd) -> io::Result<Vec<MemoryRange>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    loop {
        let start = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(ranges),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(fd, SeekFrom::Hole(start))?;
        ranges.push(MemoryRange::new(start, end - start));
        at = end;
    }
}
