//! The parts of a file: fragments, and the structure between them.

use std::ops::Range;

use crate::FormatOptions;
use crate::index::{Index, Piece};

/// What bytes outside of fragments are, such as "event header" or "padding".
pub type Structure = &'static str;

/// Takes the parts of a file in the order of their bytes. Each part starts where the previous one ended.
#[derive(Debug, Default)]
pub struct FileIndexer {
    /// Options of the format.
    pub(crate) options: FormatOptions,
    pub(crate) index: Index,
    /// End of the last part.
    end: usize,
}

impl FileIndexer {
    /// The fragment of a source for an event, or a piece of it.
    ///
    /// # Panics
    /// The range does not start at the end of the previous part: a fault of the format's code.
    pub fn fragment(&mut self, event: u64, source: u32, range: Range<usize>) {
        self.advance(&range);
        let piece = Piece { event, start: range.start as u64, len: (range.end - range.start) as u64 };
        self.index.sources.entry(source).or_default().pieces.push(piece);
    }

    /// Bytes that belong to no fragment.
    ///
    /// # Panics
    /// As [`fragment`](Self::fragment).
    pub fn structure(&mut self, what: Structure, range: Range<usize>) {
        self.advance(&range);
        if !range.is_empty() {
            let total = self.index.structure.entry(what).or_default();
            total.count += 1;
            total.bytes += (range.end - range.start) as u64;
        }
    }

    /// Options of the format.
    pub fn options(&self) -> FormatOptions {
        self.options
    }

    /// Something about the file that the user of its events needs to know: a line of text.
    pub fn note(&mut self, text: String) {
        self.index.notes.push(text);
    }

    /// End of the last part.
    pub fn end(&self) -> usize {
        self.end
    }

    fn advance(&mut self, range: &Range<usize>) {
        assert!(
            range.start == self.end && range.start <= range.end,
            "parts have gaps or overlap: {range:?} after {}",
            self.end
        );
        self.end = range.end;
    }
}
