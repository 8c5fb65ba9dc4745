//! Two endpoints in virtual time, over a network that drops, duplicates, reorders and corrupts packets.

#![allow(dead_code, unreachable_pub, missing_docs)]

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use millstream_proto::{
    Access, Atomic, Changes, Config, Connection, DeliveryError, Disposition, Event, Instant,
    IpIdentification, Memory, Mtu, NakReason, ReceiveId, Received, SendConfig, SendModifier, SendOp,
    SendRequest, Service, Status, TransmitLimits, WorkId,
};
use millstream_wire::icrc::Flow;
use millstream_wire::{
    Msn, Opcode, Operation, Packet, Pkey, Psn, Qkey, Qpn, Repr, Rkey, Srqn, Syndrome, aeth, atomic_eth, bth,
    deth, ieth, imm_dt, reth, xrceth,
};

/// A deterministic random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn happens(&mut self, probability: f64) -> bool {
        ((self.next() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend(self.next().to_ne_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

#[derive(Clone, Debug)]
pub struct Region {
    pub va: u64,
    pub bytes: Vec<u8>,
    pub allowed: Vec<Access>,
    pub may_be_invalidated: bool,
}

/// Memory and receive queue of an application.
#[derive(Debug, Default)]
pub struct World {
    /// Memory of send requests.
    pub work: HashMap<WorkId, Vec<u8>>,
    /// Send requests with inaccessible memory.
    pub unreadable: HashSet<WorkId>,
    pub receives: VecDeque<(ReceiveId, Vec<u8>)>,
    pub taken: HashMap<ReceiveId, Vec<u8>>,
    pub unwritable: HashSet<ReceiveId>,
    pub regions: HashMap<Rkey, Region>,
    /// Counters of bytes and operations, which show repeated execution.
    pub reads: u64,
    pub writes: u64,
    pub atomics: u64,
    pub local: Vec<WorkId>,
    /// Existing shared receive queues, the one that requests name, and the one selected last.
    pub queues: HashSet<Srqn>,
    pub names: Srqn,
    pub selected: Srqn,
    /// The queue of each receive request.
    pub taken_from: Vec<(ReceiveId, Srqn)>,
}

impl World {
    pub fn region(&mut self, rkey: u32, va: u64, len: usize) -> &mut Region {
        let region = Region {
            va,
            bytes: vec![0; len],
            allowed: vec![Access::Read, Access::Write, Access::Atomic],
            may_be_invalidated: true,
        };
        self.regions.insert(Rkey::new(rkey), region);
        self.regions.get_mut(&Rkey::new(rkey)).unwrap()
    }

    pub fn receive(&mut self, id: u64, len: usize) {
        self.receives.push_back((ReceiveId(id), vec![0xee; len]));
    }

    fn find(&mut self, rkey: Rkey, va: u64, len: usize, access: Access) -> Result<&mut [u8], NakReason> {
        let region = self.regions.get_mut(&rkey).ok_or(NakReason::RemoteAccess)?;
        let offset = va.checked_sub(region.va).ok_or(NakReason::RemoteAccess)?;
        let room = (region.bytes.len() as u64).checked_sub(offset).ok_or(NakReason::RemoteAccess)?;
        if len as u64 > room || !region.allowed.contains(&access) {
            return Err(NakReason::RemoteAccess);
        }
        Ok(&mut region.bytes[offset as usize..offset as usize + len])
    }
}

impl Memory for World {
    fn gather(&mut self, id: WorkId, offset: u32, into: &mut [u8]) -> Result<(), Status> {
        if self.unreadable.contains(&id) {
            return Err(Status::LocalProtection);
        }
        let offset = offset as usize;
        into.copy_from_slice(&self.work[&id][offset..offset + into.len()]);
        Ok(())
    }

    fn scatter(&mut self, id: WorkId, offset: u32, from: &[u8]) -> Result<(), Status> {
        if self.unreadable.contains(&id) {
            return Err(Status::LocalProtection);
        }
        let offset = offset as usize;
        self.work.get_mut(&id).unwrap()[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn shared_queue(&mut self, _: WorkId) -> Srqn {
        self.names
    }

    fn select(&mut self, queue: Srqn) -> Result<(), NakReason> {
        self.selected = queue;
        if self.queues.contains(&queue) { Ok(()) } else { Err(NakReason::InvalidRequest) }
    }

    fn local(&mut self, id: WorkId) -> Result<(), Status> {
        if self.unreadable.contains(&id) {
            return Err(Status::Bind);
        }
        self.local.push(id);
        Ok(())
    }

    fn take_receive(&mut self) -> Option<ReceiveId> {
        let (id, memory) = self.receives.pop_front()?;
        self.taken.insert(id, memory);
        self.taken_from.push((id, self.selected));
        Some(id)
    }

    fn deliver(&mut self, id: ReceiveId, offset: u32, from: &[u8]) -> Result<(), DeliveryError> {
        if self.unwritable.contains(&id) {
            return Err(DeliveryError::Protection);
        }
        let memory = self.taken.get_mut(&id).expect("taken, and not completed");
        let room = memory.len().checked_sub(offset as usize).ok_or(DeliveryError::TooLong)?;
        if from.len() > room {
            return Err(DeliveryError::TooLong);
        }
        memory[offset as usize..offset as usize + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn check(&mut self, rkey: Rkey, va: u64, len: u32, access: Access) -> Result<(), NakReason> {
        assert!(len > 0);
        self.find(rkey, va, len as usize, access).map(|_| ())
    }

    fn write(&mut self, rkey: Rkey, va: u64, from: &[u8]) -> Result<(), NakReason> {
        self.find(rkey, va, from.len(), Access::Write)?.copy_from_slice(from);
        self.writes += from.len() as u64;
        Ok(())
    }

    fn write_atomically(&mut self, rkey: Rkey, va: u64, bytes: [u8; 8]) -> Result<(), NakReason> {
        assert_eq!(va % 8, 0);
        self.find(rkey, va, 8, Access::Write)?.copy_from_slice(&bytes);
        self.atomics += 1;
        Ok(())
    }

    fn read(&mut self, rkey: Rkey, va: u64, into: &mut [u8]) -> Result<(), NakReason> {
        into.copy_from_slice(self.find(rkey, va, into.len(), Access::Read)?);
        self.reads += into.len() as u64;
        Ok(())
    }

    fn atomic(&mut self, rkey: Rkey, va: u64, operation: Atomic) -> Result<u64, NakReason> {
        assert_eq!(va % 8, 0);
        let word = self.find(rkey, va, 8, Access::Atomic)?;
        let original = u64::from_ne_bytes((&*word).try_into().unwrap());
        let new = match operation {
            Atomic::FetchAdd(add) => original.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if original == compare => swap,
            Atomic::CompareSwap { .. } => original,
        };
        word.copy_from_slice(&new.to_ne_bytes());
        self.atomics += 1;
        Ok(original)
    }

    fn invalidate(&mut self, rkey: Rkey) -> Result<(), NakReason> {
        match self.regions.get(&rkey) {
            Some(region) if region.may_be_invalidated => {
                self.regions.remove(&rkey);
                Ok(())
            }
            _ => Err(NakReason::RemoteAccess),
        }
    }
}

/// Faults of the network, each a probability.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    pub loss: f64,
    pub duplication: f64,
    /// Delivered after a later packet.
    pub reordering: f64,
    pub corruption: f64,
    pub latency: Duration,
}

impl Network {
    pub const PERFECT: Self = Self {
        loss: 0.0,
        duplication: 0.0,
        reordering: 0.0,
        corruption: 0.0,
        latency: Duration::from_micros(5),
    };
}

/// The first end.
pub const A: usize = 0;
pub const B: usize = 1;

pub struct Endpoint {
    pub connection: Connection,
    pub world: World,
    pub events: Vec<Event>,
    /// Completed receive requests with their memory.
    pub received: Vec<(Received, Vec<u8>)>,
}

impl Endpoint {
    /// Completions of send requests, in order.
    pub fn completions(&self) -> Vec<(u64, Status)> {
        let completed = |event: &Event| match event {
            Event::Completed { id, status } => Some((id.0, *status)),
            _ => None,
        };
        self.events.iter().filter_map(completed).collect()
    }
}

/// Whether a packet from an end is delivered.
pub type Filter = Box<dyn FnMut(usize, &Packet<&[u8]>) -> bool>;

pub struct Pair {
    pub ends: [Endpoint; 2],
    pub network: Network,
    pub now: Instant,
    pub random: Random,
    in_flight: BTreeMap<(Instant, u64), (usize, Vec<u8>)>,
    sent: u64,
    /// Inspects each packet and decides whether it is delivered.
    pub filter: Option<Filter>,
    pub limits: TransmitLimits,
    pub buffer: usize,
    pub dispositions: Vec<(usize, Disposition)>,
}

pub const ADDRESSES: [&str; 2] = ["10.0.0.1", "10.0.0.2"];
pub const QPNS: [u32; 2] = [0x11, 0xfffff2];

pub fn address(end: usize) -> IpAddr {
    ADDRESSES[end].parse().unwrap()
}

/// UDP source port of an end.
pub fn source_port(end: usize) -> u16 {
    50000 + end as u16
}

pub fn flow(from: usize) -> Flow {
    Flow::new((address(from), source_port(from)), (address(1 - from), 4791)).unwrap()
}

/// Default configuration of an end.
pub fn config(end: usize, mtu: Mtu) -> Config {
    Config {
        service: Service::Rc,
        flow: flow(end),
        local_qp: Qpn::new(QPNS[end]),
        remote_qp: Qpn::new(QPNS[1 - end]),
        pkey: Pkey::DEFAULT,
        mtu,
        receive_psn: psn(1 - end),
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 12,
    }
}

/// The first PSN of an end, close to wrap-around.
pub fn psn(end: usize) -> Psn {
    [Psn::new(0xff_ffe0), Psn::new(0x7f_fff0)][end]
}

pub fn send_config(end: usize) -> SendConfig {
    SendConfig {
        send_psn: psn(end),
        max_rd_atomic: 4,
        ack_timeout: 8,
        retry_count: 7,
        rnr_retry: 7,
        window: 256,
        probe: None,
    }
}

/// Changes that leave all attributes of the default configuration as they are.
pub fn changes(end: usize) -> Changes {
    let (Config { flow, max_dest_rd_atomic, min_rnr_timer, .. }, send) =
        (config(end, Mtu::B256), send_config(end));
    let SendConfig { max_rd_atomic, ack_timeout, retry_count, rnr_retry, .. } = send;
    Changes { flow, max_dest_rd_atomic, min_rnr_timer, max_rd_atomic, ack_timeout, retry_count, rnr_retry }
}

impl Pair {
    pub fn new(mtu: Mtu, seed: u64) -> Self {
        Self::with([config(A, mtu), config(B, mtu)], [send_config(A), send_config(B)], seed)
    }

    pub fn with(configs: [Config; 2], sends: [SendConfig; 2], seed: u64) -> Self {
        let end = |end: usize| {
            let mut connection = Connection::new(configs[end]);
            connection.start(sends[end]);
            Endpoint { connection, world: World::default(), events: Vec::new(), received: Vec::new() }
        };
        Self {
            ends: [end(A), end(B)],
            network: Network::PERFECT,
            now: Instant::from_nanos(1_000_000),
            random: Random(seed),
            in_flight: BTreeMap::new(),
            sent: 0,
            filter: None,
            limits: TransmitLimits {
                packets: u32::MAX,
                byte_budget: u64::MAX,
                identification: IpIdentification::Zero,
            },
            buffer: 65536,
            dispositions: Vec::new(),
        }
    }

    pub fn post(&mut self, end: usize, id: u64, work: SendOp, memory: Vec<u8>) {
        self.post_with(end, id, work, memory, false);
    }

    pub fn post_with(&mut self, end: usize, id: u64, work: SendOp, memory: Vec<u8>, fence: bool) {
        let end = &mut self.ends[end];
        let (id, len) = (WorkId(id), memory.len() as u32);
        end.world.work.insert(id, memory);
        end.connection
            .post(SendRequest { id, work, len, fence, solicited: false })
            .expect("a request that can be posted");
    }

    pub fn send(&mut self, end: usize, id: u64, message: Vec<u8>) {
        self.post(end, id, SendOp::Send(SendModifier::None), message);
    }

    /// Delivers a packet to an end, without faults.
    pub fn inject(&mut self, to: usize, packet: Vec<u8>) {
        self.sent += 1;
        self.in_flight.insert((self.now, self.sent), (to, packet));
    }

    fn collect(&mut self, end: usize) {
        let end = &mut self.ends[end];
        assert!(end.world.taken.len() <= 1, "one receive request is in use at a time");
        while let Some(event) = end.connection.poll_event() {
            end.events.push(event);
            if let Event::Received(received) = event {
                let memory = end.world.taken.remove(&received.id).expect("a receive request comes back once");
                end.received.push((received, memory));
            }
        }
    }

    /// Sends all pending packets.
    pub fn transmit(&mut self) {
        let mut buffer = vec![0xdd; self.buffer];
        for from in [A, B] {
            loop {
                let end = &mut self.ends[from];
                let Some(sent) =
                    end.connection.poll_transmit(self.now, &mut end.world, self.limits, &mut buffer)
                else {
                    break;
                };
                assert_eq!(sent.packets as usize, sent.len.div_ceil(sent.segment));
                for (nth, packet) in buffer[..sent.len].chunks(sent.segment).enumerate() {
                    self.carry(from, packet, nth as u16);
                }
                self.collect(from);
            }
            self.collect(from);
        }
    }

    fn carry(&mut self, from: usize, bytes: &[u8], nth: u16) {
        let packet = Packet::new_checked(bytes).expect("a packet that was built is one");
        let identification = if self.limits.identification == IpIdentification::Counted { nth } else { 0 };
        assert!(flow(from).verify(&packet, identification), "the ICRC of {packet:x?}");
        let mtu = self.ends[from].connection.config().mtu.bytes() as usize;
        assert!(packet.payload().len() <= mtu);
        if let Some(filter) = &mut self.filter
            && !filter(from, &packet)
        {
            return;
        }
        let network = self.network;
        let copies = if self.random.happens(network.duplication) { 2 } else { 1 };
        for _ in 0..copies {
            if self.random.happens(network.loss) {
                continue;
            }
            let mut bytes = bytes.to_vec();
            if self.random.happens(network.corruption) {
                let at = self.random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.random.below(8);
            }
            let mut latency = network.latency;
            if self.random.happens(network.reordering) {
                latency += latency * (1 + self.random.below(30) as u32) / 10;
            }
            self.sent += 1;
            self.in_flight.insert((self.now + latency, self.sent), (1 - from, bytes));
        }
    }

    fn arrive(&mut self, to: usize, bytes: &[u8], check: bool) {
        self.arrive_from(source_port(1 - to), to, bytes, check);
    }

    fn arrive_from(&mut self, port: u16, to: usize, bytes: &[u8], check: bool) {
        let Ok(packet) = Packet::new_checked(bytes) else { return };
        if check && !flow(1 - to).verify(&packet, 0) && self.limits.identification == IpIdentification::Zero {
            return;
        }
        let end = &mut self.ends[to];
        let disposition =
            end.connection.handle_datagram(self.now, (address(1 - to), port).into(), &packet, &mut end.world);
        self.dispositions.push((to, disposition));
        self.take_kept(to);
    }

    /// Handles reordered packets of an end, and its events after each packet.
    pub fn take_kept(&mut self, to: usize) {
        loop {
            self.collect(to);
            let end = &mut self.ends[to];
            if !end.connection.handle_reordered(&mut end.world) {
                break;
            }
        }
    }

    /// Advances to the next event; false if there is none.
    pub fn step(&mut self) -> bool {
        self.transmit();
        let timeouts = self.ends.iter().filter_map(|end| end.connection.poll_timeout());
        let arrival = self.in_flight.first_key_value().map(|(key, _)| key.0);
        let Some(next) = timeouts.chain(arrival).min() else { return false };
        self.now = self.now.max(next);
        while let Some(first) = self.in_flight.first_entry()
            && first.key().0 <= self.now
        {
            let (to, bytes) = first.remove();
            self.arrive(to, &bytes, true);
        }
        for end in [A, B] {
            if self.ends[end].connection.poll_timeout().is_some_and(|at| at <= self.now) {
                self.ends[end].connection.handle_timeout(self.now);
                self.collect(end);
            }
        }
        true
    }

    /// Runs until no event is left.
    ///
    /// # Panics
    /// After many steps, which indicate a livelock.
    pub fn run(&mut self) {
        for _ in 0..2_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("no end");
    }

    /// Runs for a time.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.transmit();
            let timeouts = self.ends.iter().filter_map(|end| end.connection.poll_timeout());
            let arrival = self.in_flight.first_key_value().map(|(key, _)| key.0);
            match timeouts.chain(arrival).min() {
                Some(next) if next <= end => self.step(),
                _ => break,
            };
        }
        self.now = end;
    }
}

/// A packet that a test builds for one side.
#[derive(Clone, Debug)]
pub struct Craft {
    pub opcode: Opcode,
    pub psn: Psn,
    pub ack_req: bool,
    pub selective_ack: bool,
    pub va: u64,
    pub rkey: Rkey,
    pub length: u32,
    pub syndrome: Syndrome,
    pub msn: u32,
    pub queue: u32,
    pub words: [u64; 2],
    pub payload: Vec<u8>,
}

impl Craft {
    pub fn new(opcode: Opcode, psn: Psn) -> Self {
        Self {
            opcode,
            psn,
            ack_req: true,
            selective_ack: false,
            va: 0,
            rkey: Rkey::new(0),
            length: 0,
            syndrome: Syndrome::ACK_UNLIMITED,
            msn: 0,
            words: [0; 2],
            queue: 0,
            payload: Vec::new(),
        }
    }

    pub fn remote(self, va: u64, rkey: Rkey, length: u32) -> Self {
        Self { va, rkey, length, ..self }
    }

    pub fn payload(self, payload: Vec<u8>) -> Self {
        Self { payload, ..self }
    }

    pub fn says(self, syndrome: Syndrome) -> Self {
        Self { syndrome, ..self }
    }

    /// The packet as sent by `from`.
    pub fn from(&self, from: usize) -> Vec<u8> {
        self.to_qp(from, Qpn::new(QPNS[1 - from]))
    }

    pub fn to_qp(&self, from: usize, dest_qp: Qpn) -> Vec<u8> {
        let bth = bth::Repr {
            migrated: false,
            ack_req: self.ack_req,
            selective_ack: self.selective_ack,
            ..bth::Repr::new(self.opcode, dest_qp, self.psn)
        };
        let repr = Repr {
            xrceth: Some(xrceth::Repr { srq: Srqn::new(self.queue) }),
            deth: Some(deth::Repr { qkey: Qkey::new(self.length), src_qp: Qpn::new(QPNS[from]) }),
            reth: Some(reth::Repr { va: self.va, rkey: self.rkey, length: self.length }),
            atomic_eth: Some(atomic_eth::Repr {
                va: self.va,
                rkey: self.rkey,
                swap_or_add: self.words[0],
                compare: self.words[1],
            }),
            aeth: Some(aeth::Repr { syndrome: self.syndrome.to_byte(), msn: Msn::new(self.msn) }),
            imm_dt: Some(imm_dt::Repr { data: [1, 2, 3, 4] }),
            ieth: Some(ieth::Repr { rkey: self.rkey }),
            ..Repr::new(bth, &self.payload)
        };
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&mut bytes);
        let covered = bytes.len() - 4;
        let icrc = flow(from).icrc(&bytes[..covered], 0);
        bytes[covered..].copy_from_slice(&icrc);
        bytes
    }
}

/// The fields of a packet that tests inspect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub opcode: Opcode,
    pub psn: Psn,
    pub ack_req: bool,
    pub selective_ack: bool,
    /// The first 64 packets of a selective acknowledgement's bitmap.
    pub stored: Option<u64>,
    pub syndrome: Option<Syndrome>,
    pub msn: Option<u32>,
    pub length: Option<u32>,
    pub payload: usize,
}

fn bitmap(packet: &Packet<&[u8]>) -> Option<u64> {
    let is_selective = packet.opcode().operation() == Operation::SelectiveAcknowledge;
    let bytes = packet.payload().iter().take(8);
    is_selective.then(|| bytes.rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte)))
}

