//! Operations on a device and against it, decoded from bytes. A fuzzer varies the bytes (`fuzz/`); a test
//! replays the seeds.
//!
//! There are two processes, each with a device. The player posts requests of any form. It stores to its own
//! arena and to its peer's, as any process of the user can. It sends any message to its own device's
//! socket. The peer only provides the targets of requests. For any bytes, both devices must survive, and
//! no memory outside registered regions may change.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millstream_device::qp::state::{AddressVector, QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{Sge, Wc};
use millstream_device::{Channel, Context, Cq, Mr, Pd, Srq};
use millstream_quantity::{Qkey, Qpn, Rkey, Srqn};
use millstream_shm::Mapping;
use millstream_shm::socket::Connection;

/// Version of the messages and of the arena's layout, as in a device's hello.
pub(crate) const VERSION: u32 = u32::from_le_bytes(*b"MILL") ^ u32::from_le_bytes(*b"ARNB") ^ 6;
/// Bytes of the registered memory, and of the guard on each side.
const LEN: usize = 16 << 10;
const GUARD: usize = 4096;
const PAGE: usize = 4096;
const UNTOUCHED: u8 = 0x5a;
const QKEY: u32 = 7;
/// All access rights of peers.
const ACCESS: u32 = 15;

/// The queue pairs of each side: with a receive queue, with a shared receive queue, for datagrams.
const KINDS: [(QpType, bool); 3] = [(QpType::Rc, false), (QpType::Rc, true), (QpType::Ud, false)];

/// The objects of one side in one run.
struct Objects {
    cq: Arc<Cq>,
    srq: Arc<Srq>,
    qps: Vec<Arc<Qp>>,
    mr: Mr,
    // Dropped last: it is registered until then.
    memory: Vec<u8>,
}

impl Objects {
    fn new(context: &Arc<Context>, pd: &Arc<Pd>) -> Self {
        let mut memory = vec![UNTOUCHED; LEN + 2 * GUARD];
        // Guards that receive it have changed.
        memory[GUARD..][..LEN].fill(!UNTOUCHED);
        let start = memory[GUARD..].as_mut_ptr() as u64;
        let mr = Mr::register(pd, start, LEN as u64, start, ACCESS).expect("registered");
        let channel = Channel::new(context).expect("a channel");
        let cq = Cq::new(context, 32, Some(channel)).expect("a queue");
        let srq = Srq::new(pd, 8, 1).expect("a shared queue");
        let qps = KINDS.map(|(kind, shared)| {
            let receives = if shared { RecvSource::Shared(srq.clone()) } else { RecvSource::Own };
            let capacity = QpCap {
                max_send_wr: 16,
                max_recv_wr: 8,
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline_data: 64,
            };
            Qp::new(pd, &cq, &cq, capacity, false, kind, receives).expect("a queue pair")
        });
        Self { cq, srq, qps: qps.into(), mr, memory }
    }

    fn start(&self) -> u64 {
        self.memory[GUARD..].as_ptr() as u64
    }

    fn connect(&self, numbers: &[u32]) {
        for (qp, dest) in self.qps.iter().zip(numbers) {
            connect(qp, *dest);
        }
        for i in 0..4 {
            let sges = [Sge { addr: self.start() + 1024 * i, length: 1024, lkey: self.mr.key() }];
            let _ = self.srq.post(i, &sges);
            let _ = self.qps[0].post_recv(i, &sges);
            let _ = self.qps[2].post_recv(i, &sges);
        }
    }

    fn addresses(&self) -> String {
        let numbers: Vec<String> = self.qps.iter().map(|qp| qp.qpn().get().to_string()).collect();
        format!("{} {} {}", numbers.join(" "), self.mr.key(), self.start())
    }

    /// Checks that no memory beside the registered part has changed.
    fn check(&self) {
        let (before, rest) = self.memory.split_at(GUARD);
        let around = before.iter().chain(&rest[LEN..]);
        assert!(around.into_iter().all(|byte| *byte == UNTOUCHED), "memory that was not registered");
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        self.qps.drain(..).for_each(|qp| qp.destroy());
    }
}

