//! Tests of the manager.

use super::super::plan::small;
use super::super::recovery::{OnBuilderLoss, OnReadoutLoss, ReadoutMember, RecoveryPolicy};
use super::super::summary::BatchCounts;
use super::*;
use std::time::Duration;

const NOW: Instant = Instant::from_nanos(1_000);

/// A manager of one readout unit with 2 sources, and builder units with the given slots.
fn manager(slots: &[u16]) -> Manager {
    Manager::new(small(&[2], slots, 12, 4), NOW)
}

fn grant(manager: &mut Manager, builder: u16, slot: u16, generation: u32) {
    let grant = Message::Grant {
        builder: BuIndex(builder),
        slot: SlotIndex(slot),
        generation: Generation(generation),
    };
    manager.handle_message(Unit::Builder(BuIndex(builder)), grant, NOW);
}

fn done(builder: u16, slot: u16, generation: u32, batch: u64) -> Message {
    let built = BatchCounts { events: 4, fragments: 8 };
    let outcome = BatchOutcome { built, ..BatchOutcome::default() };
    let (builder, slot, batch) = (BuIndex(builder), SlotIndex(slot), BatchId(batch));
    Message::Done { builder, slot, generation: Generation(generation), batch, outcome }
}

fn sent(manager: &mut Manager) -> Vec<Message> {
    std::iter::from_fn(|| manager.poll_transmit(NOW)).map(|transmit| transmit.message).collect()
}

fn assigned(manager: &mut Manager) -> Vec<(u64, u16, u16)> {
    let place = |message| match message {
        Message::Assign(a) => (a.batch.id.0, a.builder.0, a.slot.0),
        other => panic!("expected an assignment, not {other:?}"),
    };
    sent(manager).into_iter().map(place).collect()
}

#[test]
fn nothing_is_assigned_without_a_credit_and_builder_units_take_turns() {
    let mut manager = manager(&[2, 1]);
    assert_eq!(assigned(&mut manager), []);
    grant(&mut manager, 0, 1, 1);
    grant(&mut manager, 0, 0, 1);
    grant(&mut manager, 1, 0, 1);
    assert_eq!(assigned(&mut manager), [(0, 0, 1), (1, 1, 0), (2, 0, 0)]);
    assert_eq!(manager.progress().assigned, 3);
}

#[test]
fn a_paused_run_assigns_nothing_until_it_is_resumed() {
    let mut manager = manager(&[2]);
    manager.handle_pause(true);
    (0..2).for_each(|slot| grant(&mut manager, 0, slot, 1));
    assert_eq!(assigned(&mut manager), []);
    manager.handle_pause(false);
    assert_eq!(assigned(&mut manager), [(0, 0, 0), (1, 0, 1)]);
}

#[test]
fn available_batches_are_assigned_in_rounds_except_the_last() {
    let mut manager = manager(&[3, 3]);
    (0..3).for_each(|slot| (0..2).for_each(|builder| grant(&mut manager, builder, slot, 1)));
    manager.handle_available(7, NOW);
    assert_eq!(assigned(&mut manager), []);
    manager.handle_available(8, NOW);
    assert_eq!(assigned(&mut manager), [(0, 0, 0), (1, 1, 0)]);
    manager.handle_available(12, NOW);
    assert_eq!(assigned(&mut manager), [(2, 0, 1)]);
}

#[test]
fn events_that_wait_for_the_batch_timeout_are_assigned_in_a_shorter_batch() {
    let mut manager = manager(&[3, 3]);
    let timeout = Duration::from_millis(7);
    manager.plan.batch_timeout = Some(timeout);
    (0..3).for_each(|slot| (0..2).for_each(|builder| grant(&mut manager, builder, slot, 1)));
    manager.handle_available(0, NOW);
    manager.handle_timeout(NOW);
    while manager.poll_transmit(NOW).is_some() {}
    let assignments = |manager: &mut Manager, now| -> Vec<(u64, u16)> {
        let sent = std::iter::from_fn(|| manager.poll_transmit(now));
        sent.filter_map(|transmit| match transmit.message {
            Message::Assign(a) => Some((a.batch.first_event.0, a.batch.events)),
            _ => None,
        })
        .collect()
    };
    assert_eq!(manager.poll_timeout(), Some(manager.next_heartbeat));
    manager.handle_available(3, NOW);
    manager.handle_available(5, NOW + timeout / 2);
    assert_eq!(manager.poll_timeout(), Some(NOW + timeout));
    assert_eq!(assignments(&mut manager, NOW + timeout / 2), []);
    // The round of both builder units is not full; the waiting events are assigned.
    assert_eq!(assignments(&mut manager, NOW + timeout), [(100, 4)]);
    assert_eq!(assignments(&mut manager, NOW + 2 * timeout), [(104, 1)]);
    // The rest of the run needs no timeout, and two batches of the run are shorter than the others.
    manager.handle_available(12, NOW + 2 * timeout);
    assert_eq!(assignments(&mut manager, NOW + 2 * timeout), [(105, 4), (109, 3)]);
    assert_eq!(manager.progress().assigned, 4);
}

