//! Timers of queue pairs whose packets get no answer, and of packets that are held back.

use std::net::Ipv4Addr;
use std::time::Duration;

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{SEND_SIGNALED, WC_SUCCESS, WR_SEND};
use millstream_device::{Channel, Cq};

use crate::support::{Adapter, TEST_TIMEOUT, next, readable};
use crate::unreliable::ready;
use crate::wire::{connected_to, on_the_wire, on_the_wire_with};

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
    let used = || {
        let before = processor_time();
        std::thread::sleep(Duration::from_millis(200));
        processor_time() - before
    };
    // The thread would be busy in all of them. Other processes may disturb one measurement.
    let used: Vec<_> = (0..5).map(|_| used()).collect();
    assert!(used.iter().any(|used| *used < Duration::from_millis(20)), "{used:?} of processor time");
}

#[test]
fn a_delayed_packet_arrives_while_its_program_sleeps() {
    for faults in ["delay=1:20ms", "reorder=1", "delay=1:20ms,side=receive"] {
        on_the_wire_with("wire_delayed_packet", &[("MILLSTREAM_LINK", faults)]);
    }
}

/// In another process, which sends a single packet. No timer of a queue pair wakes the device's thread.
pub(crate) fn delayed_packet() {
    let adapter = Adapter::open();
    let channel = Channel::new(&adapter.context).expect("a channel");
    let received = Cq::new(&adapter.context, 8, Some(channel.clone())).expect("a queue");
    let [near, far] = [&adapter.cq(), &received]
        .map(|cq| adapter.qp_with(cq, QpType::Uc, RecvSource::Own).expect("a queue pair"));
    ready(&near, far.qpn().get());
    ready(&far, near.qpn().get());
    far.post_recv(7, &[]).expect("room");
    received.arm(false);
    near.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert!(readable(&*channel, TEST_TIMEOUT), "the packet did not arrive");
    let completion = next(&received);
    assert_eq!((completion.status, completion.wr_id), (WC_SUCCESS, 7));
}

/// Processor time that this process has used.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is on the stack.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
