//! Lists of send requests do what their requests would do one by one, however the device carries them out.

use millstream_device::types::{
    SEND_SIGNALED, SEND_SOLICITED, WC_OP_RDMA_WRITE, WC_OP_RECV, WC_OP_SEND, WC_REM_OP_ERR, WC_SUCCESS,
    WC_WR_FLUSH_ERR, WR_RDMA_WRITE, WR_SEND,
};

use crate::support::{
    Completion, Kind, Place, Random, Setup, Which, from_environment, pair, pattern, request,
};

/// Requests of a list, at most.
const MOST: u64 = 40;
/// Bytes of a request, at most: some lists are told of in several parts, some in one.
const LARGEST: u64 = 6000;

/// SENDs of many sizes with WRITEs between them, some signalled, some solicited, some inline; too few receive requests wait
/// for most lists, so that the rest of the list waits for those that are posted later.
#[test]
fn everything_arrives_once_and_in_order() {
    let mut random = Random::new(from_environment("MILLSTREAM_SEED", 1));
    for place in Place::BOTH {
        for signal_all in [false, true] {
            let setup = Setup { signal_all, ..Setup::default() };
            let (mut a, mut b) = pair(place, &setup);
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
                    if len <= setup.inline as usize && random.once_in(2) {
                        one = one.inline();
                    }
                    if signal_all || one.flags & SEND_SIGNALED != 0 {
                        sent.push((wr_id, if writes { WC_OP_RDMA_WRITE } else { WC_OP_SEND }));
                    }
                    list.push(one);
                }
                // The last one's completion tells that all are through.
                list.push(request(99, WR_RDMA_WRITE, &[source.part(0, 1)], (written.addr, written.key)));
                sent.push((99, WC_OP_RDMA_WRITE));
                let slot = |at: usize| (at * LARGEST as usize, LARGEST as usize);
                let waiting = random.below(sends.len() as u64 * 2 + 1).min(sends.len() as u64) as usize;
                let mut recv = |range: std::ops::Range<usize>| {
                    range.for_each(|at| b.recv(at as u64, &[places.part(slot(at).0, slot(at).1)]));
                };
                recv(0..waiting);
                a.post_all(&list);
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
                a.has_nothing(Which::Send);
                b.has_nothing(Which::Recv);
            }
        }
    }
}

/// A receiver's completion queue has room for some of the SENDs that would be told of together.
#[test]
fn what_fits_into_a_full_completion_queue_is_delivered() {
    for place in Place::BOTH {
        for room in 1..=8 {
            let (mut a, mut b) = pair(place, &Setup { recv_cqe: 8, ..Setup::default() });
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
