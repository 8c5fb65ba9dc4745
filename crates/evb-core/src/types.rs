//! Names and quantities that the units exchange. Read this first.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Add;
use std::time::Duration;

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
    /// A batch of consecutive events, counted from 0 in the order in which the manager cuts them.
    BatchId(u64),
    "batch {}"
);
number!(
    /// An event's number in the run; a replay keeps counting where the file's events end.
    EventNumber(u64),
    "event {}"
);
number!(
    /// A slot in one builder unit's landing memory.
    SlotIndex(u16),
    "slot {}"
);
number!(
    /// How many times a slot has been granted: the first grant is life 1.
    Life(u32),
    "life {}"
);
number!(
    /// A readout unit's index, dense from 0.
    RuIndex(u16),
    "readout {}"
);
number!(
    /// A builder unit's index, dense from 0.
    BuIndex(u16),
    "builder {}"
);
number!(
    /// A size or an amount of data.
    Bytes(u64),
    "{} B"
);
number!(
    /// A point in time: nanoseconds since an origin that the caller chose, the same for one unit's life.
    Nanos(u64),
    "{} ns"
);

impl SlotIndex {
    /// The index for tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl RuIndex {
    /// The index for tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl BuIndex {
    /// The index for tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl Life {
    /// The life of the slot's next grant.
    pub fn next(self) -> Life {
        Life(self.0.wrapping_add(1))
    }
}

impl Add<Duration> for Nanos {
    type Output = Nanos;

    fn add(self, span: Duration) -> Nanos {
        Nanos(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The immediate data of a readout unit's last write of a batch.
///
/// ```text
///  31            16 15             0
/// ┌────────────────┬────────────────┐
/// │      slot      │  life, low 16  │
/// └────────────────┴────────────────┘
/// ```
///
/// The life's low bits tell an arrival of the slot's present life from a late one of an earlier life.
/// Sixteen bits are enough: a late arrival would have to survive 65,536 further lives of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The slot that the packets were written to.
    pub slot: SlotIndex,
    /// The low 16 bits of the slot's life.
    pub life_low: u16,
}

impl Immediate {
    /// The immediate data for a slot's life.
    pub fn new(slot: SlotIndex, life: Life) -> Immediate {
        Immediate { slot, life_low: life.0 as u16 }
    }

    /// As the 32 bits of the work request, in host order.
    pub fn encode(self) -> u32 {
        u32::from(self.slot.0) << 16 | u32::from(self.life_low)
    }

    /// From the 32 bits of the completion, in host order. Every value means some slot and life; whether
    /// they are the expected ones is [`Builder::locate`](super::Builder::locate)'s business.
    pub fn decode(bits: u32) -> Immediate {
        Immediate { slot: SlotIndex((bits >> 16) as u16), life_low: bits as u16 }
    }

    /// Whether this was sent for `life`.
    pub fn is_of(self, life: Life) -> bool {
        self.life_low == life.0 as u16
    }
}

/// One process of the event builder.
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

/// Why a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopCause {
    /// All events of the run are done.
    EndOfRun,
    /// Someone asked for it.
    Requested,
    /// A unit died, or gave no sign of life in time.
    Lost(Unit),
    /// An assigned batch was not done in time; `by` is the unit that was waiting.
    TimedOut {
        /// The unit whose timer ran out.
        by: Unit,
        /// The batch it was waiting for.
        batch: BatchId,
    },
    /// A unit's writes to a builder unit failed.
    Unreachable {
        /// The unit that wrote.
        by: RuIndex,
        /// The builder unit it could not reach.
        peer: BuIndex,
    },
    /// A builder unit's card died or failed.
    CardLost(BuIndex),
    /// Landed data or a decision was not what it must be; `by` is the builder unit that found it.
    BadData(BuIndex),
    /// A builder unit cannot store its accepted events.
    OutputFailed(BuIndex),
    /// A unit broke a rule of the protocol; `by` is the offender.
    Protocol {
        /// The unit that broke it.
        by: Unit,
        /// The rule.
        rule: Rule,
    },
}

impl StopCause {
    /// Whether the run ended as it should.
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
            StopCause::CardLost(bu) => write!(f, "card of {bu} lost"),
            StopCause::BadData(bu) => write!(f, "bad data found by {bu}"),
            StopCause::OutputFailed(bu) => write!(f, "{bu} cannot store its events"),
            StopCause::Protocol { by, rule } => write!(f, "{by} broke the protocol: {rule}"),
        }
    }
}

/// A rule of the protocol between the units, named after how it is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Rule {
    /// A message that does not decode.
    Malformed = 1,
    /// A message that this kind of unit never sends, or that speaks for another unit.
    NotYours = 2,
    /// A slot, builder unit or readout unit that the plan does not have.
    Unknown = 3,
    /// A grant of a slot that is granted or assigned already.
    GrantOfBusySlot = 4,
    /// An assignment of a slot that is not granted.
    AssignOfBusySlot = 5,
    /// A life that does not follow the slot's last one.
    WrongLife = 6,
    /// A report about a slot or batch that is not assigned.
    NotAssigned = 7,
    /// Immediate data for a life that the slot no longer has.
    StaleArrival = 8,
    /// Immediate data for a slot that is not granted.
    ArrivalNotGranted = 9,
    /// The same readout unit's immediate data twice in one life.
    DuplicateArrival = 10,
    /// More fragments than events × sources.
    TooManyFragments = 11,
    /// A verdict that does not cover the batch's events.
    WrongEventCount = 12,
}

impl Rule {
    /// All rules, for decoding and for tests.
    pub const ALL: [Rule; 12] = [
        Rule::Malformed,
        Rule::NotYours,
        Rule::Unknown,
        Rule::GrantOfBusySlot,
        Rule::AssignOfBusySlot,
        Rule::WrongLife,
        Rule::NotAssigned,
        Rule::StaleArrival,
        Rule::ArrivalNotGranted,
        Rule::DuplicateArrival,
        Rule::TooManyFragments,
        Rule::WrongEventCount,
    ];
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::Malformed => "message does not decode",
            Rule::NotYours => "message that this unit may not send",
            Rule::Unknown => "slot or unit that the run does not have",
            Rule::GrantOfBusySlot => "grant of a slot in use",
            Rule::AssignOfBusySlot => "assignment of a slot in use",
            Rule::WrongLife => "wrong life of a slot",
            Rule::NotAssigned => "slot is not assigned",
            Rule::StaleArrival => "arrival for an earlier life of the slot",
            Rule::ArrivalNotGranted => "arrival for a slot that is not granted",
            Rule::DuplicateArrival => "second arrival from the same readout unit",
            Rule::TooManyFragments => "more fragments than events × sources",
            Rule::WrongEventCount => "verdict does not cover the batch's events",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediate_keeps_slot_and_low_life() {
        let imm = Immediate::new(SlotIndex(0xbeef), Life(0x0012_3456));
        assert_eq!(imm.encode(), 0xbeef_3456);
        assert_eq!(Immediate::decode(imm.encode()), imm);
        assert!(imm.is_of(Life(0x0012_3456)));
        assert!(!imm.is_of(Life(0x0012_3455)));
    }

    #[test]
    fn adding_a_long_span_saturates() {
        assert_eq!(Nanos(5) + Duration::MAX, Nanos(u64::MAX));
        assert_eq!(Nanos(5) + Duration::from_micros(1), Nanos(1005));
    }
}
