//! Memory of the application: buffers of operations, and regions that others may access.

use std::collections::HashMap;
use std::marker::PhantomData;

use crate::matching::ReceiveBuffer;

/// Buffers of one operation, in order. The application keeps them until the operation completes.
#[derive(Debug, Default)]
pub struct UserBuffer {
    parts: Vec<(*mut u8, usize)>,
}

// SAFETY: the application gives the memory to the operation until it completes, whichever thread carries it out.
unsafe impl Send for UserBuffer {}

impl UserBuffer {
    /// Takes buffers.
    ///
    /// # Safety
    /// Each part is memory of that size, and stays so until the operation is complete.
    pub unsafe fn new(parts: impl IntoIterator<Item = (*mut u8, usize)>) -> UserBuffer {
        UserBuffer {
            parts: parts.into_iter().filter(|&(start, size)| !start.is_null() && size > 0).collect(),
        }
    }

    /// Calls `each` for the parts of a range, as far as it is inside.
    fn for_range(&self, offset: u64, length: usize, mut each: impl FnMut(*mut u8, usize, usize)) {
        let (mut skip, mut done) = (offset, 0);
        for &(start, size) in &self.parts {
            if skip >= size as u64 {
                skip -= size as u64;
                continue;
            }
            let take = (size - skip as usize).min(length - done);
            each(start.wrapping_add(skip as usize), done, take);
            done += take;
            skip = 0;
            if done == length {
                return;
            }
        }
    }

    /// Appends a range of the bytes.
    pub fn read(&self, offset: u64, length: usize, into: &mut Vec<u8>) {
        self.for_range(offset, length, |start, _, size| {
            // SAFETY: a part of one of the buffers.
            into.extend_from_slice(unsafe { std::slice::from_raw_parts(start, size) });
        });
    }
}

impl ReceiveBuffer for UserBuffer {
    fn size(&self) -> u64 {
        self.parts.iter().map(|&(_, size)| size as u64).sum()
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.for_range(offset, bytes.len(), |start, done, size| {
            // SAFETY: a part of one of the buffers, which nothing else uses during the operation. The source is memory of
            // this library.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), start, size) }
        });
    }
}

/// Memory that other nodes may access by a key.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: *mut u8,
    length: u64,
    readable: bool,
    writable: bool,
    registration: u64,
}

/// A range of a region. It borrows the table, so its memory exists: whoever ends the region waits until the table is free.
#[derive(Debug)]
pub struct RegionRange<'r> {
    memory: UserBuffer,
    registration: u64,
    table: PhantomData<&'r Regions>,
}

impl RegionRange<'_> {
    /// A number that no other region has that had the key before or has it later.
    #[must_use]
    pub fn registration(&self) -> u64 {
        self.registration
    }

    /// Appends a part of the bytes.
    pub fn read(&self, offset: u64, length: usize, into: &mut Vec<u8>) {
        self.memory.read(offset, length, into);
    }

    /// Writes bytes. Those beyond the range are dropped.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.memory.write(offset, bytes);
    }
}

/// The regions of a domain.
#[derive(Debug, Default)]
pub struct Regions {
    by_key: HashMap<u64, Region>,
    /// Regions added so far.
    registrations: u64,
}

// SAFETY: the application gives the memory of a region to the domain until it closes the region.
unsafe impl Send for Regions {}

/// Why an access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No region has the key.
    Key,
    /// The region does not allow the access.
    Access,
    /// The range exceeds the region.
    Bounds,
}

impl Regions {
    /// Adds a region. Returns whether the key was free.
    ///
    /// # Safety
    /// The memory exists until [`Regions::remove`].
    pub unsafe fn add(
        &mut self,
        key: u64,
        start: *mut u8,
        length: u64,
        readable: bool,
        writable: bool,
    ) -> bool {
        if self.by_key.contains_key(&key) {
            return false;
        }
        self.registrations += 1;
        let registration = self.registrations;
        self.by_key.insert(key, Region { start, length, readable, writable, registration });
        true
    }

    /// A key that no region has, far from those that applications choose.
    #[must_use]
    pub fn free_key(&self) -> u64 {
        (0..u64::MAX).rev().find(|key| !self.by_key.contains_key(key)).unwrap_or_default()
    }

    /// Ends a region.
    pub fn remove(&mut self, key: u64) {
        self.by_key.remove(&key);
    }

    /// The memory of a range, as long as the table is locked.
    ///
    /// ```
    /// # use millstream_libfabric::memory::Regions;
    /// # let table = std::sync::Mutex::new(Regions::default());
    /// let regions = table.lock().unwrap();
    /// let range = regions.range(1, 0, 8, true);
    /// assert!(range.is_err());
    /// ```
    /// ```compile_fail
    /// # use millstream_libfabric::memory::Regions;
    /// # let table = std::sync::Mutex::new(Regions::default());
    /// let range = table.lock().unwrap().range(1, 0, 8, true);
    /// assert!(range.is_err());
    /// ```
    ///
    /// # Errors
    /// [`Refused`].
    pub fn range(&self, key: u64, offset: u64, length: u64, write: bool) -> Result<RegionRange<'_>, Refused> {
        let region = self.by_key.get(&key).ok_or(Refused::Key)?;
        if !(if write { region.writable } else { region.readable }) {
            return Err(Refused::Access);
        }
        if offset > region.length || length > region.length - offset {
            return Err(Refused::Bounds);
        }
        let start = region.start.wrapping_add(offset as usize);
        // SAFETY: a part of the region, which lives while it is in the table, and the range borrows the table.
        let memory = unsafe { UserBuffer::new([(start, length as usize)]) };
        Ok(RegionRange { memory, registration: region.registration, table: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_for_local_use_take_no_key_that_applications_choose() {
        let mut regions = Regions::default();
        let mut bytes = [0; 8];
        let mut keys = Vec::new();
        for _ in 0..3 {
            let key = regions.free_key();
            // SAFETY: the bytes live longer than the table.
            assert!(unsafe { regions.add(key, bytes.as_mut_ptr(), 8, false, false) });
            keys.push(key);
        }
        assert!(keys.iter().all(|&key| key > u64::MAX / 2 && key != u64::MAX), "{keys:?}");
        for key in 0..3 {
            // SAFETY: as above.
            assert!(unsafe { regions.add(key, bytes.as_mut_ptr(), 8, true, true) }, "{key}");
        }
    }
}