impl Pair {
    /// Delivers a packet to an end at once.
    pub fn give(&mut self, to: usize, bytes: &[u8]) -> Disposition {
        self.arrive(to, bytes, true);
        self.dispositions.pop().expect("a packet with the right ICRC").1
    }

    /// Delivers a packet from another UDP source port of the peer's host at once. Its ICRC is not checked.
    pub fn give_from_port(&mut self, port: u16, to: usize, bytes: &[u8]) -> Disposition {
        self.arrive_from(port, to, bytes, false);
        self.dispositions.pop().expect("a packet").1
    }

    /// Takes the packets that an end sends; they are not delivered.
    pub fn take(&mut self, from: usize) -> Vec<Sent> {
        let mut sent = Vec::new();
        let mut buffer = vec![0; self.buffer];
        loop {
            let end = &mut self.ends[from];
            let Some(burst) =
                end.connection.poll_transmit(self.now, &mut end.world, self.limits, &mut buffer)
            else {
                break;
            };
            for packet in buffer[..burst.len].chunks(burst.segment) {
                let packet = Packet::new_checked(packet).expect("a packet");
                sent.push(Sent {
                    opcode: packet.opcode(),
                    psn: packet.bth().psn(),
                    ack_req: packet.bth().ack_req(),
                    selective_ack: packet.bth().selective_ack(),
                    stored: bitmap(&packet),
                    syndrome: packet.aeth().map(|header| Syndrome::from_byte(header.syndrome())),
                    msn: packet.aeth().map(|header| header.msn().get()),
                    length: packet.reth().map(|header| header.length()),
                    payload: packet.payload().len(),
                });
            }
        }
        self.collect(from);
        sent
    }

    /// Advances time.
    pub fn wait(&mut self, end: usize, time: Duration) {
        self.now = self.now + time;
        self.ends[end].connection.handle_timeout(self.now);
        self.collect(end);
    }
}
