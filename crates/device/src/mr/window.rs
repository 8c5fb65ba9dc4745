//! Memory windows: keys for parts of a region, bound and invalidated without the kernel (IBTA volume 1, 10.6.7).
//!
//! A window of type 1 belongs to its protection domain and gets a new key from the device with every
//! bind. A window of type 2B belongs to the queue pair that bound it; its owner chooses the
//! low byte of the key, and its owner and its peer can invalidate it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::errno::{Errno, Result};
pub use crate::mr_table::MwType;
use crate::mr_table::{KeyKind, WindowBinding};
use crate::pd::Pd;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_OPTIONAL, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    ACCESS_ZERO_BASED,
};

impl MwType {
    /// From the verbs value.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::Type1, Self::Type2].into_iter().find(|kind| *kind as u32 == raw)
    }
}

/// A memory window. Dropping it deallocates it.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    kind: MwType,
    /// The key of the last bind request.
    key: AtomicU32,
    deallocated: AtomicBool,
}

/// The parameters of a bind request. A length of zero unbinds the window.
#[derive(Clone, Debug)]
pub struct MwBind {
    /// The window.
    pub mw: Arc<Mw>,
    /// Its new key.
    pub key: u32,
    /// Key of the region.
    pub region: u32,
    /// First address, in the region's addresses.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// `IBV_ACCESS_*` of the window.
    pub access: u32,
}

impl Mw {
    /// Makes a window that is not bound.
    ///
    /// # Errors
    /// ENOMEM when the table that regions and windows share is full.
    pub fn new(pd: &Arc<Pd>, kind: MwType) -> Result<Arc<Self>> {
        let key = pd.context.adapter.mrs.new_key(KeyKind::Window)?;
        pd.attach();
        Ok(Arc::new(Self {
            pd: pd.clone(),
            kind,
            key: AtomicU32::new(key),
            deallocated: AtomicBool::new(false),
        }))
    }

    /// The type.
    #[must_use]
    pub fn kind(&self) -> MwType {
        self.kind
    }

    /// The key of the last bind request.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.key.load(Ordering::Acquire)
    }

    /// The next key in the order of `ibv_inc_rkey`, which the device chooses for type 1.
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

    pub(crate) fn is_deallocated(&self) -> bool {
        self.deallocated.load(Ordering::Acquire)
    }

    /// Deallocates the window, bound or not. After the return no peer accesses memory through it. A second call does
    /// nothing.
    ///
    /// # Errors
    /// EBUSY if a peer was stopped in the middle of a transfer; the key is no longer valid then, and the
    /// call can be repeated.
    pub fn deallocate(&self) -> Result<()> {
        if self.deallocated.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let adapter = self.pd.context.adapter;
        adapter.mrs.unbind(self.key() >> 16);
        if adapter.quiesce().is_err() {
            self.deallocated.store(false, Ordering::Release);
            return Err(Errno::BUSY);
        }
        adapter.mrs.free(self.key());
        self.pd.detach();
        Ok(())
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // If a stopped peer has an operation in flight, the table entry is leaked.
        let _ = self.deallocate();
    }
}

impl MwBind {
    /// The parameters for the table of memory keys.
    pub(crate) fn binding(&self) -> WindowBinding {
        WindowBinding {
            key: self.key,
            region: self.region,
            addr: self.addr,
            len: self.len,
            access: self.access,
        }
    }

    /// Checks the parameters that do not concern the region.
    pub(crate) fn is_well_formed(&self, pd: u32) -> bool {
        const KNOWN: u32 = ACCESS_LOCAL_WRITE
            | ACCESS_REMOTE_WRITE
            | ACCESS_REMOTE_READ
            | ACCESS_REMOTE_ATOMIC
            | ACCESS_ZERO_BASED
            | ACCESS_OPTIONAL;
        // Only windows of type 2 can be zero-based (o10-36.2.2).
        let zero_based_one = self.mw.kind == MwType::Type1 && self.access & ACCESS_ZERO_BASED != 0;
        self.mw.pd() == pd
            && (self.key ^ self.mw.key()) & !0xff == 0
            && self.access & !KNOWN == 0
            && !zero_based_one
            && !self.mw.is_deallocated()
    }
}
