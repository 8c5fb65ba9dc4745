//! The trigger geometry: the patches of each cluster, and the position of each patch in the trigger's
//! input and output.
//!
//! The table comes from the camera's `patches.csv`, is uploaded into card memory, and is checked by the card
//! before use. It has one row per *decision position*: the row number is the output bit. Each row has the
//! *trace positions* of its seven inputs.

use std::path::Path;

use crate::format::PATCHES;
use crate::table::{Table, TableError};

/// Inputs of one cluster: the patch itself and up to six neighbours.
pub const CLUSTER_INPUTS: usize = 7;

/// Length of one row in card memory \[bytes\]: the trace positions of the inputs as `i16`, −1 for none,
/// then the patch number as `i16`.
pub const ROW_BYTES: usize = 2 * (CLUSTER_INPUTS + 1);

/// Length of the table in card memory \[bytes\].
pub const GEOMETRY_BYTES: usize = PATCHES * ROW_BYTES;

/// One row: the inputs of the decision at this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Trace positions of the patches to add, −1 for none.
    pub traces: [i16; CLUSTER_INPUTS],
    /// The patch in the camera's own numbering.
    pub patch: i16,
}

/// The geometry table: one cluster for each decision position, all entries in range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriggerGeometry {
    clusters: Vec<Cluster>,
}

/// An entry of a geometry table that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("geometry row {row}, entry {entry}: {value} is not a patch of {PATCHES}")]
pub struct EntryError {
    /// Decision position.
    pub row: usize,
    /// Entry in the row; 7 is the patch number.
    pub entry: usize,
    /// The value found.
    pub value: i16,
}

impl TriggerGeometry {
    /// The clusters, by decision position; always [`PATCHES`] of them.
    pub fn clusters(&self) -> &[Cluster] {
        &self.clusters
    }

    /// The patch of each decision position.
    pub fn patches(&self) -> impl ExactSizeIterator<Item = u16> {
        // Patch numbers are never negative.
        self.clusters.iter().map(|cluster| cluster.patch as u16)
    }

