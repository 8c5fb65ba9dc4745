//! Memory regions and windows: registration, keys, and where peers can map them.
//!
//! A region is memory of this process that work requests may name by a key ([`table`]); a window
//! ([`window`]) is a key for a part of a region. Nothing is pinned: pages that peers can map are kept by
//! their file, and all others are reached through the kernel, which finds them as they are at that time.

pub(crate) mod table;
pub mod window;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use millstream_shm::relocate::{self, Shared};
use millstream_shm::{Mapping, NullMemory, PAGE, fault_in, file_len};

use crate::dm::Dm;
use crate::errno::{Errno, Result};
use crate::host::Host;
use crate::pd::Pd;
use crate::types::{
    ACCESS_HUGETLB, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_OPTIONAL,
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED, Sge, vendor,
};

use table::Place;
pub(crate) use table::{ACCESS_NULL, LocalMr, MrTable};

/// A registered memory region. Dropping it takes it back, too.
#[derive(Debug)]
pub struct Mr {
    taken_back: bool,
    pd: Arc<Pd>,
    local: LocalMr,
    memory: Memory,
}

/// What a region consists of, and what keeps it there.
#[derive(Debug)]
struct Memory {
    kind: Kind,
    place: Place,
    va: u64,
    len: u64,
    iova: u64,
    /// Keeps moved pages shared.
    shared: Option<Shared>,
    /// Our own view of a dma-buf.
    view: Option<Mapping>,
    /// The device memory that it is a part of.
    dm: Option<Arc<Dm>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// By address.
    Ordinary,
    /// By descriptor.
    Dmabuf,
    /// Nothing.
    Null,
}

/// What to change about a region; the rest stays.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Other memory: address and bytes.
    pub memory: Option<(u64, u64)>,
    /// Another domain.
    pub pd: Option<Arc<Pd>>,
    /// Other access rights.
    pub access: Option<u32>,
}

/// Why a region was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotChanged {
    /// It is as it was.
    AsItWas(Errno),
    /// It can only be deregistered now.
    Lost(Errno),
}

/// What pages are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// To be read.
    Read,
    /// To be written.
    Write,
    /// Only those that are there already.
    NoFault,
}

impl Mr {
    /// Bytes of the region of this domain that has this key; None if there is none.
    #[must_use]
    pub fn find(pd: &Pd, key: u32) -> Option<u64> {
        let region = pd.context.host.mrs.find(key)?;
        (region.pd == pd.id).then_some(region.len)
    }

    /// Registers `len` bytes at `addr`, which work requests will name from `iova` on, or from zero on
    /// with `IBV_ACCESS_ZERO_BASED`. With `IBV_ACCESS_ON_DEMAND` the memory may come, go and change
    /// afterwards, and all 2^64 − 1 bytes from address zero stand for the whole process.
    ///
    /// # Errors
    /// EINVAL for impossible access flags or a range that wraps; EFAULT for memory that is not there;
    /// ENOMEM when the table is full.
    pub fn register(pd: &Arc<Pd>, addr: u64, len: u64, iova: u64, access: u32) -> Result<Self> {
        // Pinning and mapping take their time.
        pd.context.host.wire.pay();
        let memory = Memory::ordinary(pd.context.host, addr, len, iova, access)?;
        Self::publish(pd, memory, access)
    }

    /// Registers `len` bytes of a dma-buf (here: any file that can be mapped shared) from `offset`.
    ///
    /// # Errors
    /// EBADF or EACCES for a descriptor that cannot be mapped as `access` needs, EINVAL for a range
    /// that leaves it or lies otherwise in its pages than `iova`, EOPNOTSUPP for access flags that only
    /// memory with an address can have.
    pub fn register_dmabuf(
        pd: &Arc<Pd>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        iova: u64,
        access: u32,
    ) -> Result<Self> {
        if access & (ACCESS_ON_DEMAND | ACCESS_ZERO_BASED | ACCESS_MW_BIND) != 0 {
            return Err(Errno::NOTSUP);
        }
        if len == 0 || offset % PAGE as u64 != iova % PAGE as u64 {
            return Err(Errno::INVAL);
        }
        let memory = Memory::file(pd.context.host, fd, offset, len, iova, access)?;
        Self::publish(pd, memory, access)
    }

