//! Registered memory regions.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use millstream_quantity::{Lkey, Rkey};
use millstream_shm::{Mapping, Memfd};
use rdma_mummy_sys::ibv_sge;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::memory_region::{MemoryRegion, RegisterMemoryRegionErrorKind};

use super::keys::{Access, OutOfBounds, RemoteMemory};
use super::registration::{Registration, register_at};
use crate::device::Device;
use crate::error::os_error;

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Nothing to register.
    #[error("a memory region cannot have 0 bytes")]
    Empty,
    /// The memory could not be had.
    #[error("cannot allocate {len} bytes of landing memory: {cause}")]
    Allocate {
        /// Bytes asked for.
        len: usize,
        /// Why.
        cause: io::Error,
    },
    /// The device refused it.
    #[error("RDMA device {device}: cannot register {len} bytes of {what} with {access:?}: {cause}")]
    Register {
        /// The device.
        device: String,
        /// Bytes to register.
        len: usize,
        /// Which kind of memory.
        what: &'static str,
        /// With which rights.
        access: Access,
        /// Why.
        cause: io::Error,
    },
}

/// Bytes that stay where they are.
///
/// # Safety
/// For as long as the value lives, `bytes` returns the same address and length, also after the value has been
/// moved, and the memory stays mapped.
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

// SAFETY: the value inside does not move, and lives as long as this.
unsafe impl<T: StableBytes> StableBytes for Arc<T> {
    fn bytes(&self) -> &[u8] {
        T::bytes(self)
    }
}

/// A part of a [`Region`] of this process in a work request: the scatter/gather element of the verbs.
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

    /// The address of its first byte, in the terms of the registration.
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

/// Registered memory. The memory lives as long as the region, and is deregistered before it goes.
///
/// A peer with the remote key changes landing memory at any time, so the safe methods copy; a view of the
/// memory itself is [`Region::slice`], and says when it may be had.
pub struct Region {
    // First, so that the device lets go of the memory before the memory goes.
    registration: Registration,
    memory: Memory,
    /// The address of the first byte in work requests and for peers.
    addr: u64,
    len: usize,
    access: Access,
}

enum Memory {
    /// Made here, and mapped as a whole.
    Landing(Memfd, Mapping),
    /// Someone's bytes, only read.
    Source(Box<dyn StableBytes>),
    /// Not in this address space: a card's memory.
    Dmabuf(OwnedFd),
    /// Mapped by somebody who shares the mapping: a card's memory in the card's process.
    Mapped { _mapping: Arc<Mapping> },
}

