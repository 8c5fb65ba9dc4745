//! Errors in site files, with their position.

use std::ops::Range;
use std::path::Path;

/// A site file with an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{}{message}", line.map_or_else(|| " ".to_owned(), |line| format!("{line}: ")))]
pub struct SiteError {
    /// Name of the file.
    pub file: String,
    /// Line, counted from 1; none if the file cannot be read.
    pub line: Option<usize>,
    /// Field, value and error.
    pub message: String,
}

impl SiteError {
    pub(crate) fn unreadable(path: &Path, cause: &std::io::Error) -> Self {
        Self { file: path.display().to_string(), line: None, message: format!("cannot read: {cause}") }
    }

    pub(crate) fn syntax(file: &str, text: &str, error: &toml::de::Error) -> Self {
        let line = error.span().map(|span| line_of(text, &span));
        let key = error.span().and_then(|span| key_of(text, span.start));
        let message = match key {
            // Unknown keys are in the message.
            Some(key) if !error.message().contains(&format!("`{key}`")) => {
                format!("{key}: {}", error.message())
            }
            _ => error.message().to_owned(),
        };
        Self { file: file.to_owned(), line, message }
    }

    /// An error about a device of the file, `device \"ID\": … \"VALUE\" …`.
    pub(crate) fn of_device(file: &str, text: &str, message: String) -> Self {
        let mut quoted = message.split('"').skip(1).step_by(2);
        let table = quoted.next().and_then(|id| text.find(&format!("[device.{id}")));
        // The value's line if the file has it, else that of the device.
        let at = table.map(|start| {
            let value = quoted.next().and_then(|value| text[start..].find(value));
            start + value.unwrap_or(0)
        });
        let line = at.map(|at| line_of(text, &(at..at)));
        Self { file: file.to_owned(), line, message }
    }

    pub(crate) fn at(file: &str, text: &str, span: &Range<usize>, message: String) -> Self {
        Self { file: file.to_owned(), line: Some(line_of(text, span)), message }
    }
}

/// Key whose value begins at `start`.
fn key_of(text: &str, start: usize) -> Option<&str> {
    let before = text.get(..start)?.trim_end().strip_suffix('=')?.trim_end();
    let is_key = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '"');
    let key = before.rsplit(|c| !is_key(c)).next()?;
    Some(key.trim_matches('"')).filter(|key| !key.is_empty())
}

/// Line in which a span starts, counted from 1.
fn line_of(text: &str, span: &Range<usize>) -> usize {
    let before = &text.as_bytes()[..span.start.min(text.len())];
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}
