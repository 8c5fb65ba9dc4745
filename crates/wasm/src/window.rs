//! A module's linear memory: its own pages, and behind them the banks of a run, in place.
//!
//! ```text
//!     0            own           own + banks            4 GiB          + guard
//!     │ own memory │ bank │ bank │ nothing: access traps │ nothing       │
//! ```
//!
//! The banks are not copied: the card's shared mapping is mapped a second time (`mremap` of no bytes makes a
//! second mapping of the same pages). What a module can address is always inside the reservation, since a
//! 32-bit address and a constant offset reach no further than 4 GiB and the guard; so no bounds are checked in
//! the compiled code, and what is outside traps.
//!
//! Other processes may write to the banks while a module reads them, as with native kernels. A module can be
//! surprised by what it reads, and only it: nobody else takes what is in its memory for true.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use millstream_card::Span;
use millstream_card::region::kernel::Banks;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use crate::ADDRESSABLE_BYTES;

/// Address space behind the addressable memory that constant offsets may reach.
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
    /// With the banks.
    size: usize,
    /// Which banks of which memory are mapped.
    banks: (usize, u64),
}

// SAFETY: the pages belong to the window; who uses them is the business of wasmtime, one run at a time.
unsafe impl Send for Window {}
// SAFETY: as above; no function here reads or writes through a shared window.
unsafe impl Sync for Window {}

impl Window {
    /// A window of `own` bytes, a multiple of [`WASM_PAGE`], and the banks of a run.
    pub(crate) fn new(own: usize, banks: &Banks<'_>) -> io::Result<Window> {
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
            // Pieces are made of banks that were given; what is left is memory that has no address.
            let from = banks.as_ptr(piece).map_err(io::Error::other)?;
            // SAFETY: a shared mapping, of which a second one is made; what it takes the place of is address
            // space of the window, in which nobody has an interest yet.
            unsafe {
                let flags = MremapFlags::MAYMOVE;
                mremap_fixed(from.cast(), 0, piece.len as usize, flags, window.at(at))?;
            }
            at += piece.len as usize;
        }
        if at < size {
            // The rest of the last page is nobody's.
            // SAFETY: address space of the window.
            unsafe { mmap_anonymous(window.at(at), size - at, read_write(), private() | MapFlags::FIXED)? };
        }
        Ok(window)
    }

    fn at(&self, offset: usize) -> *mut c_void {
        self.base.as_ptr().wrapping_add(offset).cast()
    }

    /// Zeroes the module's own memory, by new pages.
    fn clear(&self) -> io::Result<()> {
        if self.own > 0 {
            // SAFETY: address space of the window; a module that used it has ended.
            unsafe { mmap_anonymous(self.at(0), self.own, read_write(), private() | MapFlags::FIXED)? };
        }
        Ok(())
    }

    /// Bytes of the module's own memory: where the banks begin.
    pub(crate) fn own(&self) -> usize {
        self.own
    }

    /// Bytes of the whole memory.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Where a range of card memory is in the module's memory; the caller has checked that it was given.
    pub(crate) fn address(&self, banks: &Banks<'_>, offset: u64) -> u64 {
        let bank = offset / banks.bank_bytes();
        // Banks that were given stand one behind the other.
        let before = (banks.mask() & ((1u64 << bank) - 1)).count_ones();
        self.own as u64 + u64::from(before) * banks.bank_bytes() + offset % banks.bank_bytes()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window's address space, all of it, which nobody uses any more. The second mapping of the
        // banks goes with it, the first stays.
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

/// Memory given to a run, as ranges of card memory without gaps between their banks.
fn pieces(banks: &Banks<'_>) -> Vec<Span> {
    let bytes = banks.bank_bytes();
    let mut pieces: Vec<Span> = Vec::new();
    for bank in (0..64).filter(|bank| banks.mask() >> bank & 1 == 1) {
        let offset = bank * bytes;
        match pieces.last_mut() {
            Some(last) if last.offset + last.len == offset => last.len += bytes,
            _ => pieces.push(Span::new(offset, bytes)),
        }
    }
    pieces
}

/// The bytes that all banks of a run take; None if that is no number, or there is a bank that is not there.
pub(crate) fn bank_bytes(banks: &Banks<'_>) -> Option<usize> {
    let spans = pieces(banks);
    let there = spans.iter().all(|&span| banks.check(span).is_ok());
    let total = spans.iter().try_fold(0u64, |sum, span| sum.checked_add(span.len))?;
    usize::try_from(total).ok().filter(|_| there)
}

/// What tells these banks from others.
fn identity(banks: &Banks<'_>) -> (usize, u64) {
    let first = u64::from(banks.mask().trailing_zeros() % 64) * banks.bank_bytes();
    let address = banks.as_ptr(Span::new(first, 0)).map_or(0, |pointer| pointer.addr());
    (address, banks.mask())
}

/// Gives a module the window that lies ready for its next run.
#[derive(Debug, Default)]
pub(crate) struct Sill {
    window: Mutex<Option<Arc<Window>>>,
}

impl Sill {
    /// Lays a window for these banks ready, the one of the run before if it is still right.
    pub(crate) fn prepare(&self, own: usize, banks: &Banks<'_>) -> io::Result<Arc<Window>> {
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

// SAFETY: each memory is a whole reservation of the size asked for, with a guard behind it, and readable and
// writable up to its size.
unsafe impl MemoryCreator for Sill {
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
        if minimum != window.own || reserved != Some(ADDRESSABLE_BYTES) || guard != GUARD_BYTES {
            return Err(format!("a memory of {minimum} bytes was not prepared"));
        }
        Ok(Box::new(Pane { window, size: minimum }))
    }
}

/// A window as a run's memory.
#[derive(Debug)]
struct Pane {
    window: Arc<Window>,
    size: usize,
}

// SAFETY: the memory does not move; it is readable and writable up to the size of the window, and no size
// beyond that is ever told.
unsafe impl LinearMemory for Pane {
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
