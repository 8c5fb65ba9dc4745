//! Control messages between the manager and the other units.
//!
//! Every message is one record of [`Message::SIZE`] bytes, little-endian, unused bytes zero. One SEND carries
//! many records. Messages between two units arrive in order; messages of different pairs are unordered.
//!
//! ```text
//!          0    1     2        4      6        8      12        16      24          32        40      48
//!         ┌────┬─────┬────────┬──────┬────────┬──────┬─────────┬───────┬───────────┬─────────┬───────┐
//! Grant   │ 1  │     │builder │ slot │        │ gen. │         │       │           │         │       │
//! Assign  │ 2  │again│builder │ slot │ events │ gen. │  term   │ batch │first event│         │       │
//! Done    │ 3  │     │builder │ slot │accepted│ gen. │selected │ batch │events ×4  │fragments ×4     │
//! Missing │ 4  │     │builder │ slot │readout │ gen. │ missing │       │           │         │       │
//! Fault   │ 5  │cause│unit err│index │ peer   │      │         │ batch │           │         │       │
//! Stop    │ 6  │cause│unit err│index │ peer   │      │  term   │ batch │           │         │       │
//! Drain   │ 7  │     │        │      │        │      │  term   │       │           │         │       │
//! Beat    │ 8  │     │        │      │        │      │  term   │       │           │         │       │
//! Lost    │ 9  │     │unit    │index │        │      │  term   │       │           │         │       │
//! Release │ 10 │     │        │      │        │      │  term   │ batch │           │         │       │
//! Joined  │ 11 │     │unit    │index │        │      │  term   │ batch │           │         │       │
//! Withdraw│ 12 │     │builder │ slot │        │ gen. │  term   │       │           │         │       │
//! Storing │ 13 │     │builder │ slot │        │ gen. │         │       │           │         │       │
//!         └────┴─────┴────────┴──────┴────────┴──────┴─────────┴───────┴───────────┴─────────┴───────┘
//! ```
//!
//! `gen.` is the slot's generation. `again` is 1 if the batch was assigned before. `events ×4` are 16 bits each and
//! `fragments ×4` 32 bits each: built, missing at source, corrupt, readout unit lost. `unit` (manager 1, readout 2, builder 3) and `index` name the unit of the cause;
//! `err` is the code of a [`ProtocolError`]. `term` is the [`Term`] of the manager that sends the message; messages of units
//! have none.

use super::plan::Batch;
use super::summary::{BatchCounts, BatchOutcome};
use super::types::{
    BatchId, BuIndex, EventNumber, Generation, ProtocolError, RuIndex, SlotIndex, StopCause, Term, Unit,
};
use serde::{Deserialize, Serialize};

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Builder to manager: this slot may take a batch. No write of earlier generations can arrive any more.
    Grant {
        /// The slot's builder unit.
        builder: BuIndex,
        /// The slot.
        slot: SlotIndex,
        /// The new generation.
        generation: Generation,
    },
    /// Manager to all readout units and to the slot's builder unit: send this batch to that slot.
    Assign(Assignment),
    /// Builder to manager: the slot's batch is finished, and its accepted events are stored.
    Done {
        /// The slot's builder unit.
        builder: BuIndex,
        /// The slot.
        slot: SlotIndex,
        /// The generation that ends.
        generation: Generation,
        /// The batch in the slot.
        batch: BatchId,
        /// Outcome of the batch.
        outcome: BatchOutcome,
    },
    /// Builder to manager, immediately before the slot's `Done`: one readout unit delivered fewer fragments than
    /// events × sources.
    MissingFragments {
        /// The slot's builder unit.
        builder: BuIndex,
        /// The slot.
        slot: SlotIndex,
        /// Its generation.
        generation: Generation,
        /// The readout unit.
        readout: RuIndex,
        /// Fragments that its sources do not have, at least 1.
        missing: u32,
    },
    /// Builder to manager, every quarter of the timeout: the slot's batch is processed and waits for the software trigger or
    /// for storage, which may take any time.
    Storing {
        /// The slot's builder unit.
        builder: BuIndex,
        /// The slot.
        slot: SlotIndex,
        /// Its generation.
        generation: Generation,
    },
    /// Unit to manager: the run cannot continue.
    Fault {
        /// The cause.
        cause: StopCause,
    },
    /// Manager to all units: take no new work, finish, and report.
    Stop {
        /// The cause.
        cause: StopCause,
    },
    /// Manager to builder units: all readout units have stopped. Finish complete batches and report.
    Drain,
    /// Manager to all units: the manager is alive.
    Heartbeat,
    /// Manager to readout units, after a builder unit was lost: all batches before this one are done.
    Release {
        /// The first batch that may be assigned again.
        before: BatchId,
    },
    /// Manager to readout units about a builder unit, and to builder units about a readout unit: the run goes on
    /// without it. Its batches are assigned again, or are complete without its packets.
    Lost {
        /// The unit.
        unit: Unit,
    },
    /// Manager to builder units: a readout unit joined. It sends this batch and later ones.
    Joined {
        /// The unit.
        readout: RuIndex,
        /// Its first batch.
        first_batch: BatchId,
    },
    /// Manager of a new term to builder unit: packets in that slot are of a batch that only lost readout units knew.
    Withdraw {
        /// The slot's builder unit.
        builder: BuIndex,
        /// The slot.
        slot: SlotIndex,
        /// Its generation.
        generation: Generation,
    },
}