fn connect(qp: &Qp, dest: u32) {
    let ud = qp.kind() == QpType::Ud;
    let rtr = attr::AV | attr::PATH_MTU | attr::DEST_QPN | attr::RQ_PSN;
    let rts = attr::TIMEOUT | attr::RETRY_CNT | attr::RNR_RETRY | attr::MAX_QP_RD_ATOMIC;
    for (state, needs) in [
        (QpState::Init, attr::PKEY_INDEX | attr::PORT | if ud { attr::QKEY } else { attr::ACCESS_FLAGS }),
        (QpState::Rtr, if ud { 0 } else { rtr | attr::MAX_DEST_RD_ATOMIC | attr::MIN_RNR_TIMER }),
        (QpState::Rts, attr::SQ_PSN | if ud { 0 } else { rts }),
    ] {
        let dgid = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let attributes = QpAttr {
            state,
            access: ACCESS,
            port: 1,
            path_mtu: 5,
            dest_qpn: Qpn::new(dest),
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 1,
            retry_cnt: 1,
            rnr_retry: 1,
            qkey: Qkey::new(QKEY),
            path: AddressVector { is_global: true, dgid, port: 1, ..AddressVector::default() },
            ..QpAttr::default()
        };
        // The transition may fail, because the run may have corrupted the arena.
        let _ = qp.modify(&attributes, attr::STATE | needs);
    }
}

fn numbers(line: &str) -> Vec<u64> {
    line.split(' ').map(|word| word.parse().expect("a number")).collect()
}

/// The peer: makes new objects for each run, until its input ends.
pub(crate) fn peer(send_line: impl Fn(&str), receive_line: impl Fn() -> Option<String>) {
    let context = Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    while let Some(line) = receive_line() {
        let theirs: Vec<u32> = numbers(&line).iter().map(|n| *n as u32).collect();
        let objects = Objects::new(&context, &pd);
        objects.connect(&theirs);
        send_line(&objects.addresses());
        receive_line();
        objects.check();
        drop(objects);
        send_line("done");
    }
}

/// The player's state that lasts over several runs.
pub(crate) struct FuzzSession<T> {
    context: Arc<Context>,
    pd: Arc<Pd>,
    /// Sends a line to the peer and returns its answer.
    request: T,
    own: Option<MappedArena>,
    peers: Option<MappedArena>,
}

/// A device's shared memory, as any process of the user can map it.
struct MappedArena {
    arena: File,
    mapping: Mapping,
    /// Its pages at the last search for words in use.
    pages: BTreeMap<usize, [u8; PAGE]>,
}

/// Connects to the device that owns this queue pair.
fn connect_to_owner(qpn: u32) -> Connection {
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    let name = format!("millstream/{user}/{:03x}", qpn >> 12);
    Connection::open(&name, Duration::from_secs(5)).expect("somebody listens")
}

impl MappedArena {
    fn new(qpn: u32) -> Self {
        let connection = connect_to_owner(qpn);
        let hello = [1u32, VERSION, std::process::id(), 1, 0, 0].map(u32::to_ne_bytes).concat();
        connection.send(&hello, &[]).expect("the device listens");
        let (_, fds) = connection.receive(&mut [0; 64]).expect("the device answers");
        let arena = File::from(fds.into_iter().next().expect("its arena"));
        let len = millstream_shm::file_len(arena.as_fd()).expect("a file");
        let mapping = Mapping::new(arena.as_fd(), 0, len, true).expect("room");
        Self { arena, mapping, pages: BTreeMap::new() }
    }

    /// Offsets of the words in use: not zero, and on a page that changed since the last call.
    ///
    /// Objects of earlier runs leave words everywhere, without effect. The kernel and libc find the pages:
    /// instrumented code takes a hundred times as long for each word.
    fn words(&mut self) -> Vec<usize> {
        let (mut found, mut at) = (Vec::new(), 0);
        loop {
            // SAFETY: plain system calls on a descriptor.
            let (start, end) = unsafe {
                let start = libc::lseek(self.arena.as_raw_fd(), at, libc::SEEK_DATA);
                if start < 0 {
                    return found;
                }
                (start, libc::lseek(self.arena.as_raw_fd(), start, libc::SEEK_HOLE))
            };
            for page in (start as usize..(end as usize).min(self.mapping.len())).step_by(PAGE) {
                let mut now = [0; PAGE];
                self.arena.read_exact_at(&mut now, page as u64).expect("a page of the arena");
                let last = self.pages.entry(page).or_insert([0; PAGE]);
                if *last != now {
                    let used = now.chunks_exact(4).enumerate().filter(|(_, word)| *word != [0; 4]);
                    found.extend(used.map(|(i, _)| page + 4 * i));
                    *last = now;
                }
            }
            at = end;
        }
    }

