//! Random numbers from counters.

/// A bijection of 64-bit words in which each input bit changes half of the output bits (the finalizer of SplitMix64).
#[must_use]
pub fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// 64 random bits for an index of a stream. `attempt` counts repetitions after rejected numbers.
#[must_use]
pub fn counter_hash(seed: u64, stream: u64, index: u64, attempt: u64) -> u64 {
    // Odd constants: the fractions of the golden ratio and of square roots.
    let key = mix(seed.wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let word = mix(key ^ index.wrapping_mul(0x6a09_e667_f3bc_c909));
    mix(word.wrapping_add(attempt.wrapping_mul(0xbb67_ae85_84ca_a73b)) ^ key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_uniform_in_every_bit() {
        let mut ones = [0_u32; 64];
        for index in 0..10_000 {
            let word = counter_hash(7, 1, index, 0);
            (0..64).for_each(|bit| ones[bit] += (word >> bit & 1) as u32);
        }
        // Five standard deviations.
        assert!(ones.iter().all(|&count| count.abs_diff(5000) < 250), "{ones:?}");
    }

    #[test]
    fn all_arguments_matter() {
        let mut words: Vec<u64> =
            (0..16).map(|i| counter_hash(i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3)).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 16);
    }
}
