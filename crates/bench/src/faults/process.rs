//! The processes of a run, and what can happen to them.

use std::io;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// A process of a run.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// Its arguments from the role on, as in `readout 0 127.0.0.1:4711`.
    role: Vec<String>,
}

/// The process that fails: the last one of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Readout,
    Builder,
    Card,
    Manager,
}

/// What happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Kill,
    StopOneSecond,
    StopForEver,
    /// It runs for 1 ms of every 10 ms, until it ends.
    Slow,
}

impl Victim {
    pub(super) const ALL: [Victim; 4] = [Victim::Readout, Victim::Builder, Victim::Card, Victim::Manager];

    pub(super) fn name(self) -> &'static str {
        match self {
            Victim::Readout => "readout",
            Victim::Builder => "builder",
            Victim::Card => "card",
            Victim::Manager => "manager",
        }
    }

    /// Whether the process is this victim in a run with that many units.
    pub(super) fn is(self, process: &Process, readouts: usize, builders: usize) -> bool {
        let words: Vec<&str> = process.role.iter().map(String::as_str).collect();
        let is_last = |index: &str, units: usize| index.parse() == Ok(units - 1);
        match (self, &words[..]) {
            (Victim::Readout, ["readout", index, ..]) => is_last(index, readouts),
            (Victim::Builder, ["builder", index, ..]) => is_last(index, builders),
            (Victim::Card, ["card", name, ..]) => name.ends_with(&format!(".card{}", builders - 1)),
            (Victim::Manager, ["manager", ..]) => true,
            _ => false,
        }
    }
}

impl Fault {
    pub(super) const ALL: [Fault; 4] = [Fault::Kill, Fault::StopOneSecond, Fault::StopForEver, Fault::Slow];

    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::Kill => "killed",
            Fault::StopOneSecond => "stopped for 1 s",
            Fault::StopForEver => "stopped for ever",
            Fault::Slow => "slowed down × 10",
        }
    }

    /// Makes it happen to the process.
    pub(super) fn inject(self, pid: u32) -> io::Result<()> {
        match self {
            Fault::Kill => send(pid, Signal::KILL),
            Fault::StopForEver => send(pid, Signal::STOP),
            Fault::StopOneSecond => {
                send(pid, Signal::STOP)?;
                std::thread::sleep(Duration::from_secs(1));
                // A process that was given up meanwhile is gone.
                let _ = send(pid, Signal::CONT);
                Ok(())
            }
            Fault::Slow => {
                std::thread::spawn(move || {
                    while is_running(pid) && send(pid, Signal::STOP).is_ok() {
                        std::thread::sleep(Duration::from_millis(9));
                        let _ = send(pid, Signal::CONT);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
                Ok(())
            }
        }
    }
}

fn send(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, signal)?)
}

/// The children of a launcher, from `/proc`.
pub(super) fn processes_of(launcher: u32) -> io::Result<Vec<Process>> {
    let mut processes = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // Processes end while they are listed.
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if parent(pid) == Some(launcher) {
            let words =
                arguments.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
            processes.push(Process { pid, role: words.skip_while(|word| word != "unit").skip(1).collect() });
        }
    }
    Ok(processes)
}

/// State and parent of a process: the fields behind its name, which may contain any character.
fn status(pid: u32) -> Option<(char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn parent(pid: u32) -> Option<u32> {
    Some(status(pid)?.1)
}

/// Whether the process exists and is no zombie.
pub(super) fn is_running(pid: u32) -> bool {
    status(pid).is_some_and(|(state, _)| state != 'Z')
}
