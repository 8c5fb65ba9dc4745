//! The process's memory keys: the private truth behind the entries that peers look at.
//!
//! A key is the number of a place in the table (high half) and a random tag (low half). Memory regions
//! and memory windows share the places. [`MrEntry`] says how an entry is changed and read.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use millstream_lockfree::mr_entry::{MrDescriptor, MrEntry};
use millstream_shm::random_u64;

use super::window::{Bind, Kind};
use crate::caps::MAX_MR;
use crate::errno::{Errno, Result};
use crate::files::FileId;
use crate::host::Host;
use crate::layout::MR_TABLE;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED, vendor,
};

/// In [`LocalMr::access`], a bit of our own: the region holds nothing, reads as zero and forgets what is
/// written.
pub(crate) const ACCESS_NULL: u32 = 1 << 31;

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
        // No sum of what the request says: it could overflow.
        let inside =
            addr >= self.start && addr - self.start <= self.len && self.len - (addr - self.start) >= len;
        if inside { Ok(()) } else { Err(vendor::BOUNDS) }
    }
}

/// What peers can map of a region, in the region's own addresses.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) file: FileId,
    pub(crate) range: Range<u64>,
    /// Offset in the file of `range.start`.
    pub(crate) offset: u64,
}

impl Place {
    /// Of memory that peers reach through the kernel only.
    pub(crate) const NOWHERE: Self = Self { file: FileId { slot: 0, generation: 0 }, range: 0..0, offset: 0 };

    /// What of it lies in `range`, as seen where that begins at `start`.
    fn part(&self, range: Range<u64>, start: u64) -> Self {
        let (from, to) = (self.range.start.max(range.start), self.range.end.min(range.end));
        if from >= to {
            return Self::NOWHERE;
        }
        let shown = |at: u64| at - range.start + start;
        Self {
            file: self.file,
            range: shown(from)..shown(to),
            offset: self.offset + (from - self.range.start),
        }
    }
}

/// A region with what windows on it need to know.
#[derive(Debug)]
struct Region {
    local: LocalMr,
    place: Place,
    /// Places of windows that were bound to it. Some may have been invalidated by peers since.
    windows: Vec<u32>,
}

/// A window that was bound, unless a peer has invalidated it since: then its entry has lost this name.
#[derive(Debug)]
struct Binding {
    name: u64,
    shown: LocalMr,
    /// The region's key.
    region: u32,
    /// For type 2.
    qpn: u32,
}

#[derive(Debug, Default)]
pub(crate) struct MrTable {
    slots: Mutex<Slots>,
    /// Rises with every region taken back: a cached [`LocalMr`] of an older epoch must be looked up again.
    epoch: AtomicU64,
}

#[derive(Debug, Default)]
struct Slots {
    regions: HashMap<u32, Region>,
    /// By place.
    windows: HashMap<u32, Binding>,
    /// By place: the tag of its last key, and how often it was published.
    lives: Vec<(u16, u32)>,
    free: VecDeque<u32>,
}

impl MrTable {
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

    /// The region or window that an entry of this name shows, and the queue pair that it belongs to if it
    /// is a window of type 2: what we know of it, whatever peers have made of the entry.
    pub(crate) fn find_shown(&self, name: u64) -> Option<(LocalMr, u32)> {
        let slots = self.lock();
        let key = name as u32;
        let window = slots.windows.get(&(key >> 16)).filter(|bound| bound.name == name);
        let region = || slots.regions.get(&key).map(|region| (region.local, 0));
        window.map(|bound| (bound.shown, bound.qpn)).or_else(region)
    }

    /// Takes a place and makes a key for it.
    pub(crate) fn new_key(&self) -> Result<u32> {
        let mut slots = self.lock();
        // A place rests as long as possible before it is used again.
        let slot = if slots.lives.len() < MAX_MR {
            slots.lives.push((0, 0));
            slots.lives.len() as u32 - 1
        } else {
            slots.free.pop_front().ok_or(Errno::NOMEM)?
        };
        let last = &mut slots.lives[slot as usize].0;
        let tag = loop {
            let tag = random_u64() as u16;
            // A window's owner chooses the low byte, and key 0 is nobody's. No place gets its last tag
            // again.
            if tag >> 8 != 0 && tag != *last {
                break tag;
            }
        };
        *last = tag;
        Ok(slot << 16 | u32::from(tag))
    }

    /// Gives a place back whose key nobody uses any more.
    pub(crate) fn free(&self, key: u32) {
        self.lock().free.push_back(key >> 16);
    }

    /// Makes a region findable, here and for peers.
    pub(crate) fn publish(&self, host: &Host, local: LocalMr, place: &Place) {
        let mut slots = self.lock();
        slots.show(host, local, place, 0);
        slots.regions.insert(local.key, Region { local, place: place.clone(), windows: Vec::new() });
    }

