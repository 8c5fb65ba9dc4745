//! Senders that die in the middle of a message after they have taken a request from a shared receive queue.
//! The request is posted again exactly once, also if several senders die.
//!
//! The senders get SIGBUS, because the message lies in a file that was truncated. They copy the message after they have taken
//! the request. Some die of the signal. Others execute another program, in which the process lives on.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{Sge, WC_SUCCESS, WR_SEND, Wc};
use millstream_device::{Cq, Errno, Mr, Srq, Xrcd};
use millstream_quantity::{Qkey, Qpn, Srqn};
use millstream_shm::{Mapping, PAGE, round_up};

use crate::support::runs_with_moved_pages;
use crate::support::{
    Adapter, Process, QpConfig, TEST_TIMEOUT, attributes, mask, next, recv_from_parent, send_to_parent,
    wait_for,
};

const QKEY: u32 = 0x1234;
/// Bytes of a message. Receives have room for it and for the header of a datagram.
const MESSAGE: u32 = 64;
const ROOM: u32 = MESSAGE + 40;
const REQUESTS: usize = 4;
/// The requests in their order after all but the last have been taken and posted again.
const POSTED_AGAIN: [u64; REQUESTS] = [3, 0, 1, 2];
/// Receives of [`Queue::unshared`], and the longest time after which a process asks for memory again that it could not map.
const TRIES: u64 = 8;
const RETRY_TIME: Duration = Duration::from_millis(1100);

pub(crate) fn ready(qp: &Qp, dest: u32) {
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let needed = match (qp.kind(), state) {
            (QpType::Ud, QpState::Init) => attr::PKEY_INDEX | attr::PORT | attr::QKEY,
            (QpType::Ud, QpState::Rtr) => 0,
            (QpType::Ud, _) => attr::SQ_PSN,
            // The initiator of an XRC connection ignores the attributes that its target needs.
            _ => mask(state),
        };
        let all = QpAttr { qkey: Qkey::new(QKEY), ..attributes(&QpConfig::default(), state, dest) };
        qp.modify(&all, attr::STATE | needed).expect("the usual way");
    }
}

pub(crate) fn datagram(qpn: u32) -> SendWr<'static> {
    let to = UdDestination { on_this_host: true, qpn: Qpn::new(qpn), qkey: Qkey::new(QKEY), grh: [0x60; 40] };
    SendWr { opcode: WR_SEND, to: Some(to), ..SendWr::default() }
}

pub(crate) fn sender(adapter: &Adapter, cq: &Arc<Cq>, kind: QpType) -> Arc<Qp> {
    let capacity = QpCap { max_send_wr: 16, max_send_sge: 1, ..QpCap::default() };
    Qp::new(&adapter.pd, cq, cq, capacity, true, kind, RecvSource::Own).expect("a queue pair")
}

/// A full shared receive queue, and the memory of its requests.
struct Queue {
    srq: Arc<Srq>,
    cq: Arc<Cq>,
    mr: Mr,
    // Dropped last: it is registered until then.
    memory: Vec<u8>,
}

impl Queue {
    fn new(adapter: &Adapter, domain: Option<&Arc<Xrcd>>) -> Self {
        let cq = adapter.cq();
        let srq = match domain {
            None => Srq::new(&adapter.pd, REQUESTS as u32, 1),
            Some(domain) => Srq::for_domain(&adapter.pd, domain, &cq, REQUESTS as u32, 1),
        };
        // Whole pages, which senders map.
        let mut memory = vec![0; (REQUESTS + 1) * PAGE];
        let mr = adapter.register(&mut memory);
        let queue = Self { srq: srq.expect("a shared queue"), cq, memory, mr };
        (0..REQUESTS).for_each(|i| queue.post(i).expect("room"));
        queue
    }

    fn post(&self, i: usize) -> Result<(), Errno> {
        self.srq.post(i as u64, &[self.page(i)])
    }

    /// Room for a message on a page of its own.
    fn page(&self, i: usize) -> Sge {
        let addr = (round_up(self.memory.as_ptr() as usize, PAGE) + i * PAGE) as u64;
        Sge { addr, length: ROOM, lkey: self.mr.key() }
    }

