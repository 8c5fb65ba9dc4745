//! A reader of a fuzzer's input, which returns zeroes after the end.

/// The bytes that are not read yet.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    pub(crate) fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn word(&mut self) -> u32 {
        u32::from(self.short()) | u32::from(self.short()) << 16
    }
}