    /// Withdraws a region; operations under way may still use it.
    ///
    /// # Errors
    /// EBUSY while windows are bound to it.
    pub(crate) fn withdraw(&self, host: &Host, key: u32) -> Result<()> {
        let mut slots = self.lock();
        let Some(region) = slots.regions.get(&key) else { return Ok(()) };
        let bound = |slot: &u32| {
            slots.windows.get(slot).is_some_and(|bound| bound.region == key && bound.lives(host, *slot))
        };
        if region.windows.iter().any(bound) {
            return Err(Errno::BUSY);
        }
        slots.regions.remove(&key);
        entry(host, key >> 16).withdraw();
        self.epoch.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Whether a window can be bound so; otherwise why not.
    pub(crate) fn check_bind(
        &self,
        host: &Host,
        kind: Kind,
        pd: u32,
        bind: &Bind,
    ) -> std::result::Result<(), u32> {
        let slots = self.lock();
        // A window of type 2 is invalidated before it is bound again (IBTA volume 1, o10-37.2.30), and
        // never by binding nothing.
        let bound = || slots.windows.get(&(bind.key >> 16)).is_some_and(|b| b.lives(host, bind.key >> 16));
        if kind == Kind::Two && (bind.len == 0 || bound()) {
            return Err(vendor::WINDOW);
        }
        if bind.len == 0 { Ok(()) } else { slots.region_for(pd, bind).map(drop) }
    }

    /// Binds a window that is not bound. `qpn` is the queue pair that a window of type 2 belongs to.
    pub(crate) fn bind(
        &self,
        host: &Host,
        pd: u32,
        bind: &Bind,
        qpn: Option<u32>,
    ) -> std::result::Result<(), u32> {
        let mut slots = self.lock();
        let region = slots.region_for(pd, bind)?;
        let remote = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        let start = if bind.access & ACCESS_ZERO_BASED != 0 { 0 } else { bind.addr };
        let (owner, of_region) = (region.local, bind.addr..bind.addr + bind.len);
        let place = region.place.part(of_region, start);
        let shown = LocalMr {
            key: bind.key,
            access: bind.access & remote | owner.access & ACCESS_ON_DEMAND,
            pd: if qpn.is_some() { 0 } else { pd },
            start,
            len: bind.len,
            va: owner.va + (bind.addr - owner.start),
        };
        let slot = bind.key >> 16;
        let qpn = qpn.unwrap_or(0);
        let name = slots.show(host, shown, &place, qpn);
        slots.forget_window(slot);
        slots.windows.insert(slot, Binding { name, shown, region: bind.region, qpn });
        slots.regions.get_mut(&bind.region).expect("just seen").windows.push(slot);
        Ok(())
    }

    /// Withdraws a window, whether it is bound or not; operations under way may still use it.
    pub(crate) fn unbind(&self, host: &Host, slot: u32) {
        entry(host, slot).withdraw();
        self.lock().forget_window(slot);
    }

    /// Withdraws the window of type 2 with this key, on behalf of the queue pair it belongs to.
    pub(crate) fn invalidate(&self, host: &Host, key: u32, qpn: u32) -> std::result::Result<(), u32> {
        let mut slots = self.lock();
        let slot = key >> 16;
        let bound = slots.windows.get(&slot).ok_or(vendor::NO_KEY)?;
        if bound.name as u32 != key || !bound.lives(host, slot) {
            return Err(vendor::NO_KEY);
        }
        if bound.qpn != qpn {
            return Err(vendor::DOMAIN);
        }
        entry(host, slot).withdraw();
        slots.forget_window(slot);
        Ok(())
    }

    /// Withdraws the windows of type 2 that belong to a queue pair.
    pub(crate) fn unbind_all_of(&self, host: &Host, qpn: u32) {
        let mut slots = self.lock();
        let theirs: Vec<u32> = slots.windows.iter().filter(|(_, b)| b.qpn == qpn).map(|(s, _)| *s).collect();
        for slot in theirs {
            entry(host, slot).withdraw();
            slots.forget_window(slot);
        }
    }
}

impl Binding {
    fn lives(&self, host: &Host, slot: u32) -> bool {
        entry(host, slot).has_tag(self.name)
    }
}

impl Slots {
    /// Writes an entry that shows nothing, and names it.
    fn show(&mut self, host: &Host, shown: LocalMr, place: &Place, qpn: u32) -> u64 {
        let slot = shown.key >> 16;
        let life = &mut self.lives[slot as usize].1;
        *life = life.wrapping_add(1);
        let name = u64::from(*life) << 32 | u64::from(shown.key);
        let descriptor = MrDescriptor {
            access: shown.access,
            pd: shown.pd,
            start: shown.start,
            len: shown.len,
            va: shown.va,
            file: (place.file.slot, place.file.generation),
            mapped: place.range.clone(),
            offset: place.offset,
            qpn,
        };
        entry(host, slot).publish(name, &descriptor);
        name
    }

    /// The region that a window is to be bound to, if it may be (IBTA volume 1, C10-72 to C10-75).
    fn region_for(&self, pd: u32, bind: &Bind) -> std::result::Result<&Region, u32> {
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

fn entry(host: &Host, slot: u32) -> &MrEntry {
    let offset = MR_TABLE + slot as usize * size_of::<MrEntry>();
    // SAFETY: inside the arena, which lives as long as its host; all fields are atomics.
    unsafe { host.arena.at(offset).cast::<MrEntry>().as_ref() }
}
