//! The memory of a region, and the file in which peers map it.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use millstream_shm::relocate::{self, SharedPages};
use millstream_shm::{
    AreaSearch, Mapping, PAGE, cannot_shrink, file_behind, file_len, is_device_memory, populate,
};

use crate::adapter::LocalAdapter;
use crate::dm::Dm;
use crate::errno::{Errno, Result};
use crate::exported_files::Descriptor;
use crate::move_queue::Job;
use crate::mr_table::{ACCESS_DEVICE, ExportedRange, LocalMr, RegionPages};
use crate::region_mover;
use crate::types::{
    ACCESS_HUGETLB, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_OPTIONAL,
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED,
};

/// The memory of a region, and the objects that keep it.
#[derive(Debug)]
pub(super) struct RegionMemory {
    pub(super) kind: RegionKind,
    pub(super) exported: ExportedRange,
    pub(super) va: u64,
    pub(super) len: u64,
    pub(super) iova: u64,
    /// Whether peers may be able to map the memory later, if they cannot now.
    pub(super) may_be_shared: bool,
    /// Keeps moved pages shared.
    pub(super) shared: Option<SharedPages>,
    /// Moves that ended in front of a page that the kernel used, while [`shared`](Self::shared) is not exported yet.
    pub(super) unfinished_moves: u32,
    /// This process's mapping of a dma-buf.
    pub(super) view: Option<Mapping>,
    /// The device memory that the region is a part of.
    pub(super) dm: Option<Arc<Dm>>,
    /// The memory belongs to another device, whose driver has mapped it: loads are slow.
    pub(super) is_device: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegionKind {
    /// Memory at an address.
    Address,
    /// A file: a dma-buf or device memory.
    File,
    /// No memory.
    Null,
}

impl RegionMemory {
    /// No memory: loads read zeros, and stores are discarded.
    pub(super) fn null() -> Self {
        Self {
            kind: RegionKind::Null,
            exported: ExportedRange::NONE,
            va: 0,
            len: u64::MAX,
            iova: 0,
            may_be_shared: false,
            shared: None,
            unfinished_moves: 0,
            view: None,
            dm: None,
            is_device: false,
        }
    }

    /// Memory at an address.
    pub(super) fn ordinary(
        adapter: &LocalAdapter,
        addr: u64,
        len: u64,
        iova: u64,
        access: u32,
    ) -> Result<Self> {
        let iova = if access & ACCESS_ZERO_BASED != 0 { 0 } else { iova };
        check(access, iova, len)?;
        if addr.checked_add(len).is_none() {
            return Err(Errno::INVAL);
        }
        let mut memory = Self {
            kind: RegionKind::Address,
            exported: ExportedRange::NONE,
            va: addr,
            len,
            iova,
            may_be_shared: false,
            shared: None,
            unfinished_moves: 0,
            view: None,
            dm: None,
            is_device: false,
        };
        if access & ACCESS_ON_DEMAND != 0 {
            // The application may replace the pages at any time, so they are not moved to a file. Peers access them
            // through the kernel.
            return Ok(memory);
        }
        check_mapped(addr, len)?;
        memory.may_be_shared = len != 0 && relocate::is_enabled();
        // Where no page exists yet, the file gets the pages that the region needs anyway, and nothing is copied.
        let is_fresh = memory.may_be_shared && len >= FRESH_MOVE && relocate::is_untouched(memory.range());
        if !is_fresh {
            populate(memory.range(), stores(access))?;
        }
        // Pages that another region has moved are shared: atomic operations through both keys take one way.
        let at_once = memory.may_be_shared && (is_fresh || relocate::moves_at_registration());
        let shared = if at_once {
            relocate::move_pages(memory.range())
                .inspect_err(|error| tracing::debug!("pages of {:#x?} stay: {error}", memory.range()))
                .ok()
        } else {
            relocate::find_moved(memory.range())
        };
        if is_fresh {
            populate(memory.range(), stores(access))?;
        }
        if let Some(shared) = shared {
            memory.export_pages(adapter, shared);
        } else {
            memory.is_device = len != 0 && is_device_memory(&memory.range());
            memory.export_file(adapter, stores(access), AreaSearch::Quick);
        }
        Ok(memory)
    }

    /// Addresses of a region of kind [`RegionKind::Address`].
    fn range(&self) -> Range<usize> {
        self.va as usize..(self.va + self.len) as usize
    }

    /// Lets peers map pages that were moved.
    fn export_pages(&mut self, adapter: &LocalAdapter, shared: SharedPages) {
        let memory = shared.memory();
        let len = memory.len();
        self.export(adapter, (Box::new(memory), len), shared.range.clone(), shared.offset as u64);
        self.shared = Some(shared);
        self.may_be_shared = false;
    }