    /// A queue pair of datagrams with receives of its own in the same memory.
    fn unshared(&self, adapter: &Adapter) -> Arc<Qp> {
        let cq = adapter.cq();
        let qp = adapter.qp_with(&cq, QpType::Ud, RecvSource::Own).expect("a queue pair");
        ready(&qp, 0);
        (0..TRIES).for_each(|i| qp.post_recv(i, &[self.page(0)]).expect("room"));
        qp
    }

    /// Checks that all slots except those of `waiting` requests are free, each once.
    fn is_whole(&self, waiting: usize) {
        (waiting..REQUESTS).for_each(|i| wait_for("a place", || self.post(i) != Err(Errno::NOMEM)));
        assert_eq!(self.post(0), Err(Errno::NOMEM), "a place came back twice");
    }
}

/// The end of a sender in the middle of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SenderEnd {
    Dies,
    Execs,
}

impl SenderEnd {
    const BOTH: [Self; 2] = [Self::Dies, Self::Execs];

    fn role(self) -> &'static str {
        match self {
            Self::Dies => "crashing_sender",
            Self::Execs => "execing_sender",
        }
    }

    /// Waits until the sender has ended in this way.
    fn wait(self, process: &mut Process) {
        match self {
            Self::Dies => assert_eq!(process.signal_of_death(), Some(libc::SIGBUS)),
            Self::Execs => process.wait_for_program("sleep"),
        }
    }
}

/// The other process, which executes another program while it holds the locks of a SEND.
pub(crate) fn execing_sender() {
    extern "C" fn exec_sleep(_: libc::c_int) {
        let words = [c"sleep".as_ptr(), c"60".as_ptr(), std::ptr::null()];
        // SAFETY: system calls that a signal handler may make; the words are terminated by NULL.
        unsafe {
            libc::execv(c"/bin/sleep".as_ptr(), words.as_ptr());
            libc::_exit(9);
        }
    }
    // SAFETY: a plain system call.
    unsafe { libc::signal(libc::SIGBUS, exec_sleep as *const () as libc::sighandler_t) };
    send_until_fault();
}

/// The other process, which dies of SIGBUS.
pub(crate) fn crashing_sender() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: plain system calls. The process dies of SIGBUS and leaves no core file.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
    }
    send_until_fault();
}

/// Maps the receiver's memory: a copy through the kernel would fail without SIGBUS. `qpn` is an unshared queue pair.
fn map_memory_of(adapter: &Adapter, qpn: u32) {
    let cq = adapter.cq();
    let qp = sender(adapter, &cq, QpType::Ud);
    ready(&qp, 0);
    let is_mapped = || std::fs::read_to_string("/proc/self/maps").expect("maps").contains("millstream-moved");
    for _ in 0..TRIES {
        qp.post_send(&datagram(qpn)).expect("room");
        assert_eq!(next(&cq).status, WC_SUCCESS);
        if is_mapped() {
            return;
        }
        // A receiver that is not scheduled for a while does not answer in time.
        std::thread::sleep(RETRY_TIME);
    }
    panic!("the receiver's memory is not mapped");
}

/// Sends messages that are not there.
fn send_until_fault() {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(PAGE as u64).expect("room");
    let mapping = Mapping::new(file.as_fd(), 0, PAGE, true).expect("room");
    let adapter = Adapter::open();
    let start = mapping.base() as u64;
    let mr = Mr::register(&adapter.pd, start, u64::from(MESSAGE), start, 0).expect("registered");
    let sges = [Sge { addr: start, length: MESSAGE, lkey: mr.key() }];
    let cq = adapter.cq();
    let line = recv_from_parent().expect("to whom");
    let numbers: Vec<u32> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
    let (unshared, qp, wr) = match numbers[..] {
        [unshared, qpn] => {
            let qp = sender(&adapter, &cq, QpType::Ud);
            ready(&qp, 0);
            (unshared, qp, datagram(qpn))
        }
        [unshared, qpn, srqn] => {
            let qp = sender(&adapter, &cq, QpType::XrcSend);
            send_to_parent(&qp.qpn().get().to_string());
            recv_from_parent().expect("the far end is connected");
            ready(&qp, qpn);
            (unshared, qp, xrc_message(srqn))
        }
        _ => panic!("{line}"),
    };
    map_memory_of(&adapter, unshared);
    file.set_len(0).expect("shorter");
    let deadline = Instant::now() + TEST_TIMEOUT;
    // A datagram may be dropped.
    while Instant::now() < deadline {
        qp.post_send(&SendWr { sges: &sges, ..wr }).expect("room");
        assert_eq!(next(&cq).status, WC_SUCCESS);
    }
    panic!("no message is copied");
}

