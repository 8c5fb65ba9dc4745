//! Memory windows: access through them, binding and invalidation, and the objects that they keep.

use std::sync::Arc;

use millstream_device::mr::window::{MwBind, MwType};
use millstream_device::mr::{ReregError, ReregMr};
use millstream_device::qp::state::QpState;
use millstream_device::qp::{QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    ACCESS_ZERO_BASED, SEND_SIGNALED, WC_LOC_QP_OP_ERR, WC_MW_BIND_ERR, WC_OP_BIND_MW, WC_OP_LOCAL_INV,
    WC_OP_RECV, WC_OP_SEND, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_SUCCESS, WR_LOCAL_INV, WR_RDMA_READ,
    WR_RDMA_WRITE, WR_SEND_WITH_INV,
};
use millstream_device::{Errno, Mr, Mw, Qp};
use millstream_shm::PAGE;

use crate::support::{
    Adapter, Command, Completion, CqKind, End, Placement, QpConfig, Region, Reply, Request, connect,
    has_begun, next, pair, pattern, poison, request,
};

const LEN: usize = 5 * PAGE;
/// Offset of the windows, which start and end in the middle of a page.
const AT: usize = PAGE + 1000;
const SHOWN: usize = 2 * PAGE + 17;

const BINDABLE: u32 = ACCESS_LOCAL_WRITE | ACCESS_MW_BIND;
const REMOTE: u32 = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;

/// The owner of windows, in this process, and its peer.
struct MwFixture {
    owner: End,
    peer: End,
    mr: Mr,
    memory: Vec<u8>,
    /// The peer's.
    local: Region,
    /// Windows are deallocated with their last reference.
    windows: Vec<Arc<Mw>>,
}

impl MwFixture {
    fn new(place: Placement) -> Self {
        Self::with_access(place, BINDABLE)
    }

    fn with_access(place: Placement, access: u32) -> Self {
        let (owner, mut peer) = pair(place, &QpConfig::default());
        let mut memory = pattern(9, LEN + PAGE);
        // At a page boundary, so that inner pages can be mapped.
        let start = memory.as_ptr().align_offset(PAGE);
        memory.drain(..start % PAGE);
        let addr = memory.as_mut_ptr() as u64;
        let mr = Mr::register(owner.actor().pd(), addr, LEN as u64, addr, access).expect("registered");
        let local = peer.hold(&pattern(3, LEN));
        Self { owner, peer, mr, memory, local, windows: Vec::new() }
    }

