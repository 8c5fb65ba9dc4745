//! Runs one case: its processes, their deadline, and the checks of their output.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use millstream_shm::ports;

use crate::client::{Case, Client, DataPath, Ready};
use crate::process::{self, Program};

/// Outcome of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Pass,
    /// Skipped by the program, with its reason.
    Skip(String),
    Fail(String),
    /// Not run, with the cause.
    NotRun(String),
}

/// Result of a case, or of one case of a suite.
#[derive(Debug)]
pub(crate) struct CaseResult {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
}

/// Runs the cases of a client.
#[derive(Debug)]
pub(crate) struct CaseRunner<'a> {
    client: &'a Client,
    millstream: PathBuf,
    scratch: PathBuf,
    path: DataPath,
}

/// Retries of a case whose failure matches a retry rule.
const MAX_RETRIES: usize = 2;

/// Time for a server to get ready, and for one side to end after the other has failed.
const GRACE: Duration = Duration::from_secs(30);

impl<'a> CaseRunner<'a> {
    pub(crate) fn new(client: &'a Client, millstream: &Path, scratch: &Path, path: DataPath) -> Self {
        Self { client, millstream: millstream.to_owned(), scratch: scratch.to_owned(), path }
    }

    /// Runs the client's build commands. An error is the outcome of all its cases.
    pub(crate) fn build(&self, log: &Path) -> Result<(), Outcome> {
        for command in &self.client.build {
            let words = self.words(command, "", 0);
            let deadline = Instant::now() + Duration::from_secs(300);
            let ended = Program::start(&words, &BTreeMap::new(), &self.scratch, log)
                .and_then(|mut program| program.wait_until(deadline));
            match ended {
                Ok(Some(status)) if status.success() => {}
                Ok(status) => {
                    return Err(Outcome::NotRun(format!("{command}: {}", describe_end(status, log))));
                }
                Err(cause) => return Err(Outcome::NotRun(format!("{command}: {cause}"))),
            }
        }
        Ok(())
    }

    /// Runs a case. `log` is the prefix of its output files.
    pub(crate) fn run(&self, case: &Case, log: &Path) -> io::Result<Vec<CaseResult>> {
        let log = |side: &str| {
            let mut name = log.as_os_str().to_owned();
            name.push(format!("-{side}.log"));
            PathBuf::from(name)
        };
        let (server, client) = (log("server"), log("client"));
        let mut retries = 0;
        let outcome = loop {
            let outcome = self.processes(case, &server, &client, &log("ready"))?;
            process::kill_descendants()?;
            if !matches!(outcome, Outcome::Fail(_)) || retries == MAX_RETRIES {
                break outcome;
            }
            let Some(retry) = self.client.retry(&[&read(&client), &read(&server)]) else { break outcome };
            retries += 1;
            eprintln!("retry: {}: {}", case.name, retry.reason);
        };
        let shown = read(&client);
        if let Some(suite) = case.suite {
            return Ok(suite.results(&case.name, &shown, outcome));
        }
        let outcome =
            if outcome == Outcome::Pass { check_output(case, &shown, &read(&server)) } else { outcome };
        Ok(vec![CaseResult { name: case.name.clone(), outcome }])
    }

    /// Starts the processes and waits until they end or time out.
    fn processes(
        &self,
        case: &Case,
        server_log: &Path,
        client_log: &Path,
        ready_log: &Path,
    ) -> io::Result<Outcome> {
        let port = ports::unused()?;
        let mut env = case.template.env.clone();
        env.extend(case.env.clone());
        for value in env.values_mut() {
            *value = self.fill(value, &case.command_line, port);
        }
        let start = |command: &str, log: &Path| {
            let start = ["--device", "soft", "run", "--path", self.path.name(), "--"];
            let mut words: Vec<String> = start.map(str::to_owned).to_vec();
            words.insert(0, self.millstream.display().to_string());
            words.extend(self.words(command, &case.command_line, port));
            Program::start(&words, &env, &self.scratch, log)
        };

        let deadline = Instant::now() + Duration::from_secs(case.timeout_s);
        let mut server = None;
        if let Some(command) = case.template.server() {
            let mut program = start(command, server_log)?;
            let asks = |command: &str| start(command, ready_log);
            if !ready(&mut program, &case.template.ready, port, asks)? {
                let ended = program.try_wait()?;
                program.kill();
                return Ok(Outcome::Fail(format!(
                    "the server is not ready: {}",
                    describe_end(ended, server_log)
                )));
            }
            server = Some(program);
        }
        let mut client = start(case.template.client(), client_log)?;
        let client_end = self.first_end(&mut client, server.as_mut(), deadline)?;
        if client_end.and_then(|status| status.code()) != Some(case.template.client_exit) {
            let mut why = format!("client: {}", describe_end(client_end, client_log));
            client.kill();
            if let Some(mut server) = server {
                // An error of the server probably caused that of the client.
                let end = server.wait_until(Instant::now() + Duration::from_secs(2))?;
                if end.is_some_and(|status| !status.success()) {
                    why = format!("server: {}; {why}", describe_end(end, server_log));
                }
            }
            return Ok(Outcome::Fail(why));
        }
        if let Some(mut server) = server
            && !case.template.server_keeps_running
        {
            let end = server.wait_until(deadline.min(Instant::now() + GRACE))?;
            if !end.is_some_and(|status| status.success()) {
                return Ok(Outcome::Fail(format!("server: {}", describe_end(end, server_log))));
            }
        }
        Ok(Outcome::Pass)
    }

