//! Text output of fio: block size of each job, and bandwidth of its reads and writes.

use super::{Measured, Measurement};

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

pub(super) fn parse(text: &str) -> Result<Vec<Measurement>, (usize, String)> {
    let mut found = Vec::new();
    let mut block = None;
    for (i, line) in text.lines().map(str::trim).enumerate() {
        if let Some((_, sizes)) = line.split_once("bs=(R) ") {
            let first = sizes.split(['-', ',']).next().unwrap_or_default();
            block =
                Some(bytes(first).ok_or_else(|| {
                    (i + 1, format!("block size {first:?}: expected a size such as 128KiB"))
                })?);
        }
        let what = match line.split_once(": IOPS=") {
            Some(("read", _)) => Measured::DiskRead,
            Some(("write", _)) => Measured::DiskWrite,
            _ => continue,
        };
        let rate = line.split_once('(').and_then(|(_, rest)| rest.split(')').next());
        let rate = rate.and_then(bytes).ok_or_else(|| {
            (i + 1, format!("{line:?}: no bandwidth in parentheses, for example BW=2675MiB/s (2805MB/s)"))
        })?;
        let size =
            block.ok_or_else(|| (i + 1, "no line with the job's block size (bs=) above".to_owned()))?;
        found.push(Measurement { line: i + 1, what, size: size as u64, value: rate });
    }
    Ok(found)
}
