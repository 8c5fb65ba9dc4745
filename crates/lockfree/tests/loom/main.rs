//! The crate under the loom model checker: all interleavings of a few threads, with all values that weak memory lets
//! them read. `make loom` runs this; without `cfg(loom)` the file is empty.
#![cfg(loom)]

mod locks;
mod shared_memory;

/// Most context switches away from a runnable thread in one interleaving.
const PREEMPTIONS: usize = 5;

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_with(PREEMPTIONS, model);
}

fn check_with(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}
