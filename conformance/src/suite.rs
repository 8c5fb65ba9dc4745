//! Test suites that report many cases from one run.

use serde::Deserialize;

use crate::case::{Outcome, Ran};

/// How a suite reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Suite {
    /// Python's `unittest`, verbose: `test_name (module.Class.test_name)`, perhaps a line of documentation,
    /// `... ok`.
    Unittest,
}

impl Suite {
    /// The cases in the output. A suite that did not end well without having reported a failure is one itself,
    /// and so is one that reported nothing.
    pub(crate) fn cases(self, name: &str, output: &str, end: Outcome) -> Vec<Ran> {
        let Suite::Unittest = self;
        let mut rans = unittest(output);
        let failed = rans.iter().any(|ran| matches!(ran.outcome, Outcome::Fail(_)));
        if rans.is_empty() && end == Outcome::Pass {
            rans.push(Ran { name: name.to_owned(), outcome: Outcome::Fail("it reports no case".into()) });
        } else if end != Outcome::Pass && !failed {
            rans.push(Ran { name: name.to_owned(), outcome: end });
        }
        rans
    }
}

fn unittest(output: &str) -> Vec<Ran> {
    let mut rans: Vec<Ran> = Vec::new();
    let mut current: Option<String> = None;
    for line in output.lines() {
        // `test_a (tests.test_x.Class)` before Python 3.11, `test_a (tests.test_x.Class.test_a)` since.
        if let Some((test, rest)) = line.split_once(" (")
            && test.starts_with("test_")
            && !test.contains(' ')
            && let Some((class, _)) = rest.split_once(')')
        {
            let class = class.strip_suffix(&format!(".{test}")).unwrap_or(class);
            // A case that never ended is one that failed.
            if let Some(name) = current.replace(format!("{class}.{test}")) {
                rans.push(Ran { name, outcome: Outcome::Fail("it does not say how it ended".into()) });
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
            rans.push(Ran { name, outcome });
        }
    }
    if let Some(name) = current {
        rans.push(Ran { name, outcome: Outcome::Fail("it does not end".into()) });
    }
    for ran in &mut rans {
        if let Outcome::Fail(what) = &mut ran.outcome
            && let Some(error) = traceback(output, &ran.name)
        {
            *what = error;
        }
    }
    rans
}

/// The word that ends a case whose own output came between.
fn ending(line: &str) -> Option<&str> {
    (["ok", "FAIL", "ERROR"].contains(&line) || line.starts_with("skipped '")).then_some(line)
}

/// The last line of a failed case's traceback.
fn traceback(output: &str, name: &str) -> Option<String> {
    let (class, test) = name.rsplit_once('.')?;
    let title = |line: &&str| {
        let Some((word, rest)) = line.split_once(": ") else { return false };
        let head = rest.split_once(' ').map_or("", |(head, _)| head);
        ["FAIL", "ERROR"].contains(&word) && head == test && rest.contains(&format!("({class}"))
    };
    let mut lines = output.lines().skip_while(|line| !title(line)).skip(2);
    let body: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("=====")).collect();
    let said = |line: &&&str| {
        !line.is_empty()
            && !line.starts_with([' ', '-'])
            && !line.starts_with("Ran ")
            && !line.starts_with("Traceback")
            && !line.starts_with("FAILED")
    };
    body.iter().rev().find(said).map(|line| line.chars().take(160).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
test_a (tests.test_x.Some.test_a) ... ok
test_b (tests.test_x.Some.test_b)
Says what it does ... skipped 'No such thing'
test_c (tests.test_x.Some) ... FAIL
test_d (tests.test_x.Some.test_d) ... noise of its own
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
    fn each_case_of_a_unittest_run_has_its_outcome() {
        let rans = Suite::Unittest.cases("tests.test_x", OUTPUT, Outcome::Fail("exit status: 1".into()));
        let outcome = |test: &str| {
            let name = format!("tests.test_x.Some.{test}");
            rans.iter().find(|ran| ran.name == name).map(|ran| ran.outcome.clone())
        };
        assert_eq!(rans.len(), 5);
        assert_eq!(outcome("test_a"), Some(Outcome::Pass));
        assert_eq!(outcome("test_b"), Some(Outcome::Skip("No such thing".into())));
        assert_eq!(outcome("test_c"), Some(Outcome::Fail("AssertionError: 1 != 2".into())));
        assert_eq!(outcome("test_d"), Some(Outcome::Pass));
        assert_eq!(outcome("test_e"), Some(Outcome::Fail("it does not end".into())));
    }

    #[test]
    fn a_suite_without_cases_fails() {
        let rans = Suite::Unittest.cases("tests.test_x", "Ran 0 tests\n\nOK\n", Outcome::Pass);
        assert!(matches!(&rans[..], [Ran { outcome: Outcome::Fail(_), .. }]));
        let rans = Suite::Unittest.cases("tests.test_x", "", Outcome::Fail("killed".into()));
        assert_eq!(rans[0].outcome, Outcome::Fail("killed".into()));
    }
}
