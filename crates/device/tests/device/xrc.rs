//! Extended reliable connections: one queue pair, many shared receive queues, several processes.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    Sge, WC_LOC_LEN_ERR, WC_OP_RECV, WC_REM_INV_REQ_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR,
    WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM,
};
use millstream_device::{Context, Cq, Errno, Mr, Srq, Xrcd, XrcdOpenFlags};
use millstream_quantity::{Qpn, Rkey, Srqn};

use crate::support::{
    Adapter, Process, QpConfig, Usage, attributes, element, event, is_empty, next, pattern, recv_from_parent,
    send_to_parent, wait_for,
};

/// `IBV_EVENT_*`
const CQ_ERR: u32 = 0;
const REQ_ERR: u32 = 2;
const COMM_EST: u32 = 4;
const SQ_DRAINED: u32 = 5;
const LIMIT_REACHED: u32 = 15;

const TEST_TIMEOUT: Duration = Duration::from_secs(10);
const A_WHILE: Duration = Duration::from_millis(30);

/// Takes a queue pair from RESET to RTS with the attributes that its type requires.
fn connect(qp: &Qp, dest: u32) {
    connect_with(qp, dest, &QpConfig::default());
}

fn connect_with(qp: &Qp, dest: u32, config: &QpConfig) {
    let sends = qp.kind() == QpType::XrcSend;
    let rtr = attr::AV | attr::PATH_MTU | attr::DEST_QPN | attr::RQ_PSN;
    let rts = attr::TIMEOUT | attr::SQ_PSN;
    for (state, needs) in [
        (QpState::Init, attr::PKEY_INDEX | attr::PORT | attr::ACCESS_FLAGS),
        (QpState::Rtr, rtr | if sends { 0 } else { attr::MAX_DEST_RD_ATOMIC | attr::MIN_RNR_TIMER }),
        (
            QpState::Rts,
            rts | if sends { attr::RETRY_CNT | attr::RNR_RETRY | attr::MAX_QP_RD_ATOMIC } else { 0 },
        ),
    ] {
        qp.modify(&attributes(config, state, dest), attr::STATE | needs).expect("the usual way");
    }
}

fn sender(adapter: &Adapter, cq: &Arc<Cq>) -> Arc<Qp> {
    let capacity = QpCap { max_send_wr: 16, max_send_sge: 1, ..QpCap::default() };
    Qp::new(&adapter.pd, cq, cq, capacity, true, QpType::XrcSend, RecvSource::Own).expect("a queue pair")
}

/// A sending and a receiving queue pair, connected, and the domain of the latter.
struct XrcFixture {
    adapter: Adapter,
    domain: Arc<Xrcd>,
    sent: Arc<Cq>,
    sender: Arc<Qp>,
    receiver: Arc<Qp>,
}

impl XrcFixture {
    fn new() -> Self {
        let adapter = Adapter::open();
        let domain = Xrcd::private(&adapter.context).expect("a domain");
        let sent = adapter.cq();
        let (sender, receiver) = (sender(&adapter, &sent), Qp::for_domain(&domain).expect("a queue pair"));
        connect(&sender, receiver.qpn().get());
        connect(&receiver, sender.qpn().get());
        Self { adapter, domain, sent, sender, receiver }
    }

    fn queue(&self) -> Queue {
        Queue::new(&self.adapter, &self.domain, &self.adapter.cq())
    }

    /// Posts a request and returns its status.
    fn status(&self, wr: &SendWr<'_>) -> u32 {
        self.sender.post_send(wr).expect("room");
        next(&self.sent).status
    }
}

/// A shared receive queue with memory.
struct Queue {
    srq: Arc<Srq>,
    cq: Arc<Cq>,
    mr: Mr,
    // Dropped last: it is registered until then.
    memory: Vec<u8>,
}

impl Queue {
    fn new(adapter: &Adapter, domain: &Arc<Xrcd>, cq: &Arc<Cq>) -> Self {
        Self::of(adapter, Srq::for_domain(&adapter.pd, domain, cq, 4, 1).expect("a shared queue"), cq)
    }

