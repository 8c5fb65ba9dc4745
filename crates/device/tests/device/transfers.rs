//! Transfers from and to every type of memory: all bytes arrive, and no others change.

use millstream_device::MAX_INLINE;
use millstream_device::types::{
    SEND_INLINE, WC_OP_ATOMIC_WRITE, WC_OP_COMP_SWAP, WC_OP_FETCH_ADD, WC_OP_RDMA_READ, WC_OP_RDMA_WRITE,
    WC_OP_RECV, WC_OP_RECV_RDMA_WITH_IMM, WC_OP_SEND, WC_REM_INV_REQ_ERR, WR_ATOMIC_CMP_AND_SWP,
    WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND,
};
use millstream_shm::PAGE;

use crate::support::runs_with_moved_pages;
use crate::support::{
    Command, Completion, CqKind, End, GUARD, Kind, Placement, QpConfig, Region, Reply, Request, pair,
    pattern, request,
};

/// A region and its expected contents, guard bytes included.
struct ExpectedMemory {
    region: Region,
    bytes: Vec<u8>,
}

impl ExpectedMemory {
    fn new(end: &mut End, region: Region, seed: u64) -> Self {
        let bytes = pattern(seed, region.len + 2 * GUARD);
        end.store(&region, -(GUARD as isize), &bytes);
        Self { region, bytes }
    }

    fn part(&mut self, at: usize, len: usize) -> &mut [u8] {
        &mut self.bytes[GUARD + at..GUARD + at + len]
    }

    fn check(&self, end: &mut End, what: &str) {
        let found = end.load(&self.region, -(GUARD as isize), self.bytes.len());
        if let Some(at) = (0..found.len()).find(|&i| found[i] != self.bytes[i]) {
            panic!("{what}: byte {} differs, of {}", at as isize - GUARD as isize, self.region.len);
        }
    }
}

/// Bytes of each region here: three whole pages, and parts of pages at both ends.
const LEN: usize = 3 * PAGE + 1000;
/// Offset of the regions in their first page.
const SKEW: usize = 1237;
/// Start of the first whole page.
const INNER: usize = PAGE - SKEW;

/// Offsets and lengths: small ones, odd ones, and all ways to lie across mappable and other pages.
const RANGES: [(usize, usize); 24] = [
    (0, 0),
    (0, 1),
    (3, 7),
    (16, 8),
    (29, 8),
    (41, 9),
    (77, 63),
    (200, 64),
    (301, 65),
    (INNER - 1, 1),
    (INNER - 5, 9),
    (INNER - 8, 8),
    (INNER, 8),
    (INNER + 1, 7),
    (INNER, PAGE),
    (INNER + 11, PAGE - 1),
    (INNER + 100, PAGE + 1),
    (INNER - 100, 2 * PAGE),
    (INNER + PAGE, LEN - INNER - PAGE),
    (LEN - 1, 1),
    (LEN - 9, 9),
    (LEN, 0),
    (1, LEN - 2),
    (0, LEN),
];

fn writes_then_reads(a: &mut End, b: &mut End, kind: Kind) {
    let region = b.register(kind, LEN, SKEW);
    let mut far = ExpectedMemory::new(b, region, 1);
    for (i, (at, len)) in RANGES.into_iter().enumerate() {
        let data = pattern(100 + i as u64, len);
        far.part(at, len).copy_from_slice(&data);
        let source = a.register(Kind::Anonymous, len.max(1), i * 7 % 64);
        a.store(&source, 0, &data);
        a.write(i as u64, &[source.part(0, len)], (region.addr + at as u64, region.key));
        assert_eq!(a.sent(1), [Completion::ok(i as u64, WC_OP_RDMA_WRITE, 0)]);
        far.check(b, &format!("{kind:?} after {len} bytes at {at}"));
        a.deregister(&source);
    }
    let local = a.register(Kind::Anonymous, LEN + 100, 3);
    for (i, (at, len)) in RANGES.into_iter().enumerate() {
        let mut near = ExpectedMemory::new(a, local, 200 + i as u64);
        let offset = i * 5 % 64;
        near.part(offset, len).copy_from_slice(far.part(at, len));
        a.read(i as u64, &[local.part(offset, len)], (region.addr + at as u64, region.key));
        assert_eq!(a.sent(1), [Completion::ok(i as u64, WC_OP_RDMA_READ, len)]);
        near.check(a, &format!("READ of {len} bytes at {at} of {kind:?}"));
    }
    far.check(b, "READs change nothing");
    a.deregister(&local);
    b.deregister(&region);
    far.check(b, "deregistration keeps the contents");
}

