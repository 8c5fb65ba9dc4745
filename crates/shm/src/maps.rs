//! What lies behind an address range of this process, from `/proc/self/maps`.

use std::io::{self, Read};
use std::ops::Range;

/// One line of `/proc/self/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Area {
    /// Addresses.
    pub range: Range<usize>,
    /// Readable and writable.
    pub rw: bool,
    /// Shared rather than copy-on-write.
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Device number as the kernel prints it: major, minor.
    pub device: (u32, u32),
    /// Inode, zero for anonymous memory.
    pub inode: u64,
    /// Plain anonymous memory or the heap: no file, no stack, nothing of the kernel's.
    pub plain: bool,
}

impl Area {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let mode = words.next()?.as_bytes();
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let inode = words.next()?.parse().ok()?;
        let name = words.next().unwrap_or("");
        Some(Self {
            range: usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?,
            rw: mode.starts_with(b"rw"),
            shared: mode.get(3) == Some(&b's'),
            offset: u64::from_str_radix(offset, 16).ok()?,
            device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode,
            plain: inode == 0 && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:")),
        })
    }
}

/// The areas that touch `range`, in address order. Holes show as missing areas.
///
/// # Errors
/// What reading `/proc/self/maps` reports.
pub fn areas(range: Range<usize>) -> io::Result<Vec<Area>> {
    let mut text = String::new();
    std::fs::File::open("/proc/self/maps")?.read_to_string(&mut text)?;
    Ok(text
        .lines()
        .filter_map(Area::parse)
        .filter(|area| area.range.start < range.end && range.start < area.range.end)
        .collect())
}

/// Whether `areas` cover `range` without a hole.
#[must_use]
pub fn covers(areas: &[Area], range: &Range<usize>) -> bool {
    let mut at = range.start;
    for area in areas {
        if area.range.start > at {
            return false;
        }
        at = at.max(area.range.end);
    }
    at >= range.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_kernels_lines() {
        let heap =
            Area::parse("5581d0a00000-5581d0a21000 rw-p 00000000 00:00 0                          [heap]")
                .unwrap();
        assert_eq!(heap.range, 0x5581_d0a0_0000..0x5581_d0a2_1000);
        assert!(heap.rw && heap.plain && !heap.shared);
        let file = Area::parse("7f10-7f20 r--s 00001000 00:1a 1234 /memfd:x (deleted)").unwrap();
        assert_eq!((file.offset, file.device, file.inode), (0x1000, (0, 0x1a), 1234));
        assert!(file.shared && !file.plain && !file.rw);
        assert!(!Area::parse("7ffc0-7ffd0 rw-p 00000000 00:00 0 [stack]").unwrap().plain);
        assert!(Area::parse("nonsense").is_none());
    }

    #[test]
    fn finds_our_own_memory() {
        let here = vec![0u8; 1 << 20];
        let start = here.as_ptr() as usize;
        let found = areas(start..start + here.len()).unwrap();
        assert!(covers(&found, &(start..start + here.len())));
        assert!(found.iter().all(|a| a.rw));
    }
}
