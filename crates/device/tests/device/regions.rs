//! Memory regions of every kind: re-registered, null, paged on demand, on device memory.

use std::os::fd::AsFd;
use std::sync::Arc;

use millstream_device::mr::{MrAdvice, ReregError, ReregMr};
use millstream_device::qp::state::QpState;
use millstream_device::types::{
    ACCESS_HUGETLB, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_ON_DEMAND, ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, ACCESS_ZERO_BASED, Sge, WC_LOC_PROT_ERR, WC_REM_ACCESS_ERR,
    WC_REM_OP_ERR, WC_SUCCESS, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE,
    WR_SEND,
};
use millstream_device::{Dm, Errno, MAX_DM, Mr, Pd};
use millstream_shm::{Memfd, PAGE};

use crate::support::runs_with_moved_pages;
use crate::support::{
    Command, End, Kind, POISON, Placement, QpConfig, Region, Reply, connect, has_begun, pair, pattern,
    poison, request, wait_for,
};
use crate::support::{Process, run_role};

const REMOTE: u32 = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
const ALL: u32 = ACCESS_LOCAL_WRITE | REMOTE;
const LEN: usize = 3 * PAGE;

/// Pages that a test maps, changes and unmaps.
struct Pages(usize, usize);

impl Pages {
    /// Reserves addresses without memory.
    fn reserved(len: usize) -> Self {
        Self::map(0, len, libc::PROT_NONE, 0)
    }

    fn new(len: usize) -> Self {
        Self::map(0, len, libc::PROT_READ | libc::PROT_WRITE, 0)
    }

