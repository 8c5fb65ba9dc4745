//! A control connection: the core's messages over crate `rdma`'s messenger.
//!
//! The messenger's memory is bounded. What does not fit waits here, in a queue that is bounded by the
//! core: the manager has at most one assignment per credit outstanding, a builder unit one report per slot.

use crate::core::Message;
use millstream_rdma::Completion;
use millstream_rdma::message::{MessageError, Messenger};
use std::collections::VecDeque;

/// What came of a look at a control connection.
#[derive(Debug)]
pub(super) enum Received {
    /// A message.
    Message(Message),
    /// Bytes that are none.
    Malformed,
    /// Nothing now.
    Nothing,
}

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct Control {
    messenger: Messenger,
    backlog: VecDeque<Message>,
    /// The connection has failed; the TCP stream will tell why, or the core's timers act.
    failed: bool,
}

impl Control {
    pub(super) fn new(messenger: Messenger) -> Control {
        Control { messenger, backlog: VecDeque::new(), failed: false }
    }

    /// Number of the queue pair.
    pub(super) fn qpn(&self) -> millstream_rdma::Qpn {
        self.messenger.qpn()
    }

    /// Adds a message; it goes with the next [`flush`](Self::flush).
    pub(super) fn send(&mut self, message: Message) {
        if self.failed || (self.backlog.is_empty() && self.try_send(&message)) {
            return;
        }
        self.backlog.push_back(message);
    }

    /// Lets messages go.
    pub(super) fn flush(&mut self) {
        while !self.failed
            && let Some(message) = self.backlog.front()
        {
            let message = *message;
            if !self.try_send(&message) {
                break;
            }
            self.backlog.pop_front();
        }
        if !self.failed {
            let flushed = self.messenger.flush();
            self.note(flushed);
        }
    }

    /// Polls the connection's own completion queue; returns whether there was anything.
    pub(super) fn progress(&mut self) -> bool {
        if self.failed {
            return false;
        }
        let progress = self.messenger.progress();
        self.note(progress).unwrap_or(true)
    }

    /// Takes a completion of a shared queue. Call [`flush`](Self::flush) after the last.
    pub(super) fn handle(&mut self, completion: &Completion) {
        let handled = self.messenger.handle(completion);
        self.note(handled);
    }

    /// Takes the next message.
    pub(super) fn receive(&mut self) -> Received {
        match self.messenger.receive() {
            Ok(Some(bytes)) => Message::decode(bytes).map_or(Received::Malformed, Received::Message),
            Ok(None) => Received::Nothing,
            Err(_) => {
                self.failed = true;
                Received::Nothing
            }
        }
    }

    /// False if there is no room now. A message to a connection that has failed is as good as sent.
    fn try_send(&mut self, message: &Message) -> bool {
        let sent = self.messenger.send(&message.encode());
        if matches!(sent, Err(MessageError::Full { .. })) {
            return false;
        }
        self.note(sent);
        true
    }

    fn note<T>(&mut self, result: Result<T, MessageError>) -> Option<T> {
        self.failed |= result.is_err();
        result.ok()
    }
}
