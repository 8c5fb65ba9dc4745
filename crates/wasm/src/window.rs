//! A module's linear memory: its own pages, followed by the banks of a run, mapped in place.
//!
//! ```text
//!     0            own           own + banks            4 GiB          + guard
//!     │ own memory │ bank │ bank │ nothing: access traps │ nothing       │
//! ```
//!
//! The banks are not copied: `mremap` of zero bytes creates a second mapping of the card's shared pages. A 32-bit
//! address plus a constant offset reaches at most 4 GiB and the guard, which are all reserved. So the compiled code
//! needs no bounds checks; an access outside the banks traps.
//!
//! Other processes may write to the banks while a module reads them, as with native kernels. Only the module depends
//! on these bytes.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use millstream_card_abi::MemoryRange;
use millstream_card_server::kernel::GrantedBanks;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use crate::ADDRESSABLE_BYTES;

/// Address space after the addressable memory that constant offsets can reach.
pub(crate) const GUARD_BYTES: usize = 64 << 20;

/// A page of WebAssembly.
pub(crate) const WASM_PAGE: usize = 64 << 10;

const RESERVED: usize = ADDRESSABLE_BYTES + GUARD_BYTES;

/// Reserved address space with a module's memory at its start.
#[derive(Debug)]
pub(crate) struct Window {
    base: NonNull<u8>,
    /// Bytes of the module's own memory.
    own: usize,
    /// Bytes including the banks.
    size: usize,
    /// Identity of the mapped banks.
    banks: (usize, u64),
}

// SAFETY: the pages belong to the window; wasmtime uses them for one run at a time.
unsafe impl Send for Window {}
// SAFETY: as above; no function here reads or writes through a shared window.
unsafe impl Sync for Window {}

impl Window {
    /// A window of `own` bytes, a multiple of [`WASM_PAGE`], and the banks of a run.
    pub(crate) fn new(own: usize, banks: &GrantedBanks<'_>) -> io::Result<Window> {
        let pieces = pieces(banks);
        let total: usize = pieces.iter().map(|piece| piece.len as usize).sum();
        let size = own + total.next_multiple_of(WASM_PAGE);
        // SAFETY: new address space, at an address that the system chooses.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), RESERVED, ProtFlags::empty(), private())? };
        let base = NonNull::new(base.cast::<u8>()).expect("the system maps nothing at zero");
        let window = Window { base, own, size, banks: identity(banks) };
        window.clear()?;
        let mut at = own;
        for piece in pieces {
            // Pieces consist of granted banks, so this fails only if the memory is not mapped.
            let from = banks.as_ptr(piece).map_err(io::Error::other)?;
            // SAFETY: a second mapping of a shared mapping; it replaces address space of the window that is not
            // used yet.
            unsafe {
                let flags = MremapFlags::MAYMOVE;
                mremap_fixed(from.cast(), 0, piece.len as usize, flags, window.at(at))?;
            }
            at += piece.len as usize;
        }
        if at < size {
            // The rest of the last page has no bank.
            // SAFETY: address space of the window.
            unsafe { mmap_anonymous(window.at(at), size - at, read_write(), private() | MapFlags::FIXED)? };
        }
        Ok(window)
    }

    fn at(&self, offset: usize) -> *mut c_void {
        self.base.as_ptr().wrapping_add(offset).cast()
    }

    /// Zeros the module's own memory by mapping new pages.
    fn clear(&self) -> io::Result<()> {
        if self.own > 0 {
            // SAFETY: address space of the window; a module that used it has ended.
            unsafe { mmap_anonymous(self.at(0), self.own, read_write(), private() | MapFlags::FIXED)? };
        }
        Ok(())
    }

    /// Bytes of the whole memory.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The address of an offset of card memory in the module's memory; the caller has checked that it is granted.
    pub(crate) fn address(&self, banks: &GrantedBanks<'_>, offset: u64) -> u64 {
        let bank = offset / banks.bank_bytes();
        // Granted banks are adjacent.
        let before = (banks.mask() & ((1u64 << bank) - 1)).count_ones();
        self.own as u64 + u64::from(before) * banks.bank_bytes() + offset % banks.bank_bytes()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: all of the window's address space, which has no users any more. The first mapping of the banks
        // stays.
        let unmapped = unsafe { munmap(self.at(0), RESERVED) };
        debug_assert!(unmapped.is_ok());
    }
}

