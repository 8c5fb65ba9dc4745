//! The process's memory keys: the owner's private copy of the entries that peers read.
//!
//! A key is a random index into the table (high half) and a random tag (low half). Memory regions and
//! memory windows share the table. [`MrEntry`] describes how an entry is changed and read.

use std::collections::HashMap;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use millstream_lockfree::mr_entry::{self, MappedFile, MrDescriptor, MrEntry, Stage};
use millstream_quantity::Qpn;
use millstream_shm::{Arena, random_u64};

use crate::caps::MAX_MR;
use crate::errno::{Errno, Result};
use crate::exported_files::FileId;
use crate::layout::MR_TABLE;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED, vendor,
};

/// A device-specific bit in [`LocalMr::access`]: the region reads as zero and discards stores.
pub(crate) const ACCESS_NULL: u32 = 1 << 31;

/// A device-specific bit in [`LocalMr::access`]: the memory is another device's, a GPU's for example.
pub(crate) const ACCESS_DEVICE: u32 = 1 << 30;

/// A region as this process's own work requests use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalMr {
    pub(crate) key: u32,
    pub(crate) access: u32,
    pub(crate) pd: u32,
    /// First address as work requests name it (iova).
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Address of `start` in this process.
    pub(crate) va: u64,
}

impl LocalMr {
    /// Whether a request of domain `pd` may use `len` bytes from `addr` for `access`; otherwise why not.
    #[inline]
    pub(crate) fn check(&self, pd: u32, addr: u64, len: u64, access: u32) -> std::result::Result<(), u32> {
        if self.pd != pd {
            return Err(vendor::DOMAIN);
        }
        if self.access & access != access {
            return Err(vendor::PERMISSION);
        }
        // No sums of the request's values: they could overflow.
        let inside =
            addr >= self.start && addr - self.start <= self.len && self.len - (addr - self.start) >= len;
        if inside { Ok(()) } else { Err(vendor::BOUNDS) }
    }
}

/// The part of a region that peers can map, in the region's own addresses.
#[derive(Clone, Debug)]
pub(crate) struct ExportedRange {
    pub(crate) file: FileId,
    pub(crate) range: Range<u64>,
    /// Offset in the file of `range.start`.
    pub(crate) offset: u64,
}

impl ExportedRange {
    /// Peers reach the region through the kernel only.
    pub(crate) const NONE: Self = Self { file: FileId { slot: 0, generation: 0 }, range: 0..0, offset: 0 };

    fn mapped_file(&self) -> MappedFile {
        let file = (self.file.slot, self.file.generation);
        MappedFile { file, mapped: self.range.clone(), offset: self.offset }
    }

    /// The intersection with `range`, for a window on it whose addresses begin at `start`.
    fn part(&self, range: Range<u64>, start: u64) -> Self {
        let (from, to) = (self.range.start.max(range.start), self.range.end.min(range.end));
        if from >= to {
            return Self::NONE;
        }
        let shift = |at: u64| at - range.start + start;
        Self {
            file: self.file,
            range: shift(from)..shift(to),
            offset: self.offset + (from - self.range.start),
        }
    }
}

/// The pages of a region, as the thread that lets peers map them sees them.
pub(crate) trait RegionPages: Debug + Send + Sync {
    /// Moves the pages into a file, or finds the file that they belong to, and promotes the entry of the region `key`. False
    /// if there is nothing to do.
    ///
    /// # Errors
    /// EPERM if pages cannot move while other threads run. EBUSY, EAGAIN or ENOMEM if they may move later. Others if they
    /// never can.
    fn share(&self, key: u32) -> io::Result<bool>;

    /// Promotes the entry of the region `key` if its pages were moved for another region; true if they were.
    fn adopt(&self, key: u32) -> bool;
}

/// A region and its windows.
#[derive(Debug)]
struct Region {
    local: LocalMr,
    /// The entry's tag.
    tag: u64,
    exported: ExportedRange,
    /// The pages, if peers may be able to map them later, and the cost of moving them \[ns\].
    pages: Option<(Weak<dyn RegionPages>, u64)>,
    /// Indices of windows that were bound to it. Peers may have invalidated some since.
    windows: Vec<u32>,
}

