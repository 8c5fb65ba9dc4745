//! A process of the same user maps everything that the device shares with its peers, and overwrites it with
//! garbage during data traffic. The device may report errors. It must not crash, touch memory that was not
//! registered, or hang. Afterwards it must work.
//!
//! `MILLSTREAM_CORRUPTION_ROUNDS` sets the number of rounds, `MILLSTREAM_SEED` the random seed.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{
    SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, Sge, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD,
    WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, Wc,
};
use millstream_device::{Channel, Cq, Errno, Mr, Srq};
use millstream_quantity::{Qkey, Qpn, Rkey};
use millstream_shm::Mapping;
use serde::{Deserialize, Serialize};

use crate::support::wire::{CHANNEL, FILE, ask, connect_to_owner, exchange_hello};
use crate::support::{
    Adapter, End, GUARD, Kind, Memory, Placement, Process, QpConfig, Random, attributes, connect,
    connect_queue_pair, from_environment, next, pattern, readable, recv_from_parent, send_to_parent,
};

/// Duration of a round's data traffic. The clean-up after it may wait for forged leases of live processes.
const ROUND: Duration = Duration::from_millis(200);

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Command {
    /// Makes all objects. Answers with their addresses.
    Open,
    /// Connects to the process with these addresses.
    Connect(Addresses),
    /// Executes random operations for a while and ignores errors. Answers with the number of completions.
    RunRandom(u64),
    /// Moves data and checks that all of it arrives.
    Transfer,
    /// Destroys all objects.
    Close,
}

/// The addresses of a process's objects, for its peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Addresses {
    numbers: Vec<u32>,
    /// Address, length and key of each region.
    regions: Vec<(u64, u32, u32)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Reply {
    Addresses(Addresses),
    Done,
    /// Number of successful and of failed completions.
    RandomDone(u64, u64),
}

fn send_command(process: &mut Process, command: &Command) {
    process.send_line(&serde_json::to_string(command).expect("plain data"));
}

fn recv_reply(process: &mut Process) -> Reply {
    serde_json::from_str(&process.recv_line_within(Duration::from_secs(120))).expect("an answer")
}

fn addresses(process: &mut Process) -> Addresses {
    send_command(process, &Command::Open);
    let Reply::Addresses(addresses) = recv_reply(process) else { panic!("no addresses") };
    addresses
}

#[test]
fn a_corrupted_arena_causes_errors_only() {
    let seed = from_environment("MILLSTREAM_SEED", 1);
    let mut random = Random::new(seed);
    let mut victim = Process::start("victim");
    let mut totals = [0, 0];
    for round in 0..from_environment("MILLSTREAM_CORRUPTION_ROUNDS", 8) {
        // The peer's own arena is corrupted, too, and the victim reads it. The peer may crash: other
        // processes could be made to write into it.
        let mut peer = Process::start("victim");
        let addresses = [addresses(&mut victim), addresses(&mut peer)];
        let [ours, theirs] = &addresses;
        send_command(&mut victim, &Command::Connect(theirs.clone()));
        send_command(&mut peer, &Command::Connect(ours.clone()));
        assert!(matches!(recv_reply(&mut victim), Reply::Done), "seed {seed}, round {round}");
        let corruptors = [ours, theirs].map(|addresses| {
            let mut corruptor = Process::start("corruptor");
            corruptor.send_line(&format!("{} {}", addresses.numbers[0], random.next()));
            corruptor
        });
        send_command(&mut victim, &Command::RunRandom(random.next()));
        let Reply::RandomDone(good, bad) = recv_reply(&mut victim) else { panic!("no result") };
        totals = [totals[0] + good, totals[1] + bad];
        // In most rounds it also destroys all objects while the corruption continues.
        let mut corruptors = Vec::from(corruptors);
        if random.once_in(4) {
            corruptors.clear();
        }
        send_command(&mut victim, &Command::Close);
        assert!(matches!(recv_reply(&mut victim), Reply::Done), "seed {seed}, round {round}");
    }
    println!("seed {seed}: {} good completions, {} errors", totals[0], totals[1]);
    assert!(totals.iter().all(|&n| n != 0), "both: {totals:?}");
    // New objects are not affected.
    let mut peer = Process::start("victim");
    let addresses = [addresses(&mut victim), addresses(&mut peer)];
    send_command(&mut victim, &Command::Connect(addresses[1].clone()));
    send_command(&mut peer, &Command::Connect(addresses[0].clone()));
    assert!(matches!((recv_reply(&mut victim), recv_reply(&mut peer)), (Reply::Done, Reply::Done)));
    send_command(&mut victim, &Command::Transfer);
    assert!(matches!(recv_reply(&mut victim), Reply::Done));
    send_command(&mut victim, &Command::Close);
    assert!(matches!(recv_reply(&mut victim), Reply::Done));
    assert!(victim.finish().success());
    // The device of this process is not affected either.
    let (mut a, mut b) = (End::new(Placement::SameProcess), End::new(Placement::OtherProcess));
    connect(&mut a, &mut b, &QpConfig::default());
    let (source, target) = (a.hold(&pattern(1, 5000)), b.register(Kind::Anonymous, 5000, 0));
    a.write(1, &[source.all()], (target.addr, target.key));
    assert_eq!(a.sent(1)[0].status, 0);
}