    /// Registers a part of device memory, which work requests will name from zero on.
    ///
    /// # Errors
    /// EINVAL for a part that leaves it or access that is not zero-based, EOPNOTSUPP for flags that
    /// only memory with an address can have.
    pub fn register_dm(pd: &Arc<Pd>, dm: &Arc<Dm>, offset: u64, len: u64, access: u32) -> Result<Self> {
        if access & (ACCESS_ON_DEMAND | ACCESS_MW_BIND | ACCESS_HUGETLB) != 0 {
            return Err(Errno::NOTSUP);
        }
        if access & ACCESS_ZERO_BASED == 0 {
            return Err(Errno::INVAL);
        }
        // Before the rest, so that the memory cannot be freed meanwhile.
        dm.attach()?;
        let memory =
            Memory::file(pd.context.host, dm.as_fd(), offset, len, 0, access).inspect_err(|_| dm.detach())?;
        Self::publish(pd, Memory { dm: Some(dm.clone()), ..memory }, access)
    }

    /// Makes a region of the greatest length that reads as zero and forgets what is written; peers
    /// cannot name it.
    ///
    /// # Errors
    /// ENOMEM without a place in the table, or without the address space that stands behind it.
    pub fn null(pd: &Arc<Pd>) -> Result<Self> {
        NullMemory::get().ok_or(Errno::NOMEM)?;
        let memory = Memory {
            kind: Kind::Null,
            place: Place::NOWHERE,
            va: 0,
            len: u64::MAX,
            iova: 0,
            shared: None,
            view: None,
            dm: None,
        };
        Self::publish(pd, memory, ACCESS_LOCAL_WRITE | ACCESS_NULL)
    }

    fn publish(pd: &Arc<Pd>, mut memory: Memory, access: u32) -> Result<Self> {
        let host = pd.context.host;
        let key = host.mrs.new_key().inspect_err(|_| memory.let_go(host))?;
        let local = memory.region(key, pd.id, access);
        host.mrs.publish(host, local, &memory.place);
        pd.attach();
        Ok(Self { taken_back: false, pd: pd.clone(), local, memory })
    }

