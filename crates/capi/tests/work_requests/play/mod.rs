//! Work requests of any form through the C ABI, decoded from bytes. A fuzzer varies the bytes (`fuzz/`); a test replays the
//! seeds and random ones.
//!
//! All queue pairs belong to one process. Requests have any opcode, flags, elements, keys and addresses; pointers are valid,
//! as `verbs.h` demands. For any bytes:
//!
//! - each request is either refused, with `bad_wr` at the first refused one, or accepted;
//! - an accepted signaled request, and an accepted receive, completes exactly once, unless its queue pair is reset;
//! - requests of one queue complete in the order of posting;
//! - no memory changes that is not registered, or not registered for writing.

mod input;
mod ledger;
mod objects;

use std::ffi::c_int;
use std::ptr;
use std::time::{Duration, Instant};

use millstream_capi::cq;
use millstream_capi::sys::*;

use input::Input;
use ledger::{Ledger, Queue, Totals};
use objects::{Device, LEN, Objects, QKEY, RIGHTS, SENDERS, SHARED, UD, XRC};

/// Longest list of requests, and of elements: both exceed what queues take.
const MAX_LIST: usize = 12;
const MAX_SGE: usize = 5;
/// The opcodes that a type of queue pair offers, frequent ones repeated.
const OPCODES: [u32; 13] = [
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND,
    IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM,
    IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_LOCAL_INV,
    IBV_WR_BIND_MW,
    IBV_WR_SEND_WITH_INV,
    IBV_WR_ATOMIC_WRITE,
];
/// Longest wait for the completions of queue pairs in the error state.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(20);

/// A device, opened once for several runs.
pub(crate) struct FuzzSession {
    device: Device,
    pub(crate) totals: Totals,
}

// SAFETY: verbs objects may be used by any thread; a session is used by one at a time.
unsafe impl Send for FuzzSession {}

impl FuzzSession {
    pub(crate) fn new() -> Self {
        Self { device: Device::open(), totals: Totals::default() }
    }

    /// Executes the operations that the bytes encode. Panics if a rule is violated.
    pub(crate) fn run(&mut self, bytes: &[u8]) {
        let mut run = Run { objects: Objects::new(&self.device), ledger: Ledger::default() };
        for queue in [Queue::Recv(0), Queue::Recv(2), Queue::Recv(UD), Queue::Shared(0), Queue::Shared(1)] {
            // Four receives in the open region, of 255 bytes each.
            let each = [0, 0, 0, 1, 255];
            run.post_receives(queue, &mut Input(&[&[3][..], &each, &each, &each, &each].concat()));
        }
        let mut input = Input(bytes);
        while !input.is_empty() {
            run.step(&mut input);
        }
        run.finish(&mut self.totals);
    }
}

/// One run: its objects, and the account of its requests.
struct Run<'a> {
    objects: Objects<'a>,
    ledger: Ledger,
}

