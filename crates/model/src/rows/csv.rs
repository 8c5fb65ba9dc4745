//! Reads rows from CSV files.

use super::Row;
use csv::{ReaderBuilder, StringRecord};
use std::path::Path;

/// A CSV file that has no valid rows.
#[derive(Debug, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct CsvError {
    /// The file.
    pub file: String,
    /// The line, counted from 1; 0 if the file cannot be read.
    pub line: u64,
    /// The invalid column and value, and the problem.
    pub message: String,
}

/// Columns that every row has a value in.
const REQUIRED: [&str; 4] = ["id", "system", "quantity", "unit"];

/// Reads rows with the columns `id`, `system`, `quantity` and `unit`, and optional `value` and `conditions`.
///
/// # Errors
/// [`CsvError`] names the line, the column and the value.
pub fn parse(file: &str, text: &str) -> Result<Vec<Row>, CsvError> {
    let fail = |line: u64, message: String| CsvError { file: file.to_owned(), line, message };
    let mut reader = ReaderBuilder::new().flexible(true).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| fail(1, error.to_string()))?.clone();
    let column = |name: &str| header.iter().position(|known| known == name);
    let names = header.iter().collect::<Vec<_>>().join(", ");
    if let Some(name) = REQUIRED.into_iter().find(|name| column(name).is_none()) {
        return Err(fail(1, format!("column {name:?} is missing; the header is {names:?}")));
    }
    let mut rows: Vec<Row> = Vec::new();
    for record in reader.into_records() {
        let record: StringRecord = record.map_err(|error| {
            let line = error.position().map_or(0, csv::Position::line);
            fail(line, error.to_string())
        })?;
        let line = record.position().map_or(0, csv::Position::line);
        if record.len() != header.len() {
            let last = record.iter().next_back().unwrap_or_default();
            return Err(fail(
                line,
                format!("{} fields, the header has {}; the last is {last:?}", record.len(), header.len()),
            ));
        }
        let field = |name: &str| column(name).map_or(String::new(), |i| record[i].to_owned());
        if let Some(name) = REQUIRED.into_iter().find(|name| field(name).is_empty()) {
            return Err(fail(line, format!("column {name:?} is empty: \"\"")));
        }
        let id = field("id");
        if rows.iter().any(|row| row.id == id) {
            return Err(fail(line, format!("column \"id\": {id:?} occurs twice")));
        }
        rows.push(Row {
            id,
            system: field("system"),
            quantity: field("quantity"),
            value: field("value"),
            unit: field("unit"),
            conditions: field("conditions"),
        });
    }
    Ok(rows)
}

/// Reads a file of rows.
///
/// # Errors
/// [`CsvError`] if the file cannot be read or has an invalid row.
pub fn load(path: &Path) -> Result<Vec<Row>, CsvError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|cause| CsvError {
        file: file.clone(),
        line: 0,
        message: format!("cannot read: {cause}"),
    })?;
    parse(&file, &text)
}

/// The published rows that the model is calibrated on.
///
/// # Panics
/// Never: a test reads the shipped file.
#[must_use]
pub fn calibration() -> Vec<Row> {
    let read = |file, text| parse(file, text).expect("a test reads the shipped files");
    let mut rows = read("calibration.csv", include_str!("../../data/calibration.csv"));
    rows.extend(read("calibration-2.csv", include_str!("../../data/calibration-2.csv")));
    rows
}

/// The questions that `docs/predictions.csv` answers; their published values were not used for calibration.
///
/// # Panics
/// Never: a test reads the shipped file.
#[must_use]
pub fn questions() -> Vec<Row> {
    parse("questions.csv", include_str!("../../data/questions.csv")).expect("a test reads the shipped file")
}

/// The questions that `docs/predictions-2.csv` answers; their published values were not used for calibration.
///
/// # Panics
/// Never: a test reads the shipped file.
#[must_use]
pub fn questions_2() -> Vec<Row> {
    parse("questions-2.csv", include_str!("../../data/questions-2.csv"))
        .expect("a test reads the shipped file")
}

/// Appends a record to CSV text.
pub(crate) fn write_record<F: AsRef<[u8]>>(text: &mut String, fields: impl IntoIterator<Item = F>) {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(fields).expect("a vector takes every record");
    let bytes = writer.into_inner().expect("a vector takes every record");
    text.push_str(&String::from_utf8(bytes).expect("fields are UTF-8"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quoted_fields_are_unquoted() {
        let rows = parse("t", "id,system,quantity,unit\na,\"b, \"\"c\"\"\",d,e\n\n").unwrap();
        assert_eq!((rows.len(), rows[0].system.as_str()), (1, "b, \"c\""));
    }

    #[test]
    fn errors_name_line_and_column_or_value() {
        let header = "id,system,quantity,unit\n";
        for (text, line, what) in [
            (String::new(), 1, "\"id\" is missing"),
            ("id,unit\n".to_owned(), 1, "\"system\" is missing"),
            (format!("{header}a,b\n"), 2, "\"b\""),
            (format!("{header}a,b,c,d\n,b,c,d\n"), 3, "\"id\" is empty"),
            (format!("{header}a,b,c,d\na,b,c,d\n"), 3, "\"a\" occurs twice"),
        ] {
            let error = parse("t", &text).unwrap_err();
            assert_eq!(error.line, line, "{text:?}: {error}");
            assert!(error.message.contains(what), "{text:?}: {error}");
        }
    }

    #[test]
    fn shipped_files_have_valid_rows() {
        assert!(calibration().len() > 60);
        assert!(questions().len() > 140);
        assert_eq!(questions_2().len(), 138);
    }

    #[test]
    fn written_records_are_quoted_where_needed() {
        let mut text = String::new();
        write_record(&mut text, ["a, b", "2"]);
        assert_eq!(text, "\"a, b\",2\n");
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = parse("any", &text);
        }
    }
}
