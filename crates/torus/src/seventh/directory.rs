//! Names of the regions that a node's application published for hosts outside of the torus.
//!
//! Each node has a directory: a region with a number that all know, which nodes and outside hosts may read.
//!
//! ```text
//!   entry (96 bytes): 0 length of the name │ 1 access │ 2 … name (62) │ 64 region (8) │ 72 size (8) │ 92 CRC-32C of 0 to 91
//! ```

use millstream_fabric::{Fabric, FabricError, RegionId};
use millstream_torus_core::NodeNumber;
use millstream_torus_core::header::crc32c;

use crate::engine::OutsideAccess;

/// The directory of every node.
pub const DIRECTORY: RegionId = RegionId(u64::from_le_bytes(*b"torusdir"));
/// Regions that a node can publish at once.
pub const MAX_PUBLISHED: usize = 64;
/// Longest name (bytes).
pub const MAX_NAME: usize = 62;

const ENTRY_BYTES: usize = 96;
const CRC_AT: usize = 92;
const READ: u8 = 1;
const READ_WRITE: u8 = 2;

/// Reads of a directory that its node changes meanwhile.
const ATTEMPTS: usize = 16;

/// Size of a directory.
pub const DIRECTORY_BYTES: usize = MAX_PUBLISHED * ENTRY_BYTES;

/// A published region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedRegion {
    /// Its name at its node.
    pub name: String,
    /// The region.
    pub region: RegionId,
    /// Its size (bytes).
    pub size: u64,
    /// What outside hosts may do.
    pub access: OutsideAccess,
}

/// Whether a region can be published by this name.
#[must_use]
pub fn is_valid_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The bytes of a directory. Regions beyond [`MAX_PUBLISHED`] are left out.
pub(crate) fn encode(regions: &[PublishedRegion]) -> Vec<u8> {
    let mut bytes = vec![0; DIRECTORY_BYTES];
    for (entry, region) in bytes.chunks_exact_mut(ENTRY_BYTES).zip(regions) {
        let name = &region.name.as_bytes()[..region.name.len().min(MAX_NAME)];
        entry[0] = name.len() as u8;
        entry[1] = if region.access == OutsideAccess::Read { READ } else { READ_WRITE };
        entry[2..2 + name.len()].copy_from_slice(name);
        entry[64..72].copy_from_slice(&region.region.0.to_le_bytes());
        entry[72..80].copy_from_slice(&region.size.to_le_bytes());
        let crc = crc32c(&entry[..CRC_AT]);
        entry[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}

/// The regions of a directory. `None` if an entry is damaged: the node changed it meanwhile.
pub(crate) fn decode(bytes: &[u8]) -> Option<Vec<PublishedRegion>> {
    let word = |entry: &[u8], at: usize| entry[at..at + 8].try_into().ok().map(u64::from_le_bytes);
    let mut regions = Vec::new();
    for entry in bytes.chunks_exact(ENTRY_BYTES).filter(|entry| entry[0] != 0) {
        if crc32c(&entry[..CRC_AT]).to_le_bytes() != entry[CRC_AT..] {
            return None;
        }
        let access = match entry[1] {
            READ => OutsideAccess::Read,
            READ_WRITE => OutsideAccess::ReadWrite,
            _ => return None,
        };
        let name = entry.get(2..2 + usize::from(entry[0]).min(MAX_NAME))?;
        regions.push(PublishedRegion {
            name: String::from_utf8_lossy(name).into_owned(),
            region: RegionId(word(entry, 64)?),
            size: word(entry, 72)?,
            access,
        });
    }
    Some(regions)
}

/// The regions that a node's application published.
///
/// # Errors
/// [`FabricError`] of the read.
pub fn published<F: Fabric>(fabric: &mut F, node: NodeNumber) -> Result<Vec<PublishedRegion>, FabricError> {
    let mut bytes = vec![0; DIRECTORY_BYTES];
    for _ in 0..ATTEMPTS {
        fabric.get(node, DIRECTORY, 0, &mut bytes)?;
        if let Some(regions) = decode(&bytes) {
            return Ok(regions);
        }
    }
    Err(FabricError::Malformed { node })
}

/// The region that a node's application published by this name.
///
/// # Errors
/// [`FabricError`] of the read.
pub fn find<F: Fabric>(
    fabric: &mut F,
    node: NodeNumber,
    name: &str,
) -> Result<Option<PublishedRegion>, FabricError> {
    Ok(published(fabric, node)?.into_iter().find(|region| region.name == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_keeps_its_regions_and_shows_damage() {
        let regions: Vec<_> = (0..MAX_PUBLISHED as u64 + 1)
            .map(|i| PublishedRegion {
                name: "n".repeat(1 + i as usize % MAX_NAME),
                region: RegionId(i << 32 | 5),
                size: i * 4096,
                access: if i % 2 == 0 { OutsideAccess::Read } else { OutsideAccess::ReadWrite },
            })
            .collect();
        let mut bytes = encode(&regions);
        assert_eq!(decode(&bytes).unwrap(), regions[..MAX_PUBLISHED]);
        assert_eq!(decode(&vec![0; DIRECTORY_BYTES]), Some(Vec::new()));
        for at in [1, 2, 64, 79, CRC_AT] {
            bytes[at] ^= 1;
            assert_eq!(decode(&bytes), None, "byte {at}");
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn names_are_printable_and_short() {
        assert!(is_valid_name("histogram-7") && is_valid_name(&"x".repeat(MAX_NAME)));
        for wrong in ["", "two words", "täg", "line\n", &"x".repeat(MAX_NAME + 1)] {
            assert!(!is_valid_name(wrong), "{wrong:?}");
        }
    }
}