#[test]
fn requests_taken_by_datagram_senders_are_posted_again() {
    if runs_with_moved_pages("abandoned::requests_taken_by_datagram_senders_are_posted_again") {
        return;
    }
    SenderEnd::BOTH.into_iter().for_each(datagram_requests_are_posted_again);
}

fn datagram_requests_are_posted_again(end: SenderEnd) {
    let adapter = Adapter::open();
    let queue = Queue::new(&adapter, None);
    let shared = RecvSource::Shared(queue.srq.clone());
    let receiver = adapter.qp_with(&queue.cq, QpType::Ud, shared).expect("a queue pair");
    ready(&receiver, 0);
    let unshared = queue.unshared(&adapter);
    let _ended: Vec<Process> = (1..REQUESTS)
        .map(|_| {
            let mut process = Process::start(end.role());
            process.send_line(&format!("{} {}", unshared.qpn().get(), receiver.qpn().get()));
            end.wait(&mut process);
            process
        })
        .collect();
    let sent = adapter.cq();
    let sender = sender(&adapter, &sent, QpType::Ud);
    ready(&sender, 0);
    assert_eq!(queue.post(0), Err(Errno::NOMEM), "the program posts none again");
    let mut found = Vec::new();
    wait_for("datagrams that are not dropped", || {
        sender.post_send(&datagram(receiver.qpn().get())).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
        let mut out = [Wc::default()];
        if queue.cq.poll(&mut out) == Ok(1) {
            assert_eq!(out[0].status, WC_SUCCESS);
            found.push(out[0].wr_id);
        }
        found.len() == REQUESTS
    });
    assert_eq!(found, POSTED_AGAIN);
    queue.is_whole(0);
    for i in 0..REQUESTS as u64 {
        sender.post_send(&datagram(receiver.qpn().get())).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
        let wc = next(&queue.cq);
        assert_eq!((wc.wr_id, wc.status, wc.byte_len), (i, WC_SUCCESS, 40));
    }
}

#[test]
fn requests_taken_by_xrc_senders_are_posted_again() {
    if runs_with_moved_pages("abandoned::requests_taken_by_xrc_senders_are_posted_again") {
        return;
    }
    SenderEnd::BOTH.into_iter().for_each(xrc_requests_are_posted_again);
}

fn xrc_requests_are_posted_again(end: SenderEnd) {
    let adapter = Adapter::open();
    let domain = Xrcd::private(&adapter.context).expect("a domain");
    let queue = Queue::new(&adapter, Some(&domain));
    let unshared = queue.unshared(&adapter);
    let _ended: Vec<Process> =
        (1..REQUESTS).map(|_| xrc_sender_ends(end, &queue, &domain, &unshared)).collect();
    assert_eq!(queue.post(0), Err(Errno::NOMEM), "the program posts none again");
    let sender = XrcSender::new(&adapter, &domain);
    sender.takes(&queue, &POSTED_AGAIN);
    queue.is_whole(0);
    sender.takes(&queue, &[0, 1, 2, 3]);
}

/// A sender that ends in the middle of a message over an XRC connection.
fn xrc_sender_ends(end: SenderEnd, queue: &Queue, domain: &Arc<Xrcd>, unshared: &Qp) -> Process {
    let receiver = Qp::for_domain(domain).expect("a queue pair");
    let mut process = Process::start(end.role());
    let numbers = [unshared.qpn().get(), receiver.qpn().get(), queue.srq.number()];
    process.send_line(&numbers.map(|number| number.to_string()).join(" "));
    ready(&receiver, process.recv_line().parse().expect("a number"));
    process.send_line("connected");
    end.wait(&mut process);
    process
}

