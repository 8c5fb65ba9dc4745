//! Reads the fields of a file in order. Each error has the offset and the name of the field.

use std::ops::Range;

use millstream_fragment::stream::Malformed;

/// The order of the bytes of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteOrder {
    Little,
    Big,
}

/// A position in a file.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Numbers end here.
    end: usize,
    pub(crate) order: ByteOrder,
}

/// A field that is not as the format says.
pub(crate) fn malformed(
    offset: usize,
    field: impl Into<String>,
    found: impl ToString,
    expected: impl ToString,
) -> Malformed {
    Malformed {
        offset: offset as u64,
        field: field.into(),
        found: found.to_string(),
        expected: expected.to_string(),
    }
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], order: ByteOrder) -> Self {
        Self { bytes, at: 0, end: bytes.len(), order }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at == self.end
    }

    pub(crate) fn remaining(&self) -> usize {
        self.end - self.at
    }

    /// A cursor for the next `len` bytes, which this one passes.
    pub(crate) fn split(&mut self, len: usize, field: &str) -> Result<Self, Malformed> {
        let range = self.take(len, field)?;
        Ok(Self { bytes: self.bytes, at: range.start, end: range.end, order: self.order })
    }

    /// The range of the next `len` bytes, which the cursor passes.
    pub(crate) fn take(&mut self, len: usize, field: &str) -> Result<Range<usize>, Malformed> {
        if len > self.remaining() {
            return Err(malformed(
                self.at,
                field,
                format!("{len} bytes"),
                format!("at most {} bytes, the rest of the {}", self.remaining(), self.container()),
            ));
        }
        let start = self.at;
        self.at += len;
        Ok(start..self.at)
    }

    fn container(&self) -> &'static str {
        if self.end == self.bytes.len() { "file" } else { "enclosing structure" }
    }

    /// The padding from here to the next multiple of `alignment` after `start`; the end may be missing in the last
    /// structure of a file.
    pub(crate) fn padding(&mut self, start: usize, alignment: usize) -> Range<usize> {
        let used = self.at - start;
        let padding = used.next_multiple_of(alignment) - used;
        let from = self.at;
        self.at += padding.min(self.remaining());
        from..self.at
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Malformed> {
        let range = self.take(N, field)?;
        let mut array: [u8; N] = self.bytes[range].try_into().expect("the range has N bytes");
        if self.order == ByteOrder::Big {
            array.reverse();
        }
        Ok(array)
    }

    pub(crate) fn u8(&mut self, field: &str) -> Result<u8, Malformed> {
        Ok(self.array::<1>(field)?[0])
    }

    pub(crate) fn u16(&mut self, field: &str) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &str) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &str) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// The bytes of a range of the file.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &'a [u8] {
        &self.bytes[range]
    }
}
