//! Runs that lose several managers, one after the other, and units together with them.

use super::sim::{Failure, Fault, Outcome, Scenario, run};
use super::{
    AnyFault, any_scenario, check_always, check_whole_run, fault, long_runner, plan, without_faults,
};
use millstream_evb::core::recovery::{OnBuilderLoss, OnReadoutLoss, RecoveryPolicy};
use millstream_evb::core::{BuIndex, Plan, RuIndex, StopCause, Unit};
use proptest::prelude::*;
use std::cell::Cell;
use std::time::Duration;

/// Losses of managers: time in thousandths of the run without failures, and kind.
type Losses = Vec<(u64, u64)>;

/// Two or three losses of managers or their standby managers, and up to two other failures: of each, the loss that it is near.
fn any_losses() -> impl Strategy<Value = (Losses, Vec<(usize, AnyFault)>)> {
    let other = (0u64..1000, any::<prop::sample::Index>(), any::<prop::sample::Index>());
    let others = proptest::collection::vec((0usize..4, other), 0..3);
    (proptest::collection::vec((0u64..1000, 0u64..10), 2..4), prop_oneof![Just(vec![]), others])
}

fn loss(plan: &Plan, steps: u64, (when, kind): (u64, u64)) -> Fault {
    let failure = match kind {
        0 => Failure::Stall,
        1 => Failure::Pause(plan.timeout + plan.timeout / 9),
        2 => Failure::StandbyDeath,
        _ => Failure::Death,
    };
    Fault { step: when * steps / 1000, unit: Unit::Manager, failure }
}

/// Runs a scenario with a standby manager and these losses, and checks it.
fn check_losses(
    mut scenario: Scenario,
    losses: &Losses,
    others: &[(usize, AnyFault)],
) -> Result<Outcome, TestCaseError> {
    let recovery = &mut scenario.plan.recovery;
    recovery.takeover_timeout = recovery.takeover_timeout.max(Duration::from_millis(150));
    let steps = run(scenario.clone()).steps;
    let managers: Vec<Fault> = losses.iter().map(|&any| loss(&scenario.plan, steps, any)).collect();
    let others: Vec<Fault> = others
        .iter()
        .map(|&(near, any)| {
            let other = fault(&scenario.plan, steps, any);
            // In the steps around the loss, before or after it.
            let at = managers.get(near).map(|loss| (loss.step + any.0 % 40).saturating_sub(20));
            Fault { step: at.unwrap_or(other.step), ..other }
        })
        .collect();
    let only_managers = others.iter().all(|other| other.unit == Unit::Manager);
    scenario.faults = managers.into_iter().chain(others).collect();
    let events = scenario.plan.events.get();
    let outcome = run(scenario);
    check_always(&outcome)?;
    let summary = &outcome.summary;
    if summary.is_success() {
        check_whole_run(&outcome, events)?;
    }
    if only_managers {
        // No loss of a manager costs an event or a batch, and no standby manager refuses the run.
        prop_assert!(!outcome.is_refused, "{summary}");
        prop_assert!(summary.is_success() || summary.cause == StopCause::Lost(Unit::Manager), "{summary}");
        prop_assert_eq!((summary.rebuilt, summary.duplicate), Default::default());
        if summary.is_success() {
            prop_assert_eq!(&summary.recovered, &vec![Unit::Manager; outcome.takeovers as usize]);
        }
    }
    Ok(outcome)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn the_law_holds_when_several_managers_are_lost(
        scenario in any_scenario(),
        (losses, others) in any_losses(),
    ) {
        check_losses(scenario, &losses, &others)?;
    }
}

/// The test above over many schedules.
#[test]
#[ignore = "takes minutes"]
fn the_law_holds_over_many_schedules_of_lost_managers() {
    let (cases, seed, mut runner) = long_runner();
    let counts = Cell::new([0u64; 5]);
    let checked = runner.run(&(any_scenario(), any_losses()), |(scenario, (losses, others))| {
        let Outcome { summary, takeovers, is_refused, .. } = check_losses(scenario, &losses, &others)?;
        let lost_units = summary.recovered.iter().any(|unit| *unit != Unit::Manager);
        let kinds = [
            takeovers > 1,
            takeovers > 2,
            takeovers > 1 && lost_units,
            takeovers > 0 && is_refused,
            summary.is_success(),
        ];
        let mut sums = counts.get();
        sums.iter_mut().zip(kinds).for_each(|(sum, is_so)| *sum += u64::from(is_so));
        counts.set(sums);
        Ok(())
    });
    let [two, three, with_units, refused, success] = counts.get();
    println!(
        "{cases} schedules from seed {seed}: two managers took over in {two}, three in {three}; {with_units} of them went on \
         without a unit as well; a later manager refused the run in {refused}; {success} built all events"
    );
    checked.unwrap_or_else(|error| panic!("{error}"));
    // Fewer of a kind mean that the test does not test it.
    assert!(
        two > cases / 20 && three > cases / 200 && with_units > cases / 200,
        "{two} {three} {with_units}"
    );
}

/// Two managers die, and a unit at about the same time as the second one.
fn dies_with_the_second_manager(unit: Option<Unit>, seed: u64) -> Outcome {
    let recovery = RecoveryPolicy {
        builder: OnBuilderLoss::Rebuild,
        readout: OnReadoutLoss::Deliver,
        takeover_timeout: Duration::from_millis(300),
        restarts: 1,
        join_timeout: Duration::from_millis(500),
        ..RecoveryPolicy::default()
    };
    let plan = Plan { recovery, ..plan(&[3, 3], &[4, 4, 2, 4, 4, 2], 8000, 8, 4) };
    let death = |step, unit| Fault { step, unit, failure: Failure::Death };
    let second = 6000;
    let mut faults = vec![death(900, Unit::Manager), death(second, Unit::Manager)];
    faults.extend(unit.map(|unit| death(second - 20 + seed % 60, unit)));
    // Events come slowly, so that the second standby manager is in place.
    let interval = Some(Duration::from_micros(20));
    let outcome = run(Scenario { faults, seed, interval, ..without_faults(plan) });
    check_always(&outcome).expect("the invariants hold");
    check_whole_run(&outcome, 8000).expect("all events are accounted for");
    let recovered = &outcome.summary.recovered;
    assert_eq!(outcome.takeovers, 2, "{recovered:?}");
    assert!(unit.is_none_or(|unit| recovered.contains(&unit)), "{recovered:?}");
    assert_eq!(recovered.iter().filter(|unit| **unit == Unit::Manager).count(), 2, "{recovered:?}");
    outcome
}

#[test]
fn a_second_takeover_costs_no_event() {
    for seed in 0..200 {
        let summary = dies_with_the_second_manager(None, seed).summary;
        assert_eq!((summary.built.events, summary.recovered.len()), (8000, 2), "{summary}");
    }
}

#[test]
fn a_builder_unit_that_dies_with_the_second_manager_costs_no_event() {
    for seed in 0..200 {
        let summary = dies_with_the_second_manager(Some(Unit::Builder(BuIndex(1))), seed).summary;
        assert_eq!((summary.built.events, summary.duplicate), (8000, summary.rebuilt), "{summary}");
    }
}

#[test]
fn events_lack_the_sources_of_a_readout_unit_that_dies_with_the_second_manager() {
    for seed in 0..200 {
        let summary = dies_with_the_second_manager(Some(Unit::Readout(RuIndex(1))), seed).summary;
        assert_eq!(summary.built.events + summary.incomplete.readout_lost.events, 8000, "{summary}");
    }
}