#[test]
fn writes_and_reads_reach_every_kind_of_memory() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        for kind in Kind::WRITABLE {
            writes_then_reads(&mut a, &mut b, kind);
        }
        if place == Placement::OtherProcess {
            writes_then_reads(&mut a, &mut b, Kind::MainStack);
        }
    }
}

#[test]
fn whole_pages_of_plain_memory_can_be_mapped() {
    if runs_with_moved_pages("transfers::whole_pages_of_plain_memory_can_be_mapped") {
        return;
    }
    let (mut a, _b) = pair(Placement::SameProcess, &QpConfig::default());
    for kind in Kind::WRITABLE {
        let expected = match kind {
            Kind::Anonymous | Kind::Malloc | Kind::Brk | Kind::ThreadStack | Kind::Bss => 2 * PAGE,
            Kind::Dmabuf | Kind::NoNewWriters => LEN,
            // Before Linux 6.11 the file is found later.
            Kind::MappedMemfd if millstream_shm::maps::vma_at(0).is_ok() => LEN,
            _ => 0,
        };
        // Only whole pages can be mapped: three pages and 1,000 bytes that start 1,237 bytes into a page.
        assert_eq!(a.register(kind, LEN, SKEW).mapped, expected as u64, "{kind:?}");
    }
}

#[test]
fn write_sealed_memory_is_written_through_the_kernel() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let region = b.register(Kind::NoNewWriters, LEN, SKEW);
    b.forbid_new_writers(&region);
    let mut far = ExpectedMemory::new(&mut b, region, 1);
    let source = a.hold(&pattern(2, LEN));
    a.write(1, &[source.all()], (region.addr, region.key));
    assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    far.part(0, LEN).copy_from_slice(&pattern(2, LEN));
    far.check(&mut b, "WRITE");
}

/// Cuts `len` bytes into `n` pieces, some of them empty.
fn cut(len: usize, n: usize, seed: u64) -> Vec<usize> {
    let mut borders: Vec<usize> =
        pattern(seed, n - 1).iter().map(|b| usize::from(*b) * (len + 1) / 256).collect();
    borders.extend([0, len]);
    borders.sort_unstable();
    borders.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Elements for pieces of these lengths, spread over a region in reverse order with gaps between.
fn spread(region: &Region, pieces: &[usize]) -> Vec<(u64, u32, u32)> {
    let mut at = region.len;
    pieces
        .iter()
        .map(|len| {
            at -= len + 3;
            region.part(at, *len)
        })
        .collect()
}

fn gathered(end: &mut End, region: &Region, sges: &[(u64, u32, u32)]) -> Vec<u8> {
    sges.iter()
        .flat_map(|(addr, len, _)| end.load(region, (addr - region.addr) as isize, *len as usize))
        .collect()
}

#[test]
fn messages_are_gathered_and_scattered() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let source = a.register(Kind::Anonymous, 4 * PAGE, 5);
        let target = b.register(Kind::Anonymous, 4 * PAGE, 9);
        for seed in 0..40u64 {
            let len = [0, 1, 7, 8, 9, 100, PAGE, 2 * PAGE + 1][seed as usize % 8];
            let pieces_out = cut(len, 1 + seed as usize % 8, seed);
            let room = len + [0, 0, 17][seed as usize % 3];
            let pieces_in = cut(room, 1 + (seed as usize * 3) % 8, seed + 1000);
            let (from, to) = (spread(&source, &pieces_out), spread(&target, &pieces_in));
            a.store(&source, 0, &pattern(seed, source.len));
            b.store(&target, 0, &pattern(seed + 5000, target.len));
            let data = gathered(&mut a, &source, &from);

            b.recv(seed, &to);
            a.send(seed, &from);
            assert_eq!(a.sent(1), [Completion::ok(seed, WC_OP_SEND, 0)]);
            assert_eq!(b.received(1), [Completion::ok(seed, WC_OP_RECV, len)]);
            assert_eq!(gathered(&mut b, &target, &to)[..len], data, "SEND {seed} of {len} bytes");

            let at = 100 + seed;
            a.write(seed, &from, (target.addr + at, target.key));
            assert_eq!(a.sent(1), [Completion::ok(seed, WC_OP_RDMA_WRITE, 0)]);
            assert_eq!(b.load(&target, at as isize, len), data, "WRITE {seed} of {len} bytes");

            let back = spread(&source, &cut(len, 1 + (seed as usize * 5) % 8, seed + 2000));
            a.store(&source, 0, &pattern(seed + 7000, source.len));
            a.read(seed, &back, (target.addr + at, target.key));
            assert_eq!(a.sent(1), [Completion::ok(seed, WC_OP_RDMA_READ, len)]);
            assert_eq!(gathered(&mut a, &source, &back), data, "READ {seed} of {len} bytes");
        }
    }
}