/// A batch and the slot that takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// The batch and its events.
    pub batch: Batch,
    /// The builder unit.
    pub builder: BuIndex,
    /// Its slot.
    pub slot: SlotIndex,
    /// The slot's generation.
    pub generation: Generation,
    /// Whether the batch was assigned to a lost builder unit before, which may have stored its events.
    pub again: bool,
}

/// Why bytes are not a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Wrong length.
    #[error("control message has {0} bytes, expected {size}", size = Message::SIZE)]
    Length(usize),
    /// Unknown kind.
    #[error("control message has unknown kind {0}")]
    Kind(u8),
    /// A field with an impossible value.
    #[error("control message of kind {kind}: invalid {field}")]
    Field {
        /// The message's kind.
        kind: u8,
        /// The field.
        field: &'static str,
    },
}

/// The record of one message.
struct Record([u8; Message::SIZE]);

impl Record {
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from(self.u16(at)) | u32::from(self.u16(at + 2)) << 16
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) | u64::from(self.u32(at + 4)) << 32
    }

    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
    }

    fn put_slot(&mut self, builder: BuIndex, slot: SlotIndex, generation: Generation) {
        self.put(2, builder.0.to_le_bytes());
        self.put(4, slot.0.to_le_bytes());
        self.put(8, generation.0.to_le_bytes());
    }

    fn put_unit(&mut self, unit: Unit) {
        let (kind, index) = match unit {
            Unit::Manager => (1, 0),
            Unit::Readout(ru) => (2, ru.0),
            Unit::Builder(bu) => (3, bu.0),
        };
        self.0[2] = kind;
        self.put(4, index.to_le_bytes());
    }

    fn unit(&self) -> Option<Unit> {
        match self.0[2] {
            1 => Some(Unit::Manager),
            2 => Some(Unit::Readout(RuIndex(self.u16(4)))),
            3 => Some(Unit::Builder(BuIndex(self.u16(4)))),
            _ => None,
        }
    }

    fn put_cause(&mut self, cause: StopCause) {
        self.0[1] = match cause {
            StopCause::EndOfRun => 1,
            StopCause::Requested => 2,
            StopCause::Lost(unit) => {
                self.put_unit(unit);
                3
            }
            StopCause::TimedOut { by, batch } => {
                self.put_unit(by);
                self.put(16, batch.0.to_le_bytes());
                4
            }
            StopCause::Unreachable { by, peer } => {
                self.put_unit(Unit::Readout(by));
                self.put(6, peer.0.to_le_bytes());
                5
            }
            StopCause::CardLost(bu) => {
                self.put_unit(Unit::Builder(bu));
                6
            }
            StopCause::InvalidData(bu) => {
                self.put_unit(Unit::Builder(bu));
                7
            }
            StopCause::Protocol { by, error } => {
                self.put_unit(by);
                self.0[3] = error as u8;
                8
            }
            StopCause::OutputFailed(bu) => {
                self.put_unit(Unit::Builder(bu));
                9
            }
            StopCause::ReadoutLate { by, readout } => {
                self.put_unit(Unit::Builder(by));
                self.put(6, readout.0.to_le_bytes());
                10
            }
        };
    }

    fn cause(&self) -> Option<StopCause> {
        Some(match self.0[1] {
            1 => StopCause::EndOfRun,
            2 => StopCause::Requested,
            3 => StopCause::Lost(self.unit()?),
            4 => StopCause::TimedOut { by: self.unit()?, batch: BatchId(self.u64(16)) },
            5 => match self.unit()? {
                Unit::Readout(by) => StopCause::Unreachable { by, peer: BuIndex(self.u16(6)) },
                _ => return None,
            },
            code @ (6 | 7 | 9) => match (code, self.unit()?) {
                (6, Unit::Builder(bu)) => StopCause::CardLost(bu),
                (7, Unit::Builder(bu)) => StopCause::InvalidData(bu),
                (_, Unit::Builder(bu)) => StopCause::OutputFailed(bu),
                _ => return None,
            },
            8 => StopCause::Protocol {
                by: self.unit()?,
                error: ProtocolError::ALL.into_iter().find(|&error| error as u8 == self.0[3])?,
            },
            10 => match self.unit()? {
                Unit::Builder(by) => StopCause::ReadoutLate { by, readout: RuIndex(self.u16(6)) },
                _ => return None,
            },
            _ => return None,
        })
    }
}

