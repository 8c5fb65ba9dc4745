//! Tests of the takeover.

use super::*;
use crate::plan::small;
use crate::readout::BatchPayload;
use crate::recovery::{Membership, OnBuilderLoss, OnReadoutLoss};
use crate::summary::{BatchCounts, BatchOutcome};
use crate::types::{Bytes, Immediate};
use crate::{Builder, Readout};
use std::time::Duration;

const NOW: Instant = Instant::from_nanos(1_000);
const NEXT: Term = Term(2);

/// Two readout units with 2 sources, two builder units with 2 slots, and their manager: all batches of four events are
/// assigned, and nobody knows yet.
struct Run {
    plan: Plan,
    manager: Manager,
    readouts: Vec<Readout>,
    builders: Vec<Builder>,
    assigned: Vec<Assignment>,
    replica: ManagerReplica,
}

impl Run {
    fn new() -> Run {
        let mut plan = small(&[2, 2], &[2, 2], 100, 4);
        plan.recovery.builder = OnBuilderLoss::Rebuild;
        plan.recovery.takeover_timeout = Duration::from_millis(300);
        let mut manager = Manager::new(plan.clone(), NOW);
        let mut builders: Vec<_> = (0..2).map(|bu| Builder::new(BuIndex(bu), plan.clone(), NOW)).collect();
        for (bu, builder) in (0..).map(BuIndex).zip(&mut builders) {
            while let Some(message) = builder.poll_transmit() {
                manager.handle_message(Unit::Builder(bu), message, NOW);
            }
        }
        let readouts = (0..2).map(|ru| Readout::new(RuIndex(ru), plan.clone(), NOW)).collect();
        let replica = whole(manager.poll_replica()).expect("the standby manager has no copy");
        let mut run = Run { plan, manager, readouts, builders, assigned: Vec::new(), replica };
        run.assigned = assignments(&mut run.manager);
        assert_eq!(run.assigned.len(), 4);
        run
    }

    fn tell_readout(&mut self, ru: usize, batches: &[usize]) {
        for &batch in batches {
            let assign = Message::Assign(self.assigned[batch]);
            self.readouts[ru].handle_message(Term::FIRST, assign, NOW);
        }
    }

    fn tell_builder(&mut self, batches: &[usize]) {
        for &batch in batches {
            let assigned = self.assigned[batch];
            let builder = &mut self.builders[assigned.builder.index()];
            builder.handle_message(Term::FIRST, Message::Assign(assigned), NOW);
        }
    }

    /// All units know the batch, and its builder unit has done it.
    fn build(&mut self, batch: usize) {
        (0..2).for_each(|ru| self.tell_readout(ru, &[batch]));
        self.tell_builder(&[batch]);
        let Assignment { builder, slot, generation, .. } = self.assigned[batch];
        let builder = &mut self.builders[builder.index()];
        for ru in (0..2).map(RuIndex) {
            let send = self.readouts[ru.index()].poll_send().expect("the batch was assigned");
            self.readouts[ru.index()].handle_posted(send, BatchPayload { fragments: 8, bytes: Bytes(80) });
            let arrival = builder.begin_arrival(ru, Immediate::new(slot, generation)).unwrap();
            builder.complete_arrival(arrival, 8, NOW).unwrap();
        }
        builder.poll_complete_batch().expect("all packets have arrived");
        let built = BatchCounts { events: 4, fragments: 16 };
        builder.handle_processed(slot, BatchOutcome { built, ..BatchOutcome::default() }).unwrap();
    }

    fn states(&mut self) -> UnitStates {
        self.states_for(NEXT)
    }

    fn states_for(&mut self, term: Term) -> UnitStates {
        let membership = Membership { term, ..self.replica.membership.clone() };
        let readouts = (0..).map(RuIndex).zip(&mut self.readouts);
        let builders = (0..).map(BuIndex).zip(&mut self.builders);
        let absent = &membership.absent_builders;
        UnitStates {
            readouts: readouts
                .map(|(ru, unit)| (ru, unit.handle_new_term(&membership, NOW).unwrap()))
                .collect(),
            builders: builders
                .filter(|(bu, _)| !absent.contains(bu))
                .map(|(bu, unit)| (bu, unit.handle_new_term(&membership, NOW).unwrap()))
                .collect(),
        }
    }

