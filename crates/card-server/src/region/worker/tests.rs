//! A region at the end of a lease, and after a hung kernel has ended: which doorbells it executes.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use millstream_shm::EventFd;

use super::*;
use crate::hardware::Hardware;
use crate::kernel::Kernel;
use crate::kernel::builtin::BUILTINS;
use crate::polling::PollPolicy;
use crate::queue::control::QueueControl;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Records notifications.
#[derive(Default)]
struct Recorder(Mutex<Vec<(MessageKind, u64)>>);

impl Recorder {
    fn recorded(&self) -> Vec<(MessageKind, u64)> {
        self.0.lock().unwrap().clone()
    }
}

impl NotificationSink for Recorder {
    fn notify(&self, notification: Notification) {
        self.0.lock().unwrap().push((notification.kind, notification.sequence));
    }
}

fn context() -> Arc<RegionContext> {
    let hardware = Hardware::emulated(1 << 20);
    Arc::new(RegionContext {
        registers: hardware.registers.clone(),
        hardware,
        started: Instant::now(),
        bank_bytes: 1 << 20,
        bank_count: 1,
        builtin_kernels: vec![(1, BUILTINS[0])],
        loaders: Vec::new(),
        stop: Arc::default(),
        regions: vec![RegionControl::default()],
        kernels: vec![KernelSlot::default()],
        queue: QueueControl::default(),
        command_timeout: TIMEOUT,
        polling: PollPolicy { spin: Duration::ZERO, heartbeat: Duration::from_millis(100) },
        controller_wake: Arc::new(EventFd::latch().unwrap()),
    })
}

/// Rings a load of the first kernel, with this sequence number.
fn load(context: &RegionContext, number: u64) -> u64 {
    let word = number << 8 | RegionCommand::Load as u64;
    let region = context.registers.region(0);
    region.kernel().store(1, Ordering::Relaxed);
    region.doorbell().store(word, Ordering::Release);
    context.regions[0].notify();
    word
}

/// Ends a lease as the lease controller does.
fn end_lease(context: &RegionContext) {
    context.regions[0].close_epoch();
    let until = Instant::now() + TIMEOUT;
    while !context.regions[0].is_reset() {
        assert!(Instant::now() < until, "the region does not reset");
        std::hint::spin_loop();
    }
    let region = context.registers.region(0);
    region.kernel().store(0, Ordering::Relaxed);
    region.doorbell().store(0, Ordering::Relaxed);
    region.doorbell_ack().store(0, Ordering::Relaxed);
    context.regions[0].open_epoch();
}

#[test]
fn a_doorbell_of_an_ended_lease_is_not_executed() {
    let (context, recorder) = (context(), Arc::new(Recorder::default()));
    let mut worker = RegionWorker::new(0, context.clone(), recorder.clone());
    let word = load(&context, 7);
    // Here the region has read the doorbell but not begun the command, so the controller does not wait for it.
    end_lease(&context);
    worker.execute(word);
    assert!(recorder.recorded().is_empty());
    assert!(!worker.is_loaded);
    assert_eq!(context.registers.region(0).doorbell_ack().load(Ordering::Relaxed), 0);
}

#[test]
fn every_doorbell_belongs_to_one_lease() {
    let (context, recorder) = (context(), Arc::new(Recorder::default()));
    let mut worker = RegionWorker::new(0, context.clone(), recorder.clone());
    let serving = std::thread::spawn(move || worker.serve());
    let region = context.registers.region(0);
    for lease in 0..3000u32 {
        // Every lease starts with the same sequence number.
        let word = load(&context, 1);
        if lease % 3 == 0 {
            let until = Instant::now() + TIMEOUT;
            while recorder.recorded().is_empty() {
                assert!(Instant::now() < until, "lease {lease}: the doorbell is not executed");
                std::hint::spin_loop();
            }
            let recorded = recorder.recorded();
            assert!(
                matches!(recorded[..], [(MessageKind::RegionLoaded, sequence)] if sequence == word),
                "{recorded:?}"
            );
            assert_eq!(region.doorbell_ack().load(Ordering::Relaxed), word);
            assert_eq!(region.loaded_kernel().load(Ordering::Relaxed), 1);
        } else {
            (0..lease % 400).for_each(|_| std::hint::spin_loop());
        }
        end_lease(&context);
        recorder.0.lock().unwrap().clear();
        (0..lease % 200).for_each(|_| std::hint::spin_loop());
        assert_eq!(region.loaded_kernel().load(Ordering::Relaxed), 0, "lease {lease}");
        assert!(recorder.recorded().is_empty(), "lease {lease}");
    }
    context.stop.store(true, Ordering::SeqCst);
    context.regions[0].notify();
    serving.join().unwrap();
}

