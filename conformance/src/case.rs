//! Running one case: its processes, their deadline, and what their output says.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use millstream_shm::ports;

use crate::client::{Case, Client, Ready, Way};
use crate::process::{self, Program};

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Pass,
    /// With the program's own reason.
    Skip(String),
    Fail(String),
    /// With what prevented it.
    NotRun(String),
}

/// A case, or one of the cases that a suite reported.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
}

/// Where a client's programs run.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    client: &'a Client,
    millstream: PathBuf,
    scratch: PathBuf,
    way: Way,
}

/// How often a case is run again that its program failed by a flaw of its own.
const AGAIN: usize = 2;

/// For a server to get ready, and for either side to end once the other has failed.
const GRACE: Duration = Duration::from_secs(30);

impl<'a> Bench<'a> {
    pub(crate) fn new(client: &'a Client, millstream: &Path, scratch: &Path, way: Way) -> Self {
        Self { client, millstream: millstream.to_owned(), scratch: scratch.to_owned(), way }
    }

    /// Runs the client's build commands. The error is the outcome of all of its cases.
    pub(crate) fn build(&self, log: &Path) -> Result<(), Outcome> {
        for command in &self.client.build {
            let words = self.words(command, "", 0);
            let deadline = Instant::now() + Duration::from_secs(300);
            let ended = Program::start(&words, &BTreeMap::new(), &self.scratch, log)
                .and_then(|mut program| program.wait_until(deadline));
            match ended {
                Ok(Some(status)) if status.success() => {}
                Ok(status) => return Err(Outcome::NotRun(format!("{command}: {}", blame(status, log)))),
                Err(cause) => return Err(Outcome::NotRun(format!("{command}: {cause}"))),
            }
        }
        Ok(())
    }

    /// Runs a case. Its output is in files whose names begin with `log`.
    pub(crate) fn run(&self, case: &Case, log: &Path) -> io::Result<Vec<Ran>> {
        let log = |side: &str| {
            let mut name = log.as_os_str().to_owned();
            name.push(format!("-{side}.log"));
            PathBuf::from(name)
        };
        let (server, client) = (log("server"), log("client"));
        let mut again = 0;
        let outcome = loop {
            let outcome = self.processes(case, &server, &client, &log("ready"))?;
            process::kill_everything_left()?;
            if !matches!(outcome, Outcome::Fail(_)) || again == AGAIN {
                break outcome;
            }
            let Some(flaw) = self.client.flaw(&[&read(&client), &read(&server)]) else { break outcome };
            again += 1;
            eprintln!("once more: {}: {}", case.name, flaw.reason);
        };
        let shown = read(&client);
        if let Some(suite) = case.suite {
            return Ok(suite.cases(&case.name, &shown, outcome));
        }
        let outcome = if outcome == Outcome::Pass { said(case, &shown, &read(&server)) } else { outcome };
        Ok(vec![Ran { name: case.name.clone(), outcome }])
    }

    /// Starts the processes and waits until they have ended: by themselves, or with the case's time.
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
            *value = self.fill(value, &case.words, port);
        }
        let start = |command: &str, log: &Path| {
            let start = ["--device", "soft", "run", "--path", self.way.word(), "--"];
            let mut words: Vec<String> = start.map(str::to_owned).to_vec();
            words.insert(0, self.millstream.display().to_string());
            words.extend(self.words(command, &case.words, port));
            Program::start(&words, &env, &self.scratch, log)
        };

        let deadline = Instant::now() + Duration::from_secs(case.limit_s);
        let mut server = None;
        if let Some(command) = case.template.server() {
            let mut program = start(command, server_log)?;
            let asks = |command: &str| start(command, ready_log);
            if !ready(&mut program, &case.template.ready, port, asks)? {
                let ended = program.ended()?;
                program.kill();
                return Ok(Outcome::Fail(format!("the server does not serve: {}", blame(ended, server_log))));
            }
            server = Some(program);
        }
        let mut client = start(case.template.client(), client_log)?;
        let client_end = self.first_end(&mut client, server.as_mut(), deadline)?;
        if client_end.and_then(|status| status.code()) != Some(case.template.client_exit) {
            let mut why = format!("the client: {}", blame(client_end, client_log));
            client.kill();
            if let Some(mut server) = server {
                // An error of the server is more likely to be the cause than that of its client.
                let end = server.wait_until(Instant::now() + Duration::from_secs(2))?;
                if end.is_some_and(|status| !status.success()) {
                    why = format!("the server: {}; {why}", blame(end, server_log));
                }
            }
            return Ok(Outcome::Fail(why));
        }
        if let Some(mut server) = server
            && !case.template.server_stays
        {
            let end = server.wait_until(deadline.min(Instant::now() + GRACE))?;
            if !end.is_some_and(|status| status.success()) {
                return Ok(Outcome::Fail(format!("the server: {}", blame(end, server_log))));
            }
        }
        Ok(Outcome::Pass)
    }

    /// How the client ended. A client whose server has failed does not get all of the time.
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
                server.ended().is_ok_and(|end| end.is_some_and(|status| !status.success()))
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

/// Waits until the server serves; false if it has ended or takes too long.
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
        Ready::Listens => once(server, || Ok(ports::has_listener(port))),
        Ready::Manages => once(server, || Ok(process::listens_by_rdma_cm(port))),
        Ready::Asked(command) => once(server, || {
            let end = start(command)?.wait_until(Instant::now() + GRACE)?;
            Ok(end.is_some_and(|status| status.success()))
        }),
    }
}

/// Waits until it is so; false if the server has ended or takes too long.
fn once(server: &mut Program, so: impl Fn() -> io::Result<bool>) -> io::Result<bool> {
    let deadline = Instant::now() + GRACE;
    while !so()? {
        if Instant::now() > deadline || server.ended()?.is_some() {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}

/// Whether the programs, which have ended well, said what they should.
fn said(case: &Case, client: &str, server: &str) -> Outcome {
    for pattern in &case.shows {
        if !pattern.is_match(client) {
            return Outcome::Fail(format!("the client shows nothing like {:?}", pattern.as_str()));
        }
    }
    for pattern in &case.never {
        if let Some(found) = pattern.find(client).or_else(|| pattern.find(server)) {
            return Outcome::Fail(format!("it says {:?}", found.as_str()));
        }
    }
    Outcome::Pass
}

fn read(log: &Path) -> String {
    fs::read(log).map_or(String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// How a program ended, and the last that it said.
fn blame(end: Option<ExitStatus>, log: &Path) -> String {
    let text = read(log);
    let decorated = |line: &str| line.trim_matches(|c: char| !c.is_alphanumeric()).is_empty();
    let last = text.lines().rev().map(str::trim).find(|line| !decorated(line)).unwrap_or_default();
    let last: String = last.chars().take(160).collect();
    let end = end.map_or("does not end".to_owned(), |status| status.to_string());
    if last.is_empty() { end } else { format!("{end}, {last:?}") }
}
