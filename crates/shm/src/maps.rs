//! The virtual memory areas (VMAs) of this process, from `/proc/thread-self/maps` (proc(5)). `/proc/self` describes the main
//! thread: once it has called `pthread_exit`, its list is empty.
//!
//! Since Linux 6.11 a request (`PROCMAP_QUERY`) finds the area at an address. Older kernels only have the text, whose
//! cost rises with the number of all areas.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// A virtual memory area: one line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    /// Its addresses.
    pub range: Range<usize>,
    /// Its protection (`PROT_READ` and so on).
    pub protection: i32,
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
    /// Whether it can be read.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.protection & libc::PROT_READ != 0
    }

    /// Whether it can be read and written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        self.protection & both == both
    }

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
            protection: [(b'r', libc::PROT_READ), (b'w', libc::PROT_WRITE), (b'x', libc::PROT_EXEC)]
                .into_iter()
                .filter(|(letter, _)| mode.get(..3).is_some_and(|letters| letters.contains(letter)))
                .map(|(_, bit)| bit)
                .sum(),
            shared: mode.get(3) == Some(&b's'),
            offset: u64::from_str_radix(offset, 16).ok()?,
            device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode,
            anonymous: inode == 0 && is_anonymous(name.as_bytes()),
        })
    }
}

impl Vma {
    /// Whether the area is a mapping of this file.
    #[must_use]
    pub fn is_of(&self, file: FileNumber) -> bool {
        FileNumber { device: self.device, inode: self.inode } == file
    }

    /// The addresses that the area and `range` have in common, possibly none.
    #[must_use]
    pub fn part_of(&self, range: &Range<usize>) -> Range<usize> {
        let start = self.range.start.max(range.start);
        start..self.range.end.min(range.end).max(start)
    }
}

/// A file as the list names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileNumber {
    device: (u32, u32),
    inode: u64,
}

impl FileNumber {
    /// That of an open file.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn of(fd: impl AsFd) -> io::Result<FileNumber> {
        let file = rustix::fs::fstat(fd)?;
        let device = (rustix::fs::major(file.st_dev), rustix::fs::minor(file.st_dev));
        Ok(FileNumber { device, inode: file.st_ino })
    }
}

/// The list of the calling thread's process.
fn open() -> io::Result<File> {
    File::open("/proc/thread-self/maps")
}

/// The VMAs that overlap `range`, in address order. A hole has no VMA.
///
/// # Errors
/// Those of reading the list.
pub fn vmas(range: Range<usize>) -> io::Result<Vec<Vma>> {
    let mut found = Vec::new();
    for_each_vma(range, |vma| found.push(vma))?;
    Ok(found)
}

/// Calls `each` for the VMAs that overlap `range`, in address order, without the heap. `each` may replace the area.
///
/// # Errors
/// Those of reading the list.
pub fn for_each_vma(range: Range<usize>, mut each: impl FnMut(Vma)) -> io::Result<()> {
    let mut file = open()?;
    let mut at = range.start;
    while at < range.end {
        match query(&file, at) {
            Ok(Some(vma)) if vma.range.start < range.end => {
                at = vma.range.end;
                each(vma);
            }
            Ok(_) => break,
            // Linux before 6.11, or an area that the request cannot describe.
            Err(_) => return read(&mut file, &(at..range.end), each),
        }
    }
    Ok(())
}

/// The VMA at `address`, or the next one; None behind the last one. It costs the same however many areas there are.
///
/// # Errors
/// ENOTTY before Linux 6.11.
pub fn vma_at(address: usize) -> io::Result<Option<Vma>> {
    query(&open()?, address)
}

/// Calls `each` for the VMAs that overlap `range`, from the text.
fn read(file: &mut File, range: &Range<usize>, mut each: impl FnMut(Vma)) -> io::Result<()> {
    let (mut chunk, mut line) = ([0u8; 4096], Line::default());
    let mut is_empty = true;
    loop {
        let len = match file.read(&mut chunk) {
            Ok(0) if is_empty => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        is_empty = false;
        for byte in &chunk[..len] {
            if *byte != b'\n' {
                line.push(*byte);
                continue;
            }
            let vma = Vma::parse(std::mem::take(&mut line).text());
            if let Some(vma) = vma.filter(|vma| !vma.part_of(range).is_empty()) {
                each(vma);
            }
        }
    }
}

/// The start of a line. Names of files are cut; the other fields and the kernel's names fit.
struct Line {
    bytes: [u8; 160],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 160], len: 0 }
    }
}

impl Line {
    fn push(&mut self, byte: u8) {
        if let Some(free) = self.bytes.get_mut(self.len) {
            *free = byte;
            self.len += 1;
        }
    }

