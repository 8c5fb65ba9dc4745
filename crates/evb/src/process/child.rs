//! A process of a run as a child of the launcher.
//!
//! The launcher passes the role as arguments ([`Child::to_arguments`]). The manager also reads the configuration from the
//! first line of standard input. A child writes [`ChildMessage`]s to standard output, one line of JSON each, and
//! errors to standard error. End of file on standard input means that the launcher ended.

use super::builder::{self, BuilderEnd};
use super::card::{CardProcess, ServeCard, unfit};
use super::error::IoContext;
use super::manager::{self, ManagerEvent};
use super::own::OwnConfig;
use super::sink::MakeSink;
use super::{ProcessError, ReportRefused, readout, standby};
use crate::config::RunConfig;
use crate::core::report::ReadoutReport;
use crate::core::{BuIndex, Bytes, RuIndex};
use crate::source::SourceStatistics;
use millstream_tls::Security;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::os::fd::AsFd;
use std::time::Duration;

/// The role of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Child {
    /// The event manager.
    Manager,
    /// The standby manager.
    Standby {
        /// The manager's address.
        manager: String,
    },
    /// A readout unit.
    Readout {
        /// Its index.
        index: RuIndex,
        /// The manager's address.
        manager: String,
    },
    /// A builder unit.
    Builder {
        /// Its index.
        index: BuIndex,
        /// The manager's address.
        manager: String,
    },
    /// A card.
    Card(CardProcess),
}

/// A message of a child to the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChildMessage {
    /// An event of the manager.
    Manager(ManagerEvent),
    /// The process failed.
    Failed {
        /// The error.
        reason: String,
        /// Whether the error is a consequence of another process's failure.
        is_secondary: bool,
    },
    /// Connections that the process has refused so far.
    Refused(u64),
    /// A builder unit waits for its events to be stored and its files to be closed. Sent each second.
    Closing,
    /// What the live sources of a readout unit delivered.
    Sources(Vec<SourceStatistics>),
    /// Final report of a readout unit.
    Readout(ReadoutReport),
    /// End of a builder unit.
    Builder {
        /// Its report and statistics.
        end: Box<BuilderEnd>,
        /// Result of its sink, such as a file name.
        sink: Option<String>,
    },
}

impl Child {
    /// Encodes the role as command-line arguments.
    pub fn to_arguments(&self) -> Vec<String> {
        match self {
            Child::Manager => vec!["manager".to_owned()],
            Child::Standby { manager } => vec!["standby".to_owned(), manager.clone()],
            Child::Readout { index, manager } => {
                vec!["readout".to_owned(), index.0.to_string(), manager.clone()]
            }
            Child::Builder { index, manager } => {
                vec!["builder".to_owned(), index.0.to_string(), manager.clone()]
            }
            Child::Card(CardProcess { name, memory, kind, spin }) => {
                let micros = spin.as_micros().to_string();
                vec!["card".to_owned(), name.to_string(), memory.0.to_string(), kind.clone(), micros]
            }
        }
    }

