//! Processes that are started, watched and ended with everything they left.
//!
//! Every program leads a process group of its own, and this process adopts the orphans below it; so after a
//! case whatever it started is a descendant of this process, and nothing else is.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use millstream_shm::socket;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper, wait,
};

const PAUSE: Duration = Duration::from_millis(5);

/// Makes processes whose parents have ended children of this one.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// A program that runs, or has run.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
}

impl Program {
    /// Starts the words with these variables; what it prints goes to the file.
    pub(crate) fn start(
        words: &[String],
        env: &BTreeMap<String, String>,
        folder: &Path,
        output: &Path,
    ) -> io::Result<Self> {
        let output = File::create(output)?;
        // Should this process be killed, so is the program.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .args(words)
            .envs(env)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()?;
        Ok(Self { child })
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until it ends, at most so long.
    pub(crate) fn wait_until(&mut self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Ends it, with its process group.
    pub(crate) fn kill(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // Both fail only if it has ended meanwhile.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Kills every descendant of this process and forgets them. All [`Program`]s must have ended.
pub(crate) fn kill_everything_left() -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        let left = descendants()?;
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("processes do not end: {left:?}")));
        }
        for pid in left {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(PAUSE);
    }
}

/// The processes that this one or its descendants have started.
fn descendants() -> io::Result<Vec<Pid>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // Gone meanwhile, if it cannot be read. The name is in parentheses and may contain any character.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<i32>().ok());
        if let Some(parent) = parent {
            parents.push((pid, parent));
        }
    }
    let mut family = vec![getpid().as_raw_nonzero().get()];
    let mut next = 0;
    while next < family.len() {
        let parent = family[next];
        family.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    Ok(family[1..].iter().filter_map(|pid| Pid::from_raw(*pid)).collect())
}

/// Whether somebody listens on the port of rdma_cm: a name in docs/rdma-cm.md.
pub(crate) fn listens_by_rdma_cm(port: u16) -> bool {
    let port = format!("/{port}/");
    socket::listening_names("millstream/").iter().any(|name| name.contains("/cm/") && name.contains(&port))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Held by tests that have children: one of them kills all children of this process.
    pub(crate) static CHILDREN: Mutex<()> = Mutex::new(());

    #[test]
    fn what_a_program_leaves_is_killed() {
        let _alone = CHILDREN.lock();
        adopt_orphans().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        let words = ["sh", "-c", "setsid sleep 1000 & echo $!"].map(str::to_owned);
        let mut program = Program::start(&words, &BTreeMap::new(), folder.path(), &output).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        assert!(program.wait_until(deadline).unwrap().unwrap().success());
        let pid = fs::read_to_string(&output).unwrap();
        let left = format!("/proc/{}", pid.trim());
        assert!(Path::new(&left).exists());
        kill_everything_left().unwrap();
        assert!(!Path::new(&left).exists());
        assert_eq!(descendants().unwrap(), []);

        let words = ["sleep", "1000"].map(str::to_owned);
        let mut program = Program::start(&words, &BTreeMap::new(), folder.path(), &output).unwrap();
        assert!(program.wait_until(Instant::now()).unwrap().is_none());
        program.kill();
        assert!(!program.ended().unwrap().unwrap().success());
    }
}
