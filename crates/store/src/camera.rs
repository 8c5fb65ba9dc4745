//! The schema of a Cherenkov camera with a digital trigger, such as SST-1M's DigiCam.
//!
//! Boards record waveforms, 48 pixels each; each crate of boards records the traces of its trigger
//! patches; the trigger decides for each patch and sample. `data/README.md` says how the fragments look.

use millstream_fragment::{SourceId, SourceKind};

use crate::{Array, Constant, Decisions, Element, Run, Schema, Source, Values};

/// Waveforms of one board: [`PIXELS_PER_BOARD`] × [`SAMPLES`] i16.
pub const WAVEFORMS: SourceKind = SourceKind(1);
/// Trigger traces of one crate: [`SAMPLES`] × [`TRACE_BYTES`] u8.
pub const TRIGGER_TRACES: SourceKind = SourceKind(2);

/// Samples per event.
pub const SAMPLES: usize = 50;
/// Pixels of one board.
pub const PIXELS_PER_BOARD: usize = 48;
/// Bytes of one crate's trigger traces per sample: a patch each, and reserve.
pub const TRACE_BYTES: usize = 192;
/// Bytes of one crate's part of the decision map of a sample.
pub const DECISION_BYTES: usize = 18;

/// Dataset of the waveforms: event × pixel × sample.
pub const WAVEFORMS_DATASET: &str = "camera/waveforms";
/// Dataset of the trigger traces: event × crate × sample × patch.
pub const TRIGGER_TRACES_DATASET: &str = "camera/trigger_traces";

/// What is known of a camera beyond its fragments.
#[derive(Clone, Debug, Default)]
pub struct Camera {
    /// The camera's number of each pixel, in stored order; empty if not known.
    pub pixel_id: Vec<u16>,
    /// Centre of each pixel, in mm, in stored order; empty if not known.
    pub pixel_xy: Vec<(f64, f64)>,
    /// The trigger patch of each bit in the decision map of a sample; empty if the trigger did not run.
    pub patch_of_bit: Vec<u16>,
}

/// The schema for these sources. Boards and crates are stored in ascending order of their ids; a source
/// of another kind keeps its fragments as flat bytes.
pub fn schema(run: Run, sources: Vec<Source>, camera: &Camera) -> Schema {
    let of_kind = |kind| {
        let mut ids: Vec<SourceId> = sources.iter().filter(|s| s.kind == kind).map(|s| s.id).collect();
        ids.sort_unstable();
        ids
    };
    let (boards, crates) = (of_kind(WAVEFORMS), of_kind(TRIGGER_TRACES));
    let mut arrays = Vec::new();
    if !boards.is_empty() {
        arrays.push(Array {
            dataset: WAVEFORMS_DATASET.into(),
            element: Element::I16,
            dims: dims([("pixel", PIXELS_PER_BOARD * boards.len()), ("sample", SAMPLES)]),
            sources: boards,
            unit: "ADC count".into(),
            description: "waveforms in stored order: crate, board, channel".into(),
        });
    }
    if !crates.is_empty() {
        arrays.push(Array {
            dataset: TRIGGER_TRACES_DATASET.into(),
            element: Element::U8,
            dims: dims([("crate", crates.len()), ("sample", SAMPLES), ("patch", TRACE_BYTES)]),
            sources: crates.clone(),
            unit: "trigger count".into(),
            description: "input of the trigger; of each crate's 192 places the first 144 are patches".into(),
        });
    }
    let decisions = (!camera.patch_of_bit.is_empty()).then(|| Decisions {
        samples: SAMPLES,
        dims: dims([("crate", crates.len()), ("byte", DECISION_BYTES)]),
        patch_of_bit: camera.patch_of_bit.clone(),
    });
    Schema { run, sources, arrays, decisions, constants: constants(camera) }
}

fn dims<const N: usize>(dims: [(&str, usize); N]) -> Vec<(String, usize)> {
    dims.into_iter().map(|(name, len)| (name.to_owned(), len)).collect()
}

fn constants(camera: &Camera) -> Vec<Constant> {
    let pixel = |dataset: &str, values, unit: &str, description: &str| Constant {
        dataset: dataset.into(),
        values,
        dim: "pixel".into(),
        unit: unit.into(),
        description: description.into(),
    };
    let mut constants = Vec::new();
    if !camera.pixel_id.is_empty() {
        let values = Values::U16(camera.pixel_id.clone());
        constants.push(pixel("camera/pixel_id", values, "", "the camera's number of each stored pixel"));
    }
    if !camera.pixel_xy.is_empty() {
        let (x, y) = camera.pixel_xy.iter().copied().unzip();
        constants.push(pixel("camera/pixel_x", Values::F64(x), "mm", "centre of each stored pixel"));
        constants.push(pixel("camera/pixel_y", Values::F64(y), "mm", "centre of each stored pixel"));
    }
    constants
}
