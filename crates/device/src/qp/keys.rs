//! Caches of checked memory keys: each region is looked up and mapped once.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use millstream_quantity::Qpn;
use millstream_shm::{Mapping, NullMemory, fault_in};

use crate::adapter::LocalAdapter;
use crate::exported_files::FileId;
use crate::mr_table::{ACCESS_DEVICE, ACCESS_NULL, CACHE_PLACES, LocalMr};
use crate::peer::Peer;
use crate::types::{ACCESS_LOCAL_WRITE, ACCESS_ON_DEMAND, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, vendor};
use millstream_lockfree::mr_entry::MrEntry;

const SLOTS: usize = CACHE_PLACES;

fn slot(key: u32) -> usize {
    (key >> 16) as usize % SLOTS
}

/// Access bits of regions that are not copied from and to directly.
const INDIRECT: u32 = ACCESS_ON_DEMAND | ACCESS_NULL;

/// The right by which a request accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessRight {
    /// Reading. A remote peer needs IBV_ACCESS_REMOTE_READ.
    Read,
    /// Writing by RDMA WRITE (IBV_ACCESS_REMOTE_WRITE).
    RemoteWrite,
    /// Writing into a receive's memory, or the data of an RDMA READ (IBV_ACCESS_LOCAL_WRITE).
    LocalWrite,
}

/// For each [`AccessRight`], the accessible bytes of a range from its start on: all of them, or none.
#[derive(Clone, Copy, Debug, Default)]
struct Extents([u64; 3]);

impl Extents {
    fn new(len: u64, allows: impl Fn(AccessRight) -> bool) -> Self {
        Self(
            [AccessRight::Read, AccessRight::RemoteWrite, AccessRight::LocalWrite]
                .map(|purpose| if allows(purpose) { len } else { 0 }),
        )
    }

    /// Whether `len` bytes, at least one, at offset `from` are accessible. An address before the start wraps around to a
    /// large offset.
    #[inline(always)]
    fn admit(&self, purpose: AccessRight, from: u64, len: u64) -> bool {
        let room = self.0[purpose as usize];
        from < room && room - from >= len
    }
}

/// How eight bytes of a region are changed atomically.
#[derive(Clone, Copy, Debug)]
pub(super) enum AtomicAccess<'a> {
    /// By the processor: every initiator can map them.
    Mapped(&'a AtomicU64),
    /// By copies through the kernel, under a lock. Initiators that have mapped them, if there are any, take it as well.
    Copied,
    /// Not now. Other initiators may have mapped them and take no lock; this process tries again to map them.
    NotMappedYet,
    /// Not at all. Other initiators may have mapped them and take no lock; this process cannot map them for stores.
    NotMappable,
}

/// A peer's memory region or window, checked. Aligned to cache lines, so that an index is a shift.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct RemoteMr {
    /// The entry's tag when it was read: key and generation.
    name: u64,
    /// In the arena that [`RemoteKeys::arena`] keeps mapped.
    entry: NonNull<MrEntry>,
    pub(super) access: u32,
    /// Zero for a memory window of type 2, which belongs to the queue pair `qpn`.
    pub(super) pd: u32,
    qpn: Qpn,
    start: u64,
    len: u64,
    /// Address of `start` in the peer.
    va: u64,
    /// The mapped part, in the region's addresses, and where it is mapped.
    pub(super) map_start: u64,
    pub(super) map_end: u64,
    pub(super) base: *mut u8,
    /// Whether the mapped part is writable: its owner may have sealed it against new writers.
    pub(super) writable: bool,
    /// Of the mapped part, from `map_start` on.
    extents: Extents,
    /// The part that every initiator can map, where they use the processor's atomic operations.
    common: std::ops::Range<u64>,
    /// Whether atomic operations on that part take the lock of those that go through the kernel.
    pub(super) locks_atomics: bool,
    /// Whether the peer did not answer when its file was to be mapped: it is asked again later.
    is_provisional: bool,
    _mapping: Option<Arc<Mapping>>,
}

// SAFETY: the mapping is held; its contents are shared memory, touched by raw copies only.
unsafe impl Send for RemoteMr {}

impl RemoteMr {
    /// Reads the peer's entry once and checks the copy.
    fn look_up(peer: &Arc<Peer>, key: u32) -> Option<Self> {
        let mut window = Self::look_up_and_map(peer, key)?;
        window.extents = Extents::new(window.map_end - window.map_start, |purpose| match purpose {
            AccessRight::Read => window.access & ACCESS_REMOTE_READ != 0,
            AccessRight::RemoteWrite => window.writable && window.access & ACCESS_REMOTE_WRITE != 0,
            AccessRight::LocalWrite => window.writable && window.access & ACCESS_LOCAL_WRITE != 0,
        });
        Some(window)
    }

