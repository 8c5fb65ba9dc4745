//! Conformance runner: third-party verbs programs on the soft device.
//!
//! A *client* is a folder with a `cases.toml`: Debian packages, programs with arguments, patterns for their output,
//! and exceptions with reasons (`conformance/README.md` has the format). Read [`client`] first, then [`case`] and [`verdict`].
#![forbid(unsafe_code)]

mod case;
mod client;
mod document;
mod network;
mod packages;
mod process;
mod suite;
mod verdict;
mod wrapper;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use crate::case::{CaseResult, CaseRunner, Outcome};
use crate::client::{Case, Client, DataPath};
use crate::verdict::Record;

/// Run third-party verbs programs on the soft device
///
/// Cases run one after another. Results go to OUT/CLIENT.jsonl, output to OUT/logs/CLIENT. Fails if a result
/// differs from the client's cases.toml, or if a case cannot run.
#[derive(Debug, Parser)]
#[command(name = "millstream-conformance", max_term_width = 100)]
struct Arguments {
    /// Clients to run: folders of FOLDER [default: all]
    #[arg(value_name = "CLIENT")]
    clients: Vec<String>,
    /// Run only cases whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// List the cases without running them
    #[arg(long)]
    list: bool,
    /// Ignore cases that cannot run, such as those with a missing package
    #[arg(long)]
    allow_not_run: bool,
    /// Path between the two sides; results of `wire` go to OUT/wire
    #[arg(long, value_enum, default_value_t, value_name = "PATH")]
    path: DataPath,
    /// Write a page with the latest results of all clients; fails if a client has none
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Folder with the clients
    #[arg(long, default_value = "conformance", value_name = "FOLDER")]
    folder: PathBuf,
    /// Folder for results
    #[arg(long, default_value = "target/conformance", value_name = "OUT")]
    out: PathBuf,
    /// Set by the runner itself: started by the wrapper command of a client
    #[arg(long, hide = true)]
    wrapped: bool,
    /// Set by the runner itself: started in a new network namespace
    #[arg(long, hide = true)]
    in_namespace: bool,
    /// The program `millstream` [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    millstream: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("millstream-conformance: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let all = client::all(&arguments.folder, arguments.path)?;
    if let Some(name) = arguments.clients.iter().find(|name| all.iter().all(|client| client.name != **name)) {
        let known: Vec<&str> = all.iter().map(|client| client.name.as_str()).collect();
        return Err(format!("no client {name:?}; the clients are: {}", known.join(", ")).into());
    }
    let wanted = |client: &&Client| arguments.clients.is_empty() || arguments.clients.contains(&client.name);
    let clients: Vec<&Client> = all.iter().filter(wanted).collect();
    // A run that selects nothing has tested nothing.
    if let Some(text) = &arguments.only
        && clients.iter().all(|client| selected_cases(client, arguments).is_empty())
    {
        let names: Vec<&str> = clients.iter().map(|client| client.name.as_str()).collect();
        return Err(format!("--only {text}: no case of {} contains it", names.join(", ")).into());
    }
    if arguments.list {
        for client in clients {
            for case in selected_cases(client, arguments) {
                println!("{:<14} {:<4} {}", client.name, case.transport, case.name);
            }
        }
        return Ok(true);
    }

    if arguments.in_namespace {
        network::set_up()?;
    } else if arguments.path == DataPath::Wire && !arguments.wrapped {
        // Packages are installed before the namespace is entered. Errors appear again in the cases.
        for client in &clients {
            let _ = packages::ensure(&client.packages);
        }
        let why = network::enter("--in-namespace");
        eprintln!("using the host's network, whose addresses and MTU decide which cases pass: {why}");
    }
    process::adopt_orphans()?;
    let millstream = match &arguments.millstream {
        // Programs run in another folder.
        Some(path) => path.canonicalize()?,
        None => std::env::current_exe()?.with_file_name("millstream"),
    };
    let mut success = true;
    for client in clients {
        let records = match &client.wrapper {
            Some(command) if !arguments.wrapped => wrapper::run(client, command, &millstream, arguments)?,
            _ => run_client(client, &millstream, arguments)?,
        };
        if arguments.wrapped {
            // The outer process prints the summary.
            continue;
        }
        print!("{}", verdict::summary(client, &records));
        success &= records.iter().all(|record| record.is_ok(arguments.allow_not_run));
    }
    if let Some(path) = &arguments.document {
        document::write(path, &all, &arguments.out)?;
        println!("wrote {}", path.display());
    }
    Ok(success)
}

/// Folder with the results of a path.
fn results(out: &Path, path: DataPath) -> PathBuf {
    match path {
        DataPath::Shm => out.to_owned(),
        DataPath::Wire => out.join("wire"),
    }
}

/// The cases of a client, or those with the text of `--only` in their names.
fn selected_cases(client: &Client, arguments: &Arguments) -> Vec<Case> {
    let mut cases = client.cases();
    if let Some(text) = &arguments.only {
        cases.retain(|case| case.name.contains(text.as_str()));
    }
    cases
}

/// Runs a client's cases, prints each result, and stores the records.
fn run_client(
    client: &Client,
    millstream: &Path,
    arguments: &Arguments,
) -> Result<Vec<Record>, Box<dyn Error>> {
    let out = results(&arguments.out, arguments.path);
    let logs = out.join("logs").join(&client.name);
    if logs.exists() {
        fs::remove_dir_all(&logs)?;
    }
    fs::create_dir_all(&logs)?;
    let cases = selected_cases(client, arguments);
    let scratch = tempfile::Builder::new().prefix("conformance-").tempdir()?;
    // Wrapped clients communicate with another machine.
    let path = if client.wrapper.is_some() { DataPath::Wire } else { arguments.path };
    let runner = CaseRunner::new(client, millstream, scratch.path(), path);
    let not_run = match packages::ensure(&client.packages) {
        Ok(()) => runner.build(&logs.join("build")).err(),
        Err(missing) => Some(Outcome::NotRun(missing)),
    };
    let mut records = Vec::new();
    let total = cases.len();
    for (index, case) in cases.iter().enumerate() {
        let log = logs.join(format!("{:03}", index + 1));
        let began = Instant::now();
        let results = match &not_run {
            Some(outcome) => vec![CaseResult { name: case.name.clone(), outcome: outcome.clone() }],
            None => runner.run(case, &log)?,
        };
        let seconds = began.elapsed().as_secs_f64();
        for result in results {
            let record = verdict::judge(client, case, result, seconds, &log);
            if case.suite.is_none() || !record.is_ok(false) {
                eprintln!("[{:>3}/{total}] {}", index + 1, record.line());
            }
            records.push(record);
        }
        if case.suite.is_some() {
            eprintln!("[{:>3}/{total}] {} ({seconds:.1} s)", index + 1, case.name);
        }
    }
    // A selection of cases cannot show stale exceptions.
    if arguments.only.is_none() && not_run.is_none() {
        for record in verdict::stale(client, &records) {
            eprintln!("{}", record.line());
            records.push(record);
        }
    }
    verdict::save(&records, &file(client, arguments))?;
    Ok(records)
}

/// The file of a client's records; a selection of cases has its own.
fn file(client: &Client, arguments: &Arguments) -> PathBuf {
    let part = if arguments.only.is_some() { ".part" } else { "" };
    results(&arguments.out, arguments.path).join(format!("{}{part}.jsonl", client.name))
}