    /// The key, local and remote.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.local.key
    }

    /// Bytes that peers reach at memory speed; the rest goes through the kernel.
    #[must_use]
    pub fn mapped_len(&self) -> u64 {
        self.memory.place.range.end - self.memory.place.range.start
    }

    /// Changes a region under its key. Requests under way finish with the old one first.
    ///
    /// # Errors
    /// [`NotChanged::AsItWas`] with EINVAL for a change of nothing or an impossible one, EOPNOTSUPP for
    /// other memory of a region that has no address, EBUSY while windows are bound to it, and what
    /// registration reports. [`NotChanged::Lost`] with EBUSY if a peer was stopped in the middle of a
    /// transfer.
    pub fn change(&mut self, change: &Change) -> std::result::Result<(), NotChanged> {
        let refused = |errno| Err(NotChanged::AsItWas(errno));
        let host = self.pd.context.host;
        if self.taken_back
            || self.memory.kind == Kind::Null
            || (change.memory.is_none() && change.pd.is_none() && change.access.is_none())
        {
            return refused(Errno::INVAL);
        }
        let pd = change.pd.clone().unwrap_or_else(|| self.pd.clone());
        let access = change.access.unwrap_or(self.local.access);
        // How memory is paged and where it begins are decided when it is looked at.
        let other_kind = (access ^ self.local.access) & (ACCESS_ON_DEMAND | ACCESS_ZERO_BASED) != 0;
        let Memory { va, len, iova, .. } = self.memory;
        let iova = if self.local.access & ACCESS_ZERO_BASED != 0 { va } else { iova };
        let fresh = match (self.memory.kind, change.memory) {
            (Kind::Ordinary, Some((addr, len))) => Memory::ordinary(host, addr, len, addr, access).map(Some),
            (Kind::Ordinary, None) if other_kind => Memory::ordinary(host, va, len, iova, access).map(Some),
            (_, None) if !other_kind => {
                check(access, self.memory.iova, len).and_then(|()| self.memory.allows(access)).map(|()| None)
            }
            _ => Err(Errno::NOTSUP),
        };
        let mut fresh = match fresh {
            Ok(fresh) => fresh,
            Err(errno) => return refused(errno),
        };
        let withdrawn = host.mrs.withdraw(host, self.local.key);
        let quiet = withdrawn.is_ok() && host.quiesce();
        if let (false, Some(fresh)) = (quiet, &mut fresh) {
            fresh.let_go(host);
        }
        withdrawn.map_err(NotChanged::AsItWas)?;
        if !quiet {
            return Err(NotChanged::Lost(Errno::BUSY));
        }
        if let Some(fresh) = fresh {
            std::mem::replace(&mut self.memory, fresh).let_go(host);
        }
        self.local = self.memory.region(self.local.key, pd.id, access);
        host.mrs.publish(host, self.local, &self.memory.place);
        pd.attach();
        std::mem::replace(&mut self.pd, pd).detach();
        Ok(())
    }

    /// Gets pages of on-demand regions ready. Without `wait`, pages that cannot be had are no error.
    ///
    /// # Errors
    /// ENOENT for a key of no region, EPERM for one of another domain or a region that is not writable,
    /// EINVAL for one that is not paged on demand, EFAULT for a range that leaves it or is not there.
    pub fn advise(pd: &Pd, advice: Advice, wait: bool, ranges: &[Sge]) -> Result<()> {
        let access = if advice == Advice::Write { ACCESS_LOCAL_WRITE } else { 0 };
        let find = |range: &Sge| {
            let mr = pd.context.host.mrs.find(range.lkey).ok_or(Errno(libc::ENOENT))?;
            mr.check(pd.id, range.addr, u64::from(range.length), access).map_err(|cause| match cause {
                vendor::BOUNDS => Errno(libc::EFAULT),
                _ => Errno(libc::EPERM),
            })?;
            if mr.access & ACCESS_ON_DEMAND == 0 { Err(Errno::INVAL) } else { Ok(mr) }
        };
        for range in ranges {
            find(range)?;
        }
        for range in ranges.iter().filter(|_| advice != Advice::NoFault) {
            let mr = find(range)?;
            let start = (mr.va + (range.addr - mr.start)) as usize;
            let got = fault_in(start..start + range.length as usize, advice == Advice::Write);
            if wait && got.is_err() {
                return Err(Errno(libc::EFAULT));
            }
        }
        Ok(())
    }

    /// Takes the region back. When this returns, no peer touches the memory any more, and none
    /// will: its key is not valid again. A second call does nothing.
    ///
    /// # Errors
    /// EBUSY while windows are bound to it, or if a peer was stopped in the middle of a transfer into
    /// memory that cannot be taken away from it; the key is no longer valid then. The call can be
    /// repeated.
    pub fn deregister(&mut self) -> Result<()> {
        if self.taken_back {
            return Ok(());
        }
        let host = self.pd.context.host;
        host.mrs.withdraw(host, self.local.key)?;
        let all_of_it = |s: &Shared| s.range.len() as u64 == self.local.len && s.is_last();
        let moved = self.memory.shared.as_ref().is_some_and(all_of_it);
        // Moved pages are replaced by fresh ones: a late store goes where nobody looks.
        if !host.quiesce() && !moved {
            return Err(Errno::BUSY);
        }
        self.memory.let_go(host);
        host.mrs.free(self.local.key);
        self.taken_back = true;
        self.pd.detach();
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.deregister().is_err() {
            // Windows show it, or a peer was stopped inside: what they may still touch stays as it is,
            // for ever.
            std::mem::forget((self.memory.shared.take(), self.memory.view.take()));
        }
    }
}

