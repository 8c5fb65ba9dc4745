//! The server thread: it answers peers' messages. It never blocks on a peer or on a queue pair's lock; the progress
//! thread does work that may.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use std::sync::atomic::Ordering;

use millstream_quantity::Qpn;
use millstream_shm::socket::{Connection, Listener};
use millstream_shm::thread;

use crate::adapter::LocalAdapter;
use crate::event;
use crate::exported_files::FileId;
use crate::ipc::{MESSAGE_LEN, Message, Op, VERSION, srq_event};
use crate::tasks::Task;

/// Runs the server thread.
pub(crate) fn run(adapter: &'static LocalAdapter, listener: &Listener) {
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
        let before = connections.len();
        connections.retain(|connection| !ready.next().unwrap_or(false) || answer(adapter, connection));
        if connections.len() != before {
            adapter.tasks.add(Task::RestoreEvents);
        }
        if fds[0].revents != 0 {
            match listener.accept() {
                // A client that does not read its answers is disconnected.
                Ok(connection) if connection.set_nonblocking().is_ok() => connections.push(connection),
                Ok(_) => {}
                Err(error) => {
                    if let Some(pause) = Listener::pause(&error) {
                        std::thread::sleep(pause);
                    }
                }
            }
        }
    }
}

/// Handles one message; false if the connection must be closed.
fn answer(adapter: &'static LocalAdapter, connection: &Connection) -> bool {
    let mut buffer = [0; MESSAGE_LEN];
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
            // It may have queue pairs in groups. If this hello is read late, its announcement does not come.
            adapter.multicast.said_hello(message.words[4]);
            // A peer may have overwritten it, and each new peer checks it.
            adapter.write_magic();
            let mut hello = adapter.id.hello();
            hello.words[3] = thread::id();
            reply(hello, &[adapter.as_fd()])
        }
        Op::File => {
            let id = FileId { slot: a, generation: b };
            adapter.files.with(id, |fd| reply(message, &[fd])).unwrap_or_else(|| reply(refused, &[]))
        }
        Op::Channel => match adapter.channels.get(a) {
            Some(event) => reply(message, &[event.as_fd()]),
            None => reply(refused, &[]),
        },
        Op::MulticastMember => {
            adapter.multicast.announce(a);
            reply(message, &[])
        }
        Op::Signal => {
            adapter.channels.signal(a);
            true
        }
        Op::Hello | Op::Refused => false,
        Op::QpError
        | Op::RecvPosted
        | Op::SrqLimit
        | Op::CommEst
        | Op::CqOverrun
        | Op::XrcSrqEvent
        | Op::RegionBusy
        | Op::RecvAbandoned => {
            if let Some(task) = Task::of(&message) {
                add_task(adapter, task);
            }
            true
        }
    }
}

/// Adds the task that a peer reports, if the report is plausible.
fn add_task(adapter: &'static LocalAdapter, task: Task) {
    let exists = |qpn: Qpn| adapter.qp_entry(qpn).qpn.load(Ordering::Acquire) == qpn.get();
    let peer_of = |qpn: Qpn| adapter.qp_entry(qpn).dest_qpn.load(Ordering::Acquire);
    let plausible = match task {
        Task::QpError { qpn, from, event, .. } => {
            exists(qpn) && peer_of(qpn) == from.get() && event::may_be_reported(event)
        }
        Task::CommEst { qpn, from, .. } => exists(qpn) && peer_of(qpn) == from.get(),
        Task::Retry { qpn }
        | Task::SrqLimit { qpn }
        | Task::CqOverrun { qpn }
        | Task::RecvAbandoned { qpn } => exists(qpn),
        Task::XrcSrqEvent { number, event } => {
            (srq_event::LIMIT..=srq_event::RECV_ABANDONED).contains(&event)
                && adapter.xrc_srqs.get(number).is_some()
        }
        Task::ShareRegion { key } => adapter.mrs.pages_of(key).is_some(),
        // Peers cannot report these tasks.
        Task::QpFatal { .. } | Task::ReportRecvPosted { .. } | Task::RestoreEvents => false,
    };
    if plausible {
        adapter.tasks.add(task);
    }
}