impl Message {
    /// Size of every encoded message, in bytes.
    pub const SIZE: usize = 48;

    /// Whether the manager sends the message.
    fn is_of_manager(&self) -> bool {
        !matches!(
            self,
            Message::Grant { .. }
                | Message::Done { .. }
                | Message::MissingFragments { .. }
                | Message::Storing { .. }
                | Message::Fault { .. }
        )
    }

    /// Encodes the message. Those of units have no term.
    pub fn encode(&self, term: Term) -> [u8; Message::SIZE] {
        let mut record = Record([0; Message::SIZE]);
        if self.is_of_manager() {
            record.put(12, term.0.to_le_bytes());
        }
        record.0[0] = match *self {
            Message::Grant { builder, slot, generation } => {
                record.put_slot(builder, slot, generation);
                1
            }
            Message::Assign(Assignment { batch, builder, slot, generation, again }) => {
                record.put_slot(builder, slot, generation);
                record.0[1] = again.into();
                record.put(6, batch.events.to_le_bytes());
                record.put(16, batch.id.0.to_le_bytes());
                record.put(24, batch.first_event.0.to_le_bytes());
                2
            }
            Message::Done { builder, slot, generation, batch, outcome } => {
                record.put_slot(builder, slot, generation);
                record.put(6, outcome.accepted.to_le_bytes());
                record.put(12, outcome.selected.to_le_bytes());
                record.put(16, batch.0.to_le_bytes());
                for (k, counts) in outcome.counts().into_iter().enumerate() {
                    record.put(24 + 2 * k, counts.events.to_le_bytes());
                    record.put(32 + 4 * k, counts.fragments.to_le_bytes());
                }
                3
            }
            Message::MissingFragments { builder, slot, generation, readout, missing } => {
                record.put_slot(builder, slot, generation);
                record.put(6, readout.0.to_le_bytes());
                record.put(12, missing.to_le_bytes());
                4
            }
            Message::Fault { cause } => {
                record.put_cause(cause);
                5
            }
            Message::Stop { cause } => {
                record.put_cause(cause);
                6
            }
            Message::Drain => 7,
            Message::Heartbeat => 8,
            Message::Lost { unit } => {
                record.put_unit(unit);
                9
            }
            Message::Release { before } => {
                record.put(16, before.0.to_le_bytes());
                10
            }
            Message::Joined { readout, first_batch } => {
                record.put_unit(Unit::Readout(readout));
                record.put(16, first_batch.0.to_le_bytes());
                11
            }
            Message::Withdraw { builder, slot, generation } => {
                record.put_slot(builder, slot, generation);
                12
            }
            Message::Storing { builder, slot, generation } => {
                record.put_slot(builder, slot, generation);
                13
            }
        };
        record.0
    }