/// In another process: maps what a device shares with its peers, and overwrites it with garbage until killed.
pub(crate) fn corruptor() {
    let line = recv_from_parent().expect("whom, and the seed");
    let mut words = line.split(' ').map(|word| word.parse::<u64>().expect("a number"));
    let (number, seed) = (words.next().expect("whom") as u32, words.next().expect("the seed"));
    let mut random = Random::new(seed);
    let connection = connect_to_owner(number);
    let arena = exchange_hello(&connection);
    let len = millstream_shm::file_len(arena.as_fd()).expect("a file");
    let all = Mapping::new(arena.as_fd(), 0, len, true).expect("room");
    let mut others = Vec::new();
    for slot in 0..8 {
        for (op, request) in [(FILE, [slot, 1]), (FILE, [slot, 3]), (CHANNEL, [slot, 0])] {
            let (_, fds) = ask(&connection, op, &request);
            for fd in fds {
                match millstream_shm::file_len(fd.as_fd()) {
                    Ok(len @ 1..) => others.push(Mapping::new(fd.as_fd(), 0, len, true).expect("room")),
                    // An event descriptor: sometimes its counter is filled.
                    _ if random.once_in(4) => fill(fd.as_fd()),
                    _ => {}
                }
            }
        }
    }
    let pids = [std::process::id(), connection.peer().pid];
    loop {
        let used = used(arena.as_fd(), len);
        let whole: usize = used.iter().map(|(start, end)| end - start).sum();
        let place = |random: &mut Random| {
            let mut at = random.below(whole as u64 / 4) as usize * 4;
            for (start, end) in &used {
                if at < end - start {
                    return start + at;
                }
                at -= end - start;
            }
            unreachable!("inside one of them")
        };
        for _ in 0..2000 {
            let at = place(&mut random);
            let from = place(&mut random);
            let words = if random.once_in(4) { 1 + random.below(32) as usize } else { 1 };
            for i in (0..words).filter(|i| at + i * 4 + 4 <= len && from + i * 4 + 4 <= len) {
                let word = all.word32(at + i * 4);
                let old = word.load(Ordering::Relaxed);
                let new = match random.below(10) {
                    0 => 0,
                    1 => u32::MAX,
                    2 => random.below(4096) as u32,
                    3 => random.next() as u32,
                    4 => old.wrapping_add(1),
                    5 => old.wrapping_sub(1),
                    6 => old ^ 1 << random.below(32),
                    // A lease that a live process seems to hold.
                    7 if random.once_in(200) => pids[random.below(2) as usize],
                    _ => all.word32(from + i * 4).load(Ordering::Relaxed),
                };
                word.store(new, Ordering::Relaxed);
            }
        }
        for other in &others {
            let at = random.below(other.len() as u64 / 4) as usize * 4;
            other.word32(at).store(random.next() as u32, Ordering::Relaxed);
        }
        std::thread::yield_now();
    }
}

fn fill(event: BorrowedFd<'_>) {
    let most = u64::MAX - 1;
    // SAFETY: writes eight bytes from a local. A write that would exceed the maximum would block, so only an
    // empty counter is filled.
    unsafe {
        let mut polled = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        if libc::poll(&raw mut polled, 1, 0) == 0 {
            libc::write(event.as_raw_fd(), (&raw const most).cast(), 8);
        }
    }
}