    fn of(adapter: &Adapter, srq: Arc<Srq>, cq: &Arc<Cq>) -> Self {
        let mut memory = vec![0; 4096];
        let start = memory.as_mut_ptr() as u64;
        let mr = Mr::register(&adapter.pd, start, memory.len() as u64, start, 15).expect("registered");
        Self { srq, cq: cq.clone(), memory, mr }
    }

    fn post(&self, wr_id: u64) {
        self.srq.post(wr_id, &[element(&self.memory, &self.mr)]).expect("room");
    }

    /// Number of free slots.
    fn room(&self) -> usize {
        (0..).take_while(|i| self.srq.post(1000 + i, &[]) != Err(Errno::NOMEM)).count()
    }

    fn send(&self) -> SendWr<'static> {
        SendWr { opcode: WR_SEND, remote_srqn: Srqn::new(self.srq.number()), ..SendWr::default() }
    }
}

#[test]
fn messages_reach_the_queue_that_they_name() {
    let fixture = XrcFixture::new();
    let queues = [fixture.queue(), fixture.queue(), fixture.queue()];
    let mut data = pattern(1, 4096);
    let source = fixture.adapter.register(&mut data);
    for round in 0..10u64 {
        for (queue, len) in queues.iter().zip([100, 0, 4096]) {
            queue.post(round);
            let sges = [Sge { length: len, ..element(&data, &source) }];
            let wr = SendWr { opcode: WR_SEND_WITH_IMM, imm: round as u32, sges: &sges, ..queue.send() };
            assert_eq!(fixture.status(&wr), WC_SUCCESS);
            let wc = next(&queue.cq);
            assert_eq!(
                (wc.wr_id, wc.status, wc.opcode, wc.imm),
                (round, WC_SUCCESS, WC_OP_RECV, round as u32)
            );
            assert_eq!((wc.qp_num, wc.byte_len), (fixture.receiver.qpn().get(), len));
            assert_eq!(queue.memory[..len as usize], data[..len as usize]);
            assert!(queues.iter().all(|queue| is_empty(&queue.cq)));
        }
    }
    assert!(queues.iter().all(|queue| queue.room() == 4));
}

#[test]
fn one_sided_operations_reach_memory_of_the_queues_domain() {
    let fixture = XrcFixture::new();
    let mut queue = fixture.queue();
    let mut data = pattern(1, 64);
    let source = fixture.adapter.register(&mut data);
    let sges = [element(&data, &source)];
    let (remote_addr, rkey) = (queue.memory.as_ptr() as u64, queue.mr.key());
    let wr = SendWr { sges: &sges, remote_addr, rkey: Rkey::new(rkey), ..queue.send() };
    assert_eq!(fixture.status(&SendWr { opcode: WR_RDMA_WRITE, ..wr }), WC_SUCCESS);
    assert_eq!(queue.memory[..64], data);
    queue.memory[..64].fill(7);
    assert_eq!(fixture.status(&SendWr { opcode: WR_RDMA_READ, ..wr }), WC_SUCCESS);
    assert_eq!(data, [7; 64]);
    let word = [Sge { length: 8, ..sges[0] }];
    let add = SendWr { opcode: WR_ATOMIC_FETCH_AND_ADD, sges: &word, compare_add: 1, ..wr };
    assert_eq!(fixture.status(&add), WC_SUCCESS);
    assert_eq!(queue.memory[..8], [8, 7, 7, 7, 7, 7, 7, 7]);
    queue.post(5);
    let imm = SendWr { opcode: WR_RDMA_WRITE_WITH_IMM, imm: 9, ..wr };
    assert_eq!(fixture.status(&imm), WC_SUCCESS);
    let wc = next(&queue.cq);
    assert_eq!((wc.wr_id, wc.imm, wc.byte_len, wc.qp_num), (5, 9, 64, fixture.receiver.qpn().get()));
    // A receive cannot use memory of another protection domain, even of the sender's.
    let other = Adapter::open();
    let mut foreign = vec![0u8; 64];
    let mr = other.register(&mut foreign);
    let wrong = SendWr {
        remote_addr: foreign.as_ptr() as u64,
        rkey: Rkey::new(mr.key()),
        opcode: WR_RDMA_WRITE,
        ..wr
    };
    assert_ne!(fixture.status(&wrong), WC_SUCCESS);
    assert_eq!(foreign, [0; 64]);
}

