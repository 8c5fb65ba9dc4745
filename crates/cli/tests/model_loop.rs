//! The model, calibrated on this machine: `millstream model calibrate` fits the soft device's wire path to perftest between two
//! network namespaces, and `millstream model measure` predicts sizes that the fit did not see.
//!
//! Prints what it measured, fitted and predicted. Needs root for network namespaces; else it says so and ends.

#[path = "common/network.rs"]
mod network;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use millstream_bench::tools::retry_clock_calibration;
use millstream_shm::ports;
use network::{Network, is_root};

/// Message sizes of the fit.
const FITTED: [u64; 5] = [64, 1024, 8192, 65536, 262_144];
/// Message sizes that are only predicted.
const UNSEEN: [u64; 4] = [256, 4096, 16384, 131_072];
/// Programs, with the column of their result and its unit.
const PROGRAMS: [(&str, usize, &str); 2] = [("ib_write_bw", 3, "MiB/s"), ("ib_write_lat", 4, "us")];
/// Measurements of each size, of which the best counts: other processes of the machine take its cores at times.
const ROUNDS: usize = 2;
/// Median error of the predictions that the test allows on a machine whose measurements repeat: a prediction in other units, or of
/// another path, has more. What measurements differ by between rounds is added. The test prints the error; it does not judge it.
const MEDIAN_ERROR: f64 = 2.0;

const CLIENT: usize = 2;
const SERVER: usize = 1;

/// A result of a program with its output.
struct Measurement {
    value: f64,
    output: String,
}

/// Runs a program of perftest between two hosts over the wire path.
fn perftest(network: &Network, program: &str, column: usize, size: u64) -> Result<Measurement, String> {
    let iterations = (16_000_000 / size).clamp(200, 1000).to_string();
    let port = ports::unused().map_err(|error| error.to_string())?.to_string();
    let size_text = size.to_string();
    let words = [
        "--device",
        "soft",
        "run",
        "--path",
        "wire",
        "--",
        program,
        "-F",
        "-s",
        &size_text,
        "-n",
        &iterations,
        "-p",
        &port,
    ];
    let command = |host: usize, peer: Option<&str>| {
        let mut command = network.command(host, "timeout");
        command.args(["60", env!("CARGO_BIN_EXE_millstream")]).args(words).args(peer);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let server = command(SERVER, None).spawn().map_err(|error| error.to_string())?;
    let ready = wait_for_listener(network, &port);
    let client =
        command(CLIENT, Some(&network.address(SERVER))).output().map_err(|error| error.to_string())?;
    let server = server.wait_with_output().map_err(|error| error.to_string())?;
    ready?;
    let (output, _) = (text_of(client)?, text_of(server)?);
    let row = output.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).nth(1);
    let value = row.and_then(|row| row.split_whitespace().nth(column)?.parse().ok());
    let value = value.ok_or_else(|| format!("{program}: no result in\n{output}"))?;
    Ok(Measurement { value, output })
}

/// What a successful program printed.
fn text_of(output: Output) -> Result<String, String> {
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if output.status.success() { Ok(text) } else { Err(format!("{}\n{text}", output.status)) }
}

