//! A process under load: three reliable connections with every operation in both directions, whose data is
//! checked. They end when the peer dies.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    SEND_INLINE, Sge, WC_FLAG_WITH_IMM, WC_RETRY_EXC_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_ATOMIC_CMP_AND_SWP,
    WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, Wc,
};
use millstream_device::{Channel, Cq, Errno, Mr, Srq};
use millstream_quantity::{Qpn, Rkey};
use millstream_shm::poll_readable;
use serde::{Deserialize, Serialize};

use crate::support::{
    Adapter, Kind, Memory, QpConfig, Random, TEST_TIMEOUT, Usage, connect_queue_pair, recv_from_parent,
    send_to_parent,
};

pub(super) const CONNECTIONS: usize = 3;
/// The connection with a shared receive queue.
const SHARED: usize = 1;

/// Most requests of a connection in flight.
const DEPTH: usize = 16;
/// Receive requests of a queue, and bytes of each.
const RECEIVES: u64 = 32;
const RECEIVE_LEN: u64 = 256;

/// Memory that peers can map: counters, a target of WRITEs, and constant bytes.
const BIG: usize = (2 << 20) + 8192;
const BIG_LANDING: u64 = 4096;
const BIG_CONSTANT: u64 = MIB + 8192;
const MIB: u64 = 1 << 20;
/// Most bytes of inline data.
const INLINE: u64 = 64;

/// Memory that peers access through the kernel, with an equal layout.
const SMALL: usize = 3000;
const SMALL_LANDING: u64 = 100;
const SMALL_CONSTANT: u64 = 2000;

/// ACK timeout code: 67 ms, eight times.
const TIMEOUT: u8 = 14;

/// The addresses of a process's objects, for its peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Addresses {
    pub(super) numbers: [u32; CONNECTIONS],
    big: (u64, u32),
    small: (u64, u32),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Makes all objects. Answers with their addresses.
    Open { seed: u64 },
    /// Connects to the process with these addresses, exchanges data until that process exits, and destroys
    /// all objects.
    Go(Addresses),
    /// Answers with the resources that the process holds.
    Usage,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Addresses(Addresses),
    Ended { sent: u64, received: u64 },
    Usage(Usage),
}

/// In another process: executes the parent's commands until killed.
pub(crate) fn serve() {
    let adapter = Adapter::open();
    let memory = [Memory::new(Kind::Anonymous, BIG, 0), Memory::new(Kind::Data, SMALL, 0)];
    let scratch = Memory::new(Kind::Anonymous, SCRATCH, 0);
    let mut open = None;
    while let Some(line) = recv_from_parent() {
        let answer = match serde_json::from_str(&line).expect("a command") {
            Command::Usage => Reply::Usage(Usage::of(std::process::id())),
            Command::Open { seed } => {
                let load = Load::open(&adapter, &memory, &scratch, seed);
                let addresses = load.addresses();
                open = Some(load);
                Reply::Addresses(addresses)
            }
            Command::Go(peer) => open.take().expect("opened first").run(&peer),
        };
        send_to_parent(&serde_json::to_string(&answer).expect("plain data"));
    }
}

fn constant(at: u64) -> u8 {
    (at.wrapping_mul(31) + 7) as u8
}

/// The expected result of a posted request.
#[derive(Clone, Copy, Debug)]
enum ExpectedResult {
    Nothing,
    /// The peer's constant bytes from this offset on.
    Constant {
        at: u64,
        len: u64,
    },
    /// The value of a counter.
    Count(u64),
}

#[derive(Clone, Copy, Debug)]
struct Posted {
    wr_id: u64,
    expected: ExpectedResult,
    /// Its offset in the scratch memory.
    local: u64,
}

/// The scratch memory: receives, then a slot for each request, then a large area for each connection.
const SLOT: u64 = 4096;
const SLOTS: u64 = 2 * DEPTH as u64;
const SLOTS_AT: u64 = 64 << 10;
const LARGE_AT: u64 = SLOTS_AT + CONNECTIONS as u64 * SLOTS * SLOT;
const SCRATCH: usize = (LARGE_AT + CONNECTIONS as u64 * MIB) as usize;

fn received_at(connection: usize, receive: u64) -> u64 {
    (connection as u64 * RECEIVES + receive) * RECEIVE_LEN
}

fn slot_at(connection: usize, request: u64) -> u64 {
    SLOTS_AT + (connection as u64 * SLOTS + request % SLOTS) * SLOT
}

fn large_at(connection: usize) -> u64 {
    LARGE_AT + connection as u64 * MIB
}

