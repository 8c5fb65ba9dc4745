//! Counts, block sizes and percentages as reports print them.

use millstream_quantity::Bytes;

/// The size of a block: with a binary prefix if that makes it a whole number.
pub(crate) fn block(bytes: Bytes) -> String {
    const PREFIXES: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match PREFIXES.iter().find(|(scale, _)| bytes.0 >= *scale && bytes.0.is_multiple_of(*scale)) {
        Some((scale, unit)) => format!("{} {unit}", count(bytes.0 / scale)),
        None => bytes.to_string(),
    }
}

/// A count with a comma after every three digits.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A fraction in per cent, with more decimals close to 100 %.
pub(crate) fn per_cent(part: u64, whole: u64) -> String {
    if part == whole {
        return "100 %".into();
    }
    // Rounded down, so that only the whole is 100 %.
    let fraction = (part as f64 / whole as f64 * 1e5).floor() / 1e3;
    format!("{} %", fraction.min(99.999))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(691_200), "691,200");
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn whole_blocks_have_binary_prefixes() {
        let shown = |bytes| block(Bytes(bytes));
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(64 << 10), "64 KiB");
        assert_eq!(shown(3 << 20), "3 MiB");
        assert_eq!(shown(158_400), "158 kB");
    }

    #[test]
    fn only_the_whole_is_100_per_cent() {
        assert_eq!(per_cent(691_200, 691_200), "100 %");
        assert_eq!(per_cent(691_199, 691_200), "99.999 %");
        assert_eq!(per_cent(u64::MAX - 1, u64::MAX), "99.999 %");
        assert_eq!(per_cent(1, 2), "50 %");
    }
}
