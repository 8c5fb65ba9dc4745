//! Datasets of the camera in an event file (`docs/output.md`).

use millstream_fragment::SourceId;
use millstream_store::{
    ConstantDataset, ConstantValues, DecisionSchema, ElementType, FragmentArray, Run, Schema, Source,
};

use crate::format::{PATCHES_PER_CRATE, PIXELS_PER_BOARD, SAMPLES, TRACE_STRIDE, TRIGGER_TRACES, WAVEFORMS};
use crate::pixels::PixelGeometry;
use crate::trigger::TriggerGeometry;

/// Dataset of the waveforms: event × pixel × sample.
pub const WAVEFORMS_DATASET: &str = "camera/waveforms";
/// Dataset of the trigger traces: event × crate × sample × patch.
pub const TRIGGER_TRACES_DATASET: &str = "camera/trigger_traces";

/// The schema of an event file with these sources.
///
/// Boards and crates are stored in ascending order of their source ids. Sources of other kinds are stored
/// as bytes. Without `trigger` the file has no decisions, and without `pixels` no pixel positions.
pub fn schema(
    run: Run,
    sources: Vec<Source>,
    trigger: Option<&TriggerGeometry>,
    pixels: Option<&PixelGeometry>,
) -> Schema {
    let of_kind = |kind| {
        let mut ids: Vec<SourceId> = sources.iter().filter(|s| s.kind == kind).map(|s| s.id).collect();
        ids.sort_unstable();
        ids
    };
    let (boards, crates) = (of_kind(WAVEFORMS), of_kind(TRIGGER_TRACES));
    let decisions = trigger.map(|trigger| DecisionSchema {
        samples: SAMPLES,
        dims: dims([("crate", crates.len()), ("byte", PATCHES_PER_CRATE / 8)]),
        patch_of_bit: trigger.patches().collect(),
    });
    let mut arrays = Vec::new();
    if !boards.is_empty() {
        arrays.push(FragmentArray {
            dataset: WAVEFORMS_DATASET.into(),
            element: ElementType::I16,
            dims: dims([("pixel", PIXELS_PER_BOARD * boards.len()), ("sample", SAMPLES)]),
            sources: boards,
            unit: "ADC count".into(),
            description: "waveforms in stored order: crate, board, channel".into(),
        });
    }
    if !crates.is_empty() {
        arrays.push(FragmentArray {
            dataset: TRIGGER_TRACES_DATASET.into(),
            element: ElementType::U8,
            dims: dims([("crate", crates.len()), ("sample", SAMPLES), ("patch", TRACE_STRIDE)]),
            sources: crates,
            unit: "trigger count".into(),
            description: "trigger input; of each crate's 192 bytes per sample the first 144 are patches"
                .into(),
        });
    }
    Schema { run, sources, arrays, decisions, constants: pixels.map_or(Vec::new(), constants) }
}

fn dims<const N: usize>(dims: [(&str, usize); N]) -> Vec<(String, usize)> {
    dims.into_iter().map(|(name, len)| (name.to_owned(), len)).collect()
}

fn constants(geometry: &PixelGeometry) -> Vec<ConstantDataset> {
    let pixels = geometry.pixels().iter();
    let constant = |dataset: &str, values, unit: &str, description: &str| ConstantDataset {
        dataset: dataset.into(),
        values,
        dim: "pixel".into(),
        unit: unit.into(),
        description: description.into(),
    };
    let ids = ConstantValues::U16(pixels.clone().map(|pixel| pixel.id).collect());
    let (x, y) = pixels.map(|pixel| (pixel.x, pixel.y)).unzip();
    vec![
        constant("camera/pixel_id", ids, "", "the camera's number of each stored pixel"),
        constant("camera/pixel_x", ConstantValues::F64(x), "mm", "centre of each stored pixel"),
        constant("camera/pixel_y", ConstantValues::F64(y), "mm", "centre of each stored pixel"),
    ]
}