    /// Waits for the client. The deadline becomes shorter once the server has failed.
    fn first_end(
        &self,
        client: &mut Program,
        mut server: Option<&mut Program>,
        mut deadline: Instant,
    ) -> io::Result<Option<ExitStatus>> {
        loop {
            let soon = Instant::now() + Duration::from_millis(50);
            if let Some(status) = client.wait_until(soon.min(deadline))? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            let failed = |server: &mut &mut Program| {
                server.try_wait().is_ok_and(|end| end.is_some_and(|status| !status.success()))
            };
            if server.as_mut().is_some_and(failed) {
                deadline = deadline.min(Instant::now() + GRACE);
                server = None;
            }
        }
    }

    fn words(&self, command: &str, case: &str, port: u16) -> Vec<String> {
        self.fill(command, case, port).split_whitespace().map(str::to_owned).collect()
    }

    fn fill(&self, text: &str, case: &str, port: u16) -> String {
        let programs = self.millstream.parent().unwrap_or(Path::new(""));
        text.replace("{case}", case)
            .replace("{bin}", &programs.display().to_string())
            .replace("{port}", &port.to_string())
            .replace("{scratch}", &self.scratch.display().to_string())
            .replace("{client}", &self.client.folder.display().to_string())
    }
}

/// Waits until the server is ready; false if it ends or the time is over.
fn ready(
    server: &mut Program,
    when: &Ready,
    port: u16,
    start: impl Fn(&str) -> io::Result<Program>,
) -> io::Result<bool> {
    match when {
        Ready::Milliseconds(time) => {
            let time = Duration::from_millis(*time);
            Ok(server.wait_until(Instant::now() + time)?.is_none())
        }
        Ready::TcpListening => wait_until(server, || Ok(ports::has_listener(port))),
        Ready::RdmacmListening => wait_until(server, || process::has_rdmacm_listener(port)),
        Ready::Command(command) => wait_until(server, || {
            let end = start(command)?.wait_until(Instant::now() + GRACE)?;
            Ok(end.is_some_and(|status| status.success()))
        }),
    }
}

/// Waits until `condition` holds; false if the server ends or the time is over.
fn wait_until(server: &mut Program, condition: impl Fn() -> io::Result<bool>) -> io::Result<bool> {
    let deadline = Instant::now() + GRACE;
    while !condition()? {
        if Instant::now() > deadline || server.try_wait()?.is_some() {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}

/// Checks the output of programs that ended successfully.
fn check_output(case: &Case, client: &str, server: &str) -> Outcome {
    for pattern in &case.expect_output {
        if !pattern.is_match(client) {
            return Outcome::Fail(format!("the client's output does not match {:?}", pattern.as_str()));
        }
    }
    for pattern in &case.forbid_output {
        if let Some(found) = pattern.find(client).or_else(|| pattern.find(server)) {
            return Outcome::Fail(format!("the output contains {:?}", found.as_str()));
        }
    }
    Outcome::Pass
}

fn read(log: &Path) -> String {
    fs::read(log).map_or(String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// The exit status of a program and its last line of output.
fn describe_end(end: Option<ExitStatus>, log: &Path) -> String {
    let text = read(log);
    let is_ruler = |line: &str| line.trim_matches(|c: char| !c.is_alphanumeric()).is_empty();
    let last = text.lines().rev().map(str::trim).find(|line| !is_ruler(line)).unwrap_or_default();
    let last: String = last.chars().take(160).collect();
    let end = end.map_or("timed out".to_owned(), |status| status.to_string());
    if last.is_empty() { end } else { format!("{end}, {last:?}") }
}
