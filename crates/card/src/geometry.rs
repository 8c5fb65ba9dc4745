//! The trigger geometry of a camera: which patches form a cluster, and where each patch stands in
//! the trigger's input and output.
//!
//! The table is made from the camera's `patches.csv`, uploaded into card memory, and checked again
//! by the card before use. It has one row per *decision position*, so that the row number is the
//! output bit, and each row names the *trace positions* of its seven inputs.

use std::fmt;
use std::path::{Path, PathBuf};

/// Trigger patches of the camera.
pub const PATCHES: usize = 432;

/// Inputs of one cluster: the patch itself and up to six neighbours.
pub const CLUSTER: usize = 7;

/// One row of the table [bytes]: the trace positions of the cluster as `i16`, −1 for none, then
/// the patch number as `i16`.
pub const ROW_BYTES: usize = 2 * (CLUSTER + 1);

/// The whole table in card memory [bytes].
pub const GEOMETRY_BYTES: usize = PATCHES * ROW_BYTES;

/// One row: what the decision at this position depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Trace positions of the patches to add, −1 for none.
    pub traces: [i16; CLUSTER],
    /// The patch in the camera's own numbering.
    pub patch: i16,
}

/// The geometry table: a row for each decision position, all entries in range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    rows: Vec<Row>,
}

/// An entry of a geometry table that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("geometry row {row}, entry {entry}: {value} is not a patch of {PATCHES}")]
pub struct EntryError {
    /// Decision position.
    pub row: usize,
    /// Entry in the row; 7 is the patch number.
    pub entry: usize,
    /// The value refused.
    pub value: i16,
}

impl Geometry {
    /// The rows, by decision position; always [`PATCHES`] of them.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The table as it stands in card memory, [`GEOMETRY_BYTES`] long.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.rows
            .iter()
            .flat_map(|row| row.traces.iter().chain([&row.patch]))
            .flat_map(|entry| entry.to_le_bytes())
            .collect()
    }

    /// Reads a table from card memory.
    pub fn from_bytes(bytes: &[u8; GEOMETRY_BYTES]) -> Result<Geometry, EntryError> {
        let mut rows = Vec::with_capacity(PATCHES);
        for (row, bytes) in bytes.chunks_exact(ROW_BYTES).enumerate() {
            let mut entries = [0i16; CLUSTER + 1];
            for (entry, bytes) in bytes.chunks_exact(2).enumerate() {
                let value = i16::from_le_bytes([bytes[0], bytes[1]]);
                let lowest = if entry < CLUSTER { -1 } else { 0 };
                if !(lowest..PATCHES as i16).contains(&value) {
                    return Err(EntryError { row, entry, value });
                }
                entries[entry] = value;
            }
            let [traces @ .., patch] = entries;
            rows.push(Row { traces, patch });
        }
        Ok(Geometry { rows })
    }

    /// Loads the table from a camera's `patches.csv`.
    pub fn load(path: &Path) -> Result<Geometry, CsvError> {
        let text = std::fs::read_to_string(path).map_err(|source| CsvError {
            file: path.to_owned(),
            line: 0,
            problem: CsvProblem::Unreadable(source.to_string()),
        })?;
        Geometry::from_csv(&text).map_err(|(line, problem)| CsvError { file: path.to_owned(), line, problem })
    }

    /// Reads the text of a `patches.csv`; errors carry the line.
    fn from_csv(text: &str) -> Result<Geometry, (usize, CsvProblem)> {
        let mut lines = (1..).zip(text.lines());
        let (_, header) = lines.next().ok_or((1, CsvProblem::Empty))?;
        let columns = Columns::find(header).map_err(|problem| (1, problem))?;
        let mut patches = Vec::with_capacity(PATCHES);
        for (line, text) in lines {
            let patch = columns.parse(text).map_err(|problem| (line, problem))?;
            patches.push((line, patch));
        }
        let end = text.lines().count();
        if patches.len() != PATCHES {
            return Err((end, CsvProblem::PatchCount(patches.len())));
        }

        let mut trace_of = [None; PATCHES];
        let mut trace_taken = [false; PATCHES];
        for (line, patch) in &patches {
            let taken = |column| (*line, CsvProblem::Twice(column));
            if trace_of[patch.patch].replace(patch.trace).is_some() {
                return Err(taken("patch"));
            }
            if std::mem::replace(&mut trace_taken[patch.trace], true) {
                return Err(taken("trace_position"));
            }
        }
        let mut rows = [None; PATCHES];
        for (line, patch) in &patches {
            // Every patch number is in range, none came twice, and there are as many as numbers.
            let trace = |patch: usize| trace_of[patch].expect("every patch has a line") as i16;
            let row =
                Row { traces: patch.cluster.map(|other| other.map_or(-1, trace)), patch: patch.patch as i16 };
            if rows[patch.decision].replace(row).is_some() {
                return Err((*line, CsvProblem::Twice("decision_position")));
            }
        }
        let rows = rows.into_iter().map(|row| row.expect("every position is taken once")).collect();
        Ok(Geometry { rows })
    }
}