    /// Decodes a message, and its term if the manager sent it.
    ///
    /// # Errors
    /// Wrong length, unknown kind, a field with an impossible value, or a non-zero byte that the kind does not use.
    pub fn decode(bytes: &[u8]) -> Result<(Term, Message), DecodeError> {
        let bytes: &[u8; Message::SIZE] = bytes.try_into().map_err(|_| DecodeError::Length(bytes.len()))?;
        let record = Record(*bytes);
        let kind = bytes[0];
        let (builder, slot, generation) =
            (BuIndex(record.u16(2)), SlotIndex(record.u16(4)), Generation(record.u32(8)));
        let batch = BatchId(record.u64(16));
        let bad = |field| DecodeError::Field { kind, field };
        let message = match kind {
            1 => Message::Grant { builder, slot, generation },
            2 => {
                let batch =
                    Batch { id: batch, first_event: EventNumber(record.u64(24)), events: record.u16(6) };
                if batch.events == 0 {
                    return Err(bad("events"));
                }
                let again = bytes[1] == 1;
                Message::Assign(Assignment { batch, builder, slot, generation, again })
            }
            3 => {
                let counts = |k: usize| BatchCounts {
                    events: record.u16(24 + 2 * k),
                    fragments: record.u32(32 + 4 * k),
                };
                let outcome = BatchOutcome {
                    built: counts(0),
                    missing: counts(1),
                    corrupt: counts(2),
                    readout_lost: counts(3),
                    accepted: record.u16(6),
                    selected: record.u16(12),
                };
                Message::Done { builder, slot, generation, batch, outcome }
            }
            4 => {
                let missing = record.u32(12);
                if missing == 0 {
                    return Err(bad("missing"));
                }
                Message::MissingFragments {
                    builder,
                    slot,
                    generation,
                    readout: RuIndex(record.u16(6)),
                    missing,
                }
            }
            5 => Message::Fault { cause: record.cause().ok_or(bad("cause"))? },
            6 => Message::Stop { cause: record.cause().ok_or(bad("cause"))? },
            7 => Message::Drain,
            8 => Message::Heartbeat,
            10 => Message::Release { before: batch },
            9 => Message::Lost { unit: record.unit().ok_or(bad("unit"))? },
            11 => match record.unit() {
                Some(Unit::Readout(readout)) => Message::Joined { readout, first_batch: batch },
                _ => return Err(bad("unit")),
            },
            12 => Message::Withdraw { builder, slot, generation },
            13 => Message::Storing { builder, slot, generation },
            _ => return Err(DecodeError::Kind(kind)),
        };
        // One encoding per message: bytes that the kind does not use must be zero.
        let term = if message.is_of_manager() { Term(record.u32(12)) } else { Term::default() };
        if message.encode(term) != *bytes {
            return Err(bad("unused byte"));
        }
        Ok((term, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unit() -> impl Strategy<Value = Unit> {
        prop_oneof![
            Just(Unit::Manager),
            any::<u16>().prop_map(|i| Unit::Readout(RuIndex(i))),
            any::<u16>().prop_map(|i| Unit::Builder(BuIndex(i))),
        ]
    }

    fn cause() -> impl Strategy<Value = StopCause> {
        let bu = || any::<u16>().prop_map(BuIndex);
        prop_oneof![
            Just(StopCause::EndOfRun),
            Just(StopCause::Requested),
            unit().prop_map(StopCause::Lost),
            (unit(), any::<u64>()).prop_map(|(by, b)| StopCause::TimedOut { by, batch: BatchId(b) }),
            (any::<u16>(), bu()).prop_map(|(by, peer)| StopCause::Unreachable { by: RuIndex(by), peer }),
            (any::<u16>(), bu())
                .prop_map(|(readout, by)| StopCause::ReadoutLate { by, readout: RuIndex(readout) }),
            bu().prop_map(StopCause::CardLost),
            bu().prop_map(StopCause::InvalidData),
            bu().prop_map(StopCause::OutputFailed),
            (unit(), 0..ProtocolError::ALL.len())
                .prop_map(|(by, r)| StopCause::Protocol { by, error: ProtocolError::ALL[r] }),
        ]
    }

    fn counts() -> impl Strategy<Value = BatchCounts> {
        any::<(u16, u32)>().prop_map(|(events, fragments)| BatchCounts { events, fragments })
    }

    fn message() -> impl Strategy<Value = Message> {
        let place =
            || any::<(u16, u16, u32)>().prop_map(|(b, s, l)| (BuIndex(b), SlotIndex(s), Generation(l)));
        prop_oneof![
            place().prop_map(|(builder, slot, generation)| Message::Grant { builder, slot, generation }),
            (place(), any::<(u64, u64, bool)>(), 1..=u16::MAX).prop_map(
                |((builder, slot, generation), (id, first, again), events)| {
                    let batch = Batch { id: BatchId(id), first_event: EventNumber(first), events };
                    Message::Assign(Assignment { batch, builder, slot, generation, again })
                }
            ),
            (place(), any::<(u64, u16, u16)>(), (counts(), counts(), counts(), counts())).prop_map(
                |(
                    (builder, slot, generation),
                    (batch, accepted, selected),
                    (built, missing, corrupt, readout_lost),
                )| Message::Done {
                    builder,
                    slot,
                    generation,
                    batch: BatchId(batch),
                    outcome: BatchOutcome { built, missing, corrupt, readout_lost, accepted, selected },
                }
            ),
            (place(), any::<u16>(), 1..=u32::MAX).prop_map(|((builder, slot, generation), ru, missing)| {
                Message::MissingFragments { builder, slot, generation, readout: RuIndex(ru), missing }
            }),
            cause().prop_map(|cause| Message::Fault { cause }),
            cause().prop_map(|cause| Message::Stop { cause }),
            Just(Message::Drain),
            Just(Message::Heartbeat),
            unit().prop_map(|unit| Message::Lost { unit }),
            any::<u64>().prop_map(|before| Message::Release { before: BatchId(before) }),
            place().prop_map(|(builder, slot, generation)| Message::Withdraw { builder, slot, generation }),
            place().prop_map(|(builder, slot, generation)| Message::Storing { builder, slot, generation }),
            any::<(u16, u64)>().prop_map(|(ru, batch)| Message::Joined {
                readout: RuIndex(ru),
                first_batch: BatchId(batch)
            }),
        ]
    }

    proptest! {
        #[test]
        fn messages_come_back(message in message(), term: u32) {
            let term = if message.is_of_manager() { Term(term) } else { Term::default() };
            prop_assert_eq!(Message::decode(&message.encode(term)), Ok((term, message)));
        }

        #[test]
        fn what_decodes_has_exactly_one_encoding(kind in 0u8..14, mut bytes: [u8; Message::SIZE]) {
            bytes[0] = kind;
            if let Ok((term, message)) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(term), bytes);
            }
        }

        #[test]
        fn a_set_unused_byte_is_refused(at in 1..Message::SIZE) {
            prop_assume!(!(12..16).contains(&at));
            let mut bytes = Message::Drain.encode(Term::FIRST);
            bytes[at] = 1;
            prop_assert_eq!(Message::decode(&bytes), Err(DecodeError::Field { kind: 7, field: "unused byte" }));
        }
    }

    #[test]
    fn other_lengths_and_kinds_are_refused() {
        assert_eq!(Message::decode(&[7; 47]), Err(DecodeError::Length(47)));
        assert_eq!(Message::decode(&[99; 48]), Err(DecodeError::Kind(99)));
    }
}
