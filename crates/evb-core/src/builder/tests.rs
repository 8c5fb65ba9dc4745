//! Tests of a builder unit.

use super::super::plan::small;
use super::super::summary::BatchCounts;
use super::super::types::BatchId;
use super::*;
use std::time::Duration;

const START: Instant = Instant::from_nanos(1_000);
const SLOT: SlotIndex = SlotIndex(0);

/// A builder unit with two slots, and two readout units with 2 and 3 sources.
fn builder() -> Builder {
    let mut builder = Builder::new(BuIndex(0), small(&[2, 3], &[2], 100, 4), START);
    while builder.poll_transmit().is_some() {}
    builder
}

fn assign(builder: &mut Builder, slot: u16, generation: u32, batch: u64) {
    let batch = builder.plan.batch(BatchId(batch)).unwrap();
    let (slot, generation) = (SlotIndex(slot), Generation(generation));
    let assignment = Assignment { batch, builder: BuIndex(0), slot, generation, again: false };
    builder.handle_message(Term::FIRST, Message::Assign(assignment), START);
}

fn arrive(
    builder: &mut Builder,
    ru: u16,
    slot: u16,
    generation: u32,
    fragments: u32,
) -> Result<(), ProtocolError> {
    let immediate = Immediate::new(SlotIndex(slot), Generation(generation));
    let arrival = builder.begin_arrival(RuIndex(ru), immediate)?;
    builder.complete_arrival(arrival, fragments, START)
}

fn outcome() -> BatchOutcome {
    BatchOutcome {
        built: BatchCounts { events: 3, fragments: 15 },
        missing: BatchCounts { events: 1, fragments: 4 },
        accepted: 2,
        ..BatchOutcome::default()
    }
}

#[test]
fn a_batch_is_complete_when_assigned_and_arrived_in_any_order() {
    let mut builder = builder();
    arrive(&mut builder, 1, 0, 1, 11).unwrap();
    assign(&mut builder, 0, 1, 7);
    assert_eq!(builder.poll_complete_batch(), None);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    let process = builder.poll_complete_batch().unwrap();
    assert_eq!((process.slot, process.batch.id), (SLOT, BatchId(7)));
    assert_eq!(builder.poll_complete_batch(), None);
}

#[test]
fn processing_reports_missing_fragments_then_done_then_the_next_grant() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    arrive(&mut builder, 1, 0, 1, 11).unwrap();
    builder.handle_processed(SLOT, outcome()).unwrap();
    let (me, generation) = (BuIndex(0), Generation(1));
    let missing =
        Message::MissingFragments { builder: me, slot: SLOT, generation, readout: RuIndex(1), missing: 1 };
    let done = Message::Done { builder: me, slot: SLOT, generation, batch: BatchId(7), outcome: outcome() };
    let grant = Message::Grant { builder: me, slot: SLOT, generation: Generation(2) };
    let sent: Vec<_> = std::iter::from_fn(|| builder.poll_transmit()).collect();
    assert_eq!(sent, [missing, done, grant]);
}

#[test]
fn invalid_arrivals_are_rejected_by_name_and_counted() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    assert_eq!(arrive(&mut builder, 0, 0, 1, 8), Err(ProtocolError::DuplicateArrival));
    assert_eq!(arrive(&mut builder, 1, 0, 0, 8), Err(ProtocolError::StaleArrival));
    assert_eq!(arrive(&mut builder, 1, 2, 1, 8), Err(ProtocolError::UnknownSlotOrUnit));
    assert_eq!(arrive(&mut builder, 1, 0, 1, 13), Err(ProtocolError::TooManyFragments));
    arrive(&mut builder, 1, 0, 1, 12).unwrap();
    builder.handle_processed(SLOT, outcome()).unwrap();
    assert_eq!(arrive(&mut builder, 1, 0, 1, 12), Err(ProtocolError::StaleArrival));
    builder.handle_message(Term::FIRST, Message::Stop { cause: StopCause::EndOfRun }, START);
    builder.handle_message(Term::FIRST, Message::Drain, START);
    let report = builder.poll_report().unwrap();
    let rejected = [
        (ProtocolError::UnknownSlotOrUnit, 1),
        (ProtocolError::StaleArrival, 2),
        (ProtocolError::DuplicateArrival, 1),
        (ProtocolError::TooManyFragments, 1),
    ];
    assert_eq!(report.rejected_arrivals, rejected);
    assert_eq!(report.arrived, [8, 12]);
}

#[test]
fn excess_fragments_of_a_short_last_batch_are_detected_at_its_assignment() {
    let mut builder = Builder::new(BuIndex(0), small(&[2], &[1], 5, 4), START);
    while builder.poll_transmit().is_some() {}
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    assign(&mut builder, 0, 1, 1);
    assert_eq!(builder.poll_complete_batch(), None);
    let cause = StopCause::Protocol { by: Unit::Readout(RuIndex(0)), error: ProtocolError::TooManyFragments };
    assert_eq!(builder.poll_transmit(), Some(Message::Fault { cause }));
}

