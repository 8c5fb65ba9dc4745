//! The thread of a member: answers processes that join, receives forwarded packets and notices, and reads the shared
//! socket.

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use millstream_shm::socket::{Connection, Listener};
use millstream_shm::{EventFd, poll_readable};

use super::inbox::{self, Inbox, Received};
use super::message::{Message, VERSION};
use super::{ANSWER_TIMEOUT, SocketSlots, update};
use crate::datagram::RxBuffers;
use crate::udp::{Shared, receive};

/// Most messages that the thread takes from its inbox before it looks at the other sockets.
const MAX_MESSAGES: usize = 64;

/// Membership in the group, which ends on drop.
#[derive(Debug)]
pub(crate) struct Member {
    stop: Arc<EventFd>,
    ended: Mutex<Receiver<()>>,
}

impl Member {
    pub(super) fn new(stop: Arc<EventFd>, ended: Receiver<()>) -> Self {
        Self { stop, ended: Mutex::new(ended) }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop.signal();
        // The thread ends at once, or after the timeout of a stopped newcomer. An error means that it has
        // ended.
        let _ = self.ended.get_mut().expect("no panic under this lock").recv();
    }
}

/// The thread of a member.
pub(super) struct MemberThread {
    listener: Listener,
    inbox: Inbox,
    slots: SocketSlots,
    shared: Arc<Shared>,
    stop: Arc<EventFd>,
    /// Dropped last: signals that everything is closed.
    _end: Sender<()>,
}

impl MemberThread {
    pub(super) fn new(
        listener: Listener,
        inbox: Inbox,
        slots: SocketSlots,
        shared: Arc<Shared>,
        stop: Arc<EventFd>,
        end: Sender<()>,
    ) -> Self {
        Self { listener, inbox, slots, shared, stop, _end: end }
    }

    pub(super) fn run(mut self) {
        let mut received = RxBuffers::new(1);
        let mut buffer = vec![0; inbox::MAX_MESSAGE];
        let mut paused: Option<Instant> = None;
        loop {
            let common = self.slots.get(&0).map(|slot| slot.socket.clone());
            let mut fds = vec![self.stop.as_fd(), self.inbox.as_fd()];
            fds.extend(common.as_ref().map(|socket| socket.as_fd()));
            // Packets are forwarded also while no process can join.
            let pause = paused.map(|until| until.saturating_duration_since(Instant::now()));
            let pause = pause.filter(|pause| !pause.is_zero());
            if pause.is_none() {
                fds.push(self.listener.as_fd());
            }
            let Ok(ready) = poll_readable(&fds, pause) else { return };
            if ready[0] {
                return;
            }
            if pause.is_none() && ready.last() == Some(&true) {
                match self.listener.accept() {
                    Ok(connection) => self.answer(&connection),
                    Err(error) => paused = Listener::pause(&error).map(|pause| Instant::now() + pause),
                }
            }
            if ready[1] {
                self.receive_inbox(&mut buffer);
            }
            if let Some(socket) = common
                && ready[2]
            {
                received.filled.clear();
                // Another process may have been faster.
                if receive(socket.as_fd(), &mut received).is_ok() && !received.filled.is_empty() {
                    // The notice of a service precedes the first request for it.
                    self.receive_inbox(&mut buffer);
                    self.receive_shared(&received);
                }
            }
        }
    }

    fn receive_inbox(&self, buffer: &mut [u8]) {
        for _ in 0..MAX_MESSAGES {
            match self.inbox.receive(buffer) {
                Some(Received::Packet(info, packet)) => self.shared.enqueue(info, packet),
                Some(Received::Notice(notice)) => _ = self.shared.directory.handle(notice),
                None => return,
            }
        }
    }

    /// Handles packets from the shared socket.
    fn receive_shared(&self, received: &RxBuffers) {
        for received in received.received() {
            for (_, packet) in received.packets() {
                self.shared.counters.received.add(1);
                self.shared.counters.received_bytes.add(packet.len() as u64);
                if self.shared.deliver_or_forward(&received.info, packet) {
                    self.shared.enqueue_own(received.info, packet);
                }
            }
        }
    }

    /// Sends all sockets to a process that joins, or adds its socket and its inbox.
    fn answer(&mut self, connection: &Connection) {
        let mut buffer = [0; Message::LEN];
        if connection.set_timeout(ANSWER_TIMEOUT).is_err() {
            return;
        }
        let Ok((len, fds)) = connection.receive_close_on_fork(&mut buffer, ANSWER_TIMEOUT) else { return };
        let mut fds = fds.into_iter();
        match (Message::parse(&buffer[..len]), fds.next(), fds.next()) {
            (Some(Message::Hello { .. }), ..) => {
                let hello = Message::Hello { version: VERSION };
                let mut sent = connection.send(&hello.to_bytes(), &[]);
                for (&index, slot) in &self.slots {
                    let message =
                        Message::Slot { index, qpn_prefix: slot.qpn_prefix, generation: slot.generation };
                    sent = sent.and_then(|()| connection.send(&message.to_bytes(), &[slot.socket.as_fd()]));
                }
                let _ = sent.and_then(|()| connection.send(&Message::End.to_bytes(), &[]));
            }
            (Some(Message::Slot { index, qpn_prefix, generation }), Some(socket), Some(inbox)) => {
                update(&mut self.slots, index, qpn_prefix, generation, socket);
                self.shared.directory.add(qpn_prefix, inbox.into());
            }
            _ => {}
        }
    }
}
