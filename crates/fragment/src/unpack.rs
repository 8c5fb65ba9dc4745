//! Unpacks compressed data sets.
//!
//! A packed data set is a directory. It has a `MANIFEST` in the format of `sha256sum`, and a gzip file
//! `NAME.gz` for each NAME in the manifest. Stream files in the repository are packed, because they must be
//! uncompressed to be mapped.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use sha2::{Digest, Sha256};

use crate::file::{self, IoError};

/// Name of the list of files and checksums.
pub const MANIFEST: &str = "MANIFEST";

/// Why a data set was not unpacked. Files that were completed before remain.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// An I/O error, or an invalid gzip file.
    #[error(transparent)]
    Io(#[from] IoError),
    /// An invalid line of the manifest.
    #[error("{}: line {line}: found {found:?}, expected a SHA-256, two spaces and a file name", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The line's text.
        found: String,
    },
    /// The manifest is empty.
    #[error("{}: lists no files", path.display())]
    Empty {
        /// The manifest.
        path: PathBuf,
    },
    /// A file's checksum does not match the manifest.
    #[error("{}: unpacked, its SHA-256 is {found}, expected {expected}", path.display())]
    Checksum {
        /// The packed file.
        path: PathBuf,
        /// The computed checksum.
        found: String,
        /// The checksum in the manifest.
        expected: String,
    },
}

/// Unpacks the data set in the directory `packed` into the directory `unpacked`, which is created if necessary. Returns the
/// files in the manifest's order.
///
/// Existing files with the right checksum are kept. Files are created atomically, so several processes may do this at the
/// same time.
pub fn unpack(packed: &Path, unpacked: &Path) -> Result<Vec<PathBuf>, UnpackError> {
    let manifest = packed.join(MANIFEST);
    let text = fs::read_to_string(&manifest).map_err(IoError::of(&manifest, "read"))?;
    let mut entries = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let entry = parse_line(line).ok_or_else(|| UnpackError::Manifest {
            path: manifest.clone(),
            line: number,
            found: line.to_owned(),
        })?;
        entries.push(entry);
    }
    if entries.is_empty() {
        return Err(UnpackError::Empty { path: manifest });
    }
    fs::create_dir_all(unpacked).map_err(IoError::of(unpacked, "create"))?;
    entries
        .into_iter()
        .map(|(expected, name)| {
            let target = unpacked.join(name);
            if !is_unpacked(&target, expected)? {
                unpack_file(&packed.join(format!("{name}.gz")), &target, expected)?;
            }
            Ok(target)
        })
        .collect()
}

/// Checksum and file name of a manifest line. The name must not contain a path.
fn parse_line(line: &str) -> Option<(&str, &str)> {
    let (sum, name) = line.split_once("  ")?;
    let is_sum = sum.len() == 64 && sum.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_name = !name.is_empty() && !name.contains('/') && name != "." && name != "..";
    (is_sum && is_name).then_some((sum, name))
}

fn is_unpacked(target: &Path, expected: &str) -> Result<bool, UnpackError> {
    let file = match File::open(target) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(cause) => return Err(IoError::of(target, "open")(cause).into()),
    };
    let sum = copy(file, IoError::of(target, "read"), |_| Ok(()))?;
    Ok(sum == expected)
}

fn unpack_file(packed: &Path, target: &Path, expected: &str) -> Result<(), UnpackError> {
    let source = File::open(packed).map_err(IoError::of(packed, "open"))?;
    let mut file = file::create(target)?;
    let found = copy(GzDecoder::new(source), IoError::of(packed, "unpack"), |bytes| {
        file.write_all(bytes).map_err(IoError::of(target, "write"))
    })?;
    if found != expected {
        let expected = expected.to_owned();
        return Err(UnpackError::Checksum { path: packed.to_owned(), found, expected });
    }
    Ok(file::commit(file, target)?)
}

/// Passes `content` to `take` in blocks and returns its SHA-256.
fn copy(
    mut content: impl Read,
    failed: impl FnOnce(io::Error) -> IoError,
    mut take: impl FnMut(&[u8]) -> Result<(), IoError>,
) -> Result<String, IoError> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match content.read(&mut buffer) {
            Ok(0) => return Ok(hex(hash)),
            Ok(len) => {
                hash.update(&buffer[..len]);
                take(&buffer[..len])?;
            }
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(failed(cause)),
        }
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    fn sum(content: &[u8]) -> String {
        hex(Sha256::new_with_prefix(content))
    }

    /// A packed data set with the files `a` and `b`, and a target directory.
    fn data_set() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (packed, unpacked) = (folder.path().join("packed"), folder.path().join("un/packed"));
        fs::create_dir(&packed).unwrap();
        fs::write(packed.join("a.gz"), gzip(b"alpha")).unwrap();
        fs::write(packed.join("b.gz"), gzip(b"beta")).unwrap();
        let manifest = format!("{}  a\n{}  b\n", sum(b"alpha"), sum(b"beta"));
        fs::write(packed.join(MANIFEST), manifest).unwrap();
        (folder, packed, unpacked)
    }

    #[test]
    fn files_are_unpacked_once_and_repaired() {
        let (_folder, packed, unpacked) = data_set();
        let files = unpack(&packed, &unpacked).unwrap();
        assert_eq!(files, [unpacked.join("a"), unpacked.join("b")]);
        assert_eq!(fs::read(&files[0]).unwrap(), b"alpha");
        assert_eq!(fs::read(&files[1]).unwrap(), b"beta");

        // Existing files do not need their packed files.
        fs::remove_file(packed.join("a.gz")).unwrap();
        fs::write(&files[1], b"bet").unwrap();
        unpack(&packed, &unpacked).unwrap();
        assert_eq!(fs::read(&files[1]).unwrap(), b"beta");
        assert_eq!(fs::read_dir(&unpacked).unwrap().count(), 2);
        fs::remove_file(&files[0]).unwrap();
        let error = unpack(&packed, &unpacked).unwrap_err().to_string();
        assert!(error.contains("packed/a.gz: cannot open"), "{error}");
    }

    #[test]
    fn wrong_checksums_are_refused_and_leave_no_file() {
        let (_folder, packed, unpacked) = data_set();
        fs::write(packed.join("a.gz"), gzip(b"omega")).unwrap();
        let error = unpack(&packed, &unpacked).unwrap_err().to_string();
        let expected = format!("a.gz: unpacked, its SHA-256 is {}, expected", sum(b"omega"));
        assert!(error.contains(&expected), "{error}");
        let cut = gzip(b"alpha");
        fs::write(packed.join("a.gz"), &cut[..cut.len() - 9]).unwrap();
        let error = unpack(&packed, &unpacked).unwrap_err().to_string();
        assert!(error.contains("a.gz: cannot unpack"), "{error}");
        assert_eq!(fs::read_dir(&unpacked).unwrap().count(), 0);
    }

    #[test]
    fn a_manifest_lists_only_plain_file_names() {
        let (_folder, packed, unpacked) = data_set();
        let good = sum(b"alpha");
        let bad =
            ["", "a", &good, "A0  a", &format!("{good} a"), &format!("{good}  ../a"), &format!("{good}  ..")];
        for line in bad {
            fs::write(packed.join(MANIFEST), format!("{good}  a\n{line}\n")).unwrap();
            let error = unpack(&packed, &unpacked).unwrap_err().to_string();
            assert!(error.contains(&format!("MANIFEST: line 2: found {line:?}, expected")), "{error}");
        }
        fs::write(packed.join(MANIFEST), "").unwrap();
        assert!(matches!(unpack(&packed, &unpacked), Err(UnpackError::Empty { .. })));
    }
}