/// One connection.
struct Connection {
    qp: Arc<Qp>,
    posted: VecDeque<Posted>,
    next_id: u64,
    /// Messages sent and received so far.
    sent: u64,
    received: u64,
    /// Expected values of the peer's two counters of this connection.
    counters: [u64; 2],
    /// Receive requests in its own queue.
    waiting: u64,
    /// A READ into the large area is in flight.
    reads_large: bool,
    /// Its first error completion was polled.
    over: bool,
    /// One of its receives was flushed.
    flushed: bool,
}

struct Load<'a> {
    scratch: &'a Memory,
    mrs: [Mr; 3],
    memory: &'a [Memory; 2],
    send: (Arc<Cq>, Arc<Channel>),
    recv: (Arc<Cq>, Arc<Channel>),
    srq: Arc<Srq>,
    connections: Vec<Connection>,
    random: Random,
    /// Receive requests in the shared queue.
    shared_waiting: u64,
    /// Waits for events instead of polling.
    sleeps: bool,
    /// The queue was empty after it was armed.
    idle: bool,
}

impl<'a> Load<'a> {
    fn open(adapter: &Adapter, memory: &'a [Memory; 2], scratch: &'a Memory, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let queue = || {
            let channel = Channel::new(&adapter.context).expect("a channel");
            (Cq::new(&adapter.context, 1024, Some(channel.clone())).expect("a queue"), channel)
        };
        let (send, recv) = (queue(), queue());
        let srq = Srq::new(&adapter.pd, RECEIVES as u32, 1).expect("a shared queue");
        let capacity = QpCap {
            max_send_wr: 2 * DEPTH as u32,
            max_recv_wr: RECEIVES as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE as u32,
        };
        let connection = |i| {
            let receives = if i == SHARED { RecvSource::Shared(srq.clone()) } else { RecvSource::Own };
            let qp = Qp::new(&adapter.pd, &send.0, &recv.0, capacity, true, QpType::Rc, receives);
            Connection {
                qp: qp.expect("a queue pair"),
                posted: VecDeque::new(),
                next_id: 0,
                sent: 0,
                received: 0,
                counters: [0; 2],
                waiting: 0,
                reads_large: false,
                over: false,
                flushed: false,
            }
        };
        let connections = (0..CONNECTIONS).map(connection).collect();
        let register = |memory: &Memory| {
            let start = memory.start as u64;
            Mr::register(&adapter.pd, start, memory.len as u64, start, 15).expect("registered")
        };
        for (memory, constants) in memory.iter().zip([BIG_CONSTANT, SMALL_CONSTANT]) {
            memory.store(0, &[0; 64]);
            let bytes: Vec<u8> = (constants..memory.len as u64).map(constant).collect();
            memory.store(constants as isize, &bytes);
        }
        let mrs = [register(&memory[0]), register(&memory[1]), register(scratch)];
        let sleeps = random.once_in(2);
        Self {
            scratch,
            mrs,
            memory,
            send,
            recv,
            srq,
            connections,
            random,
            shared_waiting: 0,
            sleeps,
            idle: false,
        }
    }

    fn addresses(&self) -> Addresses {
        let place = |i: usize| (self.memory[i].start as u64, self.mrs[i].key());
        Addresses {
            numbers: std::array::from_fn(|i| self.connections[i].qp.qpn().get()),
            big: place(0),
            small: place(1),
        }
    }

    fn element(&self, at: u64, len: u64) -> Sge {
        assert!(at + len <= self.scratch.len as u64);
        Sge { addr: self.scratch.start as u64 + at, length: len as u32, lkey: self.mrs[2].key() }
    }

    fn receive(&mut self, connection: usize, slot: u64) {
        let at = received_at(connection, slot);
        let sges = [self.element(at, RECEIVE_LEN)];
        if connection == SHARED {
            self.srq.post(slot, &sges).expect("room for a receive");
            self.shared_waiting += 1;
        } else {
            self.connections[connection].qp.post_recv(slot, &sges).expect("room for a receive");
            self.connections[connection].waiting += 1;
        }
    }

