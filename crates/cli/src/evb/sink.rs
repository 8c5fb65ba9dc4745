//! Stores a builder unit's events in files: events in HDF5, or whole batches.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use millstream_camera::PixelGeometry;
use millstream_camera::columns::schema;
use millstream_camera::trigger::TriggerGeometry;
use millstream_evb::config::{KernelConfig, LandingTarget, OutputFormat, RunConfig, SyncPolicy};
use millstream_evb::core::{BuIndex, Bytes, EventNumber, RuIndex};
use millstream_evb::process::{AcceptedBatch, AcceptedEvent, Sink, SinkError, WrittenBytes};
use millstream_fragment::stream::Stream;
use millstream_fragment::{SourceId, SourceKind};
use millstream_store::{
    Attribute, Batch, BatchEvent, BatchFileSequence, BatchOptions, BatchPacket, Event, EventFileSequence,
    FileError, FileState, InputFile, Run, SequenceOptions, Source, StoreSummary, WriteOptions,
    committed_numbers, file_state,
};

use super::files::event_files;

/// The sink of a builder unit, for [`millstream_evb::process::child::Child::run`].
pub(crate) fn make(config: &RunConfig, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let (Some(base), Some(output)) = (event_files(config, bu), &config.output) else { return Ok(None) };
    let mut inputs = Vec::new();
    let mut sources = Vec::new();
    for (index, readout) in config.readouts.iter().enumerate() {
        let Some(path) = readout.input.file() else {
            // A live source has neither names nor a checksum.
            inputs.push(InputFile { name: readout.name.clone(), ..InputFile::default() });
            let areas = config.layout.of_readout(RuIndex(index as u16));
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
        name: config.name.clone(),
        replay: config.plan.events.get().checked_div(config.file_events).unwrap_or(1),
        software: concat!("millstream ", env!("CARGO_PKG_VERSION")).to_owned(),
        inputs,
        attributes: Vec::new(),
    };
    let (trigger, pixels) = camera_geometry(config, bu, &mut run)?;
    let options = SequenceOptions {
        rotate_size: output.rotate_size,
        rotate_interval: output.rotate_interval,
        sync_on_flush: output.sync == SyncPolicy::Batch,
        replace: output.replace,
    };
    let schema = schema(run, sources, trigger.as_ref(), pixels.as_ref());
    let others = OtherFiles::new(config, bu);
    Ok(Some(match output.format {
        OutputFormat::Hdf5 => {
            let sequence = EventFileSequence::create(base, schema, WriteOptions::default(), options)?;
            Box::new(EventFiles { sequence, others })
        }
        OutputFormat::Batches { direct } => {
            let write = BatchOptions { direct, replace: false };
            Box::new(BatchFiles {
                sequence: BatchFileSequence::create(base, schema, write, options)?,
                others,
            })
        }
    }))
}

/// The camera's geometry, if the builder unit's card runs the trigger.
fn camera_geometry(
    config: &RunConfig,
    bu: BuIndex,
    run: &mut Run,
) -> Result<(Option<TriggerGeometry>, Option<PixelGeometry>), SinkError> {
    let LandingTarget::Card(card) = &config.builders[bu.index()].landing else { return Ok((None, None)) };
    let KernelConfig::Cluster7 { threshold, patches, .. } = &card.kernel else { return Ok((None, None)) };
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
    others: OtherFiles,
}

/// The event files of the other builder units of this run. All units write to one directory, shared if they are on
/// several hosts.
struct OtherFiles {
    /// Their base names.
    bases: Vec<PathBuf>,
    /// Files that were last changed before are of an earlier run.
    since: SystemTime,
    /// Events of the files that were read, with the time of the last change and the length.
    read: HashMap<PathBuf, (SystemTime, u64, HashSet<u64>)>,
}

impl OtherFiles {
    fn new(config: &RunConfig, bu: BuIndex) -> OtherFiles {
        let others =
            (0..config.builders.len()).map(|other| BuIndex(other as u16)).filter(|other| *other != bu);
        let bases = others.filter_map(|other| event_files(config, other)).collect();
        // Not the start of this process: it may be a restart of a unit that has stored events.
        let since = config.started.unwrap_or_else(SystemTime::now);
        OtherFiles { bases, since, read: HashMap::new() }
    }

    fn hold(&mut self, event: EventNumber) -> Result<bool, SinkError> {
        let Some(directory) = self.bases.first().map(|base| super::folder(base)) else { return Ok(false) };
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_of = |base: &PathBuf| {
                let state = file_state(&base.file_name().unwrap_or_default().to_string_lossy(), &name);
                matches!(state, Some(FileState::Complete | FileState::Partial))
            };
            if self.bases.iter().any(is_of) && self.file_holds(&path, event)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn file_holds(&mut self, path: &Path, event: EventNumber) -> Result<bool, SinkError> {
        // A unit that lives may rename its file meanwhile; only those of dead units matter.
        let Ok(metadata) = std::fs::metadata(path) else { return Ok(false) };
        let (changed, len) = (metadata.modified()?, metadata.len());
        if changed < self.since {
            return Ok(false);
        }
        let known = self.read.get(path).filter(|(at, of, _)| (*at, *of) == (changed, len));
        if let Some((_, _, numbers)) = known {
            return Ok(numbers.contains(&event.0));
        }
        let numbers: HashSet<u64> = match committed_numbers(path) {
            Err(FileError::Io(error)) if error.cause.kind() == std::io::ErrorKind::NotFound => {
                return Ok(false);
            }
            numbers => numbers?.into_iter().collect(),
        };
        let holds = numbers.contains(&event.0);
        self.read.insert(path.to_owned(), (changed, len, numbers));
        Ok(holds)
    }
}

impl Sink for EventFiles {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        self.sequence.append(&Event {
            number: event.number.0,
            batch: event.batch.0,
            fragments: event.fragments,
            decisions: event.decisions,
            readout_lost: event.readout_lost,
        })?;
        Ok(())
    }

    fn is_stored(&mut self, event: EventNumber) -> Result<bool, SinkError> {
        self.others.hold(event)
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        Ok(self.sequence.flush()?)
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        Ok(Some(paths(&self.sequence.finish()?)))
    }
}

fn paths(files: &[StoreSummary]) -> String {
    let files: Vec<String> = files.iter().map(|stored| stored.path.display().to_string()).collect();
    files.join(", ")
}

struct BatchFiles {
    sequence: BatchFileSequence,
    others: OtherFiles,
}

impl Sink for BatchFiles {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        Err(format!("event {}: batch files hold no single events", event.number.0).into())
    }

    fn takes_batches(&self) -> bool {
        true
    }

    fn store_batch(&mut self, batch: &AcceptedBatch<'_>) -> Result<WrittenBytes, SinkError> {
        let events = batch.events.iter().map(|event| BatchEvent {
            index: event.index.into(),
            incomplete: event.incomplete,
            fragments: event.fragments.into(),
            payload: event.payload.0,
        });
        let packets = batch.packets.iter().map(|packet| BatchPacket {
            source: packet.source.0,
            kind: packet.kind.0,
            offset: packet.offset,
            len: packet.len,
            header_len: packet.header_len,
            header_crc: packet.header_crc,
        });
        let written = self.sequence.append(&Batch {
            batch: batch.id.0,
            first_event: batch.first_event.0,
            n_events: batch.n_events.into(),
            events: &events.collect::<Vec<_>>(),
            decisions: batch.decisions,
            readout_lost: batch.readout_lost,
            packets: &packets.collect::<Vec<_>>(),
            memory: batch.memory,
        })?;
        Ok(WrittenBytes { direct: Bytes(written.direct), copied: Bytes(written.copied) })
    }

    fn is_stored(&mut self, event: EventNumber) -> Result<bool, SinkError> {
        self.others.hold(event)
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        Ok(self.sequence.flush()?)
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        Ok(Some(paths(&self.sequence.finish()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_evb::config::ConfigFile;
    use millstream_evb::core::BatchId;

    /// The sink of a unit that was started again finds what its predecessor had stored, though that file is older than the process.
    #[test]
    fn a_restarted_unit_knows_the_events_of_its_predecessor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        let text = "[run]\nname = \"run\"\nbatch = 8\nevents = 100\n[recovery]\nrestarts = 1\n\
                    [output]\ndirectory = \".\"\nevents = \"built\"\n[[readout]]\nname = \"ru0\"\n[readout.generator]\n\
                    first_source = 0\nsources = 1\nsize = \"200B\"\nrate_hz = 2000.0\n\
                    [[builder]]\nname = \"bu0\"\nslots = 4\nlanding = \"host\"\n";
        std::fs::write(&path, text).unwrap();
        let mut config = ConfigFile::load(&path).and_then(|config| config.check()).unwrap();
        config.started = Some(SystemTime::now() - std::time::Duration::from_secs(10));
        let event = |number| AcceptedEvent {
            number: EventNumber(number),
            batch: BatchId(0),
            fragments: &[],
            decisions: &[],
            readout_lost: false,
        };
        let mut killed = make(&config, BuIndex(0)).unwrap().unwrap();
        killed.store(&event(7)).unwrap();
        killed.flush().unwrap();
        drop(killed);
        std::thread::sleep(std::time::Duration::from_millis(50));
        let mut restarted = make(&config, BuIndex(1)).unwrap().unwrap();
        let stored = [7, 8].map(|number| restarted.is_stored(EventNumber(number)).unwrap());
        assert_eq!(stored, [true, false]);
        drop(restarted);
        // A file of an earlier run has another one's events.
        config.started = Some(SystemTime::now());
        let mut next = make(&config, BuIndex(1)).unwrap().unwrap();
        assert!(!next.is_stored(EventNumber(7)).unwrap());
    }
}
