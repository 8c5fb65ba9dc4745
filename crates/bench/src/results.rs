//! Results files: one JSON object a line, a header first, then one figure a line.

use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_report::{SaveError, save};
use serde::{Deserialize, Serialize};

use crate::{Figure, NotMeasured, Table};

/// The machine that a benchmark ran on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's model name, from `/proc/cpuinfo`.
    pub cpu: String,
    /// The processor's family and model numbers, as `6-85`; virtual machines often hide the model name.
    pub cpu_model: String,
    /// Logical processors that the benchmark could use.
    pub cores: usize,
    /// Whether the processor reports a hypervisor.
    pub virtual_machine: bool,
}

impl Machine {
    /// The machine that this process runs on.
    #[must_use]
    pub fn current() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let values = cpuinfo.lines().filter_map(|line| line.split_once(':'));
            let mut values = values.filter(|(key, _)| key.trim() == name);
            values.next().map(|(_, value)| value.trim().to_owned())
        };
        let numbers =
            [field("cpu family"), field("model")].map(|number| number.unwrap_or_else(|| "0".to_owned()));
        let flags = field("flags").unwrap_or_default();
        Self {
            cpu: field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpu_model: numbers.join("-"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            virtual_machine: flags.split_whitespace().any(|flag| flag == "hypervisor"),
        }
    }

    /// The name of this machine's folder of results.
    #[must_use]
    pub fn folder(&self) -> String {
        let text = format!("{} {} {} cores", self.cpu, self.cpu_model, self.cores).to_lowercase();
        let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    }
}

/// The first line of a results file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The benchmark's name.
    pub benchmark: String,
    /// Where it ran.
    pub machine: Machine,
    /// Release of the operating system's kernel.
    pub kernel: String,
    /// The commit of the checkout, with `+changes` if tracked files outside `docs` differ from it.
    pub commit: String,
    /// The day, as `2026-01-31` (UTC).
    pub date: String,
    /// Interleaved rounds.
    pub rounds: usize,
    /// Words that the names of the measured figures contain; empty if all were measured.
    pub only: Vec<String>,
    /// Arguments of the program. Older results have none, and no value of the fields below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// Cargo profile of the program; `debug` is that of `cargo build` without options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The commit of the checkout in which the program was built; none if its sources were in no repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub built_from: Option<String>,
    /// Figures without a value, or whose value is not over all rounds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_measured: Vec<NotMeasured>,
}

impl Header {
    /// A header for results of this process.
    fn current(table: &Table, only: &[String]) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            benchmark: table.benchmark().name.to_owned(),
            machine: Machine::current(),
            kernel: kernel.trim().to_owned(),
            commit: commit(),
            date: output_of("date", &["-u", "+%F"]).unwrap_or_default(),
            rounds: table.rounds(),
            only: only.to_owned(),
            arguments: std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect(),
            profile: option_env!("MILLSTREAM_BENCH_PROFILE").map(str::to_owned),
            built_from: option_env!("MILLSTREAM_BENCH_COMMIT").map(str::to_owned),
            not_measured: table.unmeasured().to_vec(),
        }
    }
}

/// The output of a command; `None` if it fails.
fn output_of(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The commit of the checkout in the working directory.
fn commit() -> String {
    let Some(commit) = output_of("git", &["rev-parse", "--short=10", "HEAD"]) else {
        return "unknown".to_owned();
    };
    match output_of("git", &["status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs"]) {
        Some(changes) if changes.is_empty() => commit,
        _ => format!("{commit}+changes"),
    }
}

/// A results file cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    /// A file or folder operation failed.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The file could not be saved.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A line is invalid.
    #[error("{}, line {line}: {cause}; run the benchmark again", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The error of the JSON parser.
        cause: serde_json::Error,
    },
    /// The results would replace a file with figures that they do not have.
    #[error(
        "{} lacks {} of {}: {}; run the whole benchmark, or remove the second file if these figures are no more",
        path.display(), count(missing), kept.display(), first_of(missing)
    )]
    Partial {
        /// The file of the results.
        path: PathBuf,
        /// The file that they would replace.
        kept: PathBuf,
        /// Names of the missing figures.
        missing: Vec<String>,
    },
    /// The file has no header.
    #[error("{}: empty results file; run the benchmark again", .0.display())]
    Empty(PathBuf),
}

