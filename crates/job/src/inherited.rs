//! Bytes for processes that this process starts, in a descriptor that they inherit.
//!
//! An argument list can be read by every user of the host. A descriptor can be read by the same user only.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Bytes in memory without a name. They do not change.
#[derive(Debug)]
pub struct Inherited(File);

impl Inherited {
    /// Stores bytes for all processes that this process starts from now on.
    ///
    /// # Errors
    /// The system has no memory or no descriptors left.
    pub fn new(bytes: &[u8]) -> io::Result<Inherited> {
        // Without CLOEXEC: the processes that are started keep the descriptor.
        let mut file = File::from(memfd_create("millstream", MemfdFlags::ALLOW_SEALING)?);
        file.write_all(bytes)?;
        fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(Inherited(file))
    }

    /// The path at which a process that inherits the descriptor reads the bytes.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_started_reads_the_bytes_and_does_not_change_them() {
        let inherited = Inherited::new(b"kept").unwrap();
        let read = std::process::Command::new("cat").arg(inherited.path()).output().unwrap();
        assert_eq!(read.stdout, b"kept", "{}", String::from_utf8_lossy(&read.stderr));
        assert!(
            File::options().write(true).open(inherited.path()).and_then(|mut f| f.write_all(b"x")).is_err()
        );
    }
}
