//! The event builder's core under simulated time: every event is built exactly once or accounted for.

#[path = "sim/managers.rs"]
mod managers;
#[expect(unreachable_pub, reason = "a module of this test binary only")]
mod sim;

use millstream_evb::core::recovery::{OnBuilderLoss, OnReadoutLoss, RecoveryPolicy};
use millstream_evb::core::shaping::TrafficShaping;
use millstream_evb::core::summary::Invariant;
use millstream_evb::core::types::ProtocolError;
use millstream_evb::core::{BuIndex, EventNumber, Instant, Plan, RuIndex, StopCause, Unit};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use sim::{Failure, Fault, Misbehavior, Outcome, Scenario, run};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::time::Duration;

fn nonzero(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).expect("the caller gives a positive number")
}

fn plan(sources: &[u16], slots: &[u16], events: u64, batch: u16, window: u16) -> Plan {
    Plan {
        first_event: EventNumber(1_027_888),
        events: NonZeroU64::new(events).expect("the caller gives a positive number"),
        batch: nonzero(batch),
        batch_timeout: None,
        sources: sources.iter().copied().map(nonzero).collect(),
        slots: slots.iter().copied().map(nonzero).collect(),
        window: nonzero(window),
        max_in_flight: NonZeroU32::MAX,
        traffic_shaping: TrafficShaping::BarrelShifter,
        timeout: Duration::from_millis(100),
        drain_timeout: Duration::from_millis(20),
        recovery: RecoveryPolicy::default(),
    }
}

fn without_faults(plan: Plan) -> Scenario {
    Scenario {
        plan,
        seed: 1,
        missing: 0,
        corrupt: 0,
        faults: vec![],
        interval: None,
        storage: None,
        misbehavior: Misbehavior::None,
    }
}

fn any_recovery() -> impl Strategy<Value = RecoveryPolicy> {
    let builder = prop_oneof![Just(OnBuilderLoss::Stop), Just(OnBuilderLoss::Rebuild)];
    let readout =
        prop_oneof![Just(OnReadoutLoss::Stop), Just(OnReadoutLoss::Deliver), Just(OnReadoutLoss::Discard)];
    let takeover = prop_oneof![Just(0u64), 150u64..400].prop_map(Duration::from_millis);
    (builder, readout, 0u16..3, prop_oneof![Just(0u16), 0u16..4], takeover).prop_map(
        |(builder, readout, spare_builders, restarts, takeover_timeout)| RecoveryPolicy {
            takeover_timeout,
            builder,
            readout,
            spare_builders,
            restarts,
            join_timeout: Duration::from_millis(40),
        },
    )
}

/// Mean time between events, if they are not all there from the start, and the time that they wait for a full batch.
fn any_arrival() -> impl Strategy<Value = (Option<Duration>, Option<Duration>)> {
    let micros = |range: std::ops::Range<u64>| range.prop_map(|us| Some(Duration::from_micros(us)));
    (prop_oneof![3 => Just(None), 1 => micros(1..100)], prop_oneof![Just(None), micros(1..3000)])
}

/// Longest time for which a batch waits for storage: up to four timeouts.
fn any_storage() -> impl Strategy<Value = Option<Duration>> {
    prop_oneof![3 => Just(None), 1 => (1u64..400).prop_map(|ms| Some(Duration::from_millis(ms)))]
}

