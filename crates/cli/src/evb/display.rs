//! Event display of runs under run control: about once a second, a stored event becomes a picture for the page.
//!
//! The builder unit copies the event; a thread draws it. While the thread draws, events are not copied.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use millstream_camera::PixelGeometry;
use millstream_camera::format::{PATCHES, SAMPLES, WAVEFORMS};
use millstream_camera::picture::{self, Decision};
use millstream_camera::trigger::TriggerGeometry;
use millstream_control::display;
use millstream_evb::config::{KernelConfig, LandingTarget, RunConfig};
use millstream_evb::core::{BuIndex, EventNumber};
use millstream_evb::process::{AcceptedBatch, AcceptedEvent, Sink, SinkError, WrittenBytes};
use millstream_fragment::SourceId;
use millstream_report::colour::{SECONDARY, TEXT, viridis};
use millstream_report::eprint_line;
use millstream_report::svg::{Anchor, Coordinate, Font, Svg};
use millstream_report::{count, save};

use super::sink::pixels_beside;

/// Shortest time between two pictures.
const INTERVAL: Duration = Duration::from_secs(1);

/// A stored event.
struct Event {
    number: u64,
    fragments: Vec<(SourceId, Vec<u8>)>,
    decisions: Vec<u8>,
}

/// Draws a detector's events.
trait Detector: Send {
    /// The picture as SVG.
    fn draw(&self, run: &str, event: &Event) -> Result<String, Box<dyn Error>>;
}

/// Shows the events that pass through a sink, if the run is under run control.
pub(super) fn wrap(config: &RunConfig, bu: BuIndex, sink: Option<Box<dyn Sink>>) -> Option<Box<dyn Sink>> {
    let (sink, output) = (sink?, config.output.as_ref()?);
    // Only run control starts runs that wait.
    if !config.starts_paused {
        return Some(sink);
    }
    let path = display::file(&output.directory, &config.builders.get(bu.index())?.name);
    let (events, received) = sync_channel(0);
    let (detector, run) = (detector(config, bu), config.name.clone());
    let file = path.clone();
    std::thread::spawn(move || draw_all(&received, &*detector, &run, &file));
    Some(Box::new(Displayed { sink, events, next: Instant::now(), path }))
}

/// The camera, if the builder unit's card runs its trigger and its geometry is there; any other detector otherwise.
fn detector(config: &RunConfig, bu: BuIndex) -> Box<dyn Detector> {
    camera(config, bu).map_or_else(|| Box::new(AnyDetector) as Box<dyn Detector>, |camera| Box::new(camera))
}

fn camera(config: &RunConfig, bu: BuIndex) -> Option<Camera> {
    let LandingTarget::Card(card) = &config.builders[bu.index()].landing else { return None };
    let KernelConfig::Cluster7 { patches, .. } = &card.kernel else { return None };
    let pixels = PixelGeometry::load(&pixels_beside(patches)).ok()?;
    let mut boards: Vec<SourceId> = config
        .layout
        .packets
        .iter()
        .filter(|area| area.kind == WAVEFORMS.0)
        .map(|area| SourceId(area.source))
        .collect();
    boards.sort_unstable();
    Some(Camera { pixels, patches: TriggerGeometry::load(patches).ok()?.patches().collect(), boards })
}

fn draw_all(events: &Receiver<Event>, detector: &dyn Detector, run: &str, path: &Path) {
    for event in events {
        // An event that cannot be drawn is not shown; it is stored all the same.
        let drawn = detector.draw(run, &event).and_then(|svg| Ok(save(path, &svg)?));
        if let Err(error) = drawn {
            eprint_line!("event {} is not shown: {error}", event.number);
        }
    }
}

/// A sink whose events are shown.
struct Displayed {
    sink: Box<dyn Sink>,
    events: SyncSender<Event>,
    next: Instant,
    path: PathBuf,
}

impl Displayed {
    /// Whether it is time to show an event.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now >= self.next;
        if is_due {
            self.next = now + INTERVAL;
        }
        is_due
    }
}

