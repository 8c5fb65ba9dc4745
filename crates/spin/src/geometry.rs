//! Where the sites of a block lie: extents, halos, rows.

use std::ops::Range;

use crate::lattice::Lattice;
use crate::rows::COMPONENTS;

/// Values that a row begins with, so that index 0 is aligned to a cache line.
pub(crate) const LINE_VALUES: usize = 16;

/// Ranges of local coordinates: x, y, z. Local coordinates count from the block's first site; halos are outside.
pub type Box3 = [Range<isize>; 3];

/// The part of the lattice that a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Global coordinates of the first site; even in x.
    pub origin: [usize; 3],
    /// Sites on each axis; even in x.
    pub size: [usize; 3],
}

impl Extent {
    /// Number of sites.
    #[must_use]
    pub fn sites(&self) -> usize {
        self.size.iter().product()
    }
}

/// The layout of a block with its halos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    lattice: Lattice,
    extent: Extent,
    /// Sites beyond each face.
    halo: [usize; 3],
    /// Whether the block has all of an axis. Its x halo is then one site on each side, a copy of the other end; rows and
    /// planes beyond the ends of y and z are those of the other end.
    whole: [bool; 3],
    /// Values of a row before site 0.
    pub(crate) left: usize,
    /// Values from one component of a row to the next.
    pub(crate) pitch: usize,
}

impl Geometry {
    /// The layout for `depth` sweeps between exchanges of halos.
    #[must_use]
    pub fn new(lattice: Lattice, extent: Extent, depth: usize) -> Geometry {
        let whole: [bool; 3] = std::array::from_fn(|a| extent.size[a] == lattice.size[a]);
        let of_whole = [2, 0, 0];
        let halo: [usize; 3] = std::array::from_fn(|a| if whole[a] { of_whole[a] } else { 2 * depth });
        // The halo behind a component and the one before the next share cache lines.
        let left = halo[0].next_multiple_of(LINE_VALUES);
        let pitch = left + (extent.size[0] / 2).next_multiple_of(LINE_VALUES);
        Geometry { lattice, extent, halo, whole, left, pitch }
    }

    /// The lattice.
    #[must_use]
    pub fn lattice(&self) -> &Lattice {
        &self.lattice
    }

    /// The part of the lattice.
    #[must_use]
    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Whether the block has all of an axis, so that its ends are neighbours and need no exchange.
    #[must_use]
    pub fn has_whole(&self, axis: usize) -> bool {
        self.whole[axis]
    }

    /// Sites beyond each face.
    #[must_use]
    pub fn halo(&self) -> [usize; 3] {
        self.halo
    }

    /// The block's sites without halos.
    #[must_use]
    pub fn inside(&self) -> Box3 {
        self.extent.size.map(|size| 0..size as isize)
    }

    /// The block's sites with halos.
    #[must_use]
    pub fn with_halos(&self) -> Box3 {
        let (inside, halo) = (self.inside(), self.halo.map(|halo| halo as isize));
        std::array::from_fn(|a| inside[a].start - halo[a]..inside[a].end + halo[a])
    }

    /// Whether a box is a part of the block with its halos.
    #[must_use]
    pub fn has(&self, part: &Box3) -> bool {
        let whole = self.with_halos();
        (0..3).all(|a| {
            whole[a].start <= part[a].start && part[a].start <= part[a].end && part[a].end <= whole[a].end
        })
    }

    /// Bytes of the spins in a box, for values of `element` bytes.
    #[must_use]
    pub fn box_bytes(part: &Box3, element: usize) -> usize {
        part.iter().map(Range::len).product::<usize>() * 3 * element
    }

    /// Values that a block takes in memory. `None` if that exceeds all memory.
    #[must_use]
    pub fn values(&self) -> Option<usize> {
        let across = |a: usize| self.extent.size[a].checked_add(2 * self.halo[a]);
        let rows = across(1)?.checked_mul(across(2)?)?.checked_mul(2)?;
        rows.checked_mul(COMPONENTS)?.checked_mul(self.pitch)?.checked_add(self.left + 2 * LINE_VALUES)
    }

    /// Global number of the site at local coordinates: x + X·(y + Y·z).
    #[must_use]
    pub fn global(&self, at: [isize; 3]) -> u64 {
        let g: [usize; 3] = std::array::from_fn(|a| {
            let size = self.lattice.size[a] as isize;
            (self.extent.origin[a] as isize + at[a]).rem_euclid(size) as usize
        });
        self.lattice.number(g)
    }

    /// `s` of the row of a parity: its sites are x = 2k + s.
    pub(crate) fn shift(&self, parity: usize, y: isize, z: isize) -> usize {
        let origin = (self.extent.origin[1] + self.extent.origin[2]) as isize;
        (parity as isize + y + z + origin).rem_euclid(2) as usize
    }

    /// Indices in a row of the sites whose x are in a range.
    pub(crate) fn indices(x: &Range<isize>, shift: usize) -> Range<isize> {
        let first = |x: isize| (x - shift as isize + 1).div_euclid(2);
        first(x.start)..first(x.end)
    }

    /// Where site 0 of a row has its first component, among the values of a block.
    pub(crate) fn row_at(&self, parity: usize, y: isize, z: isize) -> usize {
        let across = self.extent.size[1] + 2 * self.halo[1];
        ((self.place(2, z) * across + self.place(1, y)) * 2 + parity) * COMPONENTS * self.pitch + self.left
    }

    /// Where a row or plane is. On an axis of which the block has all, it is at most one time around beyond either end.
    fn place(&self, axis: usize, at: isize) -> usize {
        let size = self.extent.size[axis] as isize;
        let at = match at {
            _ if !self.whole[axis] => at,
            ..0 => at + size,
            _ if at >= size => at - size,
            _ => at,
        };
        (at + self.halo[axis] as isize) as usize
    }
}