    fn resume(&mut self) -> Result<Manager, TakeoverError> {
        let states = self.states();
        Manager::resume(self.plan.clone(), &self.replica, &states, NEXT, NOW)
    }
}

fn whole(update: Option<ReplicaUpdate>) -> Option<ManagerReplica> {
    match update? {
        ReplicaUpdate::Whole(replica) => Some(*replica),
        ReplicaUpdate::Done(_) => None,
    }
}

/// What builder unit 1 has sent reaches the manager, and the standby manager gets what follows from it.
fn report(run: &mut Run) {
    while let Some(message) = run.builders[1].poll_transmit() {
        run.manager.handle_message(Unit::Builder(BuIndex(1)), message, NOW);
    }
    match run.manager.poll_replica() {
        Some(ReplicaUpdate::Done(done)) => done.iter().for_each(|batch| run.replica.add_done(batch)),
        other => panic!("expected batches that are done, not {other:?}"),
    }
}

fn assignments(manager: &mut Manager) -> Vec<Assignment> {
    let sent = std::iter::from_fn(|| manager.poll_transmit(NOW));
    sent.filter_map(|transmit| match transmit.message {
        Message::Assign(assignment) => Some(assignment),
        _ => None,
    })
    .collect()
}

#[test]
fn what_some_units_know_is_sent_to_all_and_what_no_unit_knows_is_cut_again() {
    let mut run = Run::new();
    run.tell_readout(0, &[0, 1]);
    run.tell_readout(1, &[0]);
    // Batches 1 and 3 are in the slots of builder unit 1, batch 2 reaches nobody.
    run.tell_builder(&[0, 1, 3]);
    let mut manager = run.resume().unwrap();
    let sent = assignments(&mut manager);
    assert_eq!(&sent[..3], [run.assigned[0], run.assigned[1], run.assigned[3]]);
    assert_eq!(
        sent[3..].iter().map(|a| (a.batch, a.again)).collect::<Vec<_>>(),
        [(run.assigned[2].batch, false)]
    );
    assert_eq!(manager.progress().assigned, 4);
    // Each unit takes what it does not know, and ignores the rest.
    for assignment in sent {
        let message = Message::Assign(assignment);
        run.readouts.iter_mut().for_each(|unit| unit.handle_message(NEXT, message, NOW));
        run.builders[assignment.builder.index()].handle_message(NEXT, message, NOW);
    }
    for readout in &mut run.readouts {
        let sends = std::iter::from_fn(|| readout.poll_send()).count();
        assert_eq!((sends, readout.poll_transmit()), (4, None));
    }
    assert!(run.builders.iter_mut().all(|unit| {
        std::iter::from_fn(|| unit.poll_transmit()).all(|sent| !matches!(sent, Message::Fault { .. }))
    }));
}

#[test]
fn a_batch_that_was_cut_again_and_reached_no_unit_is_cut_once_more() {
    let mut run = Run::new();
    run.tell_readout(0, &[0, 1]);
    run.tell_readout(1, &[0]);
    run.tell_builder(&[0, 1, 3]);
    let mut second = run.resume().unwrap();
    assert!(second.admits_standby());
    while second.poll_replica().is_some() {}
    second.handle_standby_joined();
    run.replica = whole(second.poll_replica()).expect("a standby manager has joined");
    let sent = assignments(&mut second);
    assert_eq!(sent.iter().map(|a| a.batch.id.0).collect::<Vec<_>>(), [0, 1, 3, 2]);
    // Batch 2 was cut again; its assignment is lost with the manager.
    for assignment in &sent[..3] {
        let message = Message::Assign(*assignment);
        run.readouts.iter_mut().for_each(|unit| unit.handle_message(NEXT, message, NOW));
        run.builders[assignment.builder.index()].handle_message(NEXT, message, NOW);
    }
    let states = run.states_for(NEXT.next());
    let first_event = |batch: u64| (BatchId(batch), 4 * batch);
    let skipped = [BatchRange { start: first_event(2), end: first_event(3) }];
    assert!(states.readouts.values().all(|state| state.skipped == skipped && state.next_batch == BatchId(4)));
    let mut third = Manager::resume(run.plan, &run.replica, &states, NEXT.next(), NOW).unwrap();
    assert_eq!(assignments(&mut third), sent);
    assert_eq!(third.reports().manager.unwrap().recovered, [Unit::Manager; 2]);
}