/// A window that was bound. If a peer has invalidated it since, its entry has lost this tag.
#[derive(Debug)]
struct Binding {
    tag: u64,
    local: LocalMr,
    /// The region's key.
    region: u32,
    /// For type 2.
    qpn: Qpn,
}

/// The parameters of binding a memory window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowBinding {
    /// The window's new key.
    pub(crate) key: u32,
    /// Key of the region.
    pub(crate) region: u32,
    /// First address, in the region's addresses.
    pub(crate) addr: u64,
    /// Bytes; zero unbinds the window.
    pub(crate) len: u64,
    /// `IBV_ACCESS_*` of the window.
    pub(crate) access: u32,
}

/// The type of a memory window, numbered as `enum ibv_mw_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MwType {
    /// Belongs to a protection domain.
    Type1 = 1,
    /// Belongs to a queue pair while it is bound.
    Type2 = 2,
}

/// The memory keys of the process.
#[derive(Debug)]
pub(crate) struct MrTable {
    arena: &'static Arena,
    slots: Mutex<Slots>,
    /// Rises with every region that is withdrawn: a cached [`LocalMr`] of an older epoch must be looked up again.
    epoch: AtomicU64,
}

#[derive(Debug, Default)]
struct Slots {
    regions: HashMap<u32, Region>,
    /// The bindings of windows by index.
    windows: HashMap<u32, Binding>,
    /// The random tag of the last key and the generation, by index. Empty before the first key.
    generations: Vec<(u16, u32)>,
    /// Indices in use, one bit each.
    used: Vec<u64>,
    /// Number of region keys made, from a random number on.
    regions_made: usize,
}

/// What a key is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    /// A memory region. The key has 29 random bits.
    Region,
    /// A memory window, whose owner chooses the low byte of the key. The rest is 24 random bits.
    Window,
}

/// Caches of keys have this many places, chosen by the low bits of the index.
pub(crate) const CACHE_PLACES: usize = 8;