fn any_scenario() -> impl Strategy<Value = Scenario> {
    let units = (
        proptest::collection::vec(1u16..5, 1..5),
        proptest::collection::vec(1u16..6, 1..5),
        1u64..400,
        prop_oneof![1u16..8, 1u16..=256],
        1u16..4,
        (prop_oneof![Just(u32::MAX), 1u32..6], any::<bool>(), any_recovery()),
        (any_arrival(), any_storage()),
    );
    (units, any::<u64>(), prop_oneof![Just(0u16), 0u16..300], prop_oneof![Just(0u16), 0u16..100]).prop_map(
        |(
            (
                sources,
                slots,
                events,
                batch,
                window,
                (max_in_flight, shaped, recovery),
                ((interval, batch_timeout), storage),
            ),
            seed,
            missing,
            corrupt,
        )| {
            let spare_builders = recovery.spare_builders.min(slots.len() as u16 - 1);
            let slots = slots.repeat(1 + usize::from(recovery.restarts));
            Scenario {
                interval,
                storage,
                plan: Plan {
                    batch_timeout,
                    recovery: RecoveryPolicy { spare_builders, ..recovery },
                    max_in_flight: NonZeroU32::new(max_in_flight).expect("the range is positive"),
                    traffic_shaping: if shaped {
                        TrafficShaping::BarrelShifter
                    } else {
                        TrafficShaping::Unshaped
                    },
                    ..plan(&sources, &slots, events, batch, window)
                },
                missing,
                corrupt,
                seed,
                ..without_faults(plan(&[1], &[1], 1, 1, 1))
            }
        },
    )
}

/// Time in thousandths of the run without failures; unit; failure.
type AnyFault = (u64, prop::sample::Index, prop::sample::Index);