/// What is wrong with a `patches.csv`, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}:{line}: {problem}", file.display())]
pub struct CsvError {
    /// The file.
    pub file: PathBuf,
    /// Line, from 1; 0 if the file could not be read.
    pub line: usize,
    /// What is wrong.
    pub problem: CsvProblem,
}

/// What is wrong with a `patches.csv`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsvProblem {
    /// The file cannot be read; the system's reason.
    Unreadable(String),
    /// The file has no header.
    Empty,
    /// The header lacks this column.
    NoColumn(&'static str),
    /// The line has no field for this column.
    NoField(&'static str),
    /// The field is no patch number or position.
    BadField {
        /// The column.
        column: &'static str,
        /// The text found.
        text: String,
    },
    /// Another line has the same value in this column.
    Twice(&'static str),
    /// The file has another number of patches.
    PatchCount(usize),
}

impl fmt::Display for CsvProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CsvProblem::Unreadable(reason) => write!(f, "cannot read: {reason}"),
            CsvProblem::Empty => write!(f, "file is empty, expected a header"),
            CsvProblem::NoColumn(column) => write!(f, "header has no column {column}"),
            CsvProblem::NoField(column) => write!(f, "field {column} is missing"),
            CsvProblem::BadField { column, text } => {
                write!(f, "field {column}: {text:?} is not a number from 0 to {}", PATCHES - 1)
            }
            CsvProblem::Twice(column) => {
                write!(f, "field {column}: value occurs on an earlier line already")
            }
            CsvProblem::PatchCount(count) => {
                write!(f, "file has {count} patches, expected {PATCHES}")
            }
        }
    }
}

const CLUSTER_COLUMNS: [&str; CLUSTER] =
    ["cluster7_0", "cluster7_1", "cluster7_2", "cluster7_3", "cluster7_4", "cluster7_5", "cluster7_6"];

/// Where the columns that we need stand in a line.
struct Columns {
    patch: usize,
    trace: usize,
    decision: usize,
    cluster: [usize; CLUSTER],
}

/// One line of the file.
struct Patch {
    patch: usize,
    trace: usize,
    decision: usize,
    cluster: [Option<usize>; CLUSTER],
}

impl Columns {
    fn find(header: &str) -> Result<Columns, CsvProblem> {
        let find = |column| {
            header.split(',').position(|name| name.trim() == column).ok_or(CsvProblem::NoColumn(column))
        };
        let mut cluster = [0; CLUSTER];
        for (place, column) in cluster.iter_mut().zip(CLUSTER_COLUMNS) {
            *place = find(column)?;
        }
        Ok(Columns {
            patch: find("patch")?,
            trace: find("trace_position")?,
            decision: find("decision_position")?,
            cluster,
        })
    }