    fn addr(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    fn qp(&self) -> &Arc<Qp> {
        self.owner.actor().qp()
    }

    fn window(&self, kind: MwType) -> Arc<Mw> {
        Mw::new(self.owner.actor().pd(), kind).expect("room")
    }

    /// A binding to `SHOWN` bytes from `AT`, with the window's next key.
    fn part(&self, mw: &Arc<Mw>, access: u32) -> MwBind {
        let (key, region) = (mw.next_key(), self.mr.key());
        MwBind { mw: mw.clone(), key, region, addr: self.addr() + AT as u64, len: SHOWN as u64, access }
    }

    fn bind(&mut self, bind: &MwBind) -> u32 {
        self.qp().post_bind(77, SEND_SIGNALED, bind).expect("room");
        let completion = self.owner.sent(1)[0];
        assert_eq!((completion.wr_id, completion.opcode), (77, WC_OP_BIND_MW));
        completion.status
    }

    /// A window that is bound to the usual part.
    fn bound(&mut self, kind: MwType, access: u32) -> Arc<Mw> {
        let mw = self.window(kind);
        let bind = self.part(&mw, access);
        assert_eq!(self.bind(&bind), WC_SUCCESS);
        assert_eq!(mw.key(), bind.key);
        self.windows.push(mw.clone());
        mw
    }

    /// Executes an operation of the peer on `len` bytes at `addr`, and returns its status.
    fn try_op(&mut self, opcode: u32, key: u32, addr: u64, len: usize) -> u32 {
        let sge = self.local.part(0, len);
        self.peer.post(request(5, opcode, &[sge], (addr, key)));
        self.peer.sent(1)[0].status
    }

    /// Executes an operation of the peer that must fail, and connects the two again.
    fn denied(&mut self, what: &str, opcode: u32, key: u32, addr: u64, len: usize) {
        let before = self.memory.clone();
        assert_eq!(self.try_op(opcode, key, addr, len), WC_REM_ACCESS_ERR, "{what}");
        assert!(self.memory == before, "{what}: nothing is written");
        self.reconnect();
    }

    /// Replaces the queue pairs. Windows of type 2 become invalid with the old ones.
    fn reconnect(&mut self) {
        connect(&mut self.owner, &mut self.peer, &QpConfig::default());
    }

    /// Invalidates a key as its owner, and returns the status.
    fn invalidate(&mut self, key: u32) -> u32 {
        let wr =
            SendWr { wr_id: 8, opcode: WR_LOCAL_INV, flags: SEND_SIGNALED, imm: key, ..SendWr::default() };
        self.qp().post_send(&wr).expect("room");
        let completion = self.owner.sent(1)[0];
        assert_eq!((completion.wr_id, completion.opcode), (8, WC_OP_LOCAL_INV));
        completion.status
    }
}

fn send_with_inv(key: u32) -> Request {
    Request { imm: key, ..request(6, WR_SEND_WITH_INV, &[], (0, 0)) }
}

#[test]
fn a_window_covers_only_its_range() {
    for place in Placement::BOTH {
        for (kind, based) in [(MwType::Type1, 0), (MwType::Type2, 0), (MwType::Type2, ACCESS_ZERO_BASED)] {
            let mut fixture = MwFixture::new(place);
            let start = if based == 0 { fixture.addr() + AT as u64 } else { 0 };
            let mut key = fixture.bound(kind, REMOTE | based).key();
            // Both ends, the whole window, and pages with the bytes around them.
            for (at, len) in [(0, 1), (SHOWN - 1, 1), (0, SHOWN), (PAGE - 1000, PAGE), (5, 0), (SHOWN, 0)] {
                let bytes = pattern(at as u64 + 50, len);
                fixture.peer.store(&fixture.local, 0, &bytes);
                assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, start + at as u64, len), WC_SUCCESS);
                assert_eq!(fixture.memory[AT + at..AT + at + len], bytes, "{kind:?} {at} {len}");
                fixture.peer.store(&fixture.local, 0, &vec![0; len]);
                assert_eq!(fixture.try_op(WR_RDMA_READ, key, start + at as u64, len), WC_SUCCESS);
                assert_eq!(fixture.peer.load(&fixture.local, 0, len), bytes);
            }
            for (what, offset, len) in [
                ("before", -1i64, 1),
                ("after", SHOWN as i64, 1),
                ("over the end", SHOWN as i64 - 7, 8),
                ("over the start", -7, 8),
                ("longer", 0, SHOWN + 1),
                ("the end of the address space", -(start as i64) - 1, 1),
            ] {
                fixture.denied(what, WR_RDMA_WRITE, key, start.wrapping_add_signed(offset), len);
                if kind == MwType::Type2 {
                    key = fixture.bound(kind, REMOTE | based).key();
                }
            }
        }
    }
}