/// Up to three failures.
fn any_faults() -> impl Strategy<Value = Vec<AnyFault>> {
    proptest::collection::vec((0u64..1000, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..4)
}

/// Maps random values to a failure of a unit in the plan.
fn fault(plan: &Plan, steps: u64, (when, unit, failure): AnyFault) -> Fault {
    // Restarts fail as well, if they have joined by then.
    let (n, m) = (plan.readout_members(), plan.builders());
    let unit = match unit.index(2 + n + m) {
        0 | 1 => Unit::Manager,
        i if i < 2 + n => Unit::Readout(RuIndex(i as u16 - 2)),
        i => Unit::Builder(BuIndex((i - 2 - n) as u16)),
    };
    let has_standby = plan.recovery.has_standby();
    let failure = match (failure.index(3 + m), unit) {
        (1, _) => Failure::Stall,
        // Longer than the timeout: the standby manager takes over, and then the manager continues.
        (2, Unit::Manager) if has_standby && when % 2 == 0 => Failure::Pause(plan.timeout + plan.timeout / 9),
        (2, _) => Failure::Pause(plan.timeout / 4),
        (3.., Unit::Manager) if has_standby && when % 4 == 0 => Failure::StandbyDeath,
        (i @ 3.., Unit::Readout(_)) => Failure::Cut(BuIndex((i - 3) as u16)),
        _ => Failure::Death,
    };
    Fault { step: when * steps / 1000, unit, failure }
}

/// In any run: all invariants hold, no batch is in the output twice, and none was mixed up with another.
fn check_always(outcome: &Outcome) -> Result<(), TestCaseError> {
    let Outcome { summary, oracle, violations, .. } = outcome;
    prop_assert!(summary.is_balanced(), "{summary}");
    prop_assert!(violations.is_empty(), "{violations:#?}");
    prop_assert!(oracle.stored.values().all(|&times| times == 1));
    if summary.rebuilt.events == 0 && summary.assigned_events.is_some() {
        prop_assert!(oracle.processed.values().all(|&times| times == 1));
    }
    let fates = summary.built.fragments
        + summary.incomplete_total().fragments
        + summary.discarded_total().fragments
        + summary.duplicate.fragments;
    prop_assert_eq!(summary.fragments_read() + summary.rebuilt.fragments, fates);
    // Without a manager at the end, nobody knows which batches were built twice.
    let processed = if summary.assigned_events.is_some() {
        oracle.processed_totals()
    } else {
        oracle.processed_totals_with_repeats()
    };
    prop_assert!(summary.built.events <= processed.built.events);
    prop_assert!(summary.accepted <= processed.accepted);
    let survivors_sent: u64 = oracle.sent.iter().sum();
    prop_assert!(summary.fragments_read() <= survivors_sent, "more fragments read than sent");
    Ok(())
}

fn check_whole_run(outcome: &Outcome, events: u64) -> Result<(), TestCaseError> {
    let Outcome { summary, oracle, .. } = outcome;
    prop_assert!(summary.is_success(), "{summary}");
    prop_assert_eq!(summary.assigned_events, Some(events));
    let fates = summary.built.events + summary.incomplete_total().events + summary.discarded_total().events;
    prop_assert_eq!(fates, events);
    prop_assert_eq!(oracle.stored.len() as u64, oracle.totals().batches);
    if summary.recovered.iter().any(|unit| matches!(unit, Unit::Readout(_))) {
        return Ok(());
    }
    let totals = oracle.totals();
    prop_assert_eq!(totals.events(), events);
    prop_assert_eq!(summary.built, totals.built);
    prop_assert_eq!(summary.incomplete.missing_at_source, totals.missing);
    prop_assert_eq!(summary.incomplete_total(), totals.missing);
    prop_assert_eq!(summary.discarded_total(), totals.corrupt);
    prop_assert_eq!(summary.accepted, totals.accepted);
    prop_assert_eq!(summary.read.reported, oracle.fragments());
    prop_assert_eq!(summary.read.reported + summary.rebuilt.fragments, oracle.sent.iter().sum::<u64>());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_event_is_built_exactly_once_or_accounted_by_cause(scenario in any_scenario()) {
        let events = scenario.plan.events.get();
        let outcome = run(scenario);
        check_always(&outcome)?;
        check_whole_run(&outcome, events)?;
    }
}

/// Runs a scenario with failures at times relative to the run without them, and checks it.
fn check_schedule(mut scenario: Scenario, faults: Vec<AnyFault>) -> Result<Outcome, TestCaseError> {
    let steps = run(scenario.clone()).steps;
    scenario.faults = faults.into_iter().map(|any| fault(&scenario.plan, steps, any)).collect();
    let (timeout, drain) = (scenario.plan.timeout, scenario.plan.drain_timeout);
    let last_step = scenario.faults.iter().map(|fault| fault.step).max();
    let (faults, events) = (scenario.faults.clone(), scenario.plan.events.get());
    let (recovery, builders) = (scenario.plan.recovery, scenario.plan.initial_builders());
    let waits_for_storage = scenario.storage.is_some();
    let outcome = run(scenario);
    check_always(&outcome)?;
    let Some(fault_at) = outcome.fault_at else {
        return check_whole_run(&outcome, events).map(|()| outcome);
    };
    let has_standby = recovery.has_standby();
    let recovers =
        recovery.builder == OnBuilderLoss::Rebuild || recovery.readout != OnReadoutLoss::Stop || has_standby;
    if !recovers && !waits_for_storage && recovery.spare_builders == 0 && last_step < Some(outcome.steps) {
        // The longest sequence: a stalled builder unit, noticed by the manager only, then a stalled manager.
        let bound = fault_at + 6 * timeout + 8 * drain;
        prop_assert!(outcome.end <= bound, "{:?} after {fault_at:?} for {faults:?}", outcome.end);
    }
    if outcome.summary.is_success() {
        check_whole_run(&outcome, events)?;
    }
    // The manager is lost, and nothing else happens: the run goes on, unless all events were done.
    if let [Fault { unit: Unit::Manager, .. }] = faults[..]
        && has_standby
    {
        let summary = &outcome.summary;
        match outcome.takeovers == 1 {
            true => {
                prop_assert!(summary.is_success(), "{summary}");
                prop_assert_eq!(&summary.recovered, &[Unit::Manager]);
                prop_assert_eq!((summary.rebuilt, summary.duplicate), Default::default());
            }
            false => {
                let done = summary.built.events
                    + summary.incomplete.missing_at_source.events
                    + summary.discarded.corrupt.events;
                prop_assert_eq!(done, events);
            }
        }
    }
    // Builder units die while another one is there, and nothing else happens: every event is built.
    let is_death = |fault: &Fault| matches!((fault.unit, fault.failure), (Unit::Builder(_), Failure::Death));
    let dead: BTreeSet<_> = faults.iter().map(|fault| fault.unit).collect();
    if recovery.builder == OnBuilderLoss::Rebuild && faults.iter().all(is_death) && dead.len() < builders {
        let summary = &outcome.summary;
        prop_assert!(summary.cause.is_success(), "{summary}");
        // A unit that dies after the last event is built has no report.
        if summary.lost.iter().all(|unit| summary.recovered.contains(unit)) {
            check_whole_run(&outcome, events)?;
        }
    }
    Ok(outcome)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6000, ..ProptestConfig::default() })]

    #[test]
    fn the_law_holds_whoever_fails_and_the_run_ends(scenario in any_scenario(), faults in any_faults()) {
        check_schedule(scenario, faults)?;
    }
}

