//! Bytes of card memory by bank.

use crate::MemoryRange;
use crate::registers::MAX_BANKS;

/// The parts of a range that lie in each bank, with their lengths.
pub fn by_bank(span: MemoryRange, bank_bytes: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = span.offset.saturating_add(span.len);
    let mut at = span.offset;
    std::iter::from_fn(move || {
        let bank = at / bank_bytes;
        if at >= end || bank >= MAX_BANKS.into() {
            return None;
        }
        let part = (end - at).min((bank + 1) * bank_bytes - at);
        at += part;
        Some((bank as usize, part))
    })
}

/// Adds up the bytes of ranges by bank. Most ranges lie in the bank of the previous one; this case needs no
/// division.
pub fn add_by_bank(
    spans: impl Iterator<Item = MemoryRange>,
    bank_bytes: u64,
    mut add: impl FnMut(usize, u64),
) {
    let (mut bank, mut inside, mut bytes) = (usize::MAX, 0..0, 0);
    for span in spans {
        if inside.contains(&span.offset) && inside.end - span.offset >= span.len {
            bytes += span.len;
            continue;
        }
        for (next, part) in by_bank(span, bank_bytes) {
            if next != bank {
                if bytes > 0 {
                    add(bank, bytes);
                }
                (bank, bytes) = (next, 0);
                inside = next as u64 * bank_bytes..(next as u64 + 1) * bank_bytes;
            }
            bytes += part;
        }
    }
    if bytes > 0 {
        add(bank, bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_are_added_to_the_banks_that_they_lie_in(
            spans in prop::collection::vec((0u64..1000, 0u64..500), 0..30), bank_bytes in 1u64..300,
        ) {
            let mut expected = [0; MAX_BANKS as usize];
            for at in spans.iter().flat_map(|(offset, len)| *offset..offset + len) {
                if let Some(count) = expected.get_mut((at / bank_bytes) as usize) {
                    *count += 1;
                }
            }
            let mut counted = [0; MAX_BANKS as usize];
            let spans = spans.iter().map(|(offset, len)| MemoryRange::new(*offset, *len));
            add_by_bank(spans, bank_bytes, |bank, bytes| counted[bank] += bytes);
            prop_assert_eq!(counted, expected);
        }
    }
}