#[test]
fn a_queue_that_is_not_of_the_domain_is_an_invalid_request() {
    for which in ["another domain", "an ordinary queue", "none", "destroyed"] {
        let fixture = XrcFixture::new();
        let elsewhere = Xrcd::private(&fixture.adapter.context).expect("a domain");
        let cq = fixture.adapter.cq();
        let foreign = Queue::new(&fixture.adapter, &elsewhere, &cq);
        let ordinary = Srq::new(&fixture.adapter.pd, 4, 1).expect("a shared queue");
        let gone = fixture.queue();
        gone.post(1);
        assert_eq!(fixture.status(&gone.send()), WC_SUCCESS);
        gone.srq.destroy().expect("unused");
        let remote_srqn = match which {
            "another domain" => foreign.srq.number(),
            "an ordinary queue" => ordinary.number(),
            "none" => 0,
            _ => gone.srq.number(),
        };
        foreign.post(1);
        ordinary.post(1, &[]).expect("room");
        let wr = SendWr { opcode: WR_SEND, remote_srqn: Srqn::new(remote_srqn), ..SendWr::default() };
        assert_eq!(fixture.status(&wr), WC_REM_INV_REQ_ERR, "{which}");
        assert_eq!(event(&fixture.adapter.context, TEST_TIMEOUT), Some(REQ_ERR), "{which}");
        assert_eq!(
            (fixture.sender.state(), fixture.receiver.state()),
            (QpState::Err, QpState::Err),
            "{which}"
        );
        assert_eq!(fixture.status(&wr), WC_WR_FLUSH_ERR, "{which}");
        assert!(is_empty(&cq), "{which}");
        // The queues survive the queue pair.
        foreign.srq.destroy().expect("unused");
    }
}

#[test]
fn a_number_that_is_used_again_names_the_later_queue() {
    let fixture = XrcFixture::new();
    let cq = fixture.adapter.cq();
    let earlier = Queue::new(&fixture.adapter, &fixture.domain, &cq);
    earlier.post(1);
    assert_eq!(fixture.status(&earlier.send()), WC_SUCCESS);
    assert_eq!(next(&cq).wr_id, 1);
    let number = earlier.srq.number();
    earlier.srq.destroy().expect("unused");
    drop(earlier);
    // Queues get the free numbers in turn.
    let new_cq = fixture.adapter.cq();
    let again = (0..10_000).find_map(|_| {
        let srq =
            Srq::for_domain(&fixture.adapter.pd, &fixture.domain, &new_cq, 8, 1).expect("a shared queue");
        if srq.number() == number {
            return Some(srq);
        }
        srq.destroy().expect("unused");
        None
    });
    let mut later = Queue::of(&fixture.adapter, again.expect("each number comes again"), &new_cq);
    let mut data = pattern(1, 64);
    let source = fixture.adapter.register(&mut data);
    later.memory.fill(0);
    later.post(2);
    let sges = [element(&data, &source)];
    assert_eq!(fixture.status(&SendWr { sges: &sges, ..later.send() }), WC_SUCCESS);
    assert!(is_empty(&cq), "the completion queue of the earlier queue");
    assert_eq!((next(&later.cq).wr_id, &later.memory[..64]), (2, &data[..]));
}

