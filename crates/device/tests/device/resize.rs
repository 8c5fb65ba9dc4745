//! Completion queues in use: resizing, event moderation and timestamps.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use millstream_device::types::{
    SEND_SIGNALED, WC_OP_RECV, WC_OP_SEND, WC_REM_OP_ERR, WC_SUCCESS, WR_SEND, WR_SEND_WITH_IMM, Wc,
};
use millstream_device::{Channel, Cq, Errno, MAX_CQE, Timestamp, WallClock};

use crate::support::{
    Adapter, Command, Completion, CqKind, End, Kind, Placement, QpConfig, Region, connect_queue_pair, pair,
    readable, request, wait_for,
};

/// Sends messages 0 … `count` from `from` to `to`, with their numbers as immediate data.
fn exchange(from: &mut End, to: &mut End, source: &Region, target: &Region, numbers: std::ops::Range<u64>) {
    for number in numbers {
        to.recv(number, &[target.all()]);
        let wr = request(number, WR_SEND, &[source.part(0, 8)], (0, 0)).with_imm(number as u32);
        from.post(wr);
    }
}

fn received(numbers: std::ops::Range<u64>) -> Vec<Completion> {
    numbers.map(|n| Completion::ok(n, WC_OP_RECV, 8).with_imm(n as u32)).collect()
}

fn sent(numbers: std::ops::Range<u64>) -> Vec<Completion> {
    numbers.map(|n| Completion::ok(n, WC_OP_SEND, 0)).collect()
}

#[test]
fn waiting_completions_stay_when_the_queue_grows_and_shrinks() {
    for place in Placement::BOTH {
        let config = QpConfig { send_cqe: 8, recv_cqe: 8, ..QpConfig::default() };
        let (mut here, mut there) = pair(place, &config);
        let [ours, theirs] = [here.register(Kind::Anonymous, 64, 0), there.register(Kind::Anonymous, 64, 0)];
        let mut next = 0;
        // The odd counts shift the positions at which the rings begin.
        for (waiting, sizes) in [(5, &[8, 16, 5, 1024][..]), (8, &[8, 64, 16, 9, 32]), (0, &[1, 2, 8])] {
            for (which, taken) in [(CqKind::Recv, 3), (CqKind::Send, 1)] {
                let cq = here.actor().cq(which).clone();
                let mut take = |here: &mut End, there: &mut End, count: u64| {
                    let numbers = next..next + count;
                    next += count;
                    if which == CqKind::Recv {
                        exchange(there, here, &theirs, &ours, numbers.clone());
                        there.sent(count as usize);
                        received(numbers)
                    } else {
                        exchange(here, there, &ours, &theirs, numbers.clone());
                        there.received(count as usize);
                        sent(numbers)
                    }
                };
                let before = take(&mut here, &mut there, taken);
                assert_eq!(here.completions(which, before.len()), before);
                let mut expected = take(&mut here, &mut there, waiting);
                for &size in sizes {
                    cq.resize(size).unwrap_or_else(|error| panic!("{size}: {error:?}"));
                    assert!(cq.capacity() >= size);
                    if (expected.len() as u32) < cq.capacity() {
                        expected.extend(take(&mut here, &mut there, 1));
                    }
                }
                assert_eq!(here.completions(which, expected.len()), expected);
                here.has_nothing(which);
                cq.resize(8).expect("as it was");
            }
        }
    }
}

#[test]
fn resizing_below_pending_completions_is_refused() {
    for place in Placement::BOTH {
        let (mut here, mut there) = pair(place, &QpConfig::default());
        let [ours, theirs] = [here.register(Kind::Anonymous, 64, 0), there.register(Kind::Anonymous, 64, 0)];
        for which in [CqKind::Recv, CqKind::Send] {
            let cq = here.actor().cq(which).clone();
            match which {
                CqKind::Recv => exchange(&mut there, &mut here, &theirs, &ours, 0..5),
                CqKind::Send => exchange(&mut here, &mut there, &ours, &theirs, 0..5),
            }
            let capacity = cq.capacity();
            for refused in [0, 1, 4, MAX_CQE + 1, u32::MAX] {
                assert_eq!(cq.resize(refused), Err(Errno::INVAL), "{refused}");
            }
            assert_eq!(cq.capacity(), capacity);
            let expected = if which == CqKind::Recv { received(0..5) } else { sent(0..5) };
            assert_eq!(here.completions(which, 5), expected);
            assert_eq!(cq.resize(1), Ok(()));
            assert_eq!(cq.capacity(), 1);
        }
    }
}

