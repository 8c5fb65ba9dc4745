//! The sites of one node, with halos.
//!
//! ```text
//!   row of a parity p at (y, z):  x⁰ x¹ …  │ component σx │ σy │ σz │ Jx │ Jy │ Jz │      site k is x = 2k + s,
//!                                                                                        s = (p + y + z) mod 2
//!   row (y, z, even) │ row (y, z, odd) │ row (y + 1, z, even) │ …
//! ```
//! Sites change in place. Neighbours in y and z of site k have the index k, those in x have k − 1 + s and k + s. The origin
//! in x is even, so s depends on global coordinates only.

use std::ops::Range;

use millstream_application::mix;

use millstream_application::Array;

use crate::geometry::{Box3, Extent, Geometry, LINE_VALUES};
use crate::lattice::Lattice;
use crate::random::gaussian;
use crate::real::Real;
use crate::rows::{COMPONENTS, COUPLINGS, Rows};

/// The spins and couplings of one node.
#[derive(Debug)]
pub struct Block<E> {
    geometry: Geometry,
    values: Array<E>,
    /// Index of the first aligned value.
    start: usize,
}

impl<E: Real> Clone for Block<E> {
    /// A copy in memory of its own.
    fn clone(&self) -> Block<E> {
        let mut block = Block::zeros(self.geometry);
        let used = self.values.len() - 2 * LINE_VALUES;
        let from = &self.values[self.start..self.start + used];
        let to = block.start;
        block.values[to..to + used].copy_from_slice(from);
        block
    }
}

impl<E: Real> Block<E> {
    /// The block of an extent with halos for `depth` sweeps between exchanges. Its sites have their initial spins; those of
    /// the halos are zero. Couplings are complete.
    #[must_use]
    pub fn new(lattice: Lattice, extent: Extent, depth: usize) -> Block<E> {
        let mut block = Block::zeros(Geometry::new(lattice, extent, depth));
        for z in block.geometry.with_halos()[2].clone() {
            block.fill_plane(z);
        }
        block
    }

    /// A block whose spins and couplings are zero.
    #[must_use]
    pub fn zeros(geometry: Geometry) -> Block<E> {
        // More than all memory is more than any allocation.
        let values = vec![E::default(); geometry.values().unwrap_or(usize::MAX)];
        let offset = values.as_ptr().align_offset(64);
        let start = if offset < LINE_VALUES { offset } else { 0 };
        Block { geometry, values: values.into(), start }
    }

    /// The block whose values are at `first`, as many as [`Geometry::values`] says.
    ///
    /// # Safety
    /// The values are aligned to 64 bytes, initialised, and exclusively this block's as long as it lives.
    #[must_use]
    pub unsafe fn over(geometry: Geometry, first: *mut E) -> Block<E> {
        let count = geometry.values().unwrap_or(0);
        // SAFETY: the caller's promise.
        let values = unsafe { Array::over(first, count) };
        Block { geometry, values, start: 0 }
    }

    /// The layout.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The lattice.
    #[must_use]
    pub fn lattice(&self) -> &Lattice {
        self.geometry.lattice()
    }

    /// The part of the lattice.
    #[must_use]
    pub fn extent(&self) -> &Extent {
        self.geometry.extent()
    }

    /// Whether the block has all of an axis, so that its ends are neighbours and need no exchange.
    #[must_use]
    pub fn has_whole(&self, axis: usize) -> bool {
        self.geometry.has_whole(axis)
    }

    /// Sites beyond each face.
    #[must_use]
    pub fn halo(&self) -> [usize; 3] {
        self.geometry.halo()
    }

    /// The block's sites without halos.
    #[must_use]
    pub fn inside(&self) -> Box3 {
        self.geometry.inside()
    }

    /// Global number of the site at local coordinates: x + X·(y + Y·z).
    #[must_use]
    pub fn global(&self, at: [isize; 3]) -> u64 {
        self.geometry.global(at)
    }

    /// `s` of the row of a parity: its sites are x = 2k + s.
    pub(crate) fn shift(&self, parity: usize, y: isize, z: isize) -> usize {
        self.geometry.shift(parity, y, z)
    }

    /// Indices in a row of the sites whose x are in a range.
    pub(crate) fn indices(x: &Range<isize>, shift: usize) -> Range<isize> {
        Geometry::indices(x, shift)
    }