impl Run<'_> {
    /// Executes one operation.
    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 32 {
            0..=17 => self.post_sends(input),
            18 | 19 => self.bind(input),
            20..=23 => {
                let queue = match input.below(SENDERS + SHARED) {
                    qp if qp < SENDERS => Queue::Recv(qp),
                    shared => Queue::Shared(shared - SENDERS),
                };
                self.post_receives(queue, input);
            }
            24..=27 => self.poll(),
            28 => {
                let (qp, state) = (input.below(SENDERS + 1), u32::from(input.byte() % 8));
                if self.objects.modify(qp, state) && state == IBV_QPS_RESET {
                    self.ledger.reset(qp);
                }
                self.objects.state(qp);
            }
            29 => {
                let qp = input.below(SENDERS + 1);
                assert!(self.objects.modify(qp, IBV_QPS_RESET), "queue pair {qp} cannot be reset");
                self.ledger.reset(qp);
                self.objects.connect(qp);
            }
            _ => match input.byte() % 3 {
                0 => self.objects.register_again(input.below(RIGHTS.len())),
                1 => {
                    // SAFETY: a live queue; outstanding completions fit the new size.
                    unsafe { cq::ibv_resize_cq(self.objects.cq, 1024 + c_int::from(input.byte())) };
                }
                _ => {
                    let req_notify_cq = self.objects.device.operations().req_notify_cq.expect("in the table");
                    // SAFETY: a live queue.
                    unsafe { req_notify_cq(self.objects.cq, c_int::from(input.byte() % 2)) };
                }
            },
        }
    }

    /// Posts a list of send requests.
    fn post_sends(&mut self, input: &mut Input<'_>) {
        let qp = input.below(SENDERS);
        let count = 1 + input.below(MAX_LIST);
        let mut sges = vec![[ibv_sge::default(); MAX_SGE]; count];
        let mut list: Vec<ibv_send_wr> =
            sges.iter_mut().map(|sges| self.send_request(qp, sges, input)).collect();
        for i in 1..count {
            let next = &raw mut list[i];
            list[i - 1].next = next;
        }
        let mut bad = ptr::null_mut();
        let post_send = self.objects.device.operations().post_send.expect("in the table");
        // SAFETY: a live queue pair, and a list of complete requests, whose elements and objects live.
        let status = unsafe { post_send(self.objects.qps[qp], &raw mut list[0], &raw mut bad) };
        let accepted = accepted(status, list.iter().position(|wr| ptr::eq(wr, bad)), count);
        for wr in &list[..accepted] {
            let signaled = wr.send_flags & IBV_SEND_SIGNALED != 0 || self.objects.signals_all(qp);
            self.ledger.sent(wr.wr_id, qp, signaled);
        }
    }

    /// A send request of any form, whose elements lie in `sges`.
    fn send_request(
        &mut self,
        qp: usize,
        sges: &mut [ibv_sge; MAX_SGE],
        input: &mut Input<'_>,
    ) -> ibv_send_wr {
        let opcode = match input.byte() {
            first @ 0..=199 if qp == UD => [IBV_WR_SEND, IBV_WR_SEND_WITH_IMM][usize::from(first % 2)],
            first @ 0..=199 => OPCODES[usize::from(first) % OPCODES.len()],
            first => u32::from(first) % 17,
        };
        let form = u32::from(input.byte());
        let inline = if form & 0xe0 == 0xe0 { IBV_SEND_INLINE } else { 0 };
        let other = if form & 0xf8 == 0xc0 { u32::MAX << 5 } else { 0 };
        let send_flags = form & 7 | inline | other;
        let mut num_sge = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 0, 5, -1][input.below(16)];
        let atomic =
            matches!(opcode, IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_WRITE);
        for sge in &mut sges[..num_sge.max(0) as usize] {
            *sge = self.element(input);
            if atomic && sge.length != 0 {
                sge.length = 8;
            }
            if send_flags & IBV_SEND_INLINE != 0 {
                // The library reads inline data during the call: the caller vouches for the memory.
                *sge = self.objects.readable(*sge);
            }
        }
        let mut wr = ibv_send_wr { wr_id: self.ledger.new_id(), opcode, send_flags, ..Default::default() };
        let (rkey, remote_addr) = self.remote(input);
        if qp == UD {
            let ah = if input.byte() == 1 { ptr::null_mut() } else { self.objects.ah };
            let remote_qpn = if input.byte() == 1 { input.word() } else { self.objects.number(UD) };
            let remote_qkey = QKEY ^ u32::from(input.byte() == 1);
            wr.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah, remote_qpn, remote_qkey };
        } else if atomic && opcode != IBV_WR_ATOMIC_WRITE {
            let compare_add = input.byte().into();
            wr.wr.atomic =
                ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap: 9, rkey };
        } else {
            wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
        }
        if matches!(opcode, IBV_WR_LOCAL_INV | IBV_WR_SEND_WITH_INV) {
            wr.__bindgen_anon_1.invalidate_rkey = rkey;
        }
        if opcode == IBV_WR_BIND_MW {
            let rkey = self.objects.window_key(1).wrapping_add(u32::from(input.byte() % 3));
            let window = usize::from(input.byte() != 1);
            wr.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
                mw: self.objects.mws[window],
                rkey,
                bind_info: self.bind_info(input),
            };
        }
        if qp == XRC {
            let remote_srqn = self.objects.xrc_srq_number() ^ u32::from(input.byte() == 1);
            wr.qp_type.xrc = ibv_send_wr__bindgen_ty_3__bindgen_ty_1 { remote_srqn };
        }
        if num_sge == 1 && input.byte() == 1 {
            // A length of zero bytes with an address and key that nobody has.
            sges[0] = ibv_sge { addr: u64::MAX, length: 0, lkey: input.word() };
            num_sge = 1;
        }
        (wr.sg_list, wr.num_sge) = (sges.as_mut_ptr(), num_sge);
        wr
    }

    /// A scatter/gather element, mostly inside the region that its key names.
    fn element(&self, input: &mut Input<'_>) -> ibv_sge {
        let form = input.byte();
        let region = [0, 0, 0, 2, 2, 0, 1, 2][usize::from(form & 7)];
        let (at, length) = match form >> 3 {
            0..=27 => {
                let at = i64::from(input.short()) % (LEN as i64 / 2);
                (at, u32::from(input.byte()) << (form >> 6))
            }
            28 | 29 => (i64::from(input.short() as i16), u32::from(input.short())),
            _ => (i64::from(input.byte()), [0, 1 << 31, u32::MAX, LEN as u32][input.below(4)]),
        };
        let lkey = self.objects.keys(region).0 ^ u32::from(form >> 3 == 29);
        ibv_sge { addr: self.objects.start(region).wrapping_add_signed(at), length, lkey }
    }

    /// Key and address of remote memory, mostly of a region that allows access.
    fn remote(&self, input: &mut Input<'_>) -> (u32, u64) {
        let form = input.byte();
        let region = [0, 0, 0, 0, 0, 0, 1, 2][usize::from(form & 7)];
        let rkey = match form >> 4 {
            0..=9 => self.objects.keys(region).1,
            10 | 11 => self.objects.window_key(0),
            12..=14 => self.objects.window_key(1),
            _ => self.objects.keys(region).1 ^ 1 << (input.byte() % 32),
        };
        let at = match input.byte() {
            first @ 0..=199 => i64::from(first) * 8,
            _ => i64::from(input.short() as i16),
        };
        (rkey, self.objects.start(region).wrapping_add_signed(at))
    }

    fn bind_info(&self, input: &mut Input<'_>) -> ibv_mw_bind_info {
        let form = input.byte();
        let mr = if form & 7 == 7 { ptr::null_mut() } else { self.objects.mrs[usize::from(form & 7) / 5] };
        let addr = self.objects.start(0) + u64::from(input.byte()) * 8;
        let length = if mr.is_null() { 0 } else { u64::from(input.byte()) * 32 };
        ibv_mw_bind_info { mr, addr, length, mw_access_flags: u32::from(form >> 3) }
    }

    /// Binds a window with `ibv_bind_mw`.
    fn bind(&mut self, input: &mut Input<'_>) {
        let (qp, window) = (input.below(SENDERS), usize::from(input.byte() == 1));
        let send_flags = u32::from(input.byte()) & 7;
        let id = self.ledger.new_id();
        let mut bind = ibv_mw_bind { wr_id: id, send_flags, bind_info: self.bind_info(input) };
        let bind_mw = self.objects.device.operations().bind_mw.expect("in the table");
        // SAFETY: live objects.
        let status = unsafe { bind_mw(self.objects.qps[qp], self.objects.mws[window], &raw mut bind) };
        if status == 0 {
            let signaled = send_flags & IBV_SEND_SIGNALED != 0 || self.objects.signals_all(qp);
            self.ledger.sent(id, qp, signaled);
        }
    }

    /// Posts a list of receive requests.
    fn post_receives(&mut self, queue: Queue, input: &mut Input<'_>) {
        let count = 1 + input.below(MAX_LIST);
        let mut sges = vec![[ibv_sge::default(); MAX_SGE]; count];
        let mut list = Vec::new();
        for sges in &mut sges {
            let num_sge = [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 3, -1][input.below(14)];
            sges[..num_sge.max(0) as usize].fill_with(|| self.element(input));
            let wr_id = self.ledger.new_id();
            list.push(ibv_recv_wr { wr_id, sg_list: sges.as_mut_ptr(), num_sge, ..Default::default() });
        }
        for i in 1..count {
            let next = &raw mut list[i];
            list[i - 1].next = next;
        }
        let (mut bad, first) = (ptr::null_mut(), &raw mut list[0]);
        let operations = self.objects.device.operations();
        // SAFETY: live objects, and a list of complete requests, whose elements live.
        let status = unsafe {
            match queue {
                Queue::Send(qp) | Queue::Recv(qp) => {
                    operations.post_recv.expect("in the table")(self.objects.qps[qp], first, &raw mut bad)
                }
                Queue::Shared(shared) => operations.post_srq_recv.expect("in the table")(
                    self.objects.srqs[shared],
                    first,
                    &raw mut bad,
                ),
            }
        };
        let accepted = accepted(status, list.iter().position(|wr| ptr::eq(wr, bad)), count);
        if let Queue::Recv(qp) = queue {
            assert!(
                accepted == 0 || self.objects.has_receive_queue(qp),
                "queue pair {qp} has no receive queue"
            );
        }
        for (wr, sges) in list[..accepted].iter().zip(&sges) {
            let elements = &sges[..wr.num_sge.max(0) as usize];
            let capacity = elements.iter().map(|sge| u64::from(sge.length)).sum();
            self.ledger.receive_posted(wr.wr_id, queue, capacity);
        }
    }

    /// Takes all completions.
    fn poll(&mut self) {
        let poll_cq = self.objects.device.operations().poll_cq.expect("in the table");
        let numbers = self.objects.numbers();
        let mut found = [ibv_wc::default(); 16];
        loop {
            // SAFETY: a live queue, and room for as many completions.
            let count = unsafe { poll_cq(self.objects.cq, found.len() as c_int, found.as_mut_ptr()) };
            assert!((0..=found.len() as c_int).contains(&count), "ibv_poll_cq returned {count}");
            if count == 0 {
                return;
            }
            found[..count as usize].iter().for_each(|wc| self.ledger.completed(wc, &numbers));
        }
    }

    /// Flushes all queues, waits for the completions that are due, and destroys the objects.
    fn finish(mut self, totals: &mut Totals) {
        for qp in 0..self.objects.qps.len() {
            // A queue pair in RESET has no requests.
            let flushed = self.objects.modify(qp, IBV_QPS_ERR) || self.objects.state(qp) == IBV_QPS_RESET;
            assert!(flushed, "queue pair {qp} cannot be modified to ERR");
        }
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        loop {
            self.poll();
            let missing = self.ledger.missing();
            let Some(first) = missing.first() else { break };
            let what = self.ledger.describe(*first);
            assert!(Instant::now() < deadline, "requests {missing:?} do not complete; the first: {what}");
            std::thread::yield_now();
        }
        self.poll();
        self.ledger.add_to(totals);
        self.objects.destroy();
    }
}

/// The number of accepted requests of a list of `count`, from the result of a post and the position of `bad_wr`.
fn accepted(status: c_int, bad: Option<usize>, count: usize) -> usize {
    assert!(status >= 0, "a post returned {status}, which is no error number");
    if status == 0 {
        return count;
    }
    bad.unwrap_or_else(|| panic!("a post was refused with {status}, and bad_wr names none of its requests"))
}
