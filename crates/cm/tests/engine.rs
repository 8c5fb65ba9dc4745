//! The engine in this process, over its real sockets: a connection from end to end, and peers that say nonsense.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use millstream_cm::abi::{self, ConnParam, Ece, EventAnswer, Header, Plain, cmd, event, ps};
use millstream_cm::address::Address;
use millstream_cm::message::{MAX_LEN, Message, Parameters};
use millstream_cm::{Errno, engine};
use millstream_shm::socket::{Connection, own_uid};

const PATIENCE: Duration = Duration::from_secs(20);

/// A channel of this process.
struct Channel(OwnedFd);

impl Channel {
    fn open() -> Self {
        Self(engine::open(libc::O_CLOEXEC).expect("a channel"))
    }

    fn command(&self, cmd: u32, body: &impl Plain, room: usize) -> Result<(), Errno> {
        let header = Header { cmd, len_in: size_of_val(body) as u16, len_out: room as u16 };
        let written = [header.bytes(), body.bytes()].concat();
        // SAFETY: answers go to locals of the callers, which outlive the call.
        let done = unsafe { engine::write(self.0.as_raw_fd(), &written) };
        done.expect("it is a channel").map(|n| assert_eq!(n, written.len()))
    }

    fn create(&self, uid: u64) -> u32 {
        let mut id = 0u32;
        let response = (&raw mut id) as u64;
        let body = abi::CreateId { uid, response, ps: ps::TCP, ..abi::CreateId::ZERO };
        self.command(cmd::CREATE_ID, &body, 4).expect("an identifier");
        id
    }

    /// A listener, and its port.
    fn listen(&self, uid: u64) -> (u32, u16) {
        let id = self.create(uid);
        let addr = Address { ip: "127.0.0.1".parse().unwrap(), port: 0, scope: 0 }.encode();
        self.command(cmd::BIND_IP, &abi::BindIp { addr, id, response: 0 }, 0).expect("a port");
        self.command(cmd::LISTEN, &abi::Listen { id, backlog: 10 }, 0).expect("listening");
        let mut route = abi::RouteAnswer::ZERO;
        let query = abi::Query { response: (&raw mut route) as u64, id, option: 0 };
        self.command(cmd::QUERY_ROUTE, &query, size_of_val(&route)).expect("its address");
        (id, Address::parse(&route.src).unwrap().port)
    }

    fn event(&self, kind: u32) -> EventAnswer {
        let mut answer = EventAnswer::ZERO;
        let body = abi::GetEvent { response: (&raw mut answer) as u64 };
        self.command(cmd::GET_EVENT, &body, size_of_val(&answer)).expect("an event");
        assert_eq!((answer.event, answer.status), (kind, 0));
        answer
    }

    fn connect(&self, uid: u64, port: u16) -> u32 {
        let id = self.create(uid);
        let dst = Address { ip: "127.0.0.1".parse().unwrap(), port, scope: 0 }.encode();
        let body = abi::ResolveIp { dst, id, timeout_ms: 1000, ..abi::ResolveIp::ZERO };
        self.command(cmd::RESOLVE_IP, &body, 0).unwrap();
        self.event(event::ADDR_RESOLVED);
        self.command(cmd::RESOLVE_ROUTE, &abi::ResolveRoute { id, timeout_ms: 1000 }, 0).unwrap();
        self.event(event::ROUTE_RESOLVED);
        let conn_param = ConnParam { qp_num: 5, valid: 1, ..ConnParam::ZERO };
        self.command(cmd::CONNECT, &abi::Connect { conn_param, id, ..abi::Connect::ZERO }, 0).unwrap();
        id
    }

    fn accept(&self, id: u32, uid: u64, valid: u8) {
        let conn_param = ConnParam { qp_num: 6, valid, ..ConnParam::ZERO };
        let body = abi::Accept { uid, conn_param, id, reserved: 0, ece: Ece::ZERO };
        self.command(cmd::ACCEPT, &body, 0).unwrap();
    }

    fn disconnect(&self, id: u32) {
        self.command(cmd::DISCONNECT, &abi::Disconnect { id }, 0).unwrap();
    }
}

