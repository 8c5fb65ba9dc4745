//! Cards of this host: `msm_` functions of `millstream_memory.h`.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{ENODEV, ENOMEM};
use millstream_card::{Card, Ring, RingLayout};
use millstream_card_abi::command::{Descriptor, ENTRY_BYTES};
use millstream_card_abi::{CardName, MemoryRange};

use crate::error::{ApiError, Outcome, reference, status, store, text, value};
use crate::heap::{Heap, HeapError};

/// A leased card of this host, `struct msm_memory`.
#[allow(non_camel_case_types, reason = "its name in C")]
#[derive(Debug)]
pub struct msm_memory {
    // First field: rings are closed before the lease ends.
    ring: Mutex<Option<Ring>>,
    card: Card,
    epoch: u32,
    heap: Mutex<Heap>,
}

/// An entry of the card's rings, `struct msc_descriptor` or `struct msc_completion`.
#[allow(non_camel_case_types, reason = "its name in C")]
pub type msc_entry = [u8; ENTRY_BYTES];

impl From<HeapError> for ApiError {
    fn from(error: HeapError) -> ApiError {
        match error {
            HeapError::Full { .. } => ApiError::new(ENOMEM, error),
            _ => ApiError::invalid(error),
        }
    }
}

impl msm_memory {
    fn open(name: &str, timeout: Duration) -> Outcome<msm_memory> {
        let started = Instant::now();
        let name: CardName =
            name.parse().map_err(|error| ApiError::invalid(format_args!("card {name:?}: {error}")))?;
        let card = Card::open(&name, timeout)?;
        let epoch = card.acquire(timeout.saturating_sub(started.elapsed()))?;
        let heap = Heap::new(card.memory().size());
        Ok(msm_memory { ring: Mutex::new(None), card, epoch, heap: Mutex::new(heap) })
    }

    fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) -> MutexGuard<'_, Option<Ring>> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_ring<T>(&self, act: impl FnOnce(&mut Ring) -> Outcome<T>) -> Outcome<T> {
        let mut ring = self.ring();
        act(ring
            .as_mut()
            .ok_or_else(|| ApiError::invalid("the card's rings are closed; call msm_rings first"))?)
    }

    fn address(&self, offset: u64) -> *mut c_void {
        self.card.memory().as_ptr().wrapping_add(offset as usize).cast()
    }

    /// Offset in card memory of a range of the mapping.
    fn offset(&self, address: *const c_void, bytes: u64) -> Outcome<u64> {
        let base = self.card.memory().as_ptr().addr() as u64;
        let size = self.card.memory().size();
        let offset = (address.addr() as u64).wrapping_sub(base);
        if MemoryRange::new(offset, bytes).fits(size) {
            return Ok(offset);
        }
        Err(ApiError::invalid(format_args!(
            "{bytes} bytes at address {address:p} are outside the memory of card {}, {size} bytes at {base:#x}",
            self.card.name()
        )))
    }

    fn check(&self) -> Outcome<()> {
        let gone = |what: &str| Err(ApiError::new(ENODEV, format_args!("card {} {what}", self.card.name())));
        if !self.card.is_alive() {
            return gone("has ended or died");
        }
        if !self.card.holds(self.epoch) {
            return gone(&format!("has ended the lease of epoch {}", self.epoch));
        }
        Ok(())
    }

    /// Uses the card, if its lease is still this handle's. The end of the lease during the use is an error, too: the card
    /// clears its memory then.
    fn with_lease<T>(&self, act: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        self.check()?;
        let done = act();
        self.check()?;
        done
    }

    fn open_rings(&self, slots: u32) -> Outcome<()> {
        let mut ring = self.ring();
        if ring.is_some() {
            return Err(ApiError::invalid("the card's rings are open"));
        }
        if !slots.is_power_of_two() {
            return Err(ApiError::invalid(format_args!("{slots} slots: not a power of two")));
        }
        let offset = self.heap().allocate(RingLayout::bytes(slots), ENTRY_BYTES as u64)?;
        match Ring::open(&self.card, RingLayout::at(offset, slots)) {
            Ok(open) => *ring = Some(open),
            Err(error) => {
                self.heap().release(offset)?;
                return Err(error.into());
            }
        }
        Ok(())
    }
}

/// A timeout in milliseconds.
pub(crate) fn milliseconds(timeout_ms: u32) -> Duration {
    Duration::from_millis(timeout_ms.into())
}

/// Opens and leases the card `name`.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_open(name: *const c_char, timeout_ms: u32) -> *mut msm_memory {
    // SAFETY: the caller's contract.
    let opened =
        unsafe { text(name, "name") }.and_then(|name| msm_memory::open(name, milliseconds(timeout_ms)));
    value(opened.map(|memory| Box::into_raw(Box::new(memory))), null_mut())
}

/// Ends the lease and unmaps the memory.
///
/// # Safety
/// `memory` is null or came from [`msm_open`]; nobody uses it or its allocations afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_close(memory: *mut msm_memory) {
    if !memory.is_null() {
        // SAFETY: the pointer came from Box::into_raw in msm_open, and the caller gives it up.
        drop(unsafe { Box::from_raw(memory) });
    }
}

/// Address of byte 0 of card memory.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_base(memory: *const msm_memory) -> *mut c_void {
    // SAFETY: the caller's contract.
    value(unsafe { reference(memory, "memory") }.map(|memory| memory.address(0)), null_mut())
}

/// Size of card memory in bytes; 0 for a null handle.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_size(memory: *const msm_memory) -> u64 {
    // SAFETY: the caller's contract.
    value(unsafe { reference(memory, "memory") }.map(|memory| memory.card.memory().size()), 0)
}