/// The ranges of a file that have pages.
fn used(file: BorrowedFd<'_>, len: usize) -> Vec<(usize, usize)> {
    let mut parts = Vec::new();
    let mut at = 0;
    loop {
        // SAFETY: plain system calls on a descriptor.
        let (start, end) = unsafe {
            let start = libc::lseek(file.as_raw_fd(), at, libc::SEEK_DATA);
            if start < 0 {
                return parts;
            }
            (start, libc::lseek(file.as_raw_fd(), start, libc::SEEK_HOLE))
        };
        parts.push((start as usize, (end as usize).min(len)));
        at = end;
    }
}

/// In another process: executes the parent's commands.
pub(crate) fn victim() {
    let adapter = Adapter::open();
    // This memory is not registered.
    let secret = pattern(99, 4 << 20);
    let memory = [
        Memory::new(Kind::Anonymous, 1 << 20, 0),
        Memory::new(Kind::Data, 3000, 0),
        Memory::new(Kind::Anonymous, 5000, 100),
    ];
    let guard = [0x5a; GUARD];
    let guards = memory.each_ref().map(|memory| [-(GUARD as isize), memory.len as isize]);
    for (memory, places) in memory.iter().zip(&guards) {
        places.iter().for_each(|at| memory.store(*at, &guard));
    }
    let mut objects = None;
    while let Some(line) = recv_from_parent() {
        let answer = match serde_json::from_str(&line).expect("a command") {
            Command::Open => {
                let made = Objects::new(&adapter, &memory);
                let addresses = made.addresses();
                objects = Some(made);
                Reply::Addresses(addresses)
            }
            Command::Connect(peer) => {
                objects.as_mut().expect("open").connect(peer);
                Reply::Done
            }
            Command::RunRandom(seed) => objects.as_mut().expect("open").run_random(seed),
            Command::Transfer => {
                objects.as_mut().expect("open").transfer();
                Reply::Done
            }
            Command::Close => {
                objects.take().expect("open").close();
                Reply::Done
            }
        };
        assert!(secret == pattern(99, secret.len()), "memory that was not registered");
        for (memory, places) in memory.iter().zip(&guards) {
            for at in places {
                assert_eq!(memory.load(*at, GUARD), guard, "memory beside what was registered");
            }
        }
        send_to_parent(&serde_json::to_string(&answer).expect("plain data"));
    }
}

/// Number of queue pairs that are connected to the peer. The queue pairs after them are connected within this
/// process.
const REMOTE: usize = 4;
const QKEY: u32 = 7;

struct Objects<'a> {
    adapter: &'a Adapter,
    memory: &'a [Memory],
    mrs: Vec<Mr>,
    channel: Arc<Channel>,
    cqs: [Arc<Cq>; 2],
    srq: Arc<Srq>,
    qps: Vec<Arc<Qp>>,
    peer: Option<Addresses>,
}

