//! The superblock of an HDF5 file, behind the user block: its status flags and end address, which a killed writer leaves as they were.
//!
//! ```text
//!   0        8     9     10     11      12        20         28        36          44
//! ┌────────┬─────┬─────┬─────┬───────┬─────────┬──────────┬─────────┬───────────┬──────────┐
//! │ magic  │ ver │ off │ len │ flags │ base    │ extension│ end     │ root      │ checksum │
//! └────────┴─────┴─────┴─────┴───────┴─────────┴──────────┴─────────┴───────────┴──────────┘
//! ```
//!
//! HDF5 File Format Specification 3.0, section II.A, version 3 with 8-byte addresses.

/// Length of the superblock.
pub(crate) const LEN: usize = 48;

const MAGIC: &[u8; 8] = b"\x89HDF\r\n\x1a\n";
const VERSION: usize = 8;
const OFFSET_SIZE: usize = 9;
const FLAGS: usize = 11;
const END: usize = 28;
const CHECKSUM: usize = 44;

/// The superblock of a file that a single writer wrote for multiple readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock([u8; LEN]);

impl Superblock {
    /// The superblock of a file, if it has the version that event files have and its checksum matches.
    pub(crate) fn parse(bytes: [u8; LEN]) -> Option<Self> {
        let valid = bytes.starts_with(MAGIC) && bytes[VERSION] == 3 && bytes[OFFSET_SIZE] == 8;
        (valid && bytes[CHECKSUM..] == lookup3(&bytes[..CHECKSUM]).to_le_bytes()).then_some(Self(bytes))
    }

    /// End of the file's allocated space.
    pub(crate) fn end(&self) -> u64 {
        let mut end = [0; 8];
        end.copy_from_slice(&self.0[END..END + 8]);
        u64::from_le_bytes(end)
    }

    /// The superblock of a file that is closed and ends at `end`.
    pub(crate) fn closed(mut self, end: u64) -> [u8; LEN] {
        self.0[FLAGS] = 0;
        self.0[END..END + 8].copy_from_slice(&end.to_le_bytes());
        let checksum = lookup3(&self.0[..CHECKSUM]);
        self.0[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        self.0
    }
}

/// Checksum of HDF5's metadata: Bob Jenkins' lookup3 (`hashlittle`) with initial value 0.
fn lookup3(bytes: &[u8]) -> u32 {
    let start = 0xdead_beef_u32.wrapping_add(bytes.len() as u32);
    let mut state = [start; 3];
    let word = |part: &[u8], at: usize| {
        let byte = |offset: usize| u32::from(part.get(at + offset).copied().unwrap_or(0)) << (8 * offset);
        byte(0) | byte(1) | byte(2) | byte(3)
    };
    let mut parts = bytes.chunks(12).peekable();
    while let Some(part) = parts.next() {
        for (index, sum) in state.iter_mut().enumerate() {
            *sum = sum.wrapping_add(word(part, 4 * index));
        }
        if parts.peek().is_some() { mix(&mut state) } else { finish(&mut state) }
    }
    state[2]
}

fn mix([a, b, c]: &mut [u32; 3]) {
    let step = |x: &mut u32, y: &mut u32, z: &mut u32, rotation: u32| {
        *x = x.wrapping_sub(*z) ^ z.rotate_left(rotation);
        *z = z.wrapping_add(*y);
    };
    step(a, b, c, 4);
    step(b, c, a, 6);
    step(c, a, b, 8);
    step(a, b, c, 16);
    step(b, c, a, 19);
    step(c, a, b, 4);
}

fn finish([a, b, c]: &mut [u32; 3]) {
    let step = |x: &mut u32, y: u32, rotation: u32| *x = (*x ^ y).wrapping_sub(y.rotate_left(rotation));
    step(c, *b, 14);
    step(a, *c, 11);
    step(b, *a, 25);
    step(c, *b, 16);
    step(a, *c, 4);
    step(b, *a, 14);
    step(c, *b, 24);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_has_the_published_values() {
        // From the driver of lookup3.c.
        assert_eq!(lookup3(b""), 0xdead_beef);
        assert_eq!(lookup3(b"Four score and seven years ago"), 0x1777_0551);
    }

    #[test]
    fn a_closed_superblock_has_no_flags() {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(MAGIC);
        (bytes[VERSION], bytes[OFFSET_SIZE], bytes[FLAGS]) = (3, 8, 5);
        assert_eq!(Superblock::parse(bytes), None, "its checksum is wrong");
        let checksum = lookup3(&bytes[..CHECKSUM]);
        bytes[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        let closed = Superblock::parse(bytes).unwrap().closed(4711);
        assert_eq!((closed[FLAGS], Superblock::parse(closed).unwrap().end()), (0, 4711));
    }
}