    /// Lets peers map the file that the application has mapped as the region's memory, if it can no longer shrink: memory
    /// of a card, or of another device's memory in a program that knows only addresses. True if they can.
    fn export_file(&mut self, adapter: &LocalAdapter, stores: bool, search: AreaSearch) -> bool {
        let Some((fd, offset)) = file_behind(self.range(), stores, search) else { return false };
        match file_len(fd.as_fd()) {
            // Pages that another region moved go back to private memory when that region is deregistered.
            _ if relocate::is_moved_file(fd.as_fd()) => false,
            Ok(len) if cannot_shrink(fd.as_fd()) && len as u64 >= offset + self.len => {
                self.export(adapter, (Box::new(fd), len), self.range(), offset)
            }
            _ => false,
        }
    }

    /// Lets peers map a part of the region, addresses `part`, that lies in a file from `offset` on.
    fn export(
        &mut self,
        adapter: &LocalAdapter,
        (fd, len): (Box<dyn Descriptor>, usize),
        part: Range<usize>,
        offset: u64,
    ) -> bool {
        let Some(file) = adapter.files.add(adapter.arena, fd, len) else { return false };
        let start = self.iova + (part.start as u64 - self.va);
        self.exported = ExportedRange { file, range: start..start + part.len() as u64, offset };
        self.may_be_shared = false;
        true
    }

    /// A file.
    pub(super) fn file(
        adapter: &LocalAdapter,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        iova: u64,
        access: u32,
    ) -> Result<Self> {
        check(access, iova, len)?;
        let size = file_len(fd)? as u64;
        if offset > size || size - offset < len {
            return Err(Errno::INVAL);
        }
        let plain = Self {
            kind: RegionKind::File,
            exported: ExportedRange::NONE,
            va: 0,
            len,
            iova,
            may_be_shared: false,
            shared: None,
            unfinished_moves: 0,
            view: None,
            dm: None,
            is_device: false,
        };
        if len == 0 {
            return Ok(plain);
        }
        let aligned = offset & !(PAGE as u64 - 1);
        let view = Mapping::new(fd, aligned as usize, (offset - aligned + len) as usize, stores(access))?;
        let va = view.base() as u64 + (offset - aligned);
        let owned = fd.try_clone_to_owned()?;
        // A file that could shrink would fault in a peer's mapping. Peers use this process's mapping instead.
        let exported = cannot_shrink(fd)
            .then(|| adapter.files.add(adapter.arena, Box::new(owned), size as usize))
            .flatten()
            .map(|file| ExportedRange { file, range: iova..iova + len, offset });
        Ok(Self { exported: exported.unwrap_or(ExportedRange::NONE), va, view: Some(view), ..plain })
    }

    /// The region as this process's requests use it.
    pub(super) fn region(&self, key: u32, pd: u32, access: u32) -> LocalMr {
        let access = if self.is_device { access | ACCESS_DEVICE } else { access & !ACCESS_DEVICE };
        LocalMr { key, access, pd, start: self.iova, len: self.len, va: self.va }
    }

    /// Whether the memory permits another access than that of the region.
    ///
    /// # Errors
    /// EACCES if a file is mapped read-only and `access` includes stores; EFAULT if memory at an address cannot be stored to.
    pub(super) fn allows(&self, access: u32, before: u32) -> Result<()> {
        if !stores(access) || stores(before) || access & ACCESS_ON_DEMAND != 0 {
            return Ok(());
        }
        match (self.kind, &self.view) {
            (RegionKind::Address, _) => Ok(populate(self.range(), true)?),
            (_, Some(view)) if !view.writable() => Err(Errno(libc::EACCES)),
            _ => Ok(()),
        }
    }

