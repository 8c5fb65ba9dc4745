//! The thread of the connection manager: it waits for sockets and timers, and handles their events.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Instant;

use millstream_shm::socket::Listener;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll;

use super::sockets::{EpollSource, GSI, WAKE};
use super::{Engine, process};
use crate::gsi::GsiPort;
use crate::message::{MAX_LEN, Message};
use crate::remote::CmEvent;
use crate::system::{ChannelId, ClaimId, LinkId};

/// The body of the thread: polls until the process exits.
pub(super) fn run(epoll: RawFd) {
    let mut timeout = None;
    let mut events = Vec::with_capacity(64);
    loop {
        events.clear();
        // SAFETY: the engine owns the descriptor until the process ends.
        let epoll = unsafe { BorrowedFd::borrow_raw(epoll) };
        match epoll::wait(epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // The program has closed our descriptor, for example with all descriptors. The connection manager
            // cannot continue.
            Err(_) => return,
        }
        let mut process = process();
        let Some(engine) = process.engine.as_mut() else { return };
        let mut closed = Vec::new();
        for event in &events {
            if let Some(channel) = engine.handle(event.data.u64()) {
                closed.push(channel);
            }
        }
        timeout = engine.expire().map(|time| {
            let left = time.saturating_duration_since(Instant::now());
            // Rounded up, so that the deadline has passed when the wait ends.
            let millis = left.as_millis() as i64 + 1;
            Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 }
        });
        let pause = engine.pause.take();
        if !closed.is_empty() {
            process.remove_channels(&closed);
        }
        drop(process);
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
    }
}

/// Most messages of one link that are handled at once.
const MAX_MESSAGES: usize = 64;

impl Engine {
    /// Handles an event of the descriptor with this token; returns a channel that was closed.
    fn handle(&mut self, token: u64) -> Option<ChannelId> {
        if token == WAKE {
            self.sockets.wake.clear();
            return None;
        }
        if token == GSI {
            self.receive_from_gsi();
            return None;
        }
        match self.sockets.watched.get(&token)? {
            EpollSource::Listener(listener) => {
                match listener.accept().and_then(|link| link.set_nonblocking().map(|()| link)) {
                    Ok(link) => {
                        if let Ok(id) = self.sockets.add(EpollSource::Link(link)) {
                            self.manager.accepted(ClaimId(token), LinkId(id));
                        }
                    }
                    Err(error) => self.pause = Listener::pause(&error),
                }
            }
            EpollSource::Link(_) => self.receive(LinkId(token)),
            EpollSource::PortName(_) => {}
            EpollSource::Channel(_) => {
                let channel = ChannelId(token);
                self.manager.close(&mut self.sockets, channel);
                self.sockets.watched.remove(&token);
                return Some(channel);
            }
        }
        None
    }

    /// Handles messages of other hosts' connection managers.
    fn receive_from_gsi(&mut self) {
        let events = self.sockets.gsi.as_mut().map(GsiPort::receive).unwrap_or_default();
        for event in events {
            match event {
                CmEvent::Message(link, message) => self.manager.message(&mut self.sockets, link, message),
                CmEvent::Request(request) => {
                    let claim = self.sockets.listener(request.name);
                    let link = LinkId(self.sockets.next);
                    self.sockets.next += 1;
                    let Some(gsi) = &mut self.sockets.gsi else { return };
                    let Some(claim) = claim else {
                        gsi.remote.reject(&request);
                        continue;
                    };
                    // As Linux: no answer, so that the peer repeats the request.
                    if self.manager.has_full_backlog(claim, &request.message) {
                        continue;
                    }
                    if !gsi.remote.adopt(link, &request) {
                        continue;
                    }
                    self.manager.accepted(claim, link);
                    self.manager.message(&mut self.sockets, link, request.message);
                }
            }
        }
        if let Some(gsi) = &mut self.sockets.gsi {
            gsi.flush();
        }
    }

    /// Handles expired timers; returns the next deadline.
    fn expire(&mut self) -> Option<Instant> {
        self.manager.expire(&mut self.sockets);
        let remote = self.sockets.gsi.as_mut().and_then(|gsi| {
            gsi.remote.expire(Instant::now());
            gsi.flush();
            gsi.remote.deadline()
        });
        [self.manager.deadline(), remote].into_iter().flatten().min()
    }

    /// Handles messages of a link, and its hang-up. Other threads wait for the lock meanwhile, so a link that sends without
    /// end has to wait for the next round.
    fn receive(&mut self, id: LinkId) {
        let mut buffer = [0; MAX_LEN];
        for _ in 0..MAX_MESSAGES {
            // The message may have closed the link.
            let Some(EpollSource::Link(link)) = self.sockets.watched.get(&id.0) else { return };
            match link.receive(&mut buffer) {
                Ok((0, _)) => return self.manager.hang_up(&mut self.sockets, id),
                Ok((n, _)) => match Message::decode(&buffer[..n]) {
                    Some(message) => self.manager.message(&mut self.sockets, id, message),
                    // Another version, or malformed.
                    None => return self.manager.hang_up(&mut self.sockets, id),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer closed with unread data; what it sent before is still readable.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => return self.manager.hang_up(&mut self.sockets, id),
            }
        }
    }
}
