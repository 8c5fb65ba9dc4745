//! Posting receive requests to a queue pair's own receive queue.

use std::sync::atomic::Ordering;

use super::Qp;
use super::state::QpState;
use crate::errno::{Errno, Result};
use crate::ipc::{Message, Op};
use crate::types::Sge;

impl Qp {
    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL in state RESET or with too many elements, ENOMEM when the queue is full.
    #[inline]
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> Result<()> {
        self.post_recvs(std::iter::once((wr_id, sges)))
    }

    /// Posts receive requests, each with its name and its elements, up to the first that is refused. The peer sees
    /// them all at once.
    ///
    /// # Errors
    /// As [`Qp::post_recv`], of the request that was taken last.
    #[inline]
    pub fn post_recvs<'a>(&self, requests: impl Iterator<Item = (u64, &'a [Sge])>) -> Result<()> {
        let poster = self.polled.recv.lock();
        let state = self.state();
        if state == QpState::Reset || self.srq.is_some() {
            return Err(Errno::INVAL);
        }
        let first = poster.tail();
        let mut tail = first;
        let mut result = Ok(());
        for (wr_id, sges) in requests {
            if sges.len() > self.capacity.max_recv_sge as usize {
                result = Err(Errno::INVAL);
                break;
            }
            if tail.wrapping_sub(poster.done()) >= self.capacity.max_recv_wr {
                result = Err(if self.kind.has_receive_queue() { Errno::NOMEM } else { Errno::INVAL });
                break;
            }
            // SAFETY: locked, and there is room.
            unsafe { poster.write(tail, wr_id, sges) };
            tail = tail.wrapping_add(1);
        }
        if tail == first {
            return result;
        }
        poster.publish(self.entry, tail);
        drop(poster);
        if state == QpState::Err {
            self.flush_receives();
        } else if self.entry.rnr_wait.load(Ordering::Relaxed) != 0 {
            self.wake_sender();
        }
        result
    }

    /// The peer's application sleeps and its request waits for this receive.
    #[cold]
    fn wake_sender(&self) {
        if self.entry.rnr_wait.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        if let Some((peer, sender)) = self.sender() {
            peer.send(Message::new(Op::RecvPosted, [sender]));
        }
    }
}
