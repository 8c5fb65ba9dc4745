//! Arguments of a torus's processes, for programs that are their own node processes: examples, tests, C programs.

use std::path::PathBuf;
use std::str::FromStr;

use millstream_health::{Timers, TimersError};
use millstream_rdma::device::DeviceSelector;
use millstream_shm::polling::DEFAULT_POLLING;
use millstream_torus_core::{Dimensions, NodeNumber};

use super::Launcher;
use crate::engine::EngineOptions;
use crate::key::{self, KeyError};
use crate::monitor::MonitorOptions;
use crate::node::{NodeOptions, SeventhOptions};
use crate::service::supervisor::SupervisorOptions;

/// Words that no [`Launcher`] passes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// An option is missing.
    #[error("the option {option} is missing")]
    Missing {
        /// The option.
        option: &'static str,
    },
    /// A value is not valid.
    #[error("{option} {value}: not a valid value")]
    Value {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
    },
    /// There is no key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The factor of the periods is not valid.
    #[error("--period-factor: {0}")]
    Timers(#[from] TimersError),
}

/// The words after `node`, `monitor` or `supervise`, as [`Launcher`] passes them. Keys are read from standard input.
#[derive(Clone, Copy, Debug)]
pub struct ProcessArguments<'w>(pub &'w [String]);

impl<'w> ProcessArguments<'w> {
    /// Options of a node process. The device is the one that the environment selects.
    ///
    /// # Errors
    /// [`ArgumentError`].
    pub fn node(self) -> Result<NodeOptions, ArgumentError> {
        Ok(NodeOptions {
            dimensions: self.required("--dimensions")?,
            node: NodeNumber(self.required("--node")?),
            key: self.key("--key-file")?,
            listen: self.listen(),
            peers: None,
            rejoin: self.0.iter().any(|word| word == "--rejoin"),
            device: DeviceSelector::from_environment(),
            engine: EngineOptions::default(),
            spin: DEFAULT_POLLING,
            supervisors: self.list("--supervisors"),
            card: self.optional("--card")?,
            publish_card: self.0.iter().any(|word| word == "--publish-card"),
            seventh: self.seventh()?,
            timers: self.timers()?,
        })
    }

    fn seventh(self) -> Result<Option<SeventhOptions>, ArgumentError> {
        let Some(listen) = self.value("--seventh") else { return Ok(None) };
        let key = self.key("--seventh-key-file")?;
        Ok(Some(SeventhOptions { listen: listen.to_owned(), key }))
    }

    /// Options of a host monitor.
    ///
    /// # Errors
    /// [`ArgumentError`].
    pub fn monitor(self) -> Result<MonitorOptions, ArgumentError> {
        Ok(MonitorOptions {
            dimensions: self.required("--dimensions")?,
            node: NodeNumber(self.required("--node")?),
            key: self.key("--key-file")?,
            supervisors: self.list("--supervisors"),
            timers: self.timers()?.ok_or(ArgumentError::Missing { option: "--period-factor" })?,
        })
    }

    /// Options of a supervisor.
    ///
    /// # Errors
    /// [`ArgumentError`].
    pub fn supervisor(self) -> Result<SupervisorOptions, ArgumentError> {
        Ok(SupervisorOptions {
            dimensions: self.required("--dimensions")?,
            key: self.key("--key-file")?,
            listen: self.listen(),
            lower: self.list("--lower"),
            timers: self.timers()?.ok_or(ArgumentError::Missing { option: "--period-factor" })?,
        })
    }

