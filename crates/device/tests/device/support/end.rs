//! One end of a connection, in this process or another one, behind one interface.

use std::time::Duration;

use millstream_device::qp::state::QpState;
use millstream_device::types::{
    SEND_INLINE, SEND_SIGNALED, WC_SUCCESS, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND,
    WR_SEND_WITH_IMM,
};

use super::TEST_TIMEOUT;
use super::actor::{ALL_ACCESS, Actor, Command, Completion, CqKind, QpConfig, Reply, Request};
use super::memory::Kind;
use super::process::Process;

/// The process of an end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// This process.
    SameProcess,
    /// Another process.
    OtherProcess,
}

impl Placement {
    pub(crate) const BOTH: [Self; 2] = [Self::SameProcess, Self::OtherProcess];
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) enum End {
    SameProcess(Box<Actor>),
    OtherProcess(Box<Process>),
}

/// A registered region of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) id: usize,
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) key: u32,
    /// Bytes that peers can map.
    pub(crate) mapped: u64,
}

impl Region {
    /// An element that covers `len` bytes from `at`.
    pub(crate) fn part(&self, at: usize, len: usize) -> (u64, u32, u32) {
        (self.addr + at as u64, len as u32, self.key)
    }

    /// An element that covers all of it.
    pub(crate) fn all(&self) -> (u64, u32, u32) {
        self.part(0, self.len)
    }
}

impl End {
    /// An end without queues.
    pub(crate) fn new(place: Placement) -> Self {
        match place {
            Placement::SameProcess => Self::SameProcess(Box::new(Actor::new())),
            Placement::OtherProcess => Self::OtherProcess(Box::new(Process::start("actor"))),
        }
    }

    /// The actor behind an end in this process.
    pub(crate) fn actor(&self) -> &Actor {
        match self {
            Self::SameProcess(actor) => actor,
            Self::OtherProcess(_) => panic!("the end is elsewhere"),
        }
    }

    /// The process behind an end elsewhere.
    pub(crate) fn process(&mut self) -> &mut Process {
        match self {
            Self::SameProcess(_) => panic!("the end is here"),
            Self::OtherProcess(process) => process,
        }
    }

    /// Sends a command without waiting for the answer. Only for an end elsewhere.
    pub(crate) fn begin(&mut self, command: &Command) {
        self.process().send_line(&serde_json::to_string(command).expect("plain data"));
    }

    /// Waits for the answer to the command of [`End::begin`].
    pub(crate) fn answer(&mut self) -> Reply {
        serde_json::from_str(&self.process().recv_line()).expect("a reply")
    }

    /// Executes a command. An error is its errno.
    pub(crate) fn attempt(&mut self, command: Command) -> Result<Reply, i32> {
        let reply = match self {
            Self::SameProcess(actor) => actor.obey(command),
            Self::OtherProcess(_) => {
                self.begin(&command);
                self.answer()
            }
        };
        match reply {
            Reply::Refused(number) => Err(number),
            reply => Ok(reply),
        }
    }

    fn run(&mut self, command: Command) -> Reply {
        let what = format!("{command:?}");
        self.attempt(command).unwrap_or_else(|number| panic!("errno {number} from {what:.200}"))
    }

    /// Creates the queue pair in state RESET, and returns its number.
    pub(crate) fn open(&mut self, config: &QpConfig) -> u32 {
        match self.run(Command::Open(config.clone())) {
            Reply::Number(number) => number,
            other => panic!("{other:?}"),
        }
    }

    /// The queue pair's number.
    pub(crate) fn number(&mut self) -> u32 {
        match self.run(Command::Number) {
            Reply::Number(number) => number,
            other => panic!("{other:?}"),
        }
    }

    /// Keeps the present queues while others are created.
    pub(crate) fn keep(&mut self) {
        self.run(Command::Keep);
    }

    pub(crate) fn modify(&mut self, state: QpState, config: &QpConfig) {
        self.run(Command::Modify(state as u32, config.clone()));
    }