impl MrTable {
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self { arena, slots: Mutex::default(), epoch: AtomicU64::new(0) }
    }

    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().expect("no panic under this lock")
    }

    pub(crate) fn find(&self, lkey: u32) -> Option<LocalMr> {
        self.lock().regions.get(&lkey).map(|region| region.local)
    }

    /// The region or window with this tag, and the queue pair that a window of type 2 belongs to. Peers cannot change
    /// these values.
    pub(crate) fn find_tag(&self, tag: u64) -> Option<(LocalMr, Qpn)> {
        let slots = self.lock();
        let key = tag as u32;
        let same = |bound: &&Binding| mr_entry::is_same_generation(bound.tag, tag);
        let window = slots.windows.get(&(key >> 16)).filter(same);
        let region = || slots.regions.get(&key).map(|region| (region.local, Qpn::default()));
        window.map(|bound| (bound.local, bound.qpn)).or_else(region)
    }

    /// Takes a free index and makes a key for it.
    ///
    /// # Errors
    /// ENOMEM when the table is full.
    pub(crate) fn new_key(&self, kind: KeyKind) -> Result<u32> {
        let mut slots = self.lock();
        let slot = slots.free_index(kind).ok_or(Errno::NOMEM)?;
        slots.used[slot / 64] |= 1 << (slot % 64);
        let last = &mut slots.generations[slot].0;
        let tag = loop {
            let tag = random_u64() as u16;
            // A window's owner chooses the low byte, and key 0 is invalid. An index does not get its last tag
            // again.
            if (slot != 0 || tag >> 8 != 0) && tag != *last {
                break tag;
            }
        };
        *last = tag;
        Ok((slot as u32) << 16 | u32::from(tag))
    }

    /// Releases the index of a key that is no longer in use.
    pub(crate) fn free(&self, key: u32) {
        let slot = (key >> 16) as usize;
        self.lock().used[slot / 64] &= !(1 << (slot % 64));
    }

    /// Makes a region valid, here and for peers. Peers tell when copies through the kernel have cost as much as moving the
    /// `pages` would.
    ///
    /// False if peers can map the region while they still reach its memory through the kernel by another key: atomic
    /// operations on it are locked until [`settle`](Self::settle).
    pub(crate) fn publish(
        &self,
        local: LocalMr,
        exported: &ExportedRange,
        pages: Option<(Weak<dyn RegionPages>, u64)>,
    ) -> bool {
        let mut slots = self.lock();
        let is_mapped = exported.file.generation != 0;
        let is_settled = !is_mapped
            || slots
                .around(&local)
                .all(|(_, other)| other.pages.is_none() && Stage::of(other.tag) != Stage::Promoted);
        let shown = if is_settled { exported } else { &ExportedRange::NONE };
        let mut tag = slots.publish(self.arena, local, shown, Qpn::default());
        if !is_settled {
            tag = entry(self.arena, local.key >> 16).promote(tag, &exported.mapped_file()).unwrap_or(tag);
        }
        if let Some((_, cost)) = pages {
            entry(self.arena, local.key >> 16).set_move_cost(cost);
        }
        let exported = exported.clone();
        slots.regions.insert(local.key, Region { local, tag, exported, pages, windows: Vec::new() });
        is_settled
    }

    /// The region that a peer has named by its key or by that of a window on it, and its pages.
    pub(crate) fn pages_of(&self, key: u32) -> Option<(u32, Arc<dyn RegionPages>)> {
        let slots = self.lock();
        let region = slots.windows.get(&(key >> 16)).map_or(key, |window| window.region);
        let (pages, _) = slots.regions.get(&region)?.pages.as_ref()?;
        Some((region, pages.upgrade()?))
    }

    /// The regions whose memory overlaps that of the region `key`, if peers may be able to map it later.
    pub(crate) fn overlapping(&self, key: u32) -> Vec<(u32, Arc<dyn RegionPages>)> {
        let slots = self.lock();
        let Some(region) = slots.regions.get(&key) else { return Vec::new() };
        let others = slots.around(&region.local);
        others.filter_map(|(key, other)| Some((*key, other.pages.as_ref()?.0.upgrade()?))).collect()
    }

    /// Stops peers from telling that copies through the kernel are expensive: the pages cannot move. They may still be
    /// moved for a region around this one.
    pub(crate) fn never_move(&self, key: u32) {
        let mut slots = self.lock();
        let Some(region) = slots.regions.get_mut(&key) else { return };
        if let Some((_, cost)) = &mut region.pages {
            *cost = 0;
        }
        for slot in region.windows.iter().copied().chain([key >> 16]) {
            entry(self.arena, slot).set_move_cost(0);
        }
    }

    /// Lets peers map a file from now on that a region and its windows lie in. [`settle`](Self::settle) must follow, when no
    /// operation is in flight that began before.
    pub(crate) fn promote(&self, key: u32, exported: &ExportedRange) {
        let mut slots = self.lock();
        let Slots { regions, windows, .. } = &mut *slots;
        let Some(region) = regions.get_mut(&key) else { return };
        let Some(tag) = entry(self.arena, key >> 16).promote(region.tag, &exported.mapped_file()) else {
            return;
        };
        region.tag = tag;
        region.exported = exported.clone();
        region.pages = None;
        for slot in &region.windows {
            let Some(window) = windows.get_mut(slot) else { continue };
            let (part, start) = region.part(&window.local);
            let part = exported.part(part, start);
            // A window without a common part keeps its entry.
            if part.file.generation != 0
                && let Some(tag) = entry(self.arena, *slot).promote(window.tag, &part.mapped_file())
            {
                window.tag = tag;
            }
        }
    }

    /// The regions around a region, itself included, that were promoted and that [`settle`](Self::settle) may settle when no
    /// operation is in flight that began before this call.
    pub(crate) fn unsettled_around(&self, key: u32) -> Vec<u32> {
        let slots = self.lock();
        let Some(region) = slots.regions.get(&key) else { return Vec::new() };
        let others = slots.around(&region.local);
        let promoted = others.filter(|(_, other)| Stage::of(other.tag) == Stage::Promoted);
        promoted.filter(|(_, other)| slots.is_mapped_around(&other.local)).map(|(key, _)| *key).collect()
    }

    /// Ends the locking of atomic operations on a region that was promoted, and on its windows. A region that overlaps memory
    /// which peers reach through the kernel by another key stays as it is.
    pub(crate) fn settle(&self, key: u32) {
        let mut slots = self.lock();
        if !slots.regions.get(&key).is_some_and(|region| slots.is_mapped_around(&region.local)) {
            return;
        }
        let Slots { regions, windows, .. } = &mut *slots;
        let Some(region) = regions.get_mut(&key) else { return };
        let settle = |slot: u32, tag: &mut u64| {
            if Stage::of(*tag) == Stage::Promoted
                && let Some(new) = entry(self.arena, slot).settle(*tag)
            {
                *tag = new;
            }
        };
        settle(key >> 16, &mut region.tag);
        for slot in &region.windows {
            if let Some(window) = windows.get_mut(slot) {
                settle(*slot, &mut window.tag);
            }
        }
    }

    /// Withdraws a region; operations in flight may still use it.
    ///
    /// # Errors
    /// EBUSY while windows are bound to it.
    pub(crate) fn withdraw(&self, key: u32) -> Result<()> {
        let mut slots = self.lock();
        let Some(region) = slots.regions.get(&key) else { return Ok(()) };
        let bound = |slot: &u32| {
            slots
                .windows
                .get(slot)
                .is_some_and(|bound| bound.region == key && bound.is_valid(self.arena, *slot))
        };
        if region.windows.iter().any(bound) {
            return Err(Errno::BUSY);
        }
        slots.regions.remove(&key);
        entry(self.arena, key >> 16).withdraw();
        self.epoch.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Checks the binding of a window.
    ///
    /// # Errors
    /// The vendor error.
    pub(crate) fn check_bind(
        &self,
        kind: MwType,
        pd: u32,
        bind: &WindowBinding,
    ) -> std::result::Result<(), u32> {
        let slots = self.lock();
        // A window of type 2 is invalidated before it is bound again (IBTA volume 1, o10-37.2.30), and
        // never by a binding of no bytes.
        let bound =
            || slots.windows.get(&(bind.key >> 16)).is_some_and(|b| b.is_valid(self.arena, bind.key >> 16));
        if kind == MwType::Type2 && (bind.len == 0 || bound()) {
            return Err(vendor::WINDOW);
        }
        if bind.len == 0 { Ok(()) } else { slots.region_for(pd, bind).map(drop) }
    }

    /// Binds a window that is not bound. `qpn` is the queue pair that a window of type 2 belongs to.
    ///
    /// # Errors
    /// The vendor error.
    pub(crate) fn bind(
        &self,
        pd: u32,
        bind: &WindowBinding,
        qpn: Option<Qpn>,
    ) -> std::result::Result<(), u32> {
        let mut slots = self.lock();
        let region = slots.region_for(pd, bind)?;
        let remote = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        let start = if bind.access & ACCESS_ZERO_BASED != 0 { 0 } else { bind.addr };
        let (owner, of_region) = (region.local, bind.addr..bind.addr + bind.len);
        let exported = region.exported.part(of_region, start);
        let is_unsettled = Stage::of(region.tag) == Stage::Promoted;
        let cost = region.pages.as_ref().map_or(0, |(_, cost)| *cost);
        let local = LocalMr {
            key: bind.key,
            access: bind.access & remote | owner.access & ACCESS_ON_DEMAND,
            pd: if qpn.is_some() { 0 } else { pd },
            start,
            len: bind.len,
            va: owner.va + (bind.addr - owner.start),
        };
        let slot = bind.key >> 16;
        let qpn = qpn.unwrap_or_default();
        let shown = if is_unsettled { &ExportedRange::NONE } else { &exported };
        let mut tag = slots.publish(self.arena, local, shown, qpn);
        entry(self.arena, slot).set_move_cost(cost);
        if is_unsettled && exported.file.generation != 0 {
            tag = entry(self.arena, slot).promote(tag, &exported.mapped_file()).unwrap_or(tag);
        }
        slots.forget_window(slot);
        slots.windows.insert(slot, Binding { tag, local, region: bind.region, qpn });
        slots.regions.get_mut(&bind.region).expect("just seen").windows.push(slot);
        Ok(())
    }

    /// Withdraws a window, whether it is bound or not; operations in flight may still use it.
    pub(crate) fn unbind(&self, slot: u32) {
        entry(self.arena, slot).withdraw();
        self.lock().forget_window(slot);
    }

    /// Withdraws the window of type 2 with this key, on behalf of the queue pair it belongs to.
    ///
    /// # Errors
    /// The vendor error.
    pub(crate) fn invalidate(&self, key: u32, qpn: Qpn) -> std::result::Result<(), u32> {
        let mut slots = self.lock();
        let slot = key >> 16;
        let bound = slots.windows.get(&slot).ok_or(vendor::NO_KEY)?;
        if bound.tag as u32 != key || !bound.is_valid(self.arena, slot) {
            return Err(vendor::NO_KEY);
        }
        if bound.qpn != qpn {
            return Err(vendor::DOMAIN);
        }
        entry(self.arena, slot).withdraw();
        slots.forget_window(slot);
        Ok(())
    }

    /// Withdraws the windows of type 2 that belong to a queue pair.
    pub(crate) fn unbind_all_of(&self, qpn: Qpn) {
        let mut slots = self.lock();
        let indices: Vec<u32> = slots.windows.iter().filter(|(_, b)| b.qpn == qpn).map(|(s, _)| *s).collect();
        for slot in indices {
            entry(self.arena, slot).withdraw();
            slots.forget_window(slot);
        }
    }
}

