//! `millstream stencil`: a stencil job on leased or emulated cards.

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_card_server::{CardConfig, Lifetime, NetworkConfig, serve_with};
use millstream_offload::emulated::start_cards;
use millstream_offload::file::GridFile;
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::leased::{CardAddress, LeaseTerms, LeasedCards};
use millstream_offload::plan::Plan;
use millstream_offload::recovery::{self, JobOptions};
use millstream_offload::timeline::{Breakdown, JobReport, StepKind};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_report::eprint_line;
use millstream_report::timeline::{Activity, Bar, Timeline};
use millstream_report::{Progress, save};
use millstream_tls::Security;
use rustix::fs::{Access, access};

use crate::args::stencil::StencilOptions;
use crate::card::Names;
use crate::interrupt::Interrupt;
use crate::output::{is_standard_output, print, print_line};

/// Leases end this long after this process dies; cards leased to another node are awaited this long.
const TERMS: LeaseTerms =
    LeaseTerms { duration: Duration::from_secs(5), acquire_timeout: Duration::from_secs(5) };

/// Memory banks of a card that is started for a job.
const BANKS: u32 = 4;

/// Rows and columns, written as `ROWSxCOLUMNS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridSize {
    rows: u64,
    columns: u64,
}

impl FromStr for GridSize {
    type Err = String;

    fn from_str(text: &str) -> Result<GridSize, String> {
        let number = |text: &str| text.parse().ok().filter(|&number: &u64| number > 0);
        let sides = text.split_once(['x', 'X', '×']);
        match sides.map(|(rows, columns)| (number(rows), number(columns))) {
            Some((Some(rows), Some(columns))) => {
                let bytes = rows.checked_mul(columns).and_then(|points| points.checked_mul(8));
                match bytes.filter(|&bytes| bytes <= isize::MAX as u64) {
                    Some(_) => Ok(GridSize { rows, columns }),
                    None => Err("the grid exceeds the address space".to_owned()),
                }
            }
            _ => Err("expected ROWSxCOLUMNS, for example 16384x16384".to_owned()),
        }
    }
}

pub(crate) fn run(options: &StencilOptions) -> Result<ExitCode, Box<dyn Error>> {
    if let Some(bytes) = options.serve_card {
        return serve_card(bytes);
    }
    let shape = match (&options.input, options.grid) {
        (Some(file), _) => file.shape()?,
        (None, Some(GridSize { rows, columns })) => Shape { rows, columns, double: options.float64 },
        (None, None) => return Err("no grid: give --grid ROWSxCOLUMNS or --input FILE".into()),
    };
    let json = options.json.as_deref().filter(|path| !is_standard_output(path));
    let outputs = [options.output.as_ref().map(GridFile::path), json, options.svg.as_deref()];
    outputs.into_iter().flatten().try_for_each(check_writable)?;
    let device = device::open(&DeviceSelector::from_environment())?;
    eprint_line!("grid of {}x{}, {} MiB", shape.rows, shape.columns, shape.bytes() >> 20);
    let mut grid = Grid::zeros(shape, Some(&device))?;
    match &options.input {
        Some(file) => file.read(&mut grid)?,
        None => grid.generate(options.seed),
    }
    // Before the job overwrites the grid.
    let reference = options.verify.then(|| {
        eprint_line!("computing the reference on this host");
        grid.reference(options.iterations)
    });

    let own = if options.cards.is_empty() {
        let memories = vec![u64::MAX; options.local];
        let plan = Plan::new(shape, options.iterations, &memories, options.depth)?;
        let count = plan.tiles.len();
        eprint_line!("starting {count} emulated card{}", if count == 1 { "" } else { "s" });
        start_cards(&std::env::current_exe()?, &plan)?
    } else {
        Vec::new()
    };
    let names = Names::new(options.site.as_deref());
    let places = match own.is_empty() {
        true => resolve(&names, &options.cards)?,
        false => own.iter().map(|card| CardAddress::from(card.address())).collect(),
    };
    let spares = resolve(&names, &options.spares)?;
    let mut spare = Grid::zeros(shape, Some(&device))?;
    let mut row = LeasedCards::acquire(&device, &places, &spares, TERMS)?;
    let job_options = JobOptions {
        iterations: options.iterations,
        depth: options.depth,
        checkpoint_interval: NonZeroU64::new(options.checkpoint),
    };
    let report = compute(&job_options, &mut grid, &mut spare, &mut row)?;
    row.release()?;
    drop(own);
    if let Some(reference) = &reference {
        grid.compare(reference)?;
    }
    let printed = if options.json.is_some() && json.is_none() {
        print_line!("{}", serde_json::to_string_pretty(&report)?)
    } else {
        print(format_args!("{}", table(&report, reference.is_some())))
    };
    if let Some(file) = &options.output {
        file.write(&grid)?;
    }
    if let Some(path) = json {
        save(path, &serde_json::to_string_pretty(&report)?)?;
    }
    if let Some(path) = &options.svg {
        save(path, &picture(&report).draw())?;
    }
    printed?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a path where no file can be written, before a run that takes long.
fn check_writable(path: &Path) -> Result<(), String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let writable = match path.is_dir() {
        true => Err(io::ErrorKind::IsADirectory.into()),
        false if folder.is_file() => Err(io::ErrorKind::NotADirectory.into()),
        false => access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(io::Error::from),
    };
    writable.map_err(|error| format!("{}: cannot write: {error}", path.display()))
}

