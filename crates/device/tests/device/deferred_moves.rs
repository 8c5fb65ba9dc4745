//! Regions whose pages move only when peers have used them much.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millstream_device::mr::window::{MwBind, MwType};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    SEND_SIGNALED, WC_SUCCESS, WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND_WITH_INV,
};
use millstream_device::{Mr, Mw};
use millstream_quantity::Rkey;
use millstream_shm::{Mapping, Memfd, PAGE};

use crate::support::{
    Adapter, Command, End, Kind, Placement, Process, QpConfig, Region, Reply, Request, connect_queue_pair,
    element, is_empty, next, pages_move, pair, pattern, recv_from_parent, request, send_to_parent, wait_for,
};

const ALL: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC | ACCESS_MW_BIND;

/// Runs a check of [`role`] in a process in which pages move once peers have used them.
fn run(check: &str) {
    if !pages_move() {
        return;
    }
    let mut process = Process::start_with("deferred_moves", |command| command.env("MILLSTREAM_MOVE", "used"));
    process.send_line(check);
    assert_eq!(process.recv_line(), "done", "{check}");
    assert!(process.finish().success(), "{check}");
}

pub(crate) fn role() {
    match recv_from_parent().as_deref() {
        Some("use") => moves_with_use(),
        Some("counts") => keeps_counts(),
        Some("windows") => promotes_windows(),
        Some("file") => hands_out_a_file(),
        Some("end") => deregisters_while_pages_move(),
        Some("stores") => keeps_stores(),
        Some("fresh") => moves_fresh_pages(),
        Some("replaced") => registers_replaced_pages(),
        Some("pause") => moves_without_a_pause(),
        Some("alone") => moves_in_the_only_thread(),
        check => panic!("{check:?} is no check"),
    }
    send_to_parent("done");
}

/// Anonymous pages of this process, a region over them, and a peer in another process.
struct Fixture {
    owner: End,
    peer: End,
    local: Region,
    pages: Pages,
    mr: Mr,
}

impl Fixture {
    fn new(pages: usize) -> Self {
        let (owner, mut peer) = pair(Placement::OtherProcess, &QpConfig::default());
        let local = peer.register(Kind::Anonymous, PAGE, 0);
        let pages = Pages::anonymous(pages);
        let mr = register(&owner, &pages);
        Self { owner, peer, local, pages, mr }
    }

    fn target(&self) -> (u64, u32) {
        (self.pages.base() as u64, self.mr.key())
    }

    /// Executes a request of the peer, which must succeed.
    fn execute(&mut self, request: Request) {
        self.peer.post(request);
        assert_eq!(self.peer.sent(1)[0].status, WC_SUCCESS);
    }

    /// The peer writes `len` bytes of its region to offset `at`.
    fn write(&mut self, at: usize, len: usize) {
        let (start, key) = self.target();
        self.execute(request(1, WR_RDMA_WRITE, &[self.local.part(0, len)], (start + at as u64, key)));
    }

    /// The peer writes until it can map the pages.
    fn use_much(&mut self) {
        for n in 0.. {
            assert!(n < 20_000, "the pages do not move");
            self.write(n % 16 * 64, 64);
            if self.mr.mapped_len() != 0 {
                break;
            }
        }
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        // SAFETY: inside the mapping; no request is in progress.
        unsafe { std::slice::from_raw_parts(self.pages.base().add(at), len) }.to_vec()
    }
}

/// Memory of this process, unmapped when dropped.
struct Pages {
    base: *mut u8,
    len: usize,
    /// The mapping that it is a part of, if it is not private memory.
    mapping: Option<Mapping>,
}

impl Pages {
    /// Pages that exist.
    fn anonymous(pages: usize) -> Self {
        let memory = Self::untouched(pages);
        // SAFETY: the whole mapping.
        unsafe { memory.base.write_bytes(0, memory.len) };
        memory
    }

    fn untouched(pages: usize) -> Self {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let len = pages * PAGE;
        // SAFETY: a new mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self { base: base.cast(), len, mapping: None }
    }

