//! Packets and bytes of the same traffic with and without monitoring.

use millstream_torus::traffic::TrafficCounters;

use super::{Options, Outcome, launcher};
use crate::{Figure, Table};

/// Messages of 64 KiB to each neighbour: traffic for about a second.
const MESSAGES: u32 = 200;

pub(super) fn measure(table: &mut Table, options: &Options) -> Outcome<()> {
    let off = traffic(options, 0)?;
    let on = traffic(options, 2)?;
    let label = |what: &str| format!("{what}, monitoring on; baseline off");
    let counts = [
        ("packets injected", on.injected, off.injected),
        ("packets over links", on.transmitted, off.transmitted),
        ("bytes in place", on.delivered_bytes, off.delivered_bytes),
        ("packets repeated", on.repeated, off.repeated),
    ];
    for (what, on, off) in counts {
        table.push(Figure::with_baseline(label(what), on as f64, "", off as f64));
    }
    Ok(())
}

fn traffic(options: &Options, supervisors: usize) -> Outcome<TrafficCounters> {
    let mut torus = launcher(options, "2x2x1".parse()?, supervisors).launch()?;
    let program = &options.program;
    let words = ["bench".into(), "torus-client".into(), "--traffic".into(), MESSAGES.to_string().into()];
    let command: Vec<_> = std::iter::once(program.into()).chain(words).collect();
    torus.run(&command)?;
    Ok(TrafficCounters::total(&torus.finish()?))
}