    /// The part of a key's entry that says which memory is the region's (`MrEntry`): from the file to the offset in the file that
    /// it may be promoted to.
    fn place_of_region(&self, words: &[usize], key: u32, start: u64) -> Option<Range<usize>> {
        const FILE: usize = 16;
        const START: usize = 24;
        const END: usize = 112;
        let is_entry = |at: usize| {
            let is_of_key = self.mapping.word32(at).load(Ordering::Relaxed) == key;
            is_of_key && self.mapping.word64(at + START).load(Ordering::Relaxed) == start
        };
        let room = self.mapping.len() - END;
        let at = words.iter().copied().find(|at| at % 8 == 0 && *at <= room && is_entry(*at))?;
        Some(at + FILE..at + END)
    }

    /// Stores one of the interesting values, except in `kept`.
    fn store(&self, words: &[usize], kept: &Range<usize>, bytes: &mut Bytes<'_>) {
        if words.is_empty() {
            return;
        }
        // The words behind the known ones, too.
        let at = words[bytes.short() as usize % words.len()] + 4 * (bytes.byte() as usize % 4);
        let other = words[bytes.byte() as usize % words.len()];
        if at + 4 > self.mapping.len() || kept.contains(&at) {
            return;
        }
        let word = self.mapping.word32(at);
        let old = word.load(Ordering::Relaxed);
        let new = match bytes.byte() % 8 {
            0 => 0,
            1 => u32::MAX,
            2 => bytes.byte().into(),
            3 => bytes.word(),
            4 => old.wrapping_add(1),
            5 => old.wrapping_sub(1),
            6 => old ^ 1 << (bytes.byte() % 32),
            _ => self.mapping.word32(other).load(Ordering::Relaxed),
        };
        // A forged lease of a live process only makes others wait for two seconds.
        if new != std::process::id() {
            word.store(new, Ordering::Relaxed);
        }
    }
}

/// A reader of the input's bytes, which returns zeroes after the end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    fn short(&mut self) -> u16 {
        u16::from(self.byte()) | u16::from(self.byte()) << 8
    }

    fn word(&mut self) -> u32 {
        u32::from(self.short()) | u32::from(self.short()) << 16
    }
}

impl<T: FnMut(&str) -> String> FuzzSession<T> {
    /// `request` sends a line to the peer and returns the peer's answer.
    pub(crate) fn new(request: T) -> Self {
        let context = Context::open().expect("the device opens");
        Self { pd: Pd::new(&context), context, request, own: None, peers: None }
    }