#[test]
fn receivers_memory_of_every_kind_takes_messages() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    for kind in Kind::WRITABLE {
        let region = b.register(kind, LEN, SKEW);
        let mut far = ExpectedMemory::new(&mut b, region, 1);
        let data = pattern(2, LEN);
        let source = a.hold(&data);
        b.recv(1, &[region.part(0, 100), region.part(100, LEN - 100)]);
        a.send(2, &[source.all()]);
        assert_eq!(b.received(1), [Completion::ok(1, WC_OP_RECV, LEN)], "{kind:?}");
        assert_eq!(a.sent(1), [Completion::ok(2, WC_OP_SEND, 0)]);
        far.part(0, LEN).copy_from_slice(&data);
        far.check(&mut b, &format!("{kind:?}"));
    }
}

#[test]
fn the_senders_memory_may_be_of_every_kind_too() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let target = b.register(Kind::Anonymous, LEN, SKEW);
    let readable = Kind::WRITABLE.into_iter().chain([Kind::ReadOnly]);
    for kind in readable {
        let access = if kind == Kind::ReadOnly { 0 } else { 1 };
        let source = a.register_as(kind, LEN, SKEW, access);
        if kind != Kind::ReadOnly {
            a.store(&source, 0, &pattern(kind as u64, LEN));
        }
        let data = a.load(&source, 0, LEN);
        a.write(1, &[source.all()], (target.addr, target.key));
        assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)], "{kind:?}");
        assert_eq!(b.load(&target, 0, LEN), data, "{kind:?}");
    }
}

#[test]
fn inline_data_is_taken_when_posted() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        const MOST: usize = MAX_INLINE as usize;
        let source = a.register(Kind::Anonymous, MOST, 0);
        let target = b.register(Kind::Anonymous, MOST, 1);
        // Without a key, in pieces, and overwritten before the receiver can have read it.
        let pieces = |len: usize| {
            let half = len / 2;
            [(source.addr, half as u32, 0), (source.addr + half as u64, (len - half) as u32, 0)]
        };
        for len in [0, 1, 8, 100, 256, PAGE, MOST] {
            a.store(&source, 0, &pattern(len as u64, len));
            a.post(request(1, WR_SEND, &pieces(len), (0, 0)).inline());
            a.store(&source, 0, &[0xff; MOST]);
            a.has_nothing(CqKind::Send);
            b.recv(2, &[target.all()]);
            assert_eq!(b.received(1), [Completion::ok(2, WC_OP_RECV, len)]);
            assert_eq!(b.load(&target, 0, len), pattern(len as u64, len), "SEND of {len} bytes");
            assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_SEND, 0)]);

            a.store(&source, 0, &pattern(len as u64 + 1, len));
            a.post(request(3, WR_RDMA_WRITE, &pieces(len), (target.addr, target.key)).inline());
            assert_eq!(a.sent(1), [Completion::ok(3, WC_OP_RDMA_WRITE, 0)]);
            assert_eq!(b.load(&target, 0, len), pattern(len as u64 + 1, len), "WRITE of {len} bytes");
        }
    }
}