#[test]
fn an_outcome_has_to_cover_the_batch() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    assert_eq!(builder.handle_processed(SLOT, outcome()), Err(ProtocolError::SlotNotAssigned));
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    arrive(&mut builder, 1, 0, 1, 11).unwrap();
    let incomplete = BatchOutcome { missing: BatchCounts::default(), ..outcome() };
    assert_eq!(builder.handle_processed(SLOT, incomplete), Err(ProtocolError::WrongEventCount));
    let too_many_accepted = BatchOutcome { accepted: 4, ..outcome() };
    assert_eq!(builder.handle_processed(SLOT, too_many_accepted), Err(ProtocolError::WrongEventCount));
    builder.handle_processed(SLOT, outcome()).unwrap();
}

#[test]
fn draining_waits_for_batches_in_processing() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    arrive(&mut builder, 1, 0, 1, 11).unwrap();
    assign(&mut builder, 1, 1, 8);
    arrive(&mut builder, 1, 1, 1, 10).unwrap();
    let lost = StopCause::Lost(Unit::Readout(RuIndex(0)));
    builder.handle_message(Term::FIRST, Message::Stop { cause: lost }, START);
    builder.handle_message(Term::FIRST, Message::Drain, START);
    assert_eq!(builder.poll_report(), None);
    builder.handle_processed(SLOT, outcome()).unwrap();
    let report = builder.poll_report().unwrap();
    assert_eq!((report.done.batches, report.cause), (1, lost));
    assert_eq!(report.slots[0], SlotReport { generation: Generation(1), state: SlotState::Finished });
    let SlotState::Unfinished { arrived, cause, .. } = &report.slots[1].state else {
        panic!("slot 1 is unfinished: {report:?}")
    };
    assert_eq!((arrived.as_slice(), *cause), (&[(RuIndex(1), 10)][..], UnfinishedCause::ReadoutLost));
}

#[test]
fn batches_are_complete_without_a_readout_unit_that_the_run_goes_on_without() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 1, 0, 1, 12).unwrap();
    arrive(&mut builder, 0, 1, 1, 8).unwrap();
    assert_eq!(builder.poll_complete_batch(), None);
    let unit = Unit::Readout(RuIndex(0));
    builder.handle_message(Term::FIRST, Message::Lost { unit }, START);
    assert_eq!(builder.poll_complete_batch().map(|complete| complete.slot), Some(SLOT));
    assert!(builder.is_absent(SLOT, RuIndex(0)) && !builder.is_absent(SLOT, RuIndex(1)));
    let outcome = BatchOutcome {
        missing: BatchCounts { events: 4, fragments: 12 },
        accepted: 0,
        ..BatchOutcome::default()
    };
    builder.handle_processed(SLOT, outcome).unwrap();
    let counted = BatchOutcome { readout_lost: outcome.missing, ..BatchOutcome::default() };
    let done = std::iter::from_fn(|| builder.poll_transmit())
        .find_map(|message| if let Message::Done { outcome, .. } = message { Some(outcome) } else { None });
    assert_eq!(done, Some(counted));
    // An arrival before the assignment counts, and later batches do not wait for the lost unit.
    assign(&mut builder, 1, 1, 8);
    arrive(&mut builder, 1, 1, 1, 12).unwrap();
    assert!(builder.poll_complete_batch().is_some() && !builder.is_absent(SlotIndex(1), RuIndex(0)));
    assign(&mut builder, 0, 2, 9);
    arrive(&mut builder, 1, 0, 2, 12).unwrap();
    assert!(builder.poll_complete_batch().is_some() && builder.is_absent(SLOT, RuIndex(0)));
}

#[test]
fn a_readout_unit_that_joins_delivers_from_its_first_batch() {
    let mut plan = small(&[2, 3], &[2, 2], 100, 4);
    plan.recovery.restarts = 1;
    let mut builder = Builder::new(BuIndex(0), plan, START);
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    arrive(&mut builder, 1, 0, 1, 12).unwrap();
    builder.poll_complete_batch().unwrap();
    arrive(&mut builder, 0, 1, 1, 8).unwrap();
    builder.handle_message(Term::FIRST, Message::Lost { unit: Unit::Readout(RuIndex(0)) }, START);
    let (readout, first_batch) = (RuIndex(2), BatchId(9));
    builder.handle_message(Term::FIRST, Message::Joined { readout, first_batch }, START);
    assert!(builder.is_excluded(RuIndex(0)) && !builder.is_excluded(readout));
    // A late notice of the lost unit is not about the one that joined.
    builder.handle_message(Term::FIRST, Message::Lost { unit: Unit::Readout(RuIndex(0)) }, START);
    builder.handle_readout_lost(RuIndex(0));
    // Batch 8 is older: it has what had arrived before.
    assign(&mut builder, 1, 1, 8);
    assert_eq!(arrive(&mut builder, 0, 1, 1, 8), Err(ProtocolError::StaleArrival));
    arrive(&mut builder, 1, 1, 1, 12).unwrap();
    assert!(builder.poll_complete_batch().is_some() && !builder.is_absent(SlotIndex(1), RuIndex(0)));
    let whole = BatchOutcome { built: BatchCounts { events: 4, fragments: 20 }, ..BatchOutcome::default() };
    builder.handle_processed(SLOT, whole).unwrap();
    assign(&mut builder, 0, 2, 9);
    arrive(&mut builder, 1, 0, 2, 12).unwrap();
    assert_eq!(builder.poll_complete_batch(), None);
    arrive(&mut builder, 2, 0, 2, 7).unwrap();
    assert!(builder.poll_complete_batch().is_some() && !builder.is_absent(SLOT, RuIndex(0)));
    // A batch that is assigned again from before has no packets of it.
    builder.handle_processed(SlotIndex(1), whole).unwrap();
    assign(&mut builder, 1, 2, 6);
    arrive(&mut builder, 1, 1, 2, 12).unwrap();
    assert!(builder.poll_complete_batch().is_some() && builder.is_absent(SlotIndex(1), readout));
    builder.handle_message(Term::FIRST, Message::Stop { cause: StopCause::Requested }, START);
    builder.handle_card_lost();
    builder.handle_message(Term::FIRST, Message::Drain, START);
    let report = builder.poll_report().unwrap();
    assert_eq!((report.arrived, report.excluded), (vec![16, 48, 7, 0], vec![RuIndex(0)]));
}