    /// Decodes the role from command-line arguments.
    ///
    /// # Errors
    /// The arguments, if they are not a role.
    pub fn from_arguments(words: &[String]) -> Result<Child, ProcessError> {
        let bad = || ProcessError::Arguments(words.to_vec());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["manager"] => Ok(Child::Manager),
            ["standby", manager] => Ok(Child::Standby { manager: manager.to_owned() }),
            ["readout", index, manager] => Ok(Child::Readout {
                index: RuIndex(index.parse().map_err(|_| bad())?),
                manager: manager.to_owned(),
            }),
            ["builder", index, manager] => Ok(Child::Builder {
                index: BuIndex(index.parse().map_err(|_| bad())?),
                manager: manager.to_owned(),
            }),
            ["card", name, memory, kind, micros] => Ok(Child::Card(CardProcess {
                name: name.parse().map_err(|_| bad())?,
                memory: Bytes(memory.parse().map_err(|_| bad())?),
                kind: kind.to_owned(),
                spin: Duration::from_micros(micros.parse().map_err(|_| bad())?),
            })),
            _ => Err(bad()),
        }
    }

    /// Runs the process to its end. Returns whether the run succeeded.
    ///
    /// # Errors
    /// The process failed.
    pub fn run(&self, make_sink: &MakeSink<'_>, serve_card: &ServeCard<'_>) -> Result<bool, ProcessError> {
        self.run_within(None, make_sink, serve_card)
    }

    /// Runs the process as [`run`](Self::run) does, but for a configuration that agrees with `own`, if there is one.
    ///
    /// # Errors
    /// The process failed, or the manager's configuration is another one.
    pub fn run_within(
        &self,
        own: Option<&OwnConfig>,
        make_sink: &MakeSink<'_>,
        serve_card: &ServeCard<'_>,
    ) -> Result<bool, ProcessError> {
        self.run_role(own, make_sink, serve_card).inspect_err(|error| {
            send_to_parent(&ChildMessage::Failed {
                reason: error.to_string(),
                is_secondary: error.is_secondary(),
            });
        })
    }

    fn run_role(
        &self,
        own: Option<&OwnConfig>,
        make_sink: &MakeSink<'_>,
        serve_card: &ServeCard<'_>,
    ) -> Result<bool, ProcessError> {
        let security = Security::from_environment()?;
        let report_refused: ReportRefused = |count| send_to_parent(&ChildMessage::Refused(count));
        match self {
            Child::Manager => {
                let config = read_config()?;
                own.map_or(Ok(()), |own| own.check(&config))?;
                let stop = std::io::stdin().as_fd().try_clone_to_owned().context("watch standard input")?;
                let finished = manager::run(&config, &security, stop.as_fd(), report_refused, |event| {
                    send_to_parent(&ChildMessage::Manager(event.clone()));
                })?;
                Ok(finished.summary.is_success())
            }
            Child::Standby { manager } => {
                let finished = standby::run(
                    manager,
                    own,
                    &security,
                    std::io::stdin().as_fd(),
                    report_refused,
                    |event| {
                        send_to_parent(&ChildMessage::Manager(event.clone()));
                    },
                )?;
                Ok(finished.is_none_or(|finished| finished.summary.is_success()))
            }
            Child::Readout { index, manager } => {
                let (report, sources) =
                    readout::run((manager, *index), own, &security, Some(std::io::stdin().as_fd()))?;
                let good = report.cause.is_success();
                if !sources.is_empty() {
                    send_to_parent(&ChildMessage::Sources(sources));
                }
                send_to_parent(&ChildMessage::Readout(report));
                Ok(good)
            }
            Child::Builder { index, manager } => {
                let parent_pipe = std::io::stdin();
                let (end, sink) = builder::run(
                    (manager, *index),
                    own,
                    &security,
                    make_sink,
                    (report_refused, || send_to_parent(&ChildMessage::Closing)),
                    Some(parent_pipe.as_fd()),
                )?;
                let good = end.report.cause.is_success() && end.statistics.comparison.is_full();
                send_to_parent(&ChildMessage::Builder { end: Box::new(end), sink });
                Ok(good)
            }
            Child::Card(card) => {
                own.map_or(Ok(()), |own| own.check_card(card))?;
                serve_card(card).map_err(|error| unfit(card.name.as_str(), error.to_string()))?;
                Ok(true)
            }
        }
    }
}

/// Reads the first line of standard input. Reads nothing behind it, so that its end can be polled.
fn read_config() -> Result<RunConfig, ProcessError> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("read the configuration")?;
    serde_json::from_str(&line).map_err(std::io::Error::from).context("read the configuration")
}

/// Errors are ignored: a launcher that ended needs no messages.
fn send_to_parent(message: &ChildMessage) {
    if let Ok(mut line) = serde_json::to_vec(message) {
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_come_back() {
        let manager = "127.0.0.1:4711".to_owned();
        for child in [
            Child::Manager,
            Child::Standby { manager: manager.clone() },
            Child::Readout { index: RuIndex(3), manager: manager.clone() },
            Child::Builder { index: BuIndex(0), manager },
            Child::Card(CardProcess {
                name: "camera-77.card0".parse().unwrap(),
                memory: Bytes(4096),
                kind: "pci:0000:01:00.0/bar4".to_owned(),
                spin: Duration::from_micros(20),
            }),
        ] {
            assert_eq!(Child::from_arguments(&child.to_arguments()).unwrap(), child);
        }
    }

    #[test]
    fn other_words_are_refused() {
        for words in [
            &[][..],
            &["readout"],
            &["standby"],
            &["readout", "x", "y"],
            &["card", "a b", "1", "emulated", "2"],
        ] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(Child::from_arguments(&words).is_err(), "{words:?}");
        }
    }
}
