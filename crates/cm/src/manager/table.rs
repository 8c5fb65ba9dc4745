//! Tables of objects by number.

use crate::{Errno, Result};

/// Largest number that librdmacm can look up.
const MAX: usize = 0xffff;

/// Objects by number; `add` uses the lowest free number.
#[derive(Debug)]
pub(super) struct Table<T> {
    places: Vec<Option<T>>,
    free: std::collections::BTreeSet<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: std::collections::BTreeSet::new() }
    }
}

impl<T> Table<T> {
    pub(super) fn add(&mut self, object: T) -> Result<u32> {
        if let Some(number) = self.free.pop_first() {
            self.places[number as usize] = Some(object);
            return Ok(number);
        }
        if self.places.len() > MAX {
            return Err(Errno(libc::ENOMEM));
        }
        self.places.push(Some(object));
        Ok(self.places.len() as u32 - 1)
    }

    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.places.get(number as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.places.get_mut(number as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, number: u32) -> Option<T> {
        let object = self.places.get_mut(number as usize)?.take()?;
        self.free.insert(number);
        Some(object)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let numbered = self.places.iter().enumerate();
        numbered.filter_map(|(number, place)| Some((number as u32, place.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_numbers_are_reused_lowest_first() {
        let mut table = Table::default();
        for name in ["a", "b", "c"] {
            table.add(name).unwrap();
        }
        assert_eq!(table.remove(0), Some("a"));
        assert_eq!(table.remove(1), Some("b"));
        assert_eq!(table.remove(1), None);
        assert_eq!(table.add("d"), Ok(0));
        assert_eq!((table.get(0), table.get(1), table.get(9)), (Some(&"d"), None, None));
        assert_eq!(table.iter().map(|(number, _)| number).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn table_is_limited_like_librdmacm() {
        let mut table = Table::default();
        for number in 0..=MAX as u32 {
            assert_eq!(table.add(()), Ok(number));
        }
        assert_eq!(table.add(()), Err(Errno(libc::ENOMEM)));
    }
}