#[test]
fn ranges_that_meet_are_one() {
    let range =
        |start: u64, end: u64| BatchRange { start: (BatchId(start), start), end: (BatchId(end), end) };
    let ranges = [range(7, 9), range(5, 5), range(1, 3), range(2, 4), range(4, 5)];
    assert_eq!(BatchRange::union(ranges), [range(1, 5), range(7, 9)]);
}

#[test]
fn batches_done_are_counted_though_their_messages_are_lost() {
    let mut run = Run::new();
    run.build(0);
    run.build(1);
    let mut manager = run.resume().unwrap();
    assert_eq!((manager.progress().done.batches, manager.progress().done.built.events), (2, 8));
    // All slots are granted; batches 2 and 3 are cut again as new ones.
    let next: Vec<u64> = assignments(&mut manager).iter().map(|a| a.batch.id.0).collect();
    assert_eq!(next, [2, 3, 4, 5]);
    assert_eq!(manager.reports().manager.unwrap().recovered, [Unit::Manager]);
}

#[test]
fn batches_of_a_unit_that_was_lost_before_are_assigned_once_more() {
    let mut run = Run::new();
    (0..4).for_each(|batch| run.build(batch));
    // The messages of builder unit 1 about its batches 1 and 3 have not reached the manager.
    while let Some(message) = run.builders[0].poll_transmit() {
        run.manager.handle_message(Unit::Builder(BuIndex(0)), message, NOW);
    }
    run.manager.handle_lost(Unit::Builder(BuIndex(1)), NOW);
    run.replica = whole(run.manager.poll_replica()).expect("a unit was lost");
    assert_eq!(run.replica.lost_builders.len(), 1);
    let mut manager = run.resume().unwrap();
    let sent = assignments(&mut manager);
    let again: Vec<_> = sent.iter().map(|a| (a.batch.id.0, a.builder.0, a.again)).collect();
    assert_eq!(again, [(1, 0, true), (3, 0, true)]);
    // Readout units learn of the loss with the new term, and keep the batches.
    for readout in &mut run.readouts {
        assert!(readout.is_lost(BuIndex(1)));
        assert_eq!(readout.poll_released(), None);
    }
    let lost = &manager.reports().manager.unwrap().builders[1];
    assert!(lost.unfinished.iter().all(|unfinished| unfinished.again), "{lost:?}");
}

