//! The descriptors and mappings that a process holds, to find leaks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::TEST_TIMEOUT;

/// The resources that a process holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Number of descriptors by target.
    pub(crate) descriptors: BTreeMap<String, usize>,
    /// Number of mappings of memory that was or could be shared, by name.
    pub(crate) mappings: BTreeMap<String, usize>,
    pub(crate) threads: usize,
    pub(crate) resident_kib: u64,
}

impl Usage {
    pub(crate) fn of(process: u32) -> Self {
        let path = |what: &str| format!("/proc/{process}/{what}");
        let entries = |what| std::fs::read_dir(path(what)).expect("a living process").flatten();
        let read = |what| std::fs::read_to_string(path(what)).expect("a living process");
        let status = read("status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of it");
        let mut usage = Self {
            descriptors: BTreeMap::new(),
            mappings: BTreeMap::new(),
            threads: entries("task").count(),
            resident_kib: resident.trim().trim_end_matches(" kB").parse().expect("a number"),
        };
        for descriptor in entries("fd") {
            // The descriptor that lists the directory is closed already.
            let Ok(what) = std::fs::read_link(descriptor.path()) else { continue };
            let what = what.to_string_lossy().replace(|c: char| c.is_ascii_digit(), "");
            *usage.descriptors.entry(what).or_default() += 1;
        }
        for line in read("maps").lines() {
            if let Some((_, name)) = line.split_once("/memfd:") {
                *usage.mappings.entry(name.to_owned()).or_default() += 1;
            }
        }
        usage
    }

    /// Whether two usages are equal, apart from the memory that was touched so far.
    pub(crate) fn same(&self, other: &Self) -> bool {
        let shared = |usage: &Self| (usage.descriptors.clone(), usage.mappings.clone(), usage.threads);
        shared(self) == shared(other)
    }

    /// Waits until a process holds exactly the resources that it held before.
    pub(crate) fn is_again(process: u32, before: &Self) {
        let start = Instant::now();
        loop {
            let now = Self::of(process);
            if now.same(before) {
                return;
            }
            assert!(start.elapsed() < TEST_TIMEOUT, "{now:#?} instead of {before:#?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
