//! CSV tables with a header; errors name the file, the line and the column.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use csv::{ErrorKind, ReaderBuilder, StringRecord, Trim};

/// A table of the camera's geometry that cannot be read or is inconsistent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}:{} {problem}", path.display(), line.map_or(String::new(), |line| format!("{line}:")))]
pub struct TableError {
    /// The file.
    pub path: PathBuf,
    /// Line, from 1; none if the problem is not in one line.
    pub line: Option<u64>,
    /// The problem.
    pub problem: String,
}

/// A CSV file in memory.
pub(crate) struct Table {
    path: PathBuf,
    header: StringRecord,
    records: Vec<StringRecord>,
}

/// A column of a [`Table`].
#[derive(Clone, Copy)]
pub(crate) struct Column {
    index: usize,
    name: &'static str,
}

/// A line of a [`Table`] below the header.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    table: &'a Table,
    record: &'a StringRecord,
}

impl Table {
    pub(crate) fn load(path: &Path) -> Result<Table, TableError> {
        let file = File::open(path).map_err(|error| TableError {
            path: path.to_owned(),
            line: None,
            problem: format!("cannot read: {error}"),
        })?;
        Table::read(path, file)
    }

    /// Reads CSV text. `path` is for error messages.
    pub(crate) fn read(path: &Path, text: impl Read) -> Result<Table, TableError> {
        let refused = |error: csv::Error| TableError {
            path: path.to_owned(),
            line: error.position().map(csv::Position::line),
            problem: match error.kind() {
                ErrorKind::Io(cause) => format!("cannot read: {cause}"),
                _ => error.to_string(),
            },
        };
        let mut reader = ReaderBuilder::new().trim(Trim::All).flexible(true).from_reader(text);
        let header = reader.headers().map_err(refused)?.clone();
        let records = reader.into_records().collect::<Result<_, _>>().map_err(refused)?;
        Ok(Table { path: path.to_owned(), header, records })
    }

    pub(crate) fn column(&self, name: &'static str) -> Result<Column, TableError> {
        let index = self.header.iter().position(|column| column == name);
        let index = index.ok_or_else(|| self.error(1, format!("the header has no column {name}")))?;
        Ok(Column { index, name })
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.records.iter().map(|record| Row { table: self, record })
    }

    /// An error about the file as a whole.
    pub(crate) fn whole(&self, problem: String) -> TableError {
        TableError { path: self.path.clone(), line: None, problem }
    }

    fn error(&self, line: u64, problem: String) -> TableError {
        TableError { path: self.path.clone(), line: Some(line), problem }
    }
}

impl Row<'_> {
    /// Line of the file, from 1.
    pub(crate) fn line(self) -> u64 {
        self.record.position().map_or(0, csv::Position::line)
    }

    /// Parses a field and checks it with `valid`; `expected` describes the valid values.
    pub(crate) fn parse<T: FromStr>(
        self,
        column: Column,
        expected: &str,
        valid: impl Fn(&T) -> bool,
    ) -> Result<T, TableError> {
        let text = self.record.get(column.index).unwrap_or_default();
        let value = text.parse().ok().filter(valid);
        value.ok_or_else(|| self.error(format!("{} is {text:?}, expected {expected}", column.name)))
    }

    pub(crate) fn error(self, problem: String) -> TableError {
        self.table.error(self.line(), problem)
    }
}
