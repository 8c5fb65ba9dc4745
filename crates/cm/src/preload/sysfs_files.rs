//! Contents of the device's sysfs files (the kernel's `Documentation/ABI/stable/sysfs-class-infiniband`).

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use crate::abi;
use millstream_device::DEVICE_NAME;
use millstream_device::gid::{self, GidEntry, GidKind};
use millstream_device::gid_table::GidTable;
use millstream_device::{VENDOR_ID, VENDOR_PART_ID};

use super::path::Device;

/// A GID as sysfs prints it: eight groups of four digits.
fn format_gid(gid: [u8; 16]) -> String {
    Ipv6Addr::from(gid).segments().map(|group| format!("{group:04x}")).join(":")
}

fn format_guid(guid: u64) -> String {
    let groups = guid.to_be_bytes();
    let groups: Vec<String> =
        groups.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
    groups.join(":")
}

fn numbers(device: Device) -> String {
    let (major, minor) = device.numbers();
    format!("{major}:{minor}")
}

/// All files: path and content. A path that ends in a slash is an empty directory.
pub(crate) fn files() -> Vec<(String, String)> {
    let mut files = Vec::new();
    let table = GidTable::current();
    let node = format_guid(gid::node_guid());
    let mut add = |path: String, value: &str| files.push((path, format!("{value}\n")));

    let device = format!("sys/class/infiniband/{DEVICE_NAME}");
    for (name, value) in [
        ("node_type", "1: CA"),
        ("node_guid", &node),
        ("sys_image_guid", &node),
        ("node_desc", "Millstream soft device"),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("hw_rev", "1"),
        ("board_id", "MILLSTREAM"),
        ("device/vendor", &format!("{VENDOR_ID:#06x}")),
        ("device/device", &format!("{VENDOR_PART_ID:#06x}")),
        ("device/numa_node", "-1"),
        ("ports/1/state", "4: ACTIVE"),
        ("ports/1/phys_state", "5: LinkUp"),
        ("ports/1/link_layer", "Ethernet"),
        ("ports/1/lid", "0x0"),
        ("ports/1/lid_mask_count", "0"),
        ("ports/1/sm_lid", "0x0"),
        ("ports/1/sm_sl", "0"),
        // Communication management is supported, and GIDs are IP-based.
        ("ports/1/cap_mask", "0x04010000"),
        ("ports/1/rate", "200 Gb/sec (4X HDR)"),
        ("ports/1/pkeys/0", "0xffff"),
    ] {
        add(format!("{device}/{name}"), value);
    }
    for (index, entry) in table.entries() {
        let kind = match entry.kind {
            GidKind::RoceV1 => "IB/RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
        };
        add(format!("{device}/ports/1/gids/{index}"), &format_gid(entry.raw));
        add(format!("{device}/ports/1/gid_attrs/types/{index}"), kind);
        add(format!("{device}/ports/1/gid_attrs/ndevs/{index}"), &entry.interface);
    }
    // The network interfaces of the device; loopback only if there is no other.
    let loopback = |entry: &GidEntry| Ipv6Addr::from(entry.raw).to_canonical().is_loopback();
    let name = |(_, entry): (usize, &GidEntry)| (entry.interface.clone(), entry.ifindex);
    let mut interfaces: BTreeSet<_> =
        table.entries().filter(|(_, entry)| !loopback(entry)).map(name).collect();
    if interfaces.is_empty() {
        interfaces = table.entries().map(name).collect();
    }
    for (interface, index) in interfaces {
        add(format!("{device}/device/net/{interface}/ifindex"), &index.to_string());
    }

    let verbs = "sys/class/infiniband_verbs";
    add(format!("{verbs}/abi_version"), "6");
    add(format!("{verbs}/uverbs0/ibdev"), DEVICE_NAME);
    add(format!("{verbs}/uverbs0/abi_version"), "1");
    add(format!("{verbs}/uverbs0/dev"), &numbers(Device::Verbs));
    let manager = "sys/class/misc/rdma_cm";
    add(format!("{manager}/abi_version"), &abi::ABI_VERSION.to_string());
    add(format!("{manager}/dev"), &numbers(Device::RdmaCm));

    for name in [format!("infiniband/{DEVICE_NAME}/"), "infiniband_verbs/uverbs0/".to_owned()] {
        files.push((format!("{device}/device/{name}"), String::new()));
    }
    for name in ["uverbs0", "rdma_cm"] {
        files.push((format!("dev/infiniband/{name}"), String::new()));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_and_gids_are_formatted_like_the_kernel() {
        assert_eq!(format_guid(0x0255_5eff_fe10_00ff), "0255:5eff:fe10:00ff");
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
        assert_eq!(format_gid(gid), "0000:0000:0000:0000:0000:ffff:7f00:0001");
    }

    #[test]
    fn every_gid_has_three_files() {
        let files = files();
        let in_folder = |dir: &str| files.iter().filter(|(path, _)| path.contains(dir)).count();
        let entries = GidTable::current().entries().count();
        assert!(entries > 0);
        for dir in ["/gids/", "/gid_attrs/types/", "/gid_attrs/ndevs/"] {
            assert_eq!(in_folder(dir), entries, "{dir}");
        }
        assert!(in_folder("/device/net/") > 0);
        let mut paths: Vec<_> = files.iter().map(|(path, _)| path).collect();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), files.len(), "no path is there twice");
    }
}
