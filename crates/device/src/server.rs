//! The thread that answers peers. It never waits for anybody: what needs a queue pair's lock goes
//! to the progress thread.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use millstream_shm::socket::{Connection, Listener};

use crate::files::FileId;
use crate::greeting::{LEN, Message, Op, PATIENCE, VERSION};
use crate::host::Host;
use crate::progress::Work;

pub(crate) fn run(host: &'static Host, listener: &Listener) {
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        let watched = std::iter::once(listener.as_fd()).chain(connections.iter().map(AsFd::as_fd));
        let mut fds: Vec<_> =
            watched.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: an array of pollfd of the given length.
        if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) } < 0 {
            continue;
        }
        let mut ready = fds[1..].iter().map(|fd| fd.revents != 0);
        connections.retain(|connection| !ready.next().unwrap_or(false) || answer(host, connection));
        if fds[0].revents != 0
            && let Ok(connection) = listener.accept()
            && connection.set_timeout(PATIENCE).is_ok()
        {
            connections.push(connection);
        }
    }
}

/// Serves one request; false when the connection is over.
fn answer(host: &'static Host, connection: &Connection) -> bool {
    let mut buffer = [0; LEN];
    let Ok((n, _)) = connection.receive(&mut buffer) else { return false };
    let Some(message) = Message::decode(&buffer[..n]) else { return false };
    let [a, b, c, ..] = message.words;
    let reply = |message: Message, fds: &[BorrowedFd<'_>]| connection.send(&message.encode(), fds).is_ok();
    let refused = Message::new(Op::Refused, [0]);
    match message.op {
        Op::Hello if a == VERSION => {
            let hello = Message::new(Op::Hello, [VERSION, host.pid, u32::from(host.asymmetric)]);
            reply(hello, &[host.as_fd()])
        }
        Op::File => {
            let id = FileId { slot: a, generation: b };
            host.files.with(id, |fd| reply(message, &[fd])).unwrap_or_else(|| reply(refused, &[]))
        }
        Op::Channel => match host.channel(a) {
            Some(event) => reply(message, &[event.as_fd()]),
            None => reply(refused, &[]),
        },
        Op::Fault => {
            host.progress.add(Work::Fault { qpn: a, from: b, event: c });
            true
        }
        Op::Refilled => {
            host.progress.add(Work::Retry { qpn: a });
            true
        }
        Op::LimitReached => {
            host.progress.add(Work::LimitReached { qpn: a });
            true
        }
        Op::Hello | Op::Refused => false,
    }
}
