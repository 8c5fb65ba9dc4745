//! Memory regions and windows: registration, keys, and the files in which peers map them.
//!
//! A region is memory of this process that work requests may name by a key (`mr_table`). A window
//! ([`window`]) is a key for a part of a region. Registration allocates the pages of a region up to a limit
//! (`MILLSTREAM_POPULATE`, bytes), so that the first transfer takes no page faults. No page is pinned: a file keeps the
//! pages that peers can map, and the kernel finds all other pages at the time of each access. Pages move into a file when
//! peers have used the region enough (`region_mover`).

mod memory;
pub mod window;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use millstream_shm::relocate::SharedPages;
use millstream_shm::{NullMemory, PAGE, fault_in};

use self::memory::{RegionKind, RegionMemory, RegionState, check};
use crate::adapter::Unfinished;
use crate::dm::Dm;
use crate::errno::{Errno, Result};
use crate::mr_table::{ACCESS_NULL, KeyKind, LocalMr};
use crate::pd::Pd;
use crate::region_mover;
use crate::types::{
    ACCESS_HUGETLB, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_ZERO_BASED, Sge, vendor,
};

/// A registered memory region. Dropping it deregisters it.
#[derive(Debug)]
pub struct Mr {
    deregistered: bool,
    pd: Arc<Pd>,
    local: LocalMr,
    state: Arc<RegionState>,
}

/// The changes of a re-registration; None keeps a property.
#[derive(Clone, Debug, Default)]
pub struct ReregMr {
    /// Other memory: address and bytes.
    pub memory: Option<(u64, u64)>,
    /// Another domain.
    pub pd: Option<Arc<Pd>>,
    /// Other access rights.
    pub access: Option<u32>,
}

/// The error of a re-registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReregError {
    /// The region is unchanged.
    Unchanged(Errno),
    /// The region is invalid and can only be deregistered.
    Invalid(Errno),
}

/// The advice of `ibv_advise_mr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MrAdvice {
    /// Prefetch pages for reading.
    Prefetch,
    /// Prefetch pages for writing.
    PrefetchWrite,
    /// Prefetch only pages that are present.
    PrefetchNoFault,
}

impl Mr {
    /// Length of the region of this domain with this key; None if there is none.
    #[must_use]
    pub fn find(pd: &Pd, key: u32) -> Option<u64> {
        let region = pd.context.adapter.mrs.find(key)?;
        (region.pd == pd.id).then_some(region.len)
    }

    /// Registers `len` bytes at `addr`, which work requests name from `iova` on, or from zero on with
    /// `IBV_ACCESS_ZERO_BASED`. With `IBV_ACCESS_ON_DEMAND` the memory may be mapped and unmapped afterwards.
    /// 2^64 − 1 bytes from address zero then register the whole address space.
    ///
    /// # Errors
    /// EINVAL for impossible access flags or a range that wraps; EFAULT for memory that is not mapped or does not permit
    /// the access; ENOMEM when the table is full.
    pub fn register(pd: &Arc<Pd>, addr: u64, len: u64, iova: u64, access: u32) -> Result<Self> {
        // Registration takes long, and peers wait for delayed acknowledgements.
        pd.context.adapter.port.flush_acks();
        region_mover::move_deferred(pd.context.adapter);
        let memory = RegionMemory::ordinary(pd.context.adapter, addr, len, iova, access)?;
        Self::publish(pd, memory, access)
    }