    fn of(mapping: Mapping) -> Self {
        Self { base: mapping.base(), len: mapping.len(), mapping: Some(mapping) }
    }

    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.mapping.is_none() {
            // SAFETY: this value's mapping.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}

fn register(owner: &End, pages: &Pages) -> Mr {
    let start = pages.base() as u64;
    Mr::register(owner.actor().pd(), start, pages.len() as u64, start, ALL).expect("registered")
}

#[test]
fn pages_move_once_peers_have_used_them_much() {
    run("use");
}

fn moves_with_use() {
    let mut fixture = Fixture::new(16);
    fixture.peer.store(&fixture.local.clone(), 0, &pattern(1, PAGE));
    for _ in 0..5 {
        fixture.write(3 * PAGE + 5, 1000);
    }
    assert_eq!(fixture.mr.mapped_len(), 0, "little use");
    fixture.use_much();
    wait_for("the move", || fixture.mr.mapped_len() == 16 * PAGE as u64);
    assert_eq!(fixture.bytes(3 * PAGE + 5, 1000), pattern(1, 1000), "contents stay");
    fixture.write(7 * PAGE, PAGE);
    assert_eq!(fixture.bytes(7 * PAGE, PAGE), pattern(1, PAGE));
    let (start, key) = fixture.target();
    // SAFETY: inside the mapping.
    unsafe { fixture.pages.base().add(9 * PAGE).write_volatile(77) };
    fixture.execute(request(2, WR_RDMA_READ, &[fixture.local.part(0, 1)], (start + 9 * PAGE as u64, key)));
    assert_eq!(fixture.peer.load(&fixture.local.clone(), 0, 1), [77]);
    // A part that is registered now is mapped at once; so is a region that was registered before the move.
    let part = Mr::register(fixture.owner.actor().pd(), start + 8, 64, start + 8, ALL).expect("registered");
    assert_eq!(part.mapped_len(), 64);
    drop(part);
    fixture.mr.deregister().expect("no window is bound");
    assert_eq!(fixture.bytes(3 * PAGE + 5, 1000), pattern(1, 1000), "private again");
    fixture.mr = register(&fixture.owner, &fixture.pages);
    assert_eq!(fixture.mr.mapped_len(), 0, "another region has to earn it again");
}

#[test]
fn no_count_is_lost_while_pages_move() {
    run("counts");
}

/// Two processes add to a word, one of them through a second key, while the pages move.
fn keeps_counts() {
    const EACH: u64 = 2000;
    let mut fixture = Fixture::new(16);
    let (start, key) = fixture.target();
    let overlapping = {
        let at = start + PAGE as u64;
        Mr::register(fixture.owner.actor().pd(), at, 64, at, ALL).expect("registered")
    };
    assert_eq!(overlapping.mapped_len(), 0);
    let (mut second_owner, mut second) = pair(Placement::OtherProcess, &QpConfig::default());
    // The second peer's queue pair belongs to another domain of this process.
    let second_local = second.register(Kind::Anonymous, 8, 0);
    let word = start + PAGE as u64 + 8;
    let second_mr = Mr::register(second_owner.actor().pd(), word, 8, word, ALL).expect("registered");
    let add = |local: &Region, key| Request {
        compare_add: 1,
        ..request(1, WR_ATOMIC_FETCH_AND_ADD, &[local.part(0, 8)], (word, key))
    };
    second.begin(&Command::Repeat(add(&second_local, second_mr.key()), EACH));
    let local = fixture.local;
    for n in 0..EACH {
        fixture.execute(add(&local, if n % 2 == 0 { key } else { overlapping.key() }));
    }
    assert!(matches!(second.answer(), Reply::Done));
    let word = fixture.bytes(PAGE + 8, 8);
    assert_eq!(u64::from_ne_bytes(word.try_into().expect("eight bytes")), 2 * EACH);
    wait_for("the move", || fixture.mr.mapped_len() != 0);
    wait_for("the regions around the word", || {
        [&overlapping, &second_mr].iter().all(|mr| mr.mapped_len() != 0)
    });
    second_owner.destroy();
}

#[test]
fn windows_are_promoted_with_their_region() {
    run("windows");
}

fn promotes_windows() {
    let mut fixture = Fixture::new(16);
    let (start, _) = fixture.target();
    let mw = Mw::new(fixture.owner.actor().pd(), MwType::Type2).expect("room");
    let bind = |mw: &Arc<Mw>, region: &Mr| MwBind {
        mw: mw.clone(),
        key: mw.next_key(),
        region: region.key(),
        addr: start + PAGE as u64,
        len: 2 * PAGE as u64,
        access: ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ,
    };
    let first = bind(&mw, &fixture.mr);
    fixture.owner.actor().qp().post_bind(77, SEND_SIGNALED, &first).expect("room");
    assert_eq!(fixture.owner.sent(1)[0].status, WC_SUCCESS);
    fixture.peer.store(&fixture.local.clone(), 0, &pattern(2, PAGE));
    // Use of the window counts as use of the region.
    for n in 0.. {
        assert!(n < 20_000, "the pages do not move");
        let to = (start + PAGE as u64 + 100, first.key);
        fixture.execute(request(1, WR_RDMA_WRITE, &[fixture.local.part(0, 64)], to));
        if fixture.mr.mapped_len() != 0 {
            break;
        }
    }
    let to = (start + PAGE as u64 + 100, first.key);
    fixture.execute(request(1, WR_RDMA_WRITE, &[fixture.local.part(0, 500)], to));
    assert_eq!(fixture.bytes(PAGE + 100, 500), pattern(2, 500));
    // The peer invalidates the window, although its entry has changed since it was bound.
    fixture.owner.recv(5, &[]);
    fixture.execute(Request { imm: first.key, ..request(6, WR_SEND_WITH_INV, &[], (0, 0)) });
    assert_eq!(fixture.owner.received(1)[0].invalidated, Some(first.key));
    let second = bind(&mw, &fixture.mr);
    fixture.owner.actor().qp().post_bind(78, SEND_SIGNALED, &second).expect("room");
    assert_eq!(fixture.owner.sent(1)[0].status, WC_SUCCESS);
    let to = (start + PAGE as u64, second.key);
    fixture.execute(request(1, WR_RDMA_WRITE, &[fixture.local.part(0, PAGE)], to));
    assert_eq!(fixture.bytes(PAGE, PAGE), pattern(2, PAGE));
}

#[test]
fn a_sealed_file_that_the_program_has_mapped_is_mapped_by_peers() {
    run("file");
}

fn hands_out_a_file() {
    let mut fixture = Fixture::new(1);
    let file = Memfd::sealed("card", 16 * PAGE).expect("memory");
    fixture.pages = Pages::of(Mapping::new(file.as_fd(), 4 * PAGE, 8 * PAGE, true).expect("mapped"));
    fixture.mr = register(&fixture.owner, &fixture.pages);
    if millstream_shm::maps::vma_at(0).is_ok() {
        assert_eq!(fixture.mr.mapped_len(), 8 * PAGE as u64);
    } else {
        // An older kernel: the file is found when it matters.
        fixture.use_much();
    }
    fixture.peer.store(&fixture.local.clone(), 0, &pattern(3, PAGE));
    fixture.write(5 * PAGE + 100, 3000);
    assert_eq!(fixture.bytes(5 * PAGE + 100, 3000), pattern(3, 3000));
    let whole = file.map().expect("mapped");
    // SAFETY: inside the file.
    let in_file = unsafe { std::slice::from_raw_parts(whole.base().add(9 * PAGE + 100), 3000) };
    assert_eq!(in_file, pattern(3, 3000));
}

#[test]
fn deregistration_ends_a_move() {
    run("end");
}

fn deregisters_while_pages_move() {
    const PAGES: usize = 4096;
    let mut fixture = Fixture::new(PAGES);
    fixture.peer.store(&fixture.local.clone(), 0, &pattern(4, PAGE));
    for round in 0..6u64 {
        let word = |page: usize| fixture.pages.base().wrapping_add(page * PAGE + 8).cast::<u64>();
        for page in 0..PAGES {
            // SAFETY: inside the mapping, here and below.
            unsafe { word(page).write_volatile(round << 32 | page as u64) };
        }
        let (start, key) = fixture.target();
        // Some 40 ms of copies through the kernel.
        let large = request(1, WR_RDMA_WRITE, &[fixture.local.part(0, 8)], (start, key));
        fixture.peer.begin(&Command::Repeat(large, 80_000 + round * 5000));
        assert!(matches!(fixture.peer.answer(), Reply::Done));
        fixture.mr.deregister().expect("no window is bound");
        for page in 0..PAGES {
            // SAFETY: as above.
            assert_eq!(unsafe { word(page).read_volatile() }, round << 32 | page as u64, "page {page}");
        }
        fixture.mr = register(&fixture.owner, &fixture.pages);
    }
}

#[test]
fn no_store_is_lost_while_used_pages_move() {
    run("stores");
}

/// A thread stores to all pages while they move because a peer uses them.
fn keeps_stores() {
    const PAGES: usize = 1500;
    let mut fixture = Fixture::new(PAGES);
    let end = AtomicBool::new(false);
    // SAFETY: words of the mapping, which outlives the threads; the peer writes elsewhere.
    let word =
        |base: usize, page: usize| unsafe { AtomicU64::from_ptr((base + page * PAGE + 2048) as *mut u64) };
    for _ in 0..3 {
        let base = fixture.pages.base() as usize;
        end.store(false, Ordering::Relaxed);
        let rounds = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut rounds = 0u64;
                while !end.load(Ordering::Relaxed) {
                    rounds += 1;
                    for page in 0..PAGES {
                        let word = word(base, page);
                        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    }
                }
                rounds
            });
            let (start, key) = fixture.target();
            let small = request(1, WR_RDMA_WRITE, &[fixture.local.part(0, 8)], (start, key));
            while fixture.mr.mapped_len() == 0 {
                fixture.peer.begin(&Command::Repeat(small.clone(), 1000));
                assert!(matches!(fixture.peer.answer(), Reply::Done));
            }
            fixture.mr.deregister().expect("no window is bound");
            end.store(true, Ordering::Relaxed);
            writer.join().expect("no panic")
        });
        for page in 0..PAGES {
            assert_eq!(word(base, page).swap(0, Ordering::Relaxed), rounds, "page {page}");
        }
        fixture.mr = register(&fixture.owner, &fixture.pages);
    }
}

