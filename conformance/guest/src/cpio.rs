//! Writer of initramfs archives in the cpio format "newc"
//! (Documentation/driver-api/early-userspace/buffer-format.rst of Linux).

/// Writes an archive.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;

impl Archive {
    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER | 0o755, &[]);
    }

    pub(crate) fn file(&mut self, name: &str, contents: &[u8]) {
        self.entry(name, FILE | 0o755, contents);
    }

    /// The complete archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(contents.len()).expect("files of the guest are shorter than 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        // Inode, mode, uid, gid, nlink, mtime, size, dev (2), rdev (2), name size, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    /// cpio unpacks the archive.
    #[test]
    fn cpio_unpacks_the_archive() {
        let folder = tempfile::tempdir().unwrap();
        let mut archive = Archive::default();
        archive.folder("a");
        archive.file("a/three", b"abc");
        archive.file("a/four", b"abcd");
        let unpack =
            Command::new("cpio").args(["-i", "--quiet"]).current_dir(&folder).stdin(Stdio::piped()).spawn();
        let mut unpack = unpack.expect("cpio is one of the packages that `make setup` installs");
        unpack.stdin.take().unwrap().write_all(&archive.finish()).unwrap();
        assert!(unpack.wait().unwrap().success());
        assert_eq!(std::fs::read(folder.path().join("a/three")).unwrap(), b"abc");
        assert_eq!(std::fs::read(folder.path().join("a/four")).unwrap(), b"abcd");
    }
}
