//! Transfers with a peer card, as RDMA work requests.

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::dma::{DmaDescriptor, DmaOperation};
use millstream_rdma::memory::{RemoteAddress, RemoteMemory, Sge};
use millstream_rdma::queue::{Segment, SendList, Signal};
use millstream_rdma::{Completion, CompletionQueue, Region, Rkey, Status, WrId};

use super::peers::Peer;
use super::{DEPTH, PIECE};

/// The `len` bytes of a transfer from `at`, as operands of a work request.
fn operands(
    memory: &Region,
    descriptor: &DmaDescriptor,
    at: u64,
    len: u64,
) -> Result<(Sge, RemoteAddress), Fault> {
    let outside = Fault::new(Cause::DmaOutsideMemory, descriptor.local.offset);
    let here = memory.sge(descriptor.local.offset + at, len as u32).map_err(|_| outside)?;
    Ok((here, RemoteAddress { addr: descriptor.remote.wrapping_add(at), rkey: Rkey::new(descriptor.key) }))
}

/// The fault of a transfer whose work request failed.
fn fault_of(status: Status) -> Fault {
    match status {
        Status::RemoteAccessError | Status::RemoteInvalidRequestError => {
            Fault::new(Cause::DmaRemoteAccess, 0)
        }
        _ => LOST,
    }
}

const LOST: Fault = Fault::new(Cause::DmaPeerLost, 0);
const INTERRUPTED: Fault = Fault::new(Cause::Interrupted, 0);

/// Executes a transfer in pieces, several at a time.
pub(super) fn transfer(
    queue: &CompletionQueue,
    memory: &Region,
    peer: &Peer,
    descriptor: &DmaDescriptor,
    interrupted: impl Fn() -> bool,
) -> Result<(), Fault> {
    let (mut posted, mut in_flight) = (0, 0);
    let mut buffer = [Completion::EMPTY; 4];
    let mut rounds = 0u32;
    while posted < descriptor.local.len || in_flight > 0 {
        while posted < descriptor.local.len && in_flight < DEPTH {
            if interrupted() {
                return Err(INTERRUPTED);
            }
            let len = (descriptor.local.len - posted).min(PIECE);
            let (here, there) = operands(memory, descriptor, posted, len)?;
            let post = match descriptor.operation {
                DmaOperation::Write => peer.queue_pair.post_write(&[here], there, Signal::Yes, WrId(0)),
                DmaOperation::Read | DmaOperation::Local => {
                    peer.queue_pair.post_read(&[here], there, Signal::Yes, WrId(0))
                }
            };
            post.map_err(|_| LOST)?;
            posted += len;
            in_flight += 1;
        }
        for completion in queue.poll(&mut buffer).map_err(|_| LOST)? {
            // A flushed completion of a peer that failed earlier.
            if completion.qpn() != peer.queue_pair.qpn() {
                continue;
            }
            in_flight -= 1;
            if !completion.is_success() {
                return Err(fault_of(completion.status()));
            }
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(256) {
            std::thread::yield_now();
            if interrupted() {
                return Err(INTERRUPTED);
            }
        }
    }
    Ok(())
}

/// Executes transfers of one direction and key, each at most [`PIECE`] long, by one list of work requests. Returns how
/// many completed, and the fault of the next one.
pub(super) fn transfer_list(
    queue: &CompletionQueue,
    list: &mut SendList,
    memory: &Region,
    peer: &Peer,
    descriptors: &[DmaDescriptor],
    interrupted: impl Fn() -> bool,
) -> (usize, Option<Fault>) {
    list.clear();
    let DmaDescriptor { operation, key, .. } = descriptors[0];
    // The peer's device checks the range.
    let there = RemoteMemory { addr: 0, rkey: Rkey::new(key), len: u64::MAX };
    let segments = descriptors.iter().map(|descriptor| Segment {
        local: descriptor.local.offset,
        remote: descriptor.remote,
        length: descriptor.local.len as u32,
    });
    let added = match operation {
        DmaOperation::Write => list.write_segments(memory, &there, segments),
        DmaOperation::Read | DmaOperation::Local => list.read_segments(memory, &there, segments),
    };
    if added.is_err() {
        return (0, Some(Fault::new(Cause::DmaOutsideMemory, descriptors[0].local.offset)));
    }
    debug_assert_eq!(added, Ok(descriptors.len()), "the list has as many entries as the ring");
    list.signal_last(WrId(descriptors.len() as u64 - 1));
    if peer.queue_pair.post_list(list).is_err() {
        return (0, Some(LOST));
    }
    let mut buffer = [Completion::EMPTY; 4];
    let mut rounds = 0u32;
    loop {
        let Ok(completions) = queue.poll(&mut buffer) else { return (0, Some(LOST)) };
        for completion in completions {
            if completion.qpn() != peer.queue_pair.qpn() {
                continue;
            }
            // Work requests complete in order, so the earlier ones have succeeded.
            let index = completion.wr_id().0 as usize;
            if !completion.is_success() {
                return (index, Some(fault_of(completion.status())));
            }
            return (descriptors.len(), None);
        }
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(256) {
            std::thread::yield_now();
            if interrupted() {
                return (0, Some(INTERRUPTED));
            }
        }
    }
}