    fn run(mut self, peer: &Addresses) -> Reply {
        let config = QpConfig { timeout: TIMEOUT, ..QpConfig::default() };
        for (connection, number) in self.connections.iter().zip(peer.numbers) {
            connect_queue_pair(&connection.qp, number, &config);
        }
        for connection in 0..CONNECTIONS {
            (0..RECEIVES).for_each(|slot| self.receive(connection, slot));
        }
        while self
            .connections
            .iter()
            .any(|connection| !connection.over || !connection.posted.is_empty() || connection.waiting != 0)
        {
            for connection in 0..CONNECTIONS {
                // One request more after the error: it is flushed, too.
                while !self.connections[connection].over && self.connections[connection].posted.len() < DEPTH
                {
                    self.post(connection, peer);
                }
            }
            if self.poll() {
                self.idle = false;
            } else if self.sleeps {
                self.sleep();
            } else {
                std::thread::yield_now();
            }
        }
        // The shared connection's last messages.
        while self.poll() {}
        self.end()
    }

    /// Polls and handles completions; false if there are none.
    fn poll(&mut self) -> bool {
        let mut out = [Wc::default(); 32];
        let mut some = false;
        for received in [false, true] {
            let cq = if received { &self.recv.0 } else { &self.send.0 };
            let n = cq.poll(&mut out).expect("no overflow");
            some |= n != 0;
            for wc in &out[..n] {
                let connection =
                    self.connections.iter().position(|connection| connection.qp.qpn() == Qpn::new(wc.qp_num));
                let connection = connection.expect("a completion of one of our queue pairs");
                if received { self.received(connection, wc) } else { self.sent(connection, wc) }
            }
        }
        some
    }

    /// Posts a random request.
    fn post(&mut self, connection: usize, peer: &Addresses) {
        let random = &mut self.random;
        let id = self.connections[connection].next_id;
        let mut local = slot_at(connection, id);
        let mut flags = 0;
        let mut expected = ExpectedResult::Nothing;
        let big = !random.once_in(4);
        let (base, key) = if big { peer.big } else { peer.small };
        let landing = if big { BIG_LANDING } else { SMALL_LANDING };
        let most = if big { SLOT } else { 900 };
        let (opcode, len, at) = match random.below(10) {
            0..3 => {
                let mut len = 1 + random.below(most);
                if random.once_in(3) {
                    len = 1 + random.below(INLINE);
                    flags = SEND_INLINE;
                } else if big && random.once_in(4) {
                    (local, len) = (large_at(connection), 1 + random.below(MIB));
                }
                (WR_RDMA_WRITE, len, landing)
            }
            3 => (WR_RDMA_WRITE_WITH_IMM, random.below(most), landing),
            4..6 => {
                // A message begins with its number.
                let number = self.connections[connection].sent;
                self.scratch.store(local as isize, &number.to_ne_bytes());
                let inline = random.once_in(2);
                flags = if inline { SEND_INLINE } else { 0 };
                let room = if inline { INLINE } else { RECEIVE_LEN };
                (WR_SEND, 8 + random.below(room - 7), 0)
            }
            6..8 => {
                let (start, end) = if big { (BIG_CONSTANT, BIG) } else { (SMALL_CONSTANT, SMALL) };
                let mut len = 1 + random.below(most);
                let large = &mut self.connections[connection].reads_large;
                if big && random.once_in(4) && !*large {
                    *large = true;
                    (local, len) = (large_at(connection), SLOT + 1 + random.below(MIB - SLOT));
                }
                let at = start + random.below(end as u64 - start - len + 1);
                expected = ExpectedResult::Constant { at, len };
                (WR_RDMA_READ, len, at)
            }
            n => {
                let count = &mut self.connections[connection].counters[usize::from(big)];
                expected = ExpectedResult::Count(*count);
                *count += 1;
                (
                    if n == 8 { WR_ATOMIC_CMP_AND_SWP } else { WR_ATOMIC_FETCH_AND_ADD },
                    8,
                    connection as u64 * 8,
                )
            }
        };
        let sges = [self.element(local, len)];
        let connection = &mut self.connections[connection];
        let imm = connection.sent as u32;
        connection.sent += u64::from(matches!(opcode, WR_SEND | WR_RDMA_WRITE_WITH_IMM));
        let count = if let ExpectedResult::Count(count) = expected { count } else { 0 };
        let wr = SendWr {
            wr_id: id,
            opcode,
            flags,
            imm,
            sges: &sges,
            remote_addr: base + at,
            rkey: Rkey::new(key),
            compare_add: if opcode == WR_ATOMIC_CMP_AND_SWP { count } else { 1 },
            swap: count + 1,
            ..SendWr::default()
        };
        connection.qp.post_send(&wr).expect("room for a request");
        connection.posted.push_back(Posted { wr_id: id, expected, local });
        connection.next_id += 1;
    }

