//! Packets of any form from the peer of queue pairs on the wire, decoded from bytes. A fuzzer varies the bytes (`fuzz/`); a
//! test replays the seeds and random ones.
//!
//! The peer is a socket on another loopback address, which stands for another host. It knows the numbers of the queue pairs,
//! their sequence numbers, and the keys of some regions. For any bytes:
//!
//! - no memory changes that is not registered for that, and no byte of it is sent;
//! - each queue pair is in a state of the specification, and each request completes once;
//! - the device continues to serve a connection to another peer.
//!
//! Runs with `MILLSTREAM_PATH=wire`, in a network namespace without other devices.

mod input;
mod memory;
pub(crate) mod network;
mod witness;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_device::gsi;
use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{SEND_SIGNALED, Sge, WC_OP_RECV_RDMA_WITH_IMM, WC_SUCCESS, Wc};
use millstream_device::{Context, Cq, Pd, Srq, Xrcd};
use millstream_quantity::{Msn, Psn, Qkey, Qpn, Rkey, Srqn};
use millstream_wire::{
    Opcode, Repr, Service, UDP_PORT, aeth, atomic_ack_eth, atomic_eth, bth, deth, ieth, imm_dt, reth, xrceth,
};

use input::Bytes;
use memory::{LEN, LOCAL, Memory, OPEN, PUBLIC};
use network::{HERE, PEER, STRANGER, Sender, connect};
use witness::Witness;

/// The peer's queue pair.
pub(crate) const PEER_QPN: u32 = 0x12_3456;
const QKEY: u32 = 7;
/// Bytes of the smallest path MTU, which makes long messages of few packets.
const MTU: usize = 256;

/// The transport services of the queue pairs, and whether they have a shared receive queue.
const KINDS: [(QpType, bool); 6] = [
    (QpType::Rc, false),
    (QpType::Rc, true),
    (QpType::Uc, false),
    (QpType::Ud, false),
    (QpType::XrcRecv, false),
    (QpType::XrcSend, false),
];

/// Packets that a responder accepts, if the rest is right.
const FREQUENT: [Opcode; 6] = [
    Opcode::RC_SEND_ONLY,
    Opcode::RC_SEND_FIRST,
    Opcode::RC_SEND_LAST,
    Opcode::RC_WRITE_ONLY,
    Opcode::RC_READ_REQUEST,
    Opcode::RC_ACKNOWLEDGE,
];

/// The objects of one run.
struct Objects {
    cq: Arc<Cq>,
    srqs: [Arc<Srq>; 2],
    qps: Vec<Arc<Qp>>,
    _domain: Arc<Xrcd>,
    // Freed last: it is registered until then.
    memory: Memory,
}

impl Objects {
    fn new(context: &Arc<Context>, pd: &Arc<Pd>) -> Self {
        let memory = Memory::new(pd);
        let cq = Cq::new(context, 1024, None).expect("a queue");
        let domain = Xrcd::private(context).expect("a domain");
        let srqs = [
            Srq::new(pd, 8, 1).expect("a shared queue"),
            Srq::for_domain(pd, &domain, &cq, 8, 1).expect("a shared queue"),
        ];
        let capacity =
            QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let make = |(kind, shared): (QpType, bool)| {
            let receives = if shared { RecvSource::Shared(srqs[0].clone()) } else { RecvSource::Own };
            match kind {
                QpType::XrcRecv => Qp::for_domain(&domain),
                _ => Qp::new(pd, &cq, &cq, capacity, false, kind, receives),
            }
            .expect("a queue pair")
        };
        let qps: Vec<_> = KINDS.into_iter().map(make).collect();
        qps.iter().for_each(|qp| connect(qp, PEER, PEER_QPN));
        Self { cq, srqs, qps, _domain: domain, memory }
    }
}

fn modify(qp: &Qp, state: QpState) -> bool {
    qp.modify(&QpAttr { state, ..QpAttr::default() }, attr::STATE).is_ok()
}

/// A posted request.
#[derive(Clone, Copy, Debug)]
struct Posted {
    qp: usize,
    /// It has to complete: it is not in a shared queue, and its queue pair was not reset.
    due: bool,
    /// Bytes of a receive; None for a send request.
    room: Option<u32>,
    completions: u32,
}

/// Totals over all runs, which show that packets have an effect.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) sent: u64,
    pub(crate) answers: u64,
    pub(crate) received: u64,
    pub(crate) failed: u64,
}

