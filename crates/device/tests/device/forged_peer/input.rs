//! A reader of a fuzzer's input.

/// A reader of the input's bytes, which returns zeroes after the end.
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl Bytes<'_> {
    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    pub(super) fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(super) fn word(&mut self) -> u32 {
        u32::from(self.short()) | u32::from(self.short()) << 16
    }
}
