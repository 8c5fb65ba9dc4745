//! Identifiers of the protocol, and the quantities that it counts in.

pub use millstream_quantity::{Bytes, Instant};

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $shown:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $shown, self.0)
            }
        }
    };
}

number!(
    /// A batch of consecutive events, counted from 0 in the order of assignment.
    BatchId(u64),
    "batch {}"
);
number!(
    /// An event's number in the run. A replay continues the numbers behind the file's last event.
    EventNumber(u64),
    "event {}"
);
number!(
    /// A slot in one builder unit's landing memory.
    SlotIndex(u16),
    "slot {}"
);
number!(
    /// The number of grants of a slot so far: the first grant is generation 1.
    Generation(u32),
    "generation {}"
);
number!(
    /// The number of managers that the run has had, the present one included. A later manager replaces an earlier one, whose
    /// messages do not count any more.
    Term(u32),
    "term {}"
);
number!(
    /// A readout unit's index, from 0.
    RuIndex(u16),
    "readout {}"
);
number!(
    /// A builder unit's index, from 0.
    BuIndex(u16),
    "builder {}"
);
impl Term {
    /// The term of the manager that starts the run.
    pub const FIRST: Term = Term(1);

    /// The following term.
    pub fn next(self) -> Term {
        Term(self.0.saturating_add(1))
    }
}

impl SlotIndex {
    /// As an array index.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl RuIndex {
    /// As an array index.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl BuIndex {
    /// As an array index.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl Generation {
    /// The slot's next generation.
    pub fn next(self) -> Generation {
        Generation(self.0.wrapping_add(1))
    }

    /// Whether this is a later generation of the slot than `other`. Numbers wrap around.
    pub fn is_after(self, other: Generation) -> bool {
        (1..1 << 31).contains(&self.0.wrapping_sub(other.0))
    }
}

/// The immediate data of a readout unit's last write of a batch.
///
/// ```text
///  31            16 15             0
/// ┌────────────────┬────────────────┐
/// │      slot      │ generation LSB │
/// └────────────────┴────────────────┘
/// ```
///
/// The low bits of the generation distinguish an arrival for the current generation from a late one for an
/// earlier generation. Sixteen bits suffice: a write would have to be delayed over 65,536 grants of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The slot that the packets were written to.
    pub slot: SlotIndex,
    /// The low 16 bits of the slot's generation.
    pub generation_low: u16,
}

impl Immediate {
    /// Immediate data for a slot and its generation.
    pub fn new(slot: SlotIndex, generation: Generation) -> Immediate {
        Immediate { slot, generation_low: generation.0 as u16 }
    }

    /// The 32 bits of the work request, in host order.
    pub fn encode(self) -> u32 {
        u32::from(self.slot.0) << 16 | u32::from(self.generation_low)
    }

    /// Decodes the 32 bits of the completion, in host order. Every value is some slot and generation;
    /// [`Builder::begin_arrival`](super::Builder::begin_arrival) checks them.
    pub fn decode(bits: u32) -> Immediate {
        Immediate { slot: SlotIndex((bits >> 16) as u16), generation_low: bits as u16 }
    }

    /// Whether this was sent for `generation`.
    pub fn is_of(self, generation: Generation) -> bool {
        self.generation_low == generation.0 as u16
    }
}

/// A unit of the event builder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// The event manager.
    Manager,
    /// A readout unit.
    Readout(RuIndex),
    /// A builder unit.
    Builder(BuIndex),
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unit::Manager => f.write_str("manager"),
            Unit::Readout(ru) => ru.fmt(f),
            Unit::Builder(bu) => bu.fmt(f),
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopCause {
    /// All events of the run are done.
    EndOfRun,
    /// The operator requested the stop.
    Requested,
    /// A unit died, or the manager received no message from it in time.
    Lost(Unit),
    /// An assigned batch was not done in time; `by` is the unit that waited for it.
    TimedOut {
        /// The unit whose timer ran out.
        by: Unit,
        /// The batch it was waiting for.
        batch: BatchId,
    },
    /// A readout unit's writes to a builder unit failed.
    Unreachable {
        /// The unit that wrote.
        by: RuIndex,
        /// The builder unit it could not reach.
        peer: BuIndex,
    },
    /// A readout unit did not deliver an assigned batch in time, but others did.
    ReadoutLate {
        /// The builder unit that waited.
        by: BuIndex,
        /// The readout unit.
        readout: RuIndex,
    },
    /// A builder unit's card died or failed.
    CardLost(BuIndex),
    /// A packet in a slot or a kernel's result is invalid; found by that builder unit.
    InvalidData(BuIndex),
    /// A builder unit cannot store its accepted events.
    OutputFailed(BuIndex),
    /// A unit violated the protocol.
    Protocol {
        /// The unit.
        by: Unit,
        /// The violation.
        error: ProtocolError,
    },
}