    /// Takes the queue pair from RESET to RTS, connected to `dest`.
    pub(crate) fn connect_to(&mut self, dest: u32, config: &QpConfig) {
        self.modify(QpState::Init, config);
        self.run(Command::Connect(dest, config.clone()));
        self.modify(QpState::Rts, config);
    }

    /// Registers a region with all access rights.
    pub(crate) fn register(&mut self, kind: Kind, len: usize, skew: usize) -> Region {
        self.register_as(kind, len, skew, ALL_ACCESS)
    }

    pub(crate) fn register_as(&mut self, kind: Kind, len: usize, skew: usize, access: u32) -> Region {
        self.try_register(kind, len, skew, access, false)
            .unwrap_or_else(|number| panic!("errno {number} for {kind:?}, {len} bytes, skew {skew}"))
    }

    pub(crate) fn try_register(
        &mut self,
        kind: Kind,
        len: usize,
        skew: usize,
        access: u32,
        foreign: bool,
    ) -> Result<Region, i32> {
        match self.attempt(Command::Register { kind, len, skew, access, foreign })? {
            Reply::Region { id, addr, key, mapped } => Ok(Region { id, addr, len, key, mapped }),
            other => panic!("{other:?}"),
        }
    }

    /// Registers a region with these contents.
    pub(crate) fn hold(&mut self, bytes: &[u8]) -> Region {
        let region = self.register(Kind::Anonymous, bytes.len(), 0);
        self.store(&region, 0, bytes);
        region
    }

    pub(crate) fn deregister(&mut self, region: &Region) {
        self.run(Command::Deregister(region.id));
    }

    pub(crate) fn store(&mut self, region: &Region, at: isize, bytes: &[u8]) {
        self.run(Command::Store { region: region.id, at, bytes: bytes.to_vec() });
    }

