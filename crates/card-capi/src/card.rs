//! Cards on the network: `msc_` functions of `millstream_card.h`.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::time::Duration;

use libc::{ENODEV, ETIMEDOUT};
use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteOptions};
use millstream_card_abi::message::RawMessage;
use millstream_card_abi::registers::KERNEL_WORDS;
use millstream_rdma::{DeviceSelector, device};

use crate::error::{ApiError, Outcome, reference, status, store, text, value};
use crate::memory::milliseconds;

/// A connection to a card, `struct msc_card`.
#[allow(non_camel_case_types, reason = "its name in C")]
#[derive(Debug)]
pub struct msc_card(RemoteCard);

/// Parameters of a run, `struct msc_run`.
#[allow(non_camel_case_types, reason = "its name in C")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct msc_run {
    /// Argument words of the kernel.
    pub arguments: [u64; KERNEL_WORDS],
    /// Banks that the kernel may use, one bit each; 0: all.
    pub banks: u64,
    /// Limit of the work in units of the kernel; 0: none.
    pub fuel: u64,
    /// Longest time; 0: none.
    pub timeout_ms: u32,
    /// Zero.
    pub reserved: u32,
}

/// Bytes of a message, `struct msc_message`.
#[allow(non_camel_case_types, reason = "its name in C")]
pub type msc_message = [u8; RawMessage::BYTES];

fn connect(address: &str, timeout: Duration) -> Outcome<msc_card> {
    let device =
        device::open(&DeviceSelector::from_environment()).map_err(|error| ApiError::new(ENODEV, error))?;
    let options = RemoteOptions { timeout, ..RemoteOptions::default() };
    Ok(msc_card(RemoteCard::connect(&device, address, options)?))
}

fn request(run: &msc_run) -> RunRequest {
    RunRequest {
        banks: run.banks,
        fuel: (run.fuel != 0).then_some(run.fuel),
        timeout: (run.timeout_ms != 0).then(|| milliseconds(run.timeout_ms)),
        ..RunRequest::new(&run.arguments)
    }
}

/// The card behind a handle.
///
/// # Safety
/// `card` is null or came from [`msc_connect`].
unsafe fn remote<'a>(card: *const msc_card) -> Outcome<&'a RemoteCard> {
    // SAFETY: the caller's contract.
    unsafe { reference(card, "card") }.map(|card| &card.0)
}

/// Connects to the card that listens at `address`.
///
/// # Safety
/// `address` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_connect(address: *const c_char, timeout_ms: u32) -> *mut msc_card {
    // SAFETY: the caller's contract.
    let connected =
        unsafe { text(address, "address") }.and_then(|address| connect(address, milliseconds(timeout_ms)));
    value(connected.map(|card| Box::into_raw(Box::new(card))), null_mut())
}

/// Ends the connection, and with it a lease.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; nobody uses it afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_close(card: *mut msc_card) {
    if !card.is_null() {
        // SAFETY: the pointer came from Box::into_raw in msc_connect, and the caller gives it up.
        drop(unsafe { Box::from_raw(card) });
    }
}

/// Size of card memory in bytes; 0 for a null handle.
///
/// # Safety
/// `card` is null or came from [`msc_connect`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_memory_bytes(card: *const msc_card) -> u64 {
    // SAFETY: the caller's contract.
    value(unsafe { remote(card) }.map(RemoteCard::memory_bytes), 0)
}

/// Acquires the lease.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `epoch` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_acquire(
    card: *mut msc_card,
    duration_ms: u32,
    timeout_ms: u32,
    epoch: *mut u32,
) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { remote(card) }.and_then(|card| {
        let held = card.acquire(milliseconds(duration_ms), milliseconds(timeout_ms))?;
        // SAFETY: the caller's contract.
        unsafe { store(epoch, held.epoch) };
        Ok(())
    }))
}

/// Releases the lease.
///
/// # Safety
/// `card` is null or came from [`msc_connect`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_release(card: *mut msc_card) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { remote(card) }.and_then(|card| Ok(card.release()?)))
}