    fn map(at: usize, len: usize, prot: i32, flags: i32) -> Self {
        let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, or one over the test's own pages.
        let base = unsafe { libc::mmap(at as *mut _, len, prot, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self(base as usize, len)
    }

    /// Replaces these with fresh zero pages.
    fn replace(&self) {
        std::mem::forget(Self::map(self.0, self.1, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED));
    }

    fn vanish(&self) {
        std::mem::forget(Self::map(self.0, self.1, libc::PROT_NONE, libc::MAP_FIXED));
    }

    fn addr(&self) -> u64 {
        self.0 as u64
    }

    fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.1);
        // SAFETY: inside the pages, which are mapped when this is called.
        unsafe { (self.0 as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        assert!(len <= self.1);
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe { (self.0 as *const u8).copy_to(bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by us; the regions on it are deregistered or paged on demand.
        unsafe { libc::munmap(self.0 as *mut _, self.1) };
    }
}

/// The owner of regions, in this process, and its peer.
struct MrFixture {
    owner: End,
    peer: End,
    /// The peer's.
    local: Region,
}

impl MrFixture {
    fn new(place: Placement) -> Self {
        let (owner, mut peer) = pair(place, &QpConfig::default());
        let local = peer.hold(&pattern(3, LEN));
        Self { owner, peer, local }
    }

    fn pd(&self) -> &Arc<Pd> {
        self.owner.actor().pd()
    }

    fn register(&self, addr: u64, len: usize, access: u32) -> Mr {
        Mr::register(self.pd(), addr, len as u64, addr, access).expect("registered")
    }

    /// Executes an operation of the peer on `len` bytes, and connects the two again if it fails.
    fn remote(&mut self, opcode: u32, to: (u64, u32), len: usize) -> u32 {
        let sge = self.local.part(0, len);
        self.peer.post(request(5, opcode, &[sge], to));
        let status = self.peer.sent(1)[0].status;
        self.reconnect_after(status)
    }

    /// Executes an operation of the owner, from or to its local memory, on the peer's memory.
    fn own(&mut self, opcode: u32, sge: (u64, u32, u32)) -> u32 {
        self.owner.post(request(6, opcode, &[sge], (self.local.addr, self.local.key)));
        let status = self.owner.sent(1)[0].status;
        self.reconnect_after(status)
    }

    /// Sends from the peer into a receive of the owner, and returns the peer's status.
    fn received(&mut self, sge: (u64, u32, u32)) -> u32 {
        self.owner.recv(7, &[sge]);
        let source = self.local.part(0, sge.1 as usize);
        self.peer.post(request(5, WR_SEND, &[source], (0, 0)));
        let status = self.peer.sent(1)[0].status;
        assert_eq!(self.owner.received(1)[0].status == WC_SUCCESS, status == WC_SUCCESS);
        self.reconnect_after(status)
    }

    fn reconnect_after(&mut self, status: u32) -> u32 {
        if status != WC_SUCCESS {
            connect(&mut self.owner, &mut self.peer, &QpConfig::default());
        }
        status
    }
}

#[test]
fn each_property_of_a_region_can_be_changed_alone_and_with_others() {
    for place in Placement::BOTH {
        for what in 1..8 {
            let mut fixture = MrFixture::new(place);
            let (one, two) = (Pages::new(LEN), Pages::new(LEN));
            let pd = [fixture.pd().clone(), fixture.owner.actor().foreign_pd().clone()];
            let mut mr =
                Mr::register(&pd[1], one.addr(), LEN as u64, one.addr(), ACCESS_LOCAL_WRITE).expect("so");
            let (moves, changes_pd, changes_access) = (what & 1 != 0, what & 2 != 0, what & 4 != 0);
            let key = mr.key();
            let change = ReregMr {
                memory: moves.then_some((two.addr(), 2 * PAGE as u64)),
                pd: changes_pd.then(|| pd[0].clone()),
                access: changes_access.then_some(ALL),
            };
            mr.rereg(&change).expect("possible");
            assert_eq!(mr.key(), key, "whoever has the key can go on using it");
            let allowed = changes_pd && changes_access;
            for (pages, here, len) in [(&one, !moves, LEN), (&two, moves, 2 * PAGE)] {
                let expected = if allowed && here { WC_SUCCESS } else { WC_REM_ACCESS_ERR };
                for len in [8, len] {
                    let status = fixture.remote(WR_RDMA_WRITE, (pages.addr(), key), len);
                    assert_eq!(status, expected, "{what} {len}");
                    let bytes =
                        if status == WC_SUCCESS { pattern(3, LEN)[..len].to_vec() } else { vec![0; len] };
                    assert_eq!(pages.bytes(len), bytes, "{what}");
                }
                let beyond = fixture.remote(WR_RDMA_WRITE, (pages.addr() + len as u64 - 4, key), 8);
                assert_eq!(beyond, WC_REM_ACCESS_ERR, "{what}");
            }
            assert_eq!(
                (pd[0].in_use(), pd[1].in_use()),
                (true, !changes_pd),
                "{what}: queue pairs use the first"
            );
            mr.deregister().expect("nobody is inside");
            assert!(!pd[1].in_use());
        }
    }
}

#[test]
fn a_failed_rereg_leaves_the_region_unchanged() {
    let mut fixture = MrFixture::new(Placement::OtherProcess);
    let pages = Pages::new(LEN);
    // No program maps pages there.
    let hole = PAGE as u64;
    let mut mr = fixture.register(pages.addr(), LEN, ALL);
    let foreign = Some(fixture.owner.actor().foreign_pd().clone());
    for (what, change, errno) in [
        ("of nothing", ReregMr::default(), Errno::INVAL),
        (
            "to memory that is not there",
            ReregMr { memory: Some((hole, 64)), ..ReregMr::default() },
            Errno(libc::EFAULT),
        ),
        (
            "to memory that wraps",
            ReregMr { memory: Some((u64::MAX, 64)), ..ReregMr::default() },
            Errno::INVAL,
        ),
        (
            "to impossible access",
            ReregMr { access: Some(ACCESS_REMOTE_WRITE), ..ReregMr::default() },
            Errno::INVAL,
        ),
        (
            "of all at once, one impossible",
            ReregMr { memory: Some((pages.addr(), 64)), pd: foreign, access: Some(1 << 30) },
            Errno::INVAL,
        ),
    ] {
        assert_eq!(mr.rereg(&change), Err(ReregError::Unchanged(errno)), "{what}");
        assert_eq!(fixture.remote(WR_RDMA_WRITE, (pages.addr(), mr.key()), LEN), WC_SUCCESS, "{what}");
        assert_eq!(pages.bytes(LEN), pattern(3, LEN));
        pages.fill(&[0; LEN]);
    }
    assert!(!fixture.owner.actor().foreign_pd().in_use());

    let file = Memfd::new("test", LEN).expect("room");
    let other = ReregMr { memory: Some((pages.addr(), 64)), ..ReregMr::default() };
    let mut dmabuf = Mr::register_dmabuf(fixture.pd(), file.as_fd(), 0, LEN as u64, 0, ALL).expect("a memfd");
    assert_eq!(dmabuf.rereg(&other), Err(ReregError::Unchanged(Errno::NOTSUP)));
    let less = ReregMr { access: Some(ACCESS_REMOTE_READ), ..ReregMr::default() };
    dmabuf.rereg(&less).expect("access has nothing to do with the memory");
    assert_eq!(fixture.remote(WR_RDMA_READ, (0, dmabuf.key()), LEN), WC_SUCCESS);
    assert_eq!(fixture.remote(WR_RDMA_WRITE, (0, dmabuf.key()), LEN), WC_REM_ACCESS_ERR);

    let view =
        std::fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.as_fd())));
    let view = view.expect("a descriptor for reading");
    let mut readable =
        Mr::register_dmabuf(fixture.pd(), view.as_fd(), 0, LEN as u64, 0, ACCESS_REMOTE_READ).expect("so");
    let more = ReregMr { access: Some(ALL), ..ReregMr::default() };
    assert_eq!(readable.rereg(&more), Err(ReregError::Unchanged(Errno(libc::EACCES))));
    assert_eq!(fixture.remote(WR_RDMA_READ, (0, readable.key()), LEN), WC_SUCCESS);
}

/// The peer writes all the time. After a re-registration no byte arrives in the old memory.
#[test]
fn no_access_to_a_deregistered_region() {
    let mut fixture = MrFixture::new(Placement::OtherProcess);
    let (mut old, new) = (vec![0u8; 64 * PAGE], Pages::new(64 * PAGE));
    let addr = old.as_mut_ptr() as u64;
    let mut mr = fixture.register(addr, old.len(), ALL);
    let source = fixture.peer.hold(&vec![0xab; old.len()]);
    fixture.peer.begin(&Command::Hammer(request(1, WR_RDMA_WRITE, &[source.all()], (addr, mr.key()))));
    wait_for("the first write", || has_begun(&old, 0xab));
    let change = ReregMr { memory: Some((new.addr(), 64 * PAGE as u64)), ..ReregMr::default() };
    mr.rereg(&change).expect("the peer is quick");
    poison(&mut old);
    let Reply::Completions(failed) = fixture.peer.answer() else { panic!("no completions") };
    assert_eq!(failed.last().map(|c| c.status), Some(WC_REM_ACCESS_ERR));
    assert!(old.iter().all(|byte| *byte == POISON), "a write arrived late");
}

#[test]
fn addresses_of_a_region_are_what_they_were_registered_as() {
    for place in Placement::BOTH {
        let mut fixture = MrFixture::new(place);
        let pages = Pages::new(LEN);
        let len = LEN as u64;
        let top = u64::MAX - len;
        for (iova, access, start) in [
            (0, ALL, 0),
            (pages.addr(), ALL | ACCESS_ZERO_BASED, 0),
            (12345, ALL, 12345),
            (1 << 63, ALL, 1 << 63),
            (top, ALL, top),
        ] {
            let mr = Mr::register(fixture.pd(), pages.addr(), len, iova, access).expect("registered");
            for (at, n) in [(0, 1), (LEN - 1, 1), (5, LEN - 5), (PAGE, PAGE)] {
                pages.fill(&[0; LEN]);
                let to = (start + at as u64, mr.key());
                assert_eq!(fixture.remote(WR_RDMA_WRITE, to, n), WC_SUCCESS, "{start:#x} {at} {n}");
                assert_eq!(pages.bytes(LEN)[at..at + n], pattern(3, LEN)[..n], "{start:#x} {at} {n}");
                let sge = (to.0, n as u32, to.1);
                assert_eq!(fixture.own(WR_RDMA_READ, sge), WC_SUCCESS);
            }
            for (at, n) in [(start.wrapping_sub(1), 1), (start.wrapping_add(len), 1), (start + len - 1, 2)] {
                let status = fixture.remote(WR_RDMA_WRITE, (at, mr.key()), n);
                assert_eq!(status, WC_REM_ACCESS_ERR, "{start:#x} {at:#x} {n}");
                let sge = (at, n as u32, mr.key());
                assert_eq!(fixture.own(WR_RDMA_WRITE, sge), WC_LOC_PROT_ERR, "{start:#x} {at:#x} {n}");
            }
        }
        for (addr, len, iova) in [
            (pages.addr(), len, u64::MAX),
            (pages.addr(), len, u64::MAX - len + 1),
            (pages.addr(), u64::MAX, 0),
            (u64::MAX, 2, 0),
        ] {
            let refused = Mr::register(fixture.pd(), addr, len, iova, ALL).map(|mr| mr.key());
            assert_eq!(refused, Err(Errno::INVAL), "{addr:#x} {len:#x} {iova:#x}");
        }
    }
}

#[test]
fn a_null_region_reads_zero_and_discards_writes() {
    for place in Placement::BOTH {
        let mut fixture = MrFixture::new(place);
        let mut null = Mr::null(fixture.pd()).expect("room");
        let key = null.key();
        for addr in [0, 12345, u64::MAX - LEN as u64] {
            let sge = (addr, LEN as u32, key);
            fixture.peer.store(&fixture.local, 0, &pattern(3, LEN));
            assert_eq!(fixture.own(WR_RDMA_READ, sge), WC_SUCCESS, "READ into it");
            assert_eq!(fixture.received(sge), WC_SUCCESS, "receive into it");
            assert_eq!(fixture.own(WR_RDMA_WRITE, sge), WC_SUCCESS, "WRITE from it");
            assert_eq!(fixture.peer.load(&fixture.local, 0, LEN), vec![0; LEN]);
        }
        let counter = fixture.peer.register(Kind::Anonymous, 8, 0);
        fixture.peer.store(&counter, 0, &7u64.to_ne_bytes());
        for opcode in [WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_CMP_AND_SWP] {
            let mut wr = request(1, opcode, &[(64, 8, key)], (counter.addr, counter.key));
            (wr.compare_add, wr.swap) = (8, 9);
            fixture.owner.post(wr);
            assert_eq!(fixture.owner.sent(1)[0].status, WC_SUCCESS);
        }
        assert_eq!(fixture.peer.load(&counter, 0, 8), 15u64.to_ne_bytes());
        let past = (u64::MAX, 2, key);
        assert_eq!(fixture.own(WR_RDMA_WRITE, past), WC_LOC_PROT_ERR);
        assert_eq!(fixture.received(past), WC_REM_OP_ERR);
        for opcode in [WR_RDMA_WRITE, WR_RDMA_READ] {
            assert_eq!(fixture.remote(opcode, (0, key), 8), WC_REM_ACCESS_ERR, "peers cannot name it");
        }
        let change = ReregMr { access: Some(ALL), ..ReregMr::default() };
        assert_eq!(null.rereg(&change), Err(ReregError::Unchanged(Errno::INVAL)));
    }
}

#[test]
fn on_demand_regions_follow_their_memory() {
    for place in Placement::BOTH {
        let mut fixture = MrFixture::new(place);
        let pages = Pages::reserved(LEN);
        let whole =
            Mr::register(fixture.pd(), 0, u64::MAX, 0, ALL | ACCESS_ON_DEMAND).expect("all there may be");
        let part = fixture.register(pages.addr(), LEN, ALL | ACCESS_ON_DEMAND | ACCESS_HUGETLB);
        for mr in [&whole, &part] {
            let key = mr.key();
            let (to, sge) = ((pages.addr(), key), (pages.addr(), LEN as u32, key));
            for turn in 0..3 {
                pages.vanish();
                for opcode in [WR_RDMA_WRITE, WR_RDMA_READ] {
                    assert_eq!(fixture.remote(opcode, to, LEN), WC_REM_OP_ERR, "{turn}");
                    assert_eq!(fixture.own(opcode, sge), WC_LOC_PROT_ERR, "{turn}");
                }
                assert_eq!(fixture.received(sge), WC_REM_OP_ERR, "{turn}");
                pages.replace();
                fixture.peer.store(&fixture.local, 0, &pattern(turn, LEN));
                assert_eq!(fixture.remote(WR_RDMA_WRITE, to, LEN), WC_SUCCESS, "{turn}");
                assert_eq!(pages.bytes(LEN), pattern(turn, LEN), "{turn}");
                pages.replace();
                assert_eq!(fixture.own(WR_RDMA_READ, sge), WC_SUCCESS, "{turn}");
                assert_eq!(pages.bytes(LEN), pattern(turn, LEN), "{turn}");
                pages.replace();
                assert_eq!(fixture.received(sge), WC_SUCCESS, "{turn}");
                assert_eq!(pages.bytes(LEN), pattern(turn, LEN), "{turn}");
                pages.fill(&pattern(turn + 10, LEN));
                assert_eq!(fixture.own(WR_RDMA_WRITE, sge), WC_SUCCESS, "{turn}");
                assert_eq!(fixture.peer.load(&fixture.local, 0, LEN), pattern(turn + 10, LEN));
                pages.fill(&5u64.to_ne_bytes());
                let mut add = request(1, WR_ATOMIC_FETCH_AND_ADD, &[fixture.local.part(0, 8)], to);
                add.compare_add = 3;
                fixture.peer.post(add);
                assert_eq!(fixture.peer.sent(1)[0].status, WC_SUCCESS);
                assert_eq!(pages.bytes(8), 8u64.to_ne_bytes());
                assert_eq!(fixture.peer.load(&fixture.local, 0, 8), 5u64.to_ne_bytes());
            }
        }
        // Addresses that no process has.
        for addr in [0, 1 << 62, u64::MAX - 8] {
            assert_eq!(fixture.remote(WR_RDMA_READ, (addr, whole.key()), 8), WC_REM_OP_ERR, "{addr:#x}");
            assert_eq!(fixture.own(WR_RDMA_WRITE, (addr, 8, whole.key())), WC_LOC_PROT_ERR, "{addr:#x}");
        }
        // Read-only memory.
        let text = b"constant".as_ptr() as u64;
        assert_eq!(fixture.remote(WR_RDMA_READ, (text, whole.key()), 8), WC_SUCCESS);
        assert_eq!(fixture.peer.load(&fixture.local, 0, 8), b"constant");
        assert_eq!(fixture.remote(WR_RDMA_WRITE, (text, whole.key()), 8), WC_REM_OP_ERR);
        assert_eq!(fixture.own(WR_RDMA_READ, (text, 8, whole.key())), WC_LOC_PROT_ERR);
    }
}

#[test]
fn on_demand_can_be_changed_into_ordinary_and_back() {
    if runs_with_moved_pages("regions::on_demand_can_be_changed_into_ordinary_and_back") {
        return;
    }
    let mut fixture = MrFixture::new(Placement::OtherProcess);
    let pages = Pages::new(LEN);
    let mut mr = fixture.register(pages.addr(), LEN, ALL);
    let to = (pages.addr(), mr.key());
    for access in [ALL | ACCESS_ON_DEMAND, ALL, ALL | ACCESS_ON_DEMAND] {
        mr.rereg(&ReregMr { access: Some(access), ..ReregMr::default() }).expect("possible");
        let mapped = if access & ACCESS_ON_DEMAND == 0 { LEN as u64 } else { 0 };
        assert_eq!(mr.mapped_len(), mapped);
        pages.fill(&[0; LEN]);
        assert_eq!(fixture.remote(WR_RDMA_WRITE, to, LEN), WC_SUCCESS);
        assert_eq!(pages.bytes(LEN), pattern(3, LEN));
    }
    pages.replace();
    assert_eq!(fixture.remote(WR_RDMA_WRITE, to, LEN), WC_SUCCESS);
    assert_eq!(pages.bytes(LEN), pattern(3, LEN), "the pages that are there now");
}

#[test]
fn advice_is_checked_and_brings_pages() {
    let fixture = MrFixture::new(Placement::SameProcess);
    let pages = Pages::new(LEN);
    let pd = fixture.pd();
    let on_demand = fixture.register(pages.addr(), LEN, ALL | ACCESS_ON_DEMAND);
    let read_only = fixture.register(pages.addr(), LEN, ACCESS_REMOTE_READ | ACCESS_ON_DEMAND);
    let ordinary = Pages::new(LEN);
    let ordinary_mr = fixture.register(ordinary.addr(), LEN, ALL);
    let range = |mr: &Mr, at: u64, length: u32| Sge { addr: pages.addr() + at, length, lkey: mr.key() };
    let resident = || {
        let mut there = [0u8; LEN / PAGE];
        // SAFETY: writes one byte for each page.
        assert_eq!(unsafe { libc::mincore(pages.0 as *mut _, LEN, there.as_mut_ptr()) }, 0);
        there.iter().filter(|page| **page & 1 != 0).count()
    };
    Mr::advise(pd, MrAdvice::PrefetchNoFault, true, &[range(&on_demand, 0, LEN as u32)])
        .expect("nothing to do");
    assert_eq!(resident(), 0);
    Mr::advise(pd, MrAdvice::PrefetchWrite, true, &[range(&on_demand, 5, PAGE as u32)]).expect("two pages");
    assert_eq!(resident(), 2);
    let both = [range(&read_only, 0, 0), range(&read_only, 0, LEN as u32)];
    Mr::advise(pd, MrAdvice::Prefetch, false, &both).expect("all");
    assert_eq!(resident(), 3);

    let errno = |advice, sge: Sge| Mr::advise(pd, advice, true, &[sge]).expect_err("refused").0;
    assert_eq!(errno(MrAdvice::PrefetchWrite, range(&read_only, 0, 8)), libc::EPERM);
    assert_eq!(errno(MrAdvice::Prefetch, range(&on_demand, 1, LEN as u32)), libc::EFAULT);
    assert_eq!(
        errno(MrAdvice::Prefetch, Sge { lkey: on_demand.key() ^ 1, ..range(&on_demand, 0, 8) }),
        libc::ENOENT
    );
    let plain = Sge { addr: ordinary.addr(), length: 8, lkey: ordinary_mr.key() };
    assert_eq!(errno(MrAdvice::Prefetch, plain), libc::EINVAL);
    let foreign = fixture.owner.actor().foreign_pd();
    let elsewhere = Mr::advise(foreign, MrAdvice::Prefetch, true, &[range(&on_demand, 0, 8)]);
    assert_eq!(elsewhere, Err(Errno(libc::EPERM)));
    pages.vanish();
    assert_eq!(errno(MrAdvice::Prefetch, range(&on_demand, 0, 8)), libc::EFAULT);
    Mr::advise(pd, MrAdvice::Prefetch, false, &[range(&on_demand, 0, 8)]).expect("nobody waits for it");
}

#[test]
fn device_memory_is_reached_by_copies_and_by_keys() {
    for place in Placement::BOTH {
        let mut fixture = MrFixture::new(place);
        let context = fixture.owner.actor().context();
        let dm = Dm::new(context, 5000, 6).expect("room");
        let store = |offset, bytes: &[u8]| {
            // SAFETY: a slice.
            unsafe { dm.store(offset, bytes.as_ptr(), bytes.len()) }
        };
        let load = |offset, len: usize| {
            let mut bytes = vec![0; len];
            // SAFETY: as above.
            unsafe { dm.load(offset, bytes.as_mut_ptr(), len) }.map(|()| bytes)
        };
        assert_eq!(load(0, 5000), Ok(vec![0; 5000]));
        store(4, &pattern(8, 4996)).expect("inside");
        assert_eq!(load(100, 52), Ok(pattern(8, 4996)[96..148].to_vec()));
        let parts_of_words = [(1, 4), (4, 3), (4, 5)];
        for (offset, len) in
            [(5000, 4), (0, 5004), (u64::MAX - 3, 8), (4996, 8)].into_iter().chain(parts_of_words)
        {
            assert_eq!(load(offset, len), Err(Errno::INVAL), "{offset} {len}");
            assert_eq!(store(offset, &vec![0; len]), Err(Errno::INVAL), "{offset} {len}");
        }
        store(5000, &[]).expect("nothing");

        let register = |offset, len, access| Mr::register_dm(fixture.pd(), &dm, offset, len, access);
        let based = ALL | ACCESS_ZERO_BASED;
        for (offset, len, access, errno) in [
            (0, 5000, ALL, Errno::INVAL),
            (0, 5001, based, Errno::INVAL),
            (5000, 1, based, Errno::INVAL),
            (u64::MAX, 2, based, Errno::INVAL),
            (0, 8, based | ACCESS_MW_BIND, Errno::NOTSUP),
            (0, 8, based | ACCESS_ON_DEMAND, Errno::NOTSUP),
            (0, 8, ACCESS_REMOTE_WRITE | ACCESS_ZERO_BASED, Errno::INVAL),
        ] {
            assert_eq!(
                register(offset, len, access).map(|mr| mr.key()),
                Err(errno),
                "{offset} {len} {access:#x}"
            );
        }
        let mut mr = register(100, 4000, based).expect("inside");
        let key = mr.key();
        assert_eq!(fixture.remote(WR_RDMA_WRITE, (0, key), 4000), WC_SUCCESS);
        assert_eq!(load(100, 4000), Ok(pattern(3, LEN)[..4000].to_vec()));
        assert_eq!(load(4100, 900), Ok(pattern(8, 4996)[4096..].to_vec()), "not beyond");
        assert_eq!(fixture.own(WR_RDMA_READ, (10, 8, key)), WC_SUCCESS);
        assert_eq!(load(108, 12).map(|bytes| bytes[2..10].to_vec()), Ok(pattern(3, LEN)[..8].to_vec()));
        assert_eq!(fixture.remote(WR_RDMA_WRITE, (1, key), 4000), WC_REM_ACCESS_ERR);
        store(108, &5u64.to_ne_bytes()).expect("inside");
        let mut add = request(1, WR_ATOMIC_FETCH_AND_ADD, &[fixture.local.part(0, 8)], (8, key));
        add.compare_add = 3;
        fixture.peer.post(add);
        assert_eq!(fixture.peer.sent(1)[0].status, WC_SUCCESS);
        assert_eq!(load(108, 8), Ok(8u64.to_ne_bytes().to_vec()));

        assert_eq!(dm.free(), Err(Errno::BUSY));
        mr.deregister().expect("nobody is inside");
        dm.free().expect("no region is left");
        assert_eq!(Mr::register_dm(fixture.pd(), &dm, 0, 8, based).map(|mr| mr.key()), Err(Errno::INVAL));
    }
}

#[test]
fn device_memory_is_limited() {
    crate::support::run_role("device memory");
}

/// In another process, so that no other test allocates device memory.
pub(crate) fn all_device_memory() {
    let adapter = crate::support::Adapter::open();
    let half = Dm::new(&adapter.context, MAX_DM / 2, 0).expect("half");
    assert_eq!(Dm::new(&adapter.context, MAX_DM / 2 + 1, 0).map(drop), Err(Errno::NOMEM));
    let rest = Dm::new(&adapter.context, MAX_DM / 2, 0).expect("the rest");
    assert_eq!(Dm::new(&adapter.context, 1, 0).map(drop), Err(Errno::NOMEM));
    half.free().expect("not registered");
    drop(rest);
    Dm::new(&adapter.context, MAX_DM, 12).expect("all of it again");
    assert_eq!(Dm::new(&adapter.context, 0, 0).map(drop), Err(Errno::INVAL));
    assert_eq!(Dm::new(&adapter.context, 8, 13).map(drop), Err(Errno::INVAL));
    assert_eq!(Dm::new(&adapter.context, u64::MAX, 0).map(drop), Err(Errno::NOMEM));
}

#[test]
fn a_receive_posted_before_a_change_is_checked_when_it_is_used() {
    for place in Placement::BOTH {
        let mut fixture = MrFixture::new(place);
        let pages = Pages::new(LEN);
        let mut mr = fixture.register(pages.addr(), LEN, ALL);
        fixture.owner.recv(1, &[(pages.addr(), 64, mr.key())]);
        let foreign = fixture.owner.actor().foreign_pd().clone();
        mr.rereg(&ReregMr { pd: Some(foreign), ..ReregMr::default() }).expect("possible");
        let source = fixture.local.part(0, 64);
        fixture.peer.send(2, &[source]);
        assert_eq!(fixture.peer.sent(1)[0].status, WC_REM_OP_ERR);
        assert_eq!(fixture.owner.received(1)[0].status, WC_LOC_PROT_ERR);
        wait_for("its failure", || fixture.owner.state() == QpState::Err);
        assert_eq!(pages.bytes(64), vec![0; 64]);
    }
}

/// An access that memory does not permit would end the process that makes it.
#[test]
fn memory_must_permit_the_access_of_its_region() {
    must_permit_the_access();
    // Also behind the pages that are populated.
    for populated in ["0", "4096"] {
        let mut process =
            Process::start_with("permissions", |command| command.env("MILLSTREAM_POPULATE", populated));
        assert!(process.finish().success(), "{populated} bytes populated");
    }
}

pub(crate) fn must_permit_the_access() {
    const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
    let context = millstream_device::Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    // The larger ones may move at registration.
    for pages in [3, 1024] {
        let memory = Pages::new(pages * PAGE);
        let register = |access| {
            let (addr, len) = (memory.addr() + 8, (pages * PAGE - 16) as u64);
            Mr::register(&pd, addr, len, addr, access)
        };
        for (protection, reads, stores) in [
            (libc::PROT_NONE, Some(Errno(libc::EFAULT)), Some(Errno(libc::EFAULT))),
            (libc::PROT_READ, None, Some(Errno(libc::EFAULT))),
            (READ_WRITE, None, None),
        ] {
            for changed in [0..pages, 0..1, pages - 1..pages] {
                let set = |pages: &std::ops::Range<usize>, protection| {
                    let start = (memory.0 + pages.start * PAGE) as *mut libc::c_void;
                    // SAFETY: the test's own pages, which nothing accesses now.
                    assert_eq!(unsafe { libc::mprotect(start, pages.len() * PAGE, protection) }, 0);
                };
                set(&changed, protection);
                for (access, expected) in [
                    (0, reads),
                    (ACCESS_REMOTE_READ, reads),
                    (ACCESS_LOCAL_WRITE, stores),
                    (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, stores),
                    (ACCESS_LOCAL_WRITE | ACCESS_ON_DEMAND, None),
                ] {
                    let found = register(access).err();
                    assert_eq!(found, expected, "{pages} pages, {protection} at {changed:?}, {access:#x}");
                }
                if let Ok(mut mr) = register(0) {
                    let change = ReregMr { access: Some(ACCESS_LOCAL_WRITE), ..ReregMr::default() };
                    assert_eq!(mr.rereg(&change).err(), stores.map(ReregError::Unchanged));
                }
                set(&changed, READ_WRITE);
            }
        }
    }
}

/// Moved pages are files. The program needs its descriptors for itself.
#[test]
fn moved_regions_leave_the_program_its_descriptors() {
    run_role("descriptors");
}

/// In another process: its descriptors are few.
pub(crate) fn few_descriptors() {
    const LIMIT: u64 = 128;
    const REGION: usize = 2 << 20;
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let context = millstream_device::Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    // Untouched: it moves at registration, if this process may move pages.
    let memory: Vec<_> = (0..100).map(|_| Pages::new(REGION)).collect();
    let register = |pages: &Pages| {
        Mr::register(&pd, pages.addr(), REGION as u64, pages.addr(), ALL).expect("registered")
    };
    let mut regions: Vec<_> = memory.iter().map(register).collect();
    let _files: Vec<_> =
        (0..50).map(|_| std::fs::File::open("/dev/null").expect("a descriptor is left")).collect();
    let moved = |regions: &[Mr]| regions.iter().filter(|mr| mr.mapped_len() != 0).count();
    if moved(&regions) == 0 {
        println!("skipped: pages do not move in this process");
        return;
    }
    assert_eq!(moved(&regions), LIMIT as usize / 4);
    // A descriptor that is free again lets another region move.
    let first = regions.remove(0);
    drop(first);
    assert_eq!(moved(&regions), LIMIT as usize / 4 - 1);
    let more = Pages::new(REGION);
    regions.push(register(&more));
    assert_eq!(moved(&regions), LIMIT as usize / 4);
}

/// Another process may have mapped the word before the seal, and changes it by the processor's instructions.
#[test]
fn a_word_that_can_be_mapped_for_loads_only_is_not_changed_atomically() {
    let (mut near, mut far) = pair(Placement::OtherProcess, &QpConfig::default());
    let local = near.hold(&pattern(1, 8));
    let word = far.register(Kind::NoNewWriters, 8, 0);
    far.forbid_new_writers(&word);
    near.post(request(1, WR_ATOMIC_FETCH_AND_ADD, &[local.all()], (word.addr, word.key)));
    assert_eq!(near.sent(1)[0].status, WC_REM_OP_ERR);
}
