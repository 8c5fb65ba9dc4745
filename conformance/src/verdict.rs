//! Comparison of outcomes with expectations, and its records.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::case::{CaseResult, Outcome};
use crate::client::{Case, Client, Exception, ExpectedResult};

/// Outcome of a case compared with the expectation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    /// It passed as expected.
    Pass,
    /// It failed or was skipped as its exception expects.
    Waived,
    /// It failed or was skipped unexpectedly.
    Fail,
    /// Its exception is out of date: it passed, or does not exist.
    Stale,
    /// It could not run.
    NotRun,
}

/// A line of CLIENT.jsonl.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) program: String,
    pub(crate) transport: String,
    /// Name of the case.
    pub(crate) case: String,
    pub(crate) verdict: Verdict,
    /// Failure or skip reason.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) what: String,
    /// Reason of the exception.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    /// Duration of the process, which may run all cases of a suite.
    pub(crate) seconds: f64,
    /// Prefix of its output files.
    pub(crate) log: String,
}

/// Compares a result with the expectation of its client.
pub(crate) fn judge(client: &Client, case: &Case, result: CaseResult, seconds: f64, log: &Path) -> Record {
    let exception = client.exception(&result.name);
    let (verdict, what) = verdict_of(result.outcome, exception);
    Record {
        program: case.program.clone(),
        transport: case.transport.clone(),
        case: result.name,
        verdict,
        what,
        reason: exception.map_or(String::new(), |exception| exception.reason.clone()),
        seconds: (seconds * 1e3).round() / 1e3,
        log: log.display().to_string(),
    }
}

/// Compares an outcome with the expected one.
fn verdict_of(outcome: Outcome, exception: Option<&Exception>) -> (Verdict, String) {
    let expected = exception.map(|exception| exception.result);
    match outcome {
        Outcome::NotRun(what) => (Verdict::NotRun, what),
        Outcome::Pass if matches!(expected, None | Some(ExpectedResult::Flaky)) => {
            (Verdict::Pass, String::new())
        }
        Outcome::Pass => (Verdict::Stale, "passed despite its exception".into()),
        Outcome::Skip(what) if expected == Some(ExpectedResult::Skip) => (Verdict::Waived, what),
        Outcome::Skip(what) => (Verdict::Fail, format!("skipped: {what}")),
        Outcome::Fail(what) => match exception {
            Some(exception)
                if exception.result != ExpectedResult::Skip
                    && what.starts_with(&exception.failure_starts_with) =>
            {
                (Verdict::Waived, what)
            }
            _ => (Verdict::Fail, what),
        },
    }
}

/// Writes records as JSON lines.
pub(crate) fn save(records: &[Record], path: &Path) -> Result<(), Box<dyn Error>> {
    let mut lines = String::new();
    for record in records {
        lines += &serde_json::to_string(record)?;
        lines.push('\n');
    }
    Ok(millstream_report::save(path, &lines)?)
}

/// Reads records written by [`save`].
pub(crate) fn load(path: &Path) -> Result<Vec<Record>, Box<dyn Error>> {
    let lines = fs::read_to_string(path)?;
    Ok(lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// The exceptions without a case in a complete run.
pub(crate) fn stale(client: &Client, records: &[Record]) -> Vec<Record> {
    let seen = |case: &&String| records.iter().all(|record| record.case != **case);
    let cases = client.exceptions.iter().flat_map(|exception| exception.cases.iter().filter(seen));
    cases
        .map(|case| Record {
            program: "exception".into(),
            transport: String::new(),
            case: case.clone(),
            verdict: Verdict::Stale,
            what: "exception without a case".into(),
            reason: String::new(),
            seconds: 0.0,
            log: String::new(),
        })
        .collect()
}

impl Record {
    pub(crate) fn is_ok(&self, allow_not_run: bool) -> bool {
        match self.verdict {
            Verdict::Pass | Verdict::Waived => true,
            Verdict::Fail | Verdict::Stale => false,
            Verdict::NotRun => allow_not_run,
        }
    }

    /// The record as a line of text.
    pub(crate) fn line(&self) -> String {
        let word = match self.verdict {
            Verdict::Pass => "ok",
            Verdict::Waived => "waived",
            Verdict::Fail => "FAILED",
            Verdict::Stale => "STALE",
            Verdict::NotRun => "not run",
        };
        let Self { case, transport, what, reason, seconds, log, .. } = self;
        let mut line = format!("{word:<8} {case} [{transport}] ({seconds:.1} s)");
        // Writing to a string does not fail.
        let _ = match self.verdict {
            Verdict::Pass => Ok(()),
            Verdict::Waived => write!(line, ": {reason}"),
            Verdict::Fail => write!(line, ": {what} ({log}-*.log)"),
            Verdict::Stale | Verdict::NotRun => write!(line, ": {what}"),
        };
        line
    }
}

/// Number of cases of each verdict.
pub(crate) fn counts(records: &[Record]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for record in records {
        let word = match record.verdict {
            Verdict::Pass => "a passed",
            Verdict::Waived => "b waived",
            Verdict::Fail => "c failed",
            Verdict::Stale => "d stale",
            Verdict::NotRun => "e not run",
        };
        *counts.entry(word).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {}", &word[2..])).collect();
    counts.join(", ")
}

/// Summary of a client: counts and failures.
pub(crate) fn summary(client: &Client, records: &[Record]) -> String {
    let mut text = format!("{}: {}\n", client.title, counts(records));
    let mut not_run: Vec<&str> = Vec::new();
    for record in records.iter().filter(|record| !record.is_ok(false)) {
        if record.verdict != Verdict::NotRun {
            text += &format!("  {}\n", record.line());
        } else if !not_run.contains(&record.what.as_str()) {
            not_run.push(&record.what);
            text += &format!("  not run: {}\n", record.what);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exception_allows_only_its_result() {
        let exception = |result: &str, prefix: &str| -> Exception {
            toml::from_str(&format!(
                "result = '{result}'\nreason = ''\ncases = []\nfailure_starts_with = '{prefix}'"
            ))
            .unwrap()
        };
        let judged =
            |outcome: &Outcome, exception: &Exception| verdict_of(outcome.clone(), Some(exception)).0;
        let [pass, skip, fail] =
            [Outcome::Pass, Outcome::Skip("no".into()), Outcome::Fail("client: exit status: 16".into())];
        for (exception, verdicts) in [
            (exception("skip", ""), [Verdict::Stale, Verdict::Waived, Verdict::Fail]),
            (exception("fail", ""), [Verdict::Stale, Verdict::Fail, Verdict::Waived]),
            (exception("flaky", ""), [Verdict::Pass, Verdict::Fail, Verdict::Waived]),
            (exception("flaky", "client: exit status: 16"), [Verdict::Pass, Verdict::Fail, Verdict::Waived]),
            (exception("flaky", "client: exit status: 1,"), [Verdict::Pass, Verdict::Fail, Verdict::Fail]),
        ] {
            assert_eq!(
                [&pass, &skip, &fail].map(|outcome| judged(outcome, &exception)),
                verdicts,
                "{exception:?}"
            );
        }
        assert_eq!(verdict_of(pass, None).0, Verdict::Pass);
        assert_eq!(verdict_of(skip, None).0, Verdict::Fail);
        assert_eq!(verdict_of(fail, None).0, Verdict::Fail);
    }
}