impl Sink for Displayed {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        if self.is_due() {
            let copy = |(source, fragment): &(SourceId, millstream_fragment::Fragment<'_>)| {
                (*source, fragment.payload.to_vec())
            };
            // Refused while the thread draws.
            let _ = self.events.try_send(Event {
                number: event.number.0,
                fragments: event.fragments.iter().map(copy).collect(),
                decisions: event.decisions.to_vec(),
            });
        }
        self.sink.store(event)
    }

    fn takes_batches(&self) -> bool {
        self.sink.takes_batches()
    }

    fn store_batch(&mut self, batch: &AcceptedBatch<'_>) -> Result<WrittenBytes, SinkError> {
        if let Some(event) = batch.events.first()
            && self.is_due()
        {
            let _ = self.events.try_send(Event {
                number: batch.first_event.0 + u64::from(event.index),
                fragments: batch.fragments(event),
                decisions: batch.decisions_of(0).to_vec(),
            });
        }
        self.sink.store_batch(batch)
    }

    fn are_stored(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError> {
        self.sink.are_stored(events)
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        self.sink.flush()
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        drop(self.events);
        // Run control removes what is left, also that of a killed unit.
        let _ = std::fs::remove_file(&self.path);
        self.sink.finish()
    }
}

/// The camera: charges of its pixels, with the triggered patches.
struct Camera {
    pixels: PixelGeometry,
    patches: Vec<u16>,
    boards: Vec<SourceId>,
}

impl Detector for Camera {
    fn draw(&self, run: &str, event: &Event) -> Result<String, Box<dyn Error>> {
        let board = |board: &SourceId| event.fragments.iter().find(|(source, _)| source == board);
        let payloads = self.boards.iter().filter_map(board).flat_map(|(_, payload)| payload.chunks_exact(2));
        let waveforms: Vec<i16> = payloads.map(|bytes| i16::from_le_bytes([bytes[0], bytes[1]])).collect();
        let bits = event.decisions.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
        let set = bits.enumerate().filter(|(_, is_set)| *is_set).filter_map(|(at, _)| {
            Some(Decision { sample: at / PATCHES, patch: *self.patches.get(at % PATCHES)? })
        });
        let triggered: Vec<Decision> = set.collect();
        let shown = picture::Event {
            run,
            number: event.number,
            waveforms: &waveforms,
            samples: SAMPLES,
            triggered: &triggered,
        };
        Ok(picture::draw(&self.pixels, &shown)?)
    }
}

/// Any detector: the size of each source's fragment.
struct AnyDetector;

/// Bars of a picture; further sources are counted.
const BARS: usize = 24;

impl Detector for AnyDetector {
    fn draw(&self, run: &str, event: &Event) -> Result<String, Box<dyn Error>> {
        let title = format!("{run}: event {}", event.number);
        let shown = event.fragments.len().min(BARS);
        let mut svg = Svg::new(800.0, 100.0 + 28.0 * shown as f64, &title);
        svg.text((24.0, 36.0), Anchor::Start, Font::bold(20.0), &title);
        let bytes: usize = event.fragments.iter().map(|(_, payload)| payload.len()).sum();
        let line = format!(
            "{} fragments, {} B; payload of each source, first {shown}",
            count(event.fragments.len() as u64),
            count(bytes as u64)
        );
        svg.text((24.0, 60.0), Anchor::Start, Font::new(14.0, SECONDARY), &line);
        let longest = event.fragments.iter().map(|(_, payload)| payload.len()).max().unwrap_or(0).max(1);
        for (row, (source, payload)) in event.fragments.iter().take(BARS).enumerate() {
            let top = 80.0 + 28.0 * row as f64;
            let width = 440.0 * payload.len() as f64 / longest as f64;
            svg.text((150.0, top + 14.0), Anchor::End, Font::new(14.0, TEXT), &source.to_string());
            svg.element(
                "rect",
                &[
                    ("x", &Coordinate(160.0)),
                    ("y", &Coordinate(top)),
                    ("width", &Coordinate(width)),
                    ("height", &Coordinate(18.0)),
                    ("fill", &viridis(0.4)),
                ],
                None,
            );
            let size = format!("{} B", count(payload.len() as u64));
            svg.text((168.0 + width, top + 14.0), Anchor::Start, Font::new(14.0, TEXT), &size);
        }
        Ok(svg.finish())
    }
}
