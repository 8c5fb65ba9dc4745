//! Tori whose datagrams get lost: the connections repeat them, and every word arrives.

use std::os::unix::fs::PermissionsExt as _;

use libtest_mimic::{Failed, Trial};
use millstream_torus::launch::Launcher;
use millstream_torus::traffic::TrafficCounters;

use super::{application, launcher};

type TestResult = Result<(), Box<dyn std::error::Error>>;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, dimensions: &'static str, loss: &'static str| {
        Trial::test(name, move || {
            all_words_arrive(dimensions, loss).map_err(|error| Failed::from(error.to_string()))
        })
    };
    vec![
        trial("all_words_arrive_although_1_percent_of_datagrams_are_lost", "2x2x2", "0.01"),
        trial("all_words_arrive_although_20_percent_of_datagrams_are_lost", "2x2x1", "0.2"),
    ]
}

/// The conformance suite between processes that exchange UDP datagrams, each of which is dropped with this probability.
fn all_words_arrive(dimensions: &str, loss: &str) -> TestResult {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("with-loss");
    let text = format!(
        "#!/bin/sh\nexec env MILLSTREAM_PATH=wire MILLSTREAM_LINK=drop={loss},seed=$((MILLSTREAM_TORUS_RANK + 1)) \"$@\"\n"
    );
    std::fs::write(&script, text)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let mut torus = Launcher { launcher: Some(script), ..launcher(dimensions) }.launch()?;
    torus.run(&application("conformance"))?;
    let total = TrafficCounters::total(&torus.finish()?);
    assert!(total.injected > 1000, "{total}");
    assert_eq!((total.dropped_total(), total.malformed), (0, 0), "{total}");
    Ok(())
}
