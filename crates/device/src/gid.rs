//! The port's addresses: one RoCE v2 and one RoCE v1 GID for each address of this host. The GID table gives them their index.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::OnceLock;

use millstream_shm::fork::get_or_init;

/// The encapsulation of packets for a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// RoCE v1: Ethernet.
    RoceV1,
    /// RoCE v2: UDP.
    RoceV2,
}

/// One entry of the GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The address, IPv4 mapped into IPv6.
    pub raw: [u8; 16],
    /// Encapsulation.
    pub kind: GidKind,
    /// Index of the network interface.
    pub ifindex: u32,
    /// Its name.
    pub interface: String,
}

/// The GIDs of the host's current interfaces: first all of RoCE v2, because programs use index 0 without a choice, then
/// all of RoCE v1. Each part has link-local addresses first and loopback last. None if the host does not tell.
pub(crate) fn of_interfaces() -> Option<Vec<GidEntry>> {
    let mut addresses: Vec<(u8, String, u32, Ipv6Addr)> = Vec::new();
    for (name, ifindex, loopback, address) in interface_addresses()? {
        let class = match address {
            IpAddr::V6(a) if a.is_unicast_link_local() => 0,
            IpAddr::V4(_) => 1,
            IpAddr::V6(_) => 2,
        };
        let gid = millstream_wire::gid(address);
        addresses.push((class + if loopback { 4 } else { 0 }, name, ifindex, gid));
    }
    addresses.sort();
    let entries = |kind: GidKind| {
        addresses.iter().map(move |(_, interface, ifindex, address)| GidEntry {
            raw: address.octets(),
            kind,
            ifindex: *ifindex,
            interface: interface.clone(),
        })
    };
    Some(entries(GidKind::RoceV2).chain(entries(GidKind::RoceV1)).collect())
}

/// `IBV_MTU_*`: the code of the longest path MTU.
pub const MTU_4096: u8 = 5;

/// Most bytes of a packet besides its payload, as Linux counts them: the IPv6, UDP, BTH, XRCETH and AtomicETH
/// headers, and the ICRC.
const OVERHEAD: u32 = 40 + 8 + 12 + 4 + 28 + 4;

/// The longest path MTU that fits into an interface's, as a code; None if not even 256 bytes do.
#[must_use]
pub fn path_mtu(interface_mtu: u32) -> Option<u8> {
    let room = interface_mtu.checked_sub(OVERHEAD)?;
    (1..=MTU_4096).rev().find(|code| room >= mtu_bytes(*code))
}

/// Bytes of payload for the code of a path MTU.
#[must_use]
pub fn mtu_bytes(code: u8) -> u32 {
    128 << code.clamp(1, MTU_4096)
}

/// The MTU of a network interface.
#[must_use]
pub fn interface_mtu(ifindex: u32) -> Option<u32> {
    // SAFETY: the request is on the stack, and the descriptor is closed again.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        if libc::if_indextoname(ifindex, request.ifr_name.as_mut_ptr()).is_null() {
            return None;
        }
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return None;
        }
        let failed = libc::ioctl(fd, libc::SIOCGIFMTU as _, &raw mut request);
        libc::close(fd);
        (failed == 0).then(|| request.ifr_ifru.ifru_mtu.try_into().ok()).flatten()
    }
}

/// The network interface that has the address `gid`.
#[must_use]
pub fn interface_of(gid: &[u8; 16]) -> Option<u32> {
    of_interfaces()?.into_iter().find(|entry| entry.raw == *gid).map(|entry| entry.ifindex)
}

/// Whether `gid` is an address of this host.
#[must_use]
pub fn is_local(gid: &[u8; 16]) -> bool {
    let address = Ipv6Addr::from(*gid);
    if address.is_loopback() || address.to_ipv4_mapped().is_some_and(|a| a.is_loopback()) {
        return true;
    }
    let own = interface_addresses().unwrap_or_default();
    own.iter().any(|(_, _, _, own)| millstream_wire::gid(*own) == address)
}

/// The node's EUI-64, the same in all processes of a network namespace until the host restarts. Programs find devices by it,
/// so an interface that is added later does not change it: it comes from the first interface with a permanent hardware
/// address, else from the identifiers of the host's start and of the network namespace. It is constant in a process.
#[must_use]
pub fn node_guid() -> u64 {
    static GUID: OnceLock<u64> = OnceLock::new();
    if let Some(guid) = GUID.get() {
        return *guid;
    }
    // Without a free descriptor, the addresses are unknown for now.
    let Ok(address) = hardware_address() else { return boot_guid() };
    let of_hardware = |[a, b, c, d, e, f]: [u8; 6]| u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    *get_or_init(&GUID, || address.map_or_else(boot_guid, of_hardware))
}

/// The permanent address of the first interface that has one. Virtual interfaces have none.
fn hardware_address() -> io::Result<Option<[u8; 6]>> {
    // SAFETY: walks the list that the C library allocates, up to its last entry, and frees it afterwards. The descriptor
    // is closed again.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let list = libc::if_nameindex();
        if list.is_null() {
            let error = io::Error::last_os_error();
            libc::close(fd);
            return Err(error);
        }
        let mut found: Option<(u32, [u8; 6])> = None;
        let mut at = list;
        while let Some(entry) = at.as_ref().filter(|entry| !entry.if_name.is_null()) {
            at = at.add(1);
            // A later interface has a higher index.
            if found.is_none_or(|(index, _)| entry.if_index < index) {
                let address = permanent_address(fd, CStr::from_ptr(entry.if_name));
                found = address.map(|address| (entry.if_index, address)).or(found);
            }
        }
        libc::if_freenameindex(list);
        libc::close(fd);
        Ok(found.map(|(_, address)| address))
    }
}

