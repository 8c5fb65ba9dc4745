//! Managers of several processes on one host, in virtual time.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Manager;
use super::incoming::BACKLOG_RETRY;
use super::{MESSAGE_TIMEOUT, PACKET_LIFE_TIME, TIME_WAIT};
use crate::abi::{
    ConnParam, Ece, EventAnswer, Plain, QPT_RC, QPT_UC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, UdParam, event,
    ps, reason,
};
use crate::address::Address;
use crate::message::{Message, private};
use crate::system::{ChannelId, ClaimId, LinkId, PortName, System};
use crate::{Errno, Result};

const CHANNEL: ChannelId = ChannelId(1);
const OTHER: ChannelId = ChannelId(2);
/// A host to which no link can be opened.
const OTHER_HOST: &str = "198.51.100.1:7471";

/// Events between processes.
#[derive(Debug)]
enum WireEvent {
    Accepted(ClaimId, LinkId),
    Message(LinkId, Message),
    HungUp(LinkId),
}

#[derive(Debug)]
struct Shared {
    now: Instant,
    next: u64,
    names: HashMap<PortName, (usize, ClaimId)>,
    listening: HashSet<ClaimId>,
    /// The other end of each link, and its process.
    links: HashMap<LinkId, (LinkId, usize)>,
    events: Vec<VecDeque<WireEvent>>,
}

/// The system of one process.
struct TestSystem {
    process: usize,
    shared: Rc<RefCell<Shared>>,
    ready: Vec<ChannelId>,
}

impl System for TestSystem {
    fn claim(&mut self, name: PortName) -> io::Result<ClaimId> {
        let mut shared = self.shared.borrow_mut();
        if shared.names.contains_key(&name) {
            return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
        }
        shared.next += 1;
        let claim = ClaimId(shared.next);
        shared.names.insert(name, (self.process, claim));
        Ok(claim)
    }

    fn listen(&mut self, claim: ClaimId) -> io::Result<()> {
        assert!(self.shared.borrow_mut().listening.insert(claim));
        Ok(())
    }

    fn release(&mut self, claim: ClaimId) {
        self.shared.borrow_mut().names.retain(|_, (_, held)| *held != claim);
    }

    fn is_claimed(&mut self, name: PortName) -> bool {
        self.shared.borrow().names.contains_key(&name)
    }

    fn connect(&mut self, _own: IpAddr, name: PortName) -> io::Result<LinkId> {
        if name.ip == at(OTHER_HOST).ip {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let mut shared = self.shared.borrow_mut();
        let found = shared.names.get(&name).or_else(|| shared.names.get(&name.wildcard()));
        let (process, claim) = *found.ok_or(io::ErrorKind::ConnectionRefused)?;
        if !shared.listening.contains(&claim) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        shared.next += 2;
        let (mine, theirs) = (LinkId(shared.next - 1), LinkId(shared.next));
        shared.links.insert(mine, (theirs, process));
        shared.links.insert(theirs, (mine, self.process));
        shared.events[process].push_back(WireEvent::Accepted(claim, theirs));
        Ok(mine)
    }

    fn send(&mut self, link: LinkId, message: &Message) {
        let mut shared = self.shared.borrow_mut();
        let Some((other, process)) = shared.links.get(&link).copied() else { return };
        let message = Message::decode(&message.encode()).expect("well-formed");
        shared.events[process].push_back(WireEvent::Message(other, message));
    }

    fn close(&mut self, link: LinkId) {
        let mut shared = self.shared.borrow_mut();
        if let Some((other, process)) = shared.links.remove(&link) {
            shared.events[process].push_back(WireEvent::HungUp(other));
        }
    }

    fn ready(&mut self, channel: ChannelId) {
        self.ready.push(channel);
    }

    fn source_address(&mut self, to: IpAddr) -> Option<IpAddr> {
        (to == at(OTHER_HOST).ip).then(|| at("10.0.0.1:0").ip)
    }

    fn path_mtu(&mut self, _own: IpAddr, _to: IpAddr) -> u8 {
        5
    }

    fn addresses(&mut self) -> Vec<IpAddr> {
        ["127.0.0.1", "10.0.0.1", "::1"].map(|ip| ip.parse().unwrap()).into()
    }

    fn gid_index(&mut self, gid: &[u8; 16]) -> Option<u8> {
        Some(gid[15] + 40)
    }

    fn node_guid(&mut self) -> u64 {
        0x1122
    }

    fn random(&mut self) -> u32 {
        let mut shared = self.shared.borrow_mut();
        shared.next += 1;
        shared.next as u32 * 7919
    }

    fn now(&mut self) -> Instant {
        self.shared.borrow().now
    }
}

/// A process: its manager and its system.
struct ProcessState {
    manager: Manager,
    system: TestSystem,
}

impl ProcessState {
    fn create(&mut self, uid: u64, space: u16) -> u32 {
        self.manager.create(&mut self.system, CHANNEL, uid, space, 0).unwrap()
    }

    fn event(&mut self) -> Option<EventAnswer> {
        self.manager.next_event(CHANNEL).map(|(event, _)| event)
    }

