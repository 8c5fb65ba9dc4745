//! One process of a run as a child of a launcher: how it is message what to be, and what it tells.
//!
//! A child gets what it is as words ([`Child::to_arguments`]), the manager also the setup as the first line
//! of standard input. It tells what happens as lines of JSON ([`ChildMessage`]) on standard output, and errors in
//! words on standard error. The end of its standard input is the end of its launcher.

use super::builder::{self, BuilderEnd};
use super::error::IoContext;
use super::manager::{self, ManagerEvent};
use super::sink::MakeSink;
use super::{ProcessError, card, readout};
use crate::config::Setup;
use crate::core::report::ReadoutReport;
use crate::core::{BuIndex, Bytes, RuIndex};
use millstream_card::CardName;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::os::fd::AsFd;
use std::time::Duration;

/// What a process of a run is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Child {
    /// The event manager.
    Manager,
    /// A readout unit.
    Readout {
        /// Which.
        index: RuIndex,
        /// Where the manager listens.
        manager: String,
    },
    /// A builder unit.
    Builder {
        /// Which.
        index: BuIndex,
        /// Where the manager listens.
        manager: String,
    },
    /// An emulated card.
    Card {
        /// Its name on this host.
        name: CardName,
        /// Its memory.
        memory: Bytes,
        /// How long it looks for commands before it sleeps.
        spin: Duration,
    },
}

/// A line that a child tells its launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChildMessage {
    /// From the manager.
    Manager(ManagerEvent),
    /// The process could not do its work.
    Failed {
        /// Why.
        reason: String,
        /// Whether that only tells that another process is in trouble.
        is_secondary: bool,
    },
    /// The end of a readout unit.
    Readout(ReadoutReport),
    /// The end of a builder unit.
    Builder {
        /// Its report.
        end: Box<BuilderEnd>,
        /// What its sink has to tell people.
        sink: Option<String>,
    },
}

impl Child {
    /// As words of a command line.
    pub fn to_arguments(&self) -> Vec<String> {
        match self {
            Child::Manager => vec!["manager".to_owned()],
            Child::Readout { index, manager } => {
                vec!["readout".to_owned(), index.0.to_string(), manager.clone()]
            }
            Child::Builder { index, manager } => {
                vec!["builder".to_owned(), index.0.to_string(), manager.clone()]
            }
            Child::Card { name, memory, spin } => {
                let micros = spin.as_micros().to_string();
                vec!["card".to_owned(), name.to_string(), memory.0.to_string(), micros]
            }
        }
    }

    /// From the words of a command line.
    ///
    /// # Errors
    /// Shows the words if they are none of a child.
    pub fn from_arguments(words: &[String]) -> Result<Child, ProcessError> {
        let bad = || ProcessError::Arguments(words.to_vec());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["manager"] => Ok(Child::Manager),
            ["readout", index, manager] => Ok(Child::Readout {
                index: RuIndex(index.parse().map_err(|_| bad())?),
                manager: manager.to_owned(),
            }),
            ["builder", index, manager] => Ok(Child::Builder {
                index: BuIndex(index.parse().map_err(|_| bad())?),
                manager: manager.to_owned(),
            }),
            ["card", name, memory, micros] => Ok(Child::Card {
                name: name.parse().map_err(|_| bad())?,
                memory: Bytes(memory.parse().map_err(|_| bad())?),
                spin: Duration::from_micros(micros.parse().map_err(|_| bad())?),
            }),
            _ => Err(bad()),
        }
    }

    /// Is that process, to its end. Returns whether all went as it should.
    ///
    /// # Errors
    /// The process could not do its work.
    pub fn run(&self, make_sink: &MakeSink<'_>) -> Result<bool, ProcessError> {
        self.run_role(make_sink).inspect_err(|error| {
            send_to_parent(&ChildMessage::Failed {
                reason: error.to_string(),
                is_secondary: error.is_secondary(),
            });
        })
    }

    fn run_role(&self, make_sink: &MakeSink<'_>) -> Result<bool, ProcessError> {
        match self {
            Child::Manager => {
                let setup = read_setup()?;
                let stop = std::io::stdin().as_fd().try_clone_to_owned().context("watch standard input")?;
                let finished = manager::run(&setup, stop.as_fd(), |event| {
                    send_to_parent(&ChildMessage::Manager(event.clone()));
                })?;
                Ok(finished.account.is_success())
            }
            Child::Readout { index, manager } => {
                let report = readout::run(manager, *index, Some(std::io::stdin().as_fd()))?;
                let good = report.cause.is_success();
                send_to_parent(&ChildMessage::Readout(report));
                Ok(good)
            }
            Child::Builder { index, manager } => {
                let (end, sink) = builder::run(manager, *index, make_sink, Some(std::io::stdin().as_fd()))?;
                let good = end.report.cause.is_success() && end.statistics.comparison.is_full();
                send_to_parent(&ChildMessage::Builder { end: Box::new(end), sink });
                Ok(good)
            }
            Child::Card { name, memory, spin } => card::run(name, *memory, *spin).map(|()| true),
        }
    }
}

/// The first line of standard input; nothing behind it is taken, so that its end can be watched.
fn read_setup() -> Result<Setup, ProcessError> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("read the setup")?;
    serde_json::from_str(&line).map_err(std::io::Error::from).context("read the setup")
}

/// A launcher that is gone hears nothing; the end of standard input tells of it.
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
            Child::Readout { index: RuIndex(3), manager: manager.clone() },
            Child::Builder { index: BuIndex(0), manager },
            Child::Card {
                name: "camera-77.card0".parse().unwrap(),
                memory: Bytes(4096),
                spin: Duration::from_micros(20),
            },
        ] {
            assert_eq!(Child::from_arguments(&child.to_arguments()).unwrap(), child);
        }
    }

    #[test]
    fn other_words_are_refused() {
        for words in [&[][..], &["readout"], &["readout", "x", "y"], &["card", "a b", "1", "2"]] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(Child::from_arguments(&words).is_err(), "{words:?}");
        }
    }
}
