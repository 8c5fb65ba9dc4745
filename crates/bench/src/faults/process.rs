//! The processes of a run, and what can happen to them.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// A process of a run.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// Its arguments from the role on, as in `readout 0 127.0.0.1:4711`.
    role: Vec<String>,
}

/// What fails: the last process of a kind, the front end of the last readout unit, the disk of the last builder unit, or the
/// link of one of these units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Readout,
    Builder,
    Card,
    Manager,
    Standby,
    /// A front end that sends datagrams to the readout unit.
    Source,
    /// What the builder unit's storage thread writes to.
    Disk,
    /// The link of the readout unit's host.
    ReadoutLink,
    /// The link of the builder unit's host, with its card.
    BuilderLink,
}

/// What happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Kill,
    StopOneSecond,
    StopForEver,
    /// It runs for 1 ms of every 10 ms, until it ends; each write to a disk takes 20 ms longer.
    Slow,
    /// Each tenth datagram has a wrong checksum.
    Corrupt,
    /// Each tenth datagram comes after the readout unit has stopped waiting for it; each tenth packet comes 20 ms late.
    Late,
    /// Each datagram, or packet, comes twice.
    Duplicate,
    /// Writes fail with ENOSPC.
    Full,
    /// Nothing passes for 200 ms.
    CutShortly,
    /// Nothing passes any more.
    CutForEver,
    /// Each packet is lost with a probability of 1 %.
    Loss,
}

impl Victim {
    pub(super) const ALL: [Victim; 9] = [
        Victim::Readout,
        Victim::Builder,
        Victim::Card,
        Victim::Manager,
        Victim::Standby,
        Victim::Source,
        Victim::Disk,
        Victim::ReadoutLink,
        Victim::BuilderLink,
    ];

    /// What can happen to it.
    pub(super) fn faults(self) -> &'static [Fault] {
        match self {
            Victim::Source => &[Fault::StopOneSecond, Fault::Corrupt, Fault::Late, Fault::Duplicate],
            Victim::Disk => &[Fault::Full, Fault::Slow],
            Victim::ReadoutLink | Victim::BuilderLink => {
                &[Fault::CutShortly, Fault::CutForEver, Fault::Loss, Fault::Duplicate, Fault::Late]
            }
            _ => &[Fault::Kill, Fault::StopOneSecond, Fault::StopForEver, Fault::Slow],
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Victim::Readout => "readout",
            Victim::Builder => "builder",
            Victim::Card => "card",
            Victim::Manager => "manager",
            Victim::Standby => "standby",
            Victim::Source => "source",
            Victim::Disk => "disk",
            Victim::ReadoutLink => "readout link",
            Victim::BuilderLink => "builder link",
        }
    }

    /// Whether it is the link of a host.
    pub(super) fn is_link(self) -> bool {
        matches!(self, Victim::ReadoutLink | Victim::BuilderLink)
    }

    /// Whether the process is this victim in a run with that many units.
    pub(super) fn is(self, process: &Process, readouts: usize, builders: usize) -> bool {
        let words: Vec<&str> = process.role.iter().map(String::as_str).collect();
        let is_last = |index: &str, units: usize| index.parse() == Ok(units - 1);
        match (self, &words[..]) {
            (Victim::Readout, ["readout", index, ..]) => is_last(index, readouts),
            (Victim::Builder | Victim::Disk, ["builder", index, ..]) => is_last(index, builders),
            (Victim::Card, ["card", name, ..]) => name.ends_with(&format!(".card{}", builders - 1)),
            (Victim::Manager, ["manager", ..]) | (Victim::Standby, ["standby", ..]) => true,
            _ => false,
        }
    }
}

impl Fault {
    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::Kill => "killed",
            Fault::StopOneSecond => "stopped for 1 s",
            Fault::StopForEver => "stopped for ever",
            Fault::Slow => "slow",
            Fault::Corrupt => "corrupt",
            Fault::Late => "late",
            Fault::Duplicate => "duplicate",
            Fault::Full => "full",
            Fault::CutShortly => "cut for 200 ms",
            Fault::CutForEver => "cut for ever",
            Fault::Loss => "1 % of packets lost",
        }
    }

    /// A link's fault of single packets, as the soft device's setting.
    pub(super) fn of_packets(self) -> Option<&'static str> {
        match self {
            Fault::Loss => Some("drop=0.01"),
            Fault::Duplicate => Some("duplicate=1"),
            Fault::Late => Some("delay=0.1:20ms"),
            _ => None,
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
            Fault::Corrupt
            | Fault::Late
            | Fault::Duplicate
            | Fault::Full
            | Fault::CutShortly
            | Fault::CutForEver
            | Fault::Loss => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a fault of a process")),
        }
    }
}

/// Changes the result of every write of a process's storage thread, until the process ends: `strace` stops the thread at its
/// system calls. Returns the `strace` process.
pub(super) fn inject_into_storage(pid: u32, fault: Fault) -> io::Result<Child> {
    let effect = match fault {
        Fault::Full => "error=ENOSPC",
        Fault::Slow => "delay_enter=20000",
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a fault of a disk")),
    };
    let thread = storage_thread(pid)?.to_string();
    let mut strace = Command::new("strace")
        .args(["-p", &thread, "-o", "/dev/null", "-e", "trace=pwrite64,write,pwritev,ftruncate"])
        .args(["-e", &format!("inject=pwrite64,write,pwritev:{effect}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|cause| io::Error::new(cause.kind(), format!("cannot start strace: {cause}")))?;
    let mut line = String::new();
    if let Some(stderr) = strace.stderr.take() {
        // Its first line: attached, or why not.
        BufReader::new(stderr).read_line(&mut line)?;
    }
    if line.contains("attached") {
        return Ok(strace);
    }
    let _ = strace.kill();
    let _ = strace.wait();
    Err(io::Error::other(format!("strace cannot attach to the storage thread: {}", line.trim())))
}

/// The storage thread of a builder unit.
fn storage_thread(pid: u32) -> io::Result<u32> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = entry?;
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.trim() == "storage"
            && let Some(thread) = task.file_name().to_str().and_then(|thread| thread.parse().ok())
        {
            return Ok(thread);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("process {pid} has no thread called storage")))
}

/// Whether `strace` is installed.
pub(super) fn has_strace() -> bool {
    let version =
        Command::new("strace").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
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
