//! Memory regions: registration, keys, and where peers can map them.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use millstream_shm::relocate::{self, Shared};
use millstream_shm::{Mapping, PAGE, file_len, random_u64};

use crate::caps::MAX_MR;
use crate::errno::{Errno, Result};
use crate::files::FileId;
use crate::host::Host;
use crate::layout::{MR_TABLE, MrEntry};
use crate::pd::Pd;
use crate::types::{
    ACCESS_HUGETLB, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_OPTIONAL,
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED,
};

/// A region as this process's own work requests see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalMr {
    pub(crate) key: u32,
    pub(crate) access: u32,
    pub(crate) pd: u32,
    /// As work requests name it.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Address of `start` in this process.
    pub(crate) va: u64,
}

/// The private truth behind the shared entries.
#[derive(Debug, Default)]
pub(crate) struct MrTable {
    slots: Mutex<Slots>,
    /// Rises with every deregistration: a cached [`LocalMr`] of an older epoch must be looked up again.
    epoch: AtomicU64,
}

#[derive(Debug, Default)]
struct Slots {
    regions: HashMap<u32, LocalMr>,
    /// Key tags of earlier lives, by slot.
    used: Vec<u16>,
    free: std::collections::VecDeque<u32>,
}

impl MrTable {
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn find(&self, lkey: u32) -> Option<LocalMr> {
        self.slots.lock().expect("no panic under this lock").regions.get(&lkey).copied()
    }

    /// Takes a slot and makes a key for it: slot in the high half, a random tag in the low half.
    fn new_key(&self) -> Result<u32> {
        let mut slots = self.slots.lock().expect("no panic under this lock");
        // A slot rests as long as possible before it is used again.
        let slot = if slots.used.len() < MAX_MR {
            slots.used.push(0);
            slots.used.len() as u32 - 1
        } else {
            slots.free.pop_front().ok_or(Errno::NOMEM)?
        };
        let tag = loop {
            let tag = random_u64() as u16;
            // Slot 0 with tag 0 would be the key 0, and no slot gets its last tag again.
            if tag != 0 && tag != slots.used[slot as usize] {
                break tag;
            }
        };
        slots.used[slot as usize] = tag;
        Ok(slot << 16 | u32::from(tag))
    }

    fn insert(&self, mr: LocalMr) {
        self.slots.lock().expect("no panic under this lock").regions.insert(mr.key, mr);
    }

    fn remove(&self, key: u32) {
        self.slots.lock().expect("no panic under this lock").regions.remove(&key);
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    fn free(&self, key: u32) {
        self.slots.lock().expect("no panic under this lock").free.push_back(key >> 16);
    }
}

/// A registered memory region. Dropping it takes it back, too.
#[derive(Debug)]
pub struct Mr {
    taken_back: bool,
    pd: Arc<Pd>,
    local: LocalMr,
    file: Option<FileId>,
    /// Keeps moved pages shared.
    shared: Option<Shared>,
    /// Our own view of a dma-buf.
    view: Option<Mapping>,
}

/// What peers can map of a region, as addresses in the region's own space.
struct Window {
    file: FileId,
    range: Range<u64>,
    offset: u64,
}

impl Mr {
    /// Registers `len` bytes at `addr`, which work requests will name from `iova` on.
    ///
    /// # Errors
    /// EINVAL for impossible access flags or a range that wraps; EOPNOTSUPP for flags that are not
    /// offered; EFAULT for memory that is not there; ENOMEM when the table is full.
    pub fn register(pd: &Arc<Pd>, addr: u64, len: u64, iova: u64, access: u32) -> Result<Self> {
        check(access, iova, len)?;
        if addr.checked_add(len).is_none() {
            return Err(Errno::INVAL);
        }
        check_mapped(addr, len)?;
        let host = pd.context.host;
        let shared = relocate::share(addr as usize..(addr + len) as usize);
        let window = shared.as_ref().and_then(|shared| {
            let fd = shared.as_fd().try_clone_to_owned().ok()?;
            let file = host.files.add(&host.arena, fd, file_len(shared.as_fd()).ok()?)?;
            let start = iova + (shared.range.start as u64 - addr);
            Some(Window {
                file,
                range: start..start + shared.range.len() as u64,
                offset: shared.offset as u64,
            })
        });
        Self::publish(pd, addr, len, iova, access, window, shared, None)
    }

