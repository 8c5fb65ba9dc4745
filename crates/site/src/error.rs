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
        Self { file: file.to_owned(), line, message: error.message().to_owned() }
    }

    pub(crate) fn at(file: &str, text: &str, span: &Range<usize>, message: String) -> Self {
        Self { file: file.to_owned(), line: Some(line_of(text, span)), message }
    }
}

/// Line in which a span starts, counted from 1.
fn line_of(text: &str, span: &Range<usize>) -> usize {
    let before = &text.as_bytes()[..span.start.min(text.len())];
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}
