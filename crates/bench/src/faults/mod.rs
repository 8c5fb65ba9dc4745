//! `millstream bench faults`: what a run of the event builder loses when one of its processes fails.
//!
//! Each case is a run of real processes on generated events, with one fault in its middle. The figures come
//! from the run's report and from its event files. For faults of a source, the last readout unit receives datagrams from
//! this process. For faults of a disk, `strace` changes the writes of one builder unit's storage thread. For faults of a link,
//! one unit runs in a network namespace of its own.

mod hosts;
mod process;
mod source;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_report::{RunReport, save};

use self::hosts::Hosts;
use self::process::{Fault, Victim, has_strace, inject_into_storage, is_running, processes_of};
use self::source::{FrontEnd, FrontEndLoad};
use crate::process_usage::children;
use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "faults",
    title: "Event builder with faults",
    measures: "Events of a run that are not in its files after one process was killed, stopped or slowed down in its middle, \
               a source sent corrupt, late or duplicate datagrams, a disk was full or slow, or the link of a unit's host was cut \
               or lost, duplicated or delayed packets; events that were built \
               again; the time to recover, which is the longest time without a finished event; the exit code of the run; \
               and processes and partial files that the run left behind. Each unit may join again once, and a standby manager takes over.",
    baseline: "the events of the run",
    values: "the largest number of all rounds; for the time to recover the median, and the longest if there are \
             several rounds",
    command: "make bench-faults",
};

/// Readout units and builder units.
const SHAPES: [(usize, usize); 3] = [(1, 1), (3, 2), (4, 4)];
/// Events of a run, and their rate.
const EVENTS: u64 = 2500;
const RATE: u32 = 1000;
/// Events in the files when the fault happens.
const EVENTS_BEFORE: u64 = 500;
/// Payload of a fragment.
const FRAGMENT: usize = 1024;
/// Time of a short cut.
const SHORT_CUT: Duration = Duration::from_millis(200);
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

/// What became of the run, or of several: the largest numbers, and the median time to recover.
#[derive(Clone, Debug)]
struct Outcome {
    lost: u64,
    /// Incomplete or corrupt events in the files.
    damaged: u64,
    rebuilt: u64,
    time_to_recover: Duration,
    /// Of several runs.
    longest_recovery: Option<Duration>,
    exit_code: i32,
    left_over: usize,
    went_on_without: Vec<String>,
    joined: Vec<String>,
}

/// Runs all cases whose names contain one of the words, or all without words, each `rounds` times. `program` is the path of
/// `millstream`.
/// With `document`, writes the matrix into that page, between its marks; rows of cases that did not run stay.
///
/// # Errors
/// The first case that could not be run.
pub fn run(
    program: &Path,
    out: &Path,
    only: &[String],
    rounds: usize,
    document: Option<&Path>,
) -> Result<Table, Box<dyn Error>> {
    let folder = out.join("faults");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let folder = folder.canonicalize()?;
    let mut table = Table::new(BENCHMARK, rounds);
    let mut rows = BTreeMap::new();
    let has_strace = has_strace();
    if !has_strace {
        table.not_measured("faults of a disk", "strace is not installed");
    }
    let has_hosts = hosts::are_possible();
    if !has_hosts {
        table.not_measured("faults of a link", "network namespaces need root and iproute2");
    }
    let selected = cases().filter(|case| crate::NameFilter(only).selects(&case.name()));
    let is_possible = |case: &Case| match case.victim {
        Victim::Disk => has_strace,
        victim => has_hosts || !victim.is_link(),
    };
    for case in selected.filter(is_possible) {
        let mut outcomes = Vec::with_capacity(rounds);
        for _ in 0..rounds.max(1) {
            let outcome = case.run(program, &folder).map_err(|error| format!("{}: {error}", case.name()))?;
            eprintln!("{}: {outcome:?}", case.name());
            outcomes.push(outcome);
        }
        let Some(outcome) = Outcome::of_rounds(&outcomes) else { continue };
        rows.insert(case.cells(), outcome.row(&case));
        outcome.add_figures(&case.name(), &mut table);
    }
    print!("{}", matrix(&rows));
    if let Some(document) = document {
        write_matrix(document, rows)?;
    }
    Ok(table)
}

fn cases() -> impl Iterator<Item = Case> {
    SHAPES.into_iter().flat_map(|(readouts, builders)| {
        Victim::ALL.into_iter().flat_map(move |victim| {
            victim.faults().iter().map(move |&fault| Case { readouts, builders, victim, fault })
        })
    })
}