#[test]
fn immediate_data_arrives_with_its_message() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let source = a.hold(&pattern(1, 100));
        let target = b.register(Kind::Anonymous, 100, 0);
        let to = (target.addr, target.key);

        b.recv(1, &[target.all()]);
        a.post(request(1, WR_SEND, &[source.part(0, 10)], (0, 0)).with_imm(0xdead_beef));
        assert_eq!(b.received(1), [Completion::ok(1, WC_OP_RECV, 10).with_imm(0xdead_beef)]);

        // The receive of a WRITE with immediate data only reports it: neither its memory nor its keys are
        // used.
        b.recv(2, &[(0, 100, 12345)]);
        a.post(request(2, WR_RDMA_WRITE, &[source.part(5, 20)], to).with_imm(7));
        assert_eq!(b.received(1), [Completion::ok(2, WC_OP_RECV_RDMA_WITH_IMM, 20).with_imm(7)]);
        assert_eq!(b.load(&target, 0, 20), pattern(1, 100)[5..25]);

        b.recv(3, &[]);
        a.post(request(3, WR_RDMA_WRITE, &[], (0, 0)).with_imm(8));
        assert_eq!(b.received(1), [Completion::ok(3, WC_OP_RECV_RDMA_WITH_IMM, 0).with_imm(8)]);

        assert_eq!(
            a.sent(3),
            [
                Completion::ok(1, WC_OP_SEND, 0),
                Completion::ok(2, WC_OP_RDMA_WRITE, 0),
                Completion::ok(3, WC_OP_RDMA_WRITE, 0)
            ]
        );
    }
}

#[test]
fn a_zero_length_transfer_checks_no_key() {
    for place in Placement::BOTH {
        let (mut a, _b) = pair(place, &QpConfig::default());
        let empty = [(0xdead_0000, 0, 0x1234_5678)];
        a.write(1, &empty, (0xdead_0000, 0x1234_5678));
        a.read(2, &empty, (0xdead_0000, 0x1234_5678));
        a.write(3, &[], (u64::MAX, 0));
        assert_eq!(
            a.sent(3),
            [
                Completion::ok(1, WC_OP_RDMA_WRITE, 0),
                Completion::ok(2, WC_OP_RDMA_READ, 0),
                Completion::ok(3, WC_OP_RDMA_WRITE, 0)
            ]
        );
    }
}

#[test]
fn unsignalled_requests_complete_silently() {
    let config = QpConfig { signal_all: false, send_wr: 4, ..QpConfig::default() };
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        let to = (target.addr, target.key);
        let silent = |wr_id| Request { flags: 0, ..request(wr_id, WR_RDMA_WRITE, &[source.all()], to) };
        for round in 0..10 {
            (0..3).for_each(|i| a.post(silent(round * 10 + i)));
            a.has_nothing(CqKind::Send);
            a.write(round * 10 + 3, &[source.all()], to);
            // The completion of the last request frees all four slots of the queue.
            assert_eq!(a.sent(1), [Completion::ok(round * 10 + 3, WC_OP_RDMA_WRITE, 0)]);
        }
        a.has_nothing(CqKind::Send);
        assert_eq!(b.load(&target, 0, 64), pattern(1, 64));
    }
}

