//! Lanes of PCIe links: those of a slot, of a device and of a switch's ports together.
//!
//! Read: PCI Express Card Electromechanical Specification (slots of 1, 4, 8 and 16 lanes). A device of the library states its
//! lanes if it has more (two slots), and a switch those of all its ports.

use crate::SiteError;
use crate::schema::{self, PcieDevice};
use crate::validate::{Device, DeviceId, DeviceKind, Parent, Validator};

/// Lanes of the widest slot.
const SLOT: u32 = 16;

fn entries(host: &schema::Host) -> impl Iterator<Item = &PcieDevice> {
    let kinds = [&host.pcie_switch, &host.adapter, &host.card, &host.ssd];
    kinds.into_iter().flatten().map(|entry| entry.get_ref())
}

/// Checks that no link has more lanes than its slot or device, and no switch more than its ports have.
pub(crate) fn check(
    validator: &Validator<'_>,
    host: &schema::Host,
    devices: &[Device],
) -> Result<(), SiteError> {
    for entry in entries(host) {
        let name = entry.name.get_ref();
        let Some(index) = devices.iter().position(|device| device.name == *name) else { continue };
        let device = &devices[index];
        let (lanes, given) = (validator.lanes(&device.id), u32::from(device.pcie.lanes.0));
        let is_switch = matches!(device.kind, DeviceKind::Switch(_));
        let most = if is_switch { SLOT } else { lanes.unwrap_or(SLOT) };
        if given > most {
            let of = match lanes {
                Some(_) if !is_switch => format!("a {} has {most}", device.model),
                _ => format!("a slot has at most {most}"),
            };
            let message = format!("{name:?}: pcie.lanes = {given}: {of}; use {most} or less");
            return validator.fail(&entry.name.span(), message);
        }
        let Some(total) = lanes.filter(|_| is_switch) else { continue };
        let below = devices.iter().filter(|child| child.parent == Parent::Switch(DeviceId(index)));
        let used = given + below.map(|child| u32::from(child.pcie.lanes.0)).sum::<u32>();
        if used > total {
            let message = format!(
                "PCIe switch {name:?}: its links have {used} lanes, a {} has {total}: give them fewer lanes, or add a switch",
                device.model
            );
            return validator.fail(&entry.name.span(), message);
        }
    }
    Ok(())
}