    fn look_up_and_map(peer: &Arc<Peer>, key: u32) -> Option<Self> {
        let entry = peer.mr_entry(key)?;
        let (name, shown) = entry.read(key)?;
        let (start, len, va) = (shown.start, shown.len, shown.va);
        start.checked_add(len)?;
        va.checked_add(len)?;
        let file = FileId { slot: shown.file.0, generation: shown.file.1 };
        let (map_start, map_end) = (shown.mapped.start, shown.mapped.end);
        let mut window = Self {
            name,
            entry: NonNull::from(entry),
            access: shown.access,
            pd: shown.pd,
            qpn: Qpn::new(shown.qpn),
            start,
            len,
            va,
            map_start: 0,
            map_end: 0,
            base: std::ptr::null_mut(),
            writable: true,
            extents: Extents::default(),
            common: if file.generation == 0 { 0..0 } else { shown.mapped },
            locks_atomics: shown.locks_atomics,
            is_provisional: false,
            _mapping: None,
        };
        let own = peer.local_mrs();
        if let Some(mrs) = own {
            // For this process's own memory, peers' stores into the entry are ignored.
            let (ours, qpn) = mrs.find_tag(name)?;
            (window.access, window.pd, window.qpn) = (ours.access, ours.pd, qpn);
            (window.start, window.len, window.va) = (ours.start, ours.len, ours.va);
        }
        if window.access & INDIRECT != 0 {
            // Such memory cannot stay mapped.
            return Some(window);
        }
        if own.is_some() {
            (window.map_start, window.map_end) = (window.start, window.start + window.len);
            window.base = window.va as *mut u8;
            return Some(window);
        }
        if file.generation == 0 || map_start < start || map_end > start + len || map_start >= map_end {
            return Some(window);
        }
        let mapping = peer.map(file);
        window.is_provisional = mapping.is_none() && peer.is_silent();
        if let Some(mapping) = mapping
            && (mapping.len() as u64)
                .checked_sub(shown.offset)
                .is_some_and(|room| room >= map_end - map_start)
        {
            // SAFETY: inside the mapping, as just checked.
            window.base = unsafe { mapping.base().add(shown.offset as usize) };
            (window.map_start, window.map_end) = (map_start, map_end);
            window.writable = mapping.writable();
            window._mapping = Some(mapping);
        }
        Some(window)
    }

    #[inline(always)]
    fn entry(&self) -> &MrEntry {
        // SAFETY: a value of this type lies in a `RemoteKeys`, whose `arena` keeps the entry mapped; the entry is made
        // of atomics.
        unsafe { self.entry.as_ref() }
    }

    #[inline]
    fn valid(&self, key: u32) -> bool {
        self.name as u32 == key && self.entry().has_tag(self.name)
    }

    /// Whether it is a memory window of type 2 of the queue pair `qpn`.
    pub(super) fn belongs_to(&self, qpn: Qpn) -> bool {
        self.pd == 0 && self.qpn != Qpn::default() && self.qpn == qpn
    }

    /// Invalidates a memory window for its peer; false if it was invalid already, or has been promoted since the look-up.
    fn invalidate(&self) -> bool {
        self.entry().invalidate(self.name)
    }

    /// The key.
    pub(super) fn key(&self) -> u32 {
        self.name as u32
    }

    /// Adds the estimated cost of a copy through the kernel \[ns\]; true if the owner must be told.
    pub(super) fn add_kernel_time(&self, nanoseconds: u64) -> bool {
        self.entry().add_kernel_time(nanoseconds)
    }

    /// Whether the owner moves the pages when copies through the kernel have cost enough.
    pub(super) fn may_move(&self) -> bool {
        self.entry().has_move_cost()
    }

    /// Whether the memory is another device's, whose driver has mapped it.
    pub(super) fn is_device_memory(&self) -> bool {
        self.access & ACCESS_DEVICE != 0
    }

    /// Whether stores are discarded.
    pub(super) fn discards_stores(&self) -> bool {
        self.access & ACCESS_NULL != 0
    }

    /// Whether `len` bytes from `at` lie inside the region. No sum can overflow.
    #[inline]
    pub(super) fn contains(&self, at: u64, len: u64) -> bool {
        at >= self.start && at - self.start <= self.len && self.len - (at - self.start) >= len
    }

