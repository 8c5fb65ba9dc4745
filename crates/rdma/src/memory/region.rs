//! Registered memory regions.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use millstream_quantity::{Lkey, Rkey};
use millstream_shm::{Mapping, Memfd};
use rdma_mummy_sys::ibv_sge;

use super::keys::{Access, OutOfBounds, RemoteMemory};
use super::registration::Registration;
use crate::device::Device;

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The size is 0.
    #[error("a memory region must have at least 1 byte")]
    Empty,
    /// The memory could not be allocated.
    #[error("cannot allocate {len} bytes of landing memory: {cause}")]
    Allocate {
        /// Requested size, in bytes.
        len: usize,
        /// The cause.
        cause: io::Error,
    },
    /// The device rejected the registration.
    #[error("RDMA device {device}: cannot register {len} bytes of {what} with {access:?}: {cause}")]
    Register {
        /// The device.
        device: String,
        /// Size, in bytes.
        len: usize,
        /// Kind of memory.
        what: &'static str,
        /// Access rights.
        access: Access,
        /// The cause.
        cause: io::Error,
    },
}

/// Bytes at a stable address.
///
/// # Safety
/// While the value lives, the memory stays mapped and `bytes` returns the same address and length. Moving the
/// value does not change them.
pub unsafe trait StableBytes: Send + Sync + 'static {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

// SAFETY: memory of static lifetime.
unsafe impl StableBytes for &'static [u8] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: a heap allocation that only an exclusive reference could change or move.
unsafe impl StableBytes for Box<[u8]> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: a heap allocation that is freed with its last owner.
unsafe impl StableBytes for Arc<[u8]> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: a mapping that is unmapped when the value is dropped.
unsafe impl StableBytes for memmap2::Mmap {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: the inner value does not move, and lives as long as the `Arc`.
unsafe impl<T: StableBytes> StableBytes for Arc<T> {
    fn bytes(&self) -> &[u8] {
        T::bytes(self)
    }
}

/// Scatter/gather element: a part of a local [`Region`] in a work request.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Sge(ibv_sge);

impl Sge {
    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "an element of 0 bytes is as good as any other")]
    #[inline]
    pub fn len(&self) -> u32 {
        self.0.length
    }

    /// Address of its first byte in the registration.
    #[inline]
    pub fn addr(&self) -> u64 {
        self.0.addr
    }
}

impl fmt::Debug for Sge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sge({:#x}+{}, lkey {:#x})", self.0.addr, self.0.length, self.0.lkey)
    }
}

/// Why a region is still registered.
#[derive(Debug, thiserror::Error)]
#[error("cannot deregister {} bytes: {cause}", .region.len)]
pub struct DeregisterError {
    /// The region. Its keys may be invalid already.
    pub region: Region,
    /// The cause.
    pub cause: io::Error,
}

/// Registered memory. The memory lives as long as the region; dropping the region deregisters it first.
///
/// After [`Region::deregister`] has succeeded, no peer accesses the memory. After a drop, a process of this host that was
/// stopped in the middle of a transfer may still do so.
///
/// A peer with the remote key can change landing memory at any time, so the safe methods copy. [`Region::slice`] returns
/// a view, under conditions.
pub struct Region {
    // First, so that the region is deregistered before its memory is freed.
    registration: Registration,
    memory: Memory,
    /// Address of the first byte in the registration.
    addr: u64,
    len: usize,
    access: Access,
}

enum Memory {
    /// Allocated and mapped here.
    Landing(Memfd, Mapping),
    /// Memory of the caller, only read.
    Source(Box<dyn StableBytes>),
    /// Memory behind a descriptor, not mapped here: a card's memory.
    Dmabuf(OwnedFd),
    /// A shared mapping: a card's memory in the card's process.
    Mapped { _mapping: Arc<Mapping> },
}