    /// Where a component of the sites of an index range is among the values.
    fn place(
        &self,
        parity: usize,
        y: isize,
        z: isize,
        component: usize,
        indices: &Range<isize>,
    ) -> Range<usize> {
        let at = self.start + self.geometry.row_at(parity, y, z) + component * self.geometry.pitch;
        at.wrapping_add_signed(indices.start)..at.wrapping_add_signed(indices.end)
    }

    /// A component of the sites of an index range in a row.
    pub(crate) fn values(
        &self,
        parity: usize,
        y: isize,
        z: isize,
        component: usize,
        indices: &Range<isize>,
    ) -> &[E] {
        &self.values[self.place(parity, y, z, component, indices)]
    }

    fn values_mut(
        &mut self,
        parity: usize,
        y: isize,
        z: isize,
        component: usize,
        indices: &Range<isize>,
    ) -> &mut [E] {
        let place = self.place(parity, y, z, component, indices);
        &mut self.values[place]
    }

    /// Sets a component of the sites of an index range in a row from bytes.
    pub(crate) fn set_values(
        &mut self,
        parity: usize,
        y: isize,
        z: isize,
        component: usize,
        indices: &Range<isize>,
        bytes: &[u8],
    ) {
        E::read(bytes, self.values_mut(parity, y, z, component, indices));
    }

    /// Sets the couplings of a plane, and its initial spins; those of halos are zero. A block that was not made by
    /// [`Block::new`] is complete after all planes of [`Geometry::with_halos`].
    pub fn fill_plane(&mut self, z: isize) {
        let [xs, ys, _] = self.geometry.with_halos();
        let seed = self.lattice().seed;
        for y in ys {
            for parity in 0..2 {
                let shift = self.shift(parity, y, z);
                for k in Self::indices(&xs, shift) {
                    let x = 2 * k + shift as isize;
                    let site = self.global([x, y, z]);
                    for axis in 0..3 {
                        let coupling = E::from_f64(gaussian(seed, 3 * site + axis as u64));
                        self.values_mut(parity, y, z, COUPLINGS + axis, &(k..k + 1))[0] = coupling;
                        self.values_mut(parity, y, z, axis, &(k..k + 1))[0] = E::default();
                    }
                }
            }
        }
        let (lattice, extent) = (*self.lattice(), *self.extent());
        if self.inside()[2].contains(&z) {
            self.set_plane(z, |at| lattice.initial_spin(extent, at).map(E::from_f64));
        }
    }

    /// Sets the spins inside to those of the seed.
    pub fn set_initial_spins(&mut self) {
        let (lattice, extent) = (*self.lattice(), *self.extent());
        self.set_spins(|at| lattice.initial_spin(extent, at).map(E::from_f64));
    }

    /// Sets the spins inside as a function of local coordinates.
    pub fn set_spins(&mut self, spin: impl Fn([isize; 3]) -> [E; 3]) {
        for z in self.inside()[2].clone() {
            self.set_plane(z, &spin);
        }
    }

    fn set_plane(&mut self, z: isize, spin: impl Fn([isize; 3]) -> [E; 3]) {
        let [xs, ys, _] = self.inside();
        for y in ys {
            for x in xs.clone() {
                self.set_spin([x, y, z], spin([x, y, z]));
            }
            self.copy_x_ends(y, z);
        }
    }

    fn set_spin(&mut self, [x, y, z]: [isize; 3], spin: [E; 3]) {
        let parity = self.shift(0, y, z) ^ (x & 1) as usize;
        for (c, value) in spin.into_iter().enumerate() {
            self.values_mut(parity, y, z, c, &(x.div_euclid(2)..x.div_euclid(2) + 1))[0] = value;
        }
    }

    /// The spin at local coordinates, halos included.
    #[must_use]
    pub fn spin(&self, [x, y, z]: [isize; 3]) -> [E; 3] {
        let parity = self.shift(0, y, z) ^ (x & 1) as usize;
        let k = x.div_euclid(2);
        std::array::from_fn(|c| self.values(parity, y, z, c, &(k..k + 1))[0])
    }

    /// Copies the ends of both rows at (y, z) into the x halos, if the block has all of x.
    pub(crate) fn copy_x_ends(&mut self, y: isize, z: isize) {
        if self.has_whole(0) {
            let last = (self.extent().size[0] / 2) as isize;
            for parity in 0..2 {
                for c in 0..COUPLINGS {
                    let ends = [last - 1, 0].map(|k| self.values(parity, y, z, c, &(k..k + 1))[0]);
                    self.values_mut(parity, y, z, c, &(-1..0))[0] = ends[0];
                    self.values_mut(parity, y, z, c, &(last..last + 1))[0] = ends[1];
                }
            }
        }
    }

