//! A node process's connections to the supervisors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use millstream_shm::EventFd;
use millstream_torus_core::NodeNumber;

use crate::proof::{Call, Purpose};
use crate::service::lines::{Lines, PROOF, Refusal};
use crate::service::{FromSupervisor, ToSupervisor, Who};

const REDIAL: Duration = Duration::from_millis(200);

/// All supervisors. A thread each reads; what they send wakes the node process.
#[derive(Debug)]
pub(super) struct Service {
    messages: Receiver<FromSupervisor>,
    writers: Vec<Sender<ToSupervisor>>,
    wake: Arc<EventFd>,
}

impl Service {
    pub(super) fn connect(addresses: &[String], key: u64, node: NodeNumber) -> std::io::Result<Service> {
        let wake = Arc::new(EventFd::latch()?);
        let (sender, messages) = mpsc::channel();
        let mut writers = Vec::new();
        let who = Who::Node { node, incarnation: millstream_shm::random_u64() };
        for (to, address) in (0..).zip(addresses) {
            let (outgoing, to_send) = mpsc::channel();
            writers.push(outgoing);
            let link = SupervisorLink {
                address: address.clone(),
                call: Call { key, purpose: Purpose::Report, to },
                who,
                sender: sender.clone(),
                wake: Arc::clone(&wake),
            };
            std::thread::spawn(move || link.serve(&to_send));
        }
        Ok(Service { messages, writers, wake })
    }

    /// Readable when a message waits.
    pub(super) fn wake(&self) -> &Arc<EventFd> {
        &self.wake
    }

    pub(super) fn receive(&self) -> Option<FromSupervisor> {
        self.messages.try_recv().ok()
    }

    /// Sends to all supervisors: only the one that asked takes it.
    pub(super) fn send(&self, message: &ToSupervisor) {
        for writer in &self.writers {
            let _ = writer.send(message.clone());
        }
    }
}

struct SupervisorLink {
    address: String,
    call: Call,
    who: Who,
    sender: Sender<FromSupervisor>,
    wake: Arc<EventFd>,
}

impl SupervisorLink {
    /// Connects again and again. Messages that wait while there is no connection are sent later.
    fn serve(self, to_send: &Receiver<ToSupervisor>) {
        // What a supervisor must know that begins later.
        let mut application = None;
        let mut refusal = Refusal::default();
        loop {
            let closed = Arc::new(AtomicBool::new(false));
            let connected = self.dial(&closed);
            refusal.tell(&self.address, &connected);
            if let Ok(mut lines) = connected
                && application.iter().all(|message| lines.send(message).is_ok())
                && !forward(&mut lines, to_send, &closed, &mut application)
            {
                return;
            }
            std::thread::sleep(REDIAL);
        }
    }

    fn dial(&self, closed: &Arc<AtomicBool>) -> std::io::Result<Lines> {
        let lines = Lines::dial(&self.address, self.call, self.who, PROOF)?;
        let mut reader = lines.writer()?;
        let (sender, wake, closed) = (self.sender.clone(), Arc::clone(&self.wake), Arc::clone(closed));
        std::thread::Builder::new().spawn(move || {
            while let Ok(messages) = reader.read() {
                for message in messages {
                    if sender.send(message).is_err() {
                        return;
                    }
                }
                wake.signal();
            }
            // The writing thread notices and dials again.
            closed.store(true, Ordering::Relaxed);
        })?;
        Ok(lines)
    }
}

/// Sends messages until the connection is lost. False if the node process has ended.
fn forward(
    lines: &mut Lines,
    to_send: &Receiver<ToSupervisor>,
    closed: &AtomicBool,
    application: &mut Option<ToSupervisor>,
) -> bool {
    loop {
        match to_send.recv_timeout(REDIAL) {
            Ok(message) => {
                if matches!(message, ToSupervisor::Application { .. }) {
                    *application = Some(message.clone());
                }
                if lines.send(&message).is_err() {
                    return true;
                }
            }
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) if closed.load(Ordering::Relaxed) => return true,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