impl<'a> Objects<'a> {
    fn new(adapter: &'a Adapter, memory: &'a [Memory]) -> Self {
        let channel = Channel::new(&adapter.context).expect("a channel");
        // SAFETY: a plain system call on an open descriptor.
        assert_eq!(unsafe { libc::fcntl(channel.as_fd().as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        let cqs = [(); 2].map(|()| Cq::new(&adapter.context, 256, Some(channel.clone())).expect("a queue"));
        let srq = Srq::new(&adapter.pd, 64, 1).expect("a shared queue");
        let mut objects =
            Self { adapter, memory, mrs: Vec::new(), channel, cqs, srq, qps: Vec::new(), peer: None };
        objects.mrs = memory.iter().map(|memory| objects.register(memory)).collect();
        objects.qps = (0..REMOTE + 4).map(|i| objects.qp(i)).collect();
        objects.connect_home();
        objects
    }

    fn register(&self, memory: &Memory) -> Mr {
        let start = memory.start as u64;
        Mr::register(&self.adapter.pd, start, memory.len as u64, start, 15).expect("registered")
    }

    /// Makes queue pair `i`. The second and the sixth use the shared receive queue; the fourth and the last
    /// are for datagrams.
    fn qp(&self, i: usize) -> Arc<Qp> {
        let kind = if i % 4 == 3 { QpType::Ud } else { QpType::Rc };
        let receives = if i % 4 == 1 { RecvSource::Shared(self.srq.clone()) } else { RecvSource::Own };
        let capacity = millstream_device::qp::QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let [send, recv] = &self.cqs;
        Qp::new(&self.adapter.pd, send, recv, capacity, false, kind, receives).expect("a queue pair")
    }

    fn connect_home(&self) {
        let home = &self.qps[REMOTE..];
        // The first is connected to itself, the second and the third to each other.
        for (from, to) in [(0, 0), (1, 2), (2, 1), (3, 3)] {
            ready(&home[from], home[to].qpn().get());
        }
    }

    fn addresses(&self) -> Addresses {
        let region = |(memory, mr): (&Memory, &Mr)| (memory.start as u64, memory.len as u32, mr.key());
        Addresses {
            numbers: self.qps[..REMOTE].iter().map(|qp| qp.qpn().get()).collect(),
            regions: self.memory.iter().zip(&self.mrs).map(region).collect(),
        }
    }

    fn connect(&mut self, peer: Addresses) {
        for (qp, number) in self.qps.iter().zip(&peer.numbers) {
            ready(qp, *number);
            (0..16).for_each(|wr_id| _ = qp.post_recv(wr_id, &[]));
        }
        self.peer = Some(peer);
    }

    fn element(&self, random: &mut Random, most: u64) -> Sge {
        let i = random.below(self.mrs.len() as u64) as usize;
        let len = random.below(most.min(self.memory[i].len as u64) + 1);
        let at = random.below(self.memory[i].len as u64 - len + 1);
        Sge { addr: self.memory[i].start as u64 + at, length: len as u32, lkey: self.mrs[i].key() }
    }

    fn run_random(&mut self, seed: u64) -> Reply {
        let mut random = Random::new(seed);
        let peer = self.peer.clone().expect("connected");
        let (mut good, mut bad) = (0, 0);
        let mut posted = HashSet::new();
        let end = Instant::now() + ROUND;
        for wr_id in 100u64.. {
            if Instant::now() > end {
                break;
            }
            let i = random.below(self.qps.len() as u64) as usize;
            let remote = i < REMOTE;
            let own = self.addresses();
            let theirs = if remote { &peer } else { &own };
            let (start, len, key) = theirs.regions[random.below(theirs.regions.len() as u64) as usize];
            let opcode = [
                WR_RDMA_WRITE,
                WR_RDMA_WRITE_WITH_IMM,
                WR_SEND,
                WR_SEND_WITH_IMM,
                WR_RDMA_READ,
                WR_ATOMIC_CMP_AND_SWP,
                WR_ATOMIC_FETCH_AND_ADD,
            ][random.below(7) as usize];
            let mut sge = self.element(&mut random, 4096);
            if opcode >= WR_ATOMIC_CMP_AND_SWP {
                sge = Sge { addr: self.memory[0].start as u64, length: 8, lkey: self.mrs[0].key() };
            }
            let inline = sge.length <= 64 && opcode < WR_RDMA_READ && random.once_in(2);
            let room = u64::from(len).saturating_sub(u64::from(sge.length));
            let to = UdDestination {
                on_this_host: true,
                qpn: if remote { Qpn::new(peer.numbers[3]) } else { self.qps[REMOTE + 3].qpn() },
                qkey: Qkey::new(QKEY),
                grh: [0; 40],
            };
            let wr = SendWr {
                wr_id,
                opcode,
                flags: SEND_SIGNALED | if inline { SEND_INLINE } else { SEND_SOLICITED },
                sges: &[sge],
                remote_addr: start + random.below(room + 1) / 8 * 8,
                rkey: Rkey::new(key),
                to: Some(to),
                ..SendWr::default()
            };
            if self.qps[i].post_send(&wr) == Ok(()) {
                posted.insert(wr_id);
            }
            // Receives in all queues. A full queue reports an error.
            for qp in &self.qps {
                let _ =
                    qp.post_recv(wr_id, &[self.element(&mut random, 4096), self.element(&mut random, 4096)]);
            }
            let _ = self.srq.post(wr_id, &[self.element(&mut random, 4096)]);
            if random.once_in(16) {
                self.cqs.iter().for_each(|cq| cq.arm(random.once_in(2)));
            }
            if random.once_in(50) {
                let other = random.below(self.mrs.len() as u64) as usize;
                // The forged state may claim that a peer's operation is in flight, for up to two seconds.
                let _ = self.mrs[other].deregister();
                self.mrs[other] = self.register(&self.memory[other]);
            }
            let [of_sends, of_receives] = self.cqs.each_ref().map(|cq| {
                let mut out = [Wc::default(); 16];
                // An overrun counts as an error.
                let n = cq.poll(&mut out).unwrap_or(0);
                Vec::from(&out[..n])
            });
            for wc in of_sends.iter().chain(&of_receives) {
                if wc.status == 0 { good += 1 } else { bad += 1 }
            }
            for wc in of_sends {
                assert!(posted.remove(&wc.wr_id), "completed without having been posted, or twice: {wc:?}");
            }
            for wc in of_receives {
                assert!(
                    wc.wr_id <= wr_id && self.qps.iter().any(|qp| qp.qpn() == Qpn::new(wc.qp_num)),
                    "{wc:?}"
                );
            }
            if i >= REMOTE && self.qps[i].state() == QpState::Err {
                self.begin_again();
            }
        }
        while readable(&*self.channel, Duration::ZERO) {
            if let Ok(cq) = self.channel.next_event() {
                cq.acknowledge(1);
            }
            if random.once_in(1000) {
                // Forged completions can be endless.
                break;
            }
        }
        Reply::RandomDone(good, bad)
    }

    /// Writes to each region of the peer and of this process, and reads the data back.
    fn transfer(&mut self) {
        let remote = self.peer.clone().expect("connected");
        let home = self.addresses();
        for (qp, addresses) in [(0, &remote), (REMOTE, &home)] {
            for &(start, len, key) in &addresses.regions[1..] {
                let bytes = pattern(u64::from(key), len as usize / 2);
                let local = |at: usize| Sge {
                    addr: self.memory[0].start as u64 + at as u64,
                    length: bytes.len() as u32,
                    lkey: self.mrs[0].key(),
                };
                self.memory[0].store(0, &bytes);
                for (opcode, at) in [(WR_RDMA_WRITE, 0), (WR_RDMA_READ, 8192)] {
                    let sges = [local(at)];
                    let flags = SEND_SIGNALED;
                    let wr = SendWr {
                        opcode,
                        flags,
                        sges: &sges,
                        remote_addr: start,
                        rkey: Rkey::new(key),
                        ..SendWr::default()
                    };
                    self.qps[qp].post_send(&wr).expect("room");
                    assert_eq!(next(&self.cqs[0]).status, 0);
                }
                assert!(self.memory[0].load(8192, bytes.len()) == bytes);
            }
        }
    }

    /// Replaces the failed queue pairs within this process.
    fn begin_again(&mut self) {
        self.qps.drain(REMOTE..).for_each(|qp| qp.destroy());
        self.qps.extend((REMOTE..REMOTE + 4).map(|i| self.qp(i)).collect::<Vec<_>>());
        self.connect_home();
    }

    fn close(mut self) {
        self.qps.iter().for_each(|qp| qp.destroy());
        self.srq.destroy().expect("no queue pair is left");
        self.cqs.iter().for_each(|cq| cq.destroy().expect("no queue pair is left"));
        for mr in &mut self.mrs {
            // No queue pair is left that could have an operation in flight.
            assert_ne!(mr.deregister(), Err(Errno::BUSY));
        }
    }
}

fn ready(qp: &Qp, dest: u32) {
    if qp.kind() == QpType::Rc {
        return connect_queue_pair(
            qp,
            dest,
            &QpConfig { timeout: 8, retry_cnt: 1, rnr_retry: 1, ..QpConfig::default() },
        );
    }
    for (state, needs) in [
        (QpState::Init, attr::PKEY_INDEX | attr::PORT | attr::QKEY),
        (QpState::Rtr, 0),
        (QpState::Rts, attr::SQ_PSN),
    ] {
        let all = QpAttr { qkey: Qkey::new(QKEY), ..attributes(&QpConfig::default(), state, dest) };
        qp.modify(&all, attr::STATE | needs).expect("the usual way");
    }
}
