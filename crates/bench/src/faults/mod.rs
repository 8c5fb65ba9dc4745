//! `millstream bench faults`: what a run of the event builder loses when one of its processes fails.
//!
//! Each case is a run of real processes on generated events, with one fault in its middle. The figures come
//! from the run's report and from its event files.

mod process;

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_report::{RunReport, save};

use self::process::{Fault, Victim, is_running, processes_of};
use crate::{Benchmark, Figure, Table};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "faults",
    title: "Event builder with faults",
    measures: "Events of a run that are not in its files after one process was killed, stopped or slowed down in its middle; \
               events that were built again; the longest time without a built event; the exit code of the run; and \
               processes and partial files that the run left behind.",
    baseline: "the events of the run",
    command: "make bench-faults",
};

/// Readout units and builder units.
const SHAPES: [(usize, usize); 2] = [(1, 1), (3, 2)];
/// Events of a run, and their rate.
const EVENTS: u64 = 4000;
const RATE: u32 = 1000;
/// Events in the files when the fault happens.
const EVENTS_BEFORE: u64 = 800;
/// Limit for the start of a run, and then for its end.
const LIMIT: Duration = Duration::from_secs(60);
const MARKS: [&str; 2] = ["<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"];

/// One run with a fault.
#[derive(Clone, Copy, Debug)]
struct Case {
    readouts: usize,
    builders: usize,
    victim: Victim,
    fault: Fault,
}

/// What became of the run.
#[derive(Debug)]
struct Outcome {
    lost: u64,
    incomplete: u64,
    rebuilt: u64,
    longest_pause: Duration,
    exit_code: i32,
    left_over: usize,
    went_on_without: Vec<String>,
}

/// Runs all cases whose names contain one of the words, or all without words. `program` is the path of `millstream`.
/// With `document`, writes the matrix into that page, between its marks.
///
/// # Errors
/// The first case that could not be run.
pub fn run(
    program: &Path,
    out: &Path,
    only: &[String],
    document: Option<&Path>,
) -> Result<Table, Box<dyn Error>> {
    let folder = out.join("faults");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let folder = folder.canonicalize()?;
    let mut table = Table::new(BENCHMARK, 1);
    let mut matrix = String::from(
        "| units | process | fault | events lost | incomplete | rebuilt | longest pause | exit code | went on without | left over |\n\
         |---|---|---|--:|--:|--:|--:|--:|---|--:|\n",
    );
    for case in cases().filter(|case| crate::NameFilter(only).selects(&case.name())) {
        let outcome = case.run(program, &folder).map_err(|error| format!("{}: {error}", case.name()))?;
        eprintln!("{}: {outcome:?}", case.name());
        let row = outcome.row(&case);
        let _ = writeln!(matrix, "{row}");
        outcome.add_figures(&case.name(), &mut table);
    }
    print!("{matrix}");
    if let Some(document) = document {
        write_matrix(document, &matrix)?;
    }
    Ok(table)
}

fn cases() -> impl Iterator<Item = Case> {
    SHAPES.into_iter().flat_map(|(readouts, builders)| {
        Victim::ALL.into_iter().flat_map(move |victim| {
            Fault::ALL.into_iter().map(move |fault| Case { readouts, builders, victim, fault })
        })
    })
}

/// Replaces what is between the marks of the page.
fn write_matrix(document: &Path, matrix: &str) -> Result<(), Box<dyn Error>> {
    let page = std::fs::read_to_string(document)
        .map_err(|error| format!("cannot read {}: {error}", document.display()))?;
    let [begin, end] = MARKS;
    let marks = page.find(begin).zip(page.find(end)).filter(|(from, to)| from < to);
    let (from, to) = marks.ok_or_else(|| format!("{}: no {begin} before {end}", document.display()))?;
    let page = format!("{}{begin}\n{matrix}{}", &page[..from], &page[to..]);
    Ok(save(document, &page)?)
}

