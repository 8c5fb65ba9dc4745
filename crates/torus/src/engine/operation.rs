//! What operations are: puts, gets and atomic operations of the application, and replies to other nodes.

use std::sync::Arc;

use millstream_fabric::{Notification, RegionId};
use millstream_torus_core::{NodeNumber, Unreachable};

use crate::memory::Memory;

/// Most bytes that an operation holds itself.
pub(super) const OWN_BYTES: usize = 24;

/// A part of memory.
#[derive(Clone, Debug)]
pub struct Span {
    /// The memory.
    pub memory: Arc<Memory>,
    /// Start (bytes).
    pub offset: u64,
}

/// An atomic operation on a word of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Adds.
    FetchAdd(u64),
    /// Replaces the first value by the second.
    CompareSwap(u64, u64),
}

impl AtomicOperation {
    /// The operands as payload.
    pub(super) fn encode(self) -> [u8; OWN_BYTES] {
        let (code, a, b) = match self {
            AtomicOperation::FetchAdd(add) => (0_u64, add, 0),
            AtomicOperation::CompareSwap(expected, new) => (1, expected, new),
        };
        let mut bytes = [0; OWN_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip([code, a, b]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From a payload.
    pub(super) fn decode(bytes: &[u8; OWN_BYTES]) -> Option<AtomicOperation> {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * i..8 * i + 8]);
            u64::from_le_bytes(word)
        };
        match word(0) {
            0 => Some(AtomicOperation::FetchAdd(word(1))),
            1 => Some(AtomicOperation::CompareSwap(word(1), word(2))),
            _ => None,
        }
    }

    /// The new value of the word.
    pub(super) fn apply(self, old: u64) -> u64 {
        match self {
            AtomicOperation::FetchAdd(add) => old.wrapping_add(add),
            AtomicOperation::CompareSwap(expected, new) if old == expected => new,
            AtomicOperation::CompareSwap(..) => old,
        }
    }
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The region does not exist.
    NoRegion,
    /// The range exceeds the region of this size (bytes).
    Bounds(u64),
    /// The offset of an atomic operation is not a multiple of 8.
    Unaligned,
    /// The region does not allow the access.
    Access,
    /// The region's memory is gone.
    Gone,
    /// The node is lost.
    NodeLost,
    /// No live path leads to the node.
    NoRoute,
}

impl Failure {
    /// Code and size, for messages.
    #[must_use]
    pub fn encode(self) -> (u8, u64) {
        match self {
            Failure::NoRegion => (1, 0),
            Failure::Bounds(size) => (2, size),
            Failure::Unaligned => (3, 0),
            Failure::Access => (4, 0),
            Failure::Gone => (5, 0),
            Failure::NodeLost => (6, 0),
            Failure::NoRoute => (7, 0),
        }
    }

    /// From a code; an undefined one is [`Failure::Gone`].
    #[must_use]
    pub fn decode(code: u8, size: u64) -> Failure {
        match code {
            1 => Failure::NoRegion,
            2 => Failure::Bounds(size),
            3 => Failure::Unaligned,
            4 => Failure::Access,
            6 => Failure::NodeLost,
            7 => Failure::NoRoute,
            _ => Failure::Gone,
        }
    }
}

impl From<Unreachable> for Failure {
    fn from(unreachable: Unreachable) -> Failure {
        match unreachable {
            Unreachable::NodeLost { .. } => Failure::NodeLost,
            Unreachable::NoRoute { .. } => Failure::NoRoute,
        }
    }
}

/// What an operation does.
#[derive(Clone, Debug)]
pub enum Request {
    /// Writes to a region of the target.
    Put {
        /// The region.
        region: RegionId,
        /// Start in the region (bytes).
        offset: u64,
        /// The data.
        source: Span,
        /// Length (bytes).
        length: u32,
        /// What the target's application learns.
        notification: Notification,
    },
    /// Reads from a region of the target.
    Get {
        /// The region.
        region: RegionId,
        /// Start in the region (bytes).
        offset: u64,
        /// Where the data go.
        into: Span,
        /// Length (bytes).
        length: u32,
    },
    /// Changes a word of a region of the target.
    Atomic {
        /// The region.
        region: RegionId,
        /// The word (bytes).
        offset: u64,
        /// The change.
        change: AtomicOperation,
    },
}

/// An operation of the application.
#[derive(Clone, Debug)]
pub struct Operation {
    /// The target.
    pub target: NodeNumber,
    /// What it does.
    pub request: Request,
    /// The application's number, which the completion carries.
    pub cookie: u32,
}

/// A reply to an operation of another node.
#[derive(Clone, Debug)]
pub(super) enum Reply {
    Data { source: Span, length: u32 },
    Value(u64),
    Refused(Failure),
}