/// A device, the sockets of its peers, and a connection that the forged packets do not concern.
pub(crate) struct FuzzSession {
    context: Arc<Context>,
    pd: Arc<Pd>,
    /// The peer's RoCE port, another port of the peer, another host.
    senders: [Sender; 3],
    witness: Witness,
    pub(crate) totals: Totals,
}

impl FuzzSession {
    pub(crate) fn new() -> Self {
        let context = Context::open().expect("the device opens");
        let pd = Pd::new(&context);
        let witness = Witness::new(&context, &pd);
        let senders = [Sender::new(PEER, UDP_PORT), Sender::new(PEER, 0), Sender::new(STRANGER, 0)];
        Self { context, pd, senders, witness, totals: Totals::default() }
    }

    /// Executes the operations that the bytes encode. Panics if a rule is violated.
    pub(crate) fn run(&mut self, bytes: &[u8]) {
        let objects = Objects::new(&self.context, &self.pd);
        let mut run = Run {
            objects: &objects,
            senders: &self.senders,
            posted: BTreeMap::new(),
            expected: [0; KINDS.len()],
            buffer: vec![0; 65_536],
            totals: &mut self.totals,
        };
        for i in 0..6 {
            run.post_receive(i % KINDS.len(), 512);
        }
        let mut bytes = Bytes(bytes);
        while !bytes.0.is_empty() {
            run.step(&mut bytes);
        }
        // Packets are received in order: all forged ones before this.
        self.witness.exchange();
        run.finish();
        for qp in &objects.qps {
            qp.destroy();
        }
        objects.memory.check();
    }
}

/// One run.
struct Run<'a> {
    objects: &'a Objects,
    senders: &'a [Sender; 3],
    posted: BTreeMap<u64, Posted>,
    /// The sequence number of the next request of the peer, for each queue pair.
    expected: [u32; KINDS.len()],
    buffer: Vec<u8>,
    totals: &'a mut Totals,
}

