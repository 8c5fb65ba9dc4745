//! Access rights and remote memory.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::BitOr;

use millstream_quantity::Rkey;
use sideway::ibverbs::AccessFlags;

/// Access rights of a region. Local reads are always allowed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(AccessBits);

type AccessBits = i32;

impl Access {
    /// Local reads only, for the source of sends and writes.
    pub const SOURCE: Access = Access(0);
    /// Local writes: receives, and results of READs.
    pub const LOCAL_WRITE: Access = Access(AccessFlags::LocalWrite.bits());
    /// Remote reads.
    pub const REMOTE_READ: Access = Access(AccessFlags::RemoteRead.bits());
    /// Remote writes. Verbs require local write access with it, so it is included.
    pub const REMOTE_WRITE: Access = Access(AccessFlags::RemoteWrite.bits() | AccessFlags::LocalWrite.bits());
    /// Remote atomics. Local write access is included, as for writes.
    pub const REMOTE_ATOMIC: Access =
        Access(AccessFlags::RemoteAtomic.bits() | AccessFlags::LocalWrite.bits());
    /// Remote reads and writes.
    pub const REMOTE: Access = Access(Access::REMOTE_READ.0 | Access::REMOTE_WRITE.0);

    /// Whether all rights of `other` are included.
    pub fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    pub(crate) fn flags(self) -> AccessFlags {
        AccessFlags::from(self.0)
    }
}

impl BitOr for Access {
    type Output = Access;

    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Access(local read")?;
        for (right, name) in [
            (AccessFlags::LocalWrite, "local write"),
            (AccessFlags::RemoteRead, "remote read"),
            (AccessFlags::RemoteWrite, "remote write"),
            (AccessFlags::RemoteAtomic, "remote atomics"),
        ] {
            if self.0 & right.bits() != 0 {
                write!(f, ", {name}")?;
            }
        }
        f.write_str(")")
    }
}

/// A range outside of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes at offset {offset} exceed {memory} of {size} bytes")]
pub struct OutOfBounds {
    /// Offset of the range, in bytes.
    pub offset: u64,
    /// Length of the range, in bytes.
    pub length: u64,
    /// Size of the memory, in bytes.
    pub size: u64,
    /// The memory.
    pub memory: &'static str,
}

impl OutOfBounds {
    /// Compares by subtraction, which cannot overflow.
    #[inline]
    pub(crate) fn check(
        memory: &'static str,
        size: u64,
        offset: u64,
        length: u64,
    ) -> Result<(), OutOfBounds> {
        if offset <= size && length <= size - offset {
            Ok(())
        } else {
            Err(OutOfBounds { offset, length, size, memory })
        }
    }
}

/// A peer's memory: address, key and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteMemory {
    /// Address of its first byte in the peer's registration.
    pub addr: u64,
    /// Its remote key.
    pub rkey: Rkey,
    /// Its size, in bytes.
    pub len: u64,
}

impl RemoteMemory {
    /// Length of the encoded form, in bytes.
    pub const ENCODED_LEN: usize = 20;

    /// Encodes address, key and size, each big-endian.
    pub fn encode(&self) -> [u8; Self::ENCODED_LEN] {
        let mut bytes = [0; Self::ENCODED_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.get().to_be_bytes());
        bytes[12..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    /// Decodes any value. The peer's device checks key and bounds.
    pub fn decode(bytes: &[u8; Self::ENCODED_LEN]) -> RemoteMemory {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3, l4, l5, l6, l7] = *bytes;
        RemoteMemory {
            addr: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: Rkey::new(u32::from_be_bytes([k0, k1, k2, k3])),
            len: u64::from_be_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
        }
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the part exceeds the memory.
    pub fn slice(&self, offset: u64, length: u64) -> Result<RemoteMemory, OutOfBounds> {
        OutOfBounds::check("remote memory", self.len, offset, length)?;
        Ok(RemoteMemory { addr: self.addr.wrapping_add(offset), rkey: self.rkey, len: length })
    }

    /// The remote address for a transfer of `length` bytes at `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the transfer exceeds the memory.
    #[inline]
    pub fn at(&self, offset: u64, length: u64) -> Result<RemoteAddress, OutOfBounds> {
        OutOfBounds::check("remote memory", self.len, offset, length)?;
        Ok(RemoteAddress { addr: self.addr.wrapping_add(offset), rkey: self.rkey })
    }

    /// The address of its first byte.
    #[inline]
    pub fn start(&self) -> RemoteAddress {
        RemoteAddress { addr: self.addr, rkey: self.rkey }
    }
}

/// Target of a WRITE, or source of a READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteAddress {
    /// Address of the first byte in the peer's registration.
    pub addr: u64,
    /// Its remote key.
    pub rkey: Rkey,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn remote_write_access_includes_local_write() {
        assert!(Access::REMOTE_WRITE.contains(Access::LOCAL_WRITE));
        assert!(Access::REMOTE.contains(Access::REMOTE_READ | Access::REMOTE_WRITE));
        assert!(!Access::REMOTE_READ.contains(Access::LOCAL_WRITE));
        assert_eq!(format!("{:?}", Access::REMOTE_READ), "Access(local read, remote read)");
    }

    #[test]
    fn the_encoded_form_is_big_endian_in_the_order_of_the_fields() {
        let memory = RemoteMemory {
            addr: 0x0102_0304_0506_0708,
            rkey: Rkey::new(0x090a_0b0c),
            len: 0x0d0e_0f10_1112_1314,
        };
        let bytes: Vec<u8> = (1..=20).collect();
        assert_eq!(memory.encode(), bytes[..]);
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(addr: u64, rkey: u32, len: u64) {
            let memory = RemoteMemory { addr, rkey: Rkey::new(rkey), len };
            prop_assert_eq!(RemoteMemory::decode(&memory.encode()), memory);
        }

        #[test]
        fn a_slice_lies_within_or_is_refused(len: u64, offset: u64, length: u64) {
            let memory = RemoteMemory { addr: 0x1000, rkey: Rkey::new(7), len };
            let fits = u128::from(offset) + u128::from(length) <= u128::from(len);
            prop_assert_eq!(memory.slice(offset, length).is_ok(), fits);
            prop_assert_eq!(memory.at(offset, length).is_ok(), fits);
            if let Ok(part) = memory.slice(offset, length) {
                prop_assert_eq!(part.len, length);
                prop_assert_eq!(part.addr, 0x1000u64.wrapping_add(offset));
            }
        }
    }
}