impl Region {
    /// Landing memory: `len` zero-filled bytes in a memfd, mapped into this process.
    ///
    /// Peers on the same host that use the soft device map it too, so it is registered through its descriptor
    /// (`ibv_reg_dmabuf_mr`); where that is not supported, and on an adapter, through its mapping. `name` is
    /// for `/proc/<pid>/maps`.
    ///
    /// # Errors
    /// [`MemoryError`] if there is no such memory, or the device refuses it.
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
            true => register_descriptor(device, memory.as_fd(), 0, len, addr, access),
            false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        };
        let registration = match by_descriptor {
            Err(cause) if cause.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                // SAFETY: the mapping is `len` bytes and outlives the registration (see the order of the
                // fields).
                unsafe { register_memory(device, mapping.base(), len, access) }.map_err(failed)?
            }
            other => other.map_err(failed)?,
        };
        let registration = Registration::Verbs(registration);
        Ok(Region { registration, memory: Memory::Landing(memory, mapping), addr, len, access })
    }

    /// Memory that exists already and is only read: a mapped stream file, for example.
    ///
    /// `remote_read` also lets peers with the key read it.
    ///
    /// # Errors
    /// [`MemoryError`] if it is empty, or the device refuses it.
    pub fn source(
        device: &Device,
        owner: impl StableBytes,
        remote_read: bool,
    ) -> Result<Region, MemoryError> {
        let owner: Box<dyn StableBytes> = Box::new(owner);
        let bytes = owner.bytes();
        if bytes.is_empty() {
            return Err(MemoryError::Empty);
        }
        let access = if remote_read { Access::REMOTE_READ } else { Access::SOURCE };
        let (addr, len) = (bytes.as_ptr() as u64, bytes.len());
        // SAFETY: the bytes stay where they are while `owner` lives, which outlives the registration; without
        // write access the device only reads them.
        let registration = unsafe { register_memory(device, bytes.as_ptr(), len, access) }
            .map_err(|cause| refused(device, len, "source memory", access, cause))?;
        let registration = Registration::Verbs(registration);
        Ok(Region { registration, memory: Memory::Source(owner), addr, len, access })
    }

    /// Memory behind a descriptor: a card's dma-buf, or the memfd of an emulated card.
    ///
    /// The region is the `len` bytes from `offset` on. Its addresses, in [`Sge`] and [`RemoteMemory`], are
    /// offsets into the descriptor's memory, so they mean the same to all who know the card. This process has
    /// no pointer to it.
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
        let registration = register_descriptor(device, descriptor.as_fd(), offset, len, offset, access)
            .map_err(|cause| refused(device, len, "memory behind a descriptor", access, cause))?;
        let registration = Registration::Verbs(registration);
        Ok(Region { registration, memory: Memory::Dmabuf(descriptor), addr: offset, len, access })
    }

    /// A part of a mapping, registered by its address for a device that cannot take the descriptor behind it.
    ///
    /// As with [`Region::dmabuf`], its addresses are offsets, here into the mapping, and bytes are reached
    /// through the mapping and not through this.
    ///
    /// # Errors
    /// [`MemoryError`] if it is empty, or the device refuses it: adapters cannot pin memory of other devices.
    ///
    /// # Panics
    /// If the part is not inside the mapping.
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
        let registration = unsafe { register_at(device, start, len, offset, access) }
            .map_err(|cause| refused(device, len, "mapped memory", access, cause))?;
        let registration = Registration::Iova(registration);
        Ok(Region { registration, memory: Memory::Mapped { _mapping: mapping }, addr: offset, len, access })
    }

    /// Its size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// What may be done to it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The key for this process's work requests.
    pub fn lkey(&self) -> Lkey {
        Lkey::new(self.registration.lkey())
    }

    /// The key for peers.
    pub fn rkey(&self) -> Rkey {
        Rkey::new(self.registration.rkey())
    }

    /// All of it, as a peer names it.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { addr: self.addr, rkey: self.rkey(), len: self.len as u64 }
    }

    /// A part of it, for a work request of this process.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part does not lie within, or has 4 GiB or more.
    #[inline]
    pub fn sge(&self, offset: u64, length: u32) -> Result<Sge, OutOfBounds> {
        OutOfBounds::check("a memory region", self.len as u64, offset, length.into())?;
        Ok(Sge(ibv_sge { addr: self.addr + offset, length, lkey: self.registration.lkey() }))
    }

    /// The descriptor of landing or foreign memory; a source has none.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Memory::Landing(memory, _) => Some(memory.as_fd()),
            Memory::Dmabuf(descriptor) => Some(descriptor.as_fd()),
            Memory::Source(_) | Memory::Mapped { .. } => None,
        }
    }

    /// Its first byte, where this process can reach it; foreign memory has no address here.
    pub fn as_ptr(&self) -> Option<NonNull<u8>> {
        match &self.memory {
            Memory::Landing(_, mapping) => NonNull::new(mapping.base()),
            // Only ever read: `copy_from_slice` asks for landing memory.
            Memory::Source(owner) => NonNull::new(owner.bytes().as_ptr().cast_mut()),
            Memory::Dmabuf(_) | Memory::Mapped { .. } => None,
        }
    }

    /// Allocates every page now, so that no transfer pays for a first touch. Nothing to do except for landing
    /// memory.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn populate(&self) -> io::Result<()> {
        match &self.memory {
            Memory::Landing(_, mapping) => mapping.prefault(0, self.len),
            Memory::Source(_) | Memory::Dmabuf(_) | Memory::Mapped { .. } => Ok(()),
        }
    }

    /// Copies a part of landing memory, or of a source, out of it.
    ///
    /// What a peer writes meanwhile may be seen in part; a completion orders what came before it.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part does not lie within, or the memory is not in this address space.
    pub fn copy_to_slice(&self, offset: u64, to: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.reachable(offset, to.len(), self.as_ptr())?;
        // SAFETY: the range lies within the memory, which lives as long as `self`, and `to` is not a part of
        // it, because only `slice` hands out parts and its contract excludes exclusive references.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies into a part of landing memory.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part does not lie within, or this is not landing memory.
    pub fn copy_from_slice(&self, offset: u64, from: &[u8]) -> Result<(), OutOfBounds> {
        let writable = match &self.memory {
            Memory::Landing(_, mapping) => NonNull::new(mapping.base()),
            Memory::Source(_) | Memory::Dmabuf(_) | Memory::Mapped { .. } => None,
        };
        let to = self.reachable(offset, from.len(), writable)?;
        // SAFETY: the range lies within the mapping, which lives as long as `self`. `from` may be a part of
        // it by way of `slice`, hence the copy that allows overlap.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    /// A view of a part of landing memory, or of a source.
    ///
    /// # Safety
    /// While the view lives, nothing writes to that part: no peer with the remote key, no receive or READ
    /// posted here, no [`copy_from_slice`](Region::copy_from_slice), and no other process that maps the
    /// memory.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part does not lie within, or the memory is not in this address space.
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
        // SAFETY: the range lies within initialised memory that lives as long as `self`; the caller sees to
        // it that nothing writes to it.
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

/// # Safety
/// The memory is `len` bytes, writable if `access` allows writes, and outlives the registration.
unsafe fn register_memory(
    device: &Device,
    start: *const u8,
    len: usize,
    access: Access,
) -> io::Result<Arc<MemoryRegion>> {
    // SAFETY: as promised by the caller.
    unsafe { device.domain().reg_mr(start as usize, len, access.flags()) }
        .map_err(|error| os_error!(error.0, RegisterMemoryRegionErrorKind::Ibverbs))
}

fn register_descriptor(
    device: &Device,
    descriptor: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    addr: u64,
    access: Access,
) -> io::Result<Arc<MemoryRegion>> {
    let access: AccessFlags = access.flags();
    // SAFETY: the device keeps a reference to the memory behind the descriptor and checks offset and length
    // against it; no address of this process is involved.
    unsafe { device.domain().reg_dmabuf_mr(offset, len, addr, descriptor.as_raw_fd(), access) }
        .map_err(|error| os_error!(error.0, RegisterMemoryRegionErrorKind::Ibverbs))
}
