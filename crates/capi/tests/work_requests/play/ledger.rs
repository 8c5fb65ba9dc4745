//! The account of posted requests: each one that was accepted completes as often as the specification says.

use std::collections::BTreeMap;

use millstream_capi::sys::*;

/// The queue that a request was posted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Queue {
    /// The send queue of this queue pair.
    Send(usize),
    /// The receive queue of this queue pair.
    Recv(usize),
    /// This shared receive queue.
    Shared(usize),
}

/// An accepted request.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    queue: Queue,
    /// It generates a completion also if it succeeds.
    signaled: bool,
    /// It has to complete: its queue pair was not reset meanwhile.
    due: bool,
    /// Bytes of a receive's elements.
    capacity: u64,
    completions: u32,
}

/// Totals over several runs, which show that requests of every fate occur.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Requests with an identifier, accepted or not.
    pub(crate) posted: u64,
    pub(crate) accepted: u64,
    /// Send requests and receives that completed successfully.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Requests that completed with an error, other than a flush.
    pub(crate) failed: u64,
    pub(crate) flushed: u64,
}

/// All requests of one run, by their `wr_id`.
#[derive(Default)]
pub(crate) struct Ledger {
    accepted: BTreeMap<u64, Accepted>,
    next_id: u64,
    /// The request of each queue that completed last.
    last: BTreeMap<Queue, u64>,
    totals: Totals,
}

impl Ledger {
    /// An identifier that no request has.
    pub(crate) fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.totals.posted += 1;
        self.next_id
    }

    pub(crate) fn sent(&mut self, id: u64, qp: usize, signaled: bool) {
        self.add(id, Queue::Send(qp), signaled, 0);
    }

    pub(crate) fn receive_posted(&mut self, id: u64, queue: Queue, capacity: u64) {
        self.add(id, queue, true, capacity);
    }

    fn add(&mut self, id: u64, queue: Queue, signaled: bool, capacity: u64) {
        self.totals.accepted += 1;
        // A receive in a shared queue waits until a message takes it.
        let due = signaled && !matches!(queue, Queue::Shared(_));
        self.accepted.insert(id, Accepted { queue, signaled, due, capacity, completions: 0 });
    }

    /// A queue pair was reset: its outstanding requests are discarded without a completion.
    pub(crate) fn reset(&mut self, qp: usize) {
        for request in self.accepted.values_mut() {
            if [Queue::Send(qp), Queue::Recv(qp)].contains(&request.queue) {
                request.due = false;
            }
        }
    }

    /// Checks a completion. `numbers` are those of the queue pairs.
    pub(crate) fn completed(&mut self, wc: &ibv_wc, numbers: &[u32]) {
        let (id, status) = (wc.wr_id, wc.status);
        let Some(request) = self.accepted.get_mut(&id) else {
            panic!("request {id}, which was refused or never posted, completed with status {status}")
        };
        request.completions += 1;
        assert_eq!(request.completions, 1, "request {id} completed again, with status {status}: {request:?}");
        assert!(status <= IBV_WC_TM_RNDV_INCOMPLETE, "request {id}: unknown status {status}");
        let succeeded = status == IBV_WC_SUCCESS;
        *match (status, request.queue) {
            (IBV_WC_SUCCESS, Queue::Send(_)) => &mut self.totals.sent,
            (IBV_WC_SUCCESS, _) => &mut self.totals.received,
            (IBV_WC_WR_FLUSH_ERR, _) => &mut self.totals.flushed,
            _ => &mut self.totals.failed,
        } += 1;
        match request.queue {
            Queue::Send(_) => assert!(request.signaled || !succeeded, "unsignaled request {id} completed"),
            Queue::Recv(_) | Queue::Shared(_) => {
                // A WRITE with immediate data reports the bytes that it wrote elsewhere.
                let fits = u64::from(wc.byte_len) <= request.capacity;
                let elsewhere = wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
                assert!(
                    !succeeded || elsewhere || fits,
                    "receive {id} got {} bytes: {request:?}",
                    wc.byte_len
                );
            }
        }
        match request.queue {
            Queue::Send(qp) | Queue::Recv(qp) => {
                assert_eq!(wc.qp_num, numbers[qp], "queue pair of request {id}");
                let before = self.last.insert(request.queue, id);
                assert!(before.is_none_or(|before| before < id), "request {id} completed after {before:?}");
            }
            Queue::Shared(_) => assert!(numbers.contains(&wc.qp_num), "queue pair of receive {id}"),
        }
    }

    /// The requests that have to complete and did not.
    pub(crate) fn missing(&self) -> Vec<u64> {
        let missing = self.accepted.iter().filter(|(_, request)| request.due && request.completions == 0);
        missing.map(|(id, _)| *id).collect()
    }

    /// Adds this run's totals.
    pub(crate) fn add_to(&self, totals: &mut Totals) {
        let run = self.totals;
        totals.posted += run.posted;
        totals.accepted += run.accepted;
        totals.sent += run.sent;
        totals.received += run.received;
        totals.failed += run.failed;
        totals.flushed += run.flushed;
    }

    /// What is known of a request, for a message.
    pub(crate) fn describe(&self, id: u64) -> String {
        format!("{:?}", self.accepted.get(&id))
    }
}