    fn text(&self) -> &str {
        let bytes = &self.bytes[..self.len];
        // A name may be cut within a character, or be no text.
        let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
        std::str::from_utf8(&bytes[..valid]).unwrap_or_default()
    }
}

/// `struct procmap_query` (linux/fs.h).
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong =
    3 << 30 | (size_of::<ProcmapQuery>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 17;
const COVERING_OR_NEXT: u64 = 1 << 4;
/// The flags of the protection: they have the values of `PROT_READ`, `PROT_WRITE` and `PROT_EXEC`.
const PROTECTION: u64 = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
const SHARED: u64 = 1 << 3;

/// The VMA at `address`, else the next one; None behind the last one. `maps` is the list.
fn query(maps: &File, address: usize) -> io::Result<Option<Vma>> {
    // Names of files are not needed; those of other areas are short.
    let mut name = [0u8; 128];
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: COVERING_OR_NEXT,
        query_addr: address as u64,
        vma_name_size: name.len() as u32,
        vma_name_addr: name.as_mut_ptr().addr() as u64,
        ..ProcmapQuery::default()
    };
    let ask = |query: &mut ProcmapQuery| {
        // SAFETY: the structure of this request, whose buffer for a name is on the stack.
        let done = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, std::ptr::from_mut(query)) };
        if done == 0 { Ok(true) } else { Err(io::Error::last_os_error()) }
    };
    let found = ask(&mut query).or_else(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => Ok(false),
        // The name of a file does not fit.
        Some(libc::ENAMETOOLONG) => {
            (query.vma_name_size, query.vma_name_addr) = (0, 0);
            ask(&mut query)
        }
        _ => Err(error),
    })?;
    if !found {
        return Ok(None);
    }
    // The size counts the terminating zero.
    let name = name.get(..(query.vma_name_size as usize).saturating_sub(1)).unwrap_or_default();
    Ok(Some(Vma {
        range: query.vma_start as usize..query.vma_end as usize,
        protection: (query.vma_flags & PROTECTION) as i32,
        shared: query.vma_flags & SHARED != 0,
        offset: query.vma_offset,
        device: (query.dev_major, query.dev_minor),
        inode: query.inode,
        anonymous: query.inode == 0 && is_anonymous(name),
    }))
}

/// Whether an area of this name, without a file, is anonymous memory.
fn is_anonymous(name: &[u8]) -> bool {
    name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:")
}

/// Whether all of `range` is mapped and can be read, or read and written if `write` is set.
///
/// # Errors
/// Those of [`vmas`].
pub fn permits(range: &Range<usize>, write: bool) -> io::Result<bool> {
    let vmas = vmas(range.clone())?;
    let permits = |vma: &Vma| if write { vma.is_writable() } else { vma.is_readable() };
    Ok(covers(&vmas, range) && vmas.iter().all(permits))
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
        assert!(heap.is_readable() && heap.is_writable() && heap.anonymous && !heap.shared);
        let file = Vma::parse("7f10-7f20 r--s 00001000 00:1a 1234 /memfd:x (deleted)").unwrap();
        assert_eq!((file.offset, file.device, file.inode), (0x1000, (0, 0x1a), 1234));
        assert!(file.is_readable() && file.shared && !file.anonymous && !file.is_writable());
        assert!(!Vma::parse("7f10-7f20 ---p 00000000 00:00 0").unwrap().is_readable());
        assert!(!Vma::parse("7ffc0-7ffd0 rw-p 00000000 00:00 0 [stack]").unwrap().anonymous);
        assert!(Vma::parse("nonsense").is_none());
    }

    #[test]
    fn own_memory_is_found() {
        let here = vec![0u8; 1 << 20];
        let start = here.as_ptr() as usize;
        let found = vmas(start..start + here.len()).unwrap();
        assert!(covers(&found, &(start..start + here.len())));
        assert!(found.iter().all(Vma::is_writable));
    }

    #[test]
    fn the_request_finds_what_the_text_says() {
        let mut file = open().unwrap();
        if let Err(error) = query(&file, 0) {
            println!("skipped: no PROCMAP_QUERY: {error}");
            return;
        }
        let local = 0u8;
        let heap = Box::new([0u8; 100]);
        let text = is_anonymous as *const () as usize;
        for at in [(&raw const local).addr(), heap.as_ptr().addr(), text] {
            let asked = query(&file, at).unwrap().expect("mapped");
            let mut said = Vec::new();
            read(&mut file, &(at..at + 1), |vma| said.push(vma)).unwrap();
            assert_eq!(said, [asked]);
            file = open().unwrap();
        }
        assert_eq!(query(&file, usize::MAX & !4095).unwrap(), None);
    }
}
