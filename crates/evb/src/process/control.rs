//! Control connection: the core's messages over [`MessageChannel`].
//!
//! The message channel's memory is bounded. Messages that do not fit wait in a backlog. The core bounds the backlog: the
//! manager has at most one assignment per credit outstanding, a builder unit one report per slot.

use crate::core::{Message, Term};
use millstream_rdma::Completion;
use millstream_rdma::message::{MessageChannel, MessageError};
use std::collections::VecDeque;

/// Result of [`Control::receive`].
#[derive(Debug)]
pub(super) enum Received {
    /// A message, and the term of the manager if it sent it.
    Message(Term, Message),
    /// Bytes that do not decode.
    Malformed,
    /// No message.
    Nothing,
}

/// One end of a control connection.
#[derive(Debug)]
pub(super) struct Control {
    messages: MessageChannel,
    /// The manager's term, for its messages.
    term: Term,
    backlog: VecDeque<Message>,
    /// The connection failed. The TCP stream's end shows the cause, or the core's timers expire.
    failed: bool,
}

impl Control {
    /// A connection of the manager of that term.
    pub(super) fn new(messages: MessageChannel, term: Term) -> Control {
        Control { messages, term, backlog: VecDeque::new(), failed: false }
    }

    /// The queue pair number.
    pub(super) fn qpn(&self) -> millstream_rdma::Qpn {
        self.messages.qpn()
    }

    /// Sends nothing any more: the unit is lost.
    pub(super) fn close(&mut self) {
        self.failed = true;
        self.backlog.clear();
    }

    /// Queues a message; [`flush`](Self::flush) sends it.
    pub(super) fn send(&mut self, message: Message) {
        if self.failed || (self.backlog.is_empty() && self.try_send(&message)) {
            return;
        }
        self.backlog.push_back(message);
    }

    /// Sends queued messages.
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
            let flushed = self.messages.flush();
            self.note(flushed);
        }
    }

    /// Polls the connection's own completion queue. Returns whether there was work.
    ///
    /// A failed connection is polled as well: its flushed work requests have completions, and an armed queue that holds
    /// completions raises events.
    pub(super) fn progress(&mut self) -> bool {
        let was_failed = self.failed;
        let progress = self.messages.progress();
        self.note(progress).unwrap_or(!was_failed)
    }

    /// Handles a completion of a shared queue. Call [`flush`](Self::flush) after the last.
    pub(super) fn handle(&mut self, completion: &Completion) {
        let handled = self.messages.handle(completion);
        self.note(handled);
    }

    /// Takes the next message.
    pub(super) fn receive(&mut self) -> Received {
        match self.messages.receive() {
            Ok(Some(bytes)) => Message::decode(bytes)
                .map_or(Received::Malformed, |(term, message)| Received::Message(term, message)),
            Ok(None) => Received::Nothing,
            Err(_) => {
                self.failed = true;
                Received::Nothing
            }
        }
    }

    /// False if there is no room. A message to a failed connection counts as sent.
    fn try_send(&mut self, message: &Message) -> bool {
        let sent = self.messages.send(&message.encode(self.term));
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
