//! Interrupts of the command queue.

use std::sync::atomic::Ordering;

use millstream_card_abi::command::{Cause, Status};
use millstream_card_abi::registers::Registers;
use millstream_shm::{EventFd, futex};

/// Wakes the users that wait for a change of the rings.
pub(crate) fn interrupt(registers: &Registers, descriptor: &EventFd) {
    // Sequentially consistent: a waiter first announces itself and then reads this word, so one of the two
    // sees the other.
    registers.interrupt_sequence().fetch_add(1, Ordering::SeqCst);
    if registers.interrupt_waiters().load(Ordering::SeqCst) != 0 {
        futex::wake_all(registers.interrupt_sequence());
    }
    if registers.interrupt_arm().load(Ordering::SeqCst) != 0
        && registers.interrupt_arm().swap(0, Ordering::SeqCst) != 0
    {
        descriptor.signal();
    }
}

/// Publishes that the rings are out of service because a command is hung.
pub(crate) fn publish_hung(registers: &Registers, descriptor: &EventFd) {
    registers.ring_fault().store(Cause::KernelHung.code(), Ordering::Release);
    registers.status().store(Status::Hung as u32, Ordering::Release);
    interrupt(registers, descriptor);
}
