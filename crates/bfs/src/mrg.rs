//! The random numbers of Graph500: a multiple recursive generator of order 5 modulo 2³¹ − 1, with jumps.
//!
//! L'Ecuyer, Blouin and Couture, "A search for good multiple recursive random number generators", ACM TOMACS 3 (1993), table 3:
//! xₙ = 107374182·xₙ₋₁ + 104480·xₙ₋₅. A jump by n steps is the polynomial zⁿ modulo z⁵ − 107374182·z⁴ − 104480: its
//! coefficients weight the next numbers.

const MODULUS: u64 = 0x7FFF_FFFF;
const FIRST: u64 = 107_374_182;
const FIFTH: u64 = 104_480;

/// A generator: the last five numbers, the oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mrg([u64; 5]);

/// A number of steps at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jump([u64; 5]);

fn recur(newest: u64, oldest: u64) -> u64 {
    (FIRST * newest + FIFTH * oldest) % MODULUS
}

impl Mrg {
    /// The generator of two user seeds, as Graph500 spreads them.
    #[must_use]
    pub fn from_seeds(first: u64, second: u64) -> Mrg {
        const BITS: u64 = 0x3FFF_FFFF;
        let mixed = ((second >> 60) << 4) + (first >> 60) + 1;
        let (a, b) = ((first & BITS) + 1, (first >> 30 & BITS) + 1);
        let (c, d) = ((second & BITS) + 1, (second >> 30 & BITS) + 1);
        Mrg([mixed, d, c, b, a])
    }

    /// The next number, below 2³¹ − 1.
    pub fn draw(&mut self) -> u32 {
        let next = recur(self.0[4], self.0[0]);
        self.0.rotate_left(1);
        self.0[4] = next;
        next as u32
    }

    /// A number of [0, 1) from two draws.
    pub fn draw_unit(&mut self) -> f64 {
        // 1 / (2³¹ − 1) and 1 / (2³¹ − 1)².
        let (high, low) = (f64::from(self.draw()), f64::from(self.draw()));
        high * 4.656_612_875_245_797e-10 + low * 2.168_404_346_990_493e-19
    }

    /// The generator some steps later.
    #[must_use]
    pub fn after(&self, jump: &Jump) -> Mrg {
        let mut numbers = [0; 9];
        numbers[..5].copy_from_slice(&self.0);
        for i in 5..9 {
            numbers[i] = recur(numbers[i - 1], numbers[i - 5]);
        }
        Mrg(std::array::from_fn(|place| {
            // Each product is below 2⁶²; four of them fit into 64 bits.
            let terms = || jump.0.iter().zip(&numbers[place..]).map(|(c, number)| c * number);
            (terms().take(3).sum::<u64>() % MODULUS + terms().skip(3).sum::<u64>()) % MODULUS
        }))
    }
}

impl Jump {
    const ONE: Jump = Jump([0, 1, 0, 0, 0]);
    const NONE: Jump = Jump([1, 0, 0, 0, 0]);

    /// A jump by `words[0]` + 2⁶⁴·`words[1]` + 2¹²⁸·`words[2]` steps.
    #[must_use]
    pub fn steps(words: [u64; 3]) -> Jump {
        let mut result = Jump::NONE;
        for word in words.into_iter().rev() {
            for bit in (0..64).rev() {
                result = result.then(&result);
                if word >> bit & 1 == 1 {
                    result = result.then(&Jump::ONE);
                }
            }
        }
        result
    }

    /// This jump and another one.
    #[must_use]
    pub fn then(&self, other: &Jump) -> Jump {
        let mut product = [0; 9];
        for (i, a) in self.0.iter().enumerate() {
            for (j, b) in other.0.iter().enumerate() {
                product[i + j] = (product[i + j] + a * b) % MODULUS;
            }
        }
        for degree in (5..9).rev() {
            product[degree - 1] = (product[degree - 1] + FIRST * product[degree]) % MODULUS;
            product[degree - 5] = (product[degree - 5] + FIFTH * product[degree]) % MODULUS;
        }
        Jump(std::array::from_fn(|degree| product[degree]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_jump_equals_its_steps(seeds: (u64, u64), steps in 0_u64..2000) {
            let mut stepped = Mrg::from_seeds(seeds.0, seeds.1);
            let jumped = stepped.after(&Jump::steps([steps, 0, 0]));
            for _ in 0..steps {
                stepped.draw();
            }
            prop_assert_eq!(stepped, jumped);
        }

        #[test]
        fn jumps_add_up(a: u64, b: u64, seed: u64) {
            let (low, carry) = a.overflowing_add(b);
            let sum = Jump::steps([low, u64::from(carry), 0]);
            prop_assert_eq!(Jump::steps([a, 0, 0]).then(&Jump::steps([b, 0, 0])), sum);
            let start = Mrg::from_seeds(seed, 3);
            prop_assert_eq!(start.after(&Jump::steps([a, 0, 0])).after(&Jump::steps([b, 0, 0])), start.after(&sum));
        }
    }
}
