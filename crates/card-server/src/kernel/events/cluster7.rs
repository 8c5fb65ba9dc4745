//! `cluster7`: the trigger of the SST-1M camera, computed where the events land.
//!
//! For each sample and each of the 432 patches, the trigger adds the traces of the patch and of its
//! neighbours and sets the patch's decision bit where the sum exceeds a threshold. The traces come as
//! one fragment per crate: 50 samples of 192 bytes, of which the first 144 are patches.
//!
//! Arguments: [`Cluster7Args`], followed by one [`Place`] per source. Results: at the command's
//! result one [`Summary`] per event, in order; at [`Cluster7Args::decisions`] the decision maps, also
//! one per event: [`DECISION_BYTES`] each, sample by sample 432 bits by decision position, least
//! significant bit first.
//!
//! The kernel looks at the three trace sources only, and believes them. With [`FLAG_VERIFY`] it does in
//! the same pass what `verify` does with all sources, and does not decide on corrupt traces.

use millstream_camera::format::{CRATES, DECISION_BYTES, TRACE_BYTES};
use millstream_camera::trigger::{GEOMETRY_BYTES, ROW_BYTES, Trigger, TriggerGeometry, TriggerTraces};

use crate::command::{Cause, FLAG_VERIFY, Fault};
use crate::kernel::slot::{Batch, Checker, Place, Places, STATUS_UNDECIDED, Slot, Summary, check_apart};
use crate::kernel::{Job, Kernel, append_places, outside};
use crate::layout::layout;
use crate::memory::Span;

/// Name of the kernel.
pub const NAME: &str = "cluster7";

layout! {
    /// Arguments of `cluster7`.
    pub struct Cluster7Args[64] {
        0 first_event: u64 = "first event of the batch";
        8 n_events: u32 = "number of its events, 1 to 4096; each packet states the same batch";
        12 n_sources: u32 = "number of places that follow, 1 to 1024";
        16 trace_sources: [u32; 3] = "sources with the traces of crates 1, 2 and 3";
        28 threshold: u32 = "a decision bit is set where the sum is greater than this";
        32 geometry: u64 = "where the geometry table is, 6912 bytes";
        40 decisions: u64 = "where the decision maps go, 2700 bytes per event";
        48 reserved: [u64; 2] = "zero";
    }
}

impl Cluster7Args {
    /// Appends the arguments with their places to `bytes`. [`Cluster7Args::n_sources`] is taken from
    /// the places.
    pub fn append_to(&self, places: &[Place], bytes: &mut Vec<u8>) {
        let args = Cluster7Args { n_sources: places.len() as u32, ..*self };
        bytes.extend(args.to_bytes());
        append_places(places, bytes);
    }
}

/// The kernel.
pub(crate) struct Cluster7 {
    places: Places,
    slot: Slot,
    checker: Checker,
    traces: TriggerTraces,
    trigger: Trigger,
    /// The table that the trigger uses, as it came from card memory; empty before the first.
    table: Vec<u8>,
    patches: Vec<u16>,
    fresh_table: Box<[u8; GEOMETRY_BYTES]>,
}

impl Cluster7 {
    pub(crate) fn new() -> Cluster7 {
        Cluster7 {
            places: Places::default(),
            slot: Slot::default(),
            checker: Checker::new(),
            traces: TriggerTraces::new(),
            trigger: Trigger::new(),
            table: Vec::new(),
            patches: Vec::new(),
            fresh_table: Box::new([0; GEOMETRY_BYTES]),
        }
    }

    /// Takes up the geometry table at `offset`, unless it is the one in use.
    fn use_geometry(&mut self, job: &Job<'_>, offset: u64) -> Result<(), Fault> {
        job.memory.read(offset, &mut self.fresh_table[..]).map_err(outside(Cause::GeometryOutsideMemory))?;
        if self.table == self.fresh_table[..] {
            return Ok(());
        }
        let geometry = TriggerGeometry::from_bytes(&self.fresh_table).map_err(|error| {
            Fault::new(Cause::GeometryEntry, (error.row * ROW_BYTES + 2 * error.entry) as u64)
        })?;
        self.trigger.set_geometry(&geometry);
        self.patches = geometry.patches().collect();
        self.table.clear();
        self.table.extend(&self.fresh_table[..]);
        Ok(())
    }
}

impl Kernel for Cluster7 {
    fn flags(&self) -> u32 {
        FLAG_VERIFY
    }

    fn run(&mut self, job: &mut Job<'_>) -> Result<(), Fault> {
        let args = Cluster7Args::from_bytes(&job.read_args()?);
        if let Some(&reserved) = args.reserved.iter().find(|&&word| word != 0) {
            return Err(Fault::new(Cause::ReservedNotZero, reserved));
        }
        let verify = job.flags & FLAG_VERIFY != 0;
        let batch = Batch::new(args.first_event, args.n_events)?;
        let summaries = batch.summaries(job)?;
        let decisions = Span::new(args.decisions, u64::from(batch.n_events) * DECISION_BYTES as u64);
        job.memory.check(decisions).map_err(outside(Cause::DecisionsOutsideMemory))?;
        self.use_geometry(job, args.geometry)?;
        let places = self.places.read(job, Cluster7Args::BYTES, args.n_sources)?;
        let geometry = Span::new(args.geometry, GEOMETRY_BYTES as u64);
        let inputs = places.iter().map(Place::span).chain([job.args, geometry]);
        check_apart(&[summaries, decisions], inputs)?;
        let crate_of = |source: u32| args.trace_sources.iter().position(|&traces| traces == source);
        for source in args.trace_sources {
            if !places.iter().any(|place| place.source == source) {
                return Err(Fault::new(Cause::TraceSourceMissing, source.into()));
            }
        }

        let looked_at = places.iter().copied().filter(|place| verify || crate_of(place.source).is_some());
        let sources = self.slot.open(job.memory, looked_at, batch);
        for (index, event) in batch.events() {
            let mut summary = Summary::of(event);
            let mut traces_found = 0;
            for source in sources.iter_mut() {
                let Some(found) = source.fragment(&mut summary, &mut job.tally) else {
                    continue;
                };
                let intact = match crate_of(source.id()) {
                    Some(crate_index) if found.payload.len == TRACE_BYTES as u64 => {
                        let traces = self.traces.crate_mut(crate_index);
                        job.memory
                            .read(found.payload.offset, traces)
                            .map_err(outside(Cause::PlaceOutsideMemory))?;
                        let intact = !verify || crc32fast::hash(traces) == found.crc;
                        traces_found += usize::from(intact);
                        intact
                    }
                    _ => !verify || self.checker.is_intact(job, found)?,
                };
                if !intact {
                    summary.note_corrupt(&mut job.tally);
                }
            }

            let mut map = [0; DECISION_BYTES];
            if traces_found == CRATES {
                let outcome = self.trigger.decide(&self.traces, args.threshold, &mut map);
                job.tally.decisions_set += outcome.bits_set;
                summary.decisions_set = outcome.bits_set;
                summary.accepted = u32::from(outcome.bits_set != 0);
                if let Some((sample, position)) = outcome.first {
                    summary.first_sample = sample;
                    summary.first_patch = self.patches[usize::from(position)];
                }
            } else {
                summary.status |= STATUS_UNDECIDED;
            }
            job.memory
                .write(decisions.offset + index * DECISION_BYTES as u64, &map)
                .map_err(outside(Cause::DecisionsOutsideMemory))?;
            summary.publish(job, summaries, index)?;
        }
        Ok(())
    }
}
