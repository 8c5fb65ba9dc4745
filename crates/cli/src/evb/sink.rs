//! Stores a builder unit's events in files: events in HDF5, or whole batches.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use millstream_camera::PixelGeometry;
use millstream_camera::columns::schema;
use millstream_camera::trigger::TriggerGeometry;
use millstream_evb::config::{KernelConfig, LandingTarget, OutputFormat, RunConfig, SyncPolicy};
use millstream_evb::core::{BuIndex, Bytes, EventNumber, RuIndex};
use millstream_evb::process::{AcceptedBatch, AcceptedEvent, Sink, SinkError, WrittenBytes};
use millstream_fragment::file::IoError;
use millstream_fragment::stream::Stream;
use millstream_fragment::{SourceId, SourceKind};
use millstream_store::{
    Attribute, Batch, BatchEvent, BatchFileSequence, BatchOptions, BatchPacket, CommittedReader, Event,
    EventFileSequence, FileError, FileState, InputFile, Run, SequenceOptions, Source, StoreSummary,
    WriteOptions, file_state,
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
        instance: instance(config),
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

/// Tells the run from all others: what the launcher called it, and when that started it. Clocks of hosts, and of a file server, may
/// differ, so that the times of files tell nothing.
fn instance(config: &RunConfig) -> String {
    let started = config.started.and_then(|started| started.duration_since(UNIX_EPOCH).ok());
    started.map_or(config.instance.clone(), |started| format!("{}-{}", config.instance, started.as_nanos()))
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
/// several hosts. Which of them are lost is not known here: all are read, each event once.
struct OtherFiles {
    /// Their base names.
    bases: Vec<PathBuf>,
    /// That of the run: files of an earlier one may have their names.
    instance: String,
    /// Files that are being read, by device and inode: a file keeps them when it is complete and gets its final name. `None`
    /// for a complete file that was read.
    readers: HashMap<(u64, u64), Option<CommittedReader>>,
    /// Events of the files that were read.
    numbers: HashSet<u64>,
}

impl OtherFiles {
    fn new(config: &RunConfig, bu: BuIndex) -> OtherFiles {
        let others =
            (0..config.builders.len()).map(|other| BuIndex(other as u16)).filter(|other| *other != bu);
        let bases = others.filter_map(|other| event_files(config, other)).collect();
        OtherFiles { bases, instance: instance(config), readers: HashMap::new(), numbers: HashSet::new() }
    }

    /// Which of these events are in the files.
    fn hold(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError> {
        // A file that gets its final name between the list and its opening is in the next list.
        while self.has_unread(events) && !self.read_new()? {}
        Ok(events.iter().map(|event| self.numbers.contains(&event.0)).collect())
    }

    fn has_unread(&self, events: &[EventNumber]) -> bool {
        events.iter().any(|event| !self.numbers.contains(&event.0))
    }

    /// Reads what the files have that was not read yet. False if a file was renamed or removed meanwhile.
    fn read_new(&mut self) -> Result<bool, SinkError> {
        let Some(directory) = self.bases.first().map(|base| super::folder(base)) else { return Ok(true) };
        let mut has_read_all = true;
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let state_of = |base: &PathBuf| {
                file_state(&base.file_name().unwrap_or_default().to_string_lossy(), &name)
                    .filter(|state| matches!(state, FileState::Complete | FileState::Partial))
            };
            if let Some(state) = self.bases.iter().find_map(state_of) {
                match self.read_file(&path, state) {
                    Err(_) if !path.exists() => has_read_all = false,
                    read => read?,
                }
            }
        }
        Ok(has_read_all)
    }

    fn read_file(&mut self, path: &Path, state: FileState) -> Result<(), FileError> {
        let metadata = std::fs::metadata(path).map_err(IoError::of(path, "open"))?;
        let reader = self.readers.entry((metadata.dev(), metadata.ino()));
        let place = reader.or_insert_with(|| Some(CommittedReader::of_run(path, &self.instance)));
        let Some(reader) = place else { return Ok(()) };
        reader.renamed(path);
        self.numbers.extend(reader.read_new()?);
        if state == FileState::Complete {
            *place = None;
        }
        Ok(())
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

    fn are_stored(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError> {
        self.others.hold(events)
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

    fn are_stored(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError> {
        self.others.hold(events)
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
    use std::time::{Duration, SystemTime};

    const HOUR: Duration = Duration::from_secs(3600);

    /// The sink of a unit that was started again finds what its predecessor had stored, whatever the clocks say: that of the launcher
    /// is ahead of the file's.
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
        config.started = Some(SystemTime::now() + HOUR);
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
        let mut restarted = make(&config, BuIndex(1)).unwrap().unwrap();
        assert_eq!(restarted.are_stored(&[7, 8].map(EventNumber)).unwrap(), [true, false]);
        drop(restarted);
        // A file of another run has other events.
        config.started = Some(SystemTime::now() - HOUR);
        let mut next = make(&config, BuIndex(1)).unwrap().unwrap();
        assert_eq!(next.are_stored(&[EventNumber(7)]).unwrap(), [false]);
    }

    /// The sink of the last of two units looks into the files of the first one: while that is created, written and complete.
    #[test]
    fn files_of_other_units_are_read_as_they_grow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        let text = "[run]\nname = \"run\"\nbatch = 8\nevents = 100\n\
                    [output]\ndirectory = \".\"\nevents = \"built\"\n[[readout]]\nname = \"ru0\"\n[readout.generator]\n\
                    first_source = 0\nsources = 1\nsize = \"200B\"\n\
                    [[builder]]\nname = \"bu0\"\nslots = 4\nlanding = \"host\"\n\
                    [[builder]]\nname = \"bu1\"\nslots = 4\nlanding = \"host\"\n";
        std::fs::write(&path, text).unwrap();
        let mut config = ConfigFile::load(&path).and_then(|config| config.check()).unwrap();
        config.started = Some(SystemTime::now() + HOUR);
        let mut asking = make(&config, BuIndex(1)).unwrap().unwrap();
        let numbers = [7, 8, 9].map(EventNumber);
        // Files of a unit that was killed before it had created them.
        for name in ["run.bu0.h5.partial", "run.bu0.batches.partial"] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        assert_eq!(asking.are_stored(&numbers).unwrap(), [false; 3]);
        std::fs::remove_file(folder.path().join("run.bu0.h5.partial")).unwrap();
        let mut other = make(&config, BuIndex(0)).unwrap().unwrap();
        let mut stored = [false; 3];
        for at in 0..3 {
            let (number, batch) = (numbers[at], BatchId(0));
            let (fragments, decisions) = (&[][..], &[][..]);
            other.store(&AcceptedEvent { number, batch, fragments, decisions, readout_lost: false }).unwrap();
            other.flush().unwrap();
            stored[at] = true;
            assert_eq!(asking.are_stored(&numbers).unwrap(), stored);
        }
        other.finish().unwrap();
        assert_eq!(asking.are_stored(&[10, 9].map(EventNumber)).unwrap(), [false, true]);
    }
}