    /// Releases the file, the mappings and the device memory.
    pub(super) fn release(&mut self, adapter: &LocalAdapter) {
        let exported = std::mem::replace(&mut self.exported, ExportedRange::NONE);
        if exported.file.generation != 0 {
            adapter.files.remove(adapter.arena, exported.file);
        }
        self.may_be_shared = false;
        self.shared = None;
        self.view = None;
        if let Some(dm) = self.dm.take() {
            dm.detach();
        }
    }
}

/// A region's memory, shared by the region and the thread that lets peers map it.
#[derive(Debug)]
pub(super) struct RegionState {
    adapter: &'static LocalAdapter,
    memory: Mutex<RegionMemory>,
    /// Set when the region is deregistered: a move that is in progress ends early.
    ends: AtomicBool,
}

impl RegionState {
    pub(super) fn new(adapter: &'static LocalAdapter, memory: RegionMemory) -> Arc<Self> {
        Arc::new(Self { adapter, memory: Mutex::new(memory), ends: AtomicBool::new(false) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RegionMemory> {
        self.memory.lock().expect("no panic under this lock")
    }

    /// Ends a move that is in progress, and prevents others.
    pub(super) fn end_moves(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Publishes the region, with the way to let peers map it later.
    pub(super) fn publish(self: &Arc<Self>, memory: &mut RegionMemory, local: LocalMr) {
        let pages = memory.may_be_shared.then(|| {
            let pages: Weak<dyn RegionPages> = Arc::downgrade(&(self.clone() as Arc<dyn RegionPages>));
            (pages, move_cost(memory.len))
        });
        let adapter = self.adapter;
        let mut is_settled = adapter.mrs.publish(local, &memory.exported, pages);
        // Pages that another thread has moved since they were looked for: no peer knows the key yet, so none uses it through
        // the kernel.
        if memory.may_be_shared && self.adopt_locked(memory, local.key) {
            is_settled = false;
        }
        if !is_settled {
            region_mover::add(adapter, Job::Settle { key: local.key });
        }
    }

    /// Promotes the entry of the region `key` if its pages were moved for another region; true if they were.
    fn adopt_locked(&self, memory: &mut RegionMemory, key: u32) -> bool {
        let Some(shared) = relocate::find_moved(memory.range()) else { return false };
        memory.export_pages(self.adapter, shared);
        self.adapter.mrs.promote(key, &memory.exported);
        true
    }
}

impl RegionPages for RegionState {
    fn share(&self, key: u32) -> io::Result<bool> {
        let mut memory = self.lock();
        let goes_on = || !self.ends.load(Ordering::Relaxed);
        if !memory.may_be_shared || !goes_on() {
            return Ok(false);
        }
        let moved_before = memory.shared.is_none().then(|| relocate::find_moved(memory.range())).flatten();
        if let Some(shared) = moved_before {
            memory.export_pages(self.adapter, shared);
        } else if memory.shared.is_some() || !memory.export_file(self.adapter, true, AreaSearch::Full) {
            // Older kernels have no quick way to find the file: it is looked for when it matters.
            let shared = relocate::move_pages_while(memory.range(), goes_on)?;
            // An entry is promoted once. Peers tell again when their costs have doubled.
            if !shared.is_whole() && memory.unfinished_moves < UNFINISHED_MOVES {
                memory.unfinished_moves += 1;
                memory.shared = Some(shared);
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            memory.export_pages(self.adapter, shared);
        }
        self.adapter.mrs.promote(key, &memory.exported);
        Ok(true)
    }

    fn adopt(&self, key: u32) -> bool {
        let mut memory = self.lock();
        memory.may_be_shared && self.adopt_locked(&mut memory, key)
    }
}

/// Bytes of the smallest region that moves at registration if none of its pages exist yet. The file then has huge pages, so this
/// takes no longer than to allocate private pages. Regions of this size are the pools of message layers.
const FRESH_MOVE: u64 = 2 << 20;

/// Moves of a region's pages that may end early before peers map only the part that has moved.
const UNFINISHED_MOVES: u32 = 4;

/// Estimated cost of moving the pages of a region, and of moving them back when it is deregistered \[ns\]:
/// `millstream bench scale` measures it.
fn move_cost(len: u64) -> u64 {
    (len / 2).saturating_mul(3).saturating_add(60_000)
}

/// Whether a region with this access is stored to.
fn stores(access: u32) -> bool {
    access & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0
}

/// Checks access flags, and that the region's addresses do not wrap.
pub(super) fn check(access: u32, iova: u64, len: u64) -> Result<()> {
    const OFFERED: u32 = ACCESS_LOCAL_WRITE
        | ACCESS_REMOTE_WRITE
        | ACCESS_REMOTE_READ
        | ACCESS_REMOTE_ATOMIC
        | ACCESS_MW_BIND
        | ACCESS_ZERO_BASED
        | ACCESS_ON_DEMAND
        | ACCESS_HUGETLB
        | ACCESS_OPTIONAL;
    // Remote stores need local ones (IBTA volume 1, 10.6.3.1).
    let remote_store = access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
    if access & !OFFERED != 0
        || (remote_store && access & ACCESS_LOCAL_WRITE == 0)
        || iova.checked_add(len).is_none()
    {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// EFAULT for memory that is not mapped, as pinning it would report.
fn check_mapped(addr: u64, len: u64) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let start = addr & !(PAGE as u64 - 1);
    // SAFETY: a system call that changes nothing: MS_ASYNC has had no effect since Linux 2.6.19, but
    // the call still answers ENOMEM for a range with a hole.
    let holes = unsafe { libc::syscall(libc::SYS_msync, start, addr + len - start, libc::MS_ASYNC) } != 0;
    if holes { Err(Errno(libc::EFAULT)) } else { Ok(()) }
}