fn private() -> MapFlags {
    MapFlags::PRIVATE | MapFlags::NORESERVE
}

fn read_write() -> ProtFlags {
    ProtFlags::READ | ProtFlags::WRITE
}

/// The granted banks as ranges of card memory, adjacent banks joined.
fn pieces(banks: &GrantedBanks<'_>) -> Vec<MemoryRange> {
    let bytes = banks.bank_bytes();
    let mut pieces: Vec<MemoryRange> = Vec::new();
    for bank in (0..64).filter(|bank| banks.mask() >> bank & 1 == 1) {
        let offset = bank * bytes;
        match pieces.last_mut() {
            Some(last) if last.offset + last.len == offset => last.len += bytes,
            _ => pieces.push(MemoryRange::new(offset, bytes)),
        }
    }
    pieces
}

/// Size of all granted banks; none if it overflows, or a bank does not exist.
pub(crate) fn bank_bytes(banks: &GrantedBanks<'_>) -> Option<usize> {
    let spans = pieces(banks);
    let there = spans.iter().all(|&span| banks.check(span).is_ok());
    let total = spans.iter().try_fold(0u64, |sum, span| sum.checked_add(span.len))?;
    usize::try_from(total).ok().filter(|_| there)
}

/// Identifies memory and banks.
fn identity(banks: &GrantedBanks<'_>) -> (usize, u64) {
    let first = u64::from(banks.mask().trailing_zeros() % 64) * banks.bank_bytes();
    let address = banks.as_ptr(MemoryRange::new(first, 0)).map_or(0, |pointer| pointer.addr());
    (address, banks.mask())
}

/// Provides the prepared window to the next run of a module.
#[derive(Debug, Default)]
pub(crate) struct WindowAllocator {
    window: Mutex<Option<Arc<Window>>>,
    /// Bytes between the memory that a module declares and the banks: for tables of its host.
    host_bytes: usize,
}

impl WindowAllocator {
    /// An allocator that adds `host_bytes`, a multiple of [`WASM_PAGE`], to the memory of a module.
    pub(crate) fn with_host_bytes(host_bytes: usize) -> WindowAllocator {
        WindowAllocator { window: Mutex::default(), host_bytes }
    }

    /// Prepares a window of `own` bytes, including those of the host, for these banks; reuses that of the previous run if it fits.
    pub(crate) fn prepare(&self, own: usize, banks: &GrantedBanks<'_>) -> io::Result<Arc<Window>> {
        let mut slot = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |window: &Arc<Window>| window.own == own && window.banks == identity(banks);
        let window = match slot.take().filter(fits) {
            Some(window) => {
                window.clear()?;
                window
            }
            None => Arc::new(Window::new(own, banks)?),
        };
        *slot = Some(window.clone());
        Ok(window)
    }
}

// SAFETY: each memory is a reservation of the requested size, followed by a guard, and accessible up to its size.
unsafe impl MemoryCreator for WindowAllocator {
    fn new_memory(
        &self,
        _ty: MemoryType,
        minimum: usize,
        _maximum: Option<usize>,
        reserved: Option<usize>,
        guard: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        let slot = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let window = slot.clone().ok_or("no run was prepared")?;
        if minimum + self.host_bytes != window.own
            || reserved != Some(ADDRESSABLE_BYTES)
            || guard != GUARD_BYTES
        {
            return Err(format!("a memory of {minimum} bytes was not prepared"));
        }
        Ok(Box::new(WindowMemory { window, size: minimum }))
    }
}

/// The memory of a run.
#[derive(Debug)]
struct WindowMemory {
    window: Arc<Window>,
    size: usize,
}

// SAFETY: the memory does not move. It is accessible up to the size of the window, which is the largest size
// reported.
unsafe impl LinearMemory for WindowMemory {
    fn byte_size(&self) -> usize {
        self.size
    }

    fn byte_capacity(&self) -> usize {
        self.window.size
    }

    fn grow_to(&mut self, new_size: usize) -> wasmtime::Result<()> {
        if new_size > self.window.size {
            return Err(wasmtime::Error::msg("a kernel's memory does not grow"));
        }
        self.size = new_size;
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.window.base()
    }
}
