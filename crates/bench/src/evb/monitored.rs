//! The cost of monitoring: runs under run control, with and without a reader of its metrics.

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use millstream_report::{RunReport, save};
use millstream_shm::ports;

use super::{Case, Kernel};
use crate::{Figure, Table, median};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Time between two readings of the metrics.
const PERIOD: Duration = Duration::from_millis(100);
/// Longest time of a run.
const LIMIT: Duration = Duration::from_secs(120);

/// Adds the rate of a run whose metrics are read, against that of a run whose metrics nobody reads.
pub(super) fn add_figure(
    table: &mut Table,
    program: &Path,
    folder: &Path,
    rounds: usize,
    seconds: f64,
) -> Outcome<()> {
    let case = Case { program, kernel: Kernel::Off, readouts: 2, builders: 2, batch: 16, joined: false };
    let probe = case.run(folder, 200)?;
    let rate = probe.events as f64 / probe.duration_s.0.max(1e-6);
    // Long enough for some readings.
    let replay = ((rate * seconds.max(2.0) / 32.0) as u64).clamp(200, 1_000_000);
    save(&folder.join("monitored.toml"), &case.configuration(replay))?;
    let control = RunControl::start(program, folder)?;
    let (mut read, mut unread) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for (rates, is_read) in [(&mut unread, false), (&mut read, true)] {
            let report = control.run(is_read)?;
            rates.push(report.payload_bytes.0 as f64 / report.duration_s.0 / 1e9);
        }
    }
    let (rate, baseline) = (median(&read).unwrap_or(0.0), median(&unread).unwrap_or(0.0));
    let name = "2 readout → 2 builder, batch 16, no kernel, metrics read";
    eprintln!("{name}: {rate:.2} GB/s, not read {baseline:.2} GB/s");
    table.push(Figure::with_baseline(name, rate, "GB/s", baseline));
    Ok(())
}

/// A run control process; dropping this value ends it.
struct RunControl<'a> {
    process: Child,
    program: &'a Path,
    folder: &'a Path,
    address: String,
}

impl Drop for RunControl<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl RunControl<'_> {
    fn start<'a>(program: &'a Path, folder: &'a Path) -> Outcome<RunControl<'a>> {
        let directory = folder.join("run-control");
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let address = format!("127.0.0.1:{}", ports::unused()?);
        let process = Command::new(program)
            .args(["evb", "control", "--listen", &address, "--directory"])
            .arg(&directory)
            .arg(folder.join("monitored.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let control = RunControl { process, program, folder, address };
        control.wait_for("configured", |_| true)?;
        Ok(control)
    }

    /// Runs the configuration once.
    fn run(&self, is_read: bool) -> Outcome<RunReport> {
        self.command_start()?;
        let mut last = Instant::now();
        self.wait_for("configured", |run_control| {
            if is_read && last.elapsed() >= PERIOD {
                last = Instant::now();
                return run_control
                    .read("/metrics")
                    .is_some_and(|text| text.contains("millstream_run_number"));
            }
            true
        })?;
        let reports = self.folder.join("run-control/reports");
        let files: Vec<_> = std::fs::read_dir(&reports)?.collect::<Result<_, _>>()?;
        let latest = files.iter().map(|file| file.path()).max().ok_or("run control wrote no report")?;
        Ok(serde_json::from_slice(&std::fs::read(latest)?)?)
    }

    fn command_start(&self) -> Outcome<()> {
        let output = Command::new(self.program)
            .args(["evb", "ctl", "--address", &self.address, "--token-file"])
            .arg(self.folder.join("run-control/token"))
            .arg("start")
            .output()?;
        match output.status.success() {
            true => Ok(()),
            false => Err(format!("evb ctl start: {}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    }

    /// Waits for a state; `meanwhile` is called every few milliseconds, and ends the wait with an error if it answers false.
    fn wait_for(&self, state: &str, mut meanwhile: impl FnMut(&Self) -> bool) -> Outcome<()> {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            if !meanwhile(self) {
                return Err("run control does not show its metrics".into());
            }
            // The same in runs whose metrics are not read.
            thread::sleep(PERIOD / 4);
            let answer = self.read("/api/v1/status").and_then(|text| {
                let (_, body) = text.split_once("\r\n\r\n")?;
                serde_json::from_str::<serde_json::Value>(body).ok()
            });
            match answer.as_ref().and_then(|answer| answer["state"].as_str()) {
                Some(found) if found == state => return Ok(()),
                Some("error") => return Err(format!("the run failed: {answer:?}").into()),
                _ => {}
            }
        }
        Err(format!("run control does not reach the state {state}").into())
    }

    /// The answer to a GET request; none before run control listens.
    fn read(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text)
    }
}
