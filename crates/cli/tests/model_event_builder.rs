//! `millstream model event-builder`.

use std::process::{Command, Output};

fn model(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_millstream");
    let arguments = ["model", "event-builder"].iter().chain(arguments);
    Command::new(program).args(arguments).output().expect("the program starts")
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), output.stderr.as_slice()].concat()).into_owned()
}

#[test]
fn the_report_has_rates_and_the_account() {
    let output = model(&["--nodes", "8", "--seconds", "0.005", "--missing-every", "100"]);
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    for part in [
        "8 nodes, shaped, flow level",
        "built event rate",
        "fragment missing at source",
        "conservation law: holds",
        "energy per built event",
        "no prices in the site file",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn json_has_the_documented_keys() {
    let output =
        model(&["--nodes", "4", "--seconds", "0.002", "--packets", "--saturated", "--unshaped", "--json"]);
    assert!(output.status.success(), "{}", text_of(&output));
    let run: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!(run["nodes"], 4);
    assert_eq!(run["summary"]["built"]["events"], 80_000);
    assert!(
        run["built_bits_per_s"].as_f64() > Some(1e9) && run["peak_link_utilization"].as_f64() <= Some(1.0),
        "{run}"
    );
    // Power over event rate; the idle devices are the lower end.
    let number = |path: [&str; 2]| run[path[0]][path[1]].as_f64().unwrap();
    let rate = run["events_per_s"].as_f64().unwrap();
    for state in ["idle", "running", "full_load"] {
        let energy = number(["energy_per_event_j", state]);
        assert!((energy * rate / number(["power_w", state]) - 1.0).abs() < 1e-9, "{run}");
    }
    let [idle, running, full_load] = ["idle", "running", "full_load"].map(|state| number(["power_w", state]));
    assert!(idle < running && running < full_load, "{run}");
    assert!(run["price_per_built_gb_per_s"].is_null(), "{run}");
    assert!(run["peak_bytes"].as_u64() > Some(1 << 20), "{run}");
}

#[test]
fn invalid_options_are_refused() {
    for (arguments, why) in [
        (vec!["--nodes", "501"], "the site has 500 hosts"),
        (vec!["--nodes", "4", "--batch", "0"], "batch = 0: must be 1 or more"),
        (vec!["--nodes", "4", "--seconds", "0"], "must be 1 to 10^15"),
        (vec!["--nodes", "4", "--slow-builder", "x"], "expected NODE=FACTOR"),
        (vec!["no/such/site.toml"], "no/such/site.toml"),
    ] {
        let output = model(&arguments);
        let text = text_of(&output);
        assert!(
            !output.status.success() && text.contains(why) && !text.contains("panicked"),
            "{arguments:?}: {text}"
        );
    }
}
