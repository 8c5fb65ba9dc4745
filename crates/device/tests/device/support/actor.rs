//! One end of a connection: its objects, and the commands that it executes.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_device::qp::state::{AddressVector, QpAttr, QpState, attr};
use millstream_device::qp::{QpCap, QpType, RecvSource, SendOps, WrBatch, WrBatchLock};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE, Sge,
    WC_FLAG_WITH_IMM, WC_FLAG_WITH_INV, WC_SUCCESS, Wc,
};
use millstream_device::{Channel, Context, Cq, Errno, Mr, Pd, Qp, gid};
use millstream_quantity::{Psn, Qpn, Rkey};
use serde::{Deserialize, Serialize};

use super::memory::{self, Kind, Memory};
use super::process;

/// The parameters of an end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct QpConfig {
    pub(crate) send_wr: u32,
    pub(crate) recv_wr: u32,
    pub(crate) sges: u32,
    pub(crate) inline: u32,
    pub(crate) signal_all: bool,
    pub(crate) send_cqe: u32,
    pub(crate) recv_cqe: u32,
    pub(crate) access: u32,
    pub(crate) min_rnr_timer: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    /// Of the first packet, both ways.
    pub(crate) first_psn: u32,
}

impl Default for QpConfig {
    fn default() -> Self {
        Self {
            send_wr: 128,
            recv_wr: 128,
            sges: 8,
            inline: 256,
            signal_all: true,
            send_cqe: 256,
            recv_cqe: 256,
            access: ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC,
            min_rnr_timer: 1,
            // Seven retries take seconds: another process may wait for a processor.
            timeout: 15,
            retry_cnt: 7,
            rnr_retry: 7,
            first_psn: 0,
        }
    }
}

/// A send request in a form that can be serialized for another process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    /// Address, length, key.
    pub(crate) sges: Vec<(u64, u32, u32)>,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
}

/// The fields of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Completion {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
    /// The key that the sender has invalidated.
    pub(crate) invalidated: Option<u32>,
}

impl From<&Wc> for Completion {
    fn from(wc: &Wc) -> Self {
        Self {
            wr_id: wc.wr_id,
            status: wc.status,
            opcode: wc.opcode,
            byte_len: wc.byte_len,
            imm: (wc.wc_flags & WC_FLAG_WITH_IMM != 0).then_some(wc.imm),
            invalidated: (wc.wc_flags & WC_FLAG_WITH_INV != 0).then_some(wc.imm),
        }
    }
}

/// One of an end's two completion queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CqKind {
    Send,
    Recv,
}

/// A command to an end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Creates a queue pair in RESET. Answers with its number.
    Open(QpConfig),
    /// Modifies the queue pair to a state, with the attributes that the transition requires.
    Modify(u32, QpConfig),
    /// Modifies the queue pair to RTR, connected to another one.
    Connect(u32, QpConfig),
    /// Allocates memory and registers it; answers with the region.
    Register {
        kind: Kind,
        len: usize,
        skew: usize,
        access: u32,
        foreign: bool,
    },
    Deregister(usize),
    /// Writes into a region's memory.
    Store {
        region: usize,
        at: isize,
        bytes: Vec<u8>,
    },
    /// Reads a region's memory.
    Load {
        region: usize,
        at: isize,
        len: usize,
    },
    /// Seals the region's memory against new writable mappings.
    ForbidNewWriters(usize),
    Send(Request),
    /// Posts the requests as one list.
    SendAll(Vec<Request>),
    /// Posts the requests as a batch: all or none.
    Batch(Vec<Request>),
    Recv {
        wr_id: u64,
        sges: Vec<(u64, u32, u32)>,
    },
    /// Polls until there are `count` completions or `within_ms` have passed.
    Poll {
        which: CqKind,
        count: usize,
        within_ms: u64,
    },
    Arm {
        which: CqKind,
        solicited: bool,
    },
    /// Waits for a completion event without polling. Answers whether one arrived.
    AwaitEvent {
        which: CqKind,
        within_ms: u64,
    },
    /// Waits for the next asynchronous event. Answers with its type.
    AsyncEvent {
        within_ms: u64,
    },
    /// Repeats a request until it fails. Answers with that completion.
    Hammer(Request),
    /// Repeats a request as often as given, each time after the last one has succeeded.
    Repeat(Request, u64),
    /// Executes the program `sleep` in this process. No answer.
    Exec,
    /// Forks a child that sleeps for half a minute. Answers with its process id.
    ForkSleeper,
    /// The queue pair's state.
    State,
    /// The queue pair's number.
    Number,
    /// Keeps the present queues while others are created.
    Keep,
    Destroy,
}