    /// Handles the completion of a send request.
    fn sent(&mut self, connection: usize, wc: &Wc) {
        let connection = &mut self.connections[connection];
        let posted = connection.posted.pop_front().expect("as many completions as requests");
        assert_eq!(wc.wr_id, posted.wr_id, "completions in the order of requests");
        let expected: &[u32] =
            if connection.over { &[WC_WR_FLUSH_ERR] } else { &[WC_SUCCESS, WC_RETRY_EXC_ERR] };
        assert!(expected.contains(&wc.status), "{wc:?}, not one of {expected:?}");
        if wc.status != WC_SUCCESS {
            connection.over = true;
            return;
        }
        match posted.expected {
            ExpectedResult::Nothing => {}
            ExpectedResult::Constant { at, len } => {
                connection.reads_large &= len <= SLOT;
                let bytes = self.scratch.load(posted.local as isize, len as usize);
                let good = bytes.iter().zip(at..).all(|(byte, at)| *byte == constant(at));
                assert!(good, "{len} bytes from {at} are not what they were");
            }
            ExpectedResult::Count(count) => {
                let bytes = self.scratch.load(posted.local as isize, 8);
                assert_eq!(bytes, count.to_ne_bytes(), "each atomic operation once");
            }
        }
    }

    /// Handles the completion of a receive: a message, or a flush.
    fn received(&mut self, connection: usize, wc: &Wc) {
        let own = connection != SHARED;
        let it = &mut self.connections[connection];
        if own {
            it.waiting -= 1;
        } else {
            self.shared_waiting -= 1;
        }
        if wc.status == WC_WR_FLUSH_ERR {
            assert!(own || !it.flushed, "the peer had taken one receive of the shared queue at most");
            it.flushed = true;
            return;
        }
        assert_eq!(wc.status, WC_SUCCESS, "{wc:?}");
        assert!(!it.flushed, "a message after the end");
        if wc.wc_flags & WC_FLAG_WITH_IMM != 0 {
            assert_eq!(wc.imm, it.received as u32, "messages in order, each once");
        } else {
            let bytes = self.scratch.load(received_at(connection, wc.wr_id) as isize, 8);
            assert_eq!(bytes, it.received.to_ne_bytes(), "messages in order, each once");
        }
        it.received += 1;
        if !it.over || !own {
            self.receive(connection, wc.wr_id);
        }
    }

    /// Waits for an event, as a program that does not poll does.
    fn sleep(&mut self) {
        let sides = [&self.send, &self.recv];
        sides.iter().for_each(|(cq, _)| cq.arm(false));
        // Completions from before the arming are polled once more; they may have raised an event as well.
        let fds = sides.map(|(_, channel)| channel.as_fd());
        if self.idle {
            self.idle = false;
            let events = poll_readable(&fds, Some(TEST_TIMEOUT)).expect("two descriptors");
            assert!(events.contains(&true), "no event within {TEST_TIMEOUT:?}: the requests hang");
        } else {
            self.idle = true;
        }
        for (cq, channel) in sides {
            while poll_readable(&[channel.as_fd()], Some(Duration::ZERO)).expect("a descriptor")[0] {
                channel.next_event().expect("it is readable");
                cq.acknowledge(1);
            }
        }
    }

    /// Destroys all objects. Remaining completions must not prevent that.
    fn end(mut self) -> Reply {
        let sum = |count: fn(&Connection) -> u64| self.connections.iter().map(count).sum();
        let ended = Reply::Ended {
            sent: sum(|connection| connection.next_id),
            received: sum(|connection| connection.received),
        };
        let keys_first = self.random.once_in(2);
        for last in [false, true] {
            if keys_first != last {
                self.mrs.iter_mut().for_each(|mr| mr.deregister().expect("nobody is inside"));
            } else {
                self.connections.iter().for_each(|connection| connection.qp.destroy());
            }
        }
        // A receive that the dead peer had taken from the shared queue, at most one, has returned.
        let taken = (0..).take_while(|_| self.srq.post(0, &[]) != Err(Errno::NOMEM)).count() as u64;
        let all = taken + self.shared_waiting;
        assert!((RECEIVES..=RECEIVES + 1).contains(&all), "{all} receives of the shared queue");
        self.srq.destroy().expect("no queue pair is left");
        for (cq, channel) in [&self.send, &self.recv] {
            while poll_readable(&[channel.as_fd()], Some(Duration::ZERO)).expect("a descriptor")[0] {
                channel.next_event().expect("it is readable");
                cq.acknowledge(1);
            }
            cq.destroy().expect("no queue pair is left");
        }
        ended
    }
}