    /// Appends the spins in a box as bytes: row by row, even sites before odd ones.
    pub fn pack(&self, part: &Box3, to: &mut Vec<u8>) {
        for z in part[2].clone() {
            for y in part[1].clone() {
                for parity in 0..2 {
                    let indices = Self::indices(&part[0], self.shift(parity, y, z));
                    for c in 0..COUPLINGS {
                        E::append(self.values(parity, y, z, c, &indices), to);
                    }
                }
            }
        }
    }

    /// Sets the spins in a box from the bytes of [`pack`](Self::pack) and returns the bytes after them. `None` if there are
    /// too few.
    pub fn unpack<'b>(&mut self, part: &Box3, mut bytes: &'b [u8]) -> Option<&'b [u8]> {
        for z in part[2].clone() {
            for y in part[1].clone() {
                for parity in 0..2 {
                    let indices = Self::indices(&part[0], self.shift(parity, y, z));
                    let length = indices.len() * E::BYTES;
                    for c in 0..COUPLINGS {
                        let (row, rest) = bytes.split_at_checked(length)?;
                        E::read(row, self.values_mut(parity, y, z, c, &indices));
                        bytes = rest;
                    }
                }
                self.copy_x_ends(y, z);
            }
        }
        Some(bytes)
    }

    /// A checksum over the bits of all spins, the sum over blocks being independent of the cut.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        let zs = self.inside()[2].clone();
        zs.fold(0, |sum, z| sum.wrapping_add(self.plane_checksum(z)))
    }

    /// The part of a plane of [`Block::checksum`].
    pub(crate) fn plane_checksum(&self, z: isize) -> u64 {
        let [xs, ys, _] = self.inside();
        let mut sum = 0_u64;
        for y in ys {
            for x in xs.clone() {
                let word = self
                    .spin([x, y, z])
                    .into_iter()
                    .fold(self.global([x, y, z]), |word, value| mix(word ^ value.bits()));
                sum = sum.wrapping_add(word);
            }
        }
        sum
    }

    /// The block's memory for the update of rows.
    pub(crate) fn shared(&mut self) -> SharedBlock<E> {
        SharedBlock { first: self.values.as_mut_ptr().wrapping_add(self.start), geometry: self.geometry }
    }
}

/// The memory of a block while threads update it.
pub(crate) struct SharedBlock<E> {
    first: *mut E,
    geometry: Geometry,
}

// SAFETY: threads update disjoint rows, and read rows that no other thread writes meanwhile (module `sweeps`).
unsafe impl<E: Send + Sync> Sync for SharedBlock<E> {}

impl<E: Real> SharedBlock<E> {
    fn row(&self, parity: usize, y: isize, z: isize) -> *mut E {
        self.first.wrapping_add(self.geometry.row_at(parity, y, z))
    }

    /// The rows that the update of a row needs.
    pub(crate) fn rows(&self, parity: usize, y: isize, z: isize) -> Rows<E> {
        let other = 1 - parity;
        let near = |y, z| self.row(other, y, z).cast_const();
        Rows {
            own: self.row(parity, y, z),
            same: near(y, z),
            around: [near(y - 1, z), near(y + 1, z), near(y, z - 1), near(y, z + 1)],
            pitch: self.geometry.pitch,
            shift: self.geometry.shift(parity, y, z),
        }
    }

    /// Fetches both rows at (y, z) into the cache.
    pub(crate) fn prefetch(&self, y: isize, z: isize) {
        let (first, values) = (self.row(0, y, z), 2 * COMPONENTS * self.geometry.pitch);
        for at in (0..values).step_by(LINE_VALUES) {
            prefetch(first.wrapping_add(at));
        }
    }

    /// Copies the ends of an updated row into its x halos, if the block has all of x.
    ///
    /// # Safety
    /// No other thread accesses the row.
    pub(crate) unsafe fn copy_x_ends(&self, own: *mut E) {
        if !self.geometry.has_whole(0) {
            return;
        }
        let end = (self.geometry.extent().size[0] / 2) as isize;
        for c in 0..COUPLINGS {
            let row = own.wrapping_add(c * self.geometry.pitch);
            // SAFETY: the row has one site more on each side.
            unsafe {
                *row.offset(-1) = *row.offset(end - 1);
                *row.offset(end) = *row;
            }
        }
    }
}

/// Fetches a line into the second cache. Any address is valid.
fn prefetch<E>(at: *const E) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
