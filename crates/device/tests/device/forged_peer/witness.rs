//! A connection that forged packets do not concern.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{Sge, WC_SUCCESS, WR_RDMA_WRITE, WR_SEND, Wc};
use millstream_device::{Context, Cq, Mr, Pd};
use millstream_quantity::Rkey;

use super::network::{HERE, connect};

/// A connection of the device to itself, which forged packets of another peer do not concern.
pub(super) struct Witness {
    cq: Arc<Cq>,
    qps: [Arc<Qp>; 2],
    mr: Mr,
    rounds: u8,
    // Freed last: it is registered until then.
    memory: Vec<u8>,
}

impl Witness {
    pub(super) fn new(context: &Arc<Context>, pd: &Arc<Pd>) -> Self {
        let mut memory = vec![0; 4096];
        let start = memory.as_mut_ptr() as u64;
        let mr = Mr::register(pd, start, 4096, start, 15).expect("registered");
        let cq = Cq::new(context, 64, None).expect("a queue");
        let capacity =
            QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let qps = [(); 2].map(|()| {
            Qp::new(pd, &cq, &cq, capacity, true, QpType::Rc, RecvSource::Own).expect("a queue pair")
        });
        connect(&qps[0], HERE, qps[1].qpn().get());
        connect(&qps[1], HERE, qps[0].qpn().get());
        Self { cq, qps, mr, rounds: 0, memory }
    }

    /// A WRITE and a SEND, which arrive and complete.
    pub(super) fn exchange(&mut self) {
        self.rounds = self.rounds.wrapping_add(1);
        self.memory[0] = self.rounds;
        let start = self.memory.as_ptr() as u64;
        let part = |at: u64| [Sge { addr: start + at, length: 1, lkey: self.mr.key() }];
        self.qps[1].post_recv(0, &part(2048)).expect("room");
        for (opcode, wr_id) in [(WR_RDMA_WRITE, 1), (WR_SEND, 2)] {
            let (sges, rkey) = (part(0), Rkey::new(self.mr.key()));
            let wr =
                SendWr { wr_id, opcode, sges: &sges, remote_addr: start + 1024, rkey, ..SendWr::default() };
            self.qps[0].post_send(&wr).expect("room");
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        let (mut count, mut out) = (0, [Wc::default()]);
        while count < 3 {
            if self.cq.poll(&mut out).expect("no overflow") == 1 {
                assert_eq!(out[0].status, WC_SUCCESS, "of another connection: {:?}", out[0]);
                count += 1;
            }
            assert!(
                Instant::now() < deadline,
                "another connection stands still after {count} of 3 completions"
            );
        }
        // SAFETY: inside the memory, which no request writes any more.
        let arrived = unsafe { [1024, 2048].map(|at| self.memory.as_ptr().add(at).read_volatile()) };
        assert_eq!(arrived, [self.rounds; 2], "data of another connection");
    }
}