#[test]
fn a_window_allows_what_it_was_bound_for() {
    for place in Placement::BOTH {
        for kind in [MwType::Type1, MwType::Type2] {
            for (access, opcode, allowed) in [
                (ACCESS_REMOTE_READ, WR_RDMA_READ, true),
                (ACCESS_REMOTE_READ, WR_RDMA_WRITE, false),
                (ACCESS_REMOTE_WRITE, WR_RDMA_WRITE, true),
                (ACCESS_REMOTE_WRITE, WR_RDMA_READ, false),
                (ACCESS_REMOTE_ATOMIC, WR_RDMA_WRITE, false),
                // Programs pass this right, though it has no effect for peers.
                (ACCESS_LOCAL_WRITE, WR_RDMA_WRITE, false),
                (0, WR_RDMA_READ, false),
            ] {
                let mut fixture = MwFixture::new(place);
                let key = fixture.bound(kind, access).key();
                let addr = fixture.addr() + AT as u64;
                let expected = if allowed { WC_SUCCESS } else { WC_REM_ACCESS_ERR };
                assert_eq!(fixture.try_op(opcode, key, addr, 8), expected, "{kind:?} {access:#x} {opcode}");
            }
            // A window's key is a remote key only.
            let mut fixture = MwFixture::new(place);
            let key = fixture.bound(kind, REMOTE).key();
            let sge = (fixture.addr() + AT as u64, 8, key);
            fixture.owner.recv(1, &[sge]);
            let source = fixture.local.part(0, 8);
            fixture.peer.send(2, &[source]);
            assert_ne!(fixture.peer.sent(1)[0].status, WC_SUCCESS, "a receive cannot use a window");
        }
    }
}

#[test]
fn only_the_queue_pair_that_bound_it_serves_a_window_of_type_2() {
    for place in Placement::BOTH {
        for (kind, status) in [(MwType::Type1, WC_SUCCESS), (MwType::Type2, WC_REM_ACCESS_ERR)] {
            let mut fixture = MwFixture::new(place);
            let key = fixture.bound(kind, REMOTE).key();
            let addr = fixture.addr() + AT as u64;
            assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, addr, 8), WC_SUCCESS);
            fixture.owner.keep();
            fixture.peer.keep();
            fixture.reconnect();
            assert_eq!(
                fixture.try_op(WR_RDMA_WRITE, key, addr, 8),
                status,
                "another of the domain, {kind:?}"
            );
        }
    }
}

/// All ways to invalidate or unbind a window, and the types for which they work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    BindNothing,
    BindOther,
    LocalInvalidate,
    SendWithInvalidate,
    Deallocate,
    DestroyQueuePair,
}

#[test]
fn a_region_with_bound_windows_cannot_be_deregistered() {
    use Way::*;
    for place in Placement::BOTH {
        for (kind, way) in [
            (MwType::Type1, BindNothing),
            (MwType::Type1, BindOther),
            (MwType::Type1, Deallocate),
            (MwType::Type2, LocalInvalidate),
            (MwType::Type2, SendWithInvalidate),
            (MwType::Type2, Deallocate),
            (MwType::Type2, DestroyQueuePair),
        ] {
            let what = format!("{kind:?} {way:?}");
            let mut fixture = MwFixture::new(place);
            let other = MwFixture::new(Placement::SameProcess);
            let mw = fixture.bound(kind, REMOTE);
            let (key, addr) = (mw.key(), fixture.addr() + AT as u64);
            assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, addr, SHOWN), WC_SUCCESS, "{what}");
            assert_eq!(fixture.mr.deregister(), Err(Errno::BUSY), "{what}");
            let change = ReregMr { access: Some(BINDABLE | REMOTE), ..ReregMr::default() };
            assert_eq!(fixture.mr.rereg(&change), Err(ReregError::Unchanged(Errno::BUSY)), "{what}");
            assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, addr, SHOWN), WC_SUCCESS, "{what}: not disturbed");
            match way {
                BindNothing => {
                    let nothing = MwBind { len: 0, ..fixture.part(&mw, 0) };
                    assert_eq!(fixture.bind(&nothing), WC_SUCCESS);
                }
                BindOther => {
                    // A region of the same domain with other addresses.
                    let addr = other.addr();
                    let pd = fixture.owner.actor().pd();
                    let mr = Mr::register(pd, addr, LEN as u64, addr, BINDABLE).expect("registered");
                    let bind = MwBind { region: mr.key(), addr, ..fixture.part(&mw, REMOTE) };
                    assert_eq!(fixture.bind(&bind), WC_SUCCESS);
                    assert_eq!(fixture.try_op(WR_RDMA_WRITE, mw.key(), addr, 8), WC_SUCCESS);
                    mw.deallocate().expect("nobody is inside");
                }
                LocalInvalidate => assert_eq!(fixture.invalidate(key), WC_SUCCESS),
                SendWithInvalidate => {
                    fixture.owner.recv(40, &[]);
                    fixture.peer.post(send_with_inv(key));
                    assert_eq!(fixture.peer.sent(1), [Completion::ok(6, WC_OP_SEND, 0)]);
                    let got = fixture.owner.received(1)[0];
                    assert_eq!((got.wr_id, got.status, got.opcode), (40, WC_SUCCESS, WC_OP_RECV), "{what}");
                    assert_eq!(got.invalidated, Some(key), "{what}");
                }
                Deallocate => mw.deallocate().expect("nobody is inside"),
                DestroyQueuePair => fixture.owner.destroy(),
            }
            if way == DestroyQueuePair {
                fixture.reconnect();
            }
            fixture.denied(&what, WR_RDMA_WRITE, key, addr, 8);
            fixture.mr.deregister().unwrap_or_else(|error| panic!("{what}: {error:?}"));
            assert_eq!(mw.deallocate(), Ok(()), "{what}: bound or not");
        }
    }
}

