//! A program's side of a channel.

#![allow(dead_code, reason = "not every test says everything")]

use std::os::fd::{AsRawFd, OwnedFd};

use millstream_cm::abi::{self, ConnParam, Ece, EventAnswer, Header, Plain, cmd, event, ps};
use millstream_cm::address::Address;
use millstream_cm::{Errno, engine};

/// A channel of this process.
pub(crate) struct Channel(OwnedFd);

impl Channel {
    pub(crate) fn open() -> Self {
        Self(engine::open(libc::O_CLOEXEC).expect("a channel"))
    }

    pub(crate) fn command(&self, cmd: u32, body: &impl Plain, room: usize) -> Result<(), Errno> {
        let header = Header { cmd, len_in: size_of_val(body) as u16, len_out: room as u16 };
        let written = [header.bytes(), body.bytes()].concat();
        // SAFETY: answers go to locals of the callers, which outlive the call.
        let done = unsafe { engine::write(self.0.as_raw_fd(), &written) };
        done.expect("it is a channel").map(|n| assert_eq!(n, written.len()))
    }

    pub(crate) fn create(&self, uid: u64) -> u32 {
        let mut id = 0u32;
        let response = (&raw mut id) as u64;
        let body = abi::CreateId { uid, response, ps: ps::TCP, ..abi::CreateId::ZERO };
        self.command(cmd::CREATE_ID, &body, 4).expect("an identifier");
        id
    }

    /// A listener and its port.
    pub(crate) fn listen(&self, uid: u64) -> (u32, u16) {
        let id = self.create(uid);
        let addr = Address { ip: "127.0.0.1".parse().unwrap(), port: 0, scope: 0 }.encode();
        self.command(cmd::BIND_IP, &abi::BindIp { addr, id, response: 0 }, 0).expect("a port");
        self.command(cmd::LISTEN, &abi::Listen { id, backlog: 10 }, 0).expect("listening");
        let mut route = abi::RouteAnswer::ZERO;
        let query = abi::Query { response: (&raw mut route) as u64, id, option: 0 };
        self.command(cmd::QUERY_ROUTE, &query, size_of_val(&route)).expect("its address");
        (id, Address::parse(&route.src).unwrap().port)
    }

    pub(crate) fn event(&self, kind: u32) -> EventAnswer {
        let mut answer = EventAnswer::ZERO;
        let body = abi::GetEvent { response: (&raw mut answer) as u64 };
        self.command(cmd::GET_EVENT, &body, size_of_val(&answer)).expect("an event");
        assert_eq!((answer.event, answer.status), (kind, 0));
        answer
    }

    pub(crate) fn connect(&self, uid: u64, port: u16) -> u32 {
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

    pub(crate) fn accept(&self, id: u32, uid: u64, valid: u8) {
        let conn_param = ConnParam { qp_num: 6, valid, ..ConnParam::ZERO };
        let body = abi::Accept { uid, conn_param, id, reserved: 0, ece: Ece::ZERO };
        self.command(cmd::ACCEPT, &body, 0).unwrap();
    }

    pub(crate) fn disconnect(&self, id: u32) {
        self.command(cmd::DISCONNECT, &abi::Disconnect { id }, 0).unwrap();
    }
}
