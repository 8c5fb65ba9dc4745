//! Checked memory keys, remembered: a table look-up and a mapping are paid once a region.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millstream_shm::Mapping;

use crate::files::FileId;
use crate::host::Host;
use crate::layout::MrEntry;
use crate::mr::LocalMr;
use crate::peer::Peer;
use crate::types::vendor;

const SLOTS: usize = 8;

fn slot(key: u32) -> usize {
    (key >> 16) as usize % SLOTS
}

/// A peer's memory region, checked.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) key: u32,
    entry: &'static MrEntry,
    pub(super) access: u32,
    pub(super) pd: u32,
    start: u64,
    len: u64,
    /// Address of `start` in the peer.
    va: u64,
    /// The part that is mapped here, as the region's addresses, and where.
    pub(super) map_start: u64,
    pub(super) map_end: u64,
    pub(super) base: *mut u8,
    /// Whether the mapped part can be stored into: its owner may have forbidden new writers.
    pub(super) writable: bool,
    /// The part that every initiator can map, where processors' atomic operations suffice.
    common: std::ops::Range<u64>,
    _mapping: Option<Arc<Mapping>>,
}

// SAFETY: the mapping is held; its contents are shared memory, touched by raw copies only.
unsafe impl Send for Window {}

impl Window {
    /// Reads the peer's entry once and checks the copy.
    fn look_up(peer: &Arc<Peer>, key: u32) -> Option<Self> {
        let entry = peer.mr_entry(key)?;
        if key == 0 || entry.key.load(Ordering::Acquire) != key {
            return None;
        }
        let start = entry.start.load(Ordering::Relaxed);
        let len = entry.len.load(Ordering::Relaxed);
        let va = entry.va.load(Ordering::Relaxed);
        start.checked_add(len)?;
        va.checked_add(len)?;
        let mut window = Self {
            key,
            // SAFETY: the entry lies in the peer's arena, which lives as long as the peer; a
            // window is kept beside a reference to its peer and dropped before it.
            entry: unsafe { &*std::ptr::from_ref(entry) },
            access: entry.access.load(Ordering::Relaxed),
            pd: entry.pd.load(Ordering::Relaxed),
            start,
            len,
            va,
            map_start: 0,
            map_end: 0,
            base: std::ptr::null_mut(),
            writable: true,
            common: 0..0,
            _mapping: None,
        };
        let file = FileId {
            slot: entry.file.load(Ordering::Relaxed),
            generation: entry.file_generation.load(Ordering::Relaxed),
        };
        let map_start = entry.map_start.load(Ordering::Relaxed);
        let map_end = entry.map_end.load(Ordering::Relaxed);
        if file.generation != 0 {
            window.common = map_start..map_end;
        }
        if let Some(host) = peer.own_host() {
            // Of our own memory nothing is believed that peers could have written.
            let own = host.mrs.find(key)?;
            (window.access, window.pd) = (own.access, own.pd);
            (window.start, window.len, window.va) = (own.start, own.len, own.va);
            (window.map_start, window.map_end, window.base) =
                (own.start, own.start + own.len, own.va as *mut u8);
            return Some(window);
        }
        let offset = entry.file_offset.load(Ordering::Relaxed);
        if file.generation == 0 || map_start < start || map_end > start + len || map_start >= map_end {
            return Some(window);
        }
        if let Some(mapping) = peer.map(file)
            && (mapping.len() as u64).checked_sub(offset).is_some_and(|room| room >= map_end - map_start)
        {
            // SAFETY: inside the mapping, as just checked.
            window.base = unsafe { mapping.base().add(offset as usize) };
            (window.map_start, window.map_end) = (map_start, map_end);
            window.writable = mapping.writable();
            window._mapping = Some(mapping);
        }
        Some(window)
    }

    #[inline]
    fn valid(&self, key: u32) -> bool {
        self.key == key && self.entry.key.load(Ordering::Acquire) == key
    }

    /// Whether `len` bytes from `at` lie inside the region, without sums that could overflow.
    #[inline]
    pub(super) fn contains(&self, at: u64, len: u64) -> bool {
        at >= self.start && at - self.start <= self.len && self.len - (at - self.start) >= len
    }

    /// Whether those bytes are all mapped.
    #[inline]
    pub(super) fn maps(&self, at: u64, len: u64) -> bool {
        at >= self.map_start && at <= self.map_end && self.map_end - at >= len
    }

    /// The aligned eight bytes at `at`, if every initiator can map them, so that a processor's
    /// atomic operation is seen by all.
    pub(super) fn map_word(&self, at: u64) -> Option<&AtomicU64> {
        let common = at >= self.common.start && at < self.common.end && self.common.end - at >= 8;
        if !common || !self.writable || !self.maps(at, 8) {
            return None;
        }
        let word = self.base.wrapping_add((at - self.map_start) as usize).cast::<u64>();
        // SAFETY: eight mapped bytes; the alignment is checked first. They are only ever touched by
        // raw copies and atomic operations.
        word.is_aligned().then(|| unsafe { AtomicU64::from_ptr(word) })
    }

    /// The peer's own address for one of the region's.
    pub(super) fn va(&self, at: u64) -> u64 {
        self.va + (at - self.start)
    }
}

/// Windows of one peer, by key.
#[derive(Debug, Default)]
pub(super) struct RemoteKeys([Option<Window>; SLOTS]);

impl RemoteKeys {
    /// The region with this key, as it is now.
    #[inline]
    pub(super) fn find(&mut self, peer: &Arc<Peer>, key: u32) -> Result<&Window, u32> {
        let cached = &mut self.0[slot(key)];
        if !cached.as_ref().is_some_and(|window| window.valid(key)) {
            *cached = Window::look_up(peer, key);
        }
        cached.as_ref().ok_or(vendor::NO_KEY)
    }
}

/// This process's own regions, by key.
#[derive(Debug, Default)]
pub(super) struct LocalKeys {
    epoch: u64,
    regions: [Option<LocalMr>; SLOTS],
}

impl LocalKeys {
    /// Address of `len` bytes at `addr` of the region `lkey`, if it is ours, in the domain, and
    /// allows what `access` asks.
    #[inline]
    pub(super) fn find(
        &mut self,
        host: &Host,
        pd: u32,
        addr: u64,
        len: u32,
        lkey: u32,
        access: u32,
    ) -> Result<*mut u8, u32> {
        if len == 0 {
            return Ok(addr as *mut u8);
        }
        let epoch = host.mrs.epoch();
        if epoch != self.epoch {
            self.regions = [None; SLOTS];
            self.epoch = epoch;
        }
        let cached = &mut self.regions[slot(lkey)];
        if !cached.is_some_and(|mr| mr.key == lkey) {
            *cached = host.mrs.find(lkey);
        }
        let mr = cached.as_ref().ok_or(vendor::NO_KEY)?;
        if mr.pd != pd {
            return Err(vendor::DOMAIN);
        }
        if mr.access & access != access {
            return Err(vendor::PERMISSION);
        }
        let inside =
            addr >= mr.start && addr - mr.start <= mr.len && mr.len - (addr - mr.start) >= u64::from(len);
        if !inside {
            return Err(vendor::BOUNDS);
        }
        Ok((mr.va + (addr - mr.start)) as *mut u8)
    }
}