/// Waits until a process of the server's host listens on a TCP port.
fn wait_for_listener(network: &Network, port: &str) -> Result<(), String> {
    let wanted = format!(":{:04X} ", port.parse::<u16>().map_err(|error| error.to_string())?);
    for _ in 0..400 {
        let tables = network.command(SERVER, "cat").args(["/proc/net/tcp", "/proc/net/tcp6"]).output();
        let text =
            tables.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        if text.lines().any(|line| line.contains(&wanted) && line.contains(" 0A ")) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(format!("nobody listens on port {port}"))
}

/// The best measurement of some rounds, and the ratio of the worst to it, less one. A round that fails is repeated once.
fn best(network: &Network, (program, column, unit): (&str, usize, &str), size: u64) -> (Measurement, f64) {
    let one = || {
        let run = || retry_clock_calibration(|| perftest(network, program, column, size));
        run().or_else(|_| run()).unwrap_or_else(|error| panic!("{program}, {size} bytes: {error}"))
    };
    let mut all: Vec<Measurement> = (0..ROUNDS).map(|_| one()).collect();
    all.sort_by(|a, b| a.value.total_cmp(&b.value));
    // Short times and high rates are best.
    if unit != "us" {
        all.reverse();
    }
    let (first, last) = (all[0].value, all[ROUNDS - 1].value);
    (all.swap_remove(0), (first / last).max(last / first) - 1.0)
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn millstream(words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_millstream")).args(words).output().expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "millstream {}: {errors}", words.join(" "));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The model's result of a benchmark on a site.
fn predicted(folder: &Path, site: &Path, program: &str, size: u64) -> f64 {
    let file = folder.join("predicted.csv");
    let (site, csv, size) = (site.display().to_string(), file.display().to_string(), size.to_string());
    millstream(&["model", "measure", program, &site, "node1", "node0", "--sizes", &size, "--csv", &csv]);
    let text = std::fs::read_to_string(&file).expect("measure wrote it");
    let value = text.lines().nth(1).and_then(|row| row.split(',').nth(1)?.parse().ok());
    value.unwrap_or_else(|| panic!("no value in {text}"))
}

#[test]
fn a_fit_to_the_wire_path_predicts_sizes_that_it_did_not_see() {
    if !is_root() {
        return;
    }
    let network = Network::new("model-loop");
    let folder =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("model-loop-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for results");

    let mut files = Vec::new();
    for test in PROGRAMS {
        let (program, _, unit) = test;
        for size in FITTED {
            let (found, _) = best(&network, test, size);
            println!("fit: {program}, {size} bytes: {:.2} {unit}", found.value);
            let file = folder.join(format!("{program}-{size}.txt"));
            std::fs::write(&file, found.output).expect("a file of results");
            files.push(file.display().to_string());
        }
    }
    let site = concat!(env!("CARGO_MANIFEST_DIR"), "/../../sites/soft-device-wire.toml");
    let devices = folder.join("devices.toml").display().to_string();
    let mut words = vec![
        "model",
        "calibrate",
        "--site",
        site,
        "--client",
        "node1",
        "--server",
        "node0",
        "--out",
        &devices,
    ];
    files.iter().for_each(|file| words.extend(["--measurements", file]));
    println!("{}", millstream(&words));

    // The fitted devices replace those of the file.
    let text = std::fs::read_to_string(site).expect("a shipped site");
    let fitted = std::fs::read_to_string(&devices).expect("calibrate wrote it");
    let hosts = text.split("[device.").next().expect("a first part");
    let unfitted: String = text.split("\n[device.").skip(1).fold(String::new(), |mut all, device| {
        let id = device.split([']', '.']).next().unwrap_or_default();
        if !fitted.contains(&format!("[device.{id}]")) {
            write!(all, "\n[device.{device}").expect("a text");
        }
        all
    });
    let own = folder.join("this-machine.toml");
    std::fs::write(&own, format!("{hosts}{unfitted}\n{fitted}")).expect("a site file");

    println!(
        "{:<14} {:>8} {:>12} {:>12} {:>9} {:>9}",
        "unseen", "bytes", "measured", "predicted", "error", "rounds"
    );
    let (mut errors, mut spreads) = (Vec::new(), Vec::new());
    for test in PROGRAMS {
        let (program, _, unit) = test;
        for size in UNSEEN {
            let (Measurement { value: measured, .. }, spread) = best(&network, test, size);
            let predicted = predicted(&folder, &own, program, size);
            let error = predicted / measured - 1.0;
            println!(
                "{program:<14} {size:>8} {measured:>6.2} {unit:<5} {predicted:>6.2} {unit:<5} {:>+7.1} % {:>7.1} %",
                error * 100.0,
                spread * 100.0
            );
            errors.push(error.abs());
            spreads.push(spread);
        }
    }
    let (error, spread) = (middle(errors), middle(spreads));
    println!("median error {:.1} %; rounds differ by {:.1} %", error * 100.0, spread * 100.0);
    assert!(error < MEDIAN_ERROR + spread, "median error {error}, rounds differ by {spread}");
    std::fs::remove_dir_all(&folder).expect("a folder of this test");
}
