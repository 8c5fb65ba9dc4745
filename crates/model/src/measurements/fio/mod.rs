//! Output of fio 3: its text and its JSON (`--output-format=json`).
//!
//! Jobs of one group run at the same time: their rates and their commands outstanding add up. They must have one direction and
//! one block size, because the model has one queue of commands per disk.

mod json;
mod text;

use super::{Measured, Measurement};
use crate::ssd::Access;

/// Largest number of commands outstanding: as `queue-depth` of a site file.
const MOST_OUTSTANDING: u64 = 65_536;

const DIFFER: &str =
    "rw, bs or iodepth differ from another job of this group; put `stonewall` between the jobs";

/// Jobs of one group.
#[derive(Clone, Debug, PartialEq)]
struct Group {
    /// Line of its first result.
    line: usize,
    access: Access,
    block: u64,
    outstanding: u64,
    /// Bytes per second of all jobs.
    rate: f64,
}

impl Group {
    fn measurement(&self) -> Result<Measurement, (usize, String)> {
        if self.outstanding == 0 || self.outstanding > MOST_OUTSTANDING {
            let message =
                format!("iodepth × jobs = {}: must be 1 to {MOST_OUTSTANDING} commands", self.outstanding);
            return Err((self.line, message));
        }
        let what = Measured::Disk { access: self.access, outstanding: self.outstanding as u32 };
        Ok(Measurement { line: self.line, what, size: self.block, value: self.rate })
    }
}

/// The direction of a job's `rw`.
fn access(rw: &str) -> Result<Access, String> {
    match rw {
        "read" | "randread" => Ok(Access::Read),
        "write" | "randwrite" => Ok(Access::Write),
        _ => Err(format!("rw={rw}: one of read, randread, write, randwrite; mixed jobs are not modelled")),
    }
}

/// Commands that a job has outstanding: engines that wait for each command have one.
fn depth(engine: &str, iodepth: u64) -> u64 {
    match engine {
        "sync" | "psync" | "vsync" | "pvsync" | "pvsync2" | "mmap" => 1,
        _ => iodepth,
    }
}

pub(super) fn parse(text: &str) -> Result<Vec<Measurement>, (usize, String)> {
    let groups = if json::is_json(text) { json::groups(text)? } else { text::groups(text)? };
    groups.iter().map(Group::measurement).collect()
}

#[cfg(test)]
mod tests {
    use crate::measurements::{Measured, Measurement, parse};
    use crate::ssd::Access;
    use proptest::prelude::*;

    const TEXT: &str = "\
rr4k: (g=0): rw=randread, bs=(R) 4096B-4096B, (W) 4096B-4096B, (T) 4096B-4096B, ioengine=libaio, iodepth=4
...
rr64k: (g=1): rw=randread, bs=(R) 64.0KiB-64.0KiB, (W) 64.0KiB-64.0KiB, (T) 64.0KiB-64.0KiB, ioengine=psync, iodepth=9
...
w128k: (g=2): rw=write, bs=(R) 128KiB-128KiB, (W) 128KiB-128KiB, (T) 128KiB-128KiB, ioengine=libaio, iodepth=8
fio-3.33
Starting 5 processes

rr4k: (groupid=0, jobs=2): err= 0: pid=28994: Thu Nov 26 12:27:29 2026
  read: IOPS=67.0k, BW=262MiB/s (275MB/s)(262MiB/1001msec)
    slat (usec): min=2, max=1962, avg= 4.82, stdev=10.96
rr64k: (groupid=1, jobs=1): err= 0: pid=29012: Thu Nov 26 12:27:29 2026
  read: IOPS=9636, BW=602MiB/s (632MB/s)(604MiB/1002msec)
rr64k: (groupid=1, jobs=1): err= 0: pid=29013: Thu Nov 26 12:27:29 2026
  read: IOPS=9643, BW=603MiB/s (632MB/s)(603MiB/1001msec)
w128k: (groupid=2, jobs=1): err= 0: pid=29015: Thu Nov 26 12:27:29 2026
  write: IOPS=25.7k, BW=3210MiB/s (3366MB/s)(3213MiB/1001msec); 0 zone resets

Run status group 0 (all jobs):
   READ: bw=262MiB/s (275MB/s), 262MiB/s-262MiB/s (275MB/s-275MB/s), io=262MiB (275MB), run=1001-1001msec
";

    const JSON: &str = r#"fio: a warning
{
  "fio version" : "fio-3.33",
  "global options" : { "ioengine" : "libaio", "direct" : "1" },
  "jobs" : [
    {
      "jobname" : "rr4k",
      "groupid" : 0,
      "error" : 0,
      "job options" : { "rw" : "randread", "bs" : "4k", "iodepth" : "4", "numjobs" : "2" },
      "read" : { "bw_bytes" : 275000000, "iops" : 67000.5 },
      "write" : { "bw_bytes" : 0 }
    },
    {
      "jobname" : "w128k",
      "groupid" : 2,
      "error" : 0,
      "job options" : { "rw" : "write", "bs" : "128k", "iodepth" : "8" },
      "read" : { "bw_bytes" : 0 },
      "write" : { "bw_bytes" : 3366000000 }
    }
  ]
}
"#;