#[test]
fn a_readout_unit_that_is_late_is_named_if_others_delivered() {
    let mut plan = small(&[2, 3], &[2], 100, 4);
    plan.recovery.readout = OnReadoutLoss::Deliver;
    let mut builder = Builder::new(BuIndex(0), plan, START);
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 1, 0, 1, 12).unwrap();
    while builder.poll_transmit().is_some() {}
    let now = START + builder.plan.timeout;
    builder.handle_message(Term::FIRST, Message::Heartbeat, now);
    builder.handle_timeout(now);
    let cause = StopCause::ReadoutLate { by: BuIndex(0), readout: RuIndex(0) };
    assert_eq!(builder.poll_transmit(), Some(Message::Fault { cause }));
}

#[test]
fn a_lost_card_leaves_its_batches_unprocessed() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    arrive(&mut builder, 1, 0, 1, 11).unwrap();
    builder.handle_card_lost();
    assert_eq!(builder.poll_transmit(), Some(Message::Fault { cause: StopCause::CardLost(BuIndex(0)) }));
    builder.handle_message(Term::FIRST, Message::Stop { cause: StopCause::CardLost(BuIndex(0)) }, START);
    builder.handle_message(Term::FIRST, Message::Drain, START);
    let report = builder.poll_report().unwrap();
    assert!(matches!(
        report.slots[0].state,
        SlotState::Unfinished { cause: UnfinishedCause::Unprocessed, .. }
    ));
}

#[test]
fn the_manager_is_told_of_batches_that_wait_for_storage_until_they_are_done() {
    let mut builder = builder();
    assign(&mut builder, 0, 1, 7);
    arrive(&mut builder, 0, 0, 1, 8).unwrap();
    arrive(&mut builder, 1, 0, 1, 11).unwrap();
    builder.handle_storing(SLOT, START);
    let storing = Message::Storing { builder: BuIndex(0), slot: SLOT, generation: Generation(1) };
    let interval = Duration::from_millis(25);
    for time in 1..=40 {
        let now = START + time * interval;
        builder.handle_message(Term::FIRST, Message::Heartbeat, now);
        assert_eq!((builder.poll_timeout(), builder.poll_transmit()), (Some(now), None));
        builder.handle_timeout(now);
        assert_eq!((builder.poll_transmit(), builder.poll_transmit()), (Some(storing), None));
    }
    builder.handle_processed(SLOT, outcome()).unwrap();
    while builder.poll_transmit().is_some() {}
    builder.handle_timeout(START + 41 * interval);
    assert_eq!(builder.poll_transmit(), None);
}

#[test]
fn a_lost_card_does_not_end_the_wait_for_storage() {
    let mut builder = builder();
    for slot in 0..2 {
        assign(&mut builder, slot, 1, u64::from(slot));
        arrive(&mut builder, 0, slot, 1, 8).unwrap();
        arrive(&mut builder, 1, slot, 1, 11).unwrap();
    }
    builder.handle_storing(SLOT, START);
    builder.handle_card_lost();
    builder.handle_message(Term::FIRST, Message::Stop { cause: StopCause::CardLost(BuIndex(0)) }, START);
    builder.handle_message(Term::FIRST, Message::Drain, START);
    assert!(builder.poll_report().is_none(), "its events may be stored already");
    builder.handle_processed(SLOT, outcome()).unwrap();
    let report = builder.poll_report().unwrap();
    let states: Vec<_> = report.slots.iter().map(|slot| &slot.state).collect();
    assert!(
        matches!(
            states[..],
            [SlotState::Finished, SlotState::Unfinished { cause: UnfinishedCause::Unprocessed, .. }]
        ),
        "{states:?}"
    );
}
