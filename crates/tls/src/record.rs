//! Reads a TCP stream one TLS record at a time (RFC 8446, section 5.1).
//!
//! Bytes behind the current record stay in the kernel. A program that waits for the descriptor therefore sees each further
//! message, and none waits decrypted in a buffer.

use std::io::{self, Read};
use std::net::TcpStream;

/// Type, version, length.
const HEADER_LEN: usize = 5;

/// Position in the current record.
#[derive(Debug, Default)]
pub(crate) struct RecordReader {
    header: [u8; HEADER_LEN],
    /// Bytes of the header that were read.
    have: usize,
    /// Bytes of the record behind its header that were not read.
    left: usize,
}

impl RecordReader {
    /// Reads from `stream`, at most to the end of the header or of the record.
    pub(crate) fn of<'a>(&'a mut self, stream: &'a TcpStream) -> Reading<'a> {
        Reading { position: self, stream }
    }

    fn limit(&self) -> usize {
        if self.have < HEADER_LEN { HEADER_LEN - self.have } else { self.left }
    }

    fn advance(&mut self, bytes: &[u8]) {
        if self.have < HEADER_LEN {
            self.header[self.have..self.have + bytes.len()].copy_from_slice(bytes);
            self.have += bytes.len();
            if self.have == HEADER_LEN {
                self.left = usize::from(u16::from_be_bytes([self.header[3], self.header[4]]));
            }
        } else {
            self.left -= bytes.len();
        }
        if self.have == HEADER_LEN && self.left == 0 {
            *self = RecordReader::default();
        }
    }
}

/// A [`Read`] of the current record.
pub(crate) struct Reading<'a> {
    position: &'a mut RecordReader,
    stream: &'a TcpStream,
}

impl Read for Reading<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = self.position.limit().min(buffer.len());
        let read = (&mut &*self.stream).read(&mut buffer[..limit])?;
        self.position.advance(&buffer[..read]);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Records of any lengths, read in pieces of any lengths: no piece crosses a boundary.
        #[test]
        fn pieces_end_at_boundaries(
            lengths in proptest::collection::vec(0_usize..300, 1..8),
            pieces in proptest::collection::vec(1_usize..200, 1..8),
        ) {
            let mut bytes = Vec::new();
            let mut boundaries = Vec::new();
            for length in lengths {
                bytes.extend([23, 3, 3, (length >> 8) as u8, length as u8]);
                boundaries.push(bytes.len());
                bytes.extend(std::iter::repeat_n(7, length));
                boundaries.push(bytes.len());
            }
            let mut reader = RecordReader::default();
            let (mut at, mut pieces) = (0, pieces.iter().cycle());
            while at < bytes.len() {
                let next = boundaries.iter().copied().find(|boundary| *boundary > at).unwrap();
                let read = reader.limit().min(*pieces.next().unwrap());
                prop_assert!(read > 0 && at + read <= next, "{read} bytes at {at}, boundary {next}");
                reader.advance(&bytes[at..at + read]);
                at += read;
            }
            prop_assert_eq!(reader.limit(), HEADER_LEN);
        }
    }
}