fn xrc_message(srqn: u32) -> SendWr<'static> {
    SendWr { opcode: WR_SEND, remote_srqn: Srqn::new(srqn), ..SendWr::default() }
}

/// An XRC connection within this process.
struct XrcSender {
    qp: Arc<Qp>,
    sent: Arc<Cq>,
    _receiver: Arc<Qp>,
}

impl XrcSender {
    fn new(adapter: &Adapter, domain: &Arc<Xrcd>) -> Self {
        let sent = adapter.cq();
        let qp = sender(adapter, &sent, QpType::XrcSend);
        let receiver = Qp::for_domain(domain).expect("a queue pair");
        ready(&receiver, qp.qpn().get());
        ready(&qp, receiver.qpn().get());
        Self { qp, sent, _receiver: receiver }
    }

    /// Sends messages, and checks that they take these requests.
    fn takes(&self, queue: &Queue, requests: &[u64]) {
        for wr_id in requests {
            self.qp.post_send(&xrc_message(queue.srq.number())).expect("room");
            assert_eq!((next(&self.sent).status, next(&queue.cq).wr_id), (WC_SUCCESS, *wr_id));
        }
    }
}

/// The other process: sends a message by packets over an XRC connection.
pub(crate) fn packet_sender() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = sender(&adapter, &cq, QpType::XrcSend);
    send_to_parent(&qp.qpn().get().to_string());
    let line = recv_from_parent().expect("to whom");
    let [qpn, srqn]: [u32; 2] = serde_json::from_str(&line).expect("two numbers");
    ready(&qp, qpn);
    qp.post_send(&xrc_message(srqn)).expect("room");
    send_to_parent(&next(&cq).status.to_string());
}

#[test]
fn a_request_taken_by_an_xrc_sender_is_posted_again_when_a_packet_comes() {
    if runs_with_moved_pages(
        "abandoned::a_request_taken_by_an_xrc_sender_is_posted_again_when_a_packet_comes",
    ) {
        return;
    }
    let adapter = Adapter::open();
    let domain = Xrcd::private(&adapter.context).expect("a domain");
    let queue = Queue::new(&adapter, Some(&domain));
    let unshared = queue.unshared(&adapter);
    xrc_sender_ends(SenderEnd::Dies, &queue, &domain, &unshared);
    let mut process = Process::start_with("packet_sender", |command| command.env("MILLSTREAM_PATH", "wire"));
    let receiver = Qp::for_domain(&domain).expect("a queue pair");
    ready(&receiver, process.recv_line().parse().expect("a number"));
    process.send_line(&serde_json::to_string(&[receiver.qpn().get(), queue.srq.number()]).expect("numbers"));
    assert_eq!(process.recv_line(), WC_SUCCESS.to_string());
    assert_eq!(next(&queue.cq).wr_id, 1);
    XrcSender::new(&adapter, &domain).takes(&queue, &[2, 3, 0]);
    queue.is_whole(0);
}

#[test]
fn completed_srq_requests_are_not_returned() {
    let adapter = Adapter::open();
    let queue = Queue::new(&adapter, None);
    let shared = RecvSource::Shared(queue.srq.clone());
    let receiver = adapter.qp_with(&queue.cq, QpType::Ud, shared).expect("a queue pair");
    ready(&receiver, 0);
    let sent = adapter.cq();
    let sender = sender(&adapter, &sent, QpType::Ud);
    ready(&sender, 0);
    // Two messages are not polled when the queue pair fails.
    for _ in 0..2 {
        sender.post_send(&datagram(receiver.qpn().get())).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
    }
    receiver.modify(&attributes(&QpConfig::default(), QpState::Err, 0), attr::STATE).expect("to ERR");
    assert_eq!(queue.post(0), Err(Errno::NOMEM));
    assert_eq!([next(&queue.cq).wr_id, next(&queue.cq).wr_id], [0, 1]);
    queue.is_whole(2);
}