    /// Registers `len` bytes of a dma-buf (here: any file that can be mapped shared) from `offset`.
    ///
    /// # Errors
    /// EBADF or EACCES for a descriptor that cannot be mapped as `access` needs; EINVAL for a range that
    /// leaves it, or whose offset in a page differs from that of `iova`; EOPNOTSUPP for access flags that
    /// only memory with an address can have.
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
        let memory = RegionMemory::file(pd.context.adapter, fd, offset, len, iova, access)?;
        Self::publish(pd, memory, access)
    }

    /// Registers a part of device memory, which work requests name from zero on.
    ///
    /// # Errors
    /// EINVAL for a part that leaves it or access that is not zero-based; EOPNOTSUPP for flags that only
    /// memory with an address can have.
    pub fn register_dm(pd: &Arc<Pd>, dm: &Arc<Dm>, offset: u64, len: u64, access: u32) -> Result<Self> {
        if access & (ACCESS_ON_DEMAND | ACCESS_MW_BIND | ACCESS_HUGETLB) != 0 {
            return Err(Errno::NOTSUP);
        }
        if access & ACCESS_ZERO_BASED == 0 {
            return Err(Errno::INVAL);
        }
        // Attached first, so that the memory cannot be freed meanwhile.
        dm.attach()?;
        let memory = RegionMemory::file(pd.context.adapter, dm.as_fd(), offset, len, 0, access)
            .inspect_err(|_| dm.detach())?;
        Self::publish(pd, RegionMemory { dm: Some(dm.clone()), ..memory }, access)
    }

    /// Makes a region of maximum length that reads as zero and discards what is written. Peers
    /// cannot access it.
    ///
    /// # Errors
    /// ENOMEM when the table is full, or without the address space for it.
    pub fn null(pd: &Arc<Pd>) -> Result<Self> {
        NullMemory::get().ok_or(Errno::NOMEM)?;
        Self::publish(pd, RegionMemory::null(), ACCESS_LOCAL_WRITE | ACCESS_NULL)
    }

    fn publish(pd: &Arc<Pd>, mut memory: RegionMemory, access: u32) -> Result<Self> {
        let adapter = pd.context.adapter;
        let key = adapter.mrs.new_key(KeyKind::Region).inspect_err(|_| memory.release(adapter))?;
        let local = memory.region(key, pd.id, access);
        let state = RegionState::new(adapter, memory);
        state.publish(&mut state.lock(), local);
        pd.attach();
        Ok(Self { deregistered: false, pd: pd.clone(), local, state })
    }

    /// The key, local and remote.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.local.key
    }

    /// Bytes that peers can map now. They reach the rest through the kernel.
    #[must_use]
    pub fn mapped_len(&self) -> u64 {
        let memory = self.state.lock();
        memory.exported.range.end - memory.exported.range.start
    }

    /// Re-registers a region under its key (`ibv_rereg_mr`). Requests in flight finish with the old properties first.
    ///
    /// # Errors
    /// [`ReregError::Unchanged`]: EINVAL for no change or an invalid one. EOPNOTSUPP for other memory of a
    /// region that has no address. EBUSY while windows are bound to it. The errors of registration.
    /// [`ReregError::Invalid`]: EBUSY if a peer was stopped in the middle of a transfer.
    pub fn rereg(&mut self, change: &ReregMr) -> std::result::Result<(), ReregError> {
        let refused = |errno| Err(ReregError::Unchanged(errno));
        let adapter = self.pd.context.adapter;
        let memory = self.state.lock();
        if self.deregistered
            || memory.kind == RegionKind::Null
            || (change.memory.is_none() && change.pd.is_none() && change.access.is_none())
        {
            return refused(Errno::INVAL);
        }
        let pd = change.pd.clone().unwrap_or_else(|| self.pd.clone());
        let access = change.access.unwrap_or(self.local.access);
        // These flags decide how the memory is mapped.
        let other_kind = (access ^ self.local.access) & (ACCESS_ON_DEMAND | ACCESS_ZERO_BASED) != 0;
        let RegionMemory { va, len, iova, .. } = *memory;
        let iova = if self.local.access & ACCESS_ZERO_BASED != 0 { va } else { iova };
        let fresh = match (memory.kind, change.memory) {
            (RegionKind::Address, Some((addr, len))) => {
                RegionMemory::ordinary(adapter, addr, len, addr, access).map(Some)
            }
            (RegionKind::Address, None) if other_kind => {
                RegionMemory::ordinary(adapter, va, len, iova, access).map(Some)
            }
            (_, None) if !other_kind => check(access, memory.iova, len)
                .and_then(|()| memory.allows(access, self.local.access))
                .map(|()| None),
            _ => Err(Errno::NOTSUP),
        };
        drop(memory);
        let mut fresh = match fresh {
            Ok(fresh) => fresh,
            Err(errno) => return refused(errno),
        };
        let withdrawn = adapter.mrs.withdraw(self.local.key);
        let quiet = withdrawn.is_ok() && adapter.quiesce().is_ok();
        if let (false, Some(fresh)) = (quiet, &mut fresh) {
            fresh.release(adapter);
        }
        withdrawn.map_err(ReregError::Unchanged)?;
        if !quiet {
            return Err(ReregError::Invalid(Errno::BUSY));
        }
        let mut memory = self.state.lock();
        if let Some(fresh) = fresh {
            std::mem::replace(&mut *memory, fresh).release(adapter);
        }
        self.local = memory.region(self.local.key, pd.id, access);
        self.state.publish(&mut memory, self.local);
        drop(memory);
        pd.attach();
        std::mem::replace(&mut self.pd, pd).detach();
        Ok(())
    }

    /// Prefetches pages of on-demand regions (`ibv_advise_mr`). Without `wait`, missing pages are no error.
    ///
    /// # Errors
    /// ENOENT for a key without a region. EPERM for a region of another domain, or one that is not writable.
    /// EINVAL for a region that is not paged on demand. EFAULT for a range that leaves the region or is not
    /// mapped.
    pub fn advise(pd: &Pd, advice: MrAdvice, wait: bool, ranges: &[Sge]) -> Result<()> {
        let access = if advice == MrAdvice::PrefetchWrite { ACCESS_LOCAL_WRITE } else { 0 };
        let find = |range: &Sge| {
            let mr = pd.context.adapter.mrs.find(range.lkey).ok_or(Errno(libc::ENOENT))?;
            mr.check(pd.id, range.addr, u64::from(range.length), access).map_err(|cause| match cause {
                vendor::BOUNDS => Errno(libc::EFAULT),
                _ => Errno(libc::EPERM),
            })?;
            if mr.access & ACCESS_ON_DEMAND == 0 { Err(Errno::INVAL) } else { Ok(mr) }
        };
        for range in ranges {
            find(range)?;
        }
        for range in ranges.iter().filter(|_| advice != MrAdvice::PrefetchNoFault) {
            let mr = find(range)?;
            let start = (mr.va + (range.addr - mr.start)) as usize;
            let got = fault_in(start..start + range.length as usize, advice == MrAdvice::PrefetchWrite);
            if wait && got.is_err() {
                return Err(Errno(libc::EFAULT));
            }
        }
        Ok(())
    }

    /// Deregisters the region. After the return no peer accesses the memory: its key never becomes valid
    /// again. A second call does nothing.
    ///
    /// # Errors
    /// EBUSY while windows are bound to it. EBUSY also if a peer was stopped in the middle of a transfer into
    /// memory whose pages cannot be replaced, or while a request of this process writes to its memory; the key is no longer
    /// valid then. The call can be repeated.
    pub fn deregister(&mut self) -> Result<()> {
        if self.deregistered {
            return Ok(());
        }
        let adapter = self.pd.context.adapter;
        adapter.mrs.withdraw(self.local.key)?;
        self.state.end_moves();
        let unfinished = adapter.quiesce().err();
        let mut memory = self.state.lock();
        let all_of_it = |s: &SharedPages| s.range.len() as u64 == self.local.len && s.is_last();
        let moved = memory.shared.as_ref().is_some_and(all_of_it);
        // Moved pages are replaced by fresh ones, so a peer's late store reaches no memory in use.
        if unfinished.is_some_and(|operation| !moved || operation == Unfinished::OwnRequest) {
            return Err(Errno::BUSY);
        }
        memory.release(adapter);
        drop(memory);
        adapter.mrs.free(self.local.key);
        self.deregistered = true;
        self.pd.detach();
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.deregister().is_err() {
            // A window is bound to it, or a stopped peer has an operation in flight: the memory they may access is leaked.
            let mut memory = self.state.lock();
            std::mem::forget((memory.shared.take(), memory.view.take()));
        }
    }
}
