//! The GID table while network interfaces come and go.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use millstream_device::gid::{self, GidKind};
use millstream_device::gid_table::GidTable;

use crate::support::{Process, run_role, send_to_parent};

fn ip(words: &str) {
    let output = Command::new("ip").args(words.split(' ')).output().expect("iproute2");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The table, after the time for which an earlier one is given again.
fn table() -> Arc<GidTable> {
    std::thread::sleep(Duration::from_millis(2));
    GidTable::current()
}

fn index_of(table: &GidTable, address: [u8; 4], kind: GidKind) -> Option<usize> {
    let raw = Ipv4Addr::from(address).to_ipv6_mapped().octets();
    table.index_of(|entry| (entry.raw, entry.kind) == (raw, kind))
}

#[test]
fn gids_keep_their_index_while_interfaces_come_and_go() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: a network namespace takes root");
        return;
    }
    run_role("changing_interfaces");
}

/// In another process: interfaces of a network namespace of its own.
pub(crate) fn changing_interfaces() {
    // SAFETY: a plain system call; later threads are in the new namespace, too.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", std::io::Error::last_os_error());
    ip("link set lo up");
    let lo = [GidKind::RoceV2, GidKind::RoceV1].map(|kind| index_of(&table(), [127, 0, 0, 1], kind));
    let places = table().places();
    // Its addresses would be in front of those of loopback, as those of a container that starts are.
    ip("link add first type veth peer name second");
    ip("address add 192.0.2.1/24 dev first");
    ip("link set first up");
    let with_it = table();
    let added = [GidKind::RoceV2, GidKind::RoceV1].map(|kind| index_of(&with_it, [192, 0, 2, 1], kind));
    assert!(added.iter().all(Option::is_some), "{with_it:?}");
    assert_eq!(lo, [GidKind::RoceV2, GidKind::RoceV1].map(|kind| index_of(&with_it, [127, 0, 0, 1], kind)));
    assert_eq!(with_it.places(), places);
    ip("link delete first");
    let without = table();
    assert_eq!(index_of(&without, [192, 0, 2, 1], GidKind::RoceV2), None);
    assert_eq!(lo, [GidKind::RoceV2, GidKind::RoceV1].map(|kind| index_of(&without, [127, 0, 0, 1], kind)));
    assert!(added.iter().flatten().all(|&index| without.get(index).is_none()), "{without:?}");
}

/// librdmacm finds the device of an event by the node GUID that it read at its start.
#[test]
fn the_node_guid_stays_while_interfaces_come_and_go() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: a network namespace takes root");
        return;
    }
    run_role("node_guid");
}

/// In another process: interfaces of a network namespace of its own, and their files in sysfs.
pub(crate) fn node_guid() {
    let of_host = gid::node_guid();
    assert_eq!(of_host & 0x01 << 56, 0, "no group address");
    // SAFETY: plain system calls with C strings; later threads are in the new namespaces, too.
    let entered = unsafe {
        let [none, root, sys, kind] = [c"none", c"/", c"/sys", c"sysfs"].map(|text| text.as_ptr());
        libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) == 0
            && libc::mount(none, root, std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE, std::ptr::null())
                == 0
            && libc::mount(none, sys, kind, 0, std::ptr::null()) == 0
    };
    assert!(entered, "{}", std::io::Error::last_os_error());
    assert_eq!(gid::node_guid(), of_host, "constant in a process");
    let before = guid_of_another_process();
    assert_ne!(before, of_host, "another node");
    for (name, address) in [("first", "06:00:00:00:00:02"), ("second", "02:00:00:00:00:02")] {
        ip(&format!("link add {name} address {address} type veth peer name {name}-peer"));
        assert_eq!(guid_of_another_process(), before, "with {address}");
    }
    ip("link delete second");
    assert_eq!(guid_of_another_process(), before);
}

/// The node GUID that a process reads which starts now, in the namespaces of this one.
fn guid_of_another_process() -> u64 {
    let mut process = Process::start("node_guid_here");
    let guid = process.recv_line().parse().expect("a number");
    assert!(process.finish().success());
    guid
}

/// In another process.
pub(crate) fn node_guid_here() {
    send_to_parent(&gid::node_guid().to_string());
}