#[test]
fn a_builder_unit_that_is_lost_with_the_manager_is_replaced_once_it_has_ended() {
    let mut run = Run::new();
    (0..2).for_each(|batch| run.build(batch));
    report(&mut run);
    // Batch 3 is in its slot, and its batch 1 is known to be done.
    run.tell_readout(0, &[2, 3]);
    let mut states = run.states();
    states.builders.remove(&BuIndex(1));
    let mut manager = Manager::resume(run.plan, &run.replica, &states, NEXT, NOW).unwrap();
    assert_eq!(manager.progress().done.batches, 2);
    let lost = Unit::Builder(BuIndex(1));
    assert_eq!(manager.reports().manager.unwrap().recovered, [lost, Unit::Manager]);
    let sent: Vec<_> = std::iter::from_fn(|| manager.poll_transmit(NOW)).collect();
    assert_eq!(sent[0].message, Message::Lost { unit: lost });
    assert!(sent.iter().all(|transmit| transmit.to != Receivers::Unit(lost)), "{sent:?}");
    assert_eq!((manager.poll_excluded(), manager.poll_departed()), (Some(lost), None));
    manager.handle_message(
        Unit::Builder(BuIndex(0)),
        Message::Done {
            builder: BuIndex(0),
            slot: run.assigned[2].slot,
            generation: run.assigned[2].generation,
            batch: BatchId(2),
            outcome: BatchOutcome {
                built: BatchCounts { events: 4, fragments: 16 },
                ..BatchOutcome::default()
            },
        },
        NOW,
    );
    manager.handle_message(
        Unit::Builder(BuIndex(0)),
        Message::Grant {
            builder: BuIndex(0),
            slot: run.assigned[2].slot,
            generation: run.assigned[2].generation.next(),
        },
        NOW,
    );
    manager.handle_lost(lost, NOW);
    let again = assignments(&mut manager);
    assert_eq!((again[0].batch, again[0].builder, again[0].again), (run.assigned[3].batch, BuIndex(0), true));
    assert_eq!(manager.poll_departed(), Some(lost));
}

#[test]
fn packets_of_a_batch_that_only_a_lost_readout_unit_knew_are_withdrawn() {
    let mut run = Run::new();
    run.plan.recovery.readout = OnReadoutLoss::Deliver;
    run.build(0);
    run.tell_readout(1, &[1]);
    let Assignment { builder, slot, generation, .. } = run.assigned[1];
    let send = run.readouts[1].poll_send().expect("the batch was assigned");
    run.readouts[1].handle_posted(send, BatchPayload { fragments: 8, bytes: Bytes(80) });
    let unit = &mut run.builders[builder.index()];
    let arrival = unit.begin_arrival(RuIndex(1), Immediate::new(slot, generation)).unwrap();
    unit.complete_arrival(arrival, 8, NOW).unwrap();
    let mut states = run.states();
    states.readouts.remove(&RuIndex(1));
    let mut manager = Manager::resume(run.plan, &run.replica, &states, NEXT, NOW).unwrap();
    let withdraw = Message::Withdraw { builder, slot, generation };
    let sent: Vec<_> = std::iter::from_fn(|| manager.poll_transmit(NOW)).collect();
    assert!(sent.iter().any(|transmit| transmit.message == withdraw), "{sent:?}");
    let unit = &mut run.builders[builder.index()];
    for Transmit { to, message } in sent {
        if to.includes(Unit::Builder(builder)) {
            unit.handle_message(NEXT, message, NOW);
        }
    }
    assert_eq!((unit.poll_withdrawn(), unit.poll_withdrawn()), (Some(slot), None));
    assert!(unit.is_excluded(RuIndex(1)));
    // The batch that takes the slot is complete with the packets of the other readout unit.
    let arrival = unit.begin_arrival(RuIndex(0), Immediate::new(slot, generation)).unwrap();
    unit.complete_arrival(arrival, 8, NOW).unwrap();
    assert!(unit.poll_complete_batch().is_some_and(|complete| complete.slot == slot));
}

