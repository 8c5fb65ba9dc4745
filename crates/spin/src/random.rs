//! Spins and couplings as functions of the seed and a global index, so that they do not depend on the cut.
//!
//! Only additions, multiplications, divisions and square roots are used. IEEE 754 fixes their results, so all hosts
//! generate the same bits.

use std::f64::consts::LN_2;

use millstream_application::counter_hash;

/// What a number is for. Streams with different purposes are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// The spin of a site.
    Spin = 1,
    /// The coupling of a bond.
    Coupling = 2,
}

/// A point of the unit disc without its centre, and its squared distance from there.
fn disc(seed: u64, stream: Stream, index: u64) -> (f64, f64, f64) {
    let mut attempt = 0;
    loop {
        let word = counter_hash(seed, stream as u64, index, attempt);
        // 32 bits each, at the middle of their cells, from -1 to 1.
        let coordinate = |bits: u32| (f64::from(bits) + 0.5) / f64::from(1_u32 << 31) - 1.0;
        let (u, v) = (coordinate(word as u32), coordinate((word >> 32) as u32));
        let s = u * u + v * v;
        if s < 1.0 {
            return (u, v, s);
        }
        attempt += 1;
    }
}

/// A unit vector, uniform on the sphere (Marsaglia 1972).
pub(crate) fn unit_vector(seed: u64, index: u64) -> [f64; 3] {
    let (u, v, s) = disc(seed, Stream::Spin, index);
    let root = (1.0 - s).sqrt();
    [2.0 * u * root, 2.0 * v * root, 1.0 - 2.0 * s]
}

/// A Gaussian number of mean 0 and variance 1 (polar method).
pub(crate) fn gaussian(seed: u64, index: u64) -> f64 {
    let (u, _, s) = disc(seed, Stream::Coupling, index);
    u * (-2.0 * natural_logarithm(s) / s).sqrt()
}

/// The natural logarithm of a positive normal number, within 1e-15 of its size.
fn natural_logarithm(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 1023 << 52);
    let (mantissa, exponent) = if mantissa > std::f64::consts::SQRT_2 {
        (mantissa / 2.0, exponent + 1)
    } else {
        (mantissa, exponent)
    };
    // ln m = 2 artanh r, |r| < 0.172: the twelfth term of the series is below 1e-18.
    let r = (mantissa - 1.0) / (mantissa + 1.0);
    let square = r * r;
    let mut sum = 0.0;
    for n in (0..12).rev() {
        sum = sum * square + 1.0 / f64::from(2 * n + 1);
    }
    2.0 * r * sum + f64::from(exponent) * LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_agrees_with_the_library() {
        for k in 1..2000 {
            for x in [f64::from(k) / 2000.0, f64::from(k) * 1e-9, f64::from(k)] {
                let expected = x.ln();
                let error = (natural_logarithm(x) - expected).abs();
                assert!(error <= 4e-16 * expected.abs().max(1.0), "{x}: {error}");
            }
        }
    }

    #[test]
    fn numbers_have_their_distributions() {
        let count = 200_000_u64;
        let mut moments = [0.0; 4];
        let mut mean = [0.0; 3];
        for index in 0..count {
            let g = gaussian(5, index);
            (0..4).for_each(|n| moments[n] += g.powi(n as i32 + 1) / count as f64);
            let spin = unit_vector(5, index);
            let norm = spin.iter().map(|c| c * c).sum::<f64>();
            assert!((norm - 1.0).abs() < 1e-12);
            (0..3).for_each(|c| mean[c] += spin[c] / count as f64);
        }
        // Five standard deviations of each mean.
        let tolerance = 5.0 / (count as f64).sqrt();
        assert!(moments[0].abs() < tolerance && (moments[1] - 1.0).abs() < 2.0 * tolerance, "{moments:?}");
        assert!(
            moments[2].abs() < 4.0 * tolerance && (moments[3] - 3.0).abs() < 10.0 * tolerance,
            "{moments:?}"
        );
        assert!(mean.iter().all(|m| m.abs() < tolerance), "{mean:?}");
    }
}
