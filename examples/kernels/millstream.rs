//! Imports of a kernel from its region (docs/kernels.md). Put this file beside your kernel.

#![allow(dead_code)]

#[link(wasm_import_module = "millstream_1")]
unsafe extern "C" {
    #[link_name = "argument"]
    safe fn import_argument(index: u32) -> u64;
    #[link_name = "address"]
    safe fn import_address(offset: u64, bytes: u64) -> u32;
    #[link_name = "result"]
    safe fn import_result(index: u32, value: u64);
    #[link_name = "progress"]
    safe fn import_progress(done: u64);
    #[link_name = "traffic"]
    safe fn import_traffic(read: u64, written: u64);
    #[link_name = "safe_point"]
    fn import_safe_point(state: *const [u64; 16]);
    #[link_name = "resume"]
    fn import_resume(state: *mut [u64; 16]) -> u32;
    #[link_name = "refuse"]
    safe fn import_refuse(argument: u32);
}

/// Argument word `index`, 0 to 15.
pub fn argument(index: u32) -> u64 {
    import_argument(index)
}

/// Ends the run because of this argument.
pub fn refuse(index: u32) -> ! {
    import_refuse(index);
    core::arch::wasm32::unreachable()
}

/// Card memory from `offset` on as `count` values of `T`. Ends the run unless the whole range is aligned and
/// in granted banks.
///
/// # Safety
/// No other slice of the same memory is in use. `T` has no invalid values.
pub unsafe fn memory<T>(offset: u64, count: u64) -> &'static mut [T] {
    let Some(bytes) = count.checked_mul(size_of::<T>() as u64) else { core::arch::wasm32::unreachable() };
    if bytes == 0 {
        return &mut [];
    }
    let address = import_address(offset, bytes) as *mut T;
    if !address.is_aligned() {
        core::arch::wasm32::unreachable()
    }
    // SAFETY: the region has checked the range, and the caller promises the rest.
    unsafe { core::slice::from_raw_parts_mut(address, count as usize) }
}

/// One source's part of an event: an entry of the table that `event` gets.
#[repr(C)]
pub struct Fragment {
    /// Id of the source.
    pub source: u32,
    /// Kind of its payload.
    pub kind: u32,
    /// Zero: the fragment is there and intact. Bits: [`MISSING`], [`BAD_PACKET`], [`CORRUPT`].
    pub status: u32,
    address: u32,
    len: u32,
    /// CRC-32 that the payload should have.
    pub crc: u32,
}

/// The source has no fragment for the event.
pub const MISSING: u32 = 1;
/// The source's packet is damaged.
pub const BAD_PACKET: u32 = 2;
/// The payload has a wrong checksum.
pub const CORRUPT: u32 = 4;

impl Fragment {
    /// The payload; empty if the fragment is missing.
    pub fn payload(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the region has put the range into this memory; it stays for the call.
        unsafe { core::slice::from_raw_parts(self.address as *const u8, self.len as usize) }
    }
}

/// The fragments of an event, from the parameters of `event`: one per source, in the same order for all events.
///
/// # Safety
/// `table` and `count` are the parameters that the region passed.
pub unsafe fn fragments<'a>(table: u32, count: u32) -> &'a [Fragment] {
    // SAFETY: the region passes the address of its table.
    unsafe { core::slice::from_raw_parts(table as *const Fragment, count as usize) }
}

/// Sets result word `index`, 0 to 15.
pub fn result(index: u32, value: u64) {
    import_result(index, value);
}

/// Publishes the progress of the run, in units of the kernel.
pub fn progress(done: u64) {
    import_progress(done);
}

/// Counts bytes read and written, for the card's performance counters.
pub fn traffic(read: u64, written: u64) {
    import_traffic(read, written);
}

/// A safe point, at which the run may be stopped or paused. With the banks, `state` must suffice to resume
/// from here. Reach one at least every 100 ms.
pub fn safe_point(state: &[u64; 16]) {
    // SAFETY: the region reads sixteen words.
    unsafe { import_safe_point(state) }
}

/// The state to resume from, if this run resumes another one.
pub fn resume() -> Option<[u64; 16]> {
    let mut state = [0; 16];
    // SAFETY: the region writes sixteen words.
    match unsafe { import_resume(&mut state) } {
        0 => None,
        _ => Some(state),
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    core::arch::wasm32::unreachable()
}