    /// The next event, which must have this type and status.
    fn expect(&mut self, kind: u32, status: i32) -> EventAnswer {
        let event = self.event().unwrap_or_else(|| panic!("event {kind} is missing"));
        assert_eq!((event.event, event.status.cast_signed()), (kind, status));
        event
    }

    fn expect_nothing(&mut self) {
        assert!(self.event().is_none());
    }

    fn bind(&mut self, id: u32, address: &str) -> Result<()> {
        self.manager.bind(&mut self.system, CHANNEL, id, at(address))
    }

    fn listen(&mut self, uid: u64, space: u16, address: &str) -> u32 {
        let id = self.create(uid, space);
        self.bind(id, address).unwrap();
        self.manager.listen(&mut self.system, CHANNEL, id, 2).unwrap();
        id
    }

    fn resolve(&mut self, id: u32, address: &str) {
        self.manager.resolve_addr(&mut self.system, CHANNEL, id, None, at(address)).unwrap();
        self.expect(event::ADDR_RESOLVED, 0);
        self.manager.resolve_route(&mut self.system, CHANNEL, id).unwrap();
        self.expect(event::ROUTE_RESOLVED, 0);
    }

    fn connect(&mut self, uid: u64, space: u16, address: &str, param: &ConnParam) -> u32 {
        let id = self.create(uid, space);
        self.resolve(id, address);
        self.manager.connect(&mut self.system, CHANNEL, id, param, Ece::ZERO).unwrap();
        id
    }

    fn accept(&mut self, id: u32, uid: u64, param: Option<&ConnParam>) -> Result<()> {
        let param = param.map(|param| (param, Ece::ZERO));
        self.manager.accept(&mut self.system, CHANNEL, id, uid, param)
    }

    fn disconnect(&mut self, id: u32) {
        self.manager.disconnect(&mut self.system, CHANNEL, id).unwrap();
    }