/// Writes card memory.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `source` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_put(
    card: *mut msc_card,
    offset: u64,
    source: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    let (card, source) = unsafe { (remote(card), slice(source, bytes, "source")) };
    status(card.and_then(|card| Ok(card.write(offset, source?)?)))
}

/// Reads card memory.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `target` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_get(
    card: *mut msc_card,
    offset: u64,
    target: *mut c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { remote(card) }.and_then(|card| {
        if bytes == 0 {
            return Ok(());
        }
        if target.is_null() {
            return Err(ApiError::invalid("target is a null pointer"));
        }
        // SAFETY: the caller passes room for this many bytes, which nobody else uses during the call.
        let target = unsafe { std::slice::from_raw_parts_mut(target.cast::<u8>(), bytes) };
        Ok(card.read(offset, target)?)
    }))
}

/// Bytes of the caller.
///
/// # Safety
/// `source` is null or has `bytes` bytes during `'a`.
unsafe fn slice<'a>(source: *const c_void, bytes: usize, name: &str) -> Outcome<&'a [u8]> {
    if bytes == 0 {
        return Ok(&[]);
    }
    if source.is_null() {
        return Err(ApiError::invalid(format_args!("{name} is a null pointer")));
    }
    // SAFETY: the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(source.cast::<u8>(), bytes) })
}

/// Loads a kernel of the card's directory.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `kernel` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_load(card: *mut msc_card, region: u32, kernel: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let (card, kernel) = unsafe { (remote(card), text(kernel, "kernel")) };
    status(card.and_then(|card| Ok(card.load(region, KernelSource::Builtin(kernel?)).map(drop)?)))
}

/// Writes a WebAssembly image to card memory and loads it.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `image` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_load_image(
    card: *mut msc_card,
    region: u32,
    image: *const c_void,
    bytes: usize,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's contract.
    let (card, image) = unsafe { (remote(card), slice(image, bytes, "image")) };
    status(
        card.and_then(|card| {
            Ok(card.load(region, KernelSource::Image { image: image?, at: offset }).map(drop)?)
        }),
    )
}

/// Starts the kernel of a region.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; the other pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_start(
    card: *mut msc_card,
    region: u32,
    run: *const msc_run,
    doorbell: *mut u64,
) -> c_int {
    // SAFETY: the caller's contract.
    let (card, run) = unsafe { (remote(card), reference(run, "run")) };
    status(card.and_then(|card| {
        let word = card.start(region, &request(run?))?;
        // SAFETY: the caller's contract.
        unsafe { store(doorbell, word) };
        Ok(())
    }))
}

/// Waits for the end of a run.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `results` is null or has room for four words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_wait(
    card: *mut msc_card,
    doorbell: u64,
    timeout_ms: u32,
    results: *mut [u64; 4],
) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { remote(card) }.and_then(|card| {
        let words = card.wait(doorbell, milliseconds(timeout_ms))?;
        // SAFETY: the caller's contract.
        unsafe { store(results, words) };
        Ok(())
    }))
}

/// Stops a run at its next safe point. Returns 1 if a kernel was running, 0 if not.
///
/// # Safety
/// `card` is null or came from [`msc_connect`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_stop(card: *mut msc_card, region: u32) -> c_int {
    // SAFETY: the caller's contract.
    value(unsafe { remote(card) }.and_then(|card| Ok(card.stop(region)?.into())), -1)
}

/// Takes the next message.
///
/// # Safety
/// `card` is null or came from [`msc_connect`]; `message` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn msc_next_message(
    card: *mut msc_card,
    timeout_ms: u32,
    message: *mut msc_message,
) -> c_int {
    // SAFETY: the caller's contract.
    status(unsafe { remote(card) }.and_then(|card| {
        let next = card.message(milliseconds(timeout_ms))?;
        let next =
            next.ok_or_else(|| ApiError::new(ETIMEDOUT, format_args!("no message within {timeout_ms} ms")))?;
        // SAFETY: the caller's contract.
        unsafe { store(message, next.to_bytes()) };
        Ok(())
    }))
}