fn count(figures: &[String]) -> String {
    format!("{} figure{}", figures.len(), if figures.len() == 1 { "" } else { "s" })
}

/// Some names, and how many more there are.
fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names[..names.len() - more].join("; ");
    if more == 0 { shown } else { format!("{shown}; and {more} more") }
}

/// The results of one run of one benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// Where, when and how they were measured.
    pub header: Header,
    /// The figures.
    pub figures: Vec<Figure>,
}

impl Results {
    /// The results in a table that this process measured. `only` are the words that selected its figures.
    #[must_use]
    pub fn of(table: &Table, only: &[String]) -> Self {
        Self { header: Header::current(table, only), figures: table.figures().to_vec() }
    }

    /// Names of the figures that other results have, but these do not.
    #[must_use]
    pub fn lacks(&self, other: &Results) -> Vec<String> {
        let missing = |figure: &&Figure| !self.figures.iter().any(|own| own.name == figure.name);
        other.figures.iter().filter(missing).map(|figure| figure.name.clone()).collect()
    }

    /// The file's text.
    ///
    /// # Panics
    /// Never: strings, numbers and booleans can always be written as JSON.
    #[must_use]
    pub fn to_json_lines(&self) -> String {
        let json = "plain data serialises";
        let mut text = serde_json::to_string(&self.header).expect(json);
        for figure in &self.figures {
            text.push('\n');
            text.push_str(&serde_json::to_string(figure).expect(json));
        }
        text.push('\n');
        text
    }

    /// Replaces the file atomically: readers see the old file or the whole new one.
    ///
    /// # Errors
    /// [`ResultsError`].
    pub fn write(&self, path: &Path) -> Result<(), ResultsError> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|cause| ResultsError::Io { path: folder.to_owned(), cause })?;
        }
        Ok(save(path, &self.to_json_lines())?)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ResultsError`].
    pub fn read(path: &Path) -> Result<Self, ResultsError> {
        let text = std::fs::read_to_string(path)
            .map_err(|cause| ResultsError::Io { path: path.to_owned(), cause })?;
        let wrong = |line| move |cause| ResultsError::Line { path: path.to_owned(), line, cause };
        let mut lines = (1..).zip(text.lines());
        let (_, first) = lines.next().ok_or_else(|| ResultsError::Empty(path.to_owned()))?;
        let header = serde_json::from_str(first).map_err(wrong(1))?;
        let figures = lines.map(|(line, text)| serde_json::from_str(text).map_err(wrong(line)));
        Ok(Self { header, figures: figures.collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::sample;

    #[test]
    fn a_results_file_has_a_header_and_one_figure_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/verbs.jsonl");
        let mut table = sample();
        table.not_measured("rate", "no device");
        let results = Results::of(&table, &["WRITE".to_owned()]);
        results.write(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[0]["benchmark"], &lines[0]["rounds"]), (&"verbs".into(), &3.into()));
        assert_eq!(lines[0]["not_measured"], serde_json::json!([{"name": "rate", "reason": "no device"}]));
        assert!(!results.header.arguments.is_empty() || std::env::args_os().len() == 1);
        assert_eq!(lines[0]["profile"], results.header.profile.as_deref().unwrap());
        assert_eq!(lines[1]["ratio"], 0.9);
        assert_eq!(lines[2]["baseline"], serde_json::Value::Null);
        assert_eq!(Results::read(&path).unwrap(), results);
    }

    #[test]
    fn a_bad_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("verbs.jsonl");
        let mut text = Results::of(&sample(), &[]).to_json_lines();
        text.push_str("{}\n");
        std::fs::write(&path, text).unwrap();
        let error = Results::read(&path).unwrap_err().to_string();
        assert!(error.contains("verbs.jsonl, line 4: missing field `name`"), "{error}");
        std::fs::write(&path, "").unwrap();
        assert!(matches!(Results::read(&path), Err(ResultsError::Empty(_))));
    }
}
