//! Site-by-site sweeps of a whole lattice, written apart from the block's update, for tests.

use millstream_application::mix;

use crate::lattice::Lattice;
use crate::random::{gaussian, unit_vector};

/// A lattice in the order of site numbers.
#[derive(Clone, Debug)]
pub struct Reference {
    lattice: Lattice,
    /// The spins.
    pub spins: Vec<[f32; 3]>,
    couplings: Vec<[f32; 3]>,
}

impl Reference {
    /// A lattice with its initial spins.
    #[must_use]
    pub fn new(lattice: Lattice) -> Reference {
        let sites = 0..lattice.sites();
        let spins = sites.clone().map(|i| unit_vector(lattice.seed, i).map(|c| c as f32)).collect();
        let couplings =
            sites.map(|i| [0, 1, 2].map(|axis| gaussian(lattice.seed, 3 * i + axis) as f32)).collect();
        Reference { lattice, spins, couplings }
    }

    fn at(&self, [x, y, z]: [usize; 3]) -> usize {
        let [a, b, c] = self.lattice.size;
        self.lattice.number([x % a, y % b, z % c]) as usize
    }

    /// Makes one sweep: all even sites, then all odd ones.
    pub fn sweep(&mut self) {
        let [a, b, c] = self.lattice.size;
        for parity in 0..2 {
            for z in 0..c {
                for y in 0..b {
                    for x in (0..a).filter(|x| (x + y + z) % 2 == parity) {
                        self.update([x, y, z]);
                    }
                }
            }
        }
    }

    fn update(&mut self, [x, y, z]: [usize; 3]) {
        let [a, b, c] = self.lattice.size;
        let here = self.at([x, y, z]);
        let plus = [self.at([x + 1, y, z]), self.at([x, y + 1, z]), self.at([x, y, z + 1])];
        let minus = [self.at([x + a - 1, y, z]), self.at([x, y + b - 1, z]), self.at([x, y, z + c - 1])];
        let mut field = [0.0_f32; 3];
        for (component, field) in field.iter_mut().enumerate() {
            let pair = |axis: usize| {
                self.couplings[minus[axis]][axis] * self.spins[minus[axis]][component]
                    + self.couplings[here][axis] * self.spins[plus[axis]][component]
            };
            *field = (pair(0) + pair(1)) + pair(2);
        }
        let dot = |a: [f32; 3], b: [f32; 3]| (a[0] * b[0] + a[1] * b[1]) + a[2] * b[2];
        let square = dot(field, field);
        if square != 0.0 {
            let spin = self.spins[here];
            let projection = dot(spin, field);
            let factor = (projection + projection) / square;
            self.spins[here] = std::array::from_fn(|i| factor * field[i] - spin[i]);
        }
    }

    /// Three components of the spin and three couplings of each site, little-endian, for other programs.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let sites = self.spins.iter().zip(&self.couplings);
        sites
            .flat_map(|(spin, couplings)| spin.iter().chain(couplings).flat_map(|value| value.to_le_bytes()))
            .collect()
    }

    /// The checksum of all spins, as of [`Block::checksum`](crate::Block::checksum).
    #[must_use]
    pub fn checksum(&self) -> u64 {
        let word = |(site, spin): (u64, &[f32; 3])| {
            spin.iter().fold(site, |word, value| mix(word ^ u64::from(value.to_bits())))
        };
        (0..).zip(&self.spins).map(word).fold(0, u64::wrapping_add)
    }
}
