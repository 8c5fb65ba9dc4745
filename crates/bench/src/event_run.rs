//! Runs of the event builder that benchmarks measure.

use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};

use millstream_report::{RunReport, save};

/// Runs a configuration in `folder`, which has its inputs. Returns the report of a run that succeeded.
pub(crate) fn run(program: &Path, folder: &Path, configuration: &str) -> Result<RunReport, Box<dyn Error>> {
    let path = folder.join("bench.toml");
    save(&path, configuration)?;
    let json = folder.join("bench.json");
    let output = Command::new(program)
        .args(["evb", "run", "--json"])
        .args([&json, &path])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()?;
    // A failed run writes a report too, unless it could not start.
    let report = std::fs::read(&json).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
    std::fs::remove_file(&json)?;
    let report: RunReport = serde_json::from_slice(&report)?;
    match report.derived() {
        derived if derived.success => Ok(report),
        derived => Err(format!("{}: the run failed: {}", path.display(), derived.problems.join("; ")).into()),
    }
}
