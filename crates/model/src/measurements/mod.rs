//! Measurements of one's own site: the text of perftest, OSU micro-benchmarks, fio and pcie-bench, or a CSV file.
//!
//! [`parse`] recognises the format. [`crate::fit_site`] fits devices to the measurements.

mod columns;
mod fio;
mod osu;
mod pcie_bench;
mod perftest;

use crate::measure::Benchmark;
use crate::ssd::Access;

/// One measured number.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Line of the file, counted from 1.
    pub line: usize,
    /// What was measured.
    pub what: Measured,
    /// Bytes of a message or of a block.
    pub size: u64,
    /// Seconds, or bytes per second.
    pub value: f64,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measured {
    /// A benchmark that the model simulates.
    Benchmark(Benchmark),
    /// Commands of a disk.
    Disk {
        /// Whether they read or write.
        access: Access,
        /// Commands outstanding: queue depth times jobs.
        outstanding: u32,
    },
}

/// Text that has no measurements.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct MeasurementError {
    /// The file.
    pub file: String,
    /// The line, counted from 1.
    pub line: usize,
    /// Field, value, and what to do.
    pub message: String,
}

/// Reads all measurements of a file; formats may follow one another.
///
/// # Errors
/// [`MeasurementError`] names the line, the field and the value.
pub fn parse(file: &str, text: &str) -> Result<Vec<Measurement>, MeasurementError> {
    let fail = |(line, message): (usize, String)| MeasurementError { file: file.to_owned(), line, message };
    let found = if columns::is_table(text) {
        columns::parse(text).map_err(fail)?
    } else {
        let mut found = perftest::parse(text).map_err(fail)?;
        found.extend(osu::parse(text).map_err(fail)?);
        found.extend(fio::parse(text).map_err(fail)?);
        found.extend(pcie_bench::parse(text).map_err(fail)?);
        found
    };
    if found.is_empty() {
        return Err(fail((
            1,
            "no measurements: expected the output of perftest, of the OSU micro-benchmarks, of fio or of pcie-bench, or a CSV \
             file with the columns benchmark, bytes, value, unit (disks: queue-depth)"
                .to_owned(),
        )));
    }
    match found.iter().find(|m| !(m.value > 0.0 && m.value.is_finite()) || m.size == 0 || m.size > 1 << 30) {
        Some(m) => Err(fail((
            m.line,
            format!("size {} and value {}: both must be positive, the size at most 1 GiB", m.size, m.value),
        ))),
        None => Ok(found),
    }
}