/// Free bytes of the allocator.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_free_bytes(memory: *const msm_memory) -> u64 {
    // SAFETY: the caller's contract.
    value(unsafe { reference(memory, "memory") }.map(|memory| memory.heap().free_bytes()), 0)
}

/// Allocates card memory.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_alloc(memory: *mut msm_memory, bytes: u64, alignment: u64) -> *mut c_void {
    // SAFETY: the caller's contract.
    let allocated = unsafe { reference(memory, "memory") }
        .and_then(|memory| Ok(memory.address(memory.heap().allocate(bytes, alignment)?)));
    value(allocated, null_mut())
}

/// Allocates the range at an offset of card memory.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_alloc_at(memory: *mut msm_memory, offset: u64, bytes: u64) -> *mut c_void {
    // SAFETY: the caller's contract.
    let allocated = unsafe { reference(memory, "memory") }
        .and_then(|memory| Ok(memory.address(memory.heap().take(offset, bytes)?)));
    value(allocated, null_mut())
}

/// Frees an allocation.
///
/// # Safety
/// `memory` is null or came from [`msm_open`]; nobody uses the allocation afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_free(memory: *mut msm_memory, address: *mut c_void) -> c_int {
    if address.is_null() {
        return 0;
    }
    // SAFETY: the caller's contract.
    status(unsafe { reference(memory, "memory") }.and_then(|memory| {
        let offset = memory.offset(address, 0)?;
        Ok(memory.heap().release(offset)?)
    }))
}

/// Offset in card memory of an address of the mapping; `UINT64_MAX` if it is outside.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_offset(memory: *const msm_memory, address: *const c_void) -> u64 {
    // SAFETY: the caller's contract.
    value(unsafe { reference(memory, "memory") }.and_then(|memory| memory.offset(address, 0)), u64::MAX)
}

/// Descriptor and offset of a range, for `ibv_reg_dmabuf_mr`.
///
/// # Safety
/// `memory` is null or came from [`msm_open`]; the output pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_dmabuf(
    memory: *const msm_memory,
    address: *const c_void,
    bytes: u64,
    fd: *mut c_int,
    offset: *mut u64,
) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { reference(memory, "memory") }.and_then(|memory| {
        let start = memory.offset(address, bytes)?;
        // SAFETY: the caller's contract.
        unsafe {
            store(fd, memory.card.memory_fd().as_raw_fd());
            store(offset, start);
        }
        Ok(())
    }))
}

/// 0 while the card runs and this process holds its lease.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_check(memory: *const msm_memory) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { reference(memory, "memory") }.and_then(msm_memory::check))
}

/// Descriptor that hangs up when the card ends.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_liveness_fd(memory: *const msm_memory) -> c_int {
    // SAFETY: the caller's contract.
    value(unsafe { reference(memory, "memory") }.map(|memory| memory.card.liveness_fd().as_raw_fd()), -1)
}

/// Loads a kernel of the card's directory into a region.
///
/// # Safety
/// `memory` is null or came from [`msm_open`]; `kernel` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_load(memory: *mut msm_memory, region: u32, kernel: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let (memory, kernel) = unsafe { (reference(memory, "memory"), text(kernel, "kernel")) };
    status(memory.and_then(|memory| {
        let regions = memory.card.registers().region_count().load(Ordering::Relaxed);
        if region >= regions {
            return Err(ApiError::invalid(format_args!("card has {regions} regions, no region {region}")));
        }
        let kernel = kernel?;
        memory
            .with_lease(|| Ok(memory.card.load_while(region as usize, kernel, || memory.check().is_ok())?))
    }))
}

/// Opens the command and completion rings in card memory.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_rings(memory: *mut msm_memory, slots: u32) -> c_int {
    // SAFETY: the caller's contract.
    status(
        unsafe { reference(memory, "memory") }
            .and_then(|memory| memory.with_lease(|| memory.open_rings(slots))),
    )
}

/// Submits a command.
///
/// # Safety
/// `memory` is null or came from [`msm_open`]; the other pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_submit(
    memory: *mut msm_memory,
    command: *const msc_entry,
    index: *mut u64,
) -> c_int {
    // SAFETY: the caller's contract.
    let (memory, command) = unsafe { (reference(memory, "memory"), reference(command, "command")) };
    status(memory.and_then(|memory| {
        let command = Descriptor::from_bytes(command?)
            .map_err(|(fault, cookie)| ApiError::invalid(format_args!("command {cookie:#x}: {fault}")))?;
        let submitted = memory.with_lease(|| memory.with_ring(|ring| Ok(ring.submit(&command)?)))?;
        // SAFETY: the caller's contract.
        unsafe { store(index, submitted) };
        Ok(())
    }))
}

/// Waits for the next completion.
///
/// # Safety
/// `memory` is null or came from [`msm_open`]; `completion` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_wait(
    memory: *mut msm_memory,
    timeout_ms: u32,
    completion: *mut msc_entry,
) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { reference(memory, "memory") }.and_then(|memory| {
        let timeout = milliseconds(timeout_ms);
        let done = memory.with_lease(|| memory.with_ring(|ring| Ok(ring.wait(timeout)?)))?;
        // SAFETY: the caller's contract.
        unsafe { store(completion, done.to_bytes()) };
        Ok(())
    }))
}

/// Arms the interrupt of the next completion.
///
/// # Safety
/// `memory` is null or came from [`msm_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msm_arm_interrupt(memory: *mut msm_memory) -> c_int {
    // SAFETY: the caller's contract.
    let memory = unsafe { reference(memory, "memory") };
    value(
        memory.and_then(|memory| {
            memory.with_lease(|| {
                memory.with_ring(|ring| {
                    ring.arm_interrupt();
                    Ok(memory.card.interrupt_fd().as_raw_fd())
                })
            })
        }),
        -1,
    )
}
