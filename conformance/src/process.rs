//! Starting programs, and ending them with all their descendants.
//!
//! Every program leads its own process group, and this process is the subreaper of their orphans. After a case,
//! all processes that it left are descendants of this process.

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

/// Makes this process the parent of orphaned descendants.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// A started program.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
}

impl Program {
    /// Starts a command line with extra environment variables. Its output goes to a file.
    pub(crate) fn start(
        words: &[String],
        env: &BTreeMap<String, String>,
        folder: &Path,
        output: &Path,
    ) -> io::Result<Self> {
        let output = File::create(output)?;
        // The program is killed if this process is.
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

    /// The exit status, if it has ended.
    pub(crate) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until it ends, or until the deadline.
    pub(crate) fn wait_until(&mut self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Kills its process group.
    pub(crate) fn kill(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // Fail only if it has just ended.
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

/// Kills and reaps all descendants of this process. All [`Program`]s must have ended.
pub(crate) fn kill_descendants() -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        let left = descendants()?;
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("processes survive SIGKILL: {left:?}")));
        }
        for pid in left {
            // Fails if it has just ended.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(PAUSE);
    }
}

/// All descendants of this process.
fn descendants() -> io::Result<Vec<Pid>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // Unreadable once the process has ended. The name is in parentheses and may contain any character.
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

/// Whether a process listens on the rdma_cm port: it holds a name as in docs/rdma-cm.md.
pub(crate) fn has_rdmacm_listener(port: u16) -> io::Result<bool> {
    let port = port.to_string();
    let names = socket::listening_names("millstream/")?;
    // millstream/USER/cm/SPACE/PORT/ADDRESS
    Ok(names.iter().any(|name| {
        let parts: Vec<&str> = name.split('/').collect();
        parts.get(2) == Some(&"cm") && parts.get(4) == Some(&port.as_str())
    }))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Serialises tests with child processes: one of them kills all children.
    pub(crate) static CHILDREN: Mutex<()> = Mutex::new(());

    #[test]
    fn a_listener_of_the_connection_manager_is_found_by_its_port() {
        let port = u16::MAX;
        let name = format!("millstream/0/cm/{:x}/{port}/127.0.0.1", std::process::id());
        let _listener = socket::BoundSocket::bind(&name).unwrap().listen().unwrap();
        assert!(has_rdmacm_listener(port).unwrap());
        assert!(!has_rdmacm_listener(0).unwrap(), "the user is not the port");
    }

    #[test]
    fn descendants_of_a_program_are_killed() {
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
        kill_descendants().unwrap();
        assert!(!Path::new(&left).exists());
        assert_eq!(descendants().unwrap(), []);

        let words = ["sleep", "1000"].map(str::to_owned);
        let mut program = Program::start(&words, &BTreeMap::new(), folder.path(), &output).unwrap();
        assert!(program.wait_until(Instant::now()).unwrap().is_none());
        program.kill();
        assert!(!program.try_wait().unwrap().unwrap().success());
    }
}
