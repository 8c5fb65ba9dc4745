//! A node process as a child of the launcher. Dropping it ends the process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use millstream_torus_core::NodeNumber;

use super::LaunchError;
use crate::key;
use crate::node::{NodeCommand, NodeMessage};

/// How long a node process may take to end after its standard input has ended.
const END: Duration = Duration::from_secs(5);

/// Starts a process, which finds a line with each key at its standard input.
pub(super) fn spawn(mut command: Command, keys: &[u64]) -> Result<Child, LaunchError> {
    let program = command.get_program().to_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    millstream_shm::descriptors::restore_limit(&mut command);
    let mut process = command.spawn().map_err(|cause| LaunchError::Start { program, cause })?;
    let lines: String = keys.iter().map(|&key| key::text(key) + "\n").collect();
    if let Some(input) = &mut process.stdin {
        // One that has ended is noticed by its silence.
        let _ = input.write_all(lines.as_bytes());
    }
    Ok(process)
}

#[derive(Debug)]
pub(super) struct NodeChild {
    node: NodeNumber,
    process: Child,
    input: Option<ChildStdin>,
    messages: Receiver<NodeMessage>,
}

impl NodeChild {
    pub(super) fn start(node: NodeNumber, command: Command, keys: &[u64]) -> Result<NodeChild, LaunchError> {
        let mut process = spawn(command, keys)?;
        let (sender, messages) = mpsc::channel();
        if let Some(output) = process.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Ok(message) = serde_json::from_str(&line) {
                        let _ = sender.send(message);
                    }
                }
            });
        }
        let input = process.stdin.take();
        Ok(NodeChild { node, process, input, messages })
    }

    pub(super) fn node(&self) -> NodeNumber {
        self.node
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn failure(&self, reason: impl Into<String>) -> LaunchError {
        LaunchError::Node { node: self.node, reason: reason.into() }
    }

    /// The next message.
    pub(super) fn expect(&mut self, deadline: Instant) -> Result<NodeMessage, LaunchError> {
        match self.messages.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(NodeMessage::Failed { reason }) => Err(self.failure(reason)),
            Ok(message) => Ok(message),
            Err(RecvTimeoutError::Timeout) => Err(self.failure("the node process does not answer")),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    fn ended(&mut self) -> LaunchError {
        match self.process.wait() {
            Ok(status) => self.failure(format!("the node process ended with {status}")),
            Err(error) => self.failure(error.to_string()),
        }
    }

    /// Whether the process still works.
    pub(super) fn check(&mut self) -> Result<(), LaunchError> {
        match self.process.try_wait() {
            Ok(None) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    pub(super) fn send(&mut self, command: &NodeCommand) -> Result<(), LaunchError> {
        let line = serde_json::to_string(command).map_err(|error| self.failure(error.to_string()))?;
        let Some(input) = &mut self.input else { return Ok(()) };
        match writeln!(input, "{line}") {
            Ok(()) => Ok(()),
            Err(_) => Err(self.ended()),
        }
    }
}

impl Drop for NodeChild {
    fn drop(&mut self) {
        self.input = None;
        let deadline = Instant::now() + END;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
