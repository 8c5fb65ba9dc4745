//! Stores a builder unit's accepted events in an HDF5 file.

use std::path::{Path, PathBuf};

use millstream_camera::PixelGeometry;
use millstream_camera::columns::schema;
use millstream_camera::trigger::TriggerGeometry;
use millstream_evb::config::{KernelSetup, LandingTarget, Setup};
use millstream_evb::core::BuIndex;
use millstream_evb::process::{AcceptedEvent, Sink, SinkError};
use millstream_fragment::stream::Stream;
use millstream_store::{Attribute, Event, EventWriter, InputFile, Run, Source, WriteOptions};

/// The event file of a builder unit: `RUN.BUILDER.h5` in the output directory.
pub(crate) fn event_file(setup: &Setup, bu: BuIndex) -> Option<PathBuf> {
    let builder = setup.builders.get(bu.index())?;
    Some(setup.output.as_ref()?.directory.join(format!("{}.{}.h5", setup.name, builder.name)))
}

/// The sink of a builder unit, for [`millstream_evb::process::child::Child::run`].
pub(crate) fn make(setup: &Setup, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let Some(path) = event_file(setup, bu) else { return Ok(None) };
    let mut inputs = Vec::new();
    let mut sources = Vec::new();
    for readout in &setup.readouts {
        let stream = Stream::open(&readout.input)?;
        inputs.push(InputFile {
            name: readout
                .input
                .file_name()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            bytes: stream.mapping().len() as u64,
            checksum: format!("crc32:{:08x}", crc32fast::hash(stream.mapping())),
        });
        sources.extend(stream.sources().map(Source::from));
    }
    let mut run = Run {
        name: setup.name.clone(),
        replay: setup.plan.events.get() / setup.file_events.max(1),
        software: concat!("millstream ", env!("CARGO_PKG_VERSION")).to_owned(),
        inputs,
        attributes: Vec::new(),
    };
    let (trigger, pixels) = camera_geometry(setup, bu, &mut run)?;
    let options = WriteOptions { replace: true, ..WriteOptions::default() };
    let writer =
        EventWriter::create(&path, &schema(run, sources, trigger.as_ref(), pixels.as_ref()), &options)?;
    Ok(Some(Box::new(EventFile { writer })))
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

struct EventFile {
    writer: EventWriter,
}

impl Sink for EventFile {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        self.writer.append(&Event {
            number: event.number.0,
            batch: event.batch.0,
            fragments: event.fragments,
            decisions: event.decisions,
        })?;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        let stored = self.writer.finish()?;
        Ok(Some(stored.path.display().to_string()))
    }
}