/// The number of schedules of a long test, their seed, and their runner: a million, or `MILLSTREAM_FAULT_SCHEDULES`, from the seed
/// `MILLSTREAM_SEED`.
fn long_runner() -> (u64, u64, TestRunner) {
    let number = |name: &str, default: u64| {
        let given = std::env::var(name).ok();
        given.map_or(default, |text| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
    };
    let (cases, seed) = (number("MILLSTREAM_FAULT_SCHEDULES", 1_000_000), number("MILLSTREAM_SEED", 1));
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        ProptestConfig { cases: u32::try_from(cases).unwrap_or(u32::MAX), ..ProptestConfig::default() };
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &key);
    (cases, seed, TestRunner::new_with_rng(config, random))
}

/// The test above with a million schedules, or `MILLSTREAM_FAULT_SCHEDULES`, from the seed `MILLSTREAM_SEED`.
#[test]
#[ignore = "takes minutes"]
fn the_law_holds_over_a_million_schedules() {
    let (cases, seed, mut runner) = long_runner();
    let counts = Cell::new([0u64; 8]);
    let checked = runner.run(&(any_scenario(), any_faults()), |(scenario, faults)| {
        let Outcome { summary, takeovers, .. } = check_schedule(scenario, faults)?;
        let lost =
            |builder: bool| summary.recovered.iter().any(|unit| matches!(unit, Unit::Builder(_)) == builder);
        let joined =
            |builder: bool| summary.joined.iter().any(|unit| matches!(unit, Unit::Builder(_)) == builder);
        let kinds = [
            lost(true),
            lost(false),
            summary.rebuilt.events > 0,
            summary.is_success(),
            joined(true),
            joined(false),
            takeovers > 0,
            takeovers > 1,
        ];
        let mut sums = counts.get();
        sums.iter_mut().zip(kinds).for_each(|(sum, is_so)| *sum += u64::from(is_so));
        counts.set(sums);
        Ok(())
    });
    let all @ [
        builders,
        readouts,
        rebuilt,
        success,
        builders_joined,
        readouts_joined,
        managers,
        managers_again,
    ] = counts.get();
    println!(
        "{cases} schedules from seed {seed}: {builders} went on without a builder unit ({rebuilt} built batches again), \
         {readouts} without a readout unit; a builder unit joined again in {builders_joined}, a readout unit in \
         {readouts_joined}; a standby manager took over in {managers}, and another one in {managers_again}; {success} built all events"
    );
    checked.unwrap_or_else(|error| panic!("{error}"));
    // Fewer of a kind mean that the test does not test it.
    let least = all.iter().take(7).all(|&count| count > cases / 200) && managers_again > cases / 2000;
    assert!(least, "{all:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Pauses that are together shorter than every timeout cost only time: they may follow each other in one unit.
    #[test]
    fn short_pauses_cost_only_time(mut scenario in any_scenario(), faults in any_faults()) {
        let steps = run(scenario.clone()).steps;
        let pause = Failure::Pause(scenario.plan.timeout / 4 / faults.len() as u32);
        let pauses = faults.into_iter().map(|any| fault(&scenario.plan, steps, any));
        scenario.faults = pauses.map(|fault| Fault { failure: pause, ..fault }).collect();
        let events = scenario.plan.events.get();
        let outcome = run(scenario);
        check_always(&outcome)?;
        check_whole_run(&outcome, events)?;
        prop_assert!(outcome.summary.recovered.is_empty());
    }
}

/// Storage takes up to ten timeouts for a batch.
fn with_slow_storage(faults: Vec<Fault>, takeover_timeout: Duration) -> Outcome {
    let recovery =
        RecoveryPolicy { builder: OnBuilderLoss::Rebuild, takeover_timeout, ..RecoveryPolicy::default() };
    let plan = Plan { recovery, ..plan(&[3, 3], &[4, 4], 4000, 8, 4) };
    let storage = Some(10 * plan.timeout);
    let outcome = run(Scenario { faults, storage, ..without_faults(plan) });
    check_always(&outcome).expect("the invariants hold");
    check_whole_run(&outcome, 4000).expect("all events are accounted for");
    assert!(outcome.end > Instant::from_nanos(0) + Duration::from_secs(2), "{:?}", outcome.end);
    outcome
}

#[test]
fn storage_that_is_too_slow_costs_no_unit_and_no_event() {
    assert_eq!(with_slow_storage(Vec::new(), Duration::ZERO).summary.recovered, []);
    // Batches that wait for storage when the manager is lost do so at the next one.
    let death = Fault { step: 900, unit: Unit::Manager, failure: Failure::Death };
    let outcome = with_slow_storage(vec![death], Duration::from_millis(300));
    assert_eq!((outcome.takeovers, outcome.summary.recovered), (1, vec![Unit::Manager]));
}

#[test]
fn a_builder_unit_that_stalls_while_it_waits_for_storage_is_lost() {
    let unit = Unit::Builder(BuIndex(1));
    let stall = Fault { step: 2000, unit, failure: Failure::Stall };
    let outcome = with_slow_storage(vec![stall], Duration::ZERO);
    assert_eq!(outcome.summary.recovered, [unit]);
}

/// A unit dies in the middle of a run that lets it join again: `policy` without the number of restarts.
fn mid_run_with_restarts(unit: Unit, sources: &[u16], slots: &[u16], readout: OnReadoutLoss) -> Outcome {
    let recovery = RecoveryPolicy {
        builder: OnBuilderLoss::Rebuild,
        readout,
        restarts: 1,
        join_timeout: Duration::from_millis(500),
        ..RecoveryPolicy::default()
    };
    let plan = Plan { recovery, ..plan(sources, &slots.repeat(2), 8000, 8, 4) };
    let faults = vec![Fault { step: 900, unit, failure: Failure::Death }];
    let interval = Some(Duration::from_micros(10));
    let outcome = run(Scenario { faults, interval, ..without_faults(plan) });
    check_always(&outcome).expect("the invariants hold");
    check_whole_run(&outcome, 8000).expect("all events are accounted for");
    assert_eq!(outcome.summary.recovered, [unit], "{}", outcome.summary);
    outcome
}

#[test]
fn a_restarted_builder_unit_joins_and_no_event_is_lost() {
    for slots in [&[4, 4][..], &[4]] {
        let last = slots.len() as u16 - 1;
        let outcome =
            mid_run_with_restarts(Unit::Builder(BuIndex(last)), &[10, 10], slots, OnReadoutLoss::Stop);
        let summary = &outcome.summary;
        assert_eq!(summary.joined, [Unit::Builder(BuIndex(2 * last + 1))], "{summary}");
        assert_eq!(summary.built.events, 8000, "{summary}");
    }
}

#[test]
fn a_restarted_readout_unit_joins_and_later_events_have_its_fragments() {
    for sources in [&[10, 10][..], &[10]] {
        let last = sources.len() as u16 - 1;
        let outcome =
            mid_run_with_restarts(Unit::Readout(RuIndex(last)), sources, &[4, 4], OnReadoutLoss::Deliver);
        let (summary, lost) = (&outcome.summary, outcome.summary.incomplete.readout_lost.events);
        assert_eq!(summary.joined, [Unit::Readout(RuIndex(2 * last + 1))], "{summary}");
        assert!(lost > 0 && lost < 4000, "{summary}");
        assert_eq!(summary.built.events + lost, 8000, "{summary}");
        // The events after the last incomplete batch are built.
        let last_batch = outcome.oracle.batches.values().last().unwrap();
        assert_eq!(last_batch.first_event.0 + u64::from(last_batch.events), 1_027_888 + 8000);
    }
}

/// The manager and another unit die at about the same time, in any order.
fn dies_with_the_manager(unit: Unit, seed: u64) -> Outcome {
    let recovery = RecoveryPolicy {
        builder: OnBuilderLoss::Rebuild,
        readout: OnReadoutLoss::Deliver,
        takeover_timeout: Duration::from_millis(300),
        ..RecoveryPolicy::default()
    };
    let plan = Plan { recovery, ..plan(&[3, 3], &[4, 4, 2], 4000, 8, 4) };
    let death = |step, unit| Fault { step, unit, failure: Failure::Death };
    let faults = vec![death(900, Unit::Manager), death(880 + seed % 60, unit)];
    let outcome = run(Scenario { faults, seed, ..without_faults(plan) });
    check_always(&outcome).expect("the invariants hold");
    check_whole_run(&outcome, 4000).expect("all events are accounted for");
    let recovered = &outcome.summary.recovered;
    assert!(
        outcome.takeovers == 1 && recovered.contains(&Unit::Manager) && recovered.contains(&unit),
        "{recovered:?}"
    );
    outcome
}

#[test]
fn a_builder_unit_that_dies_with_the_manager_costs_no_event() {
    for seed in 0..300 {
        let summary = dies_with_the_manager(Unit::Builder(BuIndex(1)), seed).summary;
        assert_eq!((summary.built.events, summary.duplicate), (4000, summary.rebuilt), "{summary}");
    }
}

#[test]
fn events_lack_the_sources_of_a_readout_unit_that_dies_with_the_manager() {
    for seed in 0..300 {
        let summary = dies_with_the_manager(Unit::Readout(RuIndex(1)), seed).summary;
        assert_eq!(summary.built.events + summary.incomplete.readout_lost.events, 4000, "{summary}");
    }
}

/// One failure in the middle of a run of 3 readout units and 2 builder units.
fn mid_run(unit: Unit, failure: Failure) -> Outcome {
    let scenario = Scenario {
        faults: vec![Fault { step: 900, unit, failure }],
        missing: 20,
        ..without_faults(plan(&[10, 10, 10], &[4, 4], 4000, 8, 4))
    };
    let outcome = run(scenario);
    check_always(&outcome).expect("the invariants hold");
    assert!(outcome.summary.built.events > 0 && outcome.summary.built.events < 4000, "{}", outcome.summary);
    outcome
}

#[test]
fn fragments_of_a_dead_readout_unit_are_inferred_and_its_batches_are_incomplete() {
    let summary = mid_run(Unit::Readout(RuIndex(1)), Failure::Death).summary;
    assert_eq!(summary.cause, StopCause::Lost(Unit::Readout(RuIndex(1))));
    assert_eq!(summary.lost, [Unit::Readout(RuIndex(1))]);
    assert!(summary.read.inferred > 0 && summary.incomplete.readout_lost.fragments > 0, "{summary}");
}

#[test]
fn batches_in_a_dead_builder_unit_are_discarded() {
    let summary = mid_run(Unit::Builder(BuIndex(0)), Failure::Death).summary;
    assert_eq!(summary.cause, StopCause::Lost(Unit::Builder(BuIndex(0))));
    assert_eq!(summary.read.inferred, 0);
    assert!(summary.discarded.builder_lost.fragments > 0, "{summary}");
}

#[test]
fn without_the_manager_the_account_comes_from_the_units_reports() {
    let summary = mid_run(Unit::Manager, Failure::Death).summary;
    assert_eq!((summary.cause, summary.assigned_events), (StopCause::Lost(Unit::Manager), None));
    assert_eq!(summary.lost, [Unit::Manager]);
}

#[test]
fn a_stalled_readout_unit_times_out() {
    let summary = mid_run(Unit::Readout(RuIndex(2)), Failure::Stall).summary;
    assert!(matches!(summary.cause, StopCause::TimedOut { by: Unit::Builder(_), .. }), "{summary}");
    assert!(summary.incomplete.timed_out.events > 0, "{summary}");
}

#[test]
fn a_stalled_builder_unit_times_out_at_the_manager() {
    let summary = mid_run(Unit::Builder(BuIndex(1)), Failure::Stall).summary;
    assert!(matches!(summary.cause, StopCause::TimedOut { by: Unit::Manager, .. }), "{summary}");
    assert_eq!(summary.lost, [Unit::Builder(BuIndex(1))]);
}

#[test]
fn a_stalled_manager_counts_as_lost() {
    let summary = mid_run(Unit::Manager, Failure::Stall).summary;
    assert_eq!(summary.cause, StopCause::Lost(Unit::Manager));
}

#[test]
fn fragments_lost_on_a_broken_link_were_in_flight() {
    let summary = mid_run(Unit::Readout(RuIndex(0)), Failure::Cut(BuIndex(1))).summary;
    let cause = StopCause::Unreachable { by: RuIndex(0), peer: BuIndex(1) };
    assert_eq!((summary.cause, summary.lost.len()), (cause, 0));
    assert!(summary.discarded.in_flight.fragments > 0, "{summary}");
}

/// Runs with a deliberate violation.
fn run_with(misbehavior: Misbehavior) -> Outcome {
    let plan = plan(&[3, 2], &[2, 3], 400, 8, 2);
    let outcome = run(Scenario { misbehavior, missing: 50, ..without_faults(plan) });
    assert!(!outcome.summary.is_success(), "{misbehavior:?} went unnoticed:\n{}", outcome.summary);
    outcome
}

fn protocol_error(outcome: &Outcome) -> Option<ProtocolError> {
    match outcome.summary.cause {
        StopCause::Protocol { error, .. } => Some(error),
        _ => None,
    }
}

fn violated_invariants(outcome: &Outcome) -> Vec<Invariant> {
    outcome.summary.violations.iter().map(|violation| violation.invariant).collect()
}

#[test]
fn violations_of_the_protocol_stop_the_run() {
    for (misbehavior, error) in [
        (Misbehavior::GrantTwice, ProtocolError::GrantOfBusySlot),
        (Misbehavior::GrantEarly, ProtocolError::GrantOfBusySlot),
        (Misbehavior::DoneEarly, ProtocolError::SlotNotAssigned),
    ] {
        assert_eq!(protocol_error(&run_with(misbehavior)), Some(error), "{misbehavior:?}");
    }
    // Which error is found depends on the order in which the two messages are handled.
    let twice = protocol_error(&run_with(Misbehavior::AssignTwice));
    assert!(
        matches!(twice, Some(ProtocolError::AssignOfBusySlot | ProtocolError::WrongGeneration)),
        "{twice:?}"
    );
    let twice = protocol_error(&run_with(Misbehavior::ArriveTwice));
    assert!(
        matches!(twice, Some(ProtocolError::DuplicateArrival | ProtocolError::StaleArrival)),
        "{twice:?}"
    );
    assert!(matches!(run_with(Misbehavior::DoneLost).summary.cause, StopCause::Protocol { .. }));
}

#[test]
fn wrong_counts_violate_an_invariant() {
    assert!(
        violated_invariants(&run_with(Misbehavior::OutcomeLacksFragment))
            .contains(&Invariant::BuilderFragments)
    );
    assert!(violated_invariants(&run_with(Misbehavior::ReadoutOvercounts)).contains(&Invariant::UnitPair));
    assert!(violated_invariants(&run_with(Misbehavior::ReadoutUndercounts)).contains(&Invariant::Readout));
}

#[test]
fn the_monitor_detects_a_slot_with_two_batches() {
    let violations = run_with(Misbehavior::AssignTwice).violations;
    assert!(violations.iter().any(|rule| rule.starts_with("second batch in a slot")), "{violations:#?}");
}
