//! Timers of queue pairs whose packets get no answer.

use std::net::Ipv4Addr;
use std::time::Duration;

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{SEND_SIGNALED, WR_SEND};

use crate::support::Adapter;
use crate::wire::{connected_to, on_the_wire};

#[test]
fn a_reset_queue_pair_has_no_timer() {
    on_the_wire("wire_reset_timer");
}

/// In another process, which does nothing else: a timer that has expired and stays set keeps the device's thread busy.
pub(crate) fn reset_timer() {
    let adapter = Adapter::open();
    let qp = connected_to(&adapter, Ipv4Addr::new(127, 0, 0, 2));
    qp.post_send(&SendWr { opcode: WR_SEND, flags: SEND_SIGNALED, ..SendWr::default() }).expect("room");
    qp.modify(&QpAttr { state: QpState::Reset, ..QpAttr::default() }, attr::STATE).expect("always allowed");
    // The sender would have asked for the acknowledgement after 4 ms.
    std::thread::sleep(Duration::from_millis(20));
    let before = processor_time();
    std::thread::sleep(Duration::from_millis(200));
    let used = processor_time() - before;
    assert!(used < Duration::from_millis(20), "{used:?} of processor time");
}

/// Processor time that this process has used.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is on the stack.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
