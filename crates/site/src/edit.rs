//! Changing one field of a site file: what another width, clock or link would bring.
//!
//! A path has the file's own words and the names in it: `host.server.adapter.hca.pcie.lanes`,
//! `host.server.card.u280.memory.clock`, `link.0.rate`, `switch.fabric.latency`, `torus.torus.rate`. Of things
//! without names (links, sockets) it has the place, counted from 0; a socket may also be `socket0`.

use toml::{Table, Value};

/// A field that cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct EditError {
    /// The path as it was given.
    pub path: String,
    /// Which word of it is wrong, and what would be right.
    pub message: String,
}

/// Words that paths into a site file begin with.
const ROOTS: [&str; 4] = ["host", "switch", "link", "torus"];

/// Whether that path leads into a site file.
#[must_use]
pub fn is_path(path: &str) -> bool {
    path.split('.').next().is_some_and(|first| ROOTS.contains(&first))
}

/// The text of a site file with another value at a path. Comments are lost.
///
/// # Errors
/// [`EditError`] names the word of the path that leads nowhere, and what is there instead, or the value that
/// is none of the field's kind. Whether the value makes sense there, [`crate::parse`] says of the new text.
pub fn set(text: &str, path: &str, value: &str) -> Result<String, EditError> {
    let fail = |message: String| EditError { path: path.to_owned(), message };
    let mut file: Table = text.parse().map_err(|error: toml::de::Error| fail(error.message().to_owned()))?;
    let words: Vec<&str> = path.split('.').collect();
    let Some((field, way)) = words.split_last() else { return Err(fail("no path".to_owned())) };
    let Some((first, way)) = way.split_first() else {
        return Err(fail(format!("{field:?} is no single field")));
    };
    let mut here = file.get_mut(*first).ok_or_else(|| fail(format!("the site has no {first}")))?;
    for word in way {
        here = step(here, word).map_err(fail)?;
    }
    let Value::Table(table) = here else {
        return Err(fail(format!("{field:?} is no field: a {} has none", way.last().unwrap_or(first))));
    };
    let kind = |kind: &str| fail(format!("{value:?} is not {kind}"));
    let new = match table.get(*field) {
        Some(Value::String(_)) => Value::String(value.to_owned()),
        Some(Value::Integer(_)) => Value::Integer(value.parse().map_err(|_| kind("a whole number"))?),
        Some(Value::Float(_)) => Value::Float(value.parse().map_err(|_| kind("a number"))?),
        Some(Value::Boolean(_)) => Value::Boolean(value.parse().map_err(|_| kind("true or false"))?),
        Some(_) => return Err(fail(format!("{field:?} is no single field"))),
        // Optional fields that the file leaves out.
        None => value.parse().map_or_else(|_| Value::String(value.to_owned()), Value::Integer),
    };
    table.insert((*field).to_owned(), new);
    toml::to_string(&file).map_err(|error| fail(error.to_string()))
}

/// One word further: a field of a table, or an element of a list by name or place.
fn step<'a>(here: &'a mut Value, word: &str) -> Result<&'a mut Value, String> {
    match here {
        Value::Table(table) => {
            let known = table.keys().cloned().collect::<Vec<_>>().join(", ");
            table.get_mut(word).ok_or_else(|| format!("no {word:?}; there are {known}"))
        }
        Value::Array(list) => {
            let name = |value: &Value| value.get("name").and_then(Value::as_str).map(str::to_owned);
            let names: Vec<String> = list
                .iter()
                .enumerate()
                .map(|(i, value)| name(value).unwrap_or_else(|| i.to_string()))
                .collect();
            let digits = word.strip_prefix("socket").unwrap_or(word);
            let place = names.iter().position(|name| name == word).or_else(|| digits.parse().ok());
            place
                .and_then(|place| list.get_mut(place))
                .ok_or_else(|| format!("no {word:?}; there are {}", names.join(", ")))
        }
        _ => Err(format!("{word:?} is below a single value")),
    }
}

#[cfg(test)]
mod tests {
    use super::{is_path, set};

    const TEXT: &str = r#"
name = "s"
[[host]]
name = "a"
[[host.socket]]
cores = 4
[[host.adapter]]
name = "hca"
pcie = { generation = 3, lanes = 16 }
[[link]]
rate = "FDR"
"#;

    #[test]
    fn fields_are_found_by_name_or_place() {
        for (path, value, shown) in [
            ("host.a.adapter.hca.pcie.lanes", "8", "lanes = 8"),
            ("host.0.adapter.0.pcie.lanes", "8", "lanes = 8"),
            ("host.a.adapter.hca.pcie.max-payload", "512", "max-payload = 512"),
            ("host.a.socket.socket0.cores", "8", "cores = 8"),
            ("link.0.rate", "EDR", "rate = \"EDR\""),
            ("link.0.length", "3 m", "length = \"3 m\""),
        ] {
            assert!(is_path(path));
            let text = set(TEXT, path, value).unwrap();
            assert!(text.contains(shown), "{path}: {text}");
        }
        assert!(!is_path("u280.reads"));
    }

    #[test]
    fn wrong_words_are_named() {
        for (path, value, why) in [
            ("host.b.adapter.hca.pcie.lanes", "8", "no \"b\"; there are a"),
            ("host.a.adapter.nic.pcie.lanes", "8", "no \"nic\"; there are hca"),
            ("host.a.card.x.pcie.lanes", "8", "no \"card\"; there are"),
            ("host.a.adapter.hca.pcie.lanes", "many", "\"many\" is not a whole number"),
            ("host.a.adapter.hca.pcie", "8", "no single field"),
            ("host.a.name.x.y", "8", "below a single value"),
            ("torus.t.rate", "8", "no torus"),
            ("link", "8", "no single field"),
            ("link.rate", "8", "no field"),
        ] {
            let error = set(TEXT, path, value).unwrap_err().to_string();
            assert!(error.starts_with(path) && error.contains(why), "{error}");
        }
    }
}