/// A smaller queue overruns sooner: the new size applies to peers, too.
#[test]
fn a_peer_keeps_to_the_new_size() {
    for place in Placement::BOTH {
        let (mut here, mut there) = pair(place, &QpConfig::default());
        let [ours, theirs] = [here.register(Kind::Anonymous, 64, 0), there.register(Kind::Anonymous, 64, 0)];
        exchange(&mut there, &mut here, &theirs, &ours, 0..3);
        assert_eq!(here.received(3), received(0..3));
        here.actor().cq(CqKind::Recv).resize(4).expect("empty");
        exchange(&mut there, &mut here, &theirs, &ours, 3..7);
        here.recv(7, &[ours.all()]);
        there.post(request(7, WR_SEND, &[theirs.part(0, 8)], (0, 0)));
        assert_eq!(there.sent(8)[7].status, WC_REM_OP_ERR);
        assert_eq!(here.received(4), received(3..7));
    }
}

#[test]
fn resizing_under_load_loses_nothing() {
    let (mut here, mut there) =
        pair(Placement::OtherProcess, &QpConfig { recv_cqe: 64, ..QpConfig::default() });
    let target = here.register(Kind::Anonymous, 64, 0);
    let source = there.register(Kind::Anonymous, 64, 0);
    let (qp, cq) = (here.actor().qp().clone(), here.actor().cq(CqKind::Recv).clone());
    let sge = millstream_device::types::Sge { addr: target.addr, length: 64, lkey: target.key };
    let mut posted = 0u64;
    let mut post = |count| {
        for _ in 0..count {
            qp.post_recv(posted, &[sge]).expect("room for what was polled");
            posted += 1;
        }
    };
    post(32);
    there.begin(&Command::Hammer(request(0, WR_SEND_WITH_IMM, &[source.part(0, 8)], (0, 0))));
    let (ended, resizes) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let resizer = scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                for size in [32, 4096, 64, 128] {
                    cq.resize(size).expect("no more than the receives can wait");
                    resizes.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let mut expected = 0;
        wait_for("the messages", || {
            let mut out = [Wc::default(); 16];
            for _ in 0..100 {
                let n = cq.poll(&mut out).expect("no overflow");
                for wc in &out[..n] {
                    assert_eq!((wc.wr_id, wc.status, wc.byte_len), (expected, WC_SUCCESS, 8));
                    expected += 1;
                }
                post(n);
            }
            expected > 20_000 && resizes.load(Ordering::Relaxed) > 100
        });
        ended.store(true, Ordering::Release);
        resizer.join().expect("it went well");
    });
    here.destroy();
    assert!(matches!(there.answer(), crate::support::Reply::Completions(_)));
}

/// Two connected queue pairs in this process, and a queue with a channel for what they receive.
struct Loop {
    adapter: Adapter,
    channel: std::sync::Arc<Channel>,
    cq: std::sync::Arc<Cq>,
    sends: std::sync::Arc<Cq>,
    qps: [std::sync::Arc<millstream_device::Qp>; 2],
}

impl Loop {
    fn new() -> Self {
        use millstream_device::qp::{QpCap, QpType, RecvSource};
        let adapter = Adapter::open();
        let channel = Channel::new(&adapter.context).expect("a channel");
        let cq = Cq::with_timestamps(&adapter.context, 64, Some(channel.clone())).expect("a queue");
        let sends = Cq::with_timestamps(&adapter.context, 64, None).expect("a queue");
        let capacity = QpCap { max_send_wr: 32, max_recv_wr: 32, ..QpCap::default() };
        let qps = [(); 2].map(|()| {
            let make = Qp::new(&adapter.pd, &sends, &cq, capacity, true, QpType::Rc, RecvSource::Own);
            make.expect("a queue pair")
        });
        use millstream_device::Qp;
        for (qp, peer) in [(&qps[0], &qps[1]), (&qps[1], &qps[0])] {
            connect_queue_pair(qp, peer.qpn().get(), &QpConfig::default());
        }
        Self { adapter, channel, cq, sends, qps }
    }

    fn send(&self, wr_id: u64) {
        self.qps[1].post_recv(wr_id, &[]).expect("room");
        let wr = millstream_device::send_wr::SendWr {
            wr_id,
            opcode: WR_SEND,
            flags: SEND_SIGNALED,
            ..Default::default()
        };
        self.qps[0].post_send(&wr).expect("room");
    }

    fn drain(&self) {
        for cq in [&self.cq, &self.sends] {
            while cq.poll(&mut [Wc::default(); 32]).expect("no overflow") != 0 {}
        }
    }

