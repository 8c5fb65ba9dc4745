//! Memory windows: keys for parts of a region, given and taken without asking the kernel.
//!
//! A window of type 1 belongs to its protection domain and gets a new key from the device with every
//! bind. One of type 2 (2B, to be exact) belongs to the queue pair that bound it; its owner chooses the
//! low byte of the key, and both its owner and its peer can invalidate it. IBTA volume 1, 10.6.7.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::errno::{Errno, Result};
use crate::pd::Pd;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_OPTIONAL, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    ACCESS_ZERO_BASED,
};

/// The type of a window, numbered as `enum ibv_mw_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Belongs to a protection domain.
    One = 1,
    /// Belongs to a queue pair while it is bound.
    Two = 2,
}

impl Kind {
    /// From the verbs value.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::One, Self::Two].into_iter().find(|kind| *kind as u32 == raw)
    }
}

/// A memory window. Dropping it takes it back, too.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    kind: Kind,
    /// The key of the last bind that was asked for.
    key: AtomicU32,
    taken_back: AtomicBool,
}

/// What a window shall show. No bytes: nothing.
#[derive(Clone, Debug)]
pub struct Bind {
    /// The window.
    pub mw: Arc<Mw>,
    /// Its key from then on.
    pub key: u32,
    /// Key of the region.
    pub region: u32,
    /// First byte, as the region's addresses go.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// `IBV_ACCESS_*` for those who know the key.
    pub access: u32,
}

impl Mw {
    /// Makes a window that is not bound.
    ///
    /// # Errors
    /// ENOMEM when the table that regions and windows share is full.
    pub fn new(pd: &Arc<Pd>, kind: Kind) -> Result<Arc<Self>> {
        let key = pd.context.host.mrs.new_key()?;
        pd.attach();
        Ok(Arc::new(Self {
            pd: pd.clone(),
            kind,
            key: AtomicU32::new(key),
            taken_back: AtomicBool::new(false),
        }))
    }

    /// The type.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The key of the last bind that was asked for.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.key.load(Ordering::Acquire)
    }

    /// The key that follows in the order of `ibv_inc_rkey`: the device's choice for type 1.
    #[must_use]
    pub fn next_key(&self) -> u32 {
        let key = self.key();
        key & !0xff | key.wrapping_add(1) & 0xff
    }

    pub(crate) fn set_key(&self, key: u32) {
        self.key.store(key, Ordering::Release);
    }

    pub(crate) fn pd(&self) -> u32 {
        self.pd.id
    }

    pub(crate) fn is_taken_back(&self) -> bool {
        self.taken_back.load(Ordering::Acquire)
    }

    /// Takes the window back, bound or not. When this returns, no peer is inside it. A second call does
    /// nothing.
    ///
    /// # Errors
    /// EBUSY if a peer was stopped in the middle of a transfer; the key is no longer valid then, and the
    /// call can be repeated.
    pub fn deallocate(&self) -> Result<()> {
        if self.taken_back.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let host = self.pd.context.host;
        host.mrs.unbind(host, self.key() >> 16);
        if !host.quiesce() {
            self.taken_back.store(false, Ordering::Release);
            return Err(Errno::BUSY);
        }
        host.mrs.free(self.key());
        self.pd.detach();
        Ok(())
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // Its place is lost if a peer was stopped inside: it may still look at it.
        let _ = self.deallocate();
    }
}

impl Bind {
    /// What can be seen without looking at the region.
    pub(crate) fn is_well_formed(&self, pd: u32) -> bool {
        const KNOWN: u32 = ACCESS_LOCAL_WRITE
            | ACCESS_REMOTE_WRITE
            | ACCESS_REMOTE_READ
            | ACCESS_REMOTE_ATOMIC
            | ACCESS_ZERO_BASED
            | ACCESS_OPTIONAL;
        // Only windows of type 2 can be zero-based (o10-36.2.2).
        let zero_based_one = self.mw.kind == Kind::One && self.access & ACCESS_ZERO_BASED != 0;
        self.mw.pd() == pd
            && (self.key ^ self.mw.key()) & !0xff == 0
            && self.access & !KNOWN == 0
            && !zero_based_one
            && !self.mw.is_taken_back()
    }
}