impl StopCause {
    /// Whether all events were processed.
    pub fn is_success(self) -> bool {
        self == StopCause::EndOfRun
    }
}

impl fmt::Display for StopCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopCause::EndOfRun => f.write_str("all events done"),
            StopCause::Requested => f.write_str("stop requested"),
            StopCause::Lost(unit) => write!(f, "{unit} lost"),
            StopCause::TimedOut { by, batch } => write!(f, "{batch} timed out at {by}"),
            StopCause::Unreachable { by, peer } => write!(f, "{by} cannot reach {peer}"),
            StopCause::ReadoutLate { by, readout } => write!(f, "{readout} did not deliver to {by} in time"),
            StopCause::CardLost(bu) => write!(f, "card of {bu} lost"),
            StopCause::InvalidData(bu) => write!(f, "{bu} found an invalid packet or kernel result"),
            StopCause::OutputFailed(bu) => write!(f, "{bu} cannot store its events"),
            StopCause::Protocol { by, error } => write!(f, "{by} violated the protocol: {error}"),
        }
    }
}

/// Violations of the protocol between the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum ProtocolError {
    /// A message that does not decode.
    Malformed = 1,
    /// A message that this kind of unit never sends, or that names another unit as its sender.
    UnexpectedMessage = 2,
    /// A slot or unit that is not in the plan.
    UnknownSlotOrUnit = 3,
    /// A grant of a slot that is granted or assigned.
    GrantOfBusySlot = 4,
    /// An assignment of a slot that is not free.
    AssignOfBusySlot = 5,
    /// A generation that does not follow the slot's last one.
    WrongGeneration = 6,
    /// A report about a slot or batch that is not assigned.
    SlotNotAssigned = 7,
    /// Immediate data for an earlier generation of the slot.
    StaleArrival = 8,
    /// Immediate data for a slot that is not granted.
    ArrivalInUngrantedSlot = 9,
    /// A second arrival from one readout unit in one generation.
    DuplicateArrival = 10,
    /// More fragments than events × sources.
    TooManyFragments = 11,
    /// An outcome that does not cover the batch's events.
    WrongEventCount = 12,
}

impl ProtocolError {
    /// All variants, in order of their codes.
    pub const ALL: [ProtocolError; 12] = [
        ProtocolError::Malformed,
        ProtocolError::UnexpectedMessage,
        ProtocolError::UnknownSlotOrUnit,
        ProtocolError::GrantOfBusySlot,
        ProtocolError::AssignOfBusySlot,
        ProtocolError::WrongGeneration,
        ProtocolError::SlotNotAssigned,
        ProtocolError::StaleArrival,
        ProtocolError::ArrivalInUngrantedSlot,
        ProtocolError::DuplicateArrival,
        ProtocolError::TooManyFragments,
        ProtocolError::WrongEventCount,
    ];
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProtocolError::Malformed => "message does not decode",
            ProtocolError::UnexpectedMessage => "message that this unit may not send",
            ProtocolError::UnknownSlotOrUnit => "slot or unit that is not in the plan",
            ProtocolError::GrantOfBusySlot => "grant of a slot in use",
            ProtocolError::AssignOfBusySlot => "assignment of a slot in use",
            ProtocolError::WrongGeneration => "generation does not follow the slot's last one",
            ProtocolError::SlotNotAssigned => "slot is not assigned",
            ProtocolError::StaleArrival => "arrival for an earlier generation of the slot",
            ProtocolError::ArrivalInUngrantedSlot => "arrival for a slot that is not granted",
            ProtocolError::DuplicateArrival => "second arrival from the same readout unit",
            ProtocolError::TooManyFragments => "more fragments than events × sources",
            ProtocolError::WrongEventCount => "outcome does not cover the batch's events",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediate_keeps_slot_and_low_generation() {
        let imm = Immediate::new(SlotIndex(0xbeef), Generation(0x0012_3456));
        assert_eq!(imm.encode(), 0xbeef_3456);
        assert_eq!(Immediate::decode(imm.encode()), imm);
        assert!(imm.is_of(Generation(0x0012_3456)));
        assert!(!imm.is_of(Generation(0x0012_3455)));
    }
}
