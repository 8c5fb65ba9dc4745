//! Source kinds of the camera and the layout of their fragments.
//!
//! The camera has three crates. Each crate has nine digitiser boards and one trigger board, and each board is
//! a source. The decisions of the camera's own trigger are recorded by a further source, for comparison.

use millstream_fragment::SourceKind;

/// Kind of a digitiser board: waveforms, [`PIXELS_PER_BOARD`] × [`SAMPLES`] × `i16` \[ADC count\].
pub const WAVEFORMS: SourceKind = SourceKind(1);

/// Kind of a trigger board: trigger traces, [`SAMPLES`] × [`TRACE_STRIDE`] × `u8` \[trigger count\].
pub const TRIGGER_TRACES: SourceKind = SourceKind(2);

/// Kind of the recorded trigger decisions, [`DECISION_BYTES`] per event.
pub const TRIGGER_DECISIONS: SourceKind = SourceKind(3);

/// Samples per event.
pub const SAMPLES: usize = 50;

/// Crates of the camera.
pub const CRATES: usize = 3;

/// Pixels of one digitiser board.
pub const PIXELS_PER_BOARD: usize = 48;

/// Trigger patches of the camera.
pub const PATCHES: usize = 432;

/// Trigger patches of one crate.
pub const PATCHES_PER_CRATE: usize = PATCHES / CRATES;

/// Length of one sample of a crate's trigger traces \[bytes\]: one byte for each of the
/// [`PATCHES_PER_CRATE`] patches, then padding.
pub const TRACE_STRIDE: usize = 192;

/// Length of a crate's trigger traces \[bytes\].
pub const TRACE_BYTES: usize = SAMPLES * TRACE_STRIDE;

/// Length of the decision bits of one sample \[bytes\].
pub const DECISION_STRIDE: usize = PATCHES / 8;

/// Length of the decision bits of one event \[bytes\]: sample by sample, one bit for each decision
/// position, least significant bit first.
pub const DECISION_BYTES: usize = SAMPLES * DECISION_STRIDE;

/// Trigger threshold of the recorded data \[trigger count\].
pub const TRIGGER_THRESHOLD: u32 = 336;
