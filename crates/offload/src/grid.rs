//! A grid in this process's memory.

use std::ops::Range;
use std::ptr::NonNull;

use millstream_rdma::{Access, Device, Region};
use millstream_shm::{Mapping, Memfd};

use crate::OffloadError;

/// Size and element type of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of rows.
    pub rows: u64,
    /// Number of columns.
    pub columns: u64,
    /// Whether the elements are float64; float32 otherwise.
    pub double: bool,
}

impl Shape {
    /// Size of an element (bytes).
    #[must_use]
    pub fn element_bytes(&self) -> u64 {
        if self.double { 8 } else { 4 }
    }

    /// Size of a row (bytes).
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.columns * self.element_bytes()
    }

    /// Size of the grid (bytes).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows * self.row_bytes()
    }

    /// Number of points.
    #[must_use]
    pub fn points(&self) -> u64 {
        self.rows * self.columns
    }
}

/// The memory of a grid.
enum GridMemory {
    /// Registered with an RDMA device.
    Registered(Region),
    /// Not registered.
    Unregistered(Mapping),
}

/// A grid, row by row without gaps, little-endian.
pub struct Grid {
    shape: Shape,
    memory: GridMemory,
    base: NonNull<u8>,
}

// SAFETY: the grid owns its memory. Functions that access it through a shared reference are unsafe, or read only.
unsafe impl Send for Grid {}
// SAFETY: as above.
unsafe impl Sync for Grid {}

impl std::fmt::Debug for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grid").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Grid {
    /// A grid of zeros, in memory registered with `device` if one is given.
    ///
    /// # Errors
    /// [`OffloadError::Memory`].
    pub fn zeros(shape: Shape, device: Option<&Device>) -> Result<Grid, OffloadError> {
        let fail = |cause: String| OffloadError::Memory { bytes: shape.bytes(), cause };
        let bytes =
            shape.rows.checked_mul(shape.columns).and_then(|cells| cells.checked_mul(shape.element_bytes()));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok()).filter(|&bytes| bytes > 0);
        let len = bytes.ok_or_else(|| fail("invalid size".to_owned()))?;
        let (memory, base) = match device {
            Some(device) => {
                let region = Region::landing(device, c"millstream-grid", len, Access::LOCAL_WRITE);
                let region = region.map_err(|error| fail(error.to_string()))?;
                region.populate().map_err(|error| fail(error.to_string()))?;
                let base = region.as_ptr().expect("landing memory is mapped here");
                (GridMemory::Registered(region), base)
            }
            None => {
                let mapping = Memfd::new("millstream-grid", len).and_then(|memfd| memfd.map());
                let mapping = mapping.map_err(|error| fail(error.to_string()))?;
                mapping.prefault(0, len).map_err(|error| fail(error.to_string()))?;
                let base = NonNull::new(mapping.base()).expect("a mapping is not at zero");
                (GridMemory::Unregistered(mapping), base)
            }
        };
        Ok(Grid { shape, memory, base })
    }

    /// Size and element type.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The registered memory; `None` if the grid is not registered.
    #[must_use]
    pub fn region(&self) -> Option<&Region> {
        match &self.memory {
            GridMemory::Registered(region) => Some(region),
            GridMemory::Unregistered(mapping) => {
                debug_assert!(mapping.len() as u64 >= self.shape.bytes());
                None
            }
        }
    }

    /// All bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the grid owns the memory, and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.shape.bytes() as usize) }
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as above. Writers through a shared grid promise that no thread reads the bytes that they
        // write.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.shape.bytes() as usize) }
    }

    /// The byte range of some rows.
    #[must_use]
    pub fn span(&self, rows: &Range<u64>) -> Range<u64> {
        rows.start * self.shape.row_bytes()..rows.end * self.shape.row_bytes()
    }

    /// Address of the byte at `offset`, for cards.
    #[must_use]
    pub fn pointer(&self, offset: u64) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    /// Fills the grid with numbers from 0 to 1 that depend on the position and the seed only.
    pub fn generate(&mut self, seed: u64) {
        let double = self.shape.double;
        let bytes = self.bytes_mut();
        let value = |at: u64| (mix(at ^ seed.rotate_left(32)) >> 40) as f32 / (1u64 << 24) as f32;
        if double {
            for (at, cell) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
                *cell = f64::from(value(at)).to_le_bytes();
            }
        } else {
            for (at, cell) in (0..).zip(bytes.as_chunks_mut::<4>().0) {
                *cell = value(at).to_le_bytes();
            }
        }
    }

    /// The cells after `iterations` sweeps, computed on this host point by point.
    #[must_use]
    pub fn reference(&self, iterations: u64) -> Vec<u8> {
        let (rows, columns) = (self.shape.rows as usize, self.shape.columns as usize);
        let sweeps = iterations as usize;
        if self.shape.double {
            let cells: Vec<f64> =
                self.bytes().as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell)).collect();
            let after = millstream_stencil::reference(&cells, rows, columns, sweeps);
            after.iter().flat_map(|cell| cell.to_le_bytes()).collect()
        } else {
            let cells: Vec<f32> =
                self.bytes().as_chunks().0.iter().map(|cell| f32::from_le_bytes(*cell)).collect();
            let after = millstream_stencil::reference(&cells, rows, columns, sweeps);
            after.iter().flat_map(|cell| cell.to_le_bytes()).collect()
        }
    }

    /// Compares all points with a reference, bit for bit.
    ///
    /// # Errors
    /// [`OffloadError::Different`].
    pub fn compare(&self, reference: &[u8]) -> Result<(), OffloadError> {
        let size = self.shape.element_bytes() as usize;
        let pairs = self.bytes().chunks(size).zip(reference.chunks(size));
        let different: Vec<u64> = (0..).zip(pairs).filter(|(_, (a, b))| a != b).map(|(at, _)| at).collect();
        match different.first() {
            None => Ok(()),
            Some(&first) => Err(OffloadError::Different {
                count: different.len() as u64,
                row: first / self.shape.columns,
                column: first % self.shape.columns,
            }),
        }
    }
}

/// Mixes the bits of a number (the finaliser of splitmix64).
fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}
