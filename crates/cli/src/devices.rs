//! `millstream devices`: lists RDMA devices.

use std::error::Error;
use std::process::ExitCode;

use millstream_rdma::device::{DeviceInfo, DeviceSelector, devices};
use millstream_rdma::loader;
use serde_json::json;

use crate::args::DevicesOptions;

pub(crate) fn run(
    options: &DevicesOptions,
    selector: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    let mut devices = devices()?;
    if let Some(DeviceSelector::Named(name)) = selector {
        let existing: Vec<_> = devices.iter().map(|device| device.name.clone()).collect();
        devices.retain(|device| device.name == *name);
        if devices.is_empty() {
            return Err(format!("no RDMA device {name:?}; available devices: {}", existing.join(", ")).into());
        }
    }
    if options.json {
        let list: Vec<_> = devices.iter().map(to_json).collect();
        println!("{}", serde_json::to_string_pretty(&list)?);
    } else {
        println!("verbs library: {}", loader::loaded());
        devices.iter().for_each(print);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(device: &DeviceInfo) {
    let kind = if device.soft { "soft device" } else { "hardware" };
    println!("{}  ({kind}, firmware {}, guid {:016x})", device.name, device.firmware, device.guid);
    for port in &device.ports {
        println!("  port {}  {:?}, {:?}, MTU {:?}", port.number, port.state, port.link_layer, port.mtu);
        for entry in &port.gids {
            let gid = entry.gid.to_ipv4_mapped().map_or_else(|| entry.gid.to_string(), |v4| v4.to_string());
            println!("    gid {:<3} {gid}  ({:?})", entry.index, entry.gid_type);
        }
    }
}

fn to_json(device: &DeviceInfo) -> serde_json::Value {
    json!({
        "name": device.name,
        "library": device.library,
        "soft": device.soft,
        "guid": format!("{:016x}", device.guid),
        "vendor_id": device.vendor_id,
        "vendor_part_id": device.vendor_part_id,
        "firmware": device.firmware,
        "max_queue_pairs": device.limits.queue_pairs,
        "max_queue_depth": device.limits.queue_depth,
        "max_sges": device.limits.sges,
        "ports": device.ports.iter().map(|port| json!({
            "number": port.number,
            "state": format!("{:?}", port.state),
            "link_layer": format!("{:?}", port.link_layer),
            "mtu": format!("{:?}", port.mtu),
            "lid": port.lid,
            "gids": port.gids.iter().map(|entry| json!({
                "index": entry.index,
                "gid": entry.gid.to_string(),
                "type": format!("{:?}", entry.gid_type),
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
    })
}
