//! `verify`: whether each event of a slot is complete and each of its fragments intact.
//!
//! Arguments: [`VerifyArgs`], followed by one [`Place`] per source. Result: one
//! [`Summary`] per event, in order.

use crate::command::Fault;
use crate::kernel::slot::{Batch, Checker, Places, Slot, Summary, check_apart};
use crate::kernel::{Job, Kernel, append_places};
use crate::layout::layout;

use super::slot::Place;

/// Name of the kernel.
pub const NAME: &str = "verify";

layout! {
    /// Arguments of `verify`.
    pub struct VerifyArgs[16] {
        0 first_event: u64 = "first event of the batch";
        8 n_events: u32 = "number of its events, 1 to 4096; each packet states the same batch";
        12 n_sources: u32 = "number of places that follow, 1 to 1024";
    }
}

impl VerifyArgs {
    /// Appends the arguments with their places to `bytes`. [`VerifyArgs::n_sources`] is taken from
    /// the places.
    pub fn append_to(&self, places: &[Place], bytes: &mut Vec<u8>) {
        let args = VerifyArgs { n_sources: places.len() as u32, ..*self };
        bytes.extend(args.to_bytes());
        append_places(places, bytes);
    }
}

/// The kernel.
#[derive(Debug)]
pub(crate) struct Verify {
    places: Places,
    slot: Slot,
    checker: Checker,
}

impl Verify {
    pub(crate) fn new() -> Verify {
        Verify { places: Places::default(), slot: Slot::default(), checker: Checker::new() }
    }
}

impl Kernel for Verify {
    fn run(&mut self, job: &mut Job<'_>) -> Result<(), Fault> {
        let args = VerifyArgs::from_bytes(&job.read_args()?);
        let batch = Batch::new(args.first_event, args.n_events)?;
        let summaries = batch.summaries(job)?;
        let places = self.places.read(job, VerifyArgs::BYTES, args.n_sources)?;
        check_apart(&[summaries], places.iter().map(Place::span).chain([job.args]))?;

        let sources = self.slot.open(job.memory, places.iter().copied(), batch);
        for (index, event) in batch.events() {
            let mut summary = Summary::of(event);
            for source in sources.iter_mut() {
                let Some(found) = source.fragment(&mut summary, &mut job.tally) else {
                    continue;
                };
                if !self.checker.is_intact(job, found)? {
                    summary.note_corrupt(&mut job.tally);
                }
            }
            summary.publish(job, summaries, index)?;
        }
        Ok(())
    }
}