#[test]
fn binds_that_are_refused_when_they_are_carried_out() {
    let mut case = 0;
    // Other regions on the fixture's memory, dropped before it.
    let kept = std::cell::RefCell::new(Vec::new());
    let mut refused = |access: u32, kind: MwType, wanted: u32, change: &dyn Fn(&MwFixture, &mut MwBind)| {
        case += 1;
        let mut fixture = MwFixture::with_access(Placement::SameProcess, access);
        let mw = fixture.window(kind);
        let mut bind = fixture.part(&mw, wanted);
        change(&fixture, &mut bind);
        assert_eq!(fixture.bind(&bind), WC_MW_BIND_ERR, "case {case}");
        assert_eq!(fixture.owner.state(), QpState::Err);
        assert_eq!(fixture.peer.state(), QpState::Rts, "the peer has done nothing");
        fixture.mr.deregister().expect("not bound");
        kept.borrow_mut().clear();
    };
    for kind in [MwType::Type1, MwType::Type2] {
        let same = |_: &MwFixture, _: &mut MwBind| {};
        refused(ACCESS_LOCAL_WRITE | REMOTE, kind, ACCESS_REMOTE_READ, &same);
        refused(ACCESS_MW_BIND, kind, ACCESS_REMOTE_WRITE, &same);
        refused(ACCESS_MW_BIND, kind, ACCESS_REMOTE_ATOMIC, &same);
        refused(BINDABLE, kind, REMOTE, &|fixture, bind| bind.addr = fixture.addr() - 1);
        refused(BINDABLE, kind, REMOTE, &|fixture, bind| bind.addr = fixture.addr() + LEN as u64);
        refused(BINDABLE, kind, REMOTE, &|_, bind| bind.len = (LEN - AT) as u64 + 1);
        // Sums that wrap to an address inside.
        refused(BINDABLE, kind, REMOTE, &|_, bind| bind.len = u64::MAX);
        refused(BINDABLE, kind, REMOTE, &|_, bind| bind.len = u64::MAX - bind.addr + 2);
        refused(BINDABLE, kind, REMOTE, &|_, bind| bind.addr = u64::MAX);
        refused(BINDABLE, kind, REMOTE, &|_, bind| bind.region ^= 1);
        refused(BINDABLE, kind, REMOTE, &|_, bind| bind.region = 0);
        refused(BINDABLE | ACCESS_ZERO_BASED, kind, REMOTE, &|_, bind| (bind.addr, bind.len) = (0, 8));
        refused(BINDABLE, kind, REMOTE, &|fixture, bind| {
            let pd = fixture.owner.actor().foreign_pd();
            let mr = Mr::register(pd, fixture.addr(), 4096, fixture.addr(), BINDABLE).expect("registered");
            (bind.region, bind.addr, bind.len) = (mr.key(), fixture.addr(), 8);
            kept.borrow_mut().push(mr);
        });
    }
    refused(BINDABLE, MwType::Type2, REMOTE, &|_, bind| bind.len = 0);

    // A window of type 2 cannot be bound again while it is bound, and keeps its binding.
    let mut fixture = MwFixture::new(Placement::SameProcess);
    let mw = fixture.bound(MwType::Type2, REMOTE);
    let again = fixture.part(&mw, REMOTE);
    assert_eq!(fixture.bind(&again), WC_MW_BIND_ERR);
    assert_eq!(fixture.mr.deregister(), Err(Errno::BUSY));
}