#[test]
fn large_regions_without_pages_are_mapped_at_once() {
    run("fresh");
}

fn moves_fresh_pages() {
    const LARGE: usize = (2 << 20) / PAGE;
    let mut fixture = Fixture::new(1);
    for (pages, is_mapped) in [
        (Pages::untouched(LARGE), true),
        (Pages::untouched(LARGE - 1), false),
        (Pages::anonymous(LARGE), false),
    ] {
        fixture.mr.deregister().expect("no window is bound");
        fixture.pages = pages;
        fixture.mr = register(&fixture.owner, &fixture.pages);
        let len = if is_mapped { fixture.pages.len() as u64 } else { 0 };
        assert_eq!(fixture.mr.mapped_len(), len);
        fixture.peer.store(&fixture.local.clone(), 0, &pattern(7, PAGE));
        fixture.write(5 * PAGE, PAGE);
        assert_eq!(fixture.bytes(4 * PAGE, PAGE), [0; PAGE]);
        assert_eq!(fixture.bytes(5 * PAGE, PAGE), pattern(7, PAGE));
    }
    fixture.mr.deregister().expect("no window is bound");
    assert_eq!(fixture.bytes(5 * PAGE, PAGE), pattern(7, PAGE), "private again");
}

#[test]
fn a_region_over_memory_that_has_replaced_moved_pages_is_that_memory() {
    run("replaced");
}