impl Region {
    /// The range of a window in the region's addresses, and the window's first address.
    fn part(&self, window: &LocalMr) -> (Range<u64>, u64) {
        let start = self.local.start + (window.va - self.local.va);
        (start..start + window.len, window.start)
    }
}

impl Binding {
    fn is_valid(&self, arena: &Arena, slot: u32) -> bool {
        entry(arena, slot).has_tag(self.tag)
    }
}

impl Slots {
    /// A random free index; `None` if all are in use. Regions that are made one after the other differ in their
    /// places in the caches of keys.
    fn free_index(&mut self, kind: KeyKind) -> Option<usize> {
        let random = random_u64() as usize;
        if self.used.is_empty() {
            self.used = vec![0; MAX_MR / 64];
            self.generations = vec![(0, 0); MAX_MR];
            self.regions_made = random >> 32;
        }
        let random = random % MAX_MR;
        let (start, step) = match kind {
            KeyKind::Region => {
                self.regions_made = self.regions_made.wrapping_add(1);
                (random / CACHE_PLACES * CACHE_PLACES + self.regions_made % CACHE_PLACES, CACHE_PLACES)
            }
            KeyKind::Window => (random, 1),
        };
        let is_free = |slot: &usize| self.used[slot / 64] >> (slot % 64) & 1 == 0;
        let preferred = (start..start + MAX_MR).step_by(step).map(|slot| slot % MAX_MR).find(is_free);
        preferred.or_else(|| (random..random + MAX_MR).map(|slot| slot % MAX_MR).find(is_free))
    }