#[test]
fn binds_that_are_refused_when_they_are_posted() {
    let fixture = MwFixture::new(Placement::SameProcess);
    let refused = |bind: MwBind, what: &str| {
        assert_eq!(fixture.qp().post_bind(1, SEND_SIGNALED, &bind), Err(Errno::INVAL), "{what}");
    };
    let one = fixture.window(MwType::Type1);
    let two = fixture.window(MwType::Type2);
    refused(fixture.part(&one, REMOTE | ACCESS_ZERO_BASED), "type 1 is never zero-based");
    refused(fixture.part(&two, REMOTE | ACCESS_MW_BIND), "windows of windows");
    refused(MwBind { key: one.key(), ..fixture.part(&two, REMOTE) }, "another's key");
    refused(
        MwBind { key: two.key() ^ 0x100, ..fixture.part(&two, REMOTE) },
        "only the low byte is the owner's",
    );
    let foreign = Mw::new(fixture.owner.actor().foreign_pd(), MwType::Type2).expect("room");
    refused(fixture.part(&foreign, REMOTE), "another domain's window");
    let gone = fixture.window(MwType::Type2);
    gone.deallocate().expect("not bound");
    refused(fixture.part(&gone, REMOTE), "a window that is gone");
    let bare = SendWr { opcode: millstream_device::types::WR_BIND_MW, ..SendWr::default() };
    assert_eq!(fixture.qp().post_send(&bare), Err(Errno::INVAL), "no window");

    let adapter = Adapter::open();
    let cq = adapter.cq();
    for kind in [QpType::Uc, QpType::Ud] {
        let qp = adapter.qp_with(&cq, kind, RecvSource::Own).expect("room");
        let near = adapter.qp_with(&cq, kind, RecvSource::Own).expect("room");
        if kind == QpType::Uc {
            let mask_less = |qp: &Qp, to| {
                use millstream_device::qp::state::attr;
                let reliable = attr::MAX_DEST_RD_ATOMIC
                    | attr::MIN_RNR_TIMER
                    | attr::TIMEOUT
                    | attr::RETRY_CNT
                    | attr::RNR_RETRY
                    | attr::MAX_QP_RD_ATOMIC;
                for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                    let all = crate::support::attributes(&QpConfig::default(), state, to);
                    qp.modify(&all, crate::support::mask(state) & !reliable).expect("the usual way");
                }
            };
            mask_less(&qp, near.qpn().get());
            mask_less(&near, qp.qpn().get());
            let mw = Mw::new(&adapter.pd, MwType::Type1).expect("room");
            let nothing =
                MwBind { mw: mw.clone(), key: mw.next_key(), region: 0, addr: 0, len: 0, access: 0 };
            qp.post_bind(3, SEND_SIGNALED, &nothing).expect("unreliable connections have windows");
            assert_eq!(next(&cq).status, WC_SUCCESS);
            let send = SendWr { opcode: WR_SEND_WITH_INV, ..SendWr::default() };
            assert_eq!(qp.post_send(&send), Err(Errno::NOTSUP));
        }
    }
}