#[test]
fn many_queue_pairs_use_one_queue() {
    let fixture = XrcFixture::new();
    let queue = fixture.queue();
    let others: Vec<_> = (0..3)
        .map(|_| {
            let cq = fixture.adapter.cq();
            let (from, to) =
                (sender(&fixture.adapter, &cq), Qp::for_domain(&fixture.domain).expect("a queue pair"));
            connect(&from, to.qpn().get());
            connect(&to, from.qpn().get());
            (from, to, cq)
        })
        .collect();
    std::thread::scope(|scope| {
        for (from, _, cq) in &others {
            let queue = &queue;
            scope.spawn(move || {
                for _ in 0..200 {
                    from.post_send(&queue.send()).expect("room");
                    assert_eq!(next(cq).status, WC_SUCCESS);
                }
            });
        }
        let mut counts = vec![0; others.len()];
        (0..4).for_each(|i| queue.post(i));
        for i in 0..600 {
            let wc = next(&queue.cq);
            assert_eq!(wc.status, WC_SUCCESS);
            counts[others
                .iter()
                .position(|(_, to, _)| to.qpn() == Qpn::new(wc.qp_num))
                .expect("one of them")] += 1;
            if i < 596 {
                queue.post(i);
            }
        }
        assert_eq!(counts, [200; 3]);
    });
    assert_eq!(queue.room(), 4);
}

#[test]
fn an_empty_queue_makes_its_senders_wait_and_no_others() {
    let fixture = XrcFixture::new();
    let (empty, full) = (fixture.queue(), fixture.queue());
    let sent = fixture.adapter.cq();
    let (second, target) =
        (sender(&fixture.adapter, &sent), Qp::for_domain(&fixture.domain).expect("a queue pair"));
    connect(&second, target.qpn().get());
    connect(&target, second.qpn().get());
    full.post(1);
    fixture.sender.post_send(&empty.send()).expect("room");
    second.post_send(&full.send()).expect("room");
    assert_eq!(next(&sent).status, WC_SUCCESS);
    assert_eq!(next(&full.cq).qp_num, target.qpn().get());
    std::thread::sleep(A_WHILE);
    assert!(is_empty(&empty.cq) && is_empty(&fixture.sent));
    empty.post(2);
    // The sender sleeps.
    assert_eq!(next(&empty.cq).wr_id, 2);
    assert_eq!(next(&fixture.sent).status, WC_SUCCESS);
}

#[test]
fn a_limit_is_reported_and_an_overflow_too() {
    let fixture = XrcFixture::new();
    let small = Cq::new(&fixture.adapter.context, 2, None).expect("a queue");
    let queue = Queue::new(&fixture.adapter, &fixture.domain, &small);
    (0..4).for_each(|i| queue.post(i));
    queue.srq.set_limit(3).expect("within the size");
    assert_eq!(fixture.status(&queue.send()), WC_SUCCESS);
    assert_eq!(event(&fixture.adapter.context, A_WHILE), None);
    assert_eq!(fixture.status(&queue.send()), WC_SUCCESS);
    assert_eq!(event(&fixture.adapter.context, TEST_TIMEOUT), Some(LIMIT_REACHED));
    assert_ne!(fixture.status(&queue.send()), WC_SUCCESS);
    let mut events = [(); 2].map(|()| event(&fixture.adapter.context, TEST_TIMEOUT).expect("one each"));
    events.sort_unstable();
    assert_eq!(events, [CQ_ERR, 1], "of the completion queue, of the queue pair");
}

#[test]
fn a_message_that_is_too_long_fails_both_ends() {
    let fixture = XrcFixture::new();
    let queue = fixture.queue();
    let mut data = pattern(1, 64);
    let source = fixture.adapter.register(&mut data);
    let sges = [element(&data, &source)];
    queue.srq.post(1, &[Sge { length: 63, ..element(&queue.memory, &queue.mr) }]).expect("room");
    assert_eq!(fixture.status(&SendWr { sges: &sges, ..queue.send() }), WC_REM_INV_REQ_ERR);
    let wc = next(&queue.cq);
    assert_eq!((wc.wr_id, wc.status, wc.qp_num), (1, WC_LOC_LEN_ERR, fixture.receiver.qpn().get()));
    wait_for("the failure", || fixture.receiver.state() == QpState::Err);
}