    pub(crate) fn load(&mut self, region: &Region, at: isize, len: usize) -> Vec<u8> {
        match self.run(Command::Load { region: region.id, at, len }) {
            Reply::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn post(&mut self, request: Request) {
        self.run(Command::Send(request));
    }

    /// Posts requests as one list.
    pub(crate) fn post_all(&mut self, requests: &[Request]) {
        self.run(Command::SendAll(requests.to_vec()));
    }

    /// Posts requests as a batch.
    pub(crate) fn post_batch(&mut self, requests: &[Request]) {
        self.run(Command::Batch(requests.to_vec()));
    }

    /// Posts a SEND.
    pub(crate) fn send(&mut self, wr_id: u64, sges: &[(u64, u32, u32)]) {
        self.post(request(wr_id, WR_SEND, sges, (0, 0)));
    }

    /// Posts an RDMA WRITE.
    pub(crate) fn write(&mut self, wr_id: u64, sges: &[(u64, u32, u32)], to: (u64, u32)) {
        self.post(request(wr_id, WR_RDMA_WRITE, sges, to));
    }

    /// Posts an RDMA READ.
    pub(crate) fn read(&mut self, wr_id: u64, sges: &[(u64, u32, u32)], from: (u64, u32)) {
        self.post(request(wr_id, WR_RDMA_READ, sges, from));
    }

    /// Posts a receive.
    pub(crate) fn recv(&mut self, wr_id: u64, sges: &[(u64, u32, u32)]) {
        self.run(Command::Recv { wr_id, sges: sges.to_vec() });
    }

    /// Polls for `count` completions, which must arrive within [`TEST_TIMEOUT`](super::TEST_TIMEOUT).
    pub(crate) fn completions(&mut self, which: CqKind, count: usize) -> Vec<Completion> {
        let found = self.poll(which, count, TEST_TIMEOUT);
        assert_eq!(found.len(), count, "completions of {which:?}: {found:?}");
        found
    }

    /// Polls for up to `count` completions.
    pub(crate) fn poll(&mut self, which: CqKind, count: usize, within: Duration) -> Vec<Completion> {
        match self.run(Command::Poll { which, count, within_ms: within.as_millis() as u64 }) {
            Reply::Completions(found) => found,
            other => panic!("{other:?}"),
        }
    }

    /// Completions of send requests.
    pub(crate) fn sent(&mut self, count: usize) -> Vec<Completion> {
        self.completions(CqKind::Send, count)
    }

    /// Completions of receive requests.
    pub(crate) fn received(&mut self, count: usize) -> Vec<Completion> {
        self.completions(CqKind::Recv, count)
    }

    /// Checks that there is no completion.
    pub(crate) fn has_nothing(&mut self, which: CqKind) {
        let found = self.poll(which, 1, Duration::ZERO);
        assert!(found.is_empty(), "{which:?}: {found:?}");
    }

    pub(crate) fn arm(&mut self, which: CqKind, solicited: bool) {
        self.run(Command::Arm { which, solicited });
    }

    /// Whether a completion event arrives within this time.
    pub(crate) fn event(&mut self, which: CqKind, within: Duration) -> bool {
        match self.run(Command::AwaitEvent { which, within_ms: within.as_millis() as u64 }) {
            Reply::Event(event) => event.is_some(),
            other => panic!("{other:?}"),
        }
    }

    /// The type of the next asynchronous event.
    pub(crate) fn async_event(&mut self, within: Duration) -> Option<u32> {
        match self.run(Command::AsyncEvent { within_ms: within.as_millis() as u64 }) {
            Reply::Event(event) => event,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn state(&mut self) -> QpState {
        match self.run(Command::State) {
            Reply::Number(raw) => QpState::from_raw(raw).expect("a state"),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn destroy(&mut self) {
        self.run(Command::Destroy);
    }

    /// Seals the memory against new writable mappings.
    pub(crate) fn forbid_new_writers(&mut self, region: &Region) {
        self.run(Command::ForbidNewWriters(region.id));
    }
}

/// A signalled send request.
pub(crate) fn request(wr_id: u64, opcode: u32, sges: &[(u64, u32, u32)], to: (u64, u32)) -> Request {
    let (remote_addr, rkey) = to;
    Request {
        wr_id,
        opcode,
        flags: SEND_SIGNALED,
        sges: sges.to_vec(),
        remote_addr,
        rkey,
        ..Request::default()
    }
}

impl Request {
    /// With immediate data.
    pub(crate) fn with_imm(mut self, imm: u32) -> Self {
        self.opcode = match self.opcode {
            WR_SEND => WR_SEND_WITH_IMM,
            WR_RDMA_WRITE => WR_RDMA_WRITE_WITH_IMM,
            other => other,
        };
        self.imm = imm;
        self
    }

    /// With its data copied at once.
    pub(crate) fn inline(mut self) -> Self {
        self.flags |= SEND_INLINE;
        self
    }
}

impl Completion {
    /// A successful completion.
    pub(crate) fn ok(wr_id: u64, opcode: u32, byte_len: usize) -> Self {
        Self { wr_id, status: WC_SUCCESS, opcode, byte_len: byte_len as u32, imm: None, invalidated: None }
    }

    /// With immediate data.
    pub(crate) fn with_imm(self, imm: u32) -> Self {
        Self { imm: Some(imm), ..self }
    }
}

/// Request and status of each completion.
pub(crate) fn statuses(found: &[Completion]) -> Vec<(u64, u32)> {
    found.iter().map(|c| (c.wr_id, c.status)).collect()
}

/// Two connected ends; the first one is in this process.
pub(crate) fn pair(place: Placement, config: &QpConfig) -> (End, End) {
    let (mut a, mut b) = (End::new(Placement::SameProcess), End::new(place));
    connect(&mut a, &mut b, config);
    (a, b)
}

/// Makes queue pairs and connects them.
pub(crate) fn connect(a: &mut End, b: &mut End, config: &QpConfig) {
    let (to_b, to_a) = (b.open(config), a.open(config));
    a.connect_to(to_b, config);
    b.connect_to(to_a, config);
}