impl Memory {
    fn ordinary(host: &Host, addr: u64, len: u64, iova: u64, access: u32) -> Result<Self> {
        let iova = if access & ACCESS_ZERO_BASED != 0 { 0 } else { iova };
        check(access, iova, len)?;
        if addr.checked_add(len).is_none() {
            return Err(Errno::INVAL);
        }
        let plain = Self {
            kind: Kind::Ordinary,
            place: Place::NOWHERE,
            va: addr,
            len,
            iova,
            shared: None,
            view: None,
            dm: None,
        };
        if access & ACCESS_ON_DEMAND != 0 {
            // The application may replace its pages at any time, so none are put into a file: peers go
            // through the kernel, which follows every change.
            return Ok(plain);
        }
        check_mapped(addr, len)?;
        let shared = relocate::share(addr as usize..(addr + len) as usize);
        let place = shared.as_ref().and_then(|shared| {
            let fd = shared.as_fd().try_clone_to_owned().ok()?;
            let file = host.files.add(&host.arena, fd, file_len(shared.as_fd()).ok()?)?;
            let start = iova + (shared.range.start as u64 - addr);
            let range = start..start + shared.range.len() as u64;
            Some(Place { file, range, offset: shared.offset as u64 })
        });
        Ok(Self { place: place.unwrap_or(Place::NOWHERE), shared, ..plain })
    }

    fn file(host: &Host, fd: BorrowedFd<'_>, offset: u64, len: u64, iova: u64, access: u32) -> Result<Self> {
        check(access, iova, len)?;
        let size = file_len(fd)? as u64;
        if offset > size || size - offset < len {
            return Err(Errno::INVAL);
        }
        let plain = Self {
            kind: Kind::Dmabuf,
            place: Place::NOWHERE,
            va: 0,
            len,
            iova,
            shared: None,
            view: None,
            dm: None,
        };
        if len == 0 {
            return Ok(plain);
        }
        let aligned = offset & !(PAGE as u64 - 1);
        let view = Mapping::new(fd, aligned as usize, (offset - aligned + len) as usize, stores(access))?;
        let va = view.base() as u64 + (offset - aligned);
        let owned = fd.try_clone_to_owned()?;
        // A file that could shrink under a peer's mapping is reached through our own view instead.
        let place = millstream_shm::cannot_shrink(fd)
            .then(|| host.files.add(&host.arena, owned, size as usize))
            .flatten()
            .map(|file| Place { file, range: iova..iova + len, offset });
        Ok(Self { place: place.unwrap_or(Place::NOWHERE), va, view: Some(view), ..plain })
    }

    fn region(&self, key: u32, pd: u32, access: u32) -> LocalMr {
        LocalMr { key, access, pd, start: self.iova, len: self.len, va: self.va }
    }

    /// EACCES if a view of a file was made for reading only and that is not enough.
    fn allows(&self, access: u32) -> Result<()> {
        match &self.view {
            Some(view) if stores(access) && !view.writable() => Err(Errno(libc::EACCES)),
            _ => Ok(()),
        }
    }

    /// Gives back what it was made of.
    fn let_go(&mut self, host: &Host) {
        let place = std::mem::replace(&mut self.place, Place::NOWHERE);
        if place.file.generation != 0 {
            host.files.remove(&host.arena, place.file);
        }
        self.shared = None;
        self.view = None;
        if let Some(dm) = self.dm.take() {
            dm.detach();
        }
    }
}

fn stores(access: u32) -> bool {
    access & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0
}

fn check(access: u32, iova: u64, len: u64) -> Result<()> {
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