#[test]
fn atomic_operations_change_eight_bytes_and_return_what_was_there() {
    // 1.07 s, with seven retries: an owner that does not answer at once is not asked again for a second.
    let config = QpConfig { timeout: 18, ..QpConfig::default() };
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &config);
        let old = a.register(Kind::Anonymous, 8, 0);
        for kind in [Kind::Anonymous, Kind::Dmabuf, Kind::SharedFile, Kind::NoNewWriters] {
            let region = b.register(kind, LEN, 8);
            let mut far = ExpectedMemory::new(&mut b, region, 1);
            // On the partial first page, and on a whole page.
            for at in [0, 2 * PAGE] {
                let before = 1u64 << 40 | at as u64;
                far.part(at, 8).copy_from_slice(&before.to_ne_bytes());
                b.store(&region, at as isize, &before.to_ne_bytes());
                let mut value = before;
                for (opcode, compare_add, swap) in [
                    (WR_ATOMIC_FETCH_AND_ADD, 5, 0),
                    (WR_ATOMIC_FETCH_AND_ADD, u64::MAX, 0),
                    (WR_ATOMIC_CMP_AND_SWP, before + 4, u64::MAX),
                    (WR_ATOMIC_CMP_AND_SWP, 1, 2),
                    (WR_ATOMIC_FETCH_AND_ADD, 2, 0),
                ] {
                    let to = (region.addr + at as u64, region.key);
                    let operation = request(1, opcode, &[old.all()], to);
                    a.post(Request { compare_add, swap, ..operation });
                    let add = opcode == WR_ATOMIC_FETCH_AND_ADD;
                    let done = if add { WC_OP_FETCH_ADD } else { WC_OP_COMP_SWAP };
                    assert_eq!(a.sent(1), [Completion::ok(1, done, 8)]);
                    assert_eq!(a.load(&old, 0, 8), value.to_ne_bytes(), "{kind:?}");
                    value = match (add, value == compare_add) {
                        (true, _) => value.wrapping_add(compare_add),
                        (false, true) => swap,
                        (false, false) => value,
                    };
                }
                far.part(at, 8).copy_from_slice(&value.to_ne_bytes());
                far.check(&mut b, &format!("{kind:?} at {at}"));
            }
        }
    }
}

#[test]
fn an_atomic_write_stores_eight_bytes() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig { inline: 0, ..QpConfig::default() });
        let source = a.hold(&pattern(5, 64));
        for kind in [Kind::Anonymous, Kind::Dmabuf, Kind::SharedFile] {
            let region = b.register(kind, LEN, 8);
            let mut far = ExpectedMemory::new(&mut b, region, 1);
            for at in [0, 2 * PAGE] {
                let to = (region.addr + at as u64, region.key);
                let parts = [source.part(9, 3), source.part(30, 0), source.part(1, 5)];
                a.post(request(1, WR_ATOMIC_WRITE, &parts, to));
                assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_ATOMIC_WRITE, 0)]);
                let bytes = pattern(5, 64);
                far.part(at, 3).copy_from_slice(&bytes[9..12]);
                far.part(at + 3, 5).copy_from_slice(&bytes[1..6]);
                far.check(&mut b, &format!("{kind:?} at {at}"));
            }
        }
        let target = b.register(Kind::Anonymous, 64, 0);
        for len in [0, 7, 9] {
            let wrong = request(1, WR_ATOMIC_WRITE, &[source.part(0, len)], (target.addr, target.key));
            assert_eq!(a.attempt(Command::Send(wrong)).err(), Some(libc::EINVAL), "{len} bytes");
        }
        a.post(request(2, WR_ATOMIC_WRITE, &[source.part(0, 8)], (target.addr + 4, target.key)));
        assert_eq!(a.sent(1)[0].status, WC_REM_INV_REQ_ERR);
        assert_eq!(b.load(&target, 0, 64), vec![0; 64]);
    }
}