/// The application unmaps the memory of a region, and maps other memory there, which it registers.
fn registers_replaced_pages() {
    const LARGE: usize = (4 << 20) / PAGE;
    let mut fixture = Fixture::new(1);
    fixture.peer.store(&fixture.local.clone(), 0, &pattern(8, PAGE));
    for exist in [false, true] {
        fixture.pages = Pages::untouched(LARGE);
        fixture.mr = register(&fixture.owner, &fixture.pages);
        assert_eq!(fixture.mr.mapped_len(), (LARGE * PAGE) as u64);
        let start = fixture.pages.base().cast();
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: replaces the pages of this test.
        assert_eq!(unsafe { libc::mmap(start, LARGE * PAGE, protection, flags, -1, 0) }, start);
        if exist {
            // SAFETY: the whole mapping.
            unsafe { fixture.pages.base().write_bytes(0, LARGE * PAGE) };
        }
        let mut old = std::mem::replace(&mut fixture.mr, register(&fixture.owner, &fixture.pages));
        fixture.write(5 * PAGE, PAGE);
        assert!(fixture.bytes(5 * PAGE, PAGE) == pattern(8, PAGE), "pages exist: {exist}");
        old.deregister().expect("no window is bound");
        fixture.write(6 * PAGE, PAGE);
        assert!(fixture.bytes(6 * PAGE, PAGE) == pattern(8, PAGE), "pages exist: {exist}");
    }
}