impl Run<'_> {
    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.byte() % 16 {
            0..=7 => self.forge(bytes),
            8 => self.send_raw(bytes),
            9 => {
                let len = bytes.below(256);
                let mut datagram = vec![0; len];
                datagram.fill_with(|| bytes.byte());
                datagram.truncate(len / 4 * 4);
                self.senders[0].send(&mut gsi::packet(Psn::new(bytes.word()), &datagram), true);
                self.totals.sent += 1;
            }
            10 | 11 => self.post_send(bytes),
            12 => {
                let (qp, room) = (bytes.below(KINDS.len()), u32::from(bytes.short()) % 1025);
                self.post_receive(qp, room);
            }
            13 => {
                let qp = bytes.below(KINDS.len());
                match bytes.byte() % 4 {
                    0 => drop(modify(&self.objects.qps[qp], QpState::Err)),
                    1 => drop(modify(&self.objects.qps[qp], QpState::Sqd)),
                    _ => self.reconnect(qp),
                }
            }
            // Some timers expire, as that of a delayed acknowledgement.
            14 => std::thread::sleep(Duration::from_micros(u64::from(bytes.byte()) * 4)),
            _ => {}
        }
        self.poll();
        self.totals.answers += self.senders[0].receive(&mut self.buffer);
    }

    /// Resets a queue pair, which discards its requests, and connects it again.
    fn reconnect(&mut self, qp: usize) {
        assert!(modify(&self.objects.qps[qp], QpState::Reset), "queue pair {qp} cannot be reset");
        self.posted.values_mut().filter(|posted| posted.qp == qp).for_each(|posted| posted.due = false);
        connect(&self.objects.qps[qp], PEER, PEER_QPN);
        self.expected[qp] = 0;
    }

    /// Sends a packet with headers of any values, mostly such that reach the checks behind the first ones.
    fn forge(&mut self, bytes: &mut Bytes<'_>) {
        let qp = bytes.below(KINDS.len());
        let form = bytes.byte();
        let opcode = match bytes.byte() {
            first @ 0..=99 => FREQUENT[usize::from(first) % FREQUENT.len()],
            first => Opcode::ALL[usize::from(first) % Opcode::ALL.len()],
        };
        let service = match self.objects.qps[qp].kind() {
            QpType::Rc => Service::Rc,
            QpType::Uc => Service::Uc,
            QpType::Ud => Service::Ud,
            QpType::XrcRecv | QpType::XrcSend => Service::Xrc,
        };
        let opcode = if form & 7 == 7 { opcode } else { opcode.with_service(service).unwrap_or(opcode) };
        let psn = self.sequence_number(qp, opcode, bytes);
        let mut bth = bth::Repr {
            solicited: form & 8 != 0,
            ack_req: form & 16 != 0,
            selective_ack: form & 32 != 0,
            becn: form & 96 == 96,
            ..bth::Repr::new(opcode, self.objects.qps[qp].qpn(), Psn::new(psn))
        };
        if form & 0x87 == 0x80 {
            bth.dest_qp = Qpn::new(bytes.word());
        }
        let (va, rkey) = self.remote(bytes);
        let payload = match bytes.byte() {
            0..=79 => MTU,
            first => usize::from(first) * if first > 250 { 32 } else { 2 },
        };
        let length = match bytes.byte() {
            0..=99 => payload as u32,
            first @ 100..=199 => payload as u32 + u32::from(first) % 6 * MTU as u32,
            _ => bytes.word(),
        };
        let payload = vec![PUBLIC; if opcode.has_payload() { payload } else { 0 }];
        let qkey = QKEY ^ u32::from(bytes.byte() == 1);
        let srq = self.objects.srqs[1].number() ^ u32::from(bytes.byte() == 1);
        let repr = Repr {
            bth,
            xrceth: Some(xrceth::Repr { srq: Srqn::new(srq) }),
            deth: Some(deth::Repr { qkey: Qkey::new(qkey), src_qp: Qpn::new(PEER_QPN) }),
            reth: Some(reth::Repr { va, rkey, length }),
            atomic_eth: Some(atomic_eth::Repr { va, rkey, swap_or_add: 1, compare: u64::from(bytes.byte()) }),
            aeth: Some(aeth::Repr { syndrome: bytes.byte(), msn: Msn::new(bytes.byte().into()) }),
            atomic_ack_eth: Some(atomic_ack_eth::Repr { original: 3 }),
            imm_dt: Some(imm_dt::Repr { data: [4; 4] }),
            ieth: Some(ieth::Repr { rkey }),
            payload: &payload,
        };
        let mut packet = vec![0; repr.buffer_len()];
        repr.emit(&mut packet);
        self.send_damaged(packet, bytes);
    }

    /// A sequence number: mostly the expected one of a request, or an outstanding one of a response.
    fn sequence_number(&mut self, qp: usize, opcode: Opcode, bytes: &mut Bytes<'_>) -> u32 {
        let form = bytes.byte();
        let near = u32::from(form & 15);
        match form {
            _ if opcode.is_response() && form < 240 => near,
            0..=199 => {
                self.expected[qp] += 1;
                self.expected[qp] - 1
            }
            200..=219 => self.expected[qp] + near,
            220..=239 => self.expected[qp].wrapping_sub(near) & 0xff_ffff,
            _ => bytes.word() & 0xff_ffff,
        }
    }

    /// Address and key of memory, mostly of a region that allows access.
    fn remote(&self, bytes: &mut Bytes<'_>) -> (u64, Rkey) {
        let form = bytes.byte();
        let region = [OPEN, OPEN, OPEN, 1, LOCAL][usize::from(form & 15) % 5];
        let at = match form >> 4 {
            0..=7 => i64::from(bytes.byte()) * 16,
            8..=11 => LEN as i64 - i64::from(bytes.byte()) * 4,
            _ => i64::from(bytes.short() as i16),
        };
        let key = self.objects.memory.mrs[region].key();
        let key = if form >> 4 == 15 { key ^ 1 << (bytes.byte() % 32) } else { key };
        (self.objects.memory.start(region).wrapping_add_signed(at), Rkey::new(key))
    }

    /// Sends a packet, perhaps damaged, from one of the sockets.
    fn send_damaged(&mut self, mut packet: Vec<u8>, bytes: &mut Bytes<'_>) {
        let form = bytes.byte();
        if form & 15 == 15 && !packet.is_empty() {
            let at = bytes.below(48) % packet.len();
            packet[at] ^= bytes.byte();
        }
        if form & 0xf0 == 0xf0 {
            packet.truncate(bytes.byte().into());
        }
        let sender = [0, 0, 0, 0, 0, 0, 1, 2][usize::from(form >> 4 & 7)];
        self.senders[sender].send(&mut packet, form & 15 != 14);
        self.totals.sent += 1;
    }

    /// Sends any bytes. Version and queue pair number are corrected, so that they reach the checks behind them.
    fn send_raw(&mut self, bytes: &mut Bytes<'_>) {
        let mut packet = vec![0; bytes.below(200)];
        packet.fill_with(|| bytes.byte());
        let number = self.objects.qps[bytes.below(KINDS.len())].qpn();
        if let Some(head) = packet.get_mut(1..8) {
            head[0] &= 0xf0;
            head[1..3].fill(0xff);
            head[4..].copy_from_slice(&number.get().to_be_bytes()[1..]);
        }
        self.send_damaged(packet, bytes);
    }

    /// Posts a request whose responses the peer forges.
    fn post_send(&mut self, bytes: &mut Bytes<'_>) {
        let qp = bytes.below(KINDS.len());
        let length = u32::from(bytes.short()) % (LEN as u32 / 2);
        let flags = u32::from(bytes.byte()) & 7 | SEND_SIGNALED;
        let id = self.posted.len() as u64;
        let to = UdDestination {
            on_this_host: false,
            qpn: Qpn::new(PEER_QPN),
            qkey: Qkey::new(QKEY),
            grh: ud_header(),
        };
        let sges = [Sge {
            addr: self.objects.memory.start(LOCAL),
            length,
            lkey: self.objects.memory.mrs[LOCAL].key(),
        }];
        let opcode = u32::from(bytes.byte()) % 16;
        let atomic = matches!(opcode, 5 | 6 | 15);
        let sges = [Sge { length: if atomic { 8 } else { length }, ..sges[0] }];
        let wr = SendWr {
            wr_id: id,
            opcode,
            flags,
            sges: &sges,
            remote_addr: 0x1000,
            rkey: Rkey::new(1),
            compare_add: 1,
            to: (self.objects.qps[qp].kind() == QpType::Ud).then_some(to),
            ..SendWr::default()
        };
        if self.objects.qps[qp].post_send(&wr).is_ok() {
            self.posted.insert(id, Posted { qp, due: true, room: None, completions: 0 });
        }
    }

    fn post_receive(&mut self, qp: usize, room: u32) {
        let (kind, shared) = KINDS[qp];
        let id = self.posted.len() as u64;
        let offset = (id % 6) * 512;
        let sges = [Sge {
            addr: self.objects.memory.start(LOCAL) + offset,
            length: room,
            lkey: self.objects.memory.mrs[LOCAL].key(),
        }];
        let done = match kind {
            QpType::XrcRecv | QpType::XrcSend => self.objects.srqs[1].post(id, &sges),
            _ if shared => self.objects.srqs[0].post(id, &sges),
            _ => self.objects.qps[qp].post_recv(id, &sges),
        };
        if done.is_ok() {
            let due = !shared && !matches!(kind, QpType::XrcRecv | QpType::XrcSend);
            self.posted.insert(id, Posted { qp, due, room: Some(room), completions: 0 });
        }
    }

    /// Takes all completions, and checks each.
    fn poll(&mut self) {
        let mut found = [Wc::default(); 16];
        loop {
            let count = self.objects.cq.poll(&mut found).expect("no overflow");
            for wc in &found[..count] {
                let posted = self.posted.get_mut(&wc.wr_id).expect("a completion of a posted request");
                posted.completions += 1;
                assert_eq!(posted.completions, 1, "request {} completed again: {posted:?}", wc.wr_id);
                if wc.status != WC_SUCCESS {
                    self.totals.failed += 1;
                } else if let Some(room) = posted.room {
                    self.totals.received += 1;
                    let fits = wc.byte_len <= room || wc.opcode == WC_OP_RECV_RDMA_WITH_IMM;
                    assert!(fits, "{} bytes in a receive of {room}", wc.byte_len);
                }
            }
            if count == 0 {
                return;
            }
        }
    }

    /// Checks the states, flushes all queues, and checks that everything has completed.
    fn finish(mut self) {
        for (i, qp) in self.objects.qps.iter().enumerate() {
            let state = qp.state();
            let legal = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err].contains(&state);
            assert!(legal, "queue pair {i} is in {state:?}");
            assert!(modify(qp, QpState::Err), "queue pair {i} cannot be modified from {state:?} to ERR");
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            self.poll();
            let missing = self.posted.iter().find(|(_, posted)| posted.due && posted.completions == 0);
            let Some((id, posted)) = missing else { return };
            assert!(Instant::now() < deadline, "request {id} does not complete: {posted:?}");
            std::thread::yield_now();
        }
    }
}

/// The global routing header of a datagram to the peer.
fn ud_header() -> [u8; 40] {
    let mut header = [0; 40];
    header[0] = 0x60;
    header[8..24].copy_from_slice(&HERE.to_ipv6_mapped().octets());
    header[24..].copy_from_slice(&PEER.to_ipv6_mapped().octets());
    header
}