    /// Whether an event arrives within the time.
    fn event(&self, within: Duration) -> bool {
        let there = readable(&*self.channel, within);
        if there {
            self.channel.next_event().expect("it is readable");
            self.cq.acknowledge(1);
        }
        there
    }
}

#[test]
fn moderated_events_come_for_many_completions_or_after_their_time() {
    let test = Loop::new();
    let soon = Duration::from_secs(20);
    // The longest period of the verbs interface.
    test.cq.moderate(4, Duration::from_micros(u16::MAX.into()));
    for _ in 0..3 {
        test.cq.arm(false);
        (0..4).for_each(|i| test.send(i));
        assert!(test.event(soon), "the count is reached");
        test.drain();
        // Fewer completions wait for the period.
        test.cq.arm(false);
        test.send(4);
        assert!(test.event(soon), "the time is over");
        test.drain();
    }
    // With a period of an hour, only the count can raise the event.
    test.cq.moderate(3, Duration::from_secs(3600));
    test.cq.arm(false);
    (0..2).for_each(|i| test.send(i));
    assert!(!test.event(Duration::from_millis(100)), "it is too early");
    test.send(2);
    assert!(test.event(soon));
    test.drain();
    // Completions pending when moderation ends raise the event at once.
    test.cq.arm(false);
    test.send(0);
    assert!(!test.event(Duration::from_millis(50)));
    test.cq.moderate(0, Duration::ZERO);
    assert!(test.event(soon));
    test.drain();
    test.cq.arm(false);
    test.send(0);
    assert!(test.event(Duration::ZERO), "each is an event again");
    assert!(!test.event(Duration::ZERO));
}

#[test]
fn a_peer_counts_for_moderated_events() {
    let (mut here, mut there) = pair(Placement::OtherProcess, &QpConfig::default());
    let [ours, theirs] = [here.register(Kind::Anonymous, 64, 0), there.register(Kind::Anonymous, 64, 0)];
    let cq = here.actor().cq(CqKind::Recv).clone();
    let soon = Duration::from_secs(20);
    cq.moderate(3, Duration::from_secs(3600));
    here.arm(CqKind::Recv, false);
    exchange(&mut there, &mut here, &theirs, &ours, 0..2);
    assert!(!here.event(CqKind::Recv, Duration::from_millis(100)));
    exchange(&mut there, &mut here, &theirs, &ours, 2..3);
    assert!(here.event(CqKind::Recv, soon));
    assert_eq!(here.received(3), received(0..3));
    cq.moderate(100, Duration::from_millis(5));
    here.arm(CqKind::Recv, false);
    exchange(&mut there, &mut here, &theirs, &ours, 3..4);
    assert!(here.event(CqKind::Recv, soon));
    assert_eq!(here.received(1), received(3..4));
}

#[test]
fn completions_carry_timestamps() {
    let test = Loop::new();
    let start = Timestamp::now();
    test.send(1);
    let between = Timestamp::now();
    // Neither polling nor resizing changes the timestamps.
    std::thread::sleep(Duration::from_millis(5));
    test.cq.resize(128).expect("room");
    test.send(2);
    let end = Timestamp::now();
    for cq in [&test.cq, &test.sends] {
        let next = || cq.poll_one().expect("no overflow").expect("it is there");
        let ((first, early), (second, late)) = (next(), next());
        assert_eq!((first.wr_id, second.wr_id), (1, 2));
        assert!(start <= early && early <= between, "{start:?} {early:?} {between:?}");
        assert!(between < late && late <= end, "{between:?} {late:?} {end:?}");
        assert_eq!(cq.poll_one(), Ok(None));
    }
    let seconds = |time| WallClock::read().at(time) / 1_000_000_000;
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    assert!(now - seconds(end) < 60);
    // Ordinary polling consumes the timestamps with their completions.
    (3..6).for_each(|i| test.send(i));
    assert_eq!(test.sends.poll(&mut [Wc::default(); 2]), Ok(2));
    let before = Timestamp::now();
    test.send(6);
    assert!(test.sends.poll_one().expect("no overflow").expect("it is there").1 < before);
    assert!(test.sends.poll_one().expect("no overflow").expect("it is there").1 >= before);
    test.drain();
    // Destroying a queue pair removes the timestamps of its completions.
    (7..9).for_each(|i| test.send(i));
    test.qps[0].destroy();
    assert_eq!(test.sends.poll_one(), Ok(None));
    drop(test.adapter);
}