    fn destroy(&mut self, id: u32) -> Result<u32> {
        self.manager.destroy(&mut self.system, CHANNEL, id)
    }
}

fn at(address: &str) -> Address {
    let socket: std::net::SocketAddr = address.parse().unwrap();
    Address { ip: socket.ip(), port: socket.port(), scope: 0 }
}

/// Two processes.
struct Pair {
    shared: Rc<RefCell<Shared>>,
    server: ProcessState,
    client: ProcessState,
}

fn pair() -> Pair {
    let shared = Rc::new(RefCell::new(Shared {
        now: Instant::now(),
        next: 0,
        names: HashMap::new(),
        listening: HashSet::new(),
        links: HashMap::new(),
        events: vec![VecDeque::new(), VecDeque::new()],
    }));
    let process = |process| {
        let mut manager = Manager::default();
        manager.open(CHANNEL);
        manager.open(OTHER);
        ProcessState { manager, system: TestSystem { process, shared: shared.clone(), ready: Vec::new() } }
    };
    Pair { server: process(0), client: process(1), shared: shared.clone() }
}

impl Pair {
    /// Delivers all messages in flight.
    fn settle(&mut self) {
        loop {
            let mut quiet = true;
            for (number, process) in [&mut self.server, &mut self.client].into_iter().enumerate() {
                let happening = self.shared.borrow_mut().events[number].pop_front();
                let Some(happening) = happening else { continue };
                quiet = false;
                let ProcessState { manager, system } = process;
                match happening {
                    WireEvent::Accepted(claim, link) => manager.accepted(claim, link),
                    WireEvent::Message(link, message) => manager.message(system, link, message),
                    WireEvent::HungUp(link) => manager.hang_up(system, link),
                }
            }
            if quiet {
                return;
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.shared.borrow_mut().now += time;
        for process in [&mut self.server, &mut self.client] {
            process.manager.expire(&mut process.system);
        }
        self.settle();
    }

    /// Establishes a connection; returns the identifiers of server and client.
    fn connected(&mut self) -> (u32, u32) {
        self.server.listen(1, ps::TCP, "127.0.0.1:7471");
        let client = self.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
        self.settle();
        let server = self.server.expect(event::CONNECT_REQUEST, 0).id;
        self.server.accept(server, 3, Some(&reply())).unwrap();
        self.settle();
        self.client.expect(event::CONNECT_RESPONSE, 0);
        self.client.accept(client, 0, None).unwrap();
        self.settle();
        assert_eq!(self.server.expect(event::ESTABLISHED, 0).uid, 3);
        (server, client)
    }

    /// Kills the client process.
    fn kill_client(&mut self) {
        let links: Vec<LinkId> = {
            let shared = self.shared.borrow();
            shared.links.iter().filter(|(_, (_, other))| *other == 0).map(|(link, _)| *link).collect()
        };
        for link in links {
            self.client.system.close(link);
        }
        self.shared.borrow_mut().events[1].clear();
        self.settle();
    }
}

fn param(qp_num: u32, private: &[u8]) -> ConnParam {
    let mut param = ConnParam { qp_num, valid: 1, private_data_len: private.len() as u8, ..ConnParam::ZERO };
    param.private_data[..private.len()].copy_from_slice(private);
    param
}

fn request() -> ConnParam {
    let sizes = ConnParam { responder_resources: 5, initiator_depth: 6, ..param(0x111, b"please") };
    ConnParam { retry_count: 3, rnr_retry_count: 4, srq: 1, ..sizes }
}

fn reply() -> ConnParam {
    let sizes = ConnParam { responder_resources: 7, initiator_depth: 8, ..param(0x222, b"welcome") };
    ConnParam { retry_count: 1, rnr_retry_count: 2, ..sizes }
}

fn conn(event: &EventAnswer) -> ConnParam {
    ConnParam::from_prefix(&event.param)
}

#[test]
fn parameters_reach_the_queue_pairs() {
    let mut pair = pair();
    pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    let client = pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    let asked = pair.server.expect(event::CONNECT_REQUEST, 0);
    assert_eq!(asked.uid, 1, "the listener's");
    let seen = conn(&asked);
    // The outbound limit of one side is the inbound limit of the other.
    assert_eq!((seen.qp_num, seen.responder_resources, seen.initiator_depth), (0x111, 6, 5));
    assert_eq!((seen.retry_count, seen.rnr_retry_count, seen.srq), (3, 4, 1));
    assert_eq!(usize::from(seen.private_data_len), private::REQ, "the whole field, as in the kernel");
    assert_eq!(&seen.private_data[..7], b"please\0");

    let attributes = |process: &mut ProcessState, id, state| {
        process.manager.qp_attributes(&mut process.system, CHANNEL, id, state).unwrap()
    };
    let server = asked.id;
    let passive = attributes(&mut pair.server, server, 2);
    assert_eq!((passive.dest_qp_num, passive.max_dest_rd_atomic), (0x111, 6));
    pair.server.accept(server, 3, Some(&reply())).unwrap();
    pair.settle();
    let answered = pair.client.expect(event::CONNECT_RESPONSE, 0);
    assert_eq!(usize::from(conn(&answered).private_data_len), private::REP);
    assert_eq!((conn(&answered).qp_num, conn(&answered).responder_resources), (0x222, 8));

    let active = [1, 2, 3].map(|state| attributes(&mut pair.client, client, state));
    let passive = [1, 2, 3].map(|state| attributes(&mut pair.server, server, state));
    assert_eq!(active[0].access, 0b1110);
    assert_eq!((active[1].dest_qp_num, active[1].max_dest_rd_atomic), (0x222, 8));
    assert_eq!((active[2].max_rd_atomic, active[2].retry_cnt, active[2].rnr_retry), (7, 3, 2));
    assert_eq!((passive[2].max_rd_atomic, passive[2].retry_cnt, passive[2].rnr_retry), (8, 3, 4));
    // Each side starts with the PSN that the other expects.
    assert_eq!(active[1].rq_psn, passive[2].sq_psn);
    assert_eq!(passive[1].rq_psn, active[2].sq_psn);
    assert_ne!(active[1].rq_psn, passive[1].rq_psn);
    assert_eq!(active[1].ah.sgid_index, 41, "where the device has 127.0.0.1");
    assert_eq!(active[1].ah.dgid, at("127.0.0.1:0").gid());
}

/// A listener and a client of port space IB with these queue pair types; the client has sent its request.
fn typed(pair: &mut Pair, listener: u8, client: u8) -> u32 {
    let create = |process: &mut ProcessState, uid, qp_type| {
        process.manager.create(&mut process.system, CHANNEL, uid, ps::IB, qp_type).unwrap()
    };
    let id = create(&mut pair.server, 1, listener);
    pair.server.bind(id, "127.0.0.1:7471").unwrap();
    pair.server.manager.listen(&mut pair.server.system, CHANNEL, id, 2).unwrap();
    let id = create(&mut pair.client, 2, client);
    pair.client.resolve(id, "127.0.0.1:7471");
    let ProcessState { manager, system } = &mut pair.client;
    manager.connect(system, CHANNEL, id, &request(), Ece::ZERO).unwrap();
    pair.settle();
    id
}

/// The masks of `cm_init_qp_rtr_attr` and `cm_init_qp_rts_attr` in Linux.
#[test]
fn attributes_are_those_of_the_transport() {
    const AV_TO_PSN: u32 = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 20;
    const RESPONDER: u32 = AV_TO_PSN | 1 << 15 | 1 << 17;
    const SENDER: u32 = 1 | 1 << 16;
    const REQUESTER: u32 = SENDER | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 9;
    for (active, passive, active_masks, passive_masks) in [
        (QPT_RC, QPT_RC, [RESPONDER, REQUESTER], [RESPONDER, REQUESTER]),
        (QPT_UC, QPT_UC, [AV_TO_PSN, SENDER], [AV_TO_PSN, SENDER]),
        (QPT_XRC_SEND, QPT_XRC_RECV, [AV_TO_PSN, REQUESTER], [RESPONDER, SENDER | 1 << 9]),
        // A listener without a type takes that of the request.
        (QPT_UC, 0, [AV_TO_PSN, SENDER], [AV_TO_PSN, SENDER]),
    ] {
        let mut pair = pair();
        let client = typed(&mut pair, passive, active);
        let asked = pair.server.expect(event::CONNECT_REQUEST, 0);
        pair.server.accept(asked.id, 3, Some(&reply())).unwrap();
        pair.settle();
        let answered = conn(&pair.client.expect(event::CONNECT_RESPONSE, 0));
        let masks = |process: &mut ProcessState, id| {
            let attributes = |state| process.manager.qp_attributes(&mut process.system, CHANNEL, id, state);
            [2, 3].map(attributes).map(|attributes| attributes.unwrap().mask)
        };
        assert_eq!(masks(&mut pair.client, client), active_masks, "{active}");
        assert_eq!(masks(&mut pair.server, asked.id), passive_masks, "{passive}");
        let seen = conn(&asked);
        let requested = (seen.responder_resources, seen.initiator_depth, seen.retry_count, seen.srq);
        let replied = (answered.responder_resources, answered.initiator_depth, answered.srq);
        if active == QPT_XRC_SEND {
            assert_eq!((requested, seen.rnr_retry_count), ((6, 0, 0, 0), 0));
            assert_eq!(replied, (0, 7, 1));
        } else {
            assert_eq!((requested, seen.rnr_retry_count), ((6, 5, 3, 1), 4));
            assert_eq!(replied, (8, 7, 0));
        }
    }
}

#[test]
fn requests_of_another_transport_are_rejected() {
    for (listener, client) in [
        (QPT_RC, QPT_UC),
        (QPT_UC, QPT_RC),
        (QPT_RC, QPT_XRC_SEND),
        (QPT_XRC_SEND, QPT_XRC_SEND),
        (QPT_UD, QPT_RC),
    ] {
        let mut pair = pair();
        typed(&mut pair, listener, client);
        pair.server.expect_nothing();
        pair.client.expect(event::REJECTED, i32::from(reason::CONSUMER));
    }
    let mut pair = pair();
    let id = pair.client.manager.create(&mut pair.client.system, CHANNEL, 2, ps::IB, QPT_XRC_RECV).unwrap();
    pair.client.resolve(id, "127.0.0.1:7471");
    let ProcessState { manager, system } = &mut pair.client;
    let refused = manager.connect(system, CHANNEL, id, &request(), Ece::ZERO);
    assert_eq!(refused, Err(Errno(libc::EINVAL)), "it only receives");
}

#[test]
fn the_ack_timeout_of_an_accepted_identifier_counts() {
    let mut pair = pair();
    let (server, client) = pair.connected();
    let mut timeout = |set| {
        let ProcessState { manager, system } = &mut pair.server;
        if let Some(code) = set {
            manager.set_ack_timeout(CHANNEL, server, code).unwrap();
        }
        manager.qp_attributes(system, CHANNEL, server, 3).unwrap().timeout
    };
    assert_eq!([timeout(None), timeout(Some(7))], [PACKET_LIFE_TIME + 1, 7]);
    let ProcessState { manager, system } = &mut pair.client;
    assert_eq!(manager.qp_attributes(system, CHANNEL, client, 3).unwrap().timeout, PACKET_LIFE_TIME + 1);
}

#[test]
fn disconnect_reports_one_event_per_side() {
    let mut pair = pair();
    let (server, client) = pair.connected();
    pair.client.disconnect(client);
    pair.settle();
    let event = pair.server.expect(event::DISCONNECTED, 0);
    assert_eq!(conn(&event).private_data_len, 0, "as in the kernel");
    // The other end must reply first.
    pair.client.expect_nothing();
    pair.server.disconnect(server);
    pair.settle();
    pair.client.expect(event::DISCONNECTED, 0);
    pair.pass(TIME_WAIT);
    pair.client.expect(event::TIMEWAIT_EXIT, 0);
    pair.server.expect(event::TIMEWAIT_EXIT, 0);
    assert_eq!(pair.client.destroy(client), Ok(5), "the events that the program took");
    pair.server.expect_nothing();
}

#[test]
fn simultaneous_disconnects() {
    let mut pair = pair();
    let (server, client) = pair.connected();
    pair.client.disconnect(client);
    pair.server.disconnect(server);
    pair.settle();
    pair.server.expect(event::DISCONNECTED, 0);
    pair.client.expect(event::DISCONNECTED, 0);
    pair.server.expect_nothing();
    pair.client.expect_nothing();
}

#[test]
fn unanswered_dreq_times_out() {
    let mut pair = pair();
    let (_, client) = pair.connected();
    pair.client.disconnect(client);
    pair.settle();
    pair.pass(MESSAGE_TIMEOUT);
    pair.client.expect(event::DISCONNECTED, -libc::ETIMEDOUT);
}

#[test]
fn destroying_an_identifier_disconnects() {
    let mut pair = pair();
    let (server, client) = pair.connected();
    pair.client.destroy(client).unwrap();
    pair.settle();
    pair.server.expect(event::DISCONNECTED, 0);
    pair.server.disconnect(server);
    assert_eq!(pair.client.destroy(client), Err(Errno(libc::ENOENT)));
}

#[test]
fn dreq_before_accept_is_deferred() {
    let mut pair = pair();
    pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    let client = pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    let server = pair.server.expect(event::CONNECT_REQUEST, 0).id;
    pair.server.accept(server, 3, Some(&reply())).unwrap();
    pair.server.disconnect(server);
    pair.settle();
    pair.client.expect(event::CONNECT_RESPONSE, 0);
    pair.client.expect_nothing();
    pair.client.accept(client, 0, None).unwrap();
    pair.client.expect(event::DISCONNECTED, 0);
}

#[test]
fn disconnecting_before_there_is_a_connection_has_no_effect() {
    let mut pair = pair();
    pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    let client = pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.client.disconnect(client);
    pair.settle();
    let server = pair.server.expect(event::CONNECT_REQUEST, 0).id;
    pair.server.disconnect(server);
    pair.server.accept(server, 3, Some(&reply())).unwrap();
    pair.settle();
    pair.client.expect(event::CONNECT_RESPONSE, 0);
    pair.client.disconnect(client);
    pair.client.accept(client, 0, None).unwrap();
    pair.settle();
    pair.server.expect(event::ESTABLISHED, 0);
    pair.client.expect_nothing();
}

#[test]
fn missing_listener_rejects() {
    let mut pair = pair();
    pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.client.expect(event::REJECTED, i32::from(reason::INVALID_SERVICE_ID));
    // A bound port does not accept connections.
    let bound = pair.server.create(1, ps::TCP);
    pair.server.bind(bound, "127.0.0.1:7472").unwrap();
    pair.client.connect(3, ps::TCP, "127.0.0.1:7472", &request());
    pair.settle();
    pair.client.expect(event::REJECTED, i32::from(reason::INVALID_SERVICE_ID));
    pair.client.connect(4, ps::UDP, "127.0.0.1:7471", &request());
    // As in the kernel's `ib_cm_sidr_status`.
    pair.client.expect(event::UNREACHABLE, 1);
}

#[test]
fn error_of_the_path_to_another_host_is_not_the_reply_of_a_listener_here() {
    let mut pair = pair();
    for space in [ps::TCP, ps::UDP] {
        pair.client.listen(1, space, "0.0.0.0:7471");
        pair.client.connect(2, space, OTHER_HOST, &request());
        pair.settle();
        pair.client.expect(event::UNREACHABLE, -libc::EMFILE);
        pair.client.expect_nothing();
    }
}

#[test]
fn listener_rejects_with_private_data() {
    let mut pair = pair();
    pair.server.listen(1, ps::TCP, "0.0.0.0:7471");
    pair.client.connect(2, ps::TCP, "10.0.0.1:7471", &request());
    pair.settle();
    let server = pair.server.expect(event::CONNECT_REQUEST, 0).id;
    let ProcessState { manager, system } = &mut pair.server;
    assert_eq!(manager.reject(system, CHANNEL, server, 5, b""), Err(Errno(libc::EINVAL)));
    manager.reject(system, CHANNEL, server, 0, b"busy").unwrap();
    pair.settle();
    let said = pair.client.expect(event::REJECTED, i32::from(reason::CONSUMER));
    assert_eq!(&conn(&said).private_data[..5], b"busy\0");
    assert_eq!(usize::from(conn(&said).private_data_len), private::REJ);
    pair.server.expect_nothing();
}

#[test]
fn requests_beyond_the_backlog_wait() {
    let mut pair = pair();
    // The backlog is 2.
    pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    for uid in 2..6 {
        pair.client.connect(uid, ps::TCP, "127.0.0.1:7471", &request());
    }
    pair.settle();
    pair.client.expect_nothing();
    for _ in 0..2 {
        pair.server.expect(event::CONNECT_REQUEST, 0);
    }
    pair.server.expect_nothing();
    // Both were taken, so two more may be pending.
    pair.pass(2 * BACKLOG_RETRY);
    for _ in 0..2 {
        pair.server.expect(event::CONNECT_REQUEST, 0);
    }
    pair.client.expect_nothing();
}

#[test]
fn a_request_that_waits_for_the_backlog_is_withdrawn_or_rejected_with_its_listener() {
    let mut pair = pair();
    let listener = pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    let clients: Vec<u32> =
        (2..6).map(|uid| pair.client.connect(uid, ps::TCP, "127.0.0.1:7471", &request())).collect();
    pair.settle();
    pair.client.destroy(clients[2]).unwrap();
    pair.settle();
    assert_eq!(pair.server.manager.deferred.len(), 1);
    pair.server.destroy(listener).unwrap();
    pair.settle();
    pair.pass(2 * BACKLOG_RETRY);
    for _ in 0..2 {
        pair.client.expect(event::REJECTED, i32::from(reason::CONSUMER));
    }
    pair.client.expect(event::REJECTED, i32::from(reason::INVALID_SERVICE_ID));
    pair.client.expect_nothing();
}

#[test]
#[cfg_attr(miri, ignore = "all identifiers take minutes")]
fn requests_without_a_free_identifier_take_no_place_in_the_backlog() {
    let mut pair = pair();
    pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    let mut last = 0;
    while let Ok(id) = pair.server.manager.create(&mut pair.server.system, CHANNEL, 0, ps::TCP, 0) {
        last = id;
    }
    // The backlog is 2.
    for uid in 2..4 {
        pair.client.connect(uid, ps::TCP, "127.0.0.1:7471", &request());
        pair.settle();
        pair.client.expect(event::REJECTED, i32::from(reason::CONSUMER));
    }
    pair.server.destroy(last).unwrap();
    pair.client.connect(4, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    pair.server.expect(event::CONNECT_REQUEST, 0);
}

#[test]
fn destroyed_listener_rejects_pending_requests() {
    let mut pair = pair();
    let listener = pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    pair.server.destroy(listener).unwrap();
    pair.settle();
    pair.client.expect(event::REJECTED, i32::from(reason::CONSUMER));
    pair.server.expect_nothing();
}

#[test]
fn silent_server_is_unreachable() {
    let mut pair = pair();
    pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    pair.pass(MESSAGE_TIMEOUT - Duration::from_millis(1));
    pair.client.expect_nothing();
    pair.pass(Duration::from_millis(1));
    pair.client.expect(event::UNREACHABLE, -libc::ETIMEDOUT);
    // The client has timed out already.
    let server = pair.server.expect(event::CONNECT_REQUEST, 0).id;
    assert_eq!(pair.server.accept(server, 3, Some(&reply())), Err(Errno(libc::EINVAL)));
}

#[test]
fn dead_client_is_detected_in_every_state() {
    let mut waiting = pair();
    waiting.server.listen(1, ps::TCP, "127.0.0.1:7471");
    waiting.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    waiting.settle();
    waiting.kill_client();
    let server = waiting.server.expect(event::CONNECT_REQUEST, 0).id;
    waiting.server.expect_nothing();
    assert_eq!(waiting.server.accept(server, 3, Some(&reply())), Err(Errno(libc::EINVAL)));

    let mut accepted = pair();
    accepted.server.listen(1, ps::TCP, "127.0.0.1:7471");
    accepted.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    accepted.settle();
    let server = accepted.server.expect(event::CONNECT_REQUEST, 0).id;
    accepted.server.accept(server, 3, Some(&reply())).unwrap();
    accepted.settle();
    accepted.kill_client();
    accepted.server.expect(event::REJECTED, i32::from(reason::CONSUMER));

    let mut established = pair();
    established.connected();
    established.kill_client();
    established.server.expect(event::DISCONNECTED, 0);
    established.server.expect_nothing();
}

#[test]
fn ports_have_one_owner() {
    const IN_USE: Result<()> = Err(Errno(libc::EADDRINUSE));
    const NOT_AVAILABLE: Result<()> = Err(Errno(libc::EADDRNOTAVAIL));
    let mut pair = pair();
    let bound = pair.server.create(1, ps::TCP);
    pair.server.bind(bound, "127.0.0.1:7471").unwrap();
    let mut try_all = |expected: [(&str, Result<()>); 4], space| {
        for process in [&mut pair.server, &mut pair.client] {
            for (address, expected) in expected {
                let id = process.create(2, space);
                assert_eq!(process.bind(id, address), expected, "{address}");
                process.destroy(id).unwrap();
            }
        }
    };
    let (same, any) = ("127.0.0.1:7471", "0.0.0.0:7471");
    // Another address of this host is free; an address of another host cannot be bound.
    let other = ("10.0.0.1:7471", Ok(()));
    let foreign = ("192.0.2.1:7471", NOT_AVAILABLE);
    try_all([(same, IN_USE), (any, NOT_AVAILABLE), other, foreign], ps::TCP);
    try_all([(same, Ok(())), (any, Ok(())), other, foreign], ps::UDP);
    pair.server.destroy(bound).unwrap();
    let id = pair.client.create(3, ps::TCP);
    assert_eq!(pair.client.bind(id, any), Ok(()), "given back");
    let id = pair.server.create(4, ps::TCP);
    assert_eq!(pair.server.bind(id, same), NOT_AVAILABLE, "a wildcard means every address");
    // Both families, unless IPV6_V6ONLY is set.
    assert_eq!(pair.server.bind(id, "[::]:7471"), IN_USE);
    pair.server.manager.set_v6only(CHANNEL, id, true).unwrap();
    assert_eq!(pair.server.bind(id, "[::]:7471"), Ok(()));
    // Later, the option must not change the families.
    assert_eq!(pair.server.manager.set_v6only(CHANNEL, id, true), Ok(()));
    assert_eq!(pair.server.manager.set_v6only(CHANNEL, id, false), Err(Errno(libc::EINVAL)));
    let one_address = pair.server.create(5, ps::TCP);
    pair.server.bind(one_address, "[::1]:7472").unwrap();
    assert_eq!(pair.server.manager.set_v6only(CHANNEL, one_address, true), Ok(()));
}

#[test]
fn port_zero_gets_an_ephemeral_port() {
    let mut pair = pair();
    let mut ports = Vec::new();
    for _ in 0..50 {
        let id = pair.server.create(1, ps::TCP);
        pair.server.bind(id, "127.0.0.1:0").unwrap();
        let ProcessState { manager, system } = &mut pair.server;
        let route = manager.query_route(system, CHANNEL, id).unwrap();
        ports.push(Address::parse(&route.src).unwrap().port);
        assert_eq!(route.node_guid.to_be(), 0x1122);
    }
    ports.sort_unstable();
    assert!(ports[0] >= 32768);
    ports.dedup();
    assert_eq!(ports.len(), 50);
}

#[test]
fn reused_ports_cannot_listen() {
    let mut pair = pair();
    let ids = [1, 2].map(|uid| {
        let id = pair.server.create(uid, ps::TCP);
        pair.server.manager.set_reuse(CHANNEL, id, true).unwrap();
        pair.server.bind(id, "127.0.0.1:7471").unwrap();
        id
    });
    let ProcessState { manager, system } = &mut pair.server;
    assert_eq!(manager.listen(system, CHANNEL, ids[0], 1), Err(Errno(libc::EADDRINUSE)));
    manager.destroy(system, CHANNEL, ids[1]).unwrap();
    manager.listen(system, CHANNEL, ids[0], 1).unwrap();
}

#[test]
fn sidr_requests_find_the_service() {
    let mut pair = pair();
    pair.server.listen(1, ps::UDP, "127.0.0.1:7471");
    let client = pair.client.connect(2, ps::UDP, "127.0.0.1:7471", &param(0, b"where?"));
    pair.settle();
    let asked = pair.server.expect(event::CONNECT_REQUEST, 0);
    let seen = UdParam::from_prefix(&asked.param);
    assert_eq!(&seen.private_data[..7], b"where?\0");
    assert_eq!(usize::from(seen.private_data_len), private::SIDR_REQ);
    pair.server.accept(asked.id, 3, Some(&param(0x333, b"here"))).unwrap();
    pair.settle();
    let found = UdParam::from_prefix(&pair.client.expect(event::ESTABLISHED, 0).param);
    assert_eq!((found.qp_num, found.qkey), (0x333, 0x0123_4567));
    assert_eq!((found.ah_attr.dgid, found.ah_attr.is_global), (at("127.0.0.1:0").gid(), 1));
    // Destroying the server's identifier does not affect a client that has the address.
    pair.server.destroy(asked.id).unwrap();
    pair.settle();
    pair.client.expect_nothing();
    let ProcessState { manager, system } = &mut pair.client;
    let attributes = manager.qp_attributes(system, CHANNEL, client, 1).unwrap();
    assert_eq!((attributes.mask, attributes.qkey), (1 | 16 | 32 | 64, 0x0123_4567));
}

#[test]
fn sidr_requests_are_rejected_or_time_out() {
    let mut pair = pair();
    pair.server.listen(1, ps::UDP, "127.0.0.1:7471");
    pair.client.connect(2, ps::UDP, "127.0.0.1:7471", &param(0, b""));
    pair.settle();
    let server = pair.server.expect(event::CONNECT_REQUEST, 0).id;
    let ProcessState { manager, system } = &mut pair.server;
    manager.reject(system, CHANNEL, server, 0, b"no").unwrap();
    pair.settle();
    let refused = UdParam::from_prefix(&pair.client.expect(event::UNREACHABLE, 2).param);
    assert_eq!(&refused.private_data[..3], b"no\0");
    assert_eq!(usize::from(refused.private_data_len), private::SIDR_REP, "the whole field, as in the kernel");
    pair.client.connect(3, ps::UDP, "127.0.0.1:7471", &param(0, b""));
    pair.settle();
    pair.pass(MESSAGE_TIMEOUT);
    pair.client.expect(event::UNREACHABLE, -libc::ETIMEDOUT);
}

/// Other hosts see no hang-up.
#[test]
fn destroying_a_datagram_request_sends_a_refusal() {
    let mut pair = pair();
    pair.server.listen(1, ps::UDP, "127.0.0.1:7471");
    pair.client.connect(2, ps::UDP, "127.0.0.1:7471", &param(0, b""));
    pair.settle();
    let server = pair.server.expect(event::CONNECT_REQUEST, 0).id;
    pair.server.destroy(server).unwrap();
    let sent = pair.shared.borrow_mut().events[1].pop_front();
    assert!(matches!(sent, Some(WireEvent::Message(_, Message::SidrRep { status: 2, .. }))), "{sent:?}");
}

#[test]
fn migration_moves_events() {
    let mut pair = pair();
    let listener = pair.server.listen(1, ps::TCP, "127.0.0.1:7471");
    pair.client.connect(2, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    let ProcessState { manager, system } = &mut pair.server;
    system.ready.clear();
    assert_eq!(manager.migrate(system, CHANNEL, listener, OTHER), Ok(0));
    assert_eq!(system.ready, [OTHER], "whoever polls it learns of the event");
    assert!(manager.next_event(CHANNEL).is_none());
    let (asked, last) = manager.next_event(OTHER).unwrap();
    assert!(last && asked.event == event::CONNECT_REQUEST);
    let reply = reply();
    assert_eq!(manager.accept(system, OTHER, asked.id, 3, Some((&reply, Ece::ZERO))), Ok(()));
    assert_eq!(manager.destroy(system, CHANNEL, listener), Err(Errno(libc::EINVAL)), "not there any more");
}

#[test]
fn closing_a_channel_destroys_its_identifiers() {
    let mut pair = pair();
    pair.connected();
    let ProcessState { manager, system } = &mut pair.server;
    manager.close(system, CHANNEL);
    pair.settle();
    pair.client.expect(event::DISCONNECTED, 0);
    pair.client.connect(9, ps::TCP, "127.0.0.1:7471", &request());
    pair.client.expect(event::REJECTED, i32::from(reason::INVALID_SERVICE_ID));
}

#[test]
fn closing_a_channel_releases_a_listener_after_its_pending_request() {
    let mut pair = pair();
    let ids = [1, 2].map(|uid| pair.server.create(uid, ps::TCP));
    let listener = pair.server.listen(3, ps::TCP, "127.0.0.1:7471");
    for id in ids {
        pair.server.destroy(id).unwrap();
    }
    pair.client.connect(4, ps::TCP, "127.0.0.1:7471", &request());
    pair.settle();
    // The request has a lower number than its listener, so it is destroyed first.
    let ProcessState { manager, system } = &mut pair.server;
    assert!(manager.ids.get(ids[0]).is_some() && ids[0] < listener);
    manager.close(system, CHANNEL);
    assert_eq!(manager.ids.iter().count(), 0);
    pair.settle();
    pair.client.expect(event::REJECTED, i32::from(reason::CONSUMER));
    let id = pair.client.create(5, ps::TCP);
    assert_eq!(pair.client.bind(id, "127.0.0.1:7471"), Ok(()), "given back");
}

#[test]
fn groups_are_joined_and_left() {
    let mut pair = pair();
    let id = pair.client.create(2, ps::UDP);
    let ProcessState { manager, system } = &mut pair.client;
    let group = at("239.1.2.3:0");
    assert_eq!(manager.join(system, CHANNEL, id, 7, group), Err(Errno(libc::EINVAL)), "no device yet");
    // Group addresses are resolved like other addresses.
    pair.client.resolve(id, "239.1.2.3:0");
    let ProcessState { manager, system } = &mut pair.client;
    let route = manager.query_route(system, CHANNEL, id).unwrap();
    assert_eq!(Address::parse(&route.src).unwrap().ip, at("10.0.0.1:0").ip, "not the loopback one");
    assert_eq!(manager.join(system, CHANNEL, id, 7, at("10.0.0.1:0")), Err(Errno(libc::EINVAL)));
    let membership = manager.join(system, CHANNEL, id, 7, group).unwrap();
    let joined = pair.client.expect(event::MULTICAST_JOIN, 0);
    assert_eq!(joined.uid, 7);
    let av = UdParam::from_prefix(&joined.param);
    assert_eq!((av.qp_num, av.qkey, av.ah_attr.dgid), (0xff_ffff, 0x0123_4567, group.gid()));
    let ProcessState { manager, system } = &mut pair.client;
    assert_eq!(manager.join(system, CHANNEL, id, 8, group), Err(Errno(libc::EADDRINUSE)));
    assert_eq!(manager.leave(CHANNEL, membership), Ok(1));
    assert_eq!(manager.leave(CHANNEL, membership), Err(Errno(libc::ENOENT)));
}

#[test]
fn invalid_commands_fail() {
    const INVALID: Result<()> = Err(Errno(libc::EINVAL));
    let mut pair = pair();
    let id = pair.client.create(2, ps::TCP);
    let ProcessState { manager, system } = &mut pair.client;
    assert!(manager.create(system, CHANNEL, 2, 0x999, QPT_UD).is_err());
    assert_eq!(manager.connect(system, CHANNEL, id, &request(), Ece::ZERO), INVALID, "not resolved");
    assert_eq!(manager.resolve_route(system, CHANNEL, id), INVALID);
    assert_eq!(manager.disconnect(system, CHANNEL, id), INVALID);
    assert_eq!(manager.qp_attributes(system, CHANNEL, id, 1).err(), Some(Errno(libc::EINVAL)));
    assert_eq!(manager.disconnect(system, CHANNEL, 99), Err(Errno(libc::ENOENT)));
    manager.resolve_addr(system, CHANNEL, id, None, at("192.0.2.7:1")).unwrap();
    pair.client.expect(event::ADDR_ERROR, -libc::EHOSTUNREACH);
    pair.client.resolve(id, "127.0.0.1:7471");
    let ProcessState { manager, system } = &mut pair.client;
    let long = param(1, &[1; private::REQ + 1]);
    assert_eq!(manager.connect(system, CHANNEL, id, &long, Ece::ZERO), INVALID, "no room in the message");
    assert_eq!(
        manager.qp_attributes(system, CHANNEL, id, 2).err(),
        Some(Errno(libc::EINVAL)),
        "no answer yet"
    );
}