/// The matrix of the cases that have a row, by their first cells.
fn matrix(rows: &BTreeMap<String, String>) -> String {
    let mut text = String::from(
        "| units | what | fault | events lost | damaged | rebuilt | time to recover | exit code | went on without | joined | left over |\n\
         |---|---|---|--:|--:|--:|--:|--:|---|---|--:|\n",
    );
    for row in cases().filter_map(|case| rows.get(&case.cells())) {
        text.push_str(row);
        text.push('\n');
    }
    text
}

/// Writes the matrix between the marks of the page. Rows of cases without a new one stay.
fn write_matrix(document: &Path, mut rows: BTreeMap<String, String>) -> Result<(), Box<dyn Error>> {
    let page = std::fs::read_to_string(document)
        .map_err(|error| format!("cannot read {}: {error}", document.display()))?;
    let [begin, end] = MARKS;
    let marks = page.find(begin).zip(page.find(end)).filter(|(from, to)| from < to);
    let (from, to) = marks.ok_or_else(|| format!("{}: no {begin} before {end}", document.display()))?;
    for case in cases().map(|case| case.cells()) {
        if let Some(row) = page[from..to].lines().find(|line| line.starts_with(&case)) {
            rows.entry(case).or_insert_with(|| row.to_owned());
        }
    }
    let page = format!("{}{begin}\n{}{}", &page[..from], matrix(&rows), &page[to..]);
    Ok(save(document, &page)?)
}

impl Case {
    fn name(&self) -> String {
        let Case { readouts, builders, victim, fault } = self;
        format!("{readouts}→{builders}, {}, {}", victim.name(), fault.name())
    }

    /// The first cells of its row.
    fn cells(&self) -> String {
        let Case { readouts, builders, victim, fault } = self;
        format!("| {readouts}→{builders} | {} | {} |", victim.name(), fault.name())
    }

    fn run(&self, program: &Path, folder: &Path) -> Result<Outcome, Box<dyn Error>> {
        let output = folder.join("events");
        let _ = std::fs::remove_dir_all(&output);
        let (config, json) = (folder.join("faults.toml"), folder.join("faults.json"));
        let _ = std::fs::remove_file(&json);
        // Free a moment ago; the run fails if another process takes it.
        let port = UdpSocket::bind("127.0.0.1:0")?.local_addr()?;
        save(&config, &self.configuration(&output, port))?;
        let hosts = self.victim.is_link().then(Hosts::new).transpose()?;
        let mut command = match &hosts {
            None => Command::new(program),
            Some(hosts) => hosts.command(program),
        };
        command.args(["evb", "run", "--json"]).args([&json, &config]);
        if let Some(hosts) = &hosts {
            let through = hosts.write_launcher(folder, self.victim, self.fault, self.last_unit())?;
            command.arg("--launcher").arg(through);
        }
        let mut launcher =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let injected = match self.inject(&mut launcher, &output, port, hosts.as_ref()) {
            Ok(injected) => injected,
            Err(error) => {
                let _ = launcher.kill();
                let _ = launcher.wait();
                return Err(error);
            }
        };
        let Injected { mut processes, strace, front_end } = injected;
        let until = Instant::now() + LIMIT;
        let status = loop {
            // Units that join again start after the fault.
            processes.extend(children(launcher.id()));
            if let Some(status) = launcher.try_wait()? {
                break status;
            }
            if Instant::now() > until {
                launcher.kill()?;
                launcher.wait()?;
                return Err(format!("the run did not end within {LIMIT:?}").into());
            }
            processes.sort_unstable();
            processes.dedup();
            std::thread::sleep(Duration::from_millis(20));
        };
        drop(front_end);
        if let Some(mut strace) = strace {
            // It ends with the thread that it is attached to.
            let _ = strace.kill();
            strace.wait()?;
        }
        processes.sort_unstable();
        processes.dedup();
        let left = processes.iter().filter(|pid| is_running(**pid)).count() + partial_files(&output)?.len();
        let report: RunReport = serde_json::from_slice(
            &std::fs::read(&json).map_err(|error| format!("cannot read {}: {error}", json.display()))?,
        )?;
        std::fs::remove_dir_all(&output)?;
        Ok(Outcome::of(&report, status.code().unwrap_or(-1), left))
    }

