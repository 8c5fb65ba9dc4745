//! Asynchronous events.

use std::sync::Arc;

use crate::cq::Cq;
use crate::qp::Qp;
use crate::srq::Srq;

/// `IBV_EVENT_CQ_ERR`
pub(crate) const EVENT_CQ_ERR: u32 = 0;
/// `IBV_EVENT_QP_FATAL`
pub(crate) const EVENT_QP_FATAL: u32 = 1;
/// `IBV_EVENT_QP_REQ_ERR`
pub(crate) const EVENT_QP_REQ_ERR: u32 = 2;
/// `IBV_EVENT_QP_ACCESS_ERR`
pub(crate) const EVENT_QP_ACCESS_ERR: u32 = 3;
/// `IBV_EVENT_SQ_DRAINED`
pub(crate) const EVENT_SQ_DRAINED: u32 = 5;

/// `IBV_EVENT_SRQ_LIMIT_REACHED`
pub(crate) const EVENT_SRQ_LIMIT_REACHED: u32 = 15;
/// `IBV_EVENT_QP_LAST_WQE_REACHED`
pub(crate) const EVENT_QP_LAST_WQE_REACHED: u32 = 16;

/// The peer's queue pair fails without an event; its completion tells the story.
pub(crate) const NO_EVENT: u32 = u32::MAX;

/// Whether a peer can have caused this event in a queue pair of ours. Others belong to other kinds of
/// objects, which programs would take the queue pair for.
pub(crate) fn may_be_reported(event: u32) -> bool {
    matches!(event, EVENT_QP_FATAL | EVENT_QP_REQ_ERR | EVENT_QP_ACCESS_ERR | NO_EVENT)
}

/// Something that happened outside any work request.
#[derive(Clone, Debug)]
pub enum AsyncEvent {
    /// To a queue pair.
    Qp(Arc<Qp>, u32),
    /// To a completion queue.
    Cq(Arc<Cq>, u32),
    /// To a shared receive queue.
    Srq(Arc<Srq>, u32),
}

impl AsyncEvent {
    /// `IBV_EVENT_*`
    #[must_use]
    pub fn kind(&self) -> u32 {
        match self {
            Self::Qp(_, kind) | Self::Cq(_, kind) | Self::Srq(_, kind) => *kind,
        }
    }
}
