//! The virtual memory areas (VMAs) of this process, from `/proc/self/maps` (proc(5)).

use std::io::{self, Read};
use std::ops::Range;

/// A virtual memory area: one line of `/proc/self/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    /// Its addresses.
    pub range: Range<usize>,
    /// Whether it can be read and written.
    pub writable: bool,
    /// Whether it is shared instead of copy-on-write.
    pub shared: bool,
    /// Offset in the file \[bytes\].
    pub offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// Inode of the file, zero without one.
    pub inode: u64,
    /// Whether it is anonymous memory or the heap, without stacks and the kernel's own mappings.
    pub anonymous: bool,
}

impl Vma {
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
            writable: mode.starts_with(b"rw"),
            shared: mode.get(3) == Some(&b's'),
            offset: u64::from_str_radix(offset, 16).ok()?,
            device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode,
            anonymous: inode == 0 && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:")),
        })
    }
}

/// The VMAs that overlap `range`, in address order. A hole has no VMA.
///
/// # Errors
/// Those of reading `/proc/self/maps`.
pub fn vmas(range: Range<usize>) -> io::Result<Vec<Vma>> {
    let mut text = String::new();
    std::fs::File::open("/proc/self/maps")?.read_to_string(&mut text)?;
    Ok(text
        .lines()
        .filter_map(Vma::parse)
        .filter(|vma| vma.range.start < range.end && range.start < vma.range.end)
        .collect())
}

/// Whether `vmas` cover `range` without holes.
#[must_use]
pub fn covers(vmas: &[Vma], range: &Range<usize>) -> bool {
    let mut at = range.start;
    for vma in vmas {
        if vma.range.start > at {
            return false;
        }
        at = at.max(vma.range.end);
    }
    at >= range.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_lines_are_parsed() {
        let heap =
            Vma::parse("5581d0a00000-5581d0a21000 rw-p 00000000 00:00 0                          [heap]")
                .unwrap();
        assert_eq!(heap.range, 0x5581_d0a0_0000..0x5581_d0a2_1000);
        assert!(heap.writable && heap.anonymous && !heap.shared);
        let file = Vma::parse("7f10-7f20 r--s 00001000 00:1a 1234 /memfd:x (deleted)").unwrap();
        assert_eq!((file.offset, file.device, file.inode), (0x1000, (0, 0x1a), 1234));
        assert!(file.shared && !file.anonymous && !file.writable);
        assert!(!Vma::parse("7ffc0-7ffd0 rw-p 00000000 00:00 0 [stack]").unwrap().anonymous);
        assert!(Vma::parse("nonsense").is_none());
    }

    #[test]
    fn own_memory_is_found() {
        let here = vec![0u8; 1 << 20];
        let start = here.as_ptr() as usize;
        let found = vmas(start..start + here.len()).unwrap();
        assert!(covers(&found, &(start..start + here.len())));
        assert!(found.iter().all(|vma| vma.writable));
    }
}
