//! Commands of a disk: how many are outstanding, and the blocks by which builder units store events.

use crate::SiteError;
use crate::schema;
use crate::validate::Validator;
use millstream_quantity::Bytes;

/// Most commands of an NVMe queue pair (NVM Express Base Specification, CAP.MQES).
const MAX_QUEUE_DEPTH: u32 = 65_536;
/// Smallest and largest block of a command.
const BLOCKS: [u64; 2] = [512, 128 << 20];

/// Checks the fields of a device that are for disks only; returns commands outstanding and bytes of a write command.
pub(crate) fn commands(
    validator: &Validator<'_>,
    device: &schema::PcieDevice,
    is_disk: bool,
) -> Result<(Option<u32>, Option<Bytes>), SiteError> {
    let about = device.name.get_ref();
    if let Some(depth) = &device.queue_depth {
        let commands = *depth.get_ref();
        if !is_disk {
            return validator
                .fail(&depth.span(), format!("{about:?}: field `queue-depth` is for disks only"));
        }
        if !(1..=MAX_QUEUE_DEPTH).contains(&commands) {
            let message =
                format!("{about:?}: queue-depth = {commands}: must be 1 to {MAX_QUEUE_DEPTH} commands");
            return validator.fail(&depth.span(), message);
        }
    }
    if let Some(block) = &device.write_block {
        let bytes = *block.get_ref();
        if !is_disk {
            return validator
                .fail(&block.span(), format!("{about:?}: field `write-block` is for disks only"));
        }
        if bytes.0 < BLOCKS[0] || bytes.0 > BLOCKS[1] || bytes.0 % BLOCKS[0] != 0 {
            let message = format!(
                "{about:?}: write-block = {}: must be 512 B to 128 MiB, a multiple of 512 B",
                bytes.binary()
            );
            return validator.fail(&block.span(), message);
        }
        if device.queue_depth.is_none() {
            let message = format!("{about:?}: write-block needs queue-depth, the writes in flight");
            return validator.fail(&block.span(), message);
        }
    }
    let depth = device.queue_depth.as_ref().map(|depth| *depth.get_ref());
    Ok((depth, device.write_block.as_ref().map(|block| *block.get_ref())))
}