    /// The regions whose memory overlaps that of `mr`, which may be one of them.
    fn around(&self, mr: &LocalMr) -> impl Iterator<Item = (&u32, &Region)> {
        let (start, end) = (mr.va, mr.va.saturating_add(mr.len));
        let overlaps = move |other: &LocalMr| other.va < end && start < other.va.saturating_add(other.len);
        self.regions.iter().filter(move |(_, region)| overlaps(&region.local))
    }

    /// Whether peers reach no region around `mr` through the kernel only because its pages have not moved.
    fn is_mapped_around(&self, mr: &LocalMr) -> bool {
        self.around(mr).all(|(_, other)| other.pages.is_none())
    }

    /// Publishes an entry that has no tag, under a new one.
    fn publish(&mut self, arena: &Arena, local: LocalMr, exported: &ExportedRange, qpn: Qpn) -> u64 {
        let slot = local.key >> 16;
        let generation = &mut self.generations[slot as usize].1;
        *generation = generation.wrapping_add(1);
        let tag = mr_entry::tag(*generation, local.key);
        let descriptor = MrDescriptor {
            access: local.access,
            pd: local.pd,
            start: local.start,
            len: local.len,
            va: local.va,
            file: (exported.file.slot, exported.file.generation),
            mapped: exported.range.clone(),
            offset: exported.offset,
            qpn: qpn.get(),
            locks_atomics: false,
        };
        entry(arena, slot).publish(tag, &descriptor);
        tag
    }

