//! The engine over its real sockets: a connection from end to end, and malformed messages.

mod common;

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use common::Channel;
use millstream_cm::Errno;
use millstream_cm::abi::{self, ConnParam, EventAnswer, Plain, cmd, event};
use millstream_cm::address::Address;
use millstream_cm::message::{ConnectionParameters, MAX_LEN, Message};
use millstream_shm::socket::{Connection, own_uid};
use millstream_wire::Qpn;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A link to the listener on `port`, as from another process.
fn link(port: u16) -> Connection {
    Connection::open(&format!("millstream/{}/cm/106/{port}/127.0.0.1", own_uid()), TIMEOUT)
        .expect("listening")
}

/// The next message on a link; `None` at its end.
fn next(link: &Connection) -> Option<Message> {
    let mut bytes = [0; MAX_LEN];
    loop {
        match link.receive(&mut bytes) {
            Ok((0, _)) => return None,
            Ok((n, _)) => return Some(Message::decode(&bytes[..n]).expect("well-formed")),
            // The peer closed with unread data.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Waits until the engine has taken all messages of a link, and has handled them: then it raises the event of a request that
/// arrives later.
fn wait_for_engine(link_one: &Connection, server: &Channel, port: u16, request: &Message) {
    let unread = || {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the ioctl stores an int.
        let got = unsafe { libc::ioctl(link_one.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        assert_eq!(got, 0, "{}", io::Error::last_os_error());
        bytes
    };
    let deadline = Instant::now() + TIMEOUT;
    while unread() > 0 {
        assert!(Instant::now() < deadline, "the engine does not read");
        std::thread::sleep(Duration::from_millis(1));
    }
    let later = link(port);
    later.send(&request.encode(), &[]).unwrap();
    server.event(event::CONNECT_REQUEST);
}

fn at(port: u16) -> Address {
    Address { ip: "127.0.0.1".parse().unwrap(), port, scope: 0 }
}

#[test]
fn connect_and_disconnect() {
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
    // No further command is written: timers raise these events.
    client.event(event::TIMEWAIT_EXIT);
    server.event(event::TIMEWAIT_EXIT);
}

#[test]
fn event_that_cannot_be_written_is_kept() {
    let client = Channel::open();
    for uid in [1, 2] {
        let id = client.create(uid);
        let body = abi::ResolveIp { dst: at(1).encode(), id, timeout_ms: 1000, ..abi::ResolveIp::ZERO };
        client.command(cmd::RESOLVE_IP, &body, 0).unwrap();
    }
    let nowhere = abi::GetEvent { response: 0 };
    let failed = client.command(cmd::GET_EVENT, &nowhere, size_of::<EventAnswer>());
    assert_eq!(failed, Err(Errno(libc::EFAULT)));
    for uid in [1, 2] {
        assert_eq!(client.event(event::ADDR_RESOLVED).uid, uid);
    }
}

#[test]
fn malformed_messages_close_only_their_link() {
    let server = Channel::open();
    let (_, port) = server.listen(1);
    let mut bytes = Message::Rep(ConnectionParameters::default()).encode();
    let mut said: Vec<Vec<u8>> = vec![
        vec![0],
        vec![0xff; MAX_LEN],
        // Longer than any message.
        vec![1; MAX_LEN + 1],
        // A reply without a request.
        bytes.clone(),
        Message::Rtu.encode(),
        Message::Dreq.encode(),
    ];
    // Another version.
    bytes[0] ^= 0x80;
    said.push(bytes);
    for nonsense in &said {
        let link = link(port);
        link.send(nonsense, &[]).unwrap();
        assert_eq!(next(&link), None, "{nonsense:?}");
    }
    // Silent links do not disturb others.
    let silent: Vec<_> = (0..50).map(|_| link(port)).collect();
    let client = Channel::open();
    client.connect(2, port);
    server.event(event::CONNECT_REQUEST);
    drop(silent);
}

#[test]
fn messages_in_any_order_are_harmless() {
    let server = Channel::open();
    let (_, port) = server.listen(1);
    let request = || {
        let parameters = ConnectionParameters {
            qpn: Qpn::new(9),
            private: vec![7; 255],
            ..ConnectionParameters::default()
        };
        Message::Req { src: at(1), dst: at(port), parameters }
    };
    // Private data beyond the field of a request is cut off.
    let link_one = link(port);
    link_one.send(&request().encode(), &[]).unwrap();
    let asked = server.event(event::CONNECT_REQUEST);
    let param = ConnParam::from_prefix(&asked.param);
    assert_eq!((param.private_data_len, param.private_data[55], param.private_data[56]), (56, 7, 0));
    // Messages that are invalid before the reply.
    for message in
        [request(), Message::Rtu, Message::Dreq, Message::Drep, Message::Rep(ConnectionParameters::default())]
    {
        link_one.send(&message.encode(), &[]).unwrap();
    }
    wait_for_engine(&link_one, &server, port, &request());
    server.accept(asked.id, 2, 1);
    assert!(matches!(next(&link_one), Some(Message::Rep(_))));
    for message in [Message::Rtu, Message::Rtu, Message::Drep, request()] {
        link_one.send(&message.encode(), &[]).unwrap();
    }
    assert_eq!(server.event(event::ESTABLISHED).uid, 2);
    // The link closes without a DREQ.
    drop(link_one);
    assert_eq!(server.event(event::DISCONNECTED).uid, 2);
}