#[test]
fn a_large_region_moves_while_a_peer_writes_all_of_it_without_a_pause() {
    run("pause");
}

/// At every moment the kernel has pinned some pages of the region.
fn moves_without_a_pause() {
    const LEN: usize = 8 << 20;
    let mut fixture = Fixture::new(LEN / PAGE);
    let source = fixture.peer.register(Kind::Anonymous, LEN, 0);
    fixture.peer.store(&source, 0, &pattern(6, LEN));
    let (start, key) = fixture.target();
    let whole = request(1, WR_RDMA_WRITE, &[source.part(0, LEN)], (start, key));
    for rounds in 0.. {
        assert!(rounds < 100, "the pages do not move");
        fixture.peer.begin(&Command::Repeat(whole.clone(), 20));
        assert!(matches!(fixture.peer.answer(), Reply::Done));
        if fixture.mr.mapped_len() != 0 {
            break;
        }
    }
    assert_eq!(fixture.mr.mapped_len(), LEN as u64, "all pages move");
    assert!(fixture.bytes(0, LEN) == pattern(6, LEN), "contents stay");
}

#[test]
fn pages_of_an_unprivileged_process_move_in_its_only_thread() {
    run("alone");
}

/// The owner is a forked child with one thread, which polls an empty queue.
fn moves_in_the_only_thread() {
    // SAFETY: plain system calls. A changed user id makes `/proc/self` another user's, and forbids copies of peers.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setuid(65534), 0);
            assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
        }
    }
    if millstream_shm::relocate::is_available() {
        println!("skipped: this process may let all accesses wait, without privilege");
        return;
    }
    let (mut to_parent, mut to_child) = (std::io::pipe().expect("a pipe"), std::io::pipe().expect("a pipe"));
    let config = QpConfig::default();
    // SAFETY: the child uses the C library, whose locks a fork keeps usable, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let adapter = Adapter::open();
            let cq = adapter.cq();
            let qp = adapter.qp(&cq).expect("room");
            let pages = Pages::anonymous(16);
            let start = pages.base() as u64;
            // SAFETY: inside the mapping.
            unsafe { pages.base().add(5 * PAGE).write_volatile(5) };
            let mr = Mr::register(&adapter.pd, start, pages.len() as u64, start, ALL).expect("registered");
            let words =
                [u64::from(qp.qpn().get()), start, u64::from(mr.key())].map(u64::to_ne_bytes).concat();
            to_parent.1.write_all(&words).expect("the parent reads");
            let mut number = [0; 4];
            to_child.0.read_exact(&mut number).expect("the parent writes");
            connect_queue_pair(&qp, u32::from_ne_bytes(number), &config);
            to_parent.1.write_all(b"c").expect("the parent reads");
            wait_for("the move", || {
                assert!(is_empty(&cq));
                mr.mapped_len() == pages.len() as u64
            });
            // SAFETY: inside the mapping.
            assert_eq!(unsafe { pages.base().add(5 * PAGE).read_volatile() }, 5);
        }));
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut words = [0; 24];
    to_parent.0.read_exact(&mut words).expect("the child writes");
    let word = |i: usize| u64::from_ne_bytes(words[i * 8..][..8].try_into().expect("eight bytes"));
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = adapter.qp(&cq).expect("room");
    let mut source = vec![7u8; 64];
    let mr = adapter.register(&mut source);
    to_child.1.write_all(&qp.qpn().get().to_ne_bytes()).expect("the child reads");
    connect_queue_pair(&qp, word(0) as u32, &config);
    to_parent.0.read_exact(&mut [0]).expect("the child is connected");
    let mut status = 0;
    let sges = [element(&source, &mr)];
    // SAFETY: asks for the state of our child.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        let wr = SendWr {
            opcode: WR_RDMA_WRITE,
            flags: SEND_SIGNALED,
            sges: &sges,
            remote_addr: word(1),
            rkey: Rkey::new(word(2) as u32),
            ..SendWr::default()
        };
        qp.post_send(&wr).expect("room");
        if next(&cq).status != WC_SUCCESS {
            // SAFETY: as above.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            break;
        }
    }
    assert_eq!(status, 0, "the child succeeds");
}