#[test]
fn doorbells_during_the_recovery_of_a_region_are_answered() {
    for answered in [false, true] {
        let (context, recorder) = (context(), Arc::new(Recorder::default()));
        let control = &context.regions[0];
        let region = context.registers.region(0);
        // Its kernel was hung, the controller rejected a doorbell, and then the kernel has ended.
        control.phase.store(RunPhase::Hung as u32, Ordering::SeqCst);
        let rejected = load(&context, 1);
        region.doorbell_ack().store(rejected, Ordering::SeqCst);
        assert!(control.transition(RunPhase::Hung, RunPhase::Recovered));
        let mut worker = RegionWorker::new(0, context.clone(), recorder.clone());
        worker.acked = rejected;
        // A client rings during the recovery, or not.
        let word = if answered { rejected } else { load(&context, 2) };
        assert!(control.recover());
        let serving = std::thread::spawn(move || worker.serve());
        let until = Instant::now() + TIMEOUT;
        while !control.is_reset() || !answered && recorder.recorded().is_empty() {
            assert!(Instant::now() < until, "the doorbell is lost");
            std::thread::yield_now();
        }
        context.stop.store(true, Ordering::SeqCst);
        control.notify();
        serving.join().unwrap();
        match answered {
            // A rejected command is not executed later.
            true => assert_eq!(recorder.recorded(), []),
            false => assert_eq!(recorder.recorded(), [(MessageKind::RegionLoaded, word)]),
        }
        assert_eq!(region.doorbell_ack().load(Ordering::Relaxed), word);
        assert_eq!(region.loaded_kernel().load(Ordering::Relaxed), u64::from(!answered));
    }
}

/// Runs for the milliseconds in its first argument, unless it is interrupted.
struct Beats;

impl Kernel for Beats {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let until = Instant::now() + Duration::from_millis(run.arguments()[0]);
        while Instant::now() < until {
            run.beat()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// A word that starts the kernel.
const START: u64 = 1 << 8 | RegionCommand::Start as u64;

#[test]
fn the_deadline_of_a_run_does_not_depend_on_the_clock_register() {
    const LONG: Duration = Duration::from_secs(3600);
    let (context, recorder) = (context(), Arc::new(Recorder::default()));
    let (control, region) = (&context.regions[0], context.registers.region(0));
    context.kernels[0].load(Box::new(Beats));
    region.arguments(0).store(nanos(TIMEOUT) / 1_000_000, Ordering::Relaxed);
    region.run_timeout_ns().store(nanos(LONG), Ordering::Relaxed);
    let mut worker = RegionWorker::new(0, context.clone(), recorder.clone());
    for clock in [0, u64::MAX] {
        context.registers.clock_ns().store(clock, Ordering::Relaxed);
        let earliest = nanos(context.started.elapsed() + LONG);
        let deadline = std::thread::scope(|scope| {
            let running = scope.spawn(|| worker.execute(START));
            while control.phase() != RunPhase::Running && !running.is_finished() {
                std::thread::yield_now();
            }
            let deadline = control.deadline_ns.load(Ordering::Relaxed);
            control.request_interrupt();
            deadline
        });
        let latest = nanos(context.started.elapsed() + LONG);
        assert!((earliest..=latest).contains(&deadline), "{deadline}, expected {earliest} to {latest}");
    }
    assert_eq!(recorder.recorded(), [(MessageKind::RegionFault, START); 2]);
}

#[test]
fn an_interrupt_that_comes_after_a_run_does_not_end_the_next_one() {
    let (context, recorder) = (context(), Arc::new(Recorder::default()));
    context.kernels[0].load(Box::new(Beats));
    context.registers.region(0).arguments(0).store(5, Ordering::Relaxed);
    let mut worker = RegionWorker::new(0, context.clone(), recorder.clone());
    worker.execute(START);
    context.regions[0].request_interrupt();
    worker.execute(START);
    assert_eq!(recorder.recorded(), [(MessageKind::RegionDone, START); 2]);
    // A pause still ends the run of a kernel that only beats.
    context.regions[0].set_pause(true);
    worker.execute(START);
    assert_eq!(recorder.recorded()[2], (MessageKind::RegionFault, START));
}
