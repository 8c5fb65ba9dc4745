//! Results of a command: text for readers on standard output, documents in files.
//!
//! The path `-` is standard output. It then carries this document alone, so that other programs can read it.

use std::error::Error;
use std::fmt::Display;
use std::path::Path;

use millstream_model::result_table::{ResultTable, TableValue};

use crate::args::model::{ResultOptions, TableOptions};
use crate::output::is_standard_output;

/// Whether the document of `path` takes standard output.
pub(super) fn takes_standard_output(path: Option<&Path>) -> bool {
    path.is_some_and(is_standard_output)
}

/// Writes a document to a file, or to standard output for `-`.
pub(super) fn save(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    if is_standard_output(path) {
        print!("{text}");
        return Ok(());
    }
    Ok(millstream_report::save(path, text)?)
}

/// Where a command writes its results.
#[derive(Debug)]
pub(super) struct Output<'a> {
    tables: &'a TableOptions,
    svg: Option<&'a Path>,
    has_text: bool,
}

impl<'a> Output<'a> {
    pub(super) fn new(options: &'a ResultOptions) -> Result<Output<'a>, Box<dyn Error>> {
        Output::of(&options.tables, options.svg.as_deref())
    }

    /// Results without a picture.
    pub(super) fn of_tables(tables: &'a TableOptions) -> Result<Output<'a>, Box<dyn Error>> {
        Output::of(tables, None)
    }

    /// Checks that one document at most goes to standard output.
    fn of(tables: &'a TableOptions, svg: Option<&'a Path>) -> Result<Output<'a>, Box<dyn Error>> {
        let documents =
            [("--json", tables.json.as_deref()), ("--csv", tables.csv.as_deref()), ("--svg", svg)];
        let printed: Vec<&str> = (documents.iter())
            .filter(|(_, path)| takes_standard_output(*path))
            .map(|(name, _)| *name)
            .collect();
        if printed.len() > 1 {
            let names = printed.join(" and ");
            return Err(format!("{names} are both -: standard output takes one document; name files").into());
        }
        Ok(Output { tables, svg, has_text: printed.is_empty() })
    }

    /// Whether any document was asked for.
    pub(super) fn has_documents(&self) -> bool {
        self.tables.json.is_some() || self.tables.csv.is_some() || self.svg.is_some()
    }

    /// Whether a chart was asked for.
    pub(super) fn has_picture(&self) -> bool {
        self.svg.is_some()
    }

    /// Prints text for readers, unless a document takes standard output.
    pub(super) fn text(&self, text: &dyn Display) {
        if self.has_text {
            print!("{text}");
        }
    }

    /// Writes the documents of a table; the chart has column `y` over column `x`.
    pub(super) fn documents(
        &self,
        table: &ResultTable,
        (x, y): (usize, usize),
        series_columns: &[usize],
    ) -> Result<(), Box<dyn Error>> {
        if let Some(path) = &self.tables.json {
            save(path, &(serde_json::to_string_pretty(&json(table))? + "\n"))?;
        }
        if let Some(path) = &self.tables.csv {
            save(path, &table.csv())?;
        }
        if let Some(path) = self.svg {
            save(path, &table.chart(x, y, series_columns).svg())?;
        }
        Ok(())
    }
}

fn json(table: &ResultTable) -> serde_json::Value {
    let cell = |cell: &TableValue| match cell {
        TableValue::Text(text) => serde_json::Value::from(text.as_str()),
        TableValue::Number(value) => serde_json::Value::from(*value),
    };
    let row = |row: &Vec<TableValue>| -> serde_json::Map<String, serde_json::Value> {
        table.columns.iter().cloned().zip(row.iter().map(cell)).collect()
    };
    let rows: Vec<_> = table.rows.iter().map(row).collect();
    serde_json::json!({ "title": table.title, "columns": table.columns, "rows": rows })
}