/// A manager of two readout units and two builder units with a slot each, all of which may join again once.
fn restartable() -> Manager {
    let mut plan = small(&[2, 3], &[1, 1, 1, 1], 100, 4);
    plan.recovery = RecoveryPolicy {
        builder: OnBuilderLoss::Rebuild,
        readout: OnReadoutLoss::Deliver,
        restarts: 1,
        join_timeout: Duration::from_secs(1),
        ..RecoveryPolicy::default()
    };
    Manager::new(plan, NOW)
}

#[test]
fn a_restarted_readout_unit_joins_at_the_next_batch() {
    let mut manager = restartable();
    let (first, again) = (Unit::Readout(RuIndex(1)), Unit::Readout(RuIndex(3)));
    assert_eq!((manager.join_candidate(first), manager.handle_joined(again)), (None, None));
    (0..2).for_each(|builder| grant(&mut manager, builder, 0, 1));
    assert_eq!(assigned(&mut manager).len(), 2);
    manager.handle_lost(first, NOW);
    assert_eq!((manager.poll_departed(), manager.join_candidate(first)), (Some(first), Some(again)));
    sent(&mut manager);
    let membership = manager.handle_joined(again).unwrap();
    assert_eq!((membership.first_batch, membership.first_event), (BatchId(2), 8));
    let member = ReadoutMember { index: RuIndex(3), is_lost: false, first_batch: BatchId(2) };
    assert_eq!(membership.readouts[1], member);
    assert_eq!(membership.absent_builders, [BuIndex(2), BuIndex(3)]);
    let joined = Message::Joined { readout: RuIndex(3), first_batch: BatchId(2) };
    assert_eq!(sent(&mut manager), [joined]);
    // Batch 1 was sent before, batch 2 comes from the unit that joined.
    assert_eq!(manager.sender_of(RuIndex(1), BatchId(1)), RuIndex(1));
    assert_eq!(manager.sender_of(RuIndex(1), BatchId(2)), RuIndex(3));
    // It may not join a second time.
    manager.handle_lost(again, NOW);
    assert_eq!(manager.join_candidate(again), None);
    assert_eq!(manager.reports().manager.unwrap().joined, [again]);
}

#[test]
fn a_run_without_builder_units_waits_for_one_to_join() {
    let mut manager = restartable();
    (0..2).for_each(|builder| grant(&mut manager, builder, 0, 1));
    assert_eq!(assigned(&mut manager).len(), 2);
    (0..2).for_each(|builder| manager.handle_lost(Unit::Builder(BuIndex(builder)), NOW));
    sent(&mut manager);
    let again = manager.join_candidate(Unit::Builder(BuIndex(1)));
    assert_eq!(again, Some(Unit::Builder(BuIndex(3))));
    assert!(manager.handle_joined(Unit::Builder(BuIndex(3))).is_some());
    grant(&mut manager, 3, 0, 1);
    assert_eq!(assigned(&mut manager), [(0, 3, 0)]);
    manager.handle_lost(Unit::Builder(BuIndex(3)), NOW);
    let until = NOW + Duration::from_secs(1);
    manager.handle_timeout(until);
    let cause = StopCause::Lost(Unit::Builder(BuIndex(3)));
    assert!(sent(&mut manager).contains(&Message::Stop { cause }));
    assert_eq!(manager.join_candidate(Unit::Builder(BuIndex(0))), None);
}

fn protocol_error_of(messages: &[(u16, Message)]) -> ProtocolError {
    let mut manager = manager(&[2, 1]);
    grant(&mut manager, 0, 0, 1);
    assert_eq!(assigned(&mut manager), [(0, 0, 0)]);
    for (from, message) in messages {
        manager.handle_message(Unit::Builder(BuIndex(*from)), *message, NOW);
    }
    match sent(&mut manager)[..] {
        [Message::Stop { cause: StopCause::Protocol { by: Unit::Builder(_), error } }] => error,
        ref other => panic!("expected a stop for a protocol error, not {other:?}"),
    }
}

