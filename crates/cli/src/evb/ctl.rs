//! `millstream evb ctl`: commands to run control.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use millstream_control::client::Client;
use millstream_control::machine::State;
use millstream_control::status::{Status, UnitState};
use millstream_control::token::Token;
use millstream_report::count;
use millstream_tls::{KeysError, Security};
use serde_json::{Map, Value, json};

use crate::args::{CtlCommand, CtlRecord, EvbCtlOptions};

/// Time for a command to take effect.
const WAIT: Duration = Duration::from_secs(120);

pub(super) fn run(options: &EvbCtlOptions) -> Result<ExitCode, Box<dyn Error>> {
    match &options.command {
        CtlCommand::Status => print_status(&reader(options)?.status()?, options.json)?,
        CtlCommand::Log { last } => {
            print_log(&reader(options)?.get(&format!("/api/v1/log?last={last}"))?, options.json)?;
        }
        CtlCommand::Configure => drop(command(options, "configure", &body(""), |_| true)?),
        CtlCommand::Set { settings } => {
            drop(command(options, "set", &json!({ "settings": parse(settings)? }), |_| true)?);
        }
        CtlCommand::Prepare(record) => {
            let is_reached = |status: &Status| record.no_wait || status.state != State::Starting;
            return begin(options, "prepare", record, is_reached, &[State::Ready]);
        }
        CtlCommand::Start(record) => {
            let is_reached =
                |status: &Status| record.no_wait || !matches!(status.state, State::Starting | State::Ready);
            // A short run may already have ended.
            let good = [State::Running, State::Configured, State::Paused, State::Stopping];
            return begin(options, "start", record, is_reached, &good);
        }
        // The run may end at the same time.
        CtlCommand::Pause => {
            let status = command(options, "pause", &body(""), |status| status.state != State::Running)?;
            return Ok(exit_code(status.state != State::Error));
        }
        CtlCommand::Resume => {
            let status = command(options, "resume", &body(""), |status| status.state != State::Paused)?;
            return Ok(exit_code(status.state != State::Error));
        }
        CtlCommand::Stop => {
            let status = command(options, "stop", &body(""), |status| status.state != State::Stopping)?;
            return Ok(exit_code(status.state == State::Configured));
        }
        CtlCommand::Reset => drop(command(options, "reset", &body(""), |_| true)?),
        CtlCommand::Comment { text } => drop(command(options, "comment", &body(text), |_| true)?),
    }
    Ok(ExitCode::SUCCESS)
}

fn exit_code(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn reader(options: &EvbCtlOptions) -> Result<Client, KeysError> {
    Ok(Client::new(&options.address, None, &Security::from_environment()?))
}

/// Gives a command and waits for its effect.
fn give(
    options: &EvbCtlOptions,
    command: &str,
    body: &Value,
    is_reached: impl Fn(&Status) -> bool,
) -> Result<Status, Box<dyn Error>> {
    let security = Security::from_environment()?;
    let token = match &options.token_file {
        Some(path) => Some(load_token(path)?),
        // The certificate permits commands.
        None if security.is_on() => None,
        None => Some(load_token(Path::new("run-control/token"))?),
    };
    let client = Client::new(&options.address, token, &security);
    let status = client.command(command, body)?;
    if is_reached(&status) {
        return Ok(status);
    }
    let status = client.wait(WAIT, &is_reached)?;
    if !is_reached(&status) {
        return Err(format!("{command} has no effect after {WAIT:?}; the state is {}", status.state).into());
    }
    Ok(status)
}

fn load_token(path: &Path) -> Result<Token, String> {
    Token::load(path).map_err(|error| format!("{error}; --token-file names the token of run control"))
}

/// Gives a command, waits for its effect, and prints the status.
fn command(
    options: &EvbCtlOptions,
    command: &str,
    body: &Value,
    is_reached: impl Fn(&Status) -> bool,
) -> Result<Status, Box<dyn Error>> {
    let status = give(options, command, body, is_reached)?;
    print_status(&status, options.json)?;
    Ok(status)
}

/// Begins a run; fails if a state other than `good` is reached.
fn begin(
    options: &EvbCtlOptions,
    name: &str,
    record: &CtlRecord,
    is_reached: impl Fn(&Status) -> bool,
    good: &[State],
) -> Result<ExitCode, Box<dyn Error>> {
    let status = command(options, name, &body(&record.comment), is_reached)?;
    Ok(exit_code(record.no_wait || good.contains(&status.state)))
}

fn body(comment: &str) -> Value {
    json!({ "operator": std::env::var("USER").unwrap_or_default(), "comment": comment })
}

/// Parses `FIELD=VALUE`. A value that is not JSON is a text.
fn parse(settings: &[String]) -> Result<Map<String, Value>, String> {
    let pair = |setting: &String| {
        let (field, value) =
            setting.split_once('=').ok_or_else(|| format!("{setting}: write FIELD=VALUE"))?;
        let parsed = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        Ok((field.to_owned(), parsed))
    };
    settings.iter().map(pair).collect()
}

fn print_status(status: &Status, is_json: bool) -> Result<(), Box<dyn Error>> {
    if is_json {
        println!("{}", serde_json::to_string_pretty(status)?);
        return Ok(());
    }
    println!("state: {}", status.state);
    if let Some(configuration) = &status.configuration {
        println!("configuration: {} ({})", configuration.file.display(), &configuration.sha256[..12]);
        for (field, value) in &configuration.settings {
            println!("  {field} = {value}");
        }
        configuration.warnings.iter().for_each(|warning| println!("  warning: {warning}"));
    }
    if let Some(run) = &status.run {
        println!(
            "run {}: {} events built, {} accepted, {} incomplete, {} corrupt; {:.0} events/s, {}",
            run.number,
            count(run.progress.events_built),
            count(run.progress.events_accepted),
            count(run.progress.events_incomplete),
            count(run.progress.events_corrupt),
            run.events_per_s,
            run.payload_bytes_per_s,
        );
    }
    if let Some(run) = &status.last_run {
        let result = serde_json::to_value(run.result)?;
        println!(
            "last run {}: {}, {} events built, {} stored",
            run.number,
            result.as_str().unwrap_or_default(),
            count(run.events),
            count(run.stored_events),
        );
        run.problems.iter().for_each(|problem| println!("  {problem}"));
    }
    for unit in &status.units {
        if unit.state == UnitState::Ended {
            println!("  {} {}: process {} has ended", unit.role, unit.name, unit.pid);
            continue;
        }
        let cpu =
            unit.cpu_use.map_or_else(String::new, |cpu| format!(", {:.0} % of a processor", cpu * 100.0));
        let memory = unit.memory_bytes.map_or_else(String::new, |bytes| format!(", {bytes}"));
        println!("  {} {}: process {}{cpu}{memory}", unit.role, unit.name, unit.pid);
    }
    Ok(())
}

fn print_log(log: &Value, is_json: bool) -> Result<(), Box<dyn Error>> {
    if is_json {
        println!("{}", serde_json::to_string_pretty(log)?);
        return Ok(());
    }
    for entry in log["entries"].as_array().into_iter().flatten() {
        let text = |field: &str| entry[field].as_str().unwrap_or_default().to_owned();
        let details = match entry["record"].as_str() {
            Some("begin") => [text("operator"), text("comment"), text("sha256")].join(" "),
            Some("comment") => [text("operator"), text("text")].join(" "),
            Some("end") => format!("{} {}", text("result"), entry["problems"]),
            _ => String::new(),
        };
        println!("{} run {} {} {}", text("time"), entry["run"], text("record"), details.trim());
    }
    Ok(())
}
