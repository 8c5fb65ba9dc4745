//! fio's JSON (`--output-format=json` and `json+`).

use super::{DIFFER, Group, access, depth};
use crate::ssd::Access;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Output {
    #[serde(rename = "global options", default)]
    global: BTreeMap<String, String>,
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    jobname: String,
    #[serde(default)]
    groupid: u64,
    #[serde(default)]
    error: i64,
    #[serde(rename = "job options", default)]
    options: BTreeMap<String, String>,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    bw_bytes: f64,
}

/// Whether a file is fio's JSON; warnings may precede it.
pub(super) fn is_json(text: &str) -> bool {
    text.contains("\"fio version\"")
}

/// Bytes of `4k` or `1M`: fio counts in powers of 1024.
fn size(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..end].parse().ok()?;
    let factor = match text[end..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1 << 10,
        "m" | "mb" => 1 << 20,
        "g" | "gb" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(factor).filter(|size| *size > 0)
}

/// A job with the options of its file.
struct Options<'a> {
    global: &'a BTreeMap<String, String>,
    own: &'a BTreeMap<String, String>,
}

impl Options<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.own.get(name).or_else(|| self.global.get(name)).map(String::as_str)
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        let text = self.get(name).unwrap_or("1");
        let number = text.parse().ok().filter(|number| *number > 0);
        number.ok_or_else(|| format!("{name}={text}: expected a number of 1 or more"))
    }

    /// Commands outstanding of one job.
    fn depth(&self) -> Result<u64, String> {
        Ok(depth(self.get("ioengine").unwrap_or("psync"), self.number("iodepth")?))
    }

    fn block(&self) -> Result<u64, String> {
        if let Some(name) = ["bssplit", "bsrange"].into_iter().find(|name| self.get(name).is_some()) {
            let text = self.get(name).unwrap_or_default();
            return Err(format!("{name}={text}: the model needs one block size"));
        }
        let text = self.get("bs").unwrap_or("4k");
        size(text).ok_or_else(|| format!("bs={text}: expected one size such as 128k"))
    }

    /// The page cache answers commands without `direct=1`.
    fn check_cache(&self) -> Result<(), String> {
        const CACHED: [&str; 8] =
            ["sync", "psync", "vsync", "pvsync", "pvsync2", "libaio", "io_uring", "posixaio"];
        let engine = self.get("ioengine").unwrap_or("psync");
        let is_direct = self.get("direct") == Some("1") || self.get("buffered") == Some("0");
        if is_direct || !CACHED.contains(&engine) {
            return Ok(());
        }
        let text = self.get("direct").unwrap_or("0");
        Err(format!("direct={text}: the page cache answers these commands; run fio with --direct=1"))
    }
}

/// Line of a job, counted from 1: that of its `jobname`.
fn line_of(text: &str, job: usize) -> usize {
    let mut lines = text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("\"jobname\""));
    lines.nth(job).map_or(1, |(i, _)| i + 1)
}

/// Groups of one document; `first` jobs precede it in the file.
fn groups_of(text: &str, output: &Output, first: usize) -> Result<Vec<Group>, (usize, String)> {
    let mut groups: BTreeMap<u64, (Group, u64)> = BTreeMap::new();
    for (i, job) in output.jobs.iter().enumerate() {
        let line = line_of(text, first + i);
        let fail = |message: String| (line, format!("job {:?}: {message}", job.jobname));
        if job.error != 0 {
            return Err(fail(format!("error={}: the job failed", job.error)));
        }
        let options = Options { global: &output.global, own: &job.options };
        let access = access(options.get("rw").unwrap_or("read")).map_err(fail)?;
        options.check_cache().map_err(fail)?;
        let (block, depth) = (options.block().map_err(fail)?, options.depth().map_err(fail)?);
        // With group_reporting one entry stands for all clones of a job.
        let clones = options.number("numjobs").map_err(fail)?;
        let alike = |other: &&Job| (other.groupid, &other.jobname) == (job.groupid, &job.jobname);
        let entries = output.jobs.iter().filter(alike).count() as u64;
        if entries != 1 && entries != clones {
            return Err(fail(format!("numjobs={clones}: the file has {entries} results of this job")));
        }
        let rate = if access == Access::Read { job.read.bw_bytes } else { job.write.bw_bytes };
        if !(rate.is_finite() && rate > 0.0) {
            return Err(fail(format!("bw_bytes={rate}: must be above 0")));
        }
        let new = Group { line, access, block, outstanding: 0, rate: 0.0 };
        let (sum, same_depth) = groups.entry(job.groupid).or_insert((new, depth));
        if (sum.access, sum.block, *same_depth) != (access, block, depth) {
            return Err(fail(format!("groupid={}: {DIFFER}", job.groupid)));
        }
        sum.outstanding = sum.outstanding.saturating_add(depth.saturating_mul(clones / entries));
        sum.rate += rate;
    }
    Ok(groups.into_values().map(|(group, _)| group).collect())
}

pub(super) fn groups(text: &str) -> Result<Vec<Group>, (usize, String)> {
    // Lines before the first document are warnings.
    let start = text.find('{').unwrap_or(0);
    let lines_before = text[..start].matches('\n').count();
    let (mut groups, mut jobs) = (Vec::new(), 0);
    for output in serde_json::Deserializer::from_str(&text[start..]).into_iter::<Output>() {
        let output =
            output.map_err(|error| (lines_before + error.line().max(1), format!("JSON of fio: {error}")))?;
        groups.extend(groups_of(text, &output, jobs)?);
        jobs += output.jobs.len();
    }
    Ok(groups)
}
