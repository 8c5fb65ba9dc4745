//! Frame format: a header, then messages, each with its length.
//!
//! ```text
//!  0               2               4                               8
//! +---------------+---------------+-------------------------------+
//! | credits       | messages      | bytes that follow             |
//! +---------------+---------------+-------------------------------+
//! | length of the first message   | its bytes …
//! ```
//!
//! All numbers are big-endian. A frame without messages only returns credits.
#![forbid(unsafe_code)]

use std::ops::Range;

/// Length of the header, in bytes.
pub(super) const HEADER_LEN: usize = 8;
/// Length of a message's length field, in bytes.
pub(super) const LENGTH_LEN: usize = 4;

/// Why a received frame is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Shorter than a header.
    #[error("frame has {len} bytes, less than its header of {HEADER_LEN}")]
    TooShort {
        /// Bytes received.
        len: usize,
    },
    /// The header's length does not match.
    #[error("frame header says {bytes} bytes, {received} bytes follow")]
    Length {
        /// The length in the header.
        bytes: u32,
        /// The length received.
        received: usize,
    },
    /// A message exceeds the frame.
    #[error("message at byte {at} exceeds its frame of {len} bytes")]
    Message {
        /// Offset of its length field.
        at: usize,
        /// Bytes received.
        len: usize,
    },
    /// Bytes behind the last message.
    #[error("{left} bytes follow the last message of a frame")]
    Trailing {
        /// Number of bytes.
        left: usize,
    },
    /// More credits than the peer can return.
    #[error("frame returns {credits} credits, only {missing} are outstanding")]
    Credits {
        /// The credits in the header.
        credits: u16,
        /// The credits outstanding.
        missing: u32,
    },
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Credits returned by the sender.
    pub(super) credits: u16,
    /// Number of messages.
    pub(super) messages: u16,
    /// Length of the rest of the frame, in bytes.
    pub(super) bytes: u32,
}

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER_LEN] {
        let ([c0, c1], [m0, m1]) = (self.credits.to_be_bytes(), self.messages.to_be_bytes());
        let [b0, b1, b2, b3] = self.bytes.to_be_bytes();
        [c0, c1, m0, m1, b0, b1, b2, b3]
    }

    pub(super) fn decode(frame: &[u8]) -> Result<Header, FrameError> {
        let Some(([c0, c1, m0, m1, b0, b1, b2, b3], rest)) = frame.split_first_chunk::<HEADER_LEN>() else {
            return Err(FrameError::TooShort { len: frame.len() });
        };
        let header = Header {
            credits: u16::from_be_bytes([*c0, *c1]),
            messages: u16::from_be_bytes([*m0, *m1]),
            bytes: u32::from_be_bytes([*b0, *b1, *b2, *b3]),
        };
        match header.bytes as usize == rest.len() {
            true => Ok(header),
            false => Err(FrameError::Length { bytes: header.bytes, received: rest.len() }),
        }
    }
}

/// Iterates over the messages of a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct FrameReader {
    at: usize,
    left: u16,
}

impl FrameReader {
    pub(super) fn new(header: Header) -> FrameReader {
        FrameReader { at: HEADER_LEN, left: header.messages }
    }

    /// Range of the next message in the frame.
    pub(super) fn next(&mut self, frame: &[u8]) -> Result<Option<Range<usize>>, FrameError> {
        // `at` never exceeds the frame: it only moves to ends of messages inside of it.
        let rest = &frame[self.at..];
        if self.left == 0 {
            return match rest.len() {
                0 => Ok(None),
                left => Err(FrameError::Trailing { left }),
            };
        }
        let outside = FrameError::Message { at: self.at, len: frame.len() };
        let (length, rest) = rest.split_first_chunk::<LENGTH_LEN>().ok_or(outside)?;
        let length = u32::from_be_bytes(*length) as usize;
        if length > rest.len() {
            return Err(outside);
        }
        let start = self.at + LENGTH_LEN;
        self.at = start + length;
        self.left -= 1;
        Ok(Some(start..self.at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(credits: u16, messages: &[Vec<u8>]) -> Vec<u8> {
        let mut body = Vec::new();
        for message in messages {
            body.extend_from_slice(&(message.len() as u32).to_be_bytes());
            body.extend_from_slice(message);
        }
        let header = Header { credits, messages: messages.len() as u16, bytes: body.len() as u32 };
        [&header.encode()[..], &body].concat()
    }

    /// All messages of a frame, or the first error.
    fn read(frame: &[u8]) -> Result<Vec<&[u8]>, FrameError> {
        let mut cursor = FrameReader::new(Header::decode(frame)?);
        let mut messages = Vec::new();
        while let Some(range) = cursor.next(frame)? {
            messages.push(&frame[range]);
        }
        Ok(messages)
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            credits: u16,
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
        ) {
            let bytes = frame(credits, &messages);
            prop_assert_eq!(Header::decode(&bytes).unwrap().credits, credits);
            prop_assert_eq!(read(&bytes).unwrap(), messages);
        }

        #[test]
        fn bytes_cut_off_are_noticed(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            cut: prop::sample::Index,
        ) {
            let bytes = frame(1, &messages);
            prop_assert!(read(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = read(&bytes);
        }

        #[test]
        fn an_arbitrary_body_is_read_in_full_or_refused(
            messages in 0u16..6,
            body in prop::collection::vec(0u8..4, 0..64),
        ) {
            let header = Header { credits: 0, messages, bytes: body.len() as u32 };
            let bytes = [&header.encode()[..], &body].concat();
            if let Ok(read) = read(&bytes) {
                let total: usize = read.iter().map(|message| message.len() + LENGTH_LEN).sum();
                prop_assert_eq!((read.len(), total), (usize::from(messages), body.len()));
            }
        }
    }

    #[test]
    fn errors_name_the_offset() {
        assert_eq!(read(&[0; 7]), Err(FrameError::TooShort { len: 7 }));
        let mut bytes = frame(0, &[vec![1, 2, 3]]);
        bytes[11] = 4;
        assert_eq!(read(&bytes), Err(FrameError::Message { at: 8, len: 15 }));
        bytes[11] = 2;
        assert_eq!(read(&bytes), Err(FrameError::Trailing { left: 1 }));
        bytes.push(0);
        assert_eq!(read(&bytes), Err(FrameError::Length { bytes: 7, received: 8 }));
    }
}
