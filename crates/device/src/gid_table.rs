//! The port's GID table: which index each GID has in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_lockfree::SpinLock;

use crate::gid::{GidEntry, of_interfaces};

/// Fewest places. The others stay empty until the host has more addresses.
const MIN_PLACES: usize = 32;
/// Most places: an address vector has an 8-bit index (`ibv_global_route.sgid_index`).
const MAX_PLACES: usize = 256;
/// Programs read the table entry by entry: the host is asked again after this time only.
const REFRESH: Duration = Duration::from_millis(1);

/// The table, and when the host was asked for it. None before the first answer.
static CURRENT: SpinLock<Option<(Arc<GidTable>, Instant)>> = SpinLock::new(None);

millstream_shm::lock_at_fork!(GidTable, CURRENT);

/// The port's GID table. As that of an adapter, it has a fixed number of places, of which some are empty. A GID keeps its
/// index as long as the host has the address, whatever other addresses come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GidTable {
    places: Vec<Option<GidEntry>>,
}

impl GidTable {
    /// The table as it is now. An address that came or went within the last millisecond may be missed.
    #[must_use]
    pub fn current() -> Arc<GidTable> {
        let now = Instant::now();
        let known = CURRENT.lock().clone();
        if let Some((table, at)) = &known
            && now.saturating_duration_since(*at) < REFRESH
        {
            return Arc::clone(table);
        }
        let Some(found) = of_interfaces() else { return known.map(|(table, _)| table).unwrap_or_default() };
        let mut current = CURRENT.lock();
        let (table, at) = current.get_or_insert_with(|| (Arc::default(), now));
        // Another thread may have asked the host later.
        if *at <= now {
            Arc::make_mut(table).update(found);
            *at = now;
        }
        Arc::clone(table)
    }

    /// Number of places, also empty ones: one more than the highest index.
    #[must_use]
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// The entry at an index, if the place is not empty.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&GidEntry> {
        self.places.get(index)?.as_ref()
    }

    /// All entries with their index.
    pub fn entries(&self) -> impl Iterator<Item = (usize, &GidEntry)> {
        self.places.iter().enumerate().filter_map(|(index, place)| Some((index, place.as_ref()?)))
    }

    /// The index of the first entry that is it.
    pub fn index_of(&self, is_it: impl Fn(&GidEntry) -> bool) -> Option<usize> {
        self.entries().find(|(_, entry)| is_it(entry)).map(|(index, _)| index)
    }

    /// Takes out what the host no longer has, and puts what is new into the first empty places.
    fn update(&mut self, mut found: Vec<GidEntry>) {
        if self.places.is_empty() {
            self.places = vec![None; (2 * found.len()).clamp(MIN_PLACES, MAX_PLACES)];
        }
        for place in &mut self.places {
            let Some(entry) = place else { continue };
            let is_it = |other: &GidEntry| {
                (other.raw, other.kind, other.ifindex) == (entry.raw, entry.kind, entry.ifindex)
            };
            *place = found.iter().position(is_it).map(|at| found.remove(at));
        }
        let mut found = found.into_iter();
        for place in self.places.iter_mut().filter(|place| place.is_none()) {
            *place = found.next();
        }
        let left_out = found.count();
        if left_out > 0 {
            let places = self.places.len();
            tracing::debug!("{left_out} GIDs of this host do not fit into the {places} places of the table");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::gid::GidKind;

    fn entry(number: u8) -> GidEntry {
        let interface = format!("eth{number}");
        GidEntry { raw: [number; 16], kind: GidKind::RoceV2, ifindex: number.into(), interface }
    }

    fn numbers(table: &GidTable) -> Vec<(usize, u8)> {
        table.entries().map(|(index, entry)| (index, entry.raw[0])).collect()
    }

    #[test]
    fn a_gid_keeps_its_index_while_others_come_and_go() {
        let mut table = GidTable::default();
        table.update([1, 2, 3].map(entry).to_vec());
        assert_eq!((table.places(), numbers(&table)), (MIN_PLACES, vec![(0, 1), (1, 2), (2, 3)]));
        table.update([9, 3, 1].map(entry).to_vec());
        assert_eq!(numbers(&table), [(0, 1), (1, 9), (2, 3)]);
        table.update(vec![entry(3)]);
        assert_eq!((table.places(), numbers(&table), table.get(0)), (MIN_PLACES, vec![(2, 3)], None));
    }

    #[test]
    fn a_renamed_interface_keeps_its_gids() {
        let mut table = GidTable::default();
        table.update(vec![entry(1), entry(2)]);
        let renamed = GidEntry { interface: "wan".to_owned(), ..entry(2) };
        table.update(vec![renamed.clone(), entry(1)]);
        assert_eq!(table.get(1), Some(&renamed));
    }

    #[test]
    fn the_number_of_places_is_fixed() {
        let mut table = GidTable::default();
        table.update((0..20).map(entry).collect());
        assert_eq!(table.places(), 40);
        table.update((0..=255).rev().map(entry).collect());
        assert_eq!((table.places(), table.entries().count()), (40, 40));
        assert_eq!(numbers(&table)[..20], std::array::from_fn::<_, 20, _>(|at| (at, at as u8)));
        let mut full = GidTable::default();
        full.update((0..=255).chain(0..9).map(entry).collect());
        assert_eq!((full.places(), full.entries().count()), (MAX_PLACES, MAX_PLACES));
    }

    proptest! {
        #[test]
        fn every_address_that_fits_is_in_the_table_once(
            changes in prop::collection::vec(prop::collection::btree_set(any::<u8>(), 0..32), 1..20)
        ) {
            let mut table = GidTable::default();
            for now in changes {
                let before = numbers(&table);
                table.update(now.iter().copied().map(entry).collect());
                let after = numbers(&table);
                let mut there: Vec<u8> = after.iter().map(|&(_, number)| number).collect();
                there.sort_unstable();
                prop_assert!(there.iter().eq(&now));
                let kept = before.iter().filter(|(_, number)| now.contains(number));
                prop_assert!(kept.into_iter().all(|place| after.contains(place)));
            }
        }
    }
}
