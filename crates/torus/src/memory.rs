//! Memory that packets come from and go to: a shared mapping, registered with a device if there is one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_card::MemoryAccess;
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::{Mapping, Memfd, PAGE};

use crate::card::LeasedCard;

/// A range exceeds its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes at {offset} exceed {size} bytes of memory")]
pub struct OutOfRange {
    /// Start (bytes).
    pub offset: u64,
    /// Length (bytes).
    pub length: u64,
    /// Size of the memory (bytes).
    pub size: u64,
}

/// An access to [`Memory`] in progress.
#[derive(Debug)]
#[must_use]
pub struct AccessGuard<'a> {
    _card: Option<MemoryAccess<'a>>,
}

/// Shared memory. Other processes may write it at any time, so it is only copied.
#[derive(Debug)]
pub struct Memory {
    // First, so that it is deregistered before it is unmapped.
    region: Option<Region>,
    mapping: Arc<Mapping>,
    /// The card whose memory this is.
    card: Option<Arc<LeasedCard>>,
    /// In tests without a card: its lease has ended.
    #[cfg(test)]
    has_ended: std::sync::atomic::AtomicBool,
}

impl Memory {
    /// Allocates `len` zero bytes, and returns a descriptor of them for another process.
    ///
    /// # Errors
    /// The system or the device refuses.
    pub fn allocate(
        name: &str,
        len: usize,
        device: Option<(&Device, Access)>,
    ) -> io::Result<(Memory, OwnedFd)> {
        let memfd = Memfd::sealed(name, len)?;
        let memory = Memory::of(&memfd, device)?;
        Ok((memory, memfd.into_fd()))
    }

    /// Maps memory of another process.
    ///
    /// # Errors
    /// The memory can shrink, or the system or the device refuses.
    pub fn from_peer(descriptor: OwnedFd, device: Option<(&Device, Access)>) -> io::Result<Memory> {
        Memory::of(&Memfd::from_peer(descriptor)?, device)
    }

    fn new(region: Option<Region>, mapping: Arc<Mapping>, card: Option<Arc<LeasedCard>>) -> Memory {
        Memory {
            region,
            mapping,
            card,
            #[cfg(test)]
            has_ended: Default::default(),
        }
    }

    fn of(memfd: &Memfd, device: Option<(&Device, Access)>) -> io::Result<Memory> {
        let mapping = Arc::new(memfd.map()?);
        let region = device.map(|(device, access)| register(device, memfd, &mapping, access)).transpose()?;
        Ok(Memory::new(region, mapping, None))
    }

    /// Maps a part of a card's memory, for the process that holds its lease.
    ///
    /// # Errors
    /// The range is not whole pages of the card's memory, or the system or the device refuses.
    pub fn of_card(
        card: &Arc<LeasedCard>,
        offset: u64,
        length: usize,
        device: &Device,
        access: Access,
    ) -> io::Result<Memory> {
        let descriptor = card.descriptor()?;
        let mapping = Arc::new(map_part(&descriptor, offset, length)?);
        let failed = |error: MemoryError| io::Error::other(error);
        let region = if device.is_soft() {
            Region::dmabuf(device, descriptor, offset, length, access).map_err(failed)?
        } else {
            Region::mapped(device, Arc::clone(&mapping), 0, length, access).map_err(failed)?
        };
        Ok(Memory::new(Some(region), mapping, Some(Arc::clone(card))))
    }

    /// Maps a part of a card's memory, for an application.
    ///
    /// # Errors
    /// The range is not whole pages of the memory, or the system refuses.
    pub fn part_of(descriptor: &OwnedFd, offset: u64, length: usize) -> io::Result<Memory> {
        let mapping = Arc::new(map_part(descriptor, offset, length)?);
        Ok(Memory::new(None, mapping, None))
    }

    /// False once the lease of the card whose memory this is has ended: nobody here may use the memory then.
    #[must_use]
    pub fn is_live(&self) -> bool {
        #[cfg(test)]
        if self.has_ended.load(Ordering::Relaxed) {
            return false;
        }
        self.card.as_ref().is_none_or(|card| card.is_leased())
    }

