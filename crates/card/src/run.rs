//! Runs of kernels on a card of this host, by the doorbells of its regions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_card_abi::codes::{RegionCommand, RegionState};
use millstream_card_abi::command::{Cause, Fault, nanos};
use millstream_card_abi::registers::KernelWords;

use crate::card::{Card, CommandError};
use crate::control::RunRequest;

/// Time of waiting without sleep.
const POLLING: Duration = Duration::from_micros(50);
/// Time between two looks afterwards.
const PAUSE: Duration = Duration::from_micros(50);

impl Card {
    /// Starts the kernel of a region, which must be idle. Returns the doorbell word, for [`Card::wait`]. One client at a
    /// time uses a region.
    pub fn start(&self, region: usize, request: &RunRequest) -> u64 {
        let registers = self.registers();
        let control = registers.region(region);
        let set = |register: &AtomicU64, value| register.store(value, Ordering::Relaxed);
        set(control.banks(), request.bank_mask(registers.bank_count().load(Ordering::Relaxed)));
        set(control.fuel(), request.fuel.unwrap_or(0));
        set(control.run_timeout_ns(), request.timeout.map_or(0, nanos));
        for (index, &word) in request.arguments.iter().enumerate() {
            set(control.arguments(index), word);
        }
        let command = match &request.resume {
            None => RegionCommand::Start,
            Some(state) => {
                state.iter().enumerate().for_each(|(index, &word)| set(control.resume_state(index), word));
                RegionCommand::Resume
            }
        };
        let sequence = (control.doorbell().load(Ordering::Relaxed) >> 8).wrapping_add(1);
        let word = sequence << 8 | command as u64;
        control.doorbell().store(word, Ordering::Release);
        self.ring_doorbell();
        word
    }

    /// Waits until a run that [`Card::start`] started ends. Returns its result words. `goes_on` ends the wait early: for
    /// example, when a lease has ended.
    ///
    /// # Errors
    /// [`CommandError::Refused`] with the run's fault; [`CommandError::NoAnswer`] if the card ended, or `goes_on` is false.
    pub fn wait(
        &self,
        region: usize,
        word: u64,
        goes_on: impl Fn() -> bool,
    ) -> Result<KernelWords, CommandError> {
        let control = self.registers().region(region);
        let start = Instant::now();
        loop {
            if control.doorbell_ack().load(Ordering::Acquire) == word {
                let status = RegionState::from_code(control.status().load(Ordering::Acquire));
                let refused = || {
                    let cause = Cause::from_code(control.cause().load(Ordering::Relaxed));
                    let fault = Fault::new(cause, control.detail().load(Ordering::Relaxed));
                    CommandError::Refused { card: self.name().clone(), region, fault }
                };
                match status {
                    Some(RegionState::Done) => {
                        return Ok(std::array::from_fn(|i| control.results(i).load(Ordering::Relaxed)));
                    }
                    Some(RegionState::Running | RegionState::Stopping | RegionState::Paused) => {}
                    _ => return Err(refused()),
                }
            }
            if start.elapsed() < POLLING {
                std::thread::yield_now();
                continue;
            }
            if !goes_on() || !self.is_alive() {
                return Err(CommandError::NoAnswer(self.name().clone()));
            }
            std::thread::sleep(PAUSE);
        }
    }
}