/// Concurrent atomic additions of two processes to shared words, through regions of every type.
#[test]
fn no_count_is_lost_between_initiators() {
    if runs_with_moved_pages("transfers::no_count_is_lost_between_initiators") {
        return;
    }
    const EACH: u64 = 3000;
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let old = a.register(Kind::Anonymous, 8, 0);
    let theirs = b.register(Kind::Anonymous, 8, 0);
    // The counters' owner is this process; both ends add to them.
    let whole = a.register(Kind::Anonymous, 2 * PAGE, 0);
    let partial = a.register(Kind::Anonymous, 64, 8);
    let file = a.register(Kind::SharedFile, PAGE, 0);
    let part = {
        let actor = a.actor();
        millstream_device::Mr::register(actor.pd(), whole.addr + 8, 8, whole.addr + 8, 15)
            .expect("registered")
    };
    assert_eq!(part.mapped_len(), 8, "a part of what is mapped is mapped");
    let itself = QpConfig::default();
    a.keep();
    let me = a.open(&itself);
    a.connect_to(me, &itself);
    let words = [
        (whole.addr + 8, whole.key, part.key()),
        (partial.addr, partial.key, partial.key),
        (file.addr, file.key, file.key),
    ];
    for (word, by_us, by_them) in words {
        let add = |region: &Region, key| Request {
            compare_add: 1,
            ..request(1, WR_ATOMIC_FETCH_AND_ADD, &[region.all()], (word, key))
        };
        b.begin(&Command::Repeat(add(&theirs, by_them), EACH));
        for _ in 0..EACH {
            a.post(add(&old, by_us));
            assert_eq!(a.sent(1)[0].status, 0);
        }
        assert!(matches!(b.answer(), Reply::Done));
        // SAFETY: a word of our own memory; all writers have finished.
        assert_eq!(unsafe { (word as *const u64).read_unaligned() }, 2 * EACH, "{word:#x}");
    }
}

#[test]
fn a_queue_pair_can_be_connected_to_itself() {
    let config = QpConfig::default();
    let mut a = End::new(Placement::SameProcess);
    let me = a.open(&config);
    a.connect_to(me, &config);
    let source = a.hold(&pattern(1, 1000));
    let target = a.register(Kind::Anonymous, 1000, 0);
    a.recv(1, &[target.all()]);
    a.send(2, &[source.all()]);
    assert_eq!(a.received(1), [Completion::ok(1, WC_OP_RECV, 1000)]);
    assert_eq!(a.sent(1), [Completion::ok(2, WC_OP_SEND, 0)]);
    assert_eq!(a.load(&target, 0, 1000), pattern(1, 1000));
    // Overlapping source and target.
    a.write(3, &[target.part(0, 900)], (target.addr + 100, target.key));
    assert_eq!(a.sent(1), [Completion::ok(3, WC_OP_RDMA_WRITE, 0)]);
    assert_eq!(a.load(&target, 100, 900), pattern(1, 1000)[..900]);
}

#[test]
fn flags_of_the_wrong_operation_are_refused() {
    let (mut a, mut b) = pair(Placement::SameProcess, &QpConfig::default());
    let source = a.hold(&[0; MAX_INLINE as usize + 1]);
    let target = b.register(Kind::Anonymous, 300, 0);
    let to = (target.addr, target.key);
    let refused = |a: &mut End, request: Request, errno| {
        assert_eq!(a.attempt(crate::support::Command::Send(request)).unwrap_err(), errno);
    };
    refused(&mut a, request(1, WR_RDMA_READ, &[source.part(0, 8)], to).inline(), libc::EINVAL);
    refused(&mut a, request(1, WR_SEND, &[source.all()], (0, 0)).inline(), libc::EINVAL);
    refused(&mut a, request(1, WR_SEND, &[source.part(0, 8); 9], (0, 0)), libc::EINVAL);
    refused(&mut a, request(1, 77, &[source.part(0, 8)], (0, 0)), libc::EOPNOTSUPP);
    // Longer than the device's longest message, with lengths whose sum does not fit 32 bits.
    refused(&mut a, request(1, WR_SEND, &[(source.addr, u32::MAX, source.key); 8], (0, 0)), libc::EINVAL);
    let inline_key = Request { flags: SEND_INLINE, ..request(1, WR_SEND, &[(source.addr, 8, 0)], to) };
    b.recv(1, &[target.all()]);
    a.post(inline_key);
    assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_SEND, 0)]);
}