/// `struct ethtool_perm_addr` with room for every address (linux/ethtool.h).
#[repr(C)]
struct EthtoolPermAddr {
    cmd: u32,
    size: u32,
    data: [u8; 32],
}

const SIOCETHTOOL: u32 = 0x8946;
const ETHTOOL_GPERMADDR: u32 = 0x20;

/// The permanent Ethernet address of an interface. `socket` is any one.
fn permanent_address(socket: libc::c_int, interface: &CStr) -> Option<[u8; 6]> {
    let mut asked = EthtoolPermAddr { cmd: ETHTOOL_GPERMADDR, size: 32, data: [0; 32] };
    // SAFETY: a request on the stack, all of whose bytes are valid as zeros, which points to a structure on the stack.
    let done = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(interface.to_bytes()) {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = (&raw mut asked).cast();
        libc::ioctl(socket, SIOCETHTOOL as _, &raw mut request)
    };
    let address = asked.data.first_chunk().filter(|address| **address != [0; 6])?;
    (done == 0 && asked.size == 6).then_some(*address)
}

/// An EUI-64 of local administration, from the identifiers of the host's start and of this network namespace.
fn boot_guid() -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino());
    fnv_1a(boot.into_iter().chain(namespace.to_be_bytes())) & !(0x03 << 56)
}

/// The hash FNV-1a. The verbs library and the preload library of a process come to the same number.
fn fnv_1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Name and index of an interface, whether it is loopback, and an address. None if the host does not tell.
fn interface_addresses() -> Option<Vec<(String, u32, bool, IpAddr)>> {
    let mut found = Vec::new();
    // SAFETY: walks the list that the C library allocates, and frees it afterwards.
    unsafe {
        let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
        if libc::getifaddrs(&raw mut list) != 0 {
            return None;
        }
        let mut at = list;
        while let Some(entry) = at.as_ref() {
            at = entry.ifa_next;
            let Some(address) = entry.ifa_addr.as_ref() else { continue };
            if entry.ifa_flags & libc::IFF_UP as u32 == 0 {
                continue;
            }
            let address = match i32::from(address.sa_family) {
                libc::AF_INET => {
                    let v4 = &*entry.ifa_addr.cast::<libc::sockaddr_in>();
                    IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes())
                }
                libc::AF_INET6 => {
                    let v6 = &*entry.ifa_addr.cast::<libc::sockaddr_in6>();
                    IpAddr::from(v6.sin6_addr.s6_addr)
                }
                _ => continue,
            };
            let name = CStr::from_ptr(entry.ifa_name).to_string_lossy().into_owned();
            let index = libc::if_nametoindex(entry.ifa_name);
            let loopback = entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0;
            found.push((name, index, loopback, address));
        }
        libc::freeifaddrs(list);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};

    use super::*;

    #[test]
    fn loopback_is_there_in_both_framings() {
        let gids = of_interfaces().unwrap();
        let lo = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let kinds: Vec<_> = gids.iter().filter(|e| e.raw == lo).map(|e| e.kind).collect();
        assert_eq!(kinds, [GidKind::RoceV2, GidKind::RoceV1]);
        let first_v1 = gids.iter().position(|e| e.kind == GidKind::RoceV1).unwrap();
        assert_eq!(2 * first_v1, gids.len(), "RoCE v2 entries come first");
        assert!(is_local(&lo));
        assert!(!is_local(&std::net::Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().octets()));
    }

    #[test]
    fn path_mtus_leave_room_for_headers() {
        let codes = [300, 352, 1500, 4192, 4191, 9000, 65536, 96].map(path_mtu);
        assert_eq!(codes, [None, Some(1), Some(3), Some(5), Some(4), Some(5), Some(5), None]);
        assert_eq!([1, 3, 5].map(mtu_bytes), [256, 1024, 4096]);
    }

    #[test]
    fn loopback_takes_the_longest_path_mtu() {
        let gids = of_interfaces().unwrap();
        let lo = gids.iter().find(|entry| entry.interface == "lo").expect("a loopback interface");
        assert_eq!(interface_mtu(lo.ifindex).and_then(path_mtu), Some(MTU_4096));
        assert_eq!(interface_mtu(u32::MAX), None);
    }

    #[test]
    fn virtual_interfaces_have_no_permanent_address() {
        // SAFETY: a plain system call, and a new descriptor.
        let socket = unsafe {
            let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            std::os::fd::OwnedFd::from_raw_fd(fd)
        };
        assert_eq!(permanent_address(socket.as_raw_fd(), c"lo"), None);
        assert_eq!(permanent_address(socket.as_raw_fd(), c"no such one"), None);
        assert_eq!(permanent_address(-1, c"lo"), None);
    }

    #[test]
    fn a_node_without_hardware_has_a_number_of_its_own() {
        assert_eq!(boot_guid(), boot_guid());
        assert_eq!(boot_guid() >> 56 & 0x03, 0, "local, and no group");
        // The test vectors of FNV-1a's authors.
        assert_eq!(fnv_1a("".bytes()), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv_1a("foobar".bytes()), 0x8594_4171_f739_67e8);
    }
}
