//! Other people's verbs programs on the soft device: run as their users run them, and judged.
//!
//! A *client* is a folder beside this one with a `cases.toml`: the Debian packages it needs, the programs with
//! their arguments, what their output must show, and the exceptions, each with its reason
//! (`conformance/README.md` has the format). Read [`client`] first, then [`case`] and [`verdict`].
#![forbid(unsafe_code)]

mod case;
mod client;
mod document;
mod network;
mod packages;
mod process;
mod suite;
mod verdict;
mod within;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use crate::case::{Bench, Outcome, Ran};
use crate::client::{Client, Way};
use crate::verdict::Record;

/// Run other people's verbs programs on the soft device
///
/// Each client's cases are run one after the other; what they did goes to OUT/CLIENT.jsonl, their output
/// to OUT/logs/CLIENT. Fails if a case does not end as its client's cases.toml says, or cannot be run.
#[derive(Debug, Parser)]
#[command(name = "millstream-conformance", max_term_width = 100)]
struct Arguments {
    /// The clients to run, folders in CLIENTS [default: all of them]
    #[arg(value_name = "CLIENT")]
    clients: Vec<String>,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// List the cases, run none
    #[arg(long)]
    list: bool,
    /// A case that cannot be run (a package is missing, or has another version) does not fail the run
    #[arg(long)]
    allow_not_run: bool,
    /// How the two sides reach each other; results of the wire go to OUT/wire
    #[arg(long, value_enum, default_value_t, value_name = "PATH")]
    path: Way,
    /// Write the table of all clients' latest results here; refused if a client has none
    #[arg(long, value_name = "FILE")]
    document: Option<PathBuf>,
    /// Where the clients are
    #[arg(long, default_value = "conformance", value_name = "FOLDER")]
    folder: PathBuf,
    /// Where results go
    #[arg(long, default_value = "target/conformance", value_name = "OUT")]
    out: PathBuf,
    /// This process was started by the command that its client names as `within`
    #[arg(long, hide = true)]
    within: bool,
    /// This process was started by itself, in a network of its own
    #[arg(long, hide = true)]
    own_network: bool,
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
        return Err(format!("no client {name:?}; there are {}", known.join(", ")).into());
    }
    let wanted = |client: &&Client| arguments.clients.is_empty() || arguments.clients.contains(&client.name);
    let clients: Vec<&Client> = all.iter().filter(wanted).collect();
    if arguments.list {
        for client in clients {
            for case in client.cases() {
                println!("{:<14} {:<4} {}", client.name, case.transport, case.name);
            }
        }
        return Ok(true);
    }

    if arguments.own_network {
        network::set_up()?;
    } else if arguments.path == Way::Wire && !arguments.within {
        // What is missing is installed from outside, and said again by the client's cases.
        for client in &clients {
            let _ = packages::ensure(&client.packages);
        }
        let why = network::enter("--own-network");
        eprintln!("on this host's own network, whose addresses and MTU decide which cases can pass: {why}");
    }
    process::adopt_orphans()?;
    let millstream = match &arguments.millstream {
        // Programs are started in another folder.
        Some(path) => path.canonicalize()?,
        None => std::env::current_exe()?.with_file_name("millstream"),
    };
    let mut good = true;
    for client in clients {
        let records = match &client.within {
            Some(command) if !arguments.within => within::run(client, command, &millstream, arguments)?,
            _ => run_client(client, &millstream, arguments)?,
        };
        if arguments.within {
            // The process outside sums up.
            continue;
        }
        print!("{}", verdict::summary(client, &records));
        good &= records.iter().all(|record| record.good(arguments.allow_not_run));
    }
    if let Some(path) = &arguments.document {
        document::write(path, &all, &arguments.out)?;
        println!("wrote {}", path.display());
    }
    Ok(good)
}

/// Where the results of a path are.
fn results(out: &Path, way: Way) -> PathBuf {
    match way {
        Way::Shm => out.to_owned(),
        Way::Wire => out.join("wire"),
    }
}

/// Runs a client's cases, says how each ends, and stores the records.
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
    let mut cases = client.cases();
    if let Some(text) = &arguments.only {
        cases.retain(|case| case.name.contains(text.as_str()));
    }

    let scratch = tempfile::Builder::new().prefix("conformance-").tempdir()?;
    // What runs inside of something speaks to what is outside of this machine.
    let way = if client.within.is_some() { Way::Wire } else { arguments.path };
    let bench = Bench::new(client, millstream, scratch.path(), way);
    let prevented = match packages::ensure(&client.packages) {
        Ok(()) => bench.build(&logs.join("build")).err(),
        Err(missing) => Some(Outcome::NotRun(missing)),
    };
    let mut records = Vec::new();
    let total = cases.len();
    for (index, case) in cases.iter().enumerate() {
        let log = logs.join(format!("{:03}", index + 1));
        let began = Instant::now();
        let rans = match &prevented {
            Some(outcome) => vec![Ran { name: case.name.clone(), outcome: outcome.clone() }],
            None => bench.run(case, &log)?,
        };
        let seconds = began.elapsed().as_secs_f64();
        for ran in rans {
            let record = verdict::judge(client, case, ran, seconds, &log);
            if case.suite.is_none() || !record.good(false) {
                eprintln!("[{:>3}/{total}] {}", index + 1, record.line());
            }
            records.push(record);
        }
        if case.suite.is_some() {
            eprintln!("[{:>3}/{total}] {} ({seconds:.1} s)", index + 1, case.name);
        }
    }
    // Of a selection it cannot be said what is missing.
    if arguments.only.is_none() && prevented.is_none() {
        for record in verdict::stale(client, &records) {
            eprintln!("{}", record.line());
            records.push(record);
        }
    }
    verdict::save(&records, &file(client, arguments))?;
    Ok(records)
}

/// The file of a client's records; those of a selection have their own.
fn file(client: &Client, arguments: &Arguments) -> PathBuf {
    let part = if arguments.only.is_some() { ".part" } else { "" };
    results(&arguments.out, arguments.path).join(format!("{}{part}.jsonl", client.name))
}
