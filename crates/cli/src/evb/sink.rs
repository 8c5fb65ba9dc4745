//! Stores a builder unit's events in HDF5 files.

use std::path::{Path, PathBuf};

use millstream_camera::PixelGeometry;
use millstream_camera::columns::schema;
use millstream_camera::trigger::TriggerGeometry;
use millstream_evb::config::{KernelSetup, LandingTarget, Setup, SyncPolicy};
use millstream_evb::core::{BuIndex, RuIndex};
use millstream_evb::process::{AcceptedEvent, Sink, SinkError};
use millstream_fragment::stream::Stream;
use millstream_fragment::{SourceId, SourceKind};
use millstream_store::{
    Attribute, Event, EventFileSequence, InputFile, Run, SequenceOptions, Source, WriteOptions,
};

use super::files::event_files;

/// The sink of a builder unit, for [`millstream_evb::process::child::Child::run`].
pub(crate) fn make(setup: &Setup, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let (Some(base), Some(output)) = (event_files(setup, bu), &setup.output) else { return Ok(None) };
    let mut inputs = Vec::new();
    let mut sources = Vec::new();
    for (index, readout) in setup.readouts.iter().enumerate() {
        let Some(path) = readout.input.file() else {
            // A live source has neither names nor a checksum.
            inputs.push(InputFile { name: readout.name.clone(), ..InputFile::default() });
            let areas = setup.layout.of_readout(RuIndex(index as u16));
            sources.extend(areas.iter().map(|area| Source {
                id: SourceId(area.source),
                kind: SourceKind(area.kind),
                name: String::new(),
            }));
            continue;
        };
        let stream = Stream::open(path)?;
        inputs.push(InputFile {
            name: path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            bytes: stream.mapping().len() as u64,
            checksum: format!("crc32:{:08x}", crc32fast::hash(stream.mapping())),
        });
        sources.extend(stream.sources().map(Source::from));
    }
    let mut run = Run {
        name: setup.name.clone(),
        replay: setup.plan.events.get().checked_div(setup.file_events).unwrap_or(1),
        software: concat!("millstream ", env!("CARGO_PKG_VERSION")).to_owned(),
        inputs,
        attributes: Vec::new(),
    };
    let (trigger, pixels) = camera_geometry(setup, bu, &mut run)?;
    let write = WriteOptions { replace: true, ..WriteOptions::default() };
    let options = SequenceOptions {
        rotate_size: output.rotate_size,
        rotate_interval: output.rotate_interval,
        sync_on_flush: output.sync == SyncPolicy::Batch,
    };
    let schema = schema(run, sources, trigger.as_ref(), pixels.as_ref());
    Ok(Some(Box::new(EventFiles { sequence: EventFileSequence::create(base, schema, write, options)? })))
}

/// The camera's geometry, if the builder unit's card runs the trigger.
fn camera_geometry(
    setup: &Setup,
    bu: BuIndex,
    run: &mut Run,
) -> Result<(Option<TriggerGeometry>, Option<PixelGeometry>), SinkError> {
    let LandingTarget::Card(card) = &setup.builders[bu.index()].landing else { return Ok((None, None)) };
    let KernelSetup::Cluster7 { threshold, patches, .. } = &card.kernel else { return Ok((None, None)) };
    run.attributes.push(("trigger_kernel".to_owned(), Attribute::Text("cluster7".to_owned())));
    run.attributes.push(("trigger_threshold".to_owned(), Attribute::Integer(i64::from(*threshold))));
    let pixels = pixels_beside(patches);
    let pixels = pixels.exists().then(|| PixelGeometry::load(&pixels)).transpose()?;
    Ok((Some(TriggerGeometry::load(patches)?), pixels))
}

/// `pixels.csv` in the folder of `patches.csv`.
pub(crate) fn pixels_beside(patches: &Path) -> PathBuf {
    super::folder(patches).join("pixels.csv")
}

struct EventFiles {
    sequence: EventFileSequence,
}

impl Sink for EventFiles {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        self.sequence.append(&Event {
            number: event.number.0,
            batch: event.batch.0,
            fragments: event.fragments,
            decisions: event.decisions,
        })?;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        Ok(self.sequence.flush()?)
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        let files = self.sequence.finish()?;
        let files: Vec<String> = files.iter().map(|stored| stored.path.display().to_string()).collect();
        Ok(Some(files.join(", ")))
    }
}
