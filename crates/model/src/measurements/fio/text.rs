//! fio's text.
//!
//! ```text
//!   name: (g=0): rw=randread, bs=(R) 4096B-4096B, (W) …, ioengine=libaio, iodepth=4     one per section, first of all
//!   name: (groupid=0, jobs=2): err= 0: pid=28994: …                                     one per job or group
//!     read: IOPS=67.0k, BW=262MiB/s (275MB/s)(262MiB/1001msec)
//! ```

use super::{DIFFER, Group, access, depth};
use crate::ssd::Access;
use std::collections::BTreeMap;

/// What the header of a section says.
#[derive(Clone, Debug, PartialEq)]
struct Section {
    access: Access,
    block: u64,
    depth: u64,
}

/// Bytes of `128KiB`, `4096B`, `2805MB/s` and the like.
fn bytes(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    let unit = text[end..].trim_end_matches("/s").trim_end_matches('B');
    let factor = match unit {
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    Some(number * factor)
}

/// Text between two marks.
fn between<'a>(line: &'a str, before: &str, after: &[char]) -> Option<&'a str> {
    line.split_once(before)?.1.split(after).next()
}

/// Block size of a direction, `(R) 4096B-4096B`.
fn block_size(line: &str, access: Access) -> Result<u64, String> {
    let mark = if access == Access::Read { "(R) " } else { "(W) " };
    let sizes = line.split_once("bs=").and_then(|(_, rest)| between(rest, mark, &[',']));
    let sizes = sizes.ok_or_else(|| format!("{line:?}: no block size bs=(R) … (W) … of fio 3"))?;
    let (first, last) = sizes.split_once('-').unwrap_or((sizes, sizes));
    let parsed = bytes(first).filter(|size| *size >= 1.0);
    let size = parsed.ok_or_else(|| format!("bs={sizes}: expected a size such as 128KiB"))?;
    if first == last { Ok(size as u64) } else { Err(format!("bs={sizes}: the model needs one block size")) }
}

fn section(line: &str) -> Result<Section, String> {
    let access = access(between(line, "rw=", &[',']).unwrap_or_default())?;
    let text = between(line, "iodepth=", &[',', ' ']).unwrap_or_default();
    let iodepth = text.parse().map_err(|_| format!("iodepth={text}: expected a number of commands"))?;
    let engine = between(line, "ioengine=", &[',']).unwrap_or_default();
    Ok(Section { access, block: block_size(line, access)?, depth: depth(engine, iodepth) })
}

/// A result's group and number of jobs.
fn result(line: &str) -> Result<Option<(u64, u64)>, String> {
    let Some(fields) = between(line, "(groupid=", &[')']) else { return Ok(None) };
    let invalid = || format!("(groupid={fields}): expected (groupid=NUMBER, jobs=NUMBER)");
    let (group, jobs) = fields.split_once(", jobs=").ok_or_else(invalid)?;
    let (group, jobs) = (group.parse().map_err(|_| invalid())?, jobs.parse().map_err(|_| invalid())?);
    let error = between(line, "err=", &[':']).unwrap_or("0").trim();
    if error != "0" {
        return Err(format!("err={error}: the job failed"));
    }
    Ok(Some((group, jobs)))
}

/// Direction and bytes per second of a result, `read: IOPS=67.0k, BW=262MiB/s (275MB/s)(…)`.
fn rate(line: &str) -> Result<Option<(Access, f64)>, String> {
    let access = match line.split_once(": IOPS=") {
        Some(("read", _)) => Access::Read,
        Some(("write", _)) => Access::Write,
        _ => return Ok(None),
    };
    let rate = between(line, "(", &[')']).and_then(bytes);
    let rate = rate.ok_or_else(|| {
        format!("{line:?}: no bandwidth in parentheses, for example BW=2675MiB/s (2805MB/s)")
    })?;
    Ok(Some((access, rate)))
}

pub(super) fn groups(text: &str) -> Result<Vec<Group>, (usize, String)> {
    let mut sections: BTreeMap<u64, Section> = BTreeMap::new();
    let mut groups: BTreeMap<u64, Group> = BTreeMap::new();
    let mut finished: Vec<Group> = Vec::new();
    let mut job = None;
    for (i, line) in text.lines().map(str::trim).enumerate() {
        let fail = |message: String| (i + 1, message);
        let is_header = line.contains("): rw=");
        if is_header {
            let number = between(line, "(g=", &[')']).unwrap_or_default();
            let group = number.parse().map_err(|_| fail(format!("(g={number}): expected a number")))?;
            let new = section(line).map_err(fail)?;
            // The output of another run follows in the same file.
            if !groups.is_empty() {
                finished.extend(std::mem::take(&mut groups).into_values());
                sections.clear();
            }
            let known = sections.entry(group).or_insert_with(|| new.clone());
            if *known != new {
                return Err(fail(format!("(g={group}): {DIFFER}")));
            }
        }
        job = result(line).map_err(fail)?.or(job);
        let Some((access, rate)) = rate(line).map_err(fail)? else { continue };
        let without = "a result without the line of its job (name: (g=0): rw=…, bs=…, iodepth=…) above";
        let (group, jobs) = job.ok_or_else(|| fail(without.to_owned()))?;
        let section = sections.get(&group).ok_or_else(|| fail(without.to_owned()))?;
        if section.access != access {
            return Err(fail(format!("{line:?}: the job has another direction")));
        }
        let Section { access, block, depth } = section.clone();
        let sum =
            groups.entry(group).or_insert(Group { line: i + 1, access, block, outstanding: 0, rate: 0.0 });
        sum.outstanding = sum.outstanding.saturating_add(depth.saturating_mul(jobs));
        sum.rate += rate;
    }
    finished.extend(groups.into_values());
    Ok(finished)
}