impl Region {
    /// Allocates landing memory: `len` zero bytes in a memfd, mapped into this process.
    ///
    /// Peers on the same host map it, too, with the soft device, so it is registered by its descriptor
    /// (`ibv_reg_dmabuf_mr`). On an adapter, or if that is not supported, it is registered by its address. `name` appears in
    /// `/proc/<pid>/maps`.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation or the registration fails.
    pub fn landing(device: &Device, name: &CStr, len: usize, access: Access) -> Result<Region, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let (memory, mapping) = Memfd::sealed(&name.to_string_lossy(), len)
            .and_then(|memory| memory.map().map(|mapping| (memory, mapping)))
            .map_err(|cause| MemoryError::Allocate { len, cause })?;
        let addr = mapping.base() as u64;
        let failed = |cause| refused(device, len, "landing memory", access, cause);
        let by_descriptor = match device.is_soft() {
            true => Registration::of_descriptor(device, memory.as_fd(), 0, len, addr, access),
            false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        };
        let registration = match by_descriptor {
            Err(cause) if cause.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                // SAFETY: the mapping is `len` bytes and outlives the registration (see the order of the
                // fields).
                unsafe { Registration::of_memory(device, mapping.base(), len, access) }.map_err(failed)?
            }
            other => other.map_err(failed)?,
        };
        Ok(Region { registration, memory: Memory::Landing(memory, mapping), addr, len, access })
    }

    /// The sealed memfd of [`landing`](Self::landing) memory, for other processes of this host; `None` for other memory.
    pub fn landing_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Memory::Landing(memory, _) => Some(memory.as_fd()),
            _ => None,
        }
    }

    /// Registers existing memory that is only read, for example a mapped stream file.
    ///
    /// With `remote_read`, peers with the key can read it. Linux before 6.2 does not pin pages of a file that is mapped
    /// shared and only for reading (`ib_umem_get`, EFAULT): there, a copy is registered.
    ///
    /// # Errors
    /// [`MemoryError`] if it is empty, or the device refuses it.
    pub fn source(
        device: &Device,
        owner: impl StableBytes,
        remote_read: bool,
    ) -> Result<Region, MemoryError> {
        let mut owner: Box<dyn StableBytes> = Box::new(owner);
        let len = owner.bytes().len();
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let access = if remote_read { Access::REMOTE_READ } else { Access::SOURCE };
        // SAFETY: the bytes stay where they are while `owner` lives, which outlives the registration; without
        // write access the device only reads them.
        let register = |owner: &dyn StableBytes| unsafe {
            Registration::of_memory(device, owner.bytes().as_ptr(), len, access)
        };
        let mut registered = register(&*owner);
        if registered.as_ref().is_err_and(|cause| cause.raw_os_error() == Some(libc::EFAULT)) {
            owner = Box::new(Box::<[u8]>::from(owner.bytes()));
            registered = register(&*owner);
        }
        let registration =
            registered.map_err(|cause| refused(device, len, "source memory", access, cause))?;
        let addr = owner.bytes().as_ptr() as u64;
        Ok(Region { registration, memory: Memory::Source(owner), addr, len, access })
    }

    /// Registers memory behind a descriptor: a card's dma-buf, or the memfd of an emulated card.
    ///
    /// The region is `len` bytes at `offset`. Its addresses, in [`Sge`] and [`RemoteMemory`], are offsets into the
    /// descriptor's memory. This process has no pointer to it.
    ///
    /// # Errors
    /// [`MemoryError`] if it is empty, or the device refuses it.
    pub fn dmabuf(
        device: &Device,
        descriptor: OwnedFd,
        offset: u64,
        len: usize,
        access: Access,
    ) -> Result<Region, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let registration =
            Registration::of_descriptor(device, descriptor.as_fd(), offset, len, offset, access)
                .map_err(|cause| refused(device, len, "memory behind a descriptor", access, cause))?;
        Ok(Region { registration, memory: Memory::Dmabuf(descriptor), addr: offset, len, access })
    }

    /// Registers a part of a mapping by its address, for a device that cannot use the descriptor behind it.
    ///
    /// As with [`Region::dmabuf`], its addresses are offsets, here into the mapping. Its bytes are accessed through the
    /// mapping.
    ///
    /// # Errors
    /// [`MemoryError`] if it is empty, or the device refuses it: adapters cannot pin memory of other devices.
    ///
    /// # Panics
    /// If the part exceeds the mapping.
    pub fn mapped(
        device: &Device,
        mapping: Arc<Mapping>,
        offset: u64,
        len: usize,
        access: Access,
    ) -> Result<Region, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let inside = len <= mapping.len() && offset <= (mapping.len() - len) as u64;
        assert!(inside, "{len} bytes at {offset:#x} of a mapping of {} bytes", mapping.len());
        let start = mapping.base().wrapping_add(offset as usize);
        // SAFETY: the range is the mapping's, which outlives the registration (see the order of the fields).
        let registration = unsafe { Registration::at_iova(device, start, len, offset, access) }
            .map_err(|cause| refused(device, len, "mapped memory", access, cause))?;
        Ok(Region { registration, memory: Memory::Mapped { _mapping: mapping }, addr: offset, len, access })
    }

    /// Deregisters the region. The call takes as long as operations in flight; the soft device waits at most two seconds
    /// for each.
    ///
    /// # Errors
    /// [`DeregisterError`] with the region and EBUSY: a process of this host was stopped in the middle of a transfer.
    /// The soft device takes no further operations with its keys. The call can be repeated.
    pub fn deregister(mut self) -> Result<(), DeregisterError> {
        match self.registration.deregister() {
            Ok(()) => Ok(()),
            Err(cause) => Err(DeregisterError { region: self, cause }),
        }
    }

    /// Size, in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Access rights.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Local key.
    pub fn lkey(&self) -> Lkey {
        Lkey::new(self.registration.lkey())
    }

    /// Remote key.
    pub fn rkey(&self) -> Rkey {
        Rkey::new(self.registration.rkey())
    }

    /// The whole region, for a peer.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { addr: self.addr, rkey: self.rkey(), len: self.len as u64 }
    }

    /// A part of the region, for a local work request.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part exceeds the region.
    #[inline]
    pub fn sge(&self, offset: u64, length: u32) -> Result<Sge, OutOfBounds> {
        OutOfBounds::check("a memory region", self.len as u64, offset, length.into())?;
        Ok(Sge(ibv_sge { addr: self.addr + offset, length, lkey: self.registration.lkey() }))
    }

    /// The descriptor of landing memory or of memory behind a descriptor; `None` otherwise.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Memory::Landing(memory, _) => Some(memory.as_fd()),
            Memory::Dmabuf(descriptor) => Some(descriptor.as_fd()),
            Memory::Source(_) | Memory::Mapped { .. } => None,
        }
    }

    /// The mapping of landing memory; `None` for other memory.
    pub fn mapping(&self) -> Option<&Mapping> {
        match &self.memory {
            Memory::Landing(_, mapping) => Some(mapping),
            Memory::Source(_) | Memory::Dmabuf(_) | Memory::Mapped { .. } => None,
        }
    }

    /// Address of the first byte; `None` for memory that is not mapped here.
    pub fn as_ptr(&self) -> Option<NonNull<u8>> {
        match &self.memory {
            Memory::Landing(_, mapping) => NonNull::new(mapping.base()),
            // Only read: `copy_from_slice` requires landing memory.
            Memory::Source(owner) => NonNull::new(owner.bytes().as_ptr().cast_mut()),
            Memory::Dmabuf(_) | Memory::Mapped { .. } => None,
        }
    }

    /// Allocates all pages of landing memory, so that no transfer has a page fault. No effect on other memory.
    ///
    /// # Errors
    /// The system call failed.
    pub fn populate(&self) -> io::Result<()> {
        match &self.memory {
            Memory::Landing(_, mapping) => mapping.prefault(0, self.len),
            Memory::Source(_) | Memory::Dmabuf(_) | Memory::Mapped { .. } => Ok(()),
        }
    }

    /// Copies a part of the region.
    ///
    /// Concurrent writes of a peer may be seen partially. A completion orders the writes before it.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part exceeds the region, or the memory is not mapped here.
    pub fn copy_to_slice(&self, offset: u64, to: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.reachable(offset, to.len(), self.as_ptr())?;
        // SAFETY: the range lies within the memory, which lives as long as `self`. `to` is not a part of it:
        // only `slice` returns parts, and its contract excludes exclusive references.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies into a part of landing memory.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part exceeds the region, or this is not landing memory.
    pub fn copy_from_slice(&self, offset: u64, from: &[u8]) -> Result<(), OutOfBounds> {
        let writable = match &self.memory {
            Memory::Landing(_, mapping) => NonNull::new(mapping.base()),
            Memory::Source(_) | Memory::Dmabuf(_) | Memory::Mapped { .. } => None,
        };
        let to = self.reachable(offset, from.len(), writable)?;
        // SAFETY: the range lies within the mapping, which lives as long as `self`. `from` may be a part of
        // it, returned by `slice`, so the copy allows overlap.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    /// A view of a part of the region.
    ///
    /// # Safety
    /// While the view lives, nothing may write to that part: no peer with the remote key, no posted receive or READ, no
    /// [`copy_from_slice`](Region::copy_from_slice), and no other process that maps the memory.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part exceeds the region, or the memory is not mapped here.
    pub unsafe fn slice(&self, range: Range<u64>) -> Result<&[u8], OutOfBounds> {
        let length = range.end.saturating_sub(range.start);
        let size = self.len as u64;
        let length = usize::try_from(length).map_err(|_| OutOfBounds {
            offset: range.start,
            length,
            size,
            memory: "a memory region",
        })?;
        let start = self.reachable(range.start, length, self.as_ptr())?;
        // SAFETY: the range lies within initialised memory that lives as long as `self`; the caller guarantees that nothing
        // writes to it.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), length) })
    }

    fn reachable(
        &self,
        offset: u64,
        length: usize,
        start: Option<NonNull<u8>>,
    ) -> Result<NonNull<u8>, OutOfBounds> {
        let Some(start) = start else {
            return Err(OutOfBounds {
                offset,
                length: length as u64,
                size: 0,
                memory: "the reachable part of a region",
            });
        };
        OutOfBounds::check("a memory region", self.len as u64, offset, length as u64)?;
        // SAFETY: `offset` is at most the length of the memory (which fits `usize`), so the result is in or
        // just behind it.
        Ok(unsafe { start.add(offset as usize) })
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.memory {
            Memory::Landing(..) => "landing",
            Memory::Source(_) => "source",
            Memory::Dmabuf(_) => "foreign",
            Memory::Mapped { .. } => "mapped",
        };
        write!(f, "Region({kind}, {:#x}+{}, {:?})", self.addr, self.len, self.access)
    }
}

fn refused(device: &Device, len: usize, what: &'static str, access: Access, cause: io::Error) -> MemoryError {
    MemoryError::Register { device: device.name().to_owned(), len, what, access, cause }
}