    /// Whether those bytes are all mapped.
    #[inline]
    pub(super) fn maps(&self, at: u64, len: u64) -> bool {
        at >= self.map_start && at <= self.map_end && self.map_end - at >= len
    }

    /// How the eight bytes at `at` are changed atomically.
    pub(super) fn atomic_access(&self, at: u64) -> AtomicAccess<'_> {
        let is_common = at >= self.common.start && at < self.common.end && self.common.end - at >= 8;
        if is_common && self.writable && self.maps(at, 8) {
            let word = self.base.wrapping_add((at - self.map_start) as usize).cast::<u64>();
            // All initiators map whole pages, so the word is misaligned for all or for none.
            if !word.is_aligned() {
                return AtomicAccess::Copied;
            }
            // SAFETY: eight mapped bytes, aligned. They are only ever touched by raw copies and atomic operations.
            AtomicAccess::Mapped(unsafe { AtomicU64::from_ptr(word) })
        } else if !is_common || self.locks_atomics {
            AtomicAccess::Copied
        } else if self.is_provisional || !self.entry().has_tag(self.name) {
            AtomicAccess::NotMappedYet
        } else {
            AtomicAccess::NotMappable
        }
    }

    /// The peer's virtual address of an address of the region.
    pub(super) fn va(&self, at: u64) -> u64 {
        self.va + (at - self.start)
    }
}

impl RemoteMr {
    /// Local address of `len` mapped bytes at `at`, at least one, if the protection domain `pd` has the access.
    #[inline(always)]
    pub(super) fn mapped(&self, pd: u32, at: u64, len: u64, purpose: AccessRight) -> Option<*mut u8> {
        let from = at.wrapping_sub(self.map_start);
        let admitted = self.pd == pd && self.extents.admit(purpose, from, len);
        admitted.then(|| self.base.wrapping_add(from as usize))
    }
}

/// Memory regions and windows of one peer, by key.
#[derive(Debug, Default)]
pub(super) struct RemoteKeys {
    windows: [Option<RemoteMr>; SLOTS],
    /// The arena that the entries of all `windows` lie in.
    arena: Option<Arc<Mapping>>,
}

impl RemoteKeys {
    /// The cached region with this key, if it is still valid.
    #[inline(always)]
    pub(super) fn known(&self, key: u32) -> Option<&RemoteMr> {
        self.windows[slot(key)].as_ref().filter(|window| window.valid(key))
    }

    /// Whether the cached region with this key was valid during all loads from it that came before. An owner that waited in vain for
    /// the end of an operation, because this process was stopped, has withdrawn the key and taken its pages back: those loads found
    /// zeros.
    #[inline(always)]
    pub(super) fn is_still_known(&self, key: u32) -> bool {
        fence(Ordering::Acquire);
        self.known(key).is_some()
    }

    /// The region with this key, looked up again if it has changed.
    #[inline]
    pub(super) fn find(&mut self, peer: &Arc<Peer>, key: u32) -> Result<&RemoteMr, u32> {
        let may_keep = |window: &RemoteMr| !window.is_provisional || peer.is_silent();
        let valid =
            self.windows[slot(key)].as_ref().is_some_and(|window| window.valid(key) && may_keep(window));
        if !valid {
            self.replace(peer, key);
        }
        self.windows[slot(key)].as_ref().ok_or(vendor::NO_KEY)
    }

    /// Invalidates a memory window of type 2 of the queue pair `qpn` for its peer (10.6.7.2.6).
    ///
    /// # Errors
    /// The cause for the completion.
    pub(super) fn invalidate(&mut self, peer: &Arc<Peer>, key: u32, qpn: Qpn) -> Result<(), u32> {
        // The owner may promote the entry twice in the meantime.
        for _ in 0..3 {
            let window = self.find(peer, key)?;
            if !window.belongs_to(qpn) {
                return Err(vendor::DOMAIN);
            }
            if window.invalidate() {
                return Ok(());
            }
        }
        Err(vendor::NO_KEY)
    }

    #[inline(never)]
    fn replace(&mut self, peer: &Arc<Peer>, key: u32) {
        if !self.arena.as_ref().is_some_and(|arena| Arc::ptr_eq(arena, peer.arena())) {
            self.windows = Default::default();
            self.arena = Some(peer.arena().clone());
        }
        self.windows[slot(key)] = RemoteMr::look_up(peer, key);
    }
}