/// An end's answer to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done,
    /// errno
    Refused(i32),
    Number(u32),
    Region {
        id: usize,
        addr: u64,
        key: u32,
        mapped: u64,
    },
    Bytes(Vec<u8>),
    Completions(Vec<Completion>),
    Event(Option<u32>),
}

/// An end in this process.
#[derive(Debug)]
pub(crate) struct Actor {
    context: Arc<Context>,
    pd: Arc<Pd>,
    foreign_pd: Arc<Pd>,
    queues: Option<Queues>,
    kept: Vec<Queues>,
    regions: Vec<(Memory, Mr)>,
}

#[derive(Debug)]
struct Queues {
    qp: Arc<Qp>,
    send: (Arc<Cq>, Arc<Channel>),
    recv: (Arc<Cq>, Arc<Channel>),
}

impl Queues {
    fn new(context: &Arc<Context>, pd: &Arc<Pd>, config: &QpConfig) -> Result<Self, Errno> {
        let queue = |entries| -> Result<_, Errno> {
            let channel = Channel::new(context)?;
            Ok((Cq::new(context, entries, Some(channel.clone()))?, channel))
        };
        let (send, recv) = (queue(config.send_cqe)?, queue(config.recv_cqe)?);
        let capacity = QpCap {
            max_send_wr: config.send_wr,
            max_recv_wr: config.recv_wr,
            max_send_sge: config.sges,
            max_recv_sge: config.sges,
            max_inline_data: config.inline,
        };
        let (kind, receives) = (QpType::Rc, RecvSource::Own);
        let qp = Qp::new(pd, &send.0, &recv.0, capacity, config.signal_all, kind, receives)?;
        Ok(Self { qp, send, recv })
    }

    fn which(&self, which: CqKind) -> &(Arc<Cq>, Arc<Channel>) {
        match which {
            CqKind::Send => &self.send,
            CqKind::Recv => &self.recv,
        }
    }
}

/// The attributes of an end for the transition to `state`.
pub(crate) fn attributes(config: &QpConfig, state: QpState, dest_qpn: u32) -> QpAttr {
    QpAttr {
        state,
        access: config.access,
        port: 1,
        path_mtu: 5,
        dest_qpn: Qpn::new(dest_qpn),
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        min_rnr_timer: config.min_rnr_timer,
        timeout: config.timeout,
        retry_cnt: config.retry_cnt,
        rnr_retry: config.rnr_retry,
        rq_psn: Psn::new(config.first_psn),
        sq_psn: Psn::new(config.first_psn),
        path: AddressVector {
            is_global: true,
            dgid: LOOPBACK,
            sgid_index: loopback_index(),
            port: 1,
            ..AddressVector::default()
        },
        ..QpAttr::default()
    }
}

/// The common address of all ends: IPv4 loopback mapped into IPv6.
pub(crate) const LOOPBACK: [u8; 16] = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();

/// Index of the loopback address in the GID table.
pub(crate) fn loopback_index() -> u8 {
    let is_it = |entry: &gid::GidEntry| entry.raw == LOOPBACK && entry.kind == gid::GidKind::RoceV2;
    millstream_device::gid_table::GidTable::current().index_of(is_it).expect("a loopback interface") as u8
}

/// Mask of the attributes that the transition to `state` requires.
pub(crate) fn mask(state: QpState) -> u32 {
    attr::STATE
        | match state {
            QpState::Init => attr::PKEY_INDEX | attr::PORT | attr::ACCESS_FLAGS,
            QpState::Rtr => {
                attr::AV
                    | attr::PATH_MTU
                    | attr::DEST_QPN
                    | attr::RQ_PSN
                    | attr::MAX_DEST_RD_ATOMIC
                    | attr::MIN_RNR_TIMER
            }
            QpState::Rts => {
                attr::TIMEOUT | attr::RETRY_CNT | attr::RNR_RETRY | attr::SQ_PSN | attr::MAX_QP_RD_ATOMIC
            }
            _ => 0,
        }
}

/// Takes a queue pair from RESET to RTS.
pub(crate) fn connect_queue_pair(qp: &Qp, dest: u32, config: &QpConfig) {
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        qp.modify(&attributes(config, state, dest), mask(state)).expect("the usual way");
    }
}

fn elements(sges: &[(u64, u32, u32)]) -> Vec<Sge> {
    sges.iter().map(|&(addr, length, lkey)| Sge { addr, length, lkey }).collect()
}

/// Whether `fd` becomes readable within the time.
pub(crate) fn readable(fd: impl AsFd, within: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd on the stack.
    unsafe { libc::poll(&raw mut poll, 1, within.as_millis() as i32) == 1 }
}

impl Actor {
    pub(crate) fn new() -> Self {
        let context = Context::open().expect("the device opens");
        let (pd, foreign_pd) = (Pd::new(&context), Pd::new(&context));
        Self { context, pd, foreign_pd, queues: None, kept: Vec::new(), regions: Vec::new() }
    }