/// The addresses of cards given by name or by address.
fn resolve(names: &Names, cards: &[String]) -> Result<Vec<CardAddress>, Box<dyn Error>> {
    let place = |card: &String| Ok(CardAddress { name: card.clone(), address: names.address(card)? });
    cards.iter().map(place).collect()
}

/// Runs the job with a progress bar; Ctrl-C stops it.
fn compute(
    options: &JobOptions,
    grid: &mut Grid,
    spare: &mut Grid,
    row: &mut LeasedCards,
) -> Result<JobReport, Box<dyn Error>> {
    let interrupt = Interrupt::listen()?;
    let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let bar = Progress::new("stencil", options.iterations);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if interrupt.flow().is_break() {
                    stop.store(true, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let outcome = recovery::run(row, grid, spare, options, &|sweeps| bar.set_position(sweeps), &stop);
        over.store(true, Ordering::Relaxed);
        Ok(outcome?)
    })
}

/// Serves one card until standard input ends.
fn serve_card(bytes: u64) -> Result<ExitCode, Box<dyn Error>> {
    let name = format!("stencil-{}", std::process::id()).parse()?;
    let bank = bytes.div_ceil(u64::from(BANKS)).next_multiple_of(2 << 20);
    let mut config = CardConfig::new(name, bank);
    config.bank_count = BANKS;
    config.prefault = true;
    config.huge_pages = true;
    config.network = Some(NetworkConfig {
        device: device::open(&DeviceSelector::from_environment())?,
        address: "127.0.0.1:0".to_owned(),
    });
    config.security = Security::from_environment()?;
    let stdin = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
    config.lifetime = Lifetime::Launcher(stdin);
    serve_with(config, |address| {
        if let Some(address) = address {
            // Without a reader it serves until its standard input ends.
            let _ = print_line!("{address}");
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn table(report: &JobReport, verified: bool) -> String {
    let mut out = String::new();
    let [rows, columns] = report.grid;
    let cards = report.cards.len();
    let plural = if cards == 1 { "" } else { "s" };
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "stencil  {rows}x{columns} {}, {} sweeps on {cards} card{plural}, {} between exchanges\n",
        report.element, report.iterations, report.depth
    );
    let kinds = StepKind::ALL.map(|kind| format!("{:>11}", kind.name())).concat();
    let _ = writeln!(out, "  {:>7}{:>8}{:>12}{:>12}{kinds}   [ms]", "block", "sweeps", "wall", "per sweep");
    let line = |out: &mut String, name: &str, sweeps: u64, wall: f64, mean: &Breakdown| {
        let per = if sweeps == 0 { 0.0 } else { wall / sweeps as f64 };
        let times = StepKind::ALL.map(|kind| format!("{:>11.2}", mean.of(kind) * 1e3)).concat();
        let _ = writeln!(out, "  {name:>7}{sweeps:>8}{:>12.2}{:>12.3}{times}", wall * 1e3, per * 1e3);
    };
    for (index, block) in report.blocks.iter().enumerate() {
        line(&mut out, &index.to_string(), block.sweeps, block.wall_s, &block.mean);
    }
    line(&mut out, "total", report.iterations, report.wall_s, &report.mean);
    let gigabytes = report.bytes.map(|bytes| bytes as f64 / 1e9);
    let _ = writeln!(
        out,
        "\n  {:.2} G points/s; written {:.3} GB, between cards {:.3} GB, read {:.3} GB",
        report.points_per_s / 1e9,
        gigabytes[0],
        gigabytes[1],
        gigabytes[2]
    );
    let _ = writeln!(out, "  times are means over the cards; overlapping steps count in full");
    for loss in &report.losses {
        let _ = writeln!(
            out,
            "  {:.2} s: lost {}, continued after sweep {} ({}); blocks and means cover the time since",
            loss.at_s,
            loss.cards.join(", "),
            loss.sweeps,
            loss.cause
        );
    }
    if verified {
        let _ = writeln!(out, "  every point equals the reference, bit for bit");
    }
    out
}

fn picture(report: &JobReport) -> Timeline {
    let colour = |kind| match kind {
        StepKind::Write => "#1a7f37",
        StepKind::Compute => "#0969da",
        StepKind::Halo => "#bf3989",
        StepKind::Read => "#bc4c00",
        StepKind::Checkpoint => "#8250df",
        StepKind::Wait => "#afb8c1",
    };
    let bar = |step: &millstream_offload::timeline::Step| Bar {
        lane: step.card,
        activity: StepKind::ALL.iter().position(|&kind| kind == step.kind).unwrap_or(0),
        start: step.start_s,
        end: step.end_s,
    };
    let [rows, columns] = report.grid;
    Timeline {
        title: format!("Stencil, {rows}×{columns} {}, {} sweeps", report.element, report.iterations),
        subtitle: format!(
            "{:.2} G points/s on {} cards, {} sweeps between two exchanges",
            report.points_per_s / 1e9,
            report.cards.len(),
            report.depth
        ),
        lanes: report.cards.clone(),
        activities: StepKind::ALL.map(|kind| Activity { name: kind.name(), colour: colour(kind) }).to_vec(),
        bars: report.steps.iter().map(bar).collect(),
    }
}
