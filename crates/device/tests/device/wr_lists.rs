//! Lists and batches of send requests have the effects of their single requests, however the device executes
//! them.

use millstream_device::types::{
    SEND_SIGNALED, SEND_SOLICITED, WC_OP_RDMA_WRITE, WC_OP_RECV, WC_OP_SEND, WC_REM_ACCESS_ERR,
    WC_REM_OP_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND,
};

use crate::support::{
    Command, Completion, CqKind, Kind, Placement, QpConfig, Random, from_environment, pair, pattern, request,
};

/// Most requests of a list.
const MOST: u64 = 40;
/// Most bytes of a request. Some lists are completed in one group, some in several.
const LARGEST: u64 = 6000;

/// SENDs of many sizes with WRITEs between them, some signalled, some solicited, some inline. Most lists find
/// too few receives, so that their rest waits for receives that are posted later.
#[test]
fn everything_arrives_once_and_in_order() {
    let mut random = Random::new(from_environment("MILLSTREAM_SEED", 1));
    for place in Placement::BOTH {
        for signal_all in [false, true] {
            let config = QpConfig { signal_all, ..QpConfig::default() };
            let (mut a, mut b) = pair(place, &config);
            let data = pattern(random.next(), LARGEST as usize * 2);
            let source = a.hold(&data);
            let places = b.register(Kind::Anonymous, (MOST * LARGEST) as usize, 0);
            let written = b.register(Kind::Anonymous, LARGEST as usize, 0);
            for _ in 0..from_environment("MILLSTREAM_ROUNDS", 25) {
                let (mut list, mut sends, mut sent) = (Vec::new(), Vec::new(), Vec::new());
                for wr_id in 0..=random.below(MOST) {
                    let at = random.below(LARGEST);
                    let len =
                        if random.once_in(3) { random.below(200) } else { random.below(LARGEST) } as usize;
                    let element = source.part(at as usize, len);
                    let writes = random.once_in(6);
                    let mut one = if writes {
                        request(wr_id, WR_RDMA_WRITE, &[element], (written.addr, written.key))
                    } else {
                        sends.push((at as usize, len));
                        request(wr_id, WR_SEND, &[element], (0, 0))
                    };
                    if !random.once_in(3) {
                        one.flags &= !SEND_SIGNALED;
                    }
                    if !writes && random.once_in(8) {
                        one.flags |= SEND_SOLICITED;
                    }
                    if len <= config.inline as usize && random.once_in(2) {
                        one = one.inline();
                    }
                    if signal_all || one.flags & SEND_SIGNALED != 0 {
                        sent.push((wr_id, if writes { WC_OP_RDMA_WRITE } else { WC_OP_SEND }));
                    }
                    list.push(one);
                }
                // The completion of the last request shows that all have completed.
                list.push(request(99, WR_RDMA_WRITE, &[source.part(0, 1)], (written.addr, written.key)));
                sent.push((99, WC_OP_RDMA_WRITE));
                let slot = |at: usize| (at * LARGEST as usize, LARGEST as usize);
                let waiting = random.below(sends.len() as u64 * 2 + 1).min(sends.len() as u64) as usize;
                let mut recv = |range: std::ops::Range<usize>| {
                    range.for_each(|at| b.recv(at as u64, &[places.part(slot(at).0, slot(at).1)]));
                };
                recv(0..waiting);
                if random.once_in(2) {
                    a.post_all(&list);
                } else {
                    a.post_batch(&list);
                }
                recv(waiting..sends.len());
                let found: Vec<_> =
                    a.sent(sent.len()).iter().map(|c| (c.wr_id, c.status, c.opcode)).collect();
                let expected: Vec<_> =
                    sent.iter().map(|&(wr_id, opcode)| (wr_id, WC_SUCCESS, opcode)).collect();
                assert_eq!(found, expected);
                let expected: Vec<_> = sends
                    .iter()
                    .zip(0..)
                    .map(|(&(_, len), at)| Completion::ok(at, WC_OP_RECV, len))
                    .collect();
                assert_eq!(b.received(sends.len()), expected);
                for (index, &(at, len)) in sends.iter().enumerate() {
                    let bytes = b.load(&places, slot(index).0 as isize, len);
                    assert!(bytes == data[at..at + len], "message {index} of {len} bytes");
                }
                a.has_nothing(CqKind::Send);
                b.has_nothing(CqKind::Recv);
            }
        }
    }
}