    /// Executes the operations that the bytes encode.
    pub(crate) fn run(&mut self, bytes: &[u8]) {
        let objects = Objects::new(&self.context, &self.pd);
        let home = Objects::new(&self.context, &self.pd);
        let own: Vec<String> = objects.qps.iter().map(|qp| qp.qpn().get().to_string()).collect();
        let addresses = numbers(&(self.request)(&own.join(" ")));
        let (theirs, &[key, start]) = addresses.split_at(KINDS.len()) else {
            panic!("{addresses:?} are no addresses")
        };
        let theirs: Vec<u32> = theirs.iter().map(|n| *n as u32).collect();
        objects.connect(&theirs);
        // One queue pair connected to itself, and two of different types connected to each other: both errors
        // are intended.
        let at_home: Vec<u32> = home.qps.iter().map(|qp| qp.qpn().get()).collect();
        home.connect(&at_home);
        let here = self.own.get_or_insert_with(|| MappedArena::new(at_home[0]));
        let there = self.peers.get_or_insert_with(|| MappedArena::new(theirs[0]));
        // The player's device would take a forged region of the peer for the registered one, and write to other memory with
        // the player's rights (docs/faults.md, "Not covered").
        let words = [here.words(), there.words()];
        let kept =
            there.place_of_region(&words[1], key as u32, start).expect("the peer has published the key");
        let regions = [(key as u32, start), (home.mr.key(), home.start())];
        let mut bytes = Bytes(bytes);
        let mut out = [Wc::default(); 8];
        let mut line = None;
        while !bytes.0.is_empty() {
            let side = usize::from(bytes.byte() % 2);
            let (from, receivers) = [(&objects, &theirs), (&home, &at_home)][side];
            match bytes.byte() % 12 {
                0..=2 => there.store(&words[1], &kept, &mut bytes),
                3 => here.store(&words[0], &(0..0), &mut bytes),
                4..=7 => send(from, receivers, &regions, &mut bytes),
                8 => {
                    let length = bytes.short().into();
                    let sges = [Sge { addr: from.start(), length, lkey: from.mr.key() }];
                    let qp = usize::from(bytes.byte()) % KINDS.len();
                    let _ = from.qps[qp].post_recv(9, &sges);
                    let _ = from.srq.post(9, &sges);
                }
                9 => drop(from.cq.poll(&mut out)),
                10 => {
                    let connection = line.take().unwrap_or_else(|| connect_to_owner(at_home[0]));
                    // The device closes a connection after an invalid message.
                    line = send_message(&connection, &at_home, &mut bytes).then_some(connection);
                }
                _ => match bytes.byte() % 4 {
                    0 => drop(from.cq.resize(bytes.byte().into())),
                    1 => from.cq.arm(bytes.byte() % 2 == 0),
                    2 => drop(from.srq.set_limit(bytes.byte().into())),
                    _ => {
                        let qp = usize::from(bytes.byte()) % KINDS.len();
                        let state =
                            [QpState::Reset, QpState::Err, QpState::Sqd][usize::from(bytes.byte()) % 3];
                        let _ = from.qps[qp].modify(&QpAttr { state, ..QpAttr::default() }, attr::STATE);
                    }
                },
            }
        }
        for side in [&objects, &home] {
            let _ = side.cq.poll(&mut out);
            side.check();
        }
        drop((objects, home));
        assert_eq!((self.request)("over"), "done");
    }
}

/// Posts a request of any form.
fn send(from: &Objects, receivers: &[u32], regions: &[(u32, u64)], bytes: &mut Bytes<'_>) {
    let i = usize::from(bytes.byte()) % KINDS.len();
    let (opcode, flags) = (u32::from(bytes.byte()) % 20, u32::from(bytes.byte()));
    let inline = flags & 8 != 0;
    let piece = |bytes: &mut Bytes<'_>| {
        // The address of inline data must be readable memory: the caller of the verb vouches for it.
        let (skip, length) = (bytes.short() % LEN as u16, u32::from(bytes.short()));
        let length = if inline { length % 256 } else { length };
        let lkey = from.mr.key() ^ u32::from(!inline && bytes.byte() == 1);
        Sge { addr: from.start() + u64::from(skip), length, lkey }
    };
    let sges = [piece(bytes), piece(bytes)];
    let count = usize::from(bytes.byte()) % 3;
    let (key, start) = regions[usize::from(bytes.byte()) % 2];
    let to = UdDestination {
        on_this_host: true,
        qpn: Qpn::new(receivers[2]),
        qkey: Qkey::new(QKEY),
        grh: [0x60; 40],
    };
    let wr = SendWr {
        wr_id: 1,
        opcode,
        flags,
        imm: bytes.word(),
        sges: &sges[..count],
        remote_addr: start.wrapping_add_signed(i64::from(bytes.short() as i16)),
        rkey: Rkey::new(key ^ u32::from(bytes.byte() == 1)),
        compare_add: 1,
        swap: 2,
        to: (i == 2).then_some(to),
        bind: None,
        remote_srqn: Srqn::new(bytes.short().into()),
    };
    let _ = from.qps[i].post_send(&wr);
}

/// Sends any message to the device's socket; false if the device has closed the connection.
fn send_message(connection: &Connection, numbers: &[u32], bytes: &mut Bytes<'_>) -> bool {
    let mut words = [u32::from(bytes.byte() % 16), 0, 0, 0, 0, 0];
    for word in &mut words[1..4] {
        *word = match bytes.byte() % 4 {
            0 => numbers[usize::from(bytes.byte()) % numbers.len()],
            1 => bytes.byte().into(),
            2 => bytes.word(),
            _ => 0,
        };
    }
    let message = words.map(u32::to_ne_bytes).concat();
    let len = if bytes.byte() == 1 { usize::from(bytes.byte()) % message.len() } else { message.len() };
    // Answers are not read. The device closes the connection when the socket is full.
    connection.send(&message[..len], &[]).is_ok()
}
