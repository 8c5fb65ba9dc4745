//! Tables of comma-separated values: questions in, predictions out.

use crate::rows::Row;
use std::collections::HashMap;
use std::path::Path;

/// A table that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct CsvError {
    /// The file.
    pub file: String,
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// A record with the line it starts in.
type Record = (usize, Vec<String>);

/// The records of a text, with the line each starts in: quotes as RFC 4180 has them.
fn records(text: &str) -> Result<Vec<Record>, (usize, String)> {
    let mut records = Vec::new();
    let (mut record, mut field) = (Vec::new(), String::new());
    let (mut line, mut start, mut quoted) = (1, 1, false);
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                field.push('"');
                letters.next();
            }
            '"' => quoted = !quoted,
            ',' if !quoted => record.push(std::mem::take(&mut field)),
            '\n' if !quoted => {
                record.push(std::mem::take(&mut field));
                records.push((start, std::mem::take(&mut record)));
                line += 1;
                start = line;
            }
            '\r' if !quoted => {}
            '\n' => {
                field.push(letter);
                line += 1;
            }
            other => field.push(other),
        }
    }
    if quoted {
        return Err((start, "a quote is not closed".to_owned()));
    }
    if !field.is_empty() || !record.is_empty() {
        record.push(field);
        records.push((start, record));
    }
    records.retain(|(_, record)| record.iter().any(|field| !field.is_empty()));
    Ok(records)
}

/// Rows of a table with the columns id, system, quantity and unit, and value and conditions if there are.
///
/// # Errors
/// [`CsvError`] names the line that is no such row.
pub fn parse(file: &str, text: &str) -> Result<Vec<Row>, CsvError> {
    let fail = |line: usize, message: String| CsvError { file: file.to_owned(), line, message };
    let records = records(text).map_err(|(line, message)| fail(line, message))?;
    let Some(((_, header), rows)) = records.split_first() else {
        return Err(fail(1, "the file is empty".to_owned()));
    };
    let columns: HashMap<&str, usize> =
        header.iter().enumerate().map(|(i, name)| (name.as_str(), i)).collect();
    for needed in ["id", "system", "quantity", "unit"] {
        if !columns.contains_key(needed) {
            return Err(fail(1, format!("no column {needed:?}; the header has {}", header.join(", "))));
        }
    }
    rows.iter()
        .map(|(line, record)| {
            if record.len() != header.len() {
                return Err(fail(*line, format!("{} fields, the header has {}", record.len(), header.len())));
            }
            let field = |name: &str| columns.get(name).map_or(String::new(), |&i| record[i].clone());
            Ok(Row {
                id: field("id"),
                system: field("system"),
                quantity: field("quantity"),
                value: field("value"),
                unit: field("unit"),
                conditions: field("conditions"),
            })
        })
        .collect()
}

/// Reads a table.
///
/// # Errors
/// [`CsvError`] if the file cannot be read or is no such table.
pub fn load(path: &Path) -> Result<Vec<Row>, CsvError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|cause| CsvError {
        file: file.clone(),
        line: 0,
        message: format!("cannot read: {cause}"),
    })?;
    parse(&file, &text)
}

/// The rows that the model is calibrated on.
///
/// # Panics
/// Never: the table is part of the program, and a test reads it.
#[must_use]
pub fn calibration() -> Vec<Row> {
    parse("calibration.csv", include_str!("../../data/calibration.csv")).expect("the shipped table is sound")
}

/// The published questions that docs/predictions.csv answers; nobody here has seen the answers.
///
/// # Panics
/// Never: the table is part of the program, and a test reads it.
#[must_use]
pub fn questions() -> Vec<Row> {
    parse("questions.csv", include_str!("../../data/questions.csv")).expect("the shipped table is sound")
}

/// A field as the table writes it.
#[must_use]
pub(crate) fn quote(field: &str) -> String {
    if field.contains([',', '"', '\n']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quotes_and_lines() {
        let rows = parse("t", "id,system,quantity,unit\na,\"b, \"\"c\"\"\",d,e\n\n").unwrap();
        assert_eq!((rows.len(), rows[0].system.as_str()), (1, "b, \"c\""));
        for (text, line) in [("", 1), ("id,unit\n", 1), ("id,system,quantity,unit\na,b\n", 2), ("id\n\"a", 2)]
        {
            assert_eq!(parse("t", text).unwrap_err().line, line, "{text:?}");
        }
    }

    #[test]
    fn the_shipped_table_is_sound() {
        assert!(calibration().len() > 60);
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = parse("any", &text);
        }
    }
}