/// The receiver's completion queue has room for a part of a group of SENDs.
#[test]
fn completions_that_fit_are_delivered_despite_overrun() {
    for place in Placement::BOTH {
        for room in 1..=8 {
            let (mut a, mut b) = pair(place, &QpConfig { recv_cqe: 8, ..QpConfig::default() });
            let source = a.hold(&[1; 64]);
            let target = b.register(Kind::Anonymous, 64, 0);
            (0..20).for_each(|wr_id| b.recv(wr_id, &[target.all()]));
            (room..8).for_each(|wr_id| a.send(wr_id, &[source.all()]));
            a.sent(8 - room as usize);
            let list: Vec<_> =
                (0..10).map(|wr_id| request(wr_id, WR_SEND, &[source.all()], (0, 0))).collect();
            a.post_all(&list);
            let found: Vec<_> = a.sent(10).iter().map(|c| c.status).collect();
            let status = |at: u64| match at {
                _ if at < room => WC_SUCCESS,
                _ if at == room => WC_REM_OP_ERR,
                _ => WC_WR_FLUSH_ERR,
            };
            assert_eq!(found, (0..10).map(status).collect::<Vec<_>>(), "room for {room}");
            assert!(b.received(8).iter().all(|c| c.status == WC_SUCCESS));
        }
    }
}

/// A batch with an invalid request, or with more requests than the queue has room for, has no effect. The
/// next batch is posted.
#[test]
fn a_batch_is_posted_whole_or_not_at_all() {
    for place in Placement::BOTH {
        let config = QpConfig { send_wr: 16, sges: 8, signal_all: false, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&[7; 64]);
        let target = b.hold(&[0; 64]);
        let write =
            |wr_id: u64| request(wr_id, WR_RDMA_WRITE, &[source.part(0, 8)], (target.addr, target.key));
        // The first request fills the caches, so that later ones take the fast path.
        a.post_batch(&[write(0)]);
        a.sent(1);
        b.store(&target, 0, &[0; 64]);
        let list: Vec<_> = (0..3).map(write).collect();
        let too_many = request(2, WR_SEND, &[source.part(0, 1); 9], (0, 0));
        let contradicting =
            request(2, WR_RDMA_READ, &[source.part(0, 8)], (target.addr, target.key)).inline();
        for wrong in [too_many, contradicting] {
            let list = [list[0].clone(), list[1].clone(), wrong];
            assert_eq!(a.attempt(Command::Batch(list.to_vec())).err(), Some(libc::EINVAL));
        }
        // Fifteen unsignalled requests fill all but one slot.
        let mut filling: Vec<_> = (0..15).map(write).collect();
        filling.iter_mut().for_each(|one| one.flags &= !SEND_SIGNALED);
        assert_eq!(b.load(&target, 0, 64), [0; 64]);
        a.post_batch(&filling);
        b.store(&target, 0, &[0; 64]);
        assert_eq!(a.attempt(Command::Batch(list[..2].to_vec())).err(), Some(libc::ENOMEM));
        a.has_nothing(CqKind::Send);
        assert_eq!(b.load(&target, 0, 64), [0; 64]);
        a.post_batch(&[write(5)]);
        assert_eq!(a.sent(1)[0].wr_id, 5);
        assert_eq!(b.load(&target, 0, 8), [7; 8]);
        assert_eq!(a.attempt(Command::Batch(list)).map(|_| ()), Ok(()));
        a.sent(3);
    }
}

/// The requests of a batch behind a failed one are flushed within the call.
#[test]
fn a_failure_flushes_the_rest_of_the_batch() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let source = a.hold(&[7; 64]);
        let target = b.hold(&[0; 64]);
        let write = |wr_id, key| request(wr_id, WR_RDMA_WRITE, &[source.part(0, 8)], (target.addr, key));
        let list = [0, 1, 0, 0].map(|off| target.key ^ off);
        let list: Vec<_> = list.iter().zip(0..).map(|(&key, wr_id)| write(wr_id, key)).collect();
        a.post_batch(&list);
        let found: Vec<_> = a.sent(4).iter().map(|c| (c.wr_id, c.status)).collect();
        let expected = [WC_SUCCESS, WC_REM_ACCESS_ERR, WC_WR_FLUSH_ERR, WC_WR_FLUSH_ERR];
        assert_eq!(found, (0..).zip(expected).collect::<Vec<_>>());
    }
}
