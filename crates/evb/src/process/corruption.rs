//! Corruption by source, over all builder units of a run.

use super::RunOutcome;
use super::builder::SourceChecksums;
use std::collections::BTreeMap;

impl RunOutcome {
    /// The sources of which fragments were compared with their checksums, by id.
    pub fn checksums(&self) -> Vec<SourceChecksums> {
        let mut sources: BTreeMap<u32, SourceChecksums> = BTreeMap::new();
        let all = self.builders.iter().flatten().flat_map(|unit| &unit.checksums);
        for &SourceChecksums { source, checked, corrupt } in all {
            let sum = sources.entry(source).or_insert(SourceChecksums { source, checked: 0, corrupt: 0 });
            sum.checked += checked;
            sum.corrupt += corrupt;
        }
        sources.into_values().collect()
    }

    /// The sources with a larger fraction of corrupt fragments than the run permits. They fail the run.
    pub fn too_corrupt(&self) -> Vec<SourceChecksums> {
        let exceeds =
            |source: &SourceChecksums| source.corrupt as f64 > self.max_corrupt * source.checked as f64;
        self.checksums().into_iter().filter(exceeds).collect()
    }
}
