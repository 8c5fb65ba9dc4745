//! Commands of the launcher on standard input.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;

use super::message::NodeCommand;
use super::options::{NodeError, context};

/// Lines of standard input.
pub(super) struct Input {
    pub(super) file: Arc<File>,
    buffer: Vec<u8>,
}

impl Input {
    pub(super) fn open() -> io::Result<Input> {
        Ok(Input {
            file: Arc::new(File::from(io::stdin().as_fd().try_clone_to_owned()?)),
            buffer: Vec::new(),
        })
    }

    /// Reads once. `None` at the end, otherwise whole lines.
    pub(super) fn read(&mut self) -> io::Result<Option<Vec<String>>> {
        let mut chunk = [0; 4096];
        let read = (&*self.file).read(&mut chunk)?;
        if read == 0 {
            return Ok(None);
        }
        self.buffer.extend_from_slice(&chunk[..read]);
        let mut lines = Vec::new();
        while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line[..end]).into_owned());
        }
        Ok(Some(lines))
    }
}

pub(super) fn parse(line: &str) -> Result<NodeCommand, NodeError> {
    serde_json::from_str(line).map_err(|cause| NodeError::Command { cause })
}

/// Waits for the addresses of all nodes. `None` if the launcher ended before.
pub(super) fn await_peers(input: &mut Input) -> Result<Option<Vec<String>>, NodeError> {
    loop {
        let Some(lines) = input.read().map_err(context("read standard input"))? else { return Ok(None) };
        for line in lines {
            if let NodeCommand::Peers(peers) = parse(&line)? {
                return Ok(Some(peers));
            }
        }
    }
}
