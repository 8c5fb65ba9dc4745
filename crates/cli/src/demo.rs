//! `millstream demo`: builds recorded camera events.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use millstream_camera::PixelGeometry;
use millstream_camera::columns::WAVEFORMS_DATASET;
use millstream_camera::format::SAMPLES;
use millstream_camera::picture::{self, Decision, Event};
use millstream_card_server::backing::BackingKind;
use millstream_evb::config::RunConfig;
use millstream_evb::core::BuIndex;
use millstream_fragment::unpack::unpack;
use millstream_report::{RunReport, Style, save, table, throughput};
use millstream_store::EventReader;

use crate::args::DemoOptions;
use crate::evb;
use crate::output::{print, print_line};

/// Decisions in the recorded events: 32 events × 50 samples × 432 patches.
const DECISIONS: u64 = 32 * 50 * 432;

pub(crate) fn run(options: &DemoOptions) -> Result<ExitCode, Box<dyn Error>> {
    let packed = match &options.data {
        Some(folder) => folder.clone(),
        None => find_data().ok_or("the camera data (data/sst1m of a checkout, share/millstream/data/sst1m of an installation) was not found; set its folder with --data FOLDER")?,
    };
    std::fs::create_dir_all(&options.out)
        .map_err(|error| format!("cannot create {}: {error}", options.out.display()))?;
    let out = options.out.canonicalize()?;
    let data = out.join("data");
    unpack(&packed, &data)?;
    for table in ["patches.csv", "pixels.csv"] {
        std::fs::copy(packed.join(table), data.join(table))
            .map_err(|error| format!("cannot copy {}: {error}", packed.join(table).display()))?;
    }

    print_line!(
        "1. Build the 32 recorded events of the SST-1M camera once. Check every checksum, compute the camera's"
    )?;
    print_line!("   trigger in card memory, and compare it with the recorded trigger decisions.\n")?;
    let kind = &options.memory_kind;
    let first = Pass { name: "camera", kind, replay: 1, batch: 2, slots: 3, verify: true, keep: 32 };
    let (config, report) = first.run(&out)?;
    let compared = report.trigger.as_ref().map_or(0, |trigger| trigger.decisions_compared);
    if report.derived().success && compared != DECISIONS {
        return Err(format!("{compared} decisions were compared, expected {DECISIONS}").into());
    }
    if !report.derived().success {
        return Ok(evb::exit_code(&report));
    }
    let display = draw_brightest(&config, &data, &out)?;

    print_line!(
        "\n2. Build the events {} times with consecutive event numbers, for throughput.\n",
        options.replay
    )?;
    let second =
        Pass { name: "replay", kind, replay: options.replay, batch: 32, slots: 8, verify: false, keep: 0 };
    let (_, replayed) = second.run(&out)?;
    let rate = out.join("replay.svg");
    save(&rate, &throughput::draw(&replayed))?;

    print_line!("\nresults in {}", out.display())?;
    print_line!("  camera.bu0.h5, camera.bu1.h5  accepted events (docs/output.md)")?;
    print_line!("  camera.json, replay.json      reports of the two runs")?;
    print_line!("  {}  an accepted event with its triggered patches", file_name(&display))?;
    print_line!("  {}  throughput over time", file_name(&rate))?;
    print_line!(
        "  camera.toml, replay.toml      configurations for: millstream evb run {}",
        out.join("camera.toml").display()
    )?;
    Ok(evb::exit_code(&replayed))
}

fn file_name(path: &Path) -> String {
    format!("{:28}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// The camera data: of a checkout, searched upwards from the working directory and from the program, or of an installation,
/// `share/millstream` beside the program's folder.
pub(crate) fn find_data() -> Option<PathBuf> {
    let here = std::env::current_dir().ok();
    let program = std::env::current_exe().ok();
    let starts = here.iter().chain(program.iter());
    let checkout = starts.flat_map(|path| path.ancestors()).map(|folder| folder.join("data/sst1m"));
    let prefix = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    let installed = prefix.map(|prefix| prefix.join("share/millstream/data/sst1m"));
    checkout.chain(installed).find(|path| path.is_dir())
}

/// One run of the demonstration.
struct Pass<'a> {
    name: &'static str,
    kind: &'a BackingKind,
    replay: u64,
    batch: u32,
    slots: u32,
    verify: bool,
    keep: u64,
}

impl Pass<'_> {
    fn run(&self, out: &Path) -> Result<(RunConfig, RunReport), Box<dyn Error>> {
        let path = out.join(format!("{}.toml", self.name));
        save(&path, &self.configuration())?;
        let config = evb::load(&path, None)?;
        let report = evb::run_checked(&config)?;
        save(&out.join(format!("{}.json", self.name)), &report.to_json())?;
        print(format_args!("{}", table::render(&report, Style::of(&std::io::stdout()))))?;
        Ok((config, report))
    }

    fn configuration(&self) -> String {
        let Self { name, kind, replay, batch, slots, verify, keep } = self;
        let mut text = format!(
            "# Three crates of a camera, two builder units with a card each.\n\
             [run]\nname = \"{name}\"\nbatch = {batch}\nreplay = {replay}\n\
             # A slow machine is no fault here.\ntimeout_ms = 30000\ndrain_timeout_ms = 5000\n\n\
             [check]\nreference_decisions = \"data/decisions.mfs\"\n",
        );
        if *keep > 0 {
            text += &format!("\n[output]\ndirectory = \".\"\nmax_events = {keep}\nreplace = true\n");
        }
        for crate_number in 1..=3 {
            text += &format!(
                "\n[[readout]]\nname = \"crate{crate_number}\"\ninput = \"data/crate{crate_number}.mfs\"\n"
            );
        }
        for unit in 0..2 {
            text += &format!(
                "\n[[builder]]\nname = \"bu{unit}\"\ncard = \"card{unit}\"\nslots = {slots}\n\n\
                 [[card]]\nname = \"card{unit}\"\nkind = \"{kind}\"\nmemory = \"128MiB\"\nkernel = \"cluster7\"\n\
                 patches = \"data/patches.csv\"\nthreshold = 336\nverify = {verify}\n"
            );
        }
        text
    }
}

/// Draws the stored event with the most decision bits set.
fn draw_brightest(config: &RunConfig, data: &Path, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let mut best: Option<(usize, u64, Vec<i16>, Vec<Decision>)> = None;
    let builders = (0..config.builders.len()).map(|bu| BuIndex(bu as u16));
    for path in builders.flat_map(|bu| evb::stored(config, bu).paths) {
        let file = EventReader::open(&path)?;
        for (row, &number) in file.numbers().iter().enumerate() {
            let Some(trigger) = file.trigger(row)? else { continue };
            if best.as_ref().is_none_or(|(set, ..)| trigger.set.len() > *set) {
                let triggered =
                    trigger.set.iter().map(|d| Decision { sample: d.sample, patch: d.patch }).collect();
                best = Some((trigger.set.len(), number, file.row_i16(WAVEFORMS_DATASET, row)?, triggered));
            }
        }
    }
    let (_, number, waveforms, triggered) = best.ok_or("no event was stored")?;
    let event =
        Event { run: &config.name, number, waveforms: &waveforms, samples: SAMPLES, triggered: &triggered };
    let svg = picture::draw(&PixelGeometry::load(&data.join("pixels.csv"))?, &event)?;
    let path = out.join(format!("event-{number}.svg"));
    save(&path, &svg)?;
    Ok(path)
}
