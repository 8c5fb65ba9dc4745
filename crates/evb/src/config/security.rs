//! The keys of a run's processes, and the nodes that may join it.

use super::error::{ConfigError, Problem};
use super::file::ConfigFile;
use millstream_tls::{KeyFiles, KeysError, Security};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use toml::Spanned;

/// Table `security`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SecurityTable {
    certificate: Option<Spanned<PathBuf>>,
    key: Option<Spanned<PathBuf>>,
    authority: Option<Spanned<PathBuf>>,
    nodes: Option<Spanned<Vec<String>>>,
}

/// Keys of the processes that the launcher starts, and the nodes that may join.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecurityConfig {
    /// The files; `None` if the environment names them or there are none.
    pub keys: Option<KeyFiles>,
    /// Nodes whose units may join; empty for all of the site.
    pub nodes: Vec<String>,
}

impl SecurityConfig {
    /// The keys of a process for its part in the run.
    ///
    /// # Errors
    /// The run requires keys and the process has none.
    pub(crate) fn apply(&self, security: Security) -> Result<Security, KeysError> {
        if self.keys.is_some() && !security.is_on() {
            return Err(KeysError::Missing);
        }
        security.for_nodes(&self.nodes)
    }
}

impl ConfigFile {
    /// Loads the keys once, so that a run does not start with keys that cannot be used.
    pub(super) fn security(&self) -> Result<SecurityConfig, ConfigError> {
        let Some(table) = &self.tables.security else {
            Security::from_environment().map_err(|error| self.about("security", Problem::Keys(error)))?;
            return Ok(SecurityConfig::default());
        };
        let SecurityTable { certificate, key, authority, nodes } = table;
        let keys = match (certificate, key, authority) {
            (None, None, None) => None,
            (Some(certificate), Some(key), Some(authority)) => Some(KeyFiles {
                certificate: self.locate(certificate.get_ref()),
                key: self.locate(key.get_ref()),
                authority: self.locate(authority.get_ref()),
            }),
            _ => {
                let needed =
                    "certificate, key and authority belong together: set all three, or none".to_owned();
                return Err(self.about("security", Problem::Conflict(needed)));
            }
        };
        let security = match &keys {
            Some(files) => Security::from_files(Some(files)),
            None => Security::from_environment(),
        };
        let security = security.map_err(|error| self.about("security", Problem::Keys(error)))?;
        let Some(nodes) = nodes else { return Ok(SecurityConfig { keys, nodes: Vec::new() }) };
        security
            .for_nodes(nodes.get_ref())
            .map_err(|error| self.at(nodes, "security.nodes", Problem::Keys(error)))?;
        Ok(SecurityConfig { keys, nodes: nodes.get_ref().clone() })
    }
}
