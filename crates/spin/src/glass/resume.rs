//! Reading a checkpoint of any shape.

use millstream_application::ApplicationError;
use millstream_application::checkpoint::{CheckpointFolder, Manifest, RunIdentity};

use crate::block::Block;
use crate::geometry::{Box3, Extent};
use crate::measure::Measurement;
use crate::real::Real;

/// Sets a block's spins from the folder's checkpoint. Returns the sweep and the measurements so far.
pub(super) fn load<E: Real>(
    folder: &CheckpointFolder,
    identity: &RunIdentity<'_>,
    block: &mut Block<E>,
) -> Result<(u64, Vec<Measurement>), ApplicationError> {
    let (manifest, torus) = folder.load(identity)?;
    let Manifest { step, parts, progress, .. } = manifest;
    for (node, part) in torus.all().zip(&parts) {
        let extent = block.lattice().extent(torus, node, 0);
        let extent = extent.map_err(|error| folder.damaged(part, &error.to_string()))?;
        if !overlaps(&extent, block.extent()) {
            continue;
        }
        let bytes = folder.read_part(part)?;
        if bytes.len() != extent.sites() * 3 * E::BYTES {
            let reason = format!("{} bytes for {} sites", bytes.len(), extent.sites());
            return Err(folder.damaged(part, &reason).into());
        }
        copy(block, &extent, &bytes);
    }
    let measurements = serde_json::from_value(progress)
        .map_err(|error| ApplicationError::Parameters(format!("progress of the checkpoint: {error}")))?;
    Ok((step, measurements))
}

fn overlaps(a: &Extent, b: &Extent) -> bool {
    (0..3).all(|i| a.origin[i] < b.origin[i] + b.size[i] && b.origin[i] < a.origin[i] + a.size[i])
}

/// Copies the spins that a part has of a block. Its rows have even sites before odd ones, as [`Block::pack`] writes them.
fn copy<E: Real>(block: &mut Block<E>, extent: &Extent, bytes: &[u8]) {
    let own = *block.extent();
    let part: Box3 = std::array::from_fn(|i| {
        let start = extent.origin[i].max(own.origin[i]);
        let end = (extent.origin[i] + extent.size[i]).min(own.origin[i] + own.size[i]);
        (start - own.origin[i]) as isize..(end - own.origin[i]) as isize
    });
    let half = extent.size[0] / 2;
    let [xs, ys, zs] = part;
    for z in zs {
        for y in ys.clone() {
            let place = |i: usize, local: isize| own.origin[i] + local as usize - extent.origin[i];
            let row = (place(2, z) * extent.size[1] + place(1, y)) * extent.size[0] * 3;
            for parity in 0..2 {
                let shift = block.shift(parity, y, z);
                let indices = Block::<E>::indices(&xs, shift);
                // Both origins are even, so the shift is the same in the part.
                let first = (2 * indices.start + shift as isize) as usize + own.origin[0] - extent.origin[0];
                for c in 0..3 {
                    let at = row + (parity * 3 + c) * half + first / 2;
                    let values = &bytes[at * E::BYTES..(at + indices.len()) * E::BYTES];
                    block.set_values(parity, y, z, c, &indices, values);
                }
            }
            block.copy_x_ends(y, z);
        }
    }
}
