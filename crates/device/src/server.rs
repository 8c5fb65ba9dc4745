//! The thread that answers peers. It never waits for anybody: what needs a queue pair's lock goes
//! to the progress thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use std::sync::atomic::Ordering;
use std::time::Duration;

use millstream_shm::socket::{Connection, Listener};

use crate::event;
use crate::files::FileId;
use crate::greeting::{LEN, Message, Op, VERSION, shared};
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
        if fds[0].revents != 0 {
            match listener.accept() {
                // Who does not read his answers is hung up on rather than waited for.
                Ok(connection) if connection.set_nonblocking().is_ok() => connections.push(connection),
                Ok(_) => {}
                Err(error) => rest_after(&error),
            }
        }
    }
}

/// Without a descriptor to spare, who called is still waiting, and would be noticed again at once.
fn rest_after(error: &io::Error) {
    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Serves one request; false when the connection is over.
fn answer(host: &'static Host, connection: &Connection) -> bool {
    let mut buffer = [0; LEN];
    let (n, _) = match connection.receive(&mut buffer) {
        Ok(received) => received,
        Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
    };
    let Some(message) = Message::decode(&buffer[..n]) else { return false };
    let [a, b, ..] = message.words;
    let reply = |message: Message, fds: &[BorrowedFd<'_>]| connection.send(&message.encode(), fds).is_ok();
    let refused = Message { op: Op::Refused, ..message };
    match message.op {
        Op::Hello if a == VERSION => {
            let hello = Message::new(Op::Hello, [VERSION, host.pid, u32::from(host.asymmetric)]);
            // Should somebody have stored over it: newcomers look at it once.
            host.mark_arena();
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
        Op::Member => {
            host.multicast.mention(a);
            reply(message, &[])
        }
        Op::Signal => {
            if let Some(event) = host.channel(a) {
                event.signal();
            }
            true
        }
        Op::Hello | Op::Refused => false,
        Op::Fault
        | Op::Refilled
        | Op::LimitReached
        | Op::Contact
        | Op::Overrun
        | Op::Shared
        | Op::Abandoned => {
            if let Some(work) = Work::of(&message) {
                report(host, work);
            }
            true
        }
    }
}

/// Passes a peer's report on, if it can be true.
fn report(host: &'static Host, work: Work) {
    let alive = |qpn: u32| host.qp_entry(qpn).qpn.load(Ordering::Acquire) == qpn;
    let peer_of = |qpn: u32| host.qp_entry(qpn).dest_qpn.load(Ordering::Acquire);
    let possible = match work {
        Work::Fault { qpn, from, event } => {
            alive(qpn) && peer_of(qpn) == from && event::may_be_reported(event)
        }
        Work::Contact { qpn, from } => alive(qpn) && peer_of(qpn) == from,
        Work::Retry { qpn }
        | Work::LimitReached { qpn }
        | Work::Overrun { qpn }
        | Work::Abandoned { qpn } => alive(qpn),
        Work::Shared { number, what } => {
            (shared::LIMIT..=shared::ABANDONED).contains(&what) && host.xrc.find(number).is_some()
        }
        // What only this process asks of itself.
        Work::Fatal { .. } | Work::Wake { .. } => false,
    };
    if possible {
        host.progress.add(work);
    }
}
