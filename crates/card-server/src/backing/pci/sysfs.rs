//! A PCIe function in sysfs (`Documentation/PCI/sysfs-pci.rst`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::super::{BackingError, PciAddress};

/// Bits of the third column of `resource` (`linux/ioport.h`).
const IO: u64 = 0x100;
const MEMORY: u64 = 0x200;

/// BARs of a function. The further lines of `resource` are its expansion ROM and the windows of a bridge.
const BARS: usize = 6;

/// A function and its folder.
pub(super) struct Function {
    address: PciAddress,
    folder: PathBuf,
    bars: Vec<(u64, u64)>,
}

/// A BAR of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryBar {
    pub(super) index: u8,
    /// (bytes)
    pub(super) size: u64,
}

impl Function {
    pub(super) fn find(address: PciAddress, sysfs: &Path) -> Result<Function, BackingError> {
        let folder = sysfs.join("bus/pci/devices").join(address.to_string());
        if !folder.is_dir() {
            return Err(BackingError::NoPciDevice { address, path: folder });
        }
        let path = folder.join("resource");
        let failed = |cause| BackingError::Pci { address, operation: "read", path: path.clone(), cause };
        let text = fs::read_to_string(&path).map_err(failed)?;
        let bars = text.lines().take(BARS).map(bar).collect::<Option<_>>();
        let bars =
            bars.ok_or_else(|| failed(io::Error::other("expected three hexadecimal numbers per line")))?;
        Ok(Function { address, folder, bars })
    }

    /// The requested BAR, or the largest memory BAR.
    pub(super) fn choose(&self, requested: Option<u8>) -> Result<MemoryBar, BackingError> {
        let address = self.address;
        let memory = |index: usize| {
            let (size, flags) = *self.bars.get(index)?;
            (size != 0 && flags & MEMORY != 0).then_some(MemoryBar { index: index as u8, size })
        };
        match requested {
            None => {
                let all = (0..self.bars.len()).filter_map(memory);
                all.max_by_key(|bar| bar.size).ok_or(BackingError::NoMemoryBar { address })
            }
            Some(bar) => {
                let (size, flags) = self.bars.get(usize::from(bar)).copied().unwrap_or_default();
                let what = match (size, flags & IO) {
                    (0, _) => "not present, or the upper half of another BAR",
                    (_, 0) => "neither memory nor I/O ports",
                    _ => "I/O ports, not memory",
                };
                memory(bar.into()).ok_or(BackingError::NotMemory { address, bar, what })
            }
        }
    }

    /// The character devices of the function and of the IOMMU, if the function is bound to `vfio-pci`.
    pub(super) fn vfio(&self, dev: &Path) -> Option<(PathBuf, PathBuf)> {
        let entry = fs::read_dir(self.folder.join("vfio-dev")).ok()?.flatten().next()?;
        let cdev = dev.join("vfio/devices").join(entry.file_name());
        let iommu = dev.join("iommu");
        (cdev.exists() && iommu.exists()).then_some((cdev, iommu))
    }

    /// Enables memory accesses to the function.
    pub(super) fn enable(&self) -> Result<(), BackingError> {
        let path = self.folder.join("enable");
        match fs::read_to_string(&path) {
            Ok(count) if count.trim() == "0" => fs::write(&path, "1").map_err(|cause| BackingError::Pci {
                address: self.address,
                operation: "write 1 to",
                path,
                cause,
            }),
            _ => Ok(()),
        }
    }

    /// Opens the file of a BAR, preferably the one with write combining.
    pub(super) fn resource(&self, bar: &MemoryBar) -> Result<(PathBuf, File), BackingError> {
        let plain = self.folder.join(format!("resource{}", bar.index));
        let combining = self.folder.join(format!("resource{}_wc", bar.index));
        let path = if combining.exists() { combining } else { plain };
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Ok((path, file)),
            Err(cause) => Err(BackingError::Pci { address: self.address, operation: "open", path, cause }),
        }
    }
}

/// Size and flags of a line of `resource`.
fn bar(line: &str) -> Option<(u64, u64)> {
    let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let numbers: Option<Vec<_>> = line.split_whitespace().map(number).collect();
    let [start, end, flags] = numbers?[..] else { return None };
    let size = if end == 0 { 0 } else { end.checked_sub(start)?.checked_add(1)? };
    Some((size, flags))
}
