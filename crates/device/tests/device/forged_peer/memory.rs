//! The memory of one run: regions with guards around them.

use std::sync::Arc;

use millstream_device::{Mr, Pd};

/// Bytes of a region, and of the guard before it.
pub(super) const LEN: usize = 8 << 10;
pub(super) const GUARD: usize = 4096;
/// Access rights of the regions whose keys the peer knows: everything; remote READs only; local writes only.
pub(super) const RIGHTS: [u32; 3] = [15, 4, 1];
pub(super) const OPEN: usize = 0;
pub(super) const LOCAL: usize = 2;
/// Contents of memory that the peer may neither write nor read. No packet of the peer contains it.
pub(super) const SECRET: u8 = 0xa7;
/// Contents of the other memory.
pub(super) const PUBLIC: u8 = 0x11;

/// Memory with guards, and a region of it for each of [`RIGHTS`]. The upper half of the local region is in no request.
pub(super) struct Memory {
    bytes: Vec<u8>,
    pub(super) mrs: Vec<Mr>,
}

impl Memory {
    pub(super) fn new(pd: &Arc<Pd>) -> Self {
        let mut bytes = vec![SECRET; RIGHTS.len() * (GUARD + LEN) + GUARD];
        for region in 0..RIGHTS.len() {
            let len = if region == LOCAL { LEN / 2 } else { LEN };
            bytes[Self::offset(region)..][..len].fill(PUBLIC);
        }
        let base = bytes.as_mut_ptr() as u64;
        let register = |(region, rights): (usize, &u32)| {
            let start = base + Self::offset(region) as u64;
            Mr::register(pd, start, LEN as u64, start, *rights).expect("registered")
        };
        Self { mrs: RIGHTS.iter().enumerate().map(register).collect(), bytes }
    }

    pub(super) fn offset(region: usize) -> usize {
        GUARD + region * (GUARD + LEN)
    }

    pub(super) fn start(&self, region: usize) -> u64 {
        self.bytes.as_ptr() as u64 + Self::offset(region) as u64
    }

    /// Checks that nothing has changed that the peer may not write.
    pub(super) fn check(&self) {
        for (at, byte) in self.bytes.iter().enumerate() {
            let inside =
                |region: usize, len: usize| (Self::offset(region)..Self::offset(region) + len).contains(&at);
            let expected = if inside(1, LEN) { PUBLIC } else { SECRET };
            let writable = inside(OPEN, LEN) || inside(LOCAL, LEN / 2);
            assert!(writable || *byte == expected, "the device wrote {byte:#x} at offset {at}");
        }
    }
}
