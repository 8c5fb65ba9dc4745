//! What a killed builder unit leaves.

use std::path::Path;

use millstream_fragment::{Fragment, SourceId, SourceKind};
use millstream_store::{Event, EventWriter, Run, Schema, Source, WriteOptions};

/// Leaves the partial file of `path`, with one event.
pub(crate) fn leave_partial(path: &Path) {
    let schema = Schema {
        run: Run { name: "killed".into(), ..Run::default() },
        sources: vec![Source { id: SourceId(1), kind: SourceKind(9), name: String::new() }],
        ..Schema::default()
    };
    let mut writer = EventWriter::create(path, &schema, &WriteOptions::default()).unwrap();
    let fragments = [(SourceId(1), Fragment::new(7, &[7; 1000]))];
    let event = Event { number: 7, batch: 0, fragments: &fragments, decisions: &[], readout_lost: false };
    writer.append(&event).unwrap();
    writer.flush().unwrap();
}