    fn value(self, option: &str) -> Option<&'w str> {
        let at = self.0.iter().position(|word| word == option)?;
        self.0.get(at + 1).map(String::as_str)
    }

    fn optional<T: FromStr>(self, option: &'static str) -> Result<Option<T>, ArgumentError> {
        let Some(value) = self.value(option) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| ArgumentError::Value { option, value: value.to_owned() })
    }

    fn required<T: FromStr>(self, option: &'static str) -> Result<T, ArgumentError> {
        self.optional(option)?.ok_or(ArgumentError::Missing { option })
    }

    fn key(self, option: &'static str) -> Result<u64, ArgumentError> {
        let file = self.value(option).ok_or(ArgumentError::Missing { option })?;
        Ok(key::read(file.as_ref())?)
    }

    fn listen(self) -> String {
        self.value("--listen").unwrap_or("127.0.0.1:0").to_owned()
    }

    fn list(self, option: &str) -> Vec<String> {
        self.value(option).map(|text| text.split(',').map(str::to_owned).collect()).unwrap_or_default()
    }

    fn timers(self) -> Result<Option<Timers>, ArgumentError> {
        let factor: Option<u64> = self.optional("--period-factor")?;
        Ok(factor.map(|factor| Timers::default().scaled(factor).check()).transpose()?)
    }
}

impl Launcher {
    /// A torus of processes of `program` on this host, on the device that the environment selects, without supervisors and
    /// cards.
    #[must_use]
    pub fn new(dimensions: Dimensions, program: impl Into<PathBuf>) -> Launcher {
        Launcher {
            dimensions,
            program: program.into(),
            arguments: Vec::new(),
            node_arguments: Vec::new(),
            device: None,
            card: None,
            seventh: None,
            launcher: None,
            addresses: Vec::new(),
            supervisor_address: None,
            supervisors: 0,
            period_factor: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use tempfile::NamedTempFile;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    /// A file with a key, until it is dropped.
    fn key_file(key: u64) -> NamedTempFile {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(key::text(key).as_bytes()).unwrap();
        file
    }

    #[test]
    fn the_words_of_a_launcher_become_options() {
        let (run, seventh) = (key_file(255), key_file(10));
        let (run, seventh) = (run.path().display(), seventh.path().display());
        let node = words(&format!("node --dimensions 2x3x4 --key-file {run} --node 5 --listen :1 --rejoin"));
        let node = ProcessArguments(&node).node().unwrap();
        assert_eq!((node.dimensions.to_string().as_str(), node.node.0, node.key), ("2x3x4", 5, 255));
        assert_eq!((node.listen.as_str(), node.rejoin, node.timers), (":1", true, None));
        assert!(node.seventh.is_none());
        let node = words(&format!(
            "node --dimensions 2x1x1 --key-file {run} --node 0 --seventh :76 --seventh-key-file {seventh}"
        ));
        let seventh = ProcessArguments(&node).node().unwrap().seventh.unwrap();
        assert_eq!((seventh.listen.as_str(), seventh.key), (":76", 10));
        let monitor = words(&format!(
            "monitor --dimensions 2x1x1 --key-file {run} --node 0 --supervisors a,b --period-factor 2"
        ));
        let monitor = ProcessArguments(&monitor).monitor().unwrap();
        assert_eq!(monitor.supervisors, ["a", "b"]);
        assert_eq!(monitor.timers, Timers::default().scaled(2));
    }

    #[test]
    fn missing_and_invalid_words_are_named() {
        let key = key_file(1);
        let key = key.path().display();
        let error = |text: &str| ProcessArguments(&words(text)).node().unwrap_err().to_string();
        assert_eq!(error("node --node 1"), "the option --dimensions is missing");
        assert_eq!(error("node --dimensions 2x1x1 --node 1"), "the option --key-file is missing");
        assert_eq!(error("node --dimensions 2x0 --node 1"), "--dimensions 2x0: not a valid value");
        let seventh = format!("node --dimensions 2x1x1 --node 1 --key-file {key} --seventh :76");
        assert_eq!(error(&seventh), "the option --seventh-key-file is missing");
        let supervisor = words(&format!("supervise --dimensions 2x1x1 --key-file {key}"));
        let missing = ProcessArguments(&supervisor).supervisor().unwrap_err().to_string();
        assert_eq!(missing, "the option --period-factor is missing");
    }
}