#[test]
fn objects_in_use_are_not_deallocated() {
    let fixture = XrcFixture::new();
    let queue = fixture.queue();
    assert!(fixture.domain.in_use());
    assert_eq!(queue.cq.destroy(), Err(Errno::BUSY));
    let capacity = QpCap::default();
    let ordinary = |kind, receives| {
        let cq = &fixture.sent;
        Qp::new(&fixture.adapter.pd, cq, cq, capacity, true, kind, receives).err()
    };
    let shared = || RecvSource::Shared(queue.srq.clone());
    assert_eq!(ordinary(QpType::Rc, shared()), Some(Errno::INVAL), "a queue of a domain is for its targets");
    assert_eq!(ordinary(QpType::Rc, RecvSource::Domain(fixture.domain.clone())), Some(Errno::INVAL));
    assert_eq!(ordinary(QpType::XrcRecv, RecvSource::Own), Some(Errno::INVAL));
    assert_eq!(fixture.receiver.post_send(&queue.send()), Err(Errno::NOTSUP));
    assert_eq!(fixture.receiver.post_recv(1, &[]), Err(Errno::INVAL));
    assert_eq!(fixture.sender.post_recv(1, &[]), Err(Errno::INVAL));
    // Destroying the queue removes its completions; destroying the queue pair does not.
    queue.post(1);
    queue.post(2);
    (0..2).for_each(|_| assert_eq!(fixture.status(&queue.send()), WC_SUCCESS));
    fixture.receiver.destroy();
    assert_eq!(next(&queue.cq).wr_id, 1);
    let Queue { srq, cq, .. } = queue;
    srq.destroy().expect("unused");
    assert!(is_empty(&cq));
    drop(srq);
    assert_eq!(cq.destroy(), Ok(()));
    assert!(!fixture.domain.in_use());
}

#[test]
fn a_queue_pair_lives_until_its_last_handle_is_closed() {
    let fixture = XrcFixture::new();
    let again = Context::open().expect("the device opens");
    let same = Xrcd::private(&again).expect("a domain");
    let qpn = fixture.receiver.qpn();
    assert_eq!(Qp::open(&same, qpn).err(), Some(Errno::INVAL), "another domain");
    assert_eq!(Qp::open(&fixture.domain, fixture.sender.qpn()).err(), Some(Errno::INVAL), "not of a domain");
    assert_eq!(
        Qp::open(&fixture.domain, Qpn::new(qpn.get() ^ 1 << 23)).err(),
        Some(Errno::NOTSUP),
        "another process"
    );
    let (opened, handle) = Qp::open(&fixture.domain, qpn).expect("it is there");
    handle.set_pointer(2);
    fixture.receiver.handle().set_pointer(1);
    let notify = attr::STATE | attr::EN_SQD_ASYNC_NOTIFY;
    let sqd = QpAttr { en_sqd_async_notify: true, ..attributes(&QpConfig::default(), QpState::Sqd, 0) };
    opened.modify(&sqd, notify).expect("to SQD");
    let mut events = [(); 2].map(|()| {
        let event = fixture.adapter.context.next_event().expect("one for each handle");
        (event.kind(), event.pointer())
    });
    events.sort_unstable();
    assert_eq!(events, [(SQ_DRAINED, 1), (SQ_DRAINED, 2)]);
    fixture.receiver.close(fixture.receiver.handle());
    let queue = fixture.queue();
    queue.post(1);
    assert_eq!(fixture.status(&queue.send()), WC_SUCCESS, "the other handle keeps it");
    opened.close(&handle);
    assert_ne!(fixture.status(&queue.send()), WC_SUCCESS);
}

#[test]
fn the_domain_of_a_file_exists_while_it_is_open() {
    let context = Context::open().expect("the device opens");
    let file = tempfile::NamedTempFile::new().expect("a file");
    let metadata = file.as_file().metadata().expect("it is there");
    let open = |create, exclusive| {
        Xrcd::of_inode(&context, metadata.dev(), metadata.ino(), XrcdOpenFlags { create, exclusive })
    };
    assert_eq!(open(false, false).err(), Some(Errno(libc::EAGAIN)));
    let first = open(true, true).expect("nobody has it open");
    let second = open(false, false).expect("it exists");
    let third = open(true, false).expect("it exists");
    assert_eq!(open(true, true).err(), Some(Errno::INVAL));
    assert!(first.is_same(&second) && first.is_same(&third));
    assert!(!first.is_same(&Xrcd::private(&context).expect("a domain")));
    drop((first, second, third));
    assert_eq!(open(false, false).err(), Some(Errno(libc::EAGAIN)));
}

