//! Commands of the launcher to the manager and to the standby manager, over their standard input: one JSON value a line.

use crate::core::Unit;
use serde::{Deserialize, Serialize};
use std::os::fd::BorrowedFd;

/// A command of the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ManagerCommand {
    /// To the manager: assign no further batch.
    Pause,
    /// To the manager: assign batches again.
    Resume,
    /// To the standby manager: the manager is lost; take over.
    TakeOver,
    /// The process of this unit has ended. A manager that has no stream to it learns it only so.
    Ended(Unit),
}

impl ManagerCommand {
    /// The line.
    pub(super) fn line(&self) -> String {
        let json =
            serde_json::to_string(self).unwrap_or_else(|error| unreachable!("no map, no float: {error}"));
        json + "\n"
    }
}

/// The commands that come over a descriptor.
#[derive(Debug, Default)]
pub(super) struct CommandReader {
    /// The beginning of a line.
    partial: Vec<u8>,
}

impl CommandReader {
    /// Reads the commands that are there. `None` if the launcher has closed its end: there will be no more.
    pub(super) fn read(&mut self, from: BorrowedFd<'_>) -> Option<Vec<ManagerCommand>> {
        let mut bytes = [0; 4096];
        match rustix::io::read(from, &mut bytes) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(_) | Ok(0) => return None,
            Ok(length) => self.partial.extend_from_slice(&bytes[..length]),
        }
        let end = self.partial.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = self.partial.drain(..end).collect();
        let commands = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let known = commands.filter_map(|line| {
            let text = String::from_utf8_lossy(line);
            let command = serde_json::from_str(&text);
            command.inspect_err(|error| tracing::warn!(line = %text, %error, "a command was ignored")).ok()
        });
        Some(known.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::BuIndex;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    #[test]
    fn commands_arrive_in_pieces_and_unknown_lines_are_ignored() {
        let (from, mut to) = std::io::pipe().unwrap();
        let ended = ManagerCommand::Ended(Unit::Builder(BuIndex(3)));
        let lines = [ManagerCommand::Pause.line(), "what\n".to_owned(), ended.line()].concat();
        let (first, second) = lines.as_bytes().split_at(lines.len() - 4);
        let mut reader = CommandReader::default();
        to.write_all(first).unwrap();
        assert_eq!(reader.read(from.as_fd()), Some(vec![ManagerCommand::Pause]));
        to.write_all(second).unwrap();
        assert_eq!(reader.read(from.as_fd()), Some(vec![ended]));
        drop(to);
        assert_eq!(reader.read(from.as_fd()), None);
    }
}