#[test]
fn protocol_errors_stop_the_run_with_their_name() {
    let grant = |slot, generation| Message::Grant {
        builder: BuIndex(0),
        slot: SlotIndex(slot),
        generation: Generation(generation),
    };
    let short = |readout, missing| Message::MissingFragments {
        builder: BuIndex(0),
        slot: SlotIndex(0),
        generation: Generation(1),
        readout: RuIndex(readout),
        missing,
    };
    let outcome = BatchOutcome { built: BatchCounts { events: 3, fragments: 6 }, ..BatchOutcome::default() };
    let (builder, slot) = (BuIndex(0), SlotIndex(0));
    let partial = Message::Done { builder, slot, generation: Generation(1), batch: BatchId(0), outcome };
    assert_eq!(protocol_error_of(&[(0, grant(0, 2))]), ProtocolError::GrantOfBusySlot);
    assert_eq!(protocol_error_of(&[(0, grant(1, 2))]), ProtocolError::WrongGeneration);
    assert_eq!(protocol_error_of(&[(0, grant(2, 1))]), ProtocolError::UnknownSlotOrUnit);
    assert_eq!(protocol_error_of(&[(1, grant(0, 1))]), ProtocolError::UnexpectedMessage);
    assert_eq!(protocol_error_of(&[(0, Message::Drain)]), ProtocolError::UnexpectedMessage);
    assert_eq!(protocol_error_of(&[(0, done(0, 0, 2, 0))]), ProtocolError::WrongGeneration);
    assert_eq!(protocol_error_of(&[(0, done(0, 0, 1, 1))]), ProtocolError::SlotNotAssigned);
    assert_eq!(protocol_error_of(&[(0, done(0, 1, 0, 0))]), ProtocolError::SlotNotAssigned);
    assert_eq!(protocol_error_of(&[(0, partial)]), ProtocolError::WrongEventCount);
    assert_eq!(protocol_error_of(&[(0, short(1, 1))]), ProtocolError::UnknownSlotOrUnit);
    assert_eq!(protocol_error_of(&[(0, short(0, 9))]), ProtocolError::TooManyFragments);
    assert_eq!(protocol_error_of(&[(0, short(0, 1)), (0, short(0, 1))]), ProtocolError::TooManyFragments);
}

#[test]
fn nothing_is_assigned_once_the_run_stops() {
    let mut manager = manager(&[2]);
    grant(&mut manager, 0, 0, 1);
    manager.handle_stop_request(NOW);
    assert_eq!(sent(&mut manager), [Message::Stop { cause: StopCause::Requested }]);
    grant(&mut manager, 0, 1, 1);
    assert_eq!(sent(&mut manager), []);
}

#[test]
fn a_death_explains_the_write_that_failed_before_it() {
    let mut manager = manager(&[1]);
    let cause = StopCause::Unreachable { by: RuIndex(0), peer: BuIndex(0) };
    manager.handle_message(Unit::Readout(RuIndex(0)), Message::Fault { cause }, NOW);
    manager.handle_lost(Unit::Builder(BuIndex(0)), NOW);
    manager.handle_lost(Unit::Readout(RuIndex(0)), NOW);
    let summary = manager.poll_finished().unwrap();
    assert_eq!(summary.cause, StopCause::Lost(Unit::Builder(BuIndex(0))));
    assert!(summary.is_balanced() && !summary.is_success());
    assert_eq!(manager.poll_finished(), None);
}

#[test]
fn units_that_do_not_answer_are_lost_after_a_bounded_time() {
    let mut manager = manager(&[1]);
    manager.handle_stop_request(NOW);
    let mut waits = Vec::new();
    while let Some(at) = manager.poll_timeout() {
        manager.handle_timeout(at);
        waits.push(at);
    }
    assert!(waits.last() <= Some(&(NOW + 4 * manager.plan.drain_timeout)), "{waits:?}");
    let lost = manager.poll_finished().unwrap().lost;
    assert_eq!(lost, [Unit::Readout(RuIndex(0)), Unit::Builder(BuIndex(0))]);
}

#[test]
fn batches_of_a_builder_unit_that_is_cut_off_wait_for_its_end() {
    let mut plan = small(&[2], &[1, 2], 12, 4);
    plan.recovery.builder = OnBuilderLoss::Rebuild;
    let mut manager = Manager::new(plan, NOW);
    let cut_off = Unit::Builder(BuIndex(0));
    grant(&mut manager, 0, 0, 1);
    grant(&mut manager, 1, 0, 1);
    assert_eq!(assigned(&mut manager), [(0, 0, 0), (1, 1, 0)]);
    assert!(manager.handle_cut_off(cut_off, NOW));
    assert_eq!(manager.poll_excluded(), Some(cut_off));
    sent(&mut manager);
    grant(&mut manager, 1, 1, 1);
    assert_eq!(assigned(&mut manager), [(2, 1, 1)]);
    manager.handle_lost(cut_off, NOW);
    manager.handle_message(Unit::Builder(BuIndex(1)), done(1, 0, 1, 1), NOW);
    grant(&mut manager, 1, 0, 2);
    assert_eq!(assigned(&mut manager), [(0, 1, 0)]);
    // It is gone, and a readout unit stores nothing.
    assert!(!manager.handle_cut_off(cut_off, NOW));
    assert!(!manager.handle_cut_off(Unit::Readout(RuIndex(0)), NOW));
}