#[test]
fn only_windows_of_type_2_can_be_invalidated_by_their_queue_pairs() {
    for place in Placement::BOTH {
        type Make = fn(&mut MwFixture) -> u32;
        let keys: [(&str, Make); 6] = [
            ("a region", |fixture| fixture.mr.key()),
            ("no key at all", |_| 0),
            ("nobody's", |fixture| fixture.mr.key() ^ 1),
            ("a window of type 1", |fixture| fixture.bound(MwType::Type1, REMOTE).key()),
            ("one that is not bound", |fixture| {
                let mw = fixture.window(MwType::Type2);
                fixture.windows.push(mw.clone());
                mw.key()
            }),
            ("another queue pair's", |fixture| {
                let key = fixture.bound(MwType::Type2, REMOTE).key();
                fixture.owner.keep();
                fixture.peer.keep();
                fixture.reconnect();
                key
            }),
        ];
        for (what, make) in keys {
            let mut fixture = MwFixture::with_access(place, BINDABLE | REMOTE);
            let key = make(&mut fixture);
            assert_eq!(fixture.invalidate(key), WC_LOC_QP_OP_ERR, "{what}, by its owner");

            let mut fixture = MwFixture::with_access(place, BINDABLE | REMOTE);
            let key = make(&mut fixture);
            fixture.owner.recv(40, &[]);
            fixture.owner.recv(41, &[]);
            fixture.peer.post(send_with_inv(key));
            assert_eq!(fixture.peer.sent(1)[0].status, WC_REM_ACCESS_ERR, "{what}");
            assert_eq!(fixture.owner.received(1)[0].status, WC_REM_INV_REQ_ERR, "{what}");
            fixture.reconnect();
            let (addr, key) = (fixture.addr(), fixture.mr.key());
            assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, addr, LEN), WC_SUCCESS, "{what}: the region lives");
        }
    }
}

#[test]
fn a_reused_key_shows_its_current_region() {
    for place in Placement::BOTH {
        // The owner chooses the same key at once.
        let mut fixture = MwFixture::new(place);
        let mw = fixture.window(MwType::Type2);
        let first = fixture.part(&mw, REMOTE);
        let there = MwBind { addr: fixture.addr() + 4 * PAGE as u64, len: 64, ..first.clone() };
        assert_eq!(fixture.bind(&first), WC_SUCCESS);
        assert_eq!(fixture.try_op(WR_RDMA_WRITE, first.key, first.addr, 8), WC_SUCCESS, "remembered");
        assert_eq!(fixture.invalidate(first.key), WC_SUCCESS);
        assert_eq!(fixture.bind(&there), WC_SUCCESS);
        assert_eq!(fixture.try_op(WR_RDMA_WRITE, first.key, there.addr, 8), WC_SUCCESS);
        assert_eq!(fixture.memory[4 * PAGE..4 * PAGE + 8], pattern(3, LEN)[..8]);
        fixture.denied("where it was", WR_RDMA_WRITE, first.key, first.addr, 8);

        // The device chooses the key again after all others.
        let mut fixture = MwFixture::new(place);
        let mw = fixture.bound(MwType::Type1, REMOTE);
        let (key, mut keys) = (mw.key(), std::collections::HashSet::new());
        assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, fixture.addr() + AT as u64, 8), WC_SUCCESS);
        for _ in 0..256 {
            let bind = MwBind { addr: fixture.addr(), len: 8, ..fixture.part(&mw, REMOTE) };
            assert_eq!(fixture.bind(&bind), WC_SUCCESS);
            assert!(keys.insert(mw.key()), "each bind has its own");
        }
        assert_eq!(mw.key(), key);
        assert_eq!(fixture.try_op(WR_RDMA_WRITE, key, fixture.addr(), 8), WC_SUCCESS);
        fixture.denied("where it was", WR_RDMA_WRITE, key, fixture.addr() + AT as u64, 8);
    }
}

#[test]
fn an_invalidation_waits_for_its_receive_like_any_send() {
    let mut fixture = MwFixture::new(Placement::OtherProcess);
    let key = fixture.bound(MwType::Type2, REMOTE).key();
    let local = fixture.local.part(0, 100);
    fixture.peer.post(Request { sges: vec![local], ..send_with_inv(key) });
    fixture.peer.has_nothing(CqKind::Send);
    let room = fixture.owner.register(crate::support::Kind::Anonymous, 100, 0);
    fixture.owner.recv(1, &[room.all()]);
    assert_eq!(fixture.peer.sent(1), [Completion::ok(6, WC_OP_SEND, 0)]);
    let got = fixture.owner.received(1)[0];
    assert_eq!((got.byte_len, got.invalidated), (100, Some(key)));
    assert_eq!(fixture.owner.load(&room, 0, 100), pattern(3, LEN)[..100]);
}

