//! Replay of a stream file.

use super::Source;
use crate::config::RunConfig;
use crate::core::plan::Batch;
use crate::layout::PacketArea;
use crate::process::ProcessError;
use crate::process::error::IoContext;
use millstream_fragment::SourceId;
use millstream_fragment::packetize::{FileExtent, PacketLayout, Packetizer, Replay};
use millstream_fragment::stream::Stream;
use millstream_shm::truncation::TruncationWatch;
use std::path::Path;
use std::time::Instant;

/// A stream file, mapped for the lifetime of the process.
pub struct FileReplay {
    stream: &'static Stream,
    packetizers: Vec<Packetizer<'static>>,
    watch: TruncationWatch,
}

impl FileReplay {
    /// Maps the file, whose sources must match the packet areas of the checked configuration, and reads every page, so
    /// that no transfer waits for the disk.
    pub(super) fn open(
        config: &RunConfig,
        areas: &[PacketArea],
        path: &Path,
    ) -> Result<FileReplay, ProcessError> {
        let stream: &'static Stream = Box::leak(Box::new(Stream::open(path)?));
        let watch = TruncationWatch::of(stream.mapping()).context("watch the input for truncation")?;
        let packetizers = packetizers(config, areas, stream)?;
        prefault(stream.mapping());
        Ok(FileReplay { stream, packetizers, watch })
    }
}

impl Source for FileReplay {
    fn mapping(&self) -> Option<&'static [u8]> {
        Some(self.stream.mapping())
    }

    fn max_extents(&self, events: u32) -> u64 {
        self.packetizers.iter().map(|packetizer| packetizer.max_extents(events)).max().unwrap_or(1)
    }

    fn poll_available(&mut self, _now: Instant) -> u64 {
        u64::MAX
    }

    fn failure(&self) -> Option<ProcessError> {
        self.watch.is_truncated().then(|| ProcessError::InputChanged {
            input: self.stream.path().display().to_string(),
            what: "it was truncated while the run reads it; write a new file and rename it instead"
                .to_owned(),
        })
    }

    fn packet(
        &mut self,
        position: usize,
        batch: &Batch,
        buffer: &mut [u8],
        extents: &mut Vec<FileExtent>,
    ) -> Result<PacketLayout, ProcessError> {
        let packetizer = &self.packetizers[position];
        let made = packetizer.packet(batch.first_event.0, batch.events.into(), buffer, extents);
        // The index of a truncated file reads as zeros.
        made.map_err(|error| {
            self.failure().unwrap_or_else(|| ProcessError::InputChanged {
                input: packetizer.source().id().to_string(),
                what: error.to_string(),
            })
        })
    }
}

/// The sources of the file in the order of their packet areas.
fn packetizers(
    config: &RunConfig,
    areas: &[PacketArea],
    stream: &'static Stream,
) -> Result<Vec<Packetizer<'static>>, ProcessError> {
    let changed = |what: String| {
        let input = stream.path().display().to_string();
        ProcessError::InputChanged { input, what }
    };
    let events = stream.events();
    if events.start != config.file_first.0 || events.end - events.start != config.file_events {
        return Err(changed(format!("events {events:?}")));
    }
    let replay = Replay::new(events, config.plan.first_event.0).ok_or_else(|| changed("no events".into()))?;
    if areas.len() != stream.sources().len() {
        return Err(changed(format!("{} sources", stream.sources().len())));
    }
    let batch = u32::from(config.plan.batch.get());
    let packetizer = |area: &PacketArea| {
        let id = SourceId(area.source);
        let source = stream.source(id).ok_or_else(|| changed(format!("no {id}")))?;
        let packetizer = Packetizer::new(source, replay.clone());
        if packetizer.max_total_len(batch).is_none_or(|most| most > area.capacity) {
            return Err(changed(format!("fragments of {id} are longer")));
        }
        Ok(packetizer)
    };
    areas.iter().map(packetizer).collect()
}

/// Reads a byte of every page.
fn prefault(bytes: &[u8]) {
    const PAGE: usize = 4096;
    let sum = bytes.iter().step_by(PAGE).fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    std::hint::black_box(sum);
}