    /// The region that a window is to be bound to, if it may be (IBTA volume 1, C10-72 to C10-75).
    fn region_for(&self, pd: u32, bind: &WindowBinding) -> std::result::Result<&Region, u32> {
        let region = self.regions.get(&bind.region).ok_or(vendor::NO_KEY)?;
        let stores = bind.access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
        let needed = ACCESS_MW_BIND | if stores { ACCESS_LOCAL_WRITE } else { 0 };
        region.local.check(pd, bind.addr, bind.len, needed)?;
        if region.local.access & ACCESS_ZERO_BASED != 0 {
            return Err(vendor::PERMISSION);
        }
        Ok(region)
    }

    fn forget_window(&mut self, slot: u32) {
        let Some(bound) = self.windows.remove(&slot) else { return };
        if let Some(region) = self.regions.get_mut(&bound.region) {
            region.windows.retain(|other| *other != slot);
        }
    }
}

fn entry(arena: &Arena, slot: u32) -> &MrEntry {
    arena.get(MR_TABLE + slot as usize * size_of::<MrEntry>())
}

#[cfg(test)]
mod tests {
    use millstream_shm::PAGE;

    use super::*;
    use crate::layout::{ARENA_LEN, HEAP};

    /// Pages that never move.
    #[derive(Debug)]
    struct Pages;

    impl RegionPages for Pages {
        fn share(&self, _: u32) -> io::Result<bool> {
            Ok(false)
        }

        fn adopt(&self, _: u32) -> bool {
            false
        }
    }

    fn table() -> MrTable {
        let arena = Arena::new("millstream-test", ARENA_LEN, HEAP).unwrap();
        MrTable::new(Box::leak(Box::new(arena)))
    }

    /// Adds a region over the pages `pages` of some memory; its key.
    fn add(
        table: &MrTable,
        pages: Range<u64>,
        exported: bool,
        may_move: Option<&Arc<dyn RegionPages>>,
    ) -> (u32, bool) {
        let page = PAGE as u64;
        let key = table.new_key(KeyKind::Region).unwrap();
        let (start, len) = (pages.start * page, (pages.end - pages.start) * page);
        let local = LocalMr { key, access: ACCESS_REMOTE_ATOMIC, pd: 1, start, len, va: start };
        let exported = if exported { file(start..start + len) } else { ExportedRange::NONE };
        (key, table.publish(local, &exported, may_move.map(|pages| (Arc::downgrade(pages), 1))))
    }

    fn file(range: Range<u64>) -> ExportedRange {
        ExportedRange { file: FileId { slot: 1, generation: 1 }, offset: range.start, range }
    }

    fn locks_atomics(table: &MrTable, key: u32) -> bool {
        let (_, shown) = entry(table.arena, key >> 16).read(key).unwrap();
        assert_eq!(shown.file.1, 1, "peers can map it");
        shown.locks_atomics
    }

    /// Peers reach a word by one key through the kernel, and by another key in memory that they map: each operation on it
    /// takes the lock, from the registration of the second key until no peer uses the first way.
    #[test]
    fn atomics_are_locked_while_memory_is_reached_in_two_ways() {
        let table = table();
        let pages: Arc<dyn RegionPages> = Arc::new(Pages);
        let (old, settled) = add(&table, 0..8, false, Some(&pages));
        assert!(settled);
        // The pages have moved, and the old entry is not promoted yet.
        let (early, settled) = add(&table, 2..3, true, None);
        assert!(!settled && locks_atomics(&table, early));
        let (elsewhere, settled) = add(&table, 8..9, true, None);
        assert!(settled && !locks_atomics(&table, elsewhere));
        table.settle(early);
        assert!(locks_atomics(&table, early), "the old region is still reached through the kernel");
        table.promote(old, &file(0..8 * PAGE as u64));
        // Operations that began before the promotion are still in flight.
        let (late, settled) = add(&table, 3..4, true, None);
        assert!(!settled && locks_atomics(&table, late) && locks_atomics(&table, old));
        let mut unsettled = table.unsettled_around(old);
        unsettled.sort_unstable();
        let mut all = [old, early, late];
        all.sort_unstable();
        assert_eq!(unsettled, all);
        all.iter().for_each(|key| table.settle(*key));
        assert!(all.iter().all(|key| !locks_atomics(&table, *key)));
        let (last, settled) = add(&table, 0..8, true, None);
        assert!(settled && !locks_atomics(&table, last));
    }
}
