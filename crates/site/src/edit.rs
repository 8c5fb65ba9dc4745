//! Edits one field of a site file, addressed by a path.
//!
//! A path consists of keys and names of the file: `host.server.adapter.hca.pcie.lanes`, `host.server.card.u280.memory.clock`,
//! `switch.fabric.latency`, `torus.torus.rate`. Links and sockets have no names and are counted from 0: `link.0.rate`; a
//! socket may also be `socket0`.

use toml::{Table, Value};

/// A field that cannot be edited.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct EditError {
    /// The given path.
    pub path: String,
    /// The wrong part of the path or value, and valid alternatives.
    pub message: String,
}

/// First words of paths.
const ROOTS: [&str; 6] = ["host", "switch", "link", "torus", "fat-tree", "dragonfly"];

/// Whether the text is a path into a site file.
#[must_use]
pub fn is_path(path: &str) -> bool {
    path.split('.').next().is_some_and(|first| ROOTS.contains(&first))
}

/// Returns the text of a site file with another value at a path. Comments are lost.
///
/// # Errors
/// [`EditError`] names the part of the path that does not exist, or a value of the wrong type. [`crate::parse`] validates
/// the new text.
pub fn set(text: &str, path: &str, value: &str) -> Result<String, EditError> {
    let fail = |message: String| EditError { path: path.to_owned(), message };
    let mut file: Table = text.parse().map_err(|error: toml::de::Error| fail(error.message().to_owned()))?;
    let words: Vec<&str> = path.split('.').collect();
    let Some((field, way)) = words.split_last() else { return Err(fail("the path is empty".to_owned())) };
    let Some((first, way)) = way.split_first() else {
        return Err(fail(format!("{field:?} is not a single field")));
    };
    let mut here = file.get_mut(*first).ok_or_else(|| fail(format!("the site has no {first}")))?;
    for word in way {
        here = step(here, word).map_err(fail)?;
    }
    let Value::Table(table) = here else {
        return Err(fail(format!("{field:?} is not a field of a {}", way.last().unwrap_or(first))));
    };
    let kind = |kind: &str| fail(format!("{value:?} is not {kind}"));
    let new = match table.get(*field) {
        Some(Value::String(_)) => Value::String(value.to_owned()),
        Some(Value::Integer(_)) => match bare(value) {
            // A share may be the integer 0 in the file.
            Some(number @ (Value::Integer(_) | Value::Float(_))) => number,
            _ => return Err(kind("a number")),
        },
        Some(Value::Float(_)) => Value::Float(value.parse().map_err(|_| kind("a number"))?),
        Some(Value::Boolean(_)) => Value::Boolean(value.parse().map_err(|_| kind("true or false"))?),
        Some(_) => return Err(fail(format!("{field:?} is not a single field"))),
        // The field is optional and absent in the file.
        None => bare(value).unwrap_or_else(|| Value::String(value.to_owned())),
    };
    table.insert((*field).to_owned(), new);
    toml::to_string(&file).map_err(|error| fail(error.to_string()))
}

/// The value of a text without quotes: a number, `true` or `false`.
fn bare(text: &str) -> Option<Value> {
    let number = || text.parse().ok().filter(|number: &f64| number.is_finite()).map(Value::Float);
    let whole = text.parse().ok().map(Value::Integer);
    whole.or_else(number).or_else(|| text.parse().ok().map(Value::Boolean))
}

/// Follows one word of a path: a key of a table, or the name or index of a list element.
fn step<'a>(here: &'a mut Value, word: &str) -> Result<&'a mut Value, String> {
    match here {
        Value::Table(table) => {
            let known = table.keys().cloned().collect::<Vec<_>>().join(", ");
            table.get_mut(word).ok_or_else(|| format!("no {word:?}; known fields: {known}"))
        }
        Value::Array(list) => {
            let name = |value: &Value| value.get("name").and_then(Value::as_str).map(str::to_owned);
            let names: Vec<String> = list
                .iter()
                .enumerate()
                .map(|(i, value)| name(value).unwrap_or_else(|| i.to_string()))
                .collect();
            let digits = word.strip_prefix("socket").unwrap_or(word);
            let index = names.iter().position(|name| name == word).or_else(|| digits.parse().ok());
            index
                .and_then(|index| list.get_mut(index))
                .ok_or_else(|| format!("no {word:?}; known names: {}", names.join(", ")))
        }
        _ => Err(format!("{word:?}: a single value has no fields")),
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
    fn fields_are_found_by_name_or_index() {
        for (path, value, shown) in [
            ("host.a.adapter.hca.pcie.lanes", "8", "lanes = 8"),
            ("host.0.adapter.0.pcie.lanes", "8", "lanes = 8"),
            ("host.a.adapter.hca.pcie.max-payload", "512", "max-payload = 512"),
            ("host.a.socket.socket0.cores", "8", "cores = 8"),
            ("link.0.rate", "EDR", "rate = \"EDR\""),
            ("link.0.length", "3 m", "length = \"3 m\""),
            ("link.0.loss", "1e-3", "loss = 0.001"),
            ("link.0.loss", "0", "loss = 0"),
            ("host.a.adapter.hca.ats", "true", "ats = true"),
        ] {
            assert!(is_path(path));
            let text = set(TEXT, path, value).unwrap();
            assert!(text.contains(shown), "{path}: {text}");
        }
        let text = set(&set(TEXT, "link.0.loss", "0").unwrap(), "link.0.loss", "0.01").unwrap();
        assert!(text.contains("loss = 0.01"), "{text}");
        assert!(!is_path("u280.reads"));
    }

    #[test]
    fn invalid_paths_are_refused_with_the_word() {
        for (path, value, why) in [
            ("host.b.adapter.hca.pcie.lanes", "8", "no \"b\"; known names: a"),
            ("host.a.adapter.nic.pcie.lanes", "8", "no \"nic\"; known names: hca"),
            ("host.a.card.x.pcie.lanes", "8", "no \"card\"; known fields"),
            ("host.a.adapter.hca.pcie.lanes", "many", "\"many\" is not a number"),
            ("host.a.adapter.hca.pcie", "8", "not a single field"),
            ("host.a.name.x.y", "8", "a single value has no fields"),
            ("torus.t.rate", "8", "no torus"),
            ("link", "8", "not a single field"),
            ("link.rate", "8", "not a field"),
        ] {
            let error = set(TEXT, path, value).unwrap_err().to_string();
            assert!(error.starts_with(path) && error.contains(why), "{error}");
        }
    }
}
