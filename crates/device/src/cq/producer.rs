//! The producer's side of a completion queue: completions of this process's own requests, and overruns.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_lockfree::cq_ring::{CqProducer, CqRing};
use millstream_lockfree::cqe::Cqe;

use super::Cq;
use super::consumer::OwnCompletion;
use crate::event::EVENT_CQ_ERR;
use crate::layout::ARENA_LEN;
use crate::types::{WC_SUCCESS, Wc};

/// The queue was full: a completion is lost.
#[derive(Debug)]
pub(crate) struct CqOverrun;

impl Cq {
    /// Adds a completion of one of our own send requests.
    #[inline]
    pub(crate) fn push_own(
        self: &Arc<Self>,
        wc: Wc,
        posted: u32,
        solicited: bool,
    ) -> std::result::Result<(), CqOverrun> {
        let mut consumer = self.consumer.lock();
        if consumer.own.len() >= consumer.entries.capacity() as usize {
            drop(consumer);
            self.report_overrun();
            return Err(CqOverrun);
        }
        if consumer.own.is_empty() {
            // Restart at the beginning, so that an application that polls each completion at once uses the same cache lines.
            consumer.own.clear();
        }
        consumer.own.push_back(OwnCompletion { wc, posted });
        consumer.own_produced = consumer.own_produced.wrapping_add(1);
        let position = consumer.own_produced;
        if self.timestamps {
            consumer.store_timestamp();
        }
        drop(consumer);
        if self.channel.is_some() {
            fence(Ordering::SeqCst);
            self.notify(solicited || wc.status != WC_SUCCESS, position);
        }
        Ok(())
    }

    /// Adds a completion to the shared half as its owner, for flushed receives. False if the queue is full.
    pub(crate) fn push_shared(self: &Arc<Self>, cqe: Cqe) -> bool {
        let producer = self.producer();
        match producer.push(self.context.adapter.owner_id(), cqe, true) {
            Ok(true) => self.signal(producer.channel()),
            Ok(false) => {}
            Err(_) => {
                self.report_overrun();
                return false;
            }
        }
        true
    }

    /// The shared half as a producer sees it.
    pub(super) fn producer(&self) -> CqProducer<&CqRing> {
        // SAFETY: our own arena, which is never unmapped.
        unsafe {
            CqProducer::new(
                NonNull::slice_from_raw_parts(self.context.adapter.arena.at(0), ARENA_LEN),
                self.ring,
            )
        }
    }

    /// Reports that a completion was lost because the queue was full (IBTA volume 1, 11.6.3.1).
    pub(crate) fn report_overrun(self: &Arc<Self>) {
        if !self.overrun.swap(true, Ordering::AcqRel) {
            self.context.raise(EVENT_CQ_ERR, &self.handle);
        }
    }

    pub(crate) fn has_overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire)
    }

    /// Reports an overrun that a peer caused.
    pub(crate) fn check_overrun(self: &Arc<Self>) {
        if self.ring.overrun.load(Ordering::Acquire) != 0 {
            self.report_overrun();
        }
    }
}