/// A link to the listener on `port`, as another process would have it.
fn link(port: u16) -> Connection {
    Connection::open(&format!("millstream/{}/cm/106/{port}/127.0.0.1", own_uid()), PATIENCE)
        .expect("listening")
}

/// The next message on a link; None at its end.
fn next(link: &Connection) -> Option<Message> {
    let mut bytes = [0; MAX_LEN];
    loop {
        match link.receive(&mut bytes) {
            Ok((0, _)) => return None,
            Ok((n, _)) => return Some(Message::decode(&bytes[..n]).expect("well-formed")),
            // It was hung up with something unread.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn at(port: u16) -> Address {
    Address { ip: "127.0.0.1".parse().unwrap(), port, scope: 0 }
}

#[test]
fn a_connection_from_end_to_end() {
    let (server, client) = (Channel::open(), Channel::open());
    let (_, port) = server.listen(1);
    let id = client.connect(2, port);
    let asked = server.event(event::CONNECT_REQUEST);
    assert_eq!((asked.uid, ConnParam::from_prefix(&asked.param).qp_num), (1, 5));
    server.accept(asked.id, 3, 1);
    assert_eq!(ConnParam::from_prefix(&client.event(event::CONNECT_RESPONSE).param).qp_num, 6);
    client.accept(id, 0, 0);
    assert_eq!(server.event(event::ESTABLISHED).uid, 3);
    client.disconnect(id);
    server.event(event::DISCONNECTED);
    server.disconnect(asked.id);
    client.event(event::DISCONNECTED);
    // Nobody writes another command, so the clock alone brings these.
    client.event(event::TIMEWAIT_EXIT);
    server.event(event::TIMEWAIT_EXIT);
}

#[test]
fn nonsense_ends_its_link_and_nothing_else() {
    let server = Channel::open();
    let (_, port) = server.listen(1);
    let mut bytes = Message::Rep(Parameters::default()).encode();
    let mut said: Vec<Vec<u8>> = vec![
        vec![0],
        vec![0xff; MAX_LEN],
        // Longer than any message.
        vec![1; MAX_LEN + 1],
        // An answer to nothing.
        bytes.clone(),
        Message::Rtu.encode(),
        Message::Dreq.encode(),
    ];
    // Another version's.
    bytes[0] ^= 0x80;
    said.push(bytes);
    for nonsense in &said {
        let link = link(port);
        link.send(nonsense, &[]).unwrap();
        assert_eq!(next(&link), None, "{nonsense:?}");
    }
    // Who says nothing is waited for, and disturbs nobody.
    let silent: Vec<_> = (0..50).map(|_| link(port)).collect();
    let client = Channel::open();
    client.connect(2, port);
    server.event(event::CONNECT_REQUEST);
    drop(silent);
}

#[test]
fn a_peer_may_do_anything_in_any_order() {
    let server = Channel::open();
    let (_, port) = server.listen(1);
    let request = || {
        let parameters = Parameters { qpn: 9, private: vec![7; 255], ..Parameters::default() };
        Message::Req { src: at(1), dst: at(port), parameters }
    };
    // More private data than a request has room for is cut.
    let link_one = link(port);
    link_one.send(&request().encode(), &[]).unwrap();
    let asked = server.event(event::CONNECT_REQUEST);
    let param = ConnParam::from_prefix(&asked.param);
    assert_eq!((param.private_data_len, param.private_data[55], param.private_data[56]), (56, 7, 0));
    // Everything that makes no sense before the answer.
    for message in
        [request(), Message::Rtu, Message::Dreq, Message::Drep, Message::Rep(Parameters::default())]
    {
        link_one.send(&message.encode(), &[]).unwrap();
    }
    server.accept(asked.id, 2, 1);
    assert!(matches!(next(&link_one), Some(Message::Rep(_))));
    for message in [Message::Rtu, Message::Rtu, Message::Drep, request()] {
        link_one.send(&message.encode(), &[]).unwrap();
    }
    assert_eq!(server.event(event::ESTABLISHED).uid, 2);
    // It ends without a word.
    drop(link_one);
    assert_eq!(server.event(event::DISCONNECTED).uid, 2);
}