/// This process's regions that one queue pair has used, by key.
#[derive(Debug, Default)]
pub(super) struct LocalKeys {
    epoch: u64,
    regions: [Option<LocalMr>; SLOTS],
    ranges: [LocalRange; SLOTS],
}

/// The range of one of the `regions`, for the fast path. Its extents are empty if there is no region, or the region has
/// another protection domain.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct LocalRange {
    key: u32,
    start: u64,
    va: u64,
    extents: Extents,
}

impl LocalRange {
    fn new(mr: &LocalMr, pd: u32) -> Self {
        let extents = Extents::new(mr.len, |purpose| {
            mr.pd == pd && (purpose == AccessRight::Read || mr.access & ACCESS_LOCAL_WRITE != 0)
        });
        Self { key: mr.key, start: mr.start, va: mr.va, extents }
    }
}

impl LocalKeys {
    /// Address of `len` bytes at `addr` of the region `lkey`, at least one. None unless the region is cached,
    /// valid, of this protection domain, and allows the access.
    #[inline(always)]
    pub(super) fn known(
        &self,
        adapter: &LocalAdapter,
        addr: u64,
        len: u32,
        lkey: u32,
        purpose: AccessRight,
    ) -> Option<*mut u8> {
        let range = &self.ranges[slot(lkey)];
        let from = addr.wrapping_sub(range.start);
        let admitted = adapter.mrs.epoch() == self.epoch
            && range.key == lkey
            && range.extents.admit(purpose, from, u64::from(len));
        admitted.then(|| range.va.wrapping_add(from) as *mut u8)
    }

    /// Address of `len` bytes at `addr` of the region `lkey`, if the region is of the protection domain and allows
    /// `access`. An error is the cause for the completion.
    pub(super) fn find(
        &mut self,
        adapter: &LocalAdapter,
        pd: u32,
        addr: u64,
        len: u32,
        lkey: u32,
        access: u32,
    ) -> Result<*mut u8, u32> {
        if len == 0 {
            return Ok(addr as *mut u8);
        }
        let epoch = adapter.mrs.epoch();
        if epoch != self.epoch {
            self.regions = [None; SLOTS];
            self.ranges = [LocalRange::default(); SLOTS];
            self.epoch = epoch;
        }
        let cached = &mut self.regions[slot(lkey)];
        let mr = match cached {
            Some(mr) if mr.key == lkey => mr,
            _ => {
                let found = adapter.mrs.find(lkey).ok_or(vendor::NO_KEY)?;
                if found.access & INDIRECT != 0 {
                    return indirect_address(&found, pd, addr, len, access);
                }
                self.ranges[slot(lkey)] = LocalRange::new(&found, pd);
                cached.insert(found)
            }
        };
        mr.check(pd, addr, u64::from(len), access)?;
        Ok((mr.va + (addr - mr.start)) as *mut u8)
    }
}

/// Address of a part of a null region or of an on-demand paging region.
#[cold]
fn indirect_address(mr: &LocalMr, pd: u32, addr: u64, len: u32, access: u32) -> Result<*mut u8, u32> {
    mr.check(pd, addr, u64::from(len), access)?;
    let write = access & ACCESS_LOCAL_WRITE != 0;
    if mr.access & ACCESS_NULL != 0 {
        let null = NullMemory::get().ok_or(vendor::NO_KEY)?;
        return Ok(if write { null.sink() } else { null.zeros() });
    }
    // On-demand paging: a missing page is an error of the request, not of the process.
    let start = (mr.va + (addr - mr.start)) as usize;
    fault_in(start..start + len as usize, write).map_err(|_| vendor::BOUNDS)?;
    Ok(start as *mut u8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn near_the_ends() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..20, (0u64..20).prop_map(|behind| u64::MAX - behind), any::<u64>()]
    }

    proptest! {
        #[test]
        fn only_what_lies_in_a_range_that_allows_it_is_admitted(
            size in near_the_ends(), from in near_the_ends(), len in near_the_ends(), allowed: [bool; 3],
        ) {
            prop_assume!(len > 0);
            let extents = Extents::new(size, |purpose| allowed[purpose as usize]);
            let fits = u128::from(from) + u128::from(len) <= u128::from(size);
            for purpose in [AccessRight::Read, AccessRight::RemoteWrite, AccessRight::LocalWrite] {
                prop_assert_eq!(extents.admit(purpose, from, len), fits && allowed[purpose as usize]);
            }
        }
    }
}