    /// The table as in card memory, [`GEOMETRY_BYTES`] long.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.clusters
            .iter()
            .flat_map(|cluster| cluster.traces.iter().chain([&cluster.patch]))
            .flat_map(|entry| entry.to_le_bytes())
            .collect()
    }

    /// Parses a table in card memory.
    pub fn from_bytes(bytes: &[u8; GEOMETRY_BYTES]) -> Result<TriggerGeometry, EntryError> {
        let mut clusters = Vec::with_capacity(PATCHES);
        for (row, bytes) in bytes.chunks_exact(ROW_BYTES).enumerate() {
            let mut entries = [0i16; CLUSTER_INPUTS + 1];
            for (entry, bytes) in bytes.chunks_exact(2).enumerate() {
                let value = i16::from_le_bytes([bytes[0], bytes[1]]);
                let lowest = if entry < CLUSTER_INPUTS { -1 } else { 0 };
                if !(lowest..PATCHES as i16).contains(&value) {
                    return Err(EntryError { row, entry, value });
                }
                entries[entry] = value;
            }
            let [traces @ .., patch] = entries;
            clusters.push(Cluster { traces, patch });
        }
        Ok(TriggerGeometry { clusters })
    }

    /// Loads a camera's `patches.csv`.
    ///
    /// Each line has a `patch`, its `trace_position` and `decision_position`, and the patches of its cluster
    /// in `cluster7_0` to `cluster7_6`, −1 for none. Other columns are ignored.
    pub fn load(path: &Path) -> Result<TriggerGeometry, TableError> {
        TriggerGeometry::parse(&Table::load(path)?)
    }

    fn parse(table: &Table) -> Result<TriggerGeometry, TableError> {
        const INPUTS: [&str; CLUSTER_INPUTS] = [
            "cluster7_0",
            "cluster7_1",
            "cluster7_2",
            "cluster7_3",
            "cluster7_4",
            "cluster7_5",
            "cluster7_6",
        ];
        let patch_column = table.column("patch")?;
        let trace_column = table.column("trace_position")?;
        let decision_column = table.column("decision_position")?;
        let input_columns: Vec<_> =
            INPUTS.into_iter().map(|name| table.column(name)).collect::<Result<_, _>>()?;

        let in_range = format!("a number from 0 to {}", PATCHES - 1);
        let in_range_or_none = format!("-1 or {in_range}");
        // By patch number, and by decision position.
        let mut trace_of = [None; PATCHES];
        let mut lines = [None; PATCHES];
        let mut trace_used = [false; PATCHES];
        for row in table.rows() {
            let number = |column| row.parse(column, &in_range, |&number: &usize| number < PATCHES);
            let [patch, trace, decision] =
                [number(patch_column)?, number(trace_column)?, number(decision_column)?];
            let mut inputs = [-1; CLUSTER_INPUTS];
            for (input, &column) in inputs.iter_mut().zip(&input_columns) {
                let valid = |input: &i16| (-1..PATCHES as i16).contains(input);
                *input = row.parse(column, &in_range_or_none, valid)?;
            }
            let duplicate = |name| row.error(format!("{name} has the value of an earlier line"));
            if trace_of[patch].replace(trace as i16).is_some() {
                return Err(duplicate("patch"));
            }
            if std::mem::replace(&mut trace_used[trace], true) {
                return Err(duplicate("trace_position"));
            }
            if lines[decision].replace((patch as i16, inputs)).is_some() {
                return Err(duplicate("decision_position"));
            }
        }
        let found = table.rows().count();
        if found != PATCHES {
            return Err(table.whole(format!("{found} patches, expected {PATCHES}")));
        }
        let clusters = lines.into_iter().map(|line| {
            // As many lines as positions, and no value twice: every patch and position has its line.
            let (patch, inputs) = line.expect("every decision position has a line");
            let trace = |input: i16| match usize::try_from(input) {
                Ok(patch) => trace_of[patch].expect("every patch has a line"),
                Err(_) => -1,
            };
            Cluster { traces: inputs.map(trace), patch }
        });
        Ok(TriggerGeometry { clusters: clusters.collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A camera whose patches are in a row, each with its two neighbours as inputs.
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

    fn parse(lines: &[String]) -> Result<TriggerGeometry, TableError> {
        TriggerGeometry::parse(&Table::read(Path::new("patches.csv"), lines.join("\n").as_bytes())?)
    }

    #[test]
    fn clusters_are_ordered_by_decision_position_and_hold_trace_positions() {
        let geometry = parse(&csv()).unwrap();
        let cluster = geometry.clusters()[50];
        assert_eq!(cluster.patch, 10);
        assert_eq!(cluster.traces, [421, 422, 420, -1, -1, -1, -1]);
        assert_eq!(geometry.patches().nth(50), Some(10));
        let bytes: [u8; GEOMETRY_BYTES] = geometry.to_bytes().try_into().unwrap();
        assert_eq!(TriggerGeometry::from_bytes(&bytes), Ok(geometry));
    }

    #[test]
    fn errors_have_line_and_column() {
        let damaged = |line: usize, from: &str, to: &str| {
            let mut lines = csv();
            lines[line - 1] = lines[line - 1].replacen(from, to, 1);
            parse(&lines).unwrap_err().to_string()
        };
        let header = damaged(1, "trace_position", "position");
        assert_eq!(header, "patches.csv:1: the header has no column trace_position");
        assert_eq!(
            damaged(13, "420", "432"),
            "patches.csv:13: trace_position is \"432\", expected a number from 0 to 431"
        );
        assert_eq!(
            damaged(13, "-1", "-2"),
            "patches.csv:13: cluster7_3 is \"-2\", expected -1 or a number from 0 to 431"
        );
        let duplicate = |column| format!("patches.csv:13: {column} has the value of an earlier line");
        assert_eq!(damaged(13, "11,1", "10,1"), duplicate("patch"));
        assert_eq!(damaged(13, "420", "421"), duplicate("trace_position"));
        assert_eq!(damaged(13, ",55,", ",50,"), duplicate("decision_position"));
        assert_eq!(
            damaged(13, ",-1,-1,-1,-1,0.5", ""),
            "patches.csv:13: cluster7_3 is \"\", expected -1 or a number from 0 to 431"
        );

        let mut lines = csv();
        lines.pop();
        assert_eq!(parse(&lines).unwrap_err().to_string(), "patches.csv: 431 patches, expected 432");
        assert_eq!(parse(&[]).unwrap_err().to_string(), "patches.csv:1: the header has no column patch");
        let missing = TriggerGeometry::load(Path::new("/nonexistent/patches.csv")).unwrap_err();
        assert!(missing.to_string().starts_with("/nonexistent/patches.csv: cannot read: "), "{missing}");
    }

    proptest! {
        #[test]
        fn entries_out_of_range_are_refused(
            row in 0..PATCHES, entry in 0..=CLUSTER_INPUTS, value: i16,
        ) {
            let mut bytes: [u8; GEOMETRY_BYTES] =
                parse(&csv()).unwrap().to_bytes().try_into().unwrap();
            let at = row * ROW_BYTES + 2 * entry;
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            let legal = (0..PATCHES as i16).contains(&value) || value == -1 && entry < CLUSTER_INPUTS;
            match TriggerGeometry::from_bytes(&bytes) {
                Ok(_) => prop_assert!(legal),
                Err(error) => prop_assert_eq!(
                    (legal, error),
                    (false, EntryError { row, entry, value })
                ),
            }
        }
    }
}
