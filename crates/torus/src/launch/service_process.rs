//! Supervisors and host monitors as children of the launcher. Dropping one ends its process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::LaunchError;
use super::child::spawn;
use crate::proof::{Call, Purpose};
use crate::service::lines::Lines;
use crate::service::{FromSupervisor, TorusState, Who};

const END: Duration = Duration::from_secs(2);
/// How long a live supervisor may take to tell the state.
const STATE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct ServiceProcess {
    process: Child,
    address: Option<String>,
}

impl ServiceProcess {
    /// Starts the process, which reads the run's key from its standard input.
    pub(super) fn start(command: Command, key: u64) -> Result<ServiceProcess, LaunchError> {
        Ok(ServiceProcess { process: spawn(command, &[key])?, address: None })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Where a supervisor listens.
    pub(super) fn address(&mut self, index: usize, deadline: Instant) -> Result<String, LaunchError> {
        let failed = |reason: &str| LaunchError::Supervisor { index, reason: reason.to_owned() };
        let output = self.process.stdout.take().ok_or_else(|| failed("has no output"))?;
        let (sender, line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = BufReader::new(output).read_line(&mut text);
            let _ = sender.send(text);
        });
        let left = deadline.saturating_duration_since(Instant::now());
        let text = line.recv_timeout(left).map_err(|_| failed("does not say where it listens"))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|_| failed("ended before it listened"))?;
        let address = value["listening"].as_str().ok_or_else(|| failed("does not say where it listens"))?;
        self.address = Some(address.to_owned());
        Ok(address.to_owned())
    }

    pub(super) fn listening(&self) -> Option<String> {
        self.address.clone()
    }

    /// The state of the torus from a supervisor.
    pub(super) fn state(&self, key: u64) -> Option<TorusState> {
        let call = Call { key, purpose: Purpose::Watcher, to: 0 };
        let mut lines = Lines::dial(self.address.as_ref()?, call, Who::Watcher, STATE).ok()?;
        lines.set_read_timeout(Some(STATE)).ok()?;
        let messages: Vec<FromSupervisor> = lines.read().ok()?;
        messages.into_iter().find_map(|message| match message {
            FromSupervisor::State(state) => Some(state),
            _ => None,
        })
    }
}

impl Drop for ServiceProcess {
    fn drop(&mut self) {
        self.process.stdin = None;
        let deadline = Instant::now() + END;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
