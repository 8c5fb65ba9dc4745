//! Completions of work requests, messages, and waiting for either.

use std::time::Instant;

use millstream_rdma::queue::{Opcode, WorkError};
use millstream_rdma::wait::{WaitError, WaitFd};
use millstream_rdma::{Completion, Deadline, Status, WrId};

use super::{Inner, RECEIVE, Result};
use crate::remote::RemoteErrorKind;
use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::hello::MESSAGE_BYTES;
use millstream_card_abi::message::Message;

impl Inner {
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.options.timeout)
    }

    /// Polls completions and messages until there are none.
    pub(super) fn poll_all(&mut self) -> Result<usize> {
        let mut buffer = [Completion::EMPTY; 4];
        let mut polled = 0;
        loop {
            let completions = self
                .queue
                .poll(&mut buffer)
                .map_err(|error| WaitError { what: "poll the completion queue", cause: error.cause })?;
            for completion in completions {
                self.handle_completion(*completion)?;
            }
            polled += completions.len();
            if completions.len() < buffer.len() {
                return Ok(polled);
            }
        }
    }

    pub(super) fn handle_completion(&mut self, completion: Completion) -> Result<()> {
        let id = completion.wr_id().0;
        if id < RECEIVE {
            if let Err(error) = completion.check() {
                return self.failed(error);
            }
            // Work requests of a send queue complete in order (IBTA volume 1, 9.5 and 10.8.3.3). Id 0 has no waiter.
            self.finished = self.finished.max(id);
            return Ok(());
        }
        if !completion.is_success() {
            self.is_disconnected = true;
            return Ok(());
        }
        let slot = id - RECEIVE;
        let mut bytes = [0; MESSAGE_BYTES];
        if completion.opcode() == Opcode::Receive && completion.len() as usize == MESSAGE_BYTES {
            self.scratch.copy_to_slice(slot * MESSAGE_BYTES as u64, &mut bytes)?;
            if let Some(message) = Message::from_bytes(&bytes) {
                self.handle_message(message);
            }
        }
        let sge = self.scratch.sge(slot * MESSAGE_BYTES as u64, MESSAGE_BYTES as u32)?;
        self.queue_pair.post_recv(&[sge], WrId(id))?;
        Ok(())
    }

    pub(super) fn handle_message(&mut self, message: Message) {
        if message.kind == MessageKind::LeaseEnded
            && self.held.is_some_and(|held| held.epoch == message.epoch)
        {
            self.held = None;
            self.ended = message.cause;
        }
        self.messages.push_back(message);
    }

    /// Waits until `done`; false if the deadline passed first.
    pub(crate) fn wait_until(
        &mut self,
        deadline: Deadline,
        mut done: impl FnMut(&mut Inner) -> bool,
    ) -> Result<bool> {
        let mut spin_until = None;
        let mut rounds = 0u32;
        loop {
            self.poll_all()?;
            if done(self) {
                return Ok(true);
            }
            if self.is_disconnected {
                return Err(self.fault.map_or(RemoteErrorKind::Disconnected, RemoteErrorKind::from));
            }
            rounds = rounds.wrapping_add(1);
            if !rounds.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            self.renew_if_due()?;
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
            Some(held) if !self.releasing => {
                deadline.earlier(Deadline::at(self.last_heartbeat + held.duration / 4))
            }
            _ => deadline,
        };
        let mut polled = Vec::new();
        let queue = self.queue.clone();
        let interrupt = self.waiters.interrupt.clone();
        let mut others = [WaitFd::readable(&self.stream), WaitFd::readable(&*interrupt)];
        self.waiter.wait(&[&queue], &mut others, until, || {
            let mut buffer = [Completion::EMPTY; 16];
            let completions = queue.poll(&mut buffer)?;
            polled.extend_from_slice(completions);
            Ok::<_, RemoteErrorKind>(!completions.is_empty())
        })?;
        let closed = others[0].is_ready();
        if others[1].is_ready() {
            interrupt.clear();
        }
        for completion in polled {
            self.handle_completion(completion)?;
        }
        // The card sends no data over the stream after the handshake, so a readable stream is closed.
        self.is_disconnected |= closed;
        Ok(())
    }

    /// The id of the next work request.
    pub(crate) fn next_wr_id(&mut self) -> WrId {
        self.wr_id += 1;
        WrId(self.wr_id)
    }

    /// Waits for a work request and all earlier ones.
    pub(crate) fn finish(&mut self, wr_id: WrId) -> Result<()> {
        // A request to a card on this host has completed when it is posted.
        if self.finished < wr_id.0 {
            self.poll_all()?;
        }
        // A transfer of many requests keeps the connection for longer than the lease lasts, and waits for none of them.
        self.renew_if_due()?;
        if self.finished >= wr_id.0 || self.wait_until(self.deadline(), |inner| inner.finished >= wr_id.0)? {
            return Ok(());
        }
        Err(RemoteErrorKind::TimedOut(self.options.timeout, "completion of an RDMA request"))
    }

    /// Waits until at most `in_flight` work requests are outstanding.
    pub(super) fn finish_but(&mut self, in_flight: u64) -> Result<()> {
        self.finish(WrId(self.wr_id.saturating_sub(in_flight)))
    }

    /// Handles a failed work request, which ends the connection. A flushed request is not the reason, so it is no error.
    fn failed(&mut self, error: WorkError) -> Result<()> {
        self.is_disconnected = true;
        if error.status == Status::WorkRequestFlushedError {
            return Ok(());
        }
        Err((*self.fault.get_or_insert(error)).into())
    }
}