    /// As if it were a card's memory whose lease ends.
    #[cfg(test)]
    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Begins an access to the memory, which is this process's until the guard is dropped. None if the lease of the card
    /// whose memory this is has ended.
    pub fn access(&self) -> Option<AccessGuard<'_>> {
        match &self.card {
            None => Some(AccessGuard { _card: None }),
            Some(card) => card.access().map(|access| AccessGuard { _card: Some(access) }),
        }
    }

    /// Size (bytes).
    #[must_use]
    pub fn size(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// The registration.
    #[must_use]
    pub fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// The mapping, for words that several processes access as atomics.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Checks a range.
    ///
    /// # Errors
    /// [`OutOfRange`].
    pub fn check(&self, offset: u64, length: u64) -> Result<(), OutOfRange> {
        let size = self.size();
        if offset <= size && length <= size - offset {
            return Ok(());
        }
        Err(OutOfRange { offset, length, size })
    }

    /// Copies into the memory.
    ///
    /// # Errors
    /// [`OutOfRange`].
    pub fn store(&self, offset: u64, data: &[u8]) -> Result<(), OutOfRange> {
        self.check(offset, data.len() as u64)?;
        // SAFETY: the range was checked, and a slice of this process never overlaps a mapping that is only copied.
        unsafe {
            let to = self.mapping.base().add(offset as usize);
            std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        }
        Ok(())
    }

    /// Copies from the memory.
    ///
    /// # Errors
    /// [`OutOfRange`].
    pub fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfRange> {
        self.check(offset, into.len() as u64)?;
        // The range was checked just now.
        let _ = self.mapping.copy_to_slice(offset as usize, into);
        Ok(())
    }

    /// Copies from other memory.
    ///
    /// # Errors
    /// [`OutOfRange`] of either.
    pub fn copy_from(&self, offset: u64, from: &Memory, at: u64, length: u64) -> Result<(), OutOfRange> {
        self.check(offset, length)?;
        from.check(at, length)?;
        // SAFETY: both ranges were checked; the two may be the same memory, so the copy allows overlap.
        unsafe {
            let to = self.mapping.base().add(offset as usize);
            std::ptr::copy(from.mapping.base().add(at as usize), to, length as usize);
        }
        // A notification that follows is seen after these bytes.
        fence(Ordering::Release);
        Ok(())
    }

    /// Changes an aligned word of 8 bytes at once, and returns its previous value.
    ///
    /// # Errors
    /// [`OutOfRange`].
    ///
    /// # Panics
    /// If the offset is not a multiple of 8; the caller checks it.
    pub fn update(&self, offset: u64, change: impl Fn(u64) -> u64) -> Result<u64, OutOfRange> {
        self.check(offset, 8)?;
        let word = self.mapping.word64(offset as usize);
        let mut old = word.load(Ordering::Acquire);
        loop {
            let new = change(u64::from_le(old)).to_le();
            match word.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(old) => return Ok(u64::from_le(old)),
                Err(now) => old = now,
            }
        }
    }
}

/// Maps whole pages of sealed memory.
fn map_part(descriptor: &OwnedFd, offset: u64, length: usize) -> io::Result<Mapping> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    if !offset.is_multiple_of(PAGE as u64) || length == 0 {
        return Err(invalid(format!("{length} bytes at {offset} do not begin with a page of {PAGE} bytes")));
    }
    let size = millstream_shm::file_len(descriptor.as_fd())? as u64;
    if !millstream_shm::is_sealed(descriptor.as_fd()) {
        return Err(invalid("card memory is not sealed against shrinking".to_owned()));
    }
    if offset > size || length as u64 > size - offset {
        return Err(invalid(format!("{length} bytes at {offset} exceed card memory of {size} bytes")));
    }
    Mapping::new(descriptor.as_fd(), offset as usize, length, true)
}

/// Registers by descriptor with the soft device, which maps it in other processes; else by address.
fn register(device: &Device, memfd: &Memfd, mapping: &Arc<Mapping>, access: Access) -> io::Result<Region> {
    let len = mapping.len();
    let failed = |error: MemoryError| io::Error::other(error);
    if device.is_soft() {
        let descriptor = memfd.as_fd().try_clone_to_owned()?;
        return Region::dmabuf(device, descriptor, 0, len, access).map_err(failed);
    }
    Region::mapped(device, Arc::clone(mapping), 0, len, access).map_err(failed)
}