#[test]
fn a_standby_manager_refuses_what_does_not_add_up() {
    let refused = |change: fn(&mut Run, &mut UnitStates)| {
        let mut run = Run::new();
        run.build(0);
        run.tell_readout(0, &[1]);
        let mut states = run.states();
        change(&mut run, &mut states);
        Manager::resume(run.plan, &run.replica, &states, NEXT, NOW).unwrap_err()
    };
    let (bu, slot) = (BuIndex(1), SlotIndex(0));
    assert_eq!(
        refused(|run, states| {
            run.plan.recovery.builder = OnBuilderLoss::Stop;
            states.builders.remove(&BuIndex(1));
        }),
        TakeoverError::NoState(Unit::Builder(bu))
    );
    assert_eq!(
        refused(|_, states| drop(states.readouts.remove(&RuIndex(1)))),
        TakeoverError::NoState(Unit::Readout(RuIndex(1)))
    );
    assert_eq!(refused(|run, _| run.replica.first_batches.clear()), TakeoverError::Replica);
    assert_eq!(
        refused(|_, states| states.builders.get_mut(&BuIndex(1)).unwrap().slots.clear()),
        TakeoverError::Mismatch(Unit::Builder(bu))
    );
    // Packets in a slot without a batch are of an assignment that only a lost unit knew.
    assert_eq!(
        refused(|_, states| {
            states.readouts.get_mut(&RuIndex(0)).unwrap().assigned.pop();
            states.builders.get_mut(&BuIndex(1)).unwrap().slots[0].arrivals.push(RuIndex(1));
        }),
        TakeoverError::Conflict { builder: bu, slot }
    );
    let lost = refused(|_, states| states.builders.get_mut(&BuIndex(0)).unwrap().done = Default::default());
    assert_eq!(lost, TakeoverError::Events { found: 4, expected: 8 });
    let twice = refused(|_, states| {
        let done = states.builders[&BuIndex(0)].done;
        states.builders.get_mut(&BuIndex(1)).unwrap().done = done;
    });
    assert_eq!(twice, TakeoverError::Events { found: 12, expected: 8 });
    let newer = refused(|run, states| {
        states.builders.get_mut(&BuIndex(1)).unwrap().newest = run.plan.batch(BatchId(7));
    });
    assert!(matches!(newer, TakeoverError::Events { .. }), "{newer}");
}

#[test]
fn a_waiting_unit_keeps_its_faults_for_the_new_manager() {
    let mut run = Run::new();
    run.tell_readout(0, &[0]);
    let cause = StopCause::Unreachable { by: RuIndex(0), peer: BuIndex(1) };
    // Sent to the lost manager.
    run.readouts[0].handle_unreachable(BuIndex(1));
    assert_eq!(run.readouts[0].poll_transmit(), Some(Message::Fault { cause }));
    run.readouts[0].handle_manager_lost(NOW);
    run.builders[0].handle_manager_lost(NOW);
    run.builders[0].handle_card_lost();
    assert_eq!(run.builders[0].poll_transmit(), None);
    run.states();
    assert_eq!((run.readouts[0].poll_transmit(), run.builders[0].poll_transmit()), (None, None));
    run.readouts[0].handle_message(NEXT, Message::Heartbeat, NOW);
    run.builders[0].handle_message(NEXT, Message::Heartbeat, NOW);
    assert_eq!(run.readouts[0].poll_transmit(), Some(Message::Fault { cause }));
    let cause = StopCause::CardLost(BuIndex(0));
    assert_eq!(run.builders[0].poll_transmit(), Some(Message::Fault { cause }));
}

#[test]
fn a_unit_that_stops_or_knows_more_follows_no_new_term() {
    let mut run = Run::new();
    let membership = |run: &Run, term| Membership { term, ..run.replica.membership.clone() };
    let (old, new) = (membership(&run, Term::FIRST), membership(&run, NEXT));
    assert_eq!(run.readouts[0].handle_new_term(&old, NOW), None);
    // The standby manager does not know that this unit is lost.
    run.readouts[0].handle_message(Term::FIRST, Message::Lost { unit: Unit::Builder(BuIndex(0)) }, NOW);
    assert_eq!(run.readouts[0].handle_new_term(&new, NOW), None);
    run.builders[0].handle_message(Term::FIRST, Message::Lost { unit: Unit::Readout(RuIndex(1)) }, NOW);
    assert_eq!(run.builders[0].handle_new_term(&new, NOW), None);
    run.builders[1].handle_message(Term::FIRST, Message::Stop { cause: StopCause::Requested }, NOW);
    assert_eq!(run.builders[1].handle_new_term(&new, NOW), None);
    assert!(run.readouts[1].handle_new_term(&new, NOW).is_some());
    // A manager that was only stopped continues.
    run.readouts[1].handle_message(Term::FIRST, Message::Stop { cause: StopCause::Requested }, NOW);
    assert_eq!(run.readouts[1].poll_report(), None);
}