    fn disk(line: usize, access: Access, outstanding: u32, size: u64, value: f64) -> Measurement {
        Measurement { line, what: Measured::Disk { access, outstanding }, size, value }
    }

    #[test]
    fn jobs_of_a_group_add_up_in_text_and_in_json() {
        let expected = [
            disk(10, Access::Read, 8, 4096, 275e6),
            // Engines that wait have one command outstanding.
            disk(13, Access::Read, 2, 65_536, 1264e6),
            disk(17, Access::Write, 8, 131_072, 3366e6),
        ];
        assert_eq!(parse("t", TEXT).unwrap(), expected);
        let expected = [disk(7, Access::Read, 8, 4096, 275e6), disk(15, Access::Write, 8, 131_072, 3366e6)];
        assert_eq!(parse("j", JSON).unwrap(), expected);
        // Runs that follow one another in one file.
        let document = JSON.split_once('\n').unwrap().1;
        assert_eq!(parse("j", &format!("{JSON}{document}")).unwrap().len(), 4);
        assert_eq!(parse("t", &format!("{TEXT}{TEXT}")).unwrap().len(), 6);
    }

    #[test]
    fn errors_name_file_line_field_and_value() {
        let text = |old: &str, new: &str| TEXT.replacen(old, new, 1);
        let json = |old: &str, new: &str| JSON.replacen(old, new, 1);
        for (input, line, what) in [
            (text("rw=randread", "rw=randrw"), 1, "rw=randrw: one of read, randread"),
            (text("4096B-4096B", "4096B-8192B"), 1, "bs=4096B-8192B: the model needs one block size"),
            (text("4096B-4096B", "many"), 1, "bs=many: expected a size"),
            (text("iodepth=4", "iodepth=deep"), 1, "iodepth=deep: expected a number"),
            (text("iodepth=4", "iodepth=0"), 10, "iodepth × jobs = 0: must be 1 to 65536"),
            (text("err= 0", "err= 5"), 9, "err=5: the job failed"),
            (text("(275MB/s)", "(fast)"), 10, "no bandwidth in parentheses"),
            (text("(g=1): rw=randread", "(g=0): rw=randread"), 3, "(g=0): rw, bs or iodepth differ"),
            (text("jobs=2", "jobs=two"), 9, "jobs=two"),
            (TEXT.lines().skip(8).collect::<Vec<_>>().join("\n"), 2, "without the line of its job"),
            (json("\"randread\"", "\"trim\""), 7, "job \"rr4k\": rw=trim"),
            (json("\"4k\"", "\"4k-8k\""), 7, "bs=4k-8k"),
            (json("\"direct\" : \"1\"", "\"direct\" : \"0\""), 7, "direct=0: the page cache"),
            (json("\"iodepth\" : \"8\"", "\"iodepth\" : \"-8\""), 15, "iodepth=-8"),
            (json("\"error\" : 0", "\"error\" : 5"), 7, "error=5: the job failed"),
            (json("275000000", "0"), 7, "bw_bytes=0: must be above 0"),
            (json("275000000", "\"fast\""), 11, "invalid type: string \"fast\""),
            (json("\"bw_bytes\" : 275000000,", ""), 11, "missing field `bw_bytes`"),
        ] {
            let error = parse("own.txt", &input).unwrap_err();
            assert!(error.line == line && error.to_string().contains(what), "{what}: {error}");
            assert!(error.to_string().starts_with(&format!("own.txt:{line}: ")), "{error}");
        }
        for (table, what) in [
            ("benchmark,bytes,value,unit\ndisk_read,4096,1,GB/s\n", "\"queue-depth\" is missing"),
            ("benchmark,bytes,queue-depth,value,unit\ndisk_read,4096,0,1,GB/s\n", "\"0\": must be 1"),
        ] {
            let error = parse("own.csv", table).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        let table =
            "benchmark,bytes,queue-depth,value,unit\ndisk_write,4096,16,1.5,GB/s\nib_write_lat,2,,1,us\n";
        let found = parse("own.csv", table).unwrap();
        assert_eq!(found[0], disk(2, Access::Write, 16, 4096, 1.5e9));
        assert_eq!(found.len(), 2);
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String, at in 0_usize..2000) {
            for whole in [TEXT, JSON] {
                let cut: String = whole.chars().take(at).collect();
                let _ = parse("any", &format!("{cut}{text}"));
            }
        }
    }
}