    /// Waits until the run is in its middle and injects the fault.
    fn inject(
        &self,
        launcher: &mut Child,
        output: &Path,
        port: SocketAddr,
        hosts: Option<&Hosts>,
    ) -> Result<Injected, Box<dyn Error>> {
        let until = Instant::now() + LIMIT;
        let mut front_end = None;
        while stored(output)? < EVENTS_BEFORE {
            if let Some(status) = launcher.try_wait()? {
                return Err(format!("the run ended before the fault: {status}").into());
            }
            if Instant::now() > until {
                return Err(format!("the run did not store {EVENTS_BEFORE} events within {LIMIT:?}").into());
            }
            if self.victim == Victim::Source && front_end.is_none() && has_event_files(output)? {
                front_end = Some(FrontEnd::start(FrontEndLoad {
                    to: port,
                    first_source: self.first_source(self.readouts - 1),
                    events: EVENTS,
                    rate: RATE,
                    len: FRAGMENT,
                    fault: self.fault,
                })?);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let processes = processes_of(launcher.id())?;
        let mut strace = None;
        if let Some(front_end) = &front_end {
            front_end.inject();
        } else if let Some(hosts) = hosts {
            self.cut(hosts)?;
        } else {
            let victim =
                processes.iter().find(|process| self.victim.is(process, self.readouts, self.builders));
            let victim = victim.ok_or("the process that was to fail is not there")?;
            match self.victim {
                Victim::Disk => strace = Some(inject_into_storage(victim.pid, self.fault)?),
                _ => self.fault.inject(victim.pid)?,
            }
        }
        Ok(Injected { processes: processes.iter().map(|process| process.pid).collect(), strace, front_end })
    }

    /// Cuts the link. Faults of single packets are there from the start of the unit.
    fn cut(&self, hosts: &Hosts) -> Result<(), std::io::Error> {
        if matches!(self.fault, Fault::CutShortly | Fault::CutForEver) {
            hosts.cut()?;
        }
        if self.fault == Fault::CutShortly {
            std::thread::sleep(SHORT_CUT);
            hosts.restore()?;
        }
        Ok(())
    }

    /// The unit whose host has the link.
    fn last_unit(&self) -> usize {
        match self.victim {
            Victim::BuilderLink => self.builders - 1,
            _ => self.readouts - 1,
        }
    }

    fn first_source(&self, readout: usize) -> u32 {
        // At most four readout units.
        readout as u32 * 2
    }

    fn configuration(&self, output: &Path, port: SocketAddr) -> String {
        let listen = match self.victim.is_link() {
            true => format!("listen = \"{}:0\"\n", hosts::ADDRESS),
            false => String::new(),
        };
        let mut text = format!(
            "[run]\nname = \"faults\"\nbatch = 8\nevents = {EVENTS}\n{listen}[recovery]\nreadout_loss = \"deliver\"\nrestarts = 1\n\
             standby = true\n[output]\ndirectory = {output:?}\nevents = \"all\"\n"
        );
        for unit in 0..self.readouts {
            let first = self.first_source(unit);
            if self.victim == Victim::Source && unit + 1 == self.readouts {
                let _ = write!(
                    text,
                    "[[readout]]\nname = \"ru{unit}\"\n[readout.udp]\nlisten = \"{port}\"\nfirst_source = {first}\n\
                     sources = 2\nmax_len = {FRAGMENT}\ngive_up_ms = 100\n"
                );
                continue;
            }
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
        // While the manager is lost there is no sample, so the time is that between samples with different counts.
        let (mut longest, mut last) = (0.0_f64, None);
        for sample in &report.samples {
            let (events, at) = *last.get_or_insert((sample.events, sample.elapsed_s.0));
            longest = longest.max(sample.elapsed_s.0 - at);
            if sample.events != events {
                last = Some((sample.events, sample.elapsed_s.0));
            }
        }
        let incomplete = report.fragment_accounting.of(millstream_report::FragmentOutcome::Incomplete);
        let discarded = report.fragment_accounting.of(millstream_report::FragmentOutcome::Discarded);
        let corrupt = discarded.filter(|count| count.reason == "corrupt");
        Outcome {
            lost: EVENTS.saturating_sub(report.stored_events),
            damaged: incomplete.map(|count| count.events).sum::<u64>()
                + corrupt.map(|count| count.events).sum::<u64>(),
            rebuilt: report.fragment_accounting.events_rebuilt,
            time_to_recover: Duration::from_secs_f64(longest.max(0.0)),
            longest_recovery: None,
            exit_code,
            left_over,
            went_on_without: report.recovered.clone(),
            joined: report.joined.clone(),
        }
    }

    /// The worst of several runs, with the median time to recover.
    fn of_rounds(outcomes: &[Outcome]) -> Option<Outcome> {
        let times: Vec<f64> = outcomes.iter().map(|outcome| outcome.time_to_recover.as_secs_f64()).collect();
        let mut worst =
            outcomes.iter().max_by_key(|run| (run.lost, run.damaged, run.time_to_recover))?.clone();
        for run in outcomes {
            worst.rebuilt = worst.rebuilt.max(run.rebuilt);
            worst.damaged = worst.damaged.max(run.damaged);
            worst.exit_code = worst.exit_code.max(run.exit_code);
            worst.left_over = worst.left_over.max(run.left_over);
        }
        let longest = outcomes.iter().map(|outcome| outcome.time_to_recover).max();
        worst.longest_recovery = longest.filter(|_| outcomes.len() > 1);
        worst.time_to_recover = median(&times).map(Duration::from_secs_f64)?;
        Some(worst)
    }

    /// The row of the matrix.
    fn row(&self, case: &Case) -> String {
        let Outcome {
            lost,
            damaged,
            rebuilt,
            time_to_recover,
            longest_recovery,
            exit_code,
            left_over,
            went_on_without,
            joined,
        } = self;
        let longest = longest_recovery.map(|time| format!(", at most {:.1} s", time.as_secs_f64()));
        let longest = longest.unwrap_or_default();
        let list = |names: &[String]| if names.is_empty() { "–".to_owned() } else { names.join(", ") };
        let (without, joined) = (list(went_on_without), list(joined));
        format!(
            "{} {lost} | {damaged} | {rebuilt} | {:.1} s{longest} | {exit_code} | {without} | {joined} | {left_over} |",
            case.cells(),
            time_to_recover.as_secs_f64(),
        )
    }

    fn add_figures(&self, name: &str, table: &mut Table) {
        let events = EVENTS as f64;
        table.push(Figure::with_baseline(format!("{name}: lost"), self.lost as f64, "events", events));
        table.push(Figure::with_baseline(format!("{name}: damaged"), self.damaged as f64, "events", events));
        table.push(Figure::with_baseline(format!("{name}: rebuilt"), self.rebuilt as f64, "events", events));
        let time = self.time_to_recover.as_secs_f64();
        table.push(Figure::without_baseline(format!("{name}: time to recover"), time, "s"));
        if let Some(longest) = self.longest_recovery {
            let name = format!("{name}: longest time to recover");
            table.push(Figure::without_baseline(name, longest.as_secs_f64(), "s"));
        }
        table.push(Figure::without_baseline(format!("{name}: exit code"), self.exit_code.into(), ""));
        table.push(Figure::without_baseline(format!("{name}: left over"), self.left_over as f64, ""));
    }
}

/// A run with its fault.
struct Injected {
    /// Its processes at the time of the fault.
    processes: Vec<u32>,
    strace: Option<Child>,
    front_end: Option<FrontEnd>,
}

/// Whether all builder units are about to start: they have made their files.
fn has_event_files(output: &Path) -> Result<bool, std::io::Error> {
    Ok(!partial_files(output)?.is_empty())
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
    fn new_rows_replace_those_of_their_cases_between_the_marks_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("page.md");
        let [first, second] = [0, 5].map(|at| cases().nth(at).unwrap().cells());
        let old = BTreeMap::from([&first, &second].map(|case| (case.clone(), format!("{case} old |"))));
        let text =
            |matrix: &str| format!("before\n{}\n{matrix}{}\n{first} outside |\nafter\n", MARKS[0], MARKS[1]);
        std::fs::write(&page, text(&format!("{}| 9→9 | gone | killed | old |\n", matrix(&old)))).unwrap();
        let new = BTreeMap::from([(second.clone(), format!("{second} new |"))]);
        write_matrix(&page, new.clone()).unwrap();
        let expected = BTreeMap::from([
            (first.clone(), format!("{first} old |")),
            (second, new.into_values().next().unwrap()),
        ]);
        assert_eq!(std::fs::read_to_string(&page).unwrap(), text(&matrix(&expected)));
        std::fs::write(&page, "no marks").unwrap();
        let error = write_matrix(&page, BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("fault matrix: begin"), "{error}");
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
    fn the_time_to_recover_is_the_longest_time_without_an_event() {
        let sample = |elapsed: f64, events| millstream_report::ProgressSample {
            elapsed_s: millstream_report::Seconds(elapsed),
            events,
            ..Default::default()
        };
        let samples = vec![sample(0.1, 0), sample(0.2, 5), sample(0.3, 5), sample(0.6, 5), sample(0.7, 9)];
        let report = RunReport { samples, stored_events: EVENTS, ..RunReport::default() };
        let outcome = Outcome::of(&report, 0, 0);
        assert_eq!((outcome.lost, outcome.time_to_recover.as_millis()), (0, 500));
        let later =
            |ms, lost| Outcome { time_to_recover: Duration::from_millis(ms), lost, ..outcome.clone() };
        let of_three = Outcome::of_rounds(&[later(300, 0), later(200, 7), later(900, 0)]).unwrap();
        assert_eq!((of_three.lost, of_three.time_to_recover.as_millis()), (7, 300));
        assert_eq!(of_three.longest_recovery, Some(Duration::from_millis(900)));
    }
}
