//! Whether a case ended as it should, and what is said about it.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::case::{Outcome, Ran};
use crate::client::{Case, Client, Excepted, Exception};

/// How a case ended, beside what was expected of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    /// It passed, as all should.
    Pass,
    /// It was skipped or failed as its exception says.
    Excepted,
    /// It failed, or was skipped, and should not.
    Fail,
    /// It passed, or is not there, and has an exception.
    Stale,
    /// It could not be run.
    NotRun,
}

/// A line of CLIENT.jsonl.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) program: String,
    pub(crate) transport: String,
    /// What was run.
    pub(crate) case: String,
    pub(crate) verdict: Verdict,
    /// Why it did not pass: what happened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) what: String,
    /// The exception's reason.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    /// Of the process, so of all the cases of a suite.
    pub(crate) seconds: f64,
    /// What the names of the files with its output begin with.
    pub(crate) log: String,
}

/// Compares what happened with what the client expects.
pub(crate) fn judge(client: &Client, case: &Case, ran: Ran, seconds: f64, log: &Path) -> Record {
    let exception = client.exception(&ran.name);
    let (verdict, what) = weigh(ran.outcome, exception);
    Record {
        program: case.program.clone(),
        transport: case.transport.clone(),
        case: ran.name,
        verdict,
        what,
        reason: exception.map_or(String::new(), |exception| exception.reason.clone()),
        seconds: (seconds * 1e3).round() / 1e3,
        log: log.display().to_string(),
    }
}

/// What an outcome is worth beside what is expected.
fn weigh(outcome: Outcome, exception: Option<&Exception>) -> (Verdict, String) {
    let expected = exception.map(|exception| exception.result);
    match outcome {
        Outcome::NotRun(what) => (Verdict::NotRun, what),
        Outcome::Pass if matches!(expected, None | Some(Excepted::Races)) => (Verdict::Pass, String::new()),
        Outcome::Pass => (Verdict::Stale, "it passes and has an exception".into()),
        Outcome::Skip(what) if expected == Some(Excepted::Skip) => (Verdict::Excepted, what),
        Outcome::Skip(what) => (Verdict::Fail, format!("skipped: {what}")),
        Outcome::Fail(what) => match exception {
            Some(exception) if exception.result != Excepted::Skip && what.starts_with(&exception.like) => {
                (Verdict::Excepted, what)
            }
            _ => (Verdict::Fail, what),
        },
    }
}

/// Writes records, a line each.
pub(crate) fn save(records: &[Record], path: &Path) -> Result<(), Box<dyn Error>> {
    let mut lines = String::new();
    for record in records {
        lines += &serde_json::to_string(record)?;
        lines.push('\n');
    }
    Ok(millstream_report::save(path, &lines)?)
}

/// Reads what [`save`] wrote.
pub(crate) fn load(path: &Path) -> Result<Vec<Record>, Box<dyn Error>> {
    let lines = fs::read_to_string(path)?;
    Ok(lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// The exceptions whose cases were not seen in a whole run.
pub(crate) fn stale(client: &Client, records: &[Record]) -> Vec<Record> {
    let seen = |case: &&String| records.iter().all(|record| record.case != **case);
    let cases = client.exceptions.iter().flat_map(|exception| exception.cases.iter().filter(seen));
    cases
        .map(|case| Record {
            program: "exception".into(),
            transport: String::new(),
            case: case.clone(),
            verdict: Verdict::Stale,
            what: "it has an exception and is not there".into(),
            reason: String::new(),
            seconds: 0.0,
            log: String::new(),
        })
        .collect()
}

impl Record {
    pub(crate) fn good(&self, allow_not_run: bool) -> bool {
        match self.verdict {
            Verdict::Pass | Verdict::Excepted => true,
            Verdict::Fail | Verdict::Stale => false,
            Verdict::NotRun => allow_not_run,
        }
    }

    /// One line for people.
    pub(crate) fn line(&self) -> String {
        let word = match self.verdict {
            Verdict::Pass => "ok",
            Verdict::Excepted => "excepted",
            Verdict::Fail => "FAILED",
            Verdict::Stale => "STALE",
            Verdict::NotRun => "not run",
        };
        let Self { case, transport, what, reason, seconds, log, .. } = self;
        let mut line = format!("{word:<8} {case} [{transport}] ({seconds:.1} s)");
        // Writing to a string does not fail.
        let _ = match self.verdict {
            Verdict::Pass => Ok(()),
            Verdict::Excepted => write!(line, ": {reason}"),
            Verdict::Fail => write!(line, ": {what} ({log}-*.log)"),
            Verdict::Stale | Verdict::NotRun => write!(line, ": {what}"),
        };
        line
    }
}

/// How many cases there were of each verdict.
pub(crate) fn counts(records: &[Record]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for record in records {
        let word = match record.verdict {
            Verdict::Pass => "a passed",
            Verdict::Excepted => "b excepted",
            Verdict::Fail => "c failed",
            Verdict::Stale => "d stale",
            Verdict::NotRun => "e not run",
        };
        *counts.entry(word).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {}", &word[2..])).collect();
    counts.join(", ")
}

/// A client's results: the sums, and once more what went wrong.
pub(crate) fn summary(client: &Client, records: &[Record]) -> String {
    let mut text = format!("{}: {}\n", client.title, counts(records));
    let mut prevented: Vec<&str> = Vec::new();
    for record in records.iter().filter(|record| !record.good(false)) {
        if record.verdict != Verdict::NotRun {
            text += &format!("  {}\n", record.line());
        } else if !prevented.contains(&record.what.as_str()) {
            prevented.push(&record.what);
            text += &format!("  not run: {}\n", record.what);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_allows_what_it_says_and_nothing_else() {
        let exception = |result: &str, like: &str| -> Exception {
            toml::from_str(&format!("result = '{result}'\nreason = ''\ncases = []\nas = '{like}'")).unwrap()
        };
        let judged = |outcome: &Outcome, exception: &Exception| weigh(outcome.clone(), Some(exception)).0;
        let [pass, skip, fail] =
            [Outcome::Pass, Outcome::Skip("no".into()), Outcome::Fail("the client: exit status: 16".into())];
        for (exception, verdicts) in [
            (exception("skip", ""), [Verdict::Stale, Verdict::Excepted, Verdict::Fail]),
            (exception("fail", ""), [Verdict::Stale, Verdict::Fail, Verdict::Excepted]),
            (exception("races", ""), [Verdict::Pass, Verdict::Fail, Verdict::Excepted]),
            (
                exception("races", "the client: exit status: 16"),
                [Verdict::Pass, Verdict::Fail, Verdict::Excepted],
            ),
            (
                exception("races", "the client: exit status: 1,"),
                [Verdict::Pass, Verdict::Fail, Verdict::Fail],
            ),
        ] {
            assert_eq!(
                [&pass, &skip, &fail].map(|outcome| judged(outcome, &exception)),
                verdicts,
                "{exception:?}"
            );
        }
        assert_eq!(weigh(pass, None).0, Verdict::Pass);
        assert_eq!(weigh(skip, None).0, Verdict::Fail);
        assert_eq!(weigh(fail, None).0, Verdict::Fail);
    }
}