/// A table row of numbers: its first field is a size, all others are numbers.
fn numbers(line: &str) -> Option<Vec<f64>> {
    let fields: Vec<f64> = line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    (fields.len() >= 2).then_some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::benchmarks::dma::DmaTest;
    use crate::path::Verb;
    use proptest::prelude::*;

    const PERFTEST: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             11100.00            11024.71                   0.176395
---------------------------------------------------------------------------------------
                    RDMA_Read Latency Test
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 2       1000          1.50           8.02         1.61                1.62             0.05            1.80                    8.02
";

    #[test]
    fn perftest_tables_are_read_with_their_units() {
        let found = parse("p", PERFTEST).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].what, Measured::Benchmark(Benchmark::Bandwidth(Verb::Write)));
        assert!((found[0].value / (11024.71 * 1048576.0) - 1.0).abs() < 1e-9 && found[0].line == 5);
        assert_eq!(found[1].what, Measured::Benchmark(Benchmark::Latency(Verb::Read)));
        assert!((found[1].value / 1.61e-6 - 1.0).abs() < 1e-9);
        let gigabits = PERFTEST.replace("[MB/sec]", "[Gb/sec]").replace("11024.71", "92.5");
        assert!((parse("p", &gigabits).unwrap()[0].value / 92.5e9 * 8.0 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn osu_outputs_are_read() {
        let osu = "# OSU MPI Bandwidth Test v5.8\n# Size      Bandwidth (MB/s)\n1     3.93\n1024    3379.98\n\
                   # OSU MPI Latency Test v5.8\n# Size  Latency (us)\n8  1.61\n";
        let found = parse("o", osu).unwrap();
        assert_eq!(found.len(), 3);
        assert!((found[1].value - 3379.98e6).abs() < 1.0 && (found[2].value - 1.61e-6).abs() < 1e-12);
    }

    #[test]
    fn formats_follow_one_another() {
        let osu = "# OSU MPI Bandwidth Test v5.8\n# Size      Bandwidth (MB/s)\n1024    3379.98\n";
        let all = parse("both", &format!("{osu}{PERFTEST}{osu}")).unwrap();
        let perftest = parse("p", PERFTEST).unwrap();
        assert_eq!(all.len(), perftest.len() + 2 * parse("o", osu).unwrap().len(), "{all:?}");
        let values = |of: &[Measurement]| of.iter().map(|m| (m.what.clone(), m.value)).collect::<Vec<_>>();
        assert_eq!(values(&all[..perftest.len()]), values(&perftest));
    }

    #[test]
    fn pcie_bench_tables_are_read_in_all_of_its_formats() {
        let rates = "\
Test  PAT   Cache HO DO WinSZ   SZ     Time(cyc)      Time    Bytes     Trans   BW (GB/s)    Trans/s
 BW_DMA_RD Rand   HWarm  0  0   8KB   64     26800000   22.33ms   64MB   1000000     27.500 53710937.5
 BW_DMA_RW  Seq   HWarm  0  0   8KB  256     26800000   22.33ms   64MB   1000000     30.250 53710937.5
";
        let found = parse("b", rates).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].what, Measured::Benchmark(Benchmark::Dma(DmaTest::Read)));
        assert!((found[0].value / 27.5e9 * 8.0 - 1.0).abs() < 1e-9 && found[0].size == 64);
        assert_eq!(found[1].what, Measured::Benchmark(Benchmark::Dma(DmaTest::ReadWrite)));
        let gnuplot = format!("#{}", rates.replace("8KB", "8192").replace("22.33ms", "22333333.3"));
        assert_eq!(parse("b", &gnuplot).unwrap(), found);
        let comma =
            |line: &str| line.replace("BW (", "BW(").split_whitespace().collect::<Vec<_>>().join(",") + "\n";
        let table: String = rates.lines().map(comma).collect::<String>().replace("BW(", "BW (");
        assert_eq!(parse("b", &table).unwrap(), found);
        // Commands of the adapter's own are not simulated.
        let times = "\
Test  PAT   Cache HO DO WinSZ   SZ     TAvg    Avg   Med   Min   Max   95% 99.9%   TAvg(ns) Avg(ns) Med(ns) Min(ns) Max(ns) 95%(ns) 99.9%(ns)   #outliers   #samples
  LAT_CMD_RD Rand   HWarm  0  0   8KB   64  600.0  600.0   600   500   900   700   800     500.0   500.0     500     420     750     583       667            0    2000000
  LAT_DMA_RD Rand   HWarm  0  0   8KB   64  700.0  700.0   700   600  1000   800   900     583.0   583.0     583     500     833     667       750            0    2000000
";
        let found = parse("l", times).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].what.clone(), found[0].line), (Measured::Benchmark(Benchmark::DmaLatency), 3));
        assert!((found[0].value - 583e-9).abs() < 1e-15);
        let swapped = rates.replace("BW_DMA_RD", "LAT_DMA_RD");
        for (text, line, what) in [
            (rates.lines().nth(1).unwrap(), 1, "without its header"),
            (&rates.replace("27.500", "fast"), 2, "\"fast\" is no number"),
            (&rates.replace("BW (GB/s)", "BW (TB/s)"), 1, "needs SZ"),
            (&swapped, 2, "another kind of test"),
        ] {
            let error = parse("b", text).unwrap_err();
            assert!(error.line == line && error.to_string().contains(what), "{error}");
        }
    }

    #[test]
    fn a_table_has_one_measurement_per_line() {
        let found =
            parse("c", "benchmark,bytes,value,unit\nib_write_lat,2,980,ns\nib_write_bw,4096,90,Gb/s\n")
                .unwrap();
        assert!((found[0].value - 9.8e-7).abs() < 1e-15 && (found[1].value - 11.25e9).abs() < 1.0);
    }

    #[test]
    fn errors_name_line_field_and_value() {
        for (text, line, what) in [
            ("", 1, "no measurements"),
            ("hello\nworld\n", 1, "no measurements"),
            ("benchmark,bytes,value,unit\nib_fast_bw,2,1,GB/s\n", 2, "ib_fast_bw"),
            ("benchmark,bytes,value,unit\nib_write_bw,two,1,GB/s\n", 2, "bytes"),
            ("benchmark,bytes,value,unit\nib_write_bw,2,1,us\n", 2, "unit"),
            ("benchmark,bytes,value,unit\nib_write_bw,2,-1,GB/s\n", 2, "positive"),
            ("benchmark,bytes,unit\nib_write_bw,2,GB/s\n", 1, "value"),
            ("RDMA_Write BW Test\n 64 1000 1 2 3\n", 2, "header"),
            ("\n RDMA_Write Bidirectional BW Test\n", 2, "one direction"),
        ] {
            let error = parse("m", text).unwrap_err();
            assert_eq!(error.line, line, "{text:?}: {error}");
            assert!(error.to_string().contains(what), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = parse("any", &text);
            let _ = parse("any", &format!("RDMA_Write BW Test\n#bytes BW average[MB/sec]\n{text}"));
            let _ = parse("any", &format!("benchmark,bytes,value,unit\n{text}"));
            let _ = parse("any", &format!("Test PAT Cache HO DO WinSZ SZ BW (GB/s)\nBW_DMA_RD {text}"));
            let _ = parse("any", &format!("x: rw=read, bs=(R) {text}\n read: IOPS=1, BW={text}"));
        }
    }
}
