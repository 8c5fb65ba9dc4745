//! The Debian packages of a guest: downloaded with apt and unpacked, not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::error::{Error, output};

/// A kernel release series.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kernel {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
}

impl Kernel {
    /// Pattern of its package names, without the cloud flavour, which lacks rxe, and the real-time flavour.
    fn pattern(self) -> &'static str {
        match self {
            Self::V6_1 => r"^linux-image-6\.1\.0-[0-9]+-amd64$",
            Self::V6_12 => r"^linux-image-6\.12\.[0-9]+\+deb12-amd64$",
        }
    }
}

/// Packages of the verbs programs and their libraries.
const USERLAND: &[&str] = &[
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libbpf1",
    "libbsd0",
    "libc6",
    "libcap2",
    "libelf1",
    "libgcc-s1",
    "libibumad3",
    "libibverbs1",
    "libmd0",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpci3",
    "librdmacm1",
    "libudev1",
    "perftest",
    "rdmacm-utils",
    "zlib1g",
];

/// Packages with exact versions, as `name=version`.
#[derive(Debug)]
pub(crate) struct Packages {
    kernel: String,
    userland: Vec<String>,
}

impl Packages {
    /// The newest versions in apt's package lists.
    pub(crate) fn find(kernel: Kernel) -> Result<Self, Error> {
        let found = output(Command::new("apt-cache").args(["search", "--names-only", kernel.pattern()]))?;
        let names: Vec<&str> = found.lines().filter_map(|line| line.split(' ').next()).collect();
        let newest = names.into_iter().max_by_key(|name| numbers(name));
        let newest = newest.ok_or_else(|| Error::NoPackage(kernel.pattern().to_owned()))?;
        let userland = USERLAND.iter().map(|name| exact(name)).collect::<Result<_, _>>()?;
        Ok(Self { kernel: exact(newest)?, userland })
    }

    /// Cache key of the packages and of the `rules` for building the image.
    pub(crate) fn key(&self, rules: &str) -> String {
        let mut hash = Sha256::new();
        for text in self.userland.iter().map(String::as_str).chain([self.kernel.as_str(), rules]) {
            hash.update(text);
            hash.update([0]);
        }
        let digest = hash.finalize();
        digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Unpacks the kernel package.
    pub(crate) fn unpack_kernel(&self, folder: &Path) -> Result<(), Error> {
        unpack(std::slice::from_ref(&self.kernel), folder)
    }

    /// Unpacks the programs.
    pub(crate) fn unpack_userland(&self, folder: &Path) -> Result<(), Error> {
        unpack(&self.userland, folder)
    }
}

/// The numbers in a package name, for comparing versions.
fn numbers(name: &str) -> Vec<u32> {
    name.split(|letter: char| !letter.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// `name=version` of the version that apt would install.
fn exact(name: &str) -> Result<String, Error> {
    let shown = output(Command::new("apt-cache").args(["policy", name]))?;
    let candidate = shown.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    match candidate {
        Some(version) if version != "(none)" => Ok(format!("{name}={version}")),
        _ => Err(Error::NoPackage(name.to_owned())),
    }
}

fn unpack(packages: &[String], folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(Error::file(folder))?;
    let down = tempfile::tempdir_in(folder).map_err(Error::file(folder))?;
    output(Command::new("apt-get").args(["download", "-qq"]).args(packages).current_dir(&down))?;
    for entry in fs::read_dir(down.path()).map_err(Error::file(down.path()))? {
        let path: PathBuf = entry.map_err(Error::file(down.path()))?.path();
        output(Command::new("dpkg-deb").arg("-x").args([path.as_path(), folder]))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        let newest = ["linux-image-6.1.0-9-amd64", "linux-image-6.1.0-47-amd64"]
            .into_iter()
            .max_by_key(|n| numbers(n));
        assert_eq!(newest, Some("linux-image-6.1.0-47-amd64"));
    }
}
