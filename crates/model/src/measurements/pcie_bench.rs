//! Output of pcie-bench: tables on the terminal and in its `.txt`, `.dat` and `.csv` files.
//!
//! Its column `BW (GB/s)` has gigabits: the program multiplies bytes by eight. Tests that the model does not simulate
//! (`LAT_CMD_…`, `LAT_DMA_WRRD`) are left out.

use super::{Measured, Measurement};
use crate::benchmarks::dma::DmaTest;
use crate::measure::Benchmark;

/// Tests of the program that the model simulates.
const TESTS: [(&str, Benchmark); 4] = [
    ("BW_DMA_RD", Benchmark::Dma(DmaTest::Read)),
    ("BW_DMA_WR", Benchmark::Dma(DmaTest::Write)),
    ("BW_DMA_RW", Benchmark::Dma(DmaTest::ReadWrite)),
    ("LAT_DMA_RD", Benchmark::DmaLatency),
];

/// Columns of a table.
struct Header {
    size: usize,
    /// Column of the result, and factor to seconds or bytes per second.
    result: (usize, f64),
    is_latency: bool,
}

fn fields(line: &str) -> Vec<String> {
    if line.contains(',') {
        return line.split(',').map(|field| field.trim().to_owned()).collect();
    }
    line.replace("BW (", "BW(").split_whitespace().map(str::to_owned).collect()
}

/// Whether a line names columns of the program: `Test PAT Cache …`.
fn is_header(columns: &[String]) -> bool {
    columns.len() > 7 && columns[0].trim_start_matches('#') == "Test" && columns[1] == "PAT"
}

fn header(columns: &[String]) -> Option<Header> {
    let find = |name: &str| columns.iter().position(|column| column.replace(' ', "") == name);
    let (result, is_latency) = match (find("Med(ns)"), find("BW(GB/s)")) {
        (Some(median), _) => ((median, 1e-9), true),
        (None, Some(rate)) => ((rate, 0.125e9), false),
        (None, None) => return None,
    };
    Some(Header { size: find("SZ")?, result, is_latency })
}

pub(super) fn parse(text: &str) -> Result<Vec<Measurement>, (usize, String)> {
    let mut found = Vec::new();
    let mut columns: Option<Header> = None;
    for (i, line) in text.lines().map(str::trim).enumerate() {
        let fields = fields(line);
        if is_header(&fields) {
            columns = Some(header(&fields).ok_or_else(|| {
                (i + 1, format!("header {line:?}: needs SZ, and Med(ns) or BW (GB/s) of pcie-bench"))
            })?);
            continue;
        }
        let name = fields.first().map_or("", String::as_str);
        let Some((_, benchmark)) = TESTS.iter().find(|(test, _)| *test == name) else { continue };
        let Some(Header { size, result: (result, factor), is_latency }) = columns else {
            return Err((i + 1, format!("{name}: a table without its header line Test PAT Cache …")));
        };
        if is_latency != (*benchmark == Benchmark::DmaLatency) {
            return Err((i + 1, format!("{name}: is in a table of another kind of test")));
        }
        let number = |column: &str, i_column: usize| {
            let field = fields.get(i_column).map_or("", String::as_str);
            let good = field.parse::<f64>().ok().filter(|value| value.is_finite());
            good.ok_or_else(|| (i + 1, format!("{name}: column {column}: {field:?} is no number")))
        };
        let size = number("SZ", size)? as u64;
        let value = number(if is_latency { "Med(ns)" } else { "BW (GB/s)" }, result)? * factor;
        found.push(Measurement { line: i + 1, what: Measured::Benchmark(*benchmark), size, value });
    }
    Ok(found)
}
