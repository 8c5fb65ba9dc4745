//! A builder unit's accepted events to an HDF5 file.

use std::path::{Path, PathBuf};

use millstream_evb::config::{Kernel, Landing, Setup};
use millstream_evb::core::BuIndex;
use millstream_evb::process::{AcceptedEvent, Sink, SinkError};
use millstream_fragment::stream::Stream;
use millstream_report::camera::Geometry as Pixels;
use millstream_store::camera::{Camera, schema};
use millstream_store::{Attribute, Event, EventWriter, Input, Options, Run, Source};

/// The file of a builder unit: `RUN.BUILDER.h5` in the run's directory.
pub(crate) fn event_file(setup: &Setup, bu: BuIndex) -> Option<PathBuf> {
    let builder = setup.builders.get(bu.index())?;
    Some(setup.output.as_ref()?.directory.join(format!("{}.{}.h5", setup.name, builder.name)))
}

/// What [`millstream_evb::process::child::Child::run`] makes for a builder unit.
pub(crate) fn make(setup: &Setup, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let Some(path) = event_file(setup, bu) else { return Ok(None) };
    let mut inputs = Vec::new();
    let mut sources = Vec::new();
    for readout in &setup.readouts {
        let stream = Stream::open(&readout.input)?;
        inputs.push(Input {
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
    let camera = describe_camera(setup, bu, &mut run)?;
    let options = Options { replace: true, ..Options::default() };
    let writer = EventWriter::create(&path, &schema(run, sources, &camera), &options)?;
    Ok(Some(Box::new(EventFile { writer })))
}

/// What is known of the camera, if the builder unit's card runs its trigger.
fn describe_camera(setup: &Setup, bu: BuIndex, run: &mut Run) -> Result<Camera, SinkError> {
    let Landing::Card(card) = &setup.builders[bu.index()].landing else { return Ok(Camera::default()) };
    let Kernel::Cluster7 { threshold, patches, .. } = &card.kernel else { return Ok(Camera::default()) };
    run.attributes.push(("trigger_kernel".to_owned(), Attribute::Text("cluster7".to_owned())));
    run.attributes.push(("trigger_threshold".to_owned(), Attribute::Integer(i64::from(*threshold))));
    let pixels = pixels_beside(patches);
    let mut camera = Camera { patch_of_bit: patch_of_bit(patches)?, ..Camera::default() };
    if pixels.exists() {
        camera.pixel_id = column(&pixels, "pixel")?;
        camera.pixel_xy = Pixels::load(&pixels)?.pixels().iter().map(|pixel| (pixel.x, pixel.y)).collect();
    }
    Ok(camera)
}

/// `pixels.csv` in the folder of `patches.csv`.
pub(crate) fn pixels_beside(patches: &Path) -> PathBuf {
    super::folder(patches).join("pixels.csv")
}

/// The patch of each decision bit: the table's column `patch`, ordered by `decision_position`.
fn patch_of_bit(path: &Path) -> Result<Vec<u16>, SinkError> {
    let (patches, positions) = (column(path, "patch")?, column(path, "decision_position")?);
    let mut map = vec![0; patches.len()];
    for (patch, position) in patches.into_iter().zip(positions) {
        *map.get_mut(usize::from(position))
            .ok_or_else(|| format!("{}: decision_position {position} is too large", path.display()))? = patch;
    }
    Ok(map)
}

/// A column of small numbers of a table with a header line.
fn column(path: &Path, name: &str) -> Result<Vec<u16>, SinkError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let mut lines = text.lines();
    let header = lines.next().unwrap_or_default();
    let index = header
        .split(',')
        .position(|field| field == name)
        .ok_or_else(|| format!("{}: line 1: no column {name}", path.display()))?;
    lines
        .enumerate()
        .map(|(number, line)| {
            let field = line.split(',').nth(index).unwrap_or_default();
            field.parse().map_err(|_| {
                format!("{}: line {}: {name}: {field:?} is no number", path.display(), number + 2).into()
            })
        })
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_name_what_is_wrong() {
        let folder = std::env::temp_dir().join(format!("millstream-columns-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("t.csv");
        std::fs::write(&path, "patch,decision_position\n7,1\n9,0\n").unwrap();
        assert_eq!(patch_of_bit(&path).unwrap(), [9, 7]);
        std::fs::write(&path, "patch,decision_position\n7,x\n").unwrap();
        let error = patch_of_bit(&path).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("decision_position"), "{error}");
        std::fs::write(&path, "patch\n7\n").unwrap();
        assert!(patch_of_bit(&path).unwrap_err().to_string().contains("no column decision_position"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
