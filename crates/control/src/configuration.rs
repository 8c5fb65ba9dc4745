//! The configuration of the next run: the file, and settings that operators changed.

use crate::backend::Backend;
use crate::error::ControlError;
use millstream_evb::config::{ConfigFile, RunConfig};
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml_edit::{DocumentMut, Item, Table, Value};

/// Tables whose entries have names: `card.NAME.FIELD`.
const NAMED: [&str; 3] = ["readout", "builder", "card"];
/// Tables whose settings can change. The keys in `[security]` are the file's.
const PLAIN: [&str; 4] = ["run", "output", "check", "recovery"];
/// Settings that would change what the run control process itself relies on.
const FIXED: [&str; 2] = ["run.name", "run.listen"];

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// The file.
    pub path: PathBuf,
    /// The text, with the changed settings.
    pub text: String,
    /// SHA-256 of the text, in hexadecimal.
    pub sha256: String,
    /// Settings that differ from the file.
    pub settings: BTreeMap<String, Json>,
    /// The checked configuration of a run.
    pub config: RunConfig,
}

impl Configuration {
    /// Reads the file, and checks it for runs of the backend.
    ///
    /// # Errors
    /// The first problem, with file, line, field and value.
    pub fn load(path: &Path, backend: &dyn Backend) -> Result<Configuration, ControlError> {
        let text = std::fs::read_to_string(path).map_err(|cause| ControlError::io(path, "read", cause))?;
        Configuration::check(path, text, BTreeMap::new(), backend)
    }

    /// The configuration with changed settings. `FIELD` of `[run]`, `[output]`, `[check]` and `[recovery]` is `run.FIELD` and so on;
    /// `FIELD` of the card `NAME` is `card.NAME.FIELD`.
    ///
    /// # Errors
    /// An unknown setting, or a value that the check refuses. This configuration stays as it is.
    pub fn with(
        &self,
        changes: &BTreeMap<String, Json>,
        backend: &dyn Backend,
    ) -> Result<Configuration, ControlError> {
        let mut document: DocumentMut =
            self.text.parse().map_err(|error| ControlError::Configuration(format!("{error}")))?;
        let mut settings = self.settings.clone();
        for (field, value) in changes {
            change(&mut document, field, value)
                .map_err(|problem| ControlError::Setting { field: field.clone(), problem })?;
            settings.insert(field.clone(), value.clone());
        }
        Configuration::check(&self.path, document.to_string(), settings, backend)
    }

    fn check(
        path: &Path,
        text: String,
        settings: BTreeMap<String, Json>,
        backend: &dyn Backend,
    ) -> Result<Configuration, ControlError> {
        let file = ConfigFile::parse(path, &text).map_err(|error| error.to_string());
        let config = file.and_then(|file| backend.check(file)).map_err(ControlError::Configuration)?;
        let sha256 = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Configuration { path: path.to_owned(), text, sha256, settings, config })
    }
}

fn change(document: &mut DocumentMut, field: &str, value: &Json) -> Result<(), String> {
    if FIXED.contains(&field) {
        return Err("cannot change; edit the file and configure again".to_owned());
    }
    let parts: Vec<&str> = field.split('.').collect();
    let (table, key) = match parts[..] {
        [table, key] if PLAIN.contains(&table) => (plain_table(document, table)?, key),
        // A name may contain dots.
        [array, _, .., key] if NAMED.contains(&array) => {
            let name = &field[array.len() + 1..field.len() - key.len() - 1];
            (named_table(document, array, name)?, key)
        }
        _ => return Err("unknown: use FIELD of run, output, check or recovery as in run.FIELD, or of readout, builder or card as in card.NAME.FIELD".to_owned()),
    };
    let value = toml_value(value)?;
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(present) => {
            // Comments of the line stay.
            let decor = present.decor().clone();
            *present = value;
            *present.decor_mut() = decor;
        }
        None => _ = table.insert(key, Item::Value(value)),
    }
    Ok(())
}

fn plain_table<'a>(document: &'a mut DocumentMut, name: &str) -> Result<&'a mut Table, String> {
    let table = document.get_mut(name).and_then(Item::as_table_mut);
    table.ok_or_else(|| format!("the configuration has no table [{name}]"))
}

fn named_table<'a>(document: &'a mut DocumentMut, array: &str, name: &str) -> Result<&'a mut Table, String> {
    let tables = document.get_mut(array).and_then(Item::as_array_of_tables_mut);
    let mut tables = tables.into_iter().flat_map(|tables| tables.iter_mut());
    let found = tables.find(|table| table.get("name").and_then(Item::as_str) == Some(name));
    found.ok_or_else(|| format!("the configuration has no {array} {name:?}"))
}

fn toml_value(value: &Json) -> Result<Value, String> {
    match value {
        Json::Bool(value) => Ok((*value).into()),
        Json::String(value) => Ok(value.as_str().into()),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(value), _) => Ok(value.into()),
            (None, Some(value)) => Ok(value.into()),
            _ => Err(format!("{number} is out of range")),
        },
        other => Err(format!("{other} is not a number, a text or a truth value")),
    }
}