/// Another process with a shared receive queue in the domain of a file, and an idle queue pair to connect.
struct Member {
    process: Process,
    /// Numbers of its receiving queue pair and of its shared receive queue.
    qpn: u32,
    srqn: u32,
}

impl Member {
    fn start(path: &std::path::Path) -> Self {
        let mut process = Process::start("xrc_member");
        process.send_line(path.to_str().expect("text"));
        let mut number = || process.recv_line().parse().expect("a number");
        let (qpn, srqn) = (number(), number());
        Self { process, qpn, srqn }
    }

    /// Connects the process's queue pair.
    fn connect(&mut self, sender: &Qp) {
        self.process.send_line(&format!("connect {}", sender.qpn().get()));
        assert_eq!(self.process.recv_line(), "done");
    }

    /// The next message in its queue: the receiving queue pair, and the text.
    fn received(&mut self) -> (u32, String) {
        self.process.send_line("receive");
        let line = self.process.recv_line();
        let (qpn, text) = line.split_once(' ').expect("two words");
        (qpn.parse().expect("a number"), text.to_owned())
    }
}

/// The other process of [`Member`].
pub(crate) fn member() {
    let adapter = Adapter::open();
    let path = recv_from_parent().expect("a path");
    let metadata = std::fs::metadata(path).expect("it is there");
    let opening = XrcdOpenFlags { create: true, exclusive: false };
    let domain = Xrcd::of_inode(&adapter.context, metadata.dev(), metadata.ino(), opening).expect("a domain");
    let receiver = Qp::for_domain(&domain).expect("a queue pair");
    let queue = Queue::new(&adapter, &domain, &adapter.cq());
    queue.post(1);
    send_to_parent(&receiver.qpn().get().to_string());
    send_to_parent(&queue.srq.number().to_string());
    while let Some(line) = recv_from_parent() {
        if let Some(qpn) = line.strip_prefix("connect ") {
            connect(&receiver, qpn.parse().expect("a number"));
            send_to_parent("done");
        } else {
            let wc = next(&queue.cq);
            let text = String::from_utf8_lossy(&queue.memory[..wc.byte_len as usize]).into_owned();
            queue.post(1);
            send_to_parent(&format!("{} {text}", wc.qp_num));
        }
    }
}

#[test]
fn one_connection_serves_the_processes_of_a_domain() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut members = [(); 3].map(|()| Member::start(file.path()));
    let adapter = Adapter::open();
    let sent = adapter.cq();
    let sender = sender(&adapter, &sent);
    connect(&sender, members[0].qpn);
    members[0].connect(&sender);
    let qpn = members[0].qpn;
    let mut text = b"to number ?".to_vec();
    let mr = adapter.register(&mut text);
    for round in 0..3 {
        for (i, member) in members.iter_mut().enumerate() {
            text[10] = b'0' + i as u8;
            let sges = [element(&text, &mr)];
            let wr = SendWr {
                opcode: WR_SEND,
                sges: &sges,
                remote_srqn: Srqn::new(member.srqn),
                ..SendWr::default()
            };
            sender.post_send(&wr).expect("room");
            assert_eq!(next(&sent).status, WC_SUCCESS);
            assert_eq!(member.received(), (qpn, format!("to number {i}")), "round {round}");
        }
    }
    // The exit of one member does not affect the others.
    members[2].process.kill();
    let to = |member: &Member| SendWr {
        opcode: WR_SEND,
        remote_srqn: Srqn::new(member.srqn),
        ..SendWr::default()
    };
    sender.post_send(&to(&members[1])).expect("room");
    assert_eq!(next(&sent).status, WC_SUCCESS);
    assert_eq!(members[1].received(), (qpn, String::new()));
    // A request to the exited member names a queue that does not exist.
    wait_for("the end to be noticed", || {
        sender.post_send(&to(&members[2])).expect("room");
        next(&sent).status == WC_REM_INV_REQ_ERR
    });
    assert_eq!(sender.state(), QpState::Err);
}