    fn parse(&self, line: &str) -> Result<Patch, CsvProblem> {
        let field =
            |place, column| line.split(',').nth(place).map(str::trim).ok_or(CsvProblem::NoField(column));
        let number = |text: &str, column| match text.parse() {
            Ok(number) if number < PATCHES => Ok(number),
            _ => Err(CsvProblem::BadField { column, text: text.to_owned() }),
        };
        let mut cluster = [None; CLUSTER];
        for (index, other) in cluster.iter_mut().enumerate() {
            let column = CLUSTER_COLUMNS[index];
            let text = field(self.cluster[index], column)?;
            if text != "-1" {
                *other = Some(number(text, column)?);
            }
        }
        Ok(Patch {
            patch: number(field(self.patch, "patch")?, "patch")?,
            trace: number(field(self.trace, "trace_position")?, "trace_position")?,
            decision: number(field(self.decision, "decision_position")?, "decision_position")?,
            cluster,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A small camera's worth of lines, patches in a row with their two neighbours.
    fn csv() -> Vec<String> {
        let mut lines = vec![
            "patch,crate,trace_position,decision_position,cluster7_0,cluster7_1,cluster7_2,\
             cluster7_3,cluster7_4,cluster7_5,cluster7_6,x_mm"
                .to_owned(),
        ];
        for patch in 0..PATCHES as i32 {
            let right = if patch + 1 < PATCHES as i32 { patch + 1 } else { -1 };
            lines.push(format!(
                "{patch},1,{},{},{patch},{},{right},-1,-1,-1,-1,0.5",
                PATCHES as i32 - 1 - patch,
                (patch * 5) % PATCHES as i32,
                patch - 1,
            ));
        }
        lines
    }

    fn read(lines: &[String]) -> Result<Geometry, (usize, CsvProblem)> {
        Geometry::from_csv(&lines.join("\n"))
    }

    #[test]
    fn rows_stand_at_decision_positions_and_name_trace_positions() {
        let geometry = read(&csv()).unwrap();
        let row = geometry.rows()[50];
        assert_eq!(row.patch, 10);
        assert_eq!(row.traces, [421, 422, 420, -1, -1, -1, -1]);
        let bytes: [u8; GEOMETRY_BYTES] = geometry.to_bytes().try_into().unwrap();
        assert_eq!(Geometry::from_bytes(&bytes), Ok(geometry));
    }

    #[test]
    fn errors_name_line_and_field() {
        let spoil = |line: usize, from: &str, to: &str| {
            let mut lines = csv();
            lines[line - 1] = lines[line - 1].replacen(from, to, 1);
            let (at, problem) = read(&lines).unwrap_err();
            assert_eq!(at, line, "{problem}");
            problem
        };
        assert_eq!(spoil(1, "trace_position", "position"), CsvProblem::NoColumn("trace_position"));
        assert_eq!(
            spoil(13, "420", "432"),
            CsvProblem::BadField { column: "trace_position", text: "432".to_owned() }
        );
        assert_eq!(
            spoil(13, "-1", "-2"),
            CsvProblem::BadField { column: "cluster7_3", text: "-2".to_owned() }
        );
        assert_eq!(spoil(13, "11,1", "10,1"), CsvProblem::Twice("patch"));
        assert_eq!(spoil(13, "420", "421"), CsvProblem::Twice("trace_position"));
        assert_eq!(spoil(13, ",55,", ",50,"), CsvProblem::Twice("decision_position"));
        assert_eq!(spoil(13, ",-1,-1,-1,-1,0.5", ""), CsvProblem::NoField("cluster7_3"));

        let mut lines = csv();
        lines.pop();
        assert_eq!(read(&lines), Err((PATCHES, CsvProblem::PatchCount(PATCHES - 1))));
        assert_eq!(Geometry::from_csv(""), Err((1, CsvProblem::Empty)));
        let missing = Geometry::load(Path::new("/nonexistent/patches.csv")).unwrap_err();
        assert!(missing.to_string().starts_with("/nonexistent/patches.csv:0: cannot read"));
    }

    proptest! {
        #[test]
        fn entries_out_of_range_are_refused(
            row in 0..PATCHES, entry in 0..=CLUSTER, value: i16,
        ) {
            let mut bytes: [u8; GEOMETRY_BYTES] =
                read(&csv()).unwrap().to_bytes().try_into().unwrap();
            let at = row * ROW_BYTES + 2 * entry;
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            let legal = (0..PATCHES as i16).contains(&value) || value == -1 && entry < CLUSTER;
            match Geometry::from_bytes(&bytes) {
                Ok(_) => prop_assert!(legal),
                Err(error) => prop_assert_eq!(
                    (legal, error),
                    (false, EntryError { row, entry, value })
                ),
            }
        }
    }
}