    /// Registers `len` bytes of a dma-buf (here: any file that can be mapped shared) from `offset`.
    ///
    /// # Errors
    /// EBADF or EACCES for a descriptor that cannot be mapped as `access` needs, EINVAL for a range
    /// that leaves it, and as [`Mr::register`].
    pub fn register_dmabuf(
        pd: &Arc<Pd>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        iova: u64,
        access: u32,
    ) -> Result<Self> {
        check(access, iova, len)?;
        let size = file_len(fd)? as u64;
        if len == 0 || offset > size || size - offset < len || offset % PAGE as u64 != iova % PAGE as u64 {
            return Err(Errno::INVAL);
        }
        let host = pd.context.host;
        let aligned = offset & !(PAGE as u64 - 1);
        let writes = access & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
        let view = Mapping::new(fd, aligned as usize, (offset - aligned + len) as usize, writes)?;
        let va = view.base() as u64 + (offset - aligned);
        let owned = fd.try_clone_to_owned()?;
        // A file that could shrink under a peer's mapping is reached through our own view instead.
        let window = millstream_shm::cannot_shrink(fd)
            .then(|| host.files.add(&host.arena, owned, size as usize))
            .flatten()
            .map(|file| Window { file, range: iova..iova + len, offset });
        Self::publish(pd, va, len, iova, access, window, None, Some(view))
    }

    #[expect(clippy::too_many_arguments, reason = "the two constructors' common end")]
    fn publish(
        pd: &Arc<Pd>,
        va: u64,
        len: u64,
        iova: u64,
        access: u32,
        window: Option<Window>,
        shared: Option<Shared>,
        view: Option<Mapping>,
    ) -> Result<Self> {
        let host = pd.context.host;
        let file = window.as_ref().map(|w| w.file);
        let key = host.mrs.new_key().inspect_err(|_| {
            if let Some(file) = file {
                host.files.remove(&host.arena, file);
            }
        })?;
        let local = LocalMr { key, access, pd: pd.id, start: iova, len, va };
        let entry = entry(host, key);
        entry.access.store(access, Ordering::Relaxed);
        entry.pd.store(pd.id, Ordering::Relaxed);
        entry.start.store(iova, Ordering::Relaxed);
        entry.len.store(len, Ordering::Relaxed);
        entry.va.store(va, Ordering::Relaxed);
        let window =
            window.unwrap_or(Window { file: FileId { slot: 0, generation: 0 }, range: 0..0, offset: 0 });
        entry.file.store(window.file.slot, Ordering::Relaxed);
        entry.file_generation.store(window.file.generation, Ordering::Relaxed);
        entry.map_start.store(window.range.start, Ordering::Relaxed);
        entry.map_end.store(window.range.end, Ordering::Relaxed);
        entry.file_offset.store(window.offset, Ordering::Relaxed);
        host.mrs.insert(local);
        entry.key.store(key, Ordering::Release);
        pd.attach();
        Ok(Self { taken_back: false, pd: pd.clone(), local, file, shared, view })
    }

    /// The key, local and remote.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.local.key
    }

    /// Bytes that peers reach at memory speed; the rest goes through the kernel.
    #[must_use]
    pub fn mapped_len(&self) -> u64 {
        match (&self.shared, self.file) {
            (Some(shared), Some(_)) => shared.range.len() as u64,
            (None, Some(_)) => self.local.len,
            _ => 0,
        }
    }

    /// Takes the region back. When this returns, no peer touches the memory any more, and none
    /// will: its key is not valid again. A second call does nothing.
    ///
    /// # Errors
    /// EBUSY if a peer was stopped in the middle of a transfer into memory that cannot be taken
    /// away from it; the key is no longer valid then, and the call can be repeated.
    pub fn deregister(&mut self) -> Result<()> {
        if self.taken_back {
            return Ok(());
        }
        let host = self.pd.context.host;
        host.mrs.remove(self.local.key);
        entry(host, self.local.key).key.store(0, Ordering::SeqCst);
        let moved = self.shared.as_ref().is_some_and(|s| s.range.len() as u64 == self.local.len);
        // Moved pages are replaced by fresh ones: a late store goes where nobody looks.
        if !host.quiesce() && !moved {
            return Err(Errno::BUSY);
        }
        if let Some(file) = self.file.take() {
            host.files.remove(&host.arena, file);
        }
        self.shared = None;
        host.mrs.free(self.local.key);
        self.taken_back = true;
        self.pd.detach();
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.deregister().is_err() {
            // A peer was stopped inside: what it may still touch stays as it is, for ever.
            std::mem::forget((self.shared.take(), self.view.take()));
        }
    }
}

fn entry(host: &'static Host, key: u32) -> &'static MrEntry {
    let offset = MR_TABLE + (key >> 16) as usize * size_of::<MrEntry>();
    // SAFETY: inside the arena, which lives for ever; all fields are atomics.
    unsafe { host.arena.at(offset).cast::<MrEntry>().as_ref() }
}

fn check(access: u32, iova: u64, len: u64) -> Result<()> {
    const OFFERED: u32 = ACCESS_LOCAL_WRITE
        | ACCESS_REMOTE_WRITE
        | ACCESS_REMOTE_READ
        | ACCESS_REMOTE_ATOMIC
        | ACCESS_HUGETLB
        | ACCESS_OPTIONAL;
    if access & (ACCESS_ZERO_BASED | ACCESS_ON_DEMAND | ACCESS_MW_BIND) != 0 {
        return Err(Errno::NOTSUP);
    }
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

/// EFAULT for memory that is not there, as pinning it would find.
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