#[test]
fn a_sender_keeps_nothing_of_members_of_the_domain_that_have_exited() {
    // The processes do not share a port.
    let mut process = Process::start_with("xrc_sender", |command| command.env("MILLSTREAM_PATH", "shm"));
    assert!(process.finish().success());
}

/// In another process: sends to queues of processes that exit, through one connection.
pub(crate) fn sends_to_members_that_exit() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut first = Member::start(file.path());
    let adapter = Adapter::open();
    let sent = adapter.cq();
    let sender = sender(&adapter, &sent);
    connect(&sender, first.qpn);
    first.connect(&sender);
    let send = |member: &mut Member| {
        let remote_srqn = Srqn::new(member.srqn);
        sender.post_send(&SendWr { opcode: WR_SEND, remote_srqn, ..SendWr::default() }).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
        member.received();
    };
    send(&mut first);
    let me = std::process::id();
    let born = Usage::of(me);
    for _ in 0..4 {
        let mut member = Member::start(file.path());
        send(&mut member);
        drop(member);
        Usage::is_again(me, &born);
    }
}

#[test]
fn the_first_message_is_reported_to_the_receiver_in_rtr() {
    let adapter = Adapter::open();
    let domain = Xrcd::private(&adapter.context).expect("a domain");
    let sent = adapter.cq();
    let (from, to) = (sender(&adapter, &sent), Qp::for_domain(&domain).expect("a queue pair"));
    let queue = Queue::new(&adapter, &domain, &adapter.cq());
    queue.post(1);
    connect(&from, to.qpn().get());
    let config = QpConfig::default();
    let init = attr::PKEY_INDEX | attr::PORT | attr::ACCESS_FLAGS;
    to.modify(&attributes(&config, QpState::Init, 0), attr::STATE | init).expect("to INIT");
    let rtr = attr::AV | attr::PATH_MTU | attr::DEST_QPN | attr::RQ_PSN;
    let rtr = rtr | attr::MAX_DEST_RD_ATOMIC | attr::MIN_RNR_TIMER;
    to.modify(&attributes(&config, QpState::Rtr, from.qpn().get()), attr::STATE | rtr).expect("to RTR");
    from.post_send(&queue.send()).expect("room");
    assert_eq!((next(&sent).status, next(&queue.cq).status), (WC_SUCCESS, WC_SUCCESS));
    assert_eq!(event(&adapter.context, TEST_TIMEOUT), Some(COMM_EST));
}

#[test]
fn a_domain_is_unused_as_soon_as_its_queue_is_destroyed() {
    let adapter = Adapter::open();
    let domain = Xrcd::private(&adapter.context).expect("a domain");
    let cq = adapter.cq();
    let over = AtomicBool::new(false);
    let queue = || Srq::for_domain(&adapter.pd, &domain, &cq, 4, 1).expect("a shared queue");
    // Each deregistration visits all queues of the process. With many, that takes longer.
    let others: Vec<_> = (0..300).map(|_| queue()).collect();
    let domain = Xrcd::private(&adapter.context).expect("a domain");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let memory = [0_u8; 4096];
            let start = memory.as_ptr() as u64;
            while !over.load(Ordering::Relaxed) {
                drop(Mr::register(&adapter.pd, start, 4096, start, 15).expect("registered"));
            }
        });
        let in_use = (0..5000).find(|_| {
            let srq = Srq::for_domain(&adapter.pd, &domain, &cq, 4, 1).expect("a shared queue");
            srq.destroy().expect("no queue pair uses it");
            drop(srq);
            domain.in_use()
        });
        over.store(true, Ordering::Relaxed);
        assert_eq!(in_use, None, "the round in which the domain was in use");
    });
    drop(others);
}
