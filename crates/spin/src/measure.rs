//! Energy, order and norms.
//!
//! Each row's terms are rounded to multiples of 2⁻⁴⁰ and added as integers. So the sum over all nodes does not depend on the
//! cut, where floating-point sums would need the same tree everywhere.

use crate::block::Block;
use crate::real::Real;
use crate::rows::COUPLINGS;

/// Units of the sums.
const UNIT: f64 = (1_u64 << 40) as f64;

/// Sums over sites. Add those of all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    energy: i128,
    magnetisation: [i128; 3],
    overlap: i128,
    /// Largest deviation of a spin's norm from 1.
    norm_deviation: f64,
    checksum: u64,
}

/// Bytes of sums.
pub const SUMS_BYTES: usize = 5 * 16 + 16;

/// What a lattice looks like after some sweeps.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Measurement {
    /// Sweeps so far.
    pub sweep: u64,
    /// Energy of a spin.
    pub energy: f64,
    /// Length of the mean spin.
    pub magnetisation: f64,
    /// Mean scalar product with the initial spins.
    pub overlap: f64,
    /// Largest deviation of a spin's norm from 1.
    pub norm_deviation: f64,
    /// Checksum over the bits of all spins.
    pub checksum: u64,
}

/// A sum in units. Terms of a row stay far below the range of 63 bits.
fn units(value: f64) -> i128 {
    (value * UNIT).round() as i64 as i128
}

impl Sums {
    /// Measures a block whose halos are valid.
    #[must_use]
    pub fn of<E: Real>(block: &Block<E>) -> Sums {
        let zs = block.inside()[2].clone();
        zs.fold(Sums::default(), |sums, z| sums.plus(&Sums::of_plane(block, z)))
    }

    /// Measures a plane of a block whose halos are valid.
    #[must_use]
    pub fn of_plane<E: Real>(block: &Block<E>, z: isize) -> Sums {
        let mut sums = Sums { checksum: block.plane_checksum(z), ..Sums::default() };
        let [xs, ys, _] = block.inside();
        for y in ys {
            for parity in 0..2 {
                sums.add_row(block, parity, y, z, &xs);
            }
        }
        sums
    }

    fn add_row<E: Real>(
        &mut self,
        block: &Block<E>,
        parity: usize,
        y: isize,
        z: isize,
        xs: &std::ops::Range<isize>,
    ) {
        let shift = block.shift(parity, y, z);
        let indices = Block::<E>::indices(xs, shift);
        let beside = indices.start + shift as isize..indices.end + shift as isize;
        let other = 1 - parity;
        let own = |c| block.values(parity, y, z, c, &indices);
        let spins: [&[E]; 3] = std::array::from_fn(own);
        let couplings: [&[E]; 3] = std::array::from_fn(|axis| own(COUPLINGS + axis));
        let neighbours: [[&[E]; 3]; 3] = [
            std::array::from_fn(|c| block.values(other, y, z, c, &beside)),
            std::array::from_fn(|c| block.values(other, y + 1, z, c, &indices)),
            std::array::from_fn(|c| block.values(other, y, z + 1, c, &indices)),
        ];
        let value = |values: [&[E]; 3], i: usize| values.map(|values| values[i].to_f64());
        let dot = |a: [f64; 3], b: [f64; 3]| (a[0] * b[0] + a[1] * b[1]) + a[2] * b[2];
        for (i, k) in indices.clone().enumerate() {
            let spin = value(spins, i);
            let [x, y_term, z_term] = std::array::from_fn(|axis| {
                couplings[axis][i].to_f64() * dot(spin, value(neighbours[axis], i))
            });
            self.energy -= units((x + y_term) + z_term);
            (0..3).for_each(|c| self.magnetisation[c] += units(spin[c]));
            let initial = block.lattice().initial_spin(*block.extent(), [2 * k + shift as isize, y, z]);
            self.overlap += units(dot(spin, initial));
            self.norm_deviation = self.norm_deviation.max((dot(spin, spin).sqrt() - 1.0).abs());
        }
    }

    /// Adds the sums of another block.
    #[must_use]
    pub fn plus(mut self, other: &Sums) -> Sums {
        self.energy += other.energy;
        (0..3).for_each(|c| self.magnetisation[c] += other.magnetisation[c]);
        self.overlap += other.overlap;
        self.norm_deviation = self.norm_deviation.max(other.norm_deviation);
        self.checksum = self.checksum.wrapping_add(other.checksum);
        self
    }

    /// The bytes for other nodes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; SUMS_BYTES] {
        let mut bytes = [0; SUMS_BYTES];
        let [mx, my, mz] = self.magnetisation;
        for (i, word) in [self.energy, mx, my, mz, self.overlap].into_iter().enumerate() {
            bytes[16 * i..16 * i + 16].copy_from_slice(&word.to_le_bytes());
        }
        bytes[80..88].copy_from_slice(&self.norm_deviation.to_bits().to_le_bytes());
        bytes[88..96].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// The sums of such bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; SUMS_BYTES]) -> Sums {
        let sum = |i: usize| {
            let mut word = [0; 16];
            word.copy_from_slice(&bytes[16 * i..16 * i + 16]);
            i128::from_le_bytes(word)
        };
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Sums {
            energy: sum(0),
            magnetisation: [sum(1), sum(2), sum(3)],
            overlap: sum(4),
            norm_deviation: f64::from_bits(word(80)),
            checksum: word(88),
        }
    }

    /// The means over all sites.
    #[must_use]
    pub fn means(&self, sweep: u64, sites: u64) -> Measurement {
        let mean = |sum: i128| sum as f64 / UNIT / sites as f64;
        let m = self.magnetisation.map(mean);
        Measurement {
            sweep,
            energy: mean(self.energy),
            magnetisation: m.iter().map(|c| c * c).sum::<f64>().sqrt(),
            overlap: mean(self.overlap),
            norm_deviation: self.norm_deviation,
            checksum: self.checksum,
        }
    }
}
