//! Requests and their completions, messages, and waiting for either.

use std::time::Instant;

use millstream_rdma::queue::{Opcode, WorkError};
use millstream_rdma::wait::{WaitError, WaitFd};
use millstream_rdma::{Completion, Deadline, Status, WrId};

use super::{Inner, RECEIVE, RemoteErrorKind, Result};
use crate::net::MESSAGE_BYTES;
use crate::region::codes::MessageKind;
use crate::region::message::Message;

impl Inner {
    pub(in crate::net) fn patience(&self) -> Deadline {
        Deadline::after(self.options.patience)
    }

    /// Takes what has completed and the messages that came.
    pub(super) fn drain(&mut self) -> Result<usize> {
        let mut buffer = [Completion::EMPTY; 4];
        let mut taken = 0;
        loop {
            let completions = self
                .queue
                .poll(&mut buffer)
                .map_err(|error| WaitError { what: "poll the completion queue", cause: error.cause })?;
            for completion in completions {
                self.note(*completion)?;
            }
            taken += completions.len();
            if completions.len() < buffer.len() {
                return Ok(taken);
            }
        }
    }

    pub(super) fn note(&mut self, completion: Completion) -> Result<()> {
        let id = completion.wr_id().0;
        if id < RECEIVE {
            if let Err(error) = completion.check() {
                return self.failed(error);
            }
            // Requests of a send queue complete in order (IBTA volume 1, 9.5 and 10.8.3.3); nobody waits for number 0.
            self.finished = self.finished.max(id);
            return Ok(());
        }
        if !completion.is_success() {
            self.lost = true;
            return Ok(());
        }
        let slot = id - RECEIVE;
        let mut bytes = [0; MESSAGE_BYTES];
        if completion.opcode() == Opcode::Receive && completion.len() as usize == MESSAGE_BYTES {
            self.scratch.copy_to_slice(slot * MESSAGE_BYTES as u64, &mut bytes)?;
            if let Some(message) = Message::from_bytes(&bytes) {
                self.hear(message);
            }
        }
        let sge = self.scratch.sge(slot * MESSAGE_BYTES as u64, MESSAGE_BYTES as u32)?;
        self.pair.post_recv(&[sge], WrId(id))?;
        Ok(())
    }

    pub(super) fn hear(&mut self, message: Message) {
        if message.kind == MessageKind::LeaseEnded
            && self.held.is_some_and(|held| held.epoch == message.epoch)
        {
            self.held = None;
            self.ended = message.cause;
        }
        self.messages.push_back(message);
    }

    /// Waits until `done`; false if the deadline came first.
    pub(in crate::net) fn wait_until(
        &mut self,
        deadline: Deadline,
        mut done: impl FnMut(&mut Inner) -> bool,
    ) -> Result<bool> {
        let mut spin_until = None;
        let mut rounds = 0u32;
        loop {
            self.drain()?;
            if done(self) {
                return Ok(true);
            }
            if self.lost {
                return Err(self.fault.map_or(RemoteErrorKind::Lost, RemoteErrorKind::Work));
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            self.beat_if_due()?;
            if deadline.passed() {
                return Ok(false);
            }
            let now = Instant::now();
            if now < *spin_until.get_or_insert(now + self.options.spin) {
                continue;
            }
            self.sleep(deadline)?;
        }
    }

    pub(super) fn sleep(&mut self, deadline: Deadline) -> Result<()> {
        let until = match self.held {
            Some(held) if !self.releasing => deadline.earlier(Deadline::at(self.beaten + held.duration / 4)),
            _ => deadline,
        };
        let mut taken = Vec::new();
        let queue = self.queue.clone();
        let mut others = [WaitFd::readable(&self.stream)];
        self.waiter.wait(&[&queue], &mut others, until, || {
            let mut buffer = [Completion::EMPTY; 16];
            let completions = queue
                .poll(&mut buffer)
                .map_err(|error| WaitError { what: "poll the completion queue", cause: error.cause })?;
            taken.extend_from_slice(completions);
            Ok::<_, RemoteErrorKind>(!completions.is_empty())
        })?;
        let closed = others[0].is_ready();
        for completion in taken {
            self.note(completion)?;
        }
        // Nothing is ever sent over the stream after the connection is made.
        self.lost |= closed;
        Ok(())
    }

    /// A number for a request whose completion will be waited for.
    pub(in crate::net) fn ticket(&mut self) -> WrId {
        self.ticket += 1;
        WrId(self.ticket)
    }

    /// Waits for a request, and with it for those before it.
    pub(in crate::net) fn finish(&mut self, ticket: WrId) -> Result<()> {
        // Of a peer on this host it has completed when it is posted.
        if self.finished < ticket.0 {
            self.drain()?;
        }
        if self.finished >= ticket.0
            || self.wait_until(self.patience(), |inner| inner.finished >= ticket.0)?
        {
            return Ok(());
        }
        Err(RemoteErrorKind::TimedOut(self.options.patience, "an RDMA request"))
    }

    /// Waits until at most so many requests with numbers are under way.
    pub(super) fn finish_but(&mut self, under_way: u64) -> Result<()> {
        self.finish(WrId(self.ticket.saturating_sub(under_way)))
    }

    /// Notes that a request failed, which ends the connection; an error if it says why. A request that was flushed does not.
    fn failed(&mut self, error: WorkError) -> Result<()> {
        self.lost = true;
        if error.status == Status::WorkRequestFlushedError {
            return Ok(());
        }
        Err((*self.fault.get_or_insert(error)).into())
    }
}