    /// The open device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The domain of its queue pairs.
    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// A protection domain without queue pairs.
    pub(crate) fn foreign_pd(&self) -> &Arc<Pd> {
        &self.foreign_pd
    }

    /// The queue pair.
    pub(crate) fn qp(&self) -> &Arc<Qp> {
        &self.queues().qp
    }

    /// One of the completion queues.
    pub(crate) fn cq(&self, which: CqKind) -> &Arc<Cq> {
        &self.queues().which(which).0
    }

    fn queues(&self) -> &Queues {
        self.queues.as_ref().expect("opened first")
    }

    pub(crate) fn obey(&mut self, command: Command) -> Reply {
        self.try_to(command).unwrap_or_else(|Errno(number)| Reply::Refused(number))
    }

    fn try_to(&mut self, command: Command) -> Result<Reply, Errno> {
        match command {
            Command::Open(config) => {
                let queues = Queues::new(&self.context, &self.pd, &config)?;
                let number = queues.qp.qpn();
                self.queues = Some(queues);
                return Ok(Reply::Number(number.get()));
            }
            Command::Modify(state, config) => {
                let state = QpState::from_raw(state).expect("a state");
                let attributes = attributes(&config, state, 0);
                // A change without a transition sets only attributes that may change in every state.
                let same = self.qp().state() == state && state != QpState::Reset;
                let mask = if same { attr::STATE | attr::ACCESS_FLAGS } else { mask(state) };
                let resumes = self.qp().state() == QpState::Sqd && state == QpState::Rts;
                self.qp().modify(&attributes, if resumes { attr::STATE } else { mask })?;
            }
            Command::Connect(dest_qpn, config) => {
                self.qp().modify(&attributes(&config, QpState::Rtr, dest_qpn), mask(QpState::Rtr))?;
            }
            Command::Register { kind, len, skew, access, foreign } => {
                return self.register(kind, len, skew, access, foreign);
            }
            Command::Deregister(region) => self.regions[region].1.deregister()?,
            Command::Store { region, at, bytes } => self.regions[region].0.store(at, &bytes),
            Command::Load { region, at, len } => {
                return Ok(Reply::Bytes(self.regions[region].0.load(at, len)));
            }
            Command::ForbidNewWriters(region) => memory::forbid_new_writers(&self.regions[region].0),
            Command::Send(request) => self.send(&[request])?,
            Command::SendAll(requests) => self.send(&requests)?,
            Command::Batch(requests) => self.batch(&requests)?,
            Command::Recv { wr_id, sges } => self.qp().post_recv(wr_id, &elements(&sges))?,
            Command::Poll { which, count, within_ms } => {
                return self.poll(which, count, Duration::from_millis(within_ms));
            }
            Command::Arm { which, solicited } => self.cq(which).arm(solicited),
            Command::AwaitEvent { which, within_ms } => {
                let (cq, channel) = self.queues().which(which);
                let came = readable(&**channel, Duration::from_millis(within_ms));
                if came {
                    let whose = channel.next_event()?;
                    assert!(Arc::ptr_eq(&whose, cq), "each queue has its own channel");
                    cq.acknowledge(1);
                }
                return Ok(Reply::Event(came.then_some(0)));
            }
            Command::AsyncEvent { within_ms } => {
                let came = readable(&*self.context, Duration::from_millis(within_ms));
                let event = if came { Some(self.context.next_event()?.kind()) } else { None };
                return Ok(Reply::Event(event));
            }
            Command::Hammer(request) => loop {
                self.send(std::slice::from_ref(&request))?;
                let Reply::Completions(found) = self.poll(CqKind::Send, 1, super::TEST_TIMEOUT)? else {
                    unreachable!("polling answers with completions")
                };
                if found.iter().any(|completion| completion.status != WC_SUCCESS) {
                    return Ok(Reply::Completions(found));
                }
            },
            Command::Repeat(request, times) => {
                for _ in 0..times {
                    self.send(std::slice::from_ref(&request))?;
                    let Reply::Completions(found) = self.poll(CqKind::Send, 1, super::TEST_TIMEOUT)? else {
                        unreachable!("polling answers with completions")
                    };
                    assert_eq!(found.first().map(|completion| completion.status), Some(WC_SUCCESS));
                }
            }
            Command::Exec => {
                use std::os::unix::process::CommandExt as _;
                let error = std::process::Command::new("sleep").arg("60").exec();
                panic!("sleep is not executed: {error}");
            }
            Command::ForkSleeper => {
                // SAFETY: the child makes system calls only.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: plain system calls. The alarm ends the child if the parent does not.
                    unsafe {
                        libc::alarm(30);
                        loop {
                            libc::pause();
                        }
                    }
                }
                return Ok(Reply::Number(child as u32));
            }
            Command::Number => return Ok(Reply::Number(self.qp().qpn().get())),
            Command::Keep => self.kept.extend(self.queues.take()),
            Command::State => return Ok(Reply::Number(self.qp().state() as u32)),
            Command::Destroy => {
                let queues = self.queues.take().expect("opened first");
                queues.qp.destroy();
                queues.send.0.destroy()?;
                queues.recv.0.destroy()?;
            }
        }
        Ok(Reply::Done)
    }

    fn register(
        &mut self,
        kind: Kind,
        len: usize,
        skew: usize,
        access: u32,
        foreign: bool,
    ) -> Result<Reply, Errno> {
        // Far from any virtual address, so that the two cannot be confused.
        const IOVA: u64 = 1 << 56;
        let memory = Memory::new(kind, len, skew);
        let pd = if foreign { &self.foreign_pd } else { &self.pd };
        let (mr, addr) = match &memory.file {
            Some((fd, offset)) => {
                let (offset, iova) = (*offset as u64, IOVA + *offset as u64);
                (Mr::register_dmabuf(pd, fd.as_fd(), offset, len as u64, iova, access)?, iova)
            }
            None => {
                let start = memory.start as u64;
                (Mr::register(pd, start, len as u64, start, access)?, start)
            }
        };
        let reply = Reply::Region { id: self.regions.len(), addr, key: mr.key(), mapped: mr.mapped_len() };
        self.regions.push((memory, mr));
        Ok(reply)
    }

    fn send(&self, requests: &[Request]) -> Result<(), Errno> {
        let sges: Vec<_> = requests.iter().map(|request| elements(&request.sges)).collect();
        let list = requests.iter().zip(&sges).map(|(request, sges)| SendWr {
            wr_id: request.wr_id,
            opcode: request.opcode,
            flags: request.flags,
            imm: request.imm,
            sges,
            remote_addr: request.remote_addr,
            rkey: Rkey::new(request.rkey),
            compare_add: request.compare_add,
            swap: request.swap,
            ..SendWr::default()
        });
        match &list.collect::<Vec<_>>()[..] {
            [one] => self.qp().post_send(one),
            list => self.qp().post_sends(list).map_err(|(_, error)| error),
        }
    }

    fn batch(&self, requests: &[Request]) -> Result<(), Errno> {
        let (kind, capacity) = (self.qp().kind(), self.qp().capacity());
        let section = WrBatchLock::new(kind, capacity, SendOps::of(kind))?;
        let prepare = |batch: &mut WrBatch| {
            for request in requests {
                batch.request(SendWr {
                    wr_id: request.wr_id,
                    opcode: request.opcode,
                    flags: request.flags,
                    imm: request.imm,
                    remote_addr: request.remote_addr,
                    rkey: Rkey::new(request.rkey),
                    compare_add: request.compare_add,
                    swap: request.swap,
                    ..SendWr::default()
                });
                let sges = elements(&request.sges);
                if request.flags & SEND_INLINE == 0 {
                    batch.set_elements(&sges);
                } else {
                    // SAFETY: inline data of a test is memory of this process.
                    batch.set_inline(sges.iter().map(|sge| unsafe {
                        std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize)
                    }));
                }
            }
        };
        section.enter();
        // SAFETY: this thread is inside.
        unsafe {
            section.with(prepare);
            section.complete(self.qp())
        }
    }

    fn poll(&self, which: CqKind, count: usize, within: Duration) -> Result<Reply, Errno> {
        let deadline = Instant::now() + within;
        let mut found = Vec::new();
        let mut out = [Wc::default(); 16];
        loop {
            let most = out.len().min(count - found.len());
            let n = self.cq(which).poll(&mut out[..most])?;
            found.extend(out[..n].iter().map(Completion::from));
            if found.len() == count || (n == 0 && Instant::now() > deadline) {
                return Ok(Reply::Completions(found));
            }
            if n == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        for queues in self.kept.drain(..).chain(self.queues.take()) {
            queues.qp.destroy();
            // A failing test may have left events unacknowledged.
            if !std::thread::panicking() {
                queues.send.0.destroy().expect("no queue pair is left");
                queues.recv.0.destroy().expect("no queue pair is left");
            }
        }
        for (_, mr) in &mut self.regions {
            let _ = mr.deregister();
        }
    }
}

/// The default access rights of a region.
pub(crate) const ALL_ACCESS: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;

/// In another process: executes the parent's commands until its input ends.
pub(crate) fn serve() {
    let mut actor = Actor::new();
    while let Some(line) = process::recv_from_parent() {
        let command = serde_json::from_str(&line).expect("a command");
        let reply = actor.obey(command);
        process::send_to_parent(&serde_json::to_string(&reply).expect("plain data"));
    }
}
