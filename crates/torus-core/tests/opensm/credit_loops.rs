//! ibdmchk: an independent judgement on credit loops in OpenSM's dumps.

use std::fs;
use std::process::{Command, Stdio};

use crate::simulation::{Fabric, Subnet};
use crate::tables::Tables;

/// What ibdmchk judges.
#[derive(Clone, Copy)]
pub(crate) enum Input<'t> {
    /// OpenSM's forwarding tables with these virtual lanes.
    OpenSm(&'t Tables),
    /// OpenSM's forwarding tables with all packets on virtual lane 0.
    OpenSmOnOneLane,
    /// These forwarding tables and virtual lanes.
    Tables(&'t Tables),
    /// These forwarding tables with all packets on virtual lane 0.
    TablesOnOneLane(&'t Tables),
}

/// Whether ibdmchk finds a credit loop. It must have followed all pairs.
pub(crate) fn exist(subnet: &Subnet, fabric: &Fabric<'_>, input: Input<'_>) -> bool {
    let mut command = Command::new("ibdmchk");
    command.arg("-s").arg(subnet.file("opensm-subnet.lst")).arg("-m").arg(subnet.file("opensm.mcfdbs"));
    let mut forwarding = subnet.file("opensm.fdbs");
    if let Input::Tables(tables) | Input::TablesOnOneLane(tables) = input {
        forwarding = subnet.file("fdbs");
        fs::write(&forwarding, tables.forwarding_tables(fabric)).unwrap();
    }
    command.arg("-f").arg(forwarding);
    if let Input::OpenSm(tables) | Input::Tables(tables) = input {
        let (levels, maps) = (subnet.file("psl"), subnet.file("slvl"));
        fs::write(&levels, tables.path_levels(fabric)).unwrap();
        fs::write(&maps, tables.lane_maps(fabric)).unwrap();
        command.arg("-c").arg(levels).arg("-d").arg(maps);
    }
    let output = command.stdin(Stdio::null()).output().expect("ibdmchk starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let end =
        || text.lines().rev().take(25).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n");
    let scanned = format!("Scanned:{} CA to CA paths", fabric.pairs().len());
    assert!(text.contains(&scanned), "ibdmchk does not say \"{scanned}\":\n{}", end());
    let (levels, lanes) = match input {
        Input::OpenSm(tables) | Input::Tables(tables) => tables.levels_and_lanes(),
        Input::OpenSmOnOneLane | Input::TablesOnOneLane(_) => (1, 1),
    };
    let used = format!("{levels} SLs, {lanes} VLs used");
    assert!(text.contains(&used), "ibdmchk does not say \"{used}\":\n{}", end());
    // ibdmchk 1.5.7 dies of SIGSEGV after it printed a loop, so its status says nothing.
    match (text.contains("-I- no credit loops found"), text.contains("-E- credit loops in routing")) {
        (true, false) => false,
        (false, true) => true,
        _ => panic!("ibdmchk gives no verdict on credit loops:\n{}", end()),
    }
}