impl Case {
    fn name(&self) -> String {
        let Case { readouts, builders, victim, fault } = self;
        format!("{readouts}→{builders}, {}, {}", victim.name(), fault.name())
    }

    fn run(&self, program: &Path, folder: &Path) -> Result<Outcome, Box<dyn Error>> {
        let output = folder.join("events");
        let _ = std::fs::remove_dir_all(&output);
        let (config, json) = (folder.join("faults.toml"), folder.join("faults.json"));
        let _ = std::fs::remove_file(&json);
        save(&config, &self.configuration(&output))?;
        let mut launcher = Command::new(program)
            .args(["evb", "run", "--json"])
            .args([&json, &config])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let processes = match self.inject(&mut launcher, &output) {
            Ok(processes) => processes,
            Err(error) => {
                let _ = launcher.kill();
                let _ = launcher.wait();
                return Err(error);
            }
        };
        let until = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = launcher.try_wait()? {
                break status;
            }
            if Instant::now() > until {
                launcher.kill()?;
                launcher.wait()?;
                return Err(format!("the run did not end within {LIMIT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let left = processes.iter().filter(|pid| is_running(**pid)).count() + partial_files(&output)?.len();
        let report: RunReport = serde_json::from_slice(
            &std::fs::read(&json).map_err(|error| format!("cannot read {}: {error}", json.display()))?,
        )?;
        std::fs::remove_dir_all(&output)?;
        Ok(Outcome::of(&report, status.code().unwrap_or(-1), left))
    }

    /// Waits until the run is in its middle and injects the fault. Returns the processes of the run.
    fn inject(&self, launcher: &mut Child, output: &Path) -> Result<Vec<u32>, Box<dyn Error>> {
        let until = Instant::now() + LIMIT;
        while stored(output)? < EVENTS_BEFORE {
            if let Some(status) = launcher.try_wait()? {
                return Err(format!("the run ended before the fault: {status}").into());
            }
            if Instant::now() > until {
                return Err(format!("the run did not store {EVENTS_BEFORE} events within {LIMIT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let processes = processes_of(launcher.id())?;
        let victim = processes.iter().find(|process| self.victim.is(process, self.readouts, self.builders));
        let victim = victim.ok_or("the process that was to fail is not there")?;
        self.fault.inject(victim.pid)?;
        Ok(processes.iter().map(|process| process.pid).collect())
    }

    fn configuration(&self, output: &Path) -> String {
        let mut text = format!(
            "[run]\nname = \"faults\"\nbatch = 8\nevents = {EVENTS}\n[recovery]\nreadout_loss = \"deliver\"\n\
             [output]\ndirectory = {output:?}\nevents = \"all\"\n"
        );
        for unit in 0..self.readouts {
            let first = unit * 2;
            let _ = write!(
                text,
                "[[readout]]\nname = \"ru{unit}\"\n[readout.generator]\nfirst_source = {first}\nsources = 2\n\
                 size = \"1KiB\"\nrate_hz = {RATE}.0\n"
            );
        }
        for unit in 0..self.builders {
            let _ = write!(
                text,
                "[[builder]]\nname = \"bu{unit}\"\ncard = \"card{unit}\"\nslots = 4\n\
                 [[card]]\nname = \"card{unit}\"\nmemory = \"64MiB\"\nkernel = \"verify\"\n"
            );
        }
        text
    }
}

impl Outcome {
    fn of(report: &RunReport, exit_code: i32, left_over: usize) -> Outcome {
        let mut longest = 0.0_f64;
        let mut last = None;
        for sample in &report.samples {
            match last {
                Some((events, at)) if events == sample.events => {
                    longest = longest.max(sample.elapsed_s.0 - at)
                }
                _ => last = Some((sample.events, sample.elapsed_s.0)),
            }
        }
        let incomplete = report.fragment_accounting.of(millstream_report::FragmentOutcome::Incomplete);
        Outcome {
            lost: EVENTS.saturating_sub(report.stored_events),
            incomplete: incomplete.map(|count| count.events).sum(),
            rebuilt: report.fragment_accounting.events_rebuilt,
            longest_pause: Duration::from_secs_f64(longest.max(0.0)),
            exit_code,
            left_over,
            went_on_without: report.recovered.clone(),
        }
    }

    /// The row of the matrix.
    fn row(&self, case: &Case) -> String {
        let Case { readouts, builders, victim, fault } = case;
        let Outcome { lost, incomplete, rebuilt, longest_pause, exit_code, left_over, went_on_without } =
            self;
        let without = if went_on_without.is_empty() { "–".to_owned() } else { went_on_without.join(", ") };
        format!(
            "| {readouts}→{builders} | {} | {} | {lost} | {incomplete} | {rebuilt} | {:.1} s | {exit_code} | {without} | {left_over} |",
            victim.name(),
            fault.name(),
            longest_pause.as_secs_f64(),
        )
    }

    fn add_figures(&self, name: &str, table: &mut Table) {
        let events = EVENTS as f64;
        table.push(Figure::with_baseline(format!("{name}: lost"), self.lost as f64, "events", events));
        table.push(Figure::with_baseline(
            format!("{name}: incomplete"),
            self.incomplete as f64,
            "events",
            events,
        ));
        table.push(Figure::with_baseline(format!("{name}: rebuilt"), self.rebuilt as f64, "events", events));
        let pause = self.longest_pause.as_secs_f64();
        table.push(Figure::without_baseline(format!("{name}: longest pause"), pause, "s"));
        table.push(Figure::without_baseline(format!("{name}: exit code"), self.exit_code.into(), ""));
        table.push(Figure::without_baseline(format!("{name}: left over"), self.left_over as f64, ""));
    }
}

/// Event files that are being written.
fn partial_files(output: &Path) -> Result<Vec<PathBuf>, std::io::Error> {
    let entries = match std::fs::read_dir(output) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, std::io::Error>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "partial")).collect())
}

/// Events that builder units have committed to their files (docs/output.md: the commit record).
fn stored(output: &Path) -> Result<u64, std::io::Error> {
    let mut events = 0;
    for path in partial_files(output)? {
        let bytes = std::fs::read(&path).unwrap_or_default();
        if let [b'M', b'S', b'E', b'V', b'E', b'N', b'T', b'S', count @ ..] = &bytes[..]
            && let Some(count) = count.first_chunk()
        {
            events += u64::from_le_bytes(*count);
        }
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_replaces_what_is_between_the_marks() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page.md");
        std::fs::write(&page, format!("before\n{}\nold\n{}\nafter\n", MARKS[0], MARKS[1])).unwrap();
        write_matrix(&page, "| new |\n").unwrap();
        let written = std::fs::read_to_string(&page).unwrap();
        assert_eq!(written, format!("before\n{}\n| new |\n{}\nafter\n", MARKS[0], MARKS[1]));
        std::fs::write(&page, "no marks").unwrap();
        assert!(write_matrix(&page, "").unwrap_err().to_string().contains("fault matrix: begin"));
    }

    #[test]
    fn cases_have_different_names() {
        let mut names: Vec<_> = cases().map(|case| case.name()).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn the_longest_pause_is_the_longest_time_without_an_event() {
        let sample = |elapsed: f64, events| millstream_report::ProgressSample {
            elapsed_s: millstream_report::Seconds(elapsed),
            events,
            ..Default::default()
        };
        let samples = vec![sample(0.1, 0), sample(0.2, 5), sample(0.3, 5), sample(0.6, 5), sample(0.7, 9)];
        let report = RunReport { samples, stored_events: EVENTS, ..RunReport::default() };
        let outcome = Outcome::of(&report, 0, 0);
        assert_eq!((outcome.lost, outcome.longest_pause.as_millis()), (0, 400));
    }
}
