//! Test suites that report many cases in one run.

use serde::Deserialize;

use crate::case::{CaseResult, Outcome};

/// Output format of a suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Suite {
    /// Python's `unittest`, verbose: `test_name (module.Class.test_name)`, an optional docstring, `... ok`.
    Unittest,
}

impl Suite {
    /// The results in the output. A suite that fails without a failed case, or reports no case, is itself a
    /// failed case.
    pub(crate) fn results(self, name: &str, output: &str, end: Outcome) -> Vec<CaseResult> {
        let Suite::Unittest = self;
        let mut results = unittest(output);
        let failed = results.iter().any(|result| matches!(result.outcome, Outcome::Fail(_)));
        if results.is_empty() && end == Outcome::Pass {
            results.push(CaseResult {
                name: name.to_owned(),
                outcome: Outcome::Fail("no case reported".into()),
            });
        } else if end != Outcome::Pass && !failed {
            results.push(CaseResult { name: name.to_owned(), outcome: end });
        }
        results
    }
}

fn unittest(output: &str) -> Vec<CaseResult> {
    let mut results: Vec<CaseResult> = Vec::new();
    let mut current: Option<String> = None;
    for line in output.lines() {
        // `test_a (tests.test_x.Class)` before Python 3.11, `test_a (tests.test_x.Class.test_a)` since.
        if let Some((test, rest)) = line.split_once(" (")
            && test.starts_with("test_")
            && !test.contains(' ')
            && let Some((class, _)) = rest.split_once(')')
        {
            let class = class.strip_suffix(&format!(".{test}")).unwrap_or(class);
            // A case without a result has failed.
            if let Some(name) = current.replace(format!("{class}.{test}")) {
                results.push(CaseResult { name, outcome: Outcome::Fail("no result reported".into()) });
            }
        }
        let Some(word) = line.rsplit_once("... ").map(|(_, word)| word).or(ending(line)) else { continue };
        let outcome = match word.split_whitespace().next() {
            Some("ok") => Outcome::Pass,
            Some("FAIL") | Some("ERROR") => Outcome::Fail(word.to_owned()),
            Some("skipped") => {
                Outcome::Skip(word["skipped".len()..].trim().trim_matches(['\'', '"']).to_owned())
            }
            _ => continue,
        };
        if let Some(name) = current.take() {
            results.push(CaseResult { name, outcome });
        }
    }
    if let Some(name) = current {
        results.push(CaseResult { name, outcome: Outcome::Fail("did not end".into()) });
    }
    for result in &mut results {
        if let Outcome::Fail(what) = &mut result.outcome
            && let Some(error) = traceback(output, &result.name)
        {
            *what = error;
        }
    }
    results
}

/// The result on its own line, after output of the case.
fn ending(line: &str) -> Option<&str> {
    (["ok", "FAIL", "ERROR"].contains(&line) || line.starts_with("skipped '")).then_some(line)
}

/// Last line of a failed case's traceback.
fn traceback(output: &str, name: &str) -> Option<String> {
    let (class, test) = name.rsplit_once('.')?;
    let title = |line: &&str| {
        let Some((word, rest)) = line.split_once(": ") else { return false };
        let head = rest.split_once(' ').map_or("", |(head, _)| head);
        ["FAIL", "ERROR"].contains(&word) && head == test && rest.contains(&format!("({class}"))
    };
    let mut lines = output.lines().skip_while(|line| !title(line)).skip(2);
    let body: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("=====")).collect();
    let is_message = |line: &&&str| {
        !line.is_empty()
            && !line.starts_with([' ', '-'])
            && !line.starts_with("Ran ")
            && !line.starts_with("Traceback")
            && !line.starts_with("FAILED")
    };
    body.iter().rev().find(is_message).map(|line| line.chars().take(160).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
test_a (tests.test_x.Some.test_a) ... ok
test_b (tests.test_x.Some.test_b)
Says what it does ... skipped 'No such thing'
test_c (tests.test_x.Some) ... FAIL
test_d (tests.test_x.Some.test_d) ... own output
ok
test_e (tests.test_x.Some.test_e) ... 
======================================================================
FAIL: test_c (tests.test_x.Some)
----------------------------------------------------------------------
Traceback (most recent call last):
  File \"x\"
AssertionError: 1 != 2

----------------------------------------------------------------------
Ran 4 tests in 0.1s

FAILED (failures=1)
";

    #[test]
    fn unittest_results_are_parsed() {
        let results = Suite::Unittest.results("tests.test_x", OUTPUT, Outcome::Fail("exit status: 1".into()));
        let outcome = |test: &str| {
            let name = format!("tests.test_x.Some.{test}");
            results.iter().find(|result| result.name == name).map(|result| result.outcome.clone())
        };
        assert_eq!(results.len(), 5);
        assert_eq!(outcome("test_a"), Some(Outcome::Pass));
        assert_eq!(outcome("test_b"), Some(Outcome::Skip("No such thing".into())));
        assert_eq!(outcome("test_c"), Some(Outcome::Fail("AssertionError: 1 != 2".into())));
        assert_eq!(outcome("test_d"), Some(Outcome::Pass));
        assert_eq!(outcome("test_e"), Some(Outcome::Fail("did not end".into())));
    }

    #[test]
    fn suite_without_cases_fails() {
        let results = Suite::Unittest.results("tests.test_x", "Ran 0 tests\n\nOK\n", Outcome::Pass);
        assert!(matches!(&results[..], [CaseResult { outcome: Outcome::Fail(_), .. }]));
        let results = Suite::Unittest.results("tests.test_x", "", Outcome::Fail("killed".into()));
        assert_eq!(results[0].outcome, Outcome::Fail("killed".into()));
    }
}
