//! Work requests of the C interface.

use std::mem::MaybeUninit;

use rdma_mummy_sys::{
    atomic_t, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode,
    imm_data_invalidated_rkey_union_t,
};

use crate::memory::{RemoteAddress, Sge};

/// Work request id, chosen by the caller and returned in the completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WrId(pub u64);

/// Whether success generates a completion. Failure always does.
///
/// Completions free entries of the send queue, so some work requests must be signaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Signaled.
    Yes,
    /// Unsignaled.
    No,
}

impl Signal {
    #[inline]
    pub(super) fn flags(self) -> u32 {
        match self {
            Signal::Yes => ibv_send_flags::IBV_SEND_SIGNALED.0,
            Signal::No => 0,
        }
    }
}

/// Operation of a send work request, without its local memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operation {
    Send,
    SendImm(u32),
    Write(RemoteAddress),
    WriteImm(RemoteAddress, u32),
    Read(RemoteAddress),
    /// Compare-and-swap: writes `.2` if the word equals `.1`.
    CompareSwap(RemoteAddress, u64, u64),
    /// Fetch-and-add: adds `.1`.
    FetchAdd(RemoteAddress, u64),
}

/// Builds a work request without a successor. It points to `sges`, which must live until it is posted.
#[inline]
pub(super) fn send_request(operation: Operation, sges: &[Sge], wr_id: WrId, signal: Signal) -> ibv_send_wr {
    let mut request = MaybeUninit::uninit();
    put_send_request(&mut request, operation, sges, wr_id, signal);
    // SAFETY: just made.
    unsafe { request.assume_init() }
}

/// Builds a [`send_request`] in place, field by field. Building it elsewhere and copying it doubles the cost.
#[inline(always)]
pub(super) fn put_send_request(
    place: &mut MaybeUninit<ibv_send_wr>,
    operation: Operation,
    sges: &[Sge],
    wr_id: WrId,
    signal: Signal,
) {
    let place = place.as_mut_ptr();
    let nowhere = RemoteAddress { addr: 0, rkey: millstream_quantity::Rkey::new(0) };
    let (opcode, remote, imm) = match operation {
        Operation::Send => (ibv_wr_opcode::IBV_WR_SEND, nowhere, 0),
        Operation::SendImm(imm) => (ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, nowhere, imm),
        Operation::Write(remote) => (ibv_wr_opcode::IBV_WR_RDMA_WRITE, remote, 0),
        Operation::WriteImm(remote, imm) => (ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM, remote, imm),
        Operation::Read(remote) => (ibv_wr_opcode::IBV_WR_RDMA_READ, remote, 0),
        Operation::CompareSwap(remote, ..) => (ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, remote, 0),
        Operation::FetchAdd(remote, _) => (ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, remote, 0),
    };
    let (remote_addr, rkey) = (remote.addr, remote.rkey.get());
    // SAFETY: `place` is valid for a work request. All fields are written, except union members of other operations and
    // queue pair types.
    unsafe {
        (*place).wr_id = wr_id.0;
        (*place).next = std::ptr::null_mut();
        // The device only reads the list; the C interface has no `const` here.
        (*place).sg_list = sges.as_ptr().cast::<ibv_sge>().cast_mut();
        (*place).num_sge = sges.len() as i32;
        (*place).opcode = opcode;
        (*place).send_flags = signal.flags();
        (*place).imm_data_invalidated_rkey_union =
            imm_data_invalidated_rkey_union_t { imm_data: imm.to_be() };
        match operation {
            Operation::CompareSwap(_, compare_add, swap) => {
                (*place).wr.atomic = atomic_t { remote_addr, compare_add, swap, rkey };
            }
            Operation::FetchAdd(_, compare_add) => {
                (*place).wr.atomic = atomic_t { remote_addr, compare_add, swap: 0, rkey };
            }
            _ => {
                (*place).wr.rdma.remote_addr = remote_addr;
                (*place).wr.rdma.rkey = rkey;
            }
        }
    }
}

/// The scatter/gather element of inline data: address and length, no key.
///
/// Only for a work request with `IBV_SEND_INLINE`, which copies the bytes when it is posted.
#[inline]
pub(super) fn inline_element(bytes: &[u8]) -> ibv_sge {
    // A longer length saturates, exceeds any device's limit, and is rejected.
    ibv_sge { addr: bytes.as_ptr() as u64, length: u32::try_from(bytes.len()).unwrap_or(u32::MAX), lkey: 0 }
}

/// Builds a receive without a successor. It points to `sges`, which must live until it is posted.
#[inline]
pub(super) fn recv_request(sges: &[Sge], wr_id: WrId) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: wr_id.0,
        next: std::ptr::null_mut(),
        sg_list: sges.as_ptr().cast::<ibv_sge>().cast_mut(),
        num_sge: sges.len() as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_quantity::Rkey;

    #[test]
    fn a_request_has_the_layout_of_verbs_h() {
        assert_eq!(size_of::<ibv_send_wr>(), 128);
        assert_eq!(size_of::<ibv_recv_wr>(), 32);
        assert_eq!(size_of::<Sge>(), 16);
    }

    #[test]
    fn immediate_data_travels_in_network_order() {
        let remote = RemoteAddress { addr: 0x1000, rkey: Rkey::new(7) };
        let request = send_request(Operation::WriteImm(remote, 0x0102_0304), &[], WrId(9), Signal::Yes);
        // SAFETY: both unions were filled through these fields.
        unsafe {
            assert_eq!(request.imm_data_invalidated_rkey_union.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
            assert_eq!(request.wr.rdma.remote_addr, 0x1000);
            assert_eq!(request.wr.rdma.rkey, 7);
        }
        assert_eq!(request.opcode, ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
        assert_eq!(request.send_flags, ibv_send_flags::IBV_SEND_SIGNALED.0);
        assert_eq!(request.wr_id, 9);
    }
}