/// The peer writes through a window all the time. When the window becomes invalid, writes fail, and no
/// further byte arrives.
#[test]
fn no_access_through_a_deallocated_window() {
    for way in [Way::BindNothing, Way::LocalInvalidate, Way::Deallocate] {
        let mut fixture = MwFixture::new(Placement::OtherProcess);
        let kind = if way == Way::BindNothing { MwType::Type1 } else { MwType::Type2 };
        let mw = fixture.bound(kind, REMOTE);
        let bytes = vec![0xabu8; LEN];
        fixture.peer.store(&fixture.local, 0, &bytes);
        fixture.memory.fill(0);
        let wr = request(
            1,
            WR_RDMA_WRITE,
            &[fixture.local.part(0, SHOWN)],
            (fixture.addr() + AT as u64, mw.key()),
        );
        fixture.peer.begin(&Command::Hammer(wr));
        let shown = |fixture: &MwFixture| has_begun(&fixture.memory[AT..AT + SHOWN], 0xab);
        crate::support::wait_for("the first write", || shown(&fixture));
        match way {
            Way::BindNothing => {
                let nothing = MwBind { len: 0, ..fixture.part(&mw, 0) };
                assert_eq!(fixture.bind(&nothing), WC_SUCCESS);
            }
            Way::LocalInvalidate => assert_eq!(fixture.invalidate(mw.key()), WC_SUCCESS),
            _ => mw.deallocate().expect("the peer is quick"),
        }
        poison(&mut fixture.memory);
        let Reply::Completions(failed) = fixture.peer.answer() else { panic!("{way:?}") };
        assert_eq!(failed.last().map(|c| c.status), Some(WC_REM_ACCESS_ERR), "{way:?}");
        let poisoned = fixture.memory.iter().all(|byte| *byte == crate::support::POISON);
        assert!(poisoned, "{way:?}: a write arrived late");
    }
}

#[test]
fn a_failed_window_request_flushes_those_behind_it() {
    let mut fixture = MwFixture::new(Placement::SameProcess);
    let mw = fixture.window(MwType::Type2);
    let bad = MwBind { region: 0, ..fixture.part(&mw, REMOTE) };
    fixture.qp().post_bind(1, 0, &bad).expect("room");
    fixture.qp().post_bind(2, 0, &fixture.part(&mw, REMOTE)).expect("flushed");
    let sent: Vec<_> = fixture.owner.sent(2).iter().map(|c| (c.wr_id, c.status, c.opcode)).collect();
    let flushed = millstream_device::types::WC_WR_FLUSH_ERR;
    assert_eq!(sent, [(1, WC_MW_BIND_ERR, WC_OP_BIND_MW), (2, flushed, WC_OP_BIND_MW)]);
    assert_eq!(fixture.mr.deregister(), Ok(()), "a flushed bind binds nothing");
}

#[test]
fn a_bind_keeps_its_place_in_the_queue() {
    let mut fixture = MwFixture::new(Placement::SameProcess);
    let mw = fixture.window(MwType::Type2);
    let bind = fixture.part(&mw, REMOTE);
    fixture.owner.modify(QpState::Sqd, &QpConfig::default());
    fixture.qp().post_bind(1, SEND_SIGNALED, &bind).expect("kept while the queue is drained");
    fixture.owner.has_nothing(CqKind::Send);
    fixture
        .mr
        .rereg(&ReregMr { access: Some(BINDABLE | REMOTE), ..ReregMr::default() })
        .expect("not bound yet");
    fixture.owner.modify(QpState::Rts, &QpConfig::default());
    assert_eq!(fixture.owner.sent(1), [Completion::ok(1, WC_OP_BIND_MW, 0)]);
    assert_eq!(fixture.try_op(WR_RDMA_WRITE, bind.key, bind.addr, 8), WC_SUCCESS);
}
