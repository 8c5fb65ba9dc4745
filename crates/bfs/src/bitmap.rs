//! Sets of small numbers, one bit each.

use millstream_application::Array;

/// A set of numbers below a limit.
#[derive(Clone, Debug, Default)]
pub struct Bitmap {
    words: Array<u64>,
}

impl Bitmap {
    /// An empty set of numbers below `limit`.
    #[must_use]
    pub fn new(limit: u64) -> Bitmap {
        Bitmap::over(vec![0; limit.div_ceil(64) as usize].into())
    }

    /// The set of these words, lowest numbers first.
    #[must_use]
    pub fn over(words: Array<u64>) -> Bitmap {
        Bitmap { words }
    }

    /// Removes all numbers.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Whether the number is in the set.
    #[must_use]
    pub fn contains(&self, number: u64) -> bool {
        contains(&self.words, number)
    }

    /// Adds a number. Returns whether it is new.
    pub fn insert(&mut self, number: u64) -> bool {
        insert(&mut self.words, number)
    }

    /// The words, lowest numbers first.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The words, to be changed.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// The numbers, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.words.iter().enumerate().flat_map(|(i, &word)| bits(word).map(move |bit| i as u64 * 64 + bit))
    }

    /// The set as a message: the differences of its numbers, or its words, whichever is shorter.
    #[must_use]
    pub fn to_message(&self) -> Vec<u8> {
        let limit = 1 + 8 * self.words.len();
        let mut message = vec![DIFFERENCES];
        let mut next = 0;
        for number in self.iter() {
            append_varint(&mut message, number - next);
            next = number + 1;
            if message.len() >= limit {
                message.clear();
                message.push(WORDS);
                message.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
                break;
            }
        }
        message
    }

    /// Adds the numbers of a message, each plus `first`, which is a multiple of 64. False if the message is malformed or
    /// has a number of `limit` or more.
    #[must_use]
    pub fn add_message(&mut self, message: &[u8], first: u64, limit: u64) -> bool {
        match message.split_first() {
            Some((&DIFFERENCES, mut rest)) => {
                let mut next: u64 = 0;
                while !rest.is_empty() {
                    let Some(number) = take_varint(&mut rest).and_then(|gap| next.checked_add(gap)) else {
                        return false;
                    };
                    if number >= limit {
                        return false;
                    }
                    self.insert(first + number);
                    next = number + 1;
                }
                true
            }
            Some((&WORDS, rest)) if rest.len() as u64 == limit.div_ceil(64) * 8 => {
                for (i, bytes) in rest.chunks_exact(8).enumerate() {
                    let word = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
                    let start = i as u64 * 64;
                    if limit - start < 64 && word >> (limit - start) != 0 {
                        return false;
                    }
                    self.words[(first / 64) as usize + i] |= word;
                }
                true
            }
            _ => false,
        }
    }
}

/// Whether a number is in the set of these words.
pub(crate) fn contains(words: &[u64], number: u64) -> bool {
    words[(number >> 6) as usize] >> (number & 63) & 1 == 1
}

/// Adds a number to the set of these words. Returns whether it is new.
pub(crate) fn insert(words: &mut [u64], number: u64) -> bool {
    let word = &mut words[(number >> 6) as usize];
    let bit = 1 << (number & 63);
    let is_new = *word & bit == 0;
    *word |= bit;
    is_new
}

/// The numbers of a word's bits, in order.
pub(crate) fn bits(word: u64) -> impl Iterator<Item = u64> {
    let mut rest = word;
    std::iter::from_fn(move || {
        let bit = (rest != 0).then(|| rest.trailing_zeros())?;
        rest &= rest - 1;
        Some(u64::from(bit))
    })
}

const DIFFERENCES: u8 = 0;
const WORDS: u8 = 1;

fn append_varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, tail) = rest.split_first()?;
        *rest = tail;
        let bits = u64::from(byte & 0x7F);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_message_has_the_set(numbers: BTreeSet<u16>, limit in 1_u64..70_000, few: bool) {
            let mut set = Bitmap::new(limit);
            for number in numbers.iter().map(|&number| u64::from(number) % limit).take(if few { 5 } else { 5000 }) {
                set.insert(number);
            }
            let message = set.to_message();
            prop_assert!(message.len() as u64 <= 1 + limit.div_ceil(64) * 8);
            let mut whole = Bitmap::new(128 + limit);
            prop_assert!(whole.add_message(&message, 128, limit));
            prop_assert!(whole.iter().eq(set.iter().map(|number| number + 128)));
        }

        #[test]
        fn no_message_adds_a_number_beyond_the_limit(message: Vec<u8>, limit in 1_u64..200) {
            let mut set = Bitmap::new(64 + limit);
            let _ = set.add_message(&message, 64, limit);
            prop_assert!(set.iter().all(|number| (64..64 + limit).contains(&number)));
        }
    }
}
