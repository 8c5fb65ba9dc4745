//! Address handles and the resolution of addresses.

use std::{ffi::c_int, sync::Arc};

use millstream_device::{
    Pd, gid,
    gid_table::GidTable,
    path::{self, PathKind},
    send_wr::UdDestination,
    types::WC_FLAG_GRH,
};
use millstream_lockfree::CancelGuard;
use millstream_quantity::{Qkey, Qpn};

use crate::{
    errno::{self, Errno},
    pd::PdObject,
    sys::*,
};

/// An address handle: the program's struct and the device's data.
#[repr(C)]
pub(crate) struct AhObject {
    verbs: ibv_ah,
    on_this_host: bool,
    /// The global route header that receivers find in front of a datagram.
    grh: [u8; 40],
    domain: Arc<Pd>,
}

impl AhObject {
    /// The destination of a datagram for `qpn`.
    ///
    /// # Safety
    /// `ah` comes from [`ibv_create_ah`] and is alive.
    pub(crate) unsafe fn destination(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> UdDestination {
        // SAFETY: `verbs` is the first field; the caller vouches for the pointer.
        let object = unsafe { &*ah.cast::<Self>() };
        UdDestination {
            on_this_host: object.on_this_host,
            qpn: Qpn::new(qpn),
            qkey: Qkey::new(qkey),
            grh: object.grh,
        }
    }
}

/// The global route header of a datagram. With RoCE v2 over IPv4 its last 20 bytes are the IPv4 header
/// (RoCE annex A17.4.5.2); otherwise it has the form of an IPv6 header.
fn route_header(source: &[u8; 16], route: &ibv_global_route, kind: gid::GidKind) -> [u8; 40] {
    // SAFETY: a GID is sixteen bytes through either field of the union.
    let target = unsafe { route.dgid.raw };
    let mut header = [0u8; 40];
    let mapped = |gid: &[u8; 16]| gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    if kind == gid::GidKind::RoceV2 && mapped(source) && mapped(&target) {
        let ip = &mut header[20..];
        ip[0] = 0x45;
        ip[1] = route.traffic_class;
        ip[6] = 0x40;
        ip[8] = route.hop_limit.max(1);
        ip[9] = libc::IPPROTO_UDP as u8;
        ip[12..16].copy_from_slice(&source[12..]);
        ip[16..20].copy_from_slice(&target[12..]);
        let sum: u32 = ip.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        ip[10..12].copy_from_slice(&(!(((folded & 0xffff) + (folded >> 16)) as u16)).to_be_bytes());
        return header;
    }
    let first = 6 << 28 | u32::from(route.traffic_class) << 20 | (route.flow_label & 0xf_ffff);
    header[..4].copy_from_slice(&first.to_be_bytes());
    header[6] = if kind == gid::GidKind::RoceV2 { libc::IPPROTO_UDP as u8 } else { 0x1b };
    header[7] = route.hop_limit;
    header[8..24].copy_from_slice(source);
    header[24..].copy_from_slice(&target);
    header
}

/// Source and destination GID in a received route header, traffic class and flow label.
fn parse_route_header(header: &[u8; 40]) -> ([u8; 16], [u8; 16], u8, u32) {
    let gid = |bytes: &[u8]| -> [u8; 16] { bytes.try_into().expect("sixteen bytes") };
    if header[0] >> 4 != 6 && header[20] >> 4 == 4 {
        let mapped = |bytes: &[u8]| {
            let mut gid = [0; 16];
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(bytes);
            gid
        };
        return (mapped(&header[32..36]), mapped(&header[36..40]), header[21], 0);
    }
    let first = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
    (gid(&header[8..24]), gid(&header[24..40]), (first >> 20) as u8, first & 0xf_ffff)
}

/// A new address handle; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an allocated domain and a readable struct.
    let (domain, attr) = unsafe { (&PdObject::of(pd).inner, &*attr) };
    // Ethernet has global addresses only (RoCE annex A17.4.2).
    let table = GidTable::current();
    let source = table.get(attr.grh.sgid_index.into());
    let (Some(source), true, 1) = (source, attr.is_global != 0, attr.port_num) else {
        return errno::pointer(Err(Errno::INVALID));
    };
    let preference = match path::preference() {
        Ok(preference) => preference,
        Err(error) => return errno::pointer(Err(error.into())),
    };
    let object = AhObject {
        // SAFETY: the caller's allocated domain; a GID is sixteen bytes through either field of the union.
        verbs: ibv_ah { context: unsafe { (*pd).context }, pd, handle: 0 },
        // SAFETY: as above.
        on_this_host: preference.path_to(unsafe { &attr.grh.dgid.raw }) == PathKind::Shm,
        grh: route_header(&source.raw, &attr.grh, source.kind),
        domain: domain.clone(),
    };
    domain.attach();
    Box::into_raw(Box::new(object)).cast()
}

/// The address of the sender of a received datagram. `grh` is read only if `wc` has IBV_WC_GRH.
/// Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    _context: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    ah_attr: *mut ibv_ah_attr,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a completion, and the header if the completion's flags announce it.
    let (flags, header) = unsafe {
        let flags = (*wc).wc_flags;
        let there = flags & WC_FLAG_GRH != 0 && !grh.is_null();
        (flags, there.then(|| grh.cast::<[u8; 40]>().read_unaligned()))
    };
    let Some(header) = header.filter(|_| flags & WC_FLAG_GRH != 0) else {
        return errno::index(Err(Errno::INVALID));
    };
    let (sender, us, traffic_class, flow_label) = parse_route_header(&header);
    // Of the two entries of the address, the first is the one for RoCE v2.
    let Some(index) = GidTable::current().index_of(|entry| entry.raw == us) else {
        return errno::index(Err(Errno::INVALID));
    };
    let attr = ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: sender },
            flow_label,
            sgid_index: index as u8,
            hop_limit: 0xff,
            traffic_class,
        },
        // In a datagram's completion, the field holds the network header type instead.
        sl: 0,
        is_global: 1,
        port_num,
        ..ibv_ah_attr::default()
    };
    // SAFETY: the caller passes a writable struct.
    unsafe { ah_attr.write(attr) };
    0
}

/// A new address handle for the sender of a received datagram; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    let _uncancelled = CancelGuard::new();
    let mut attr = ibv_ah_attr::default();
    // SAFETY: the caller passes a protection domain of this library, and what the callee requires.
    let answer = unsafe { ibv_init_ah_from_wc((*pd).context, port_num, wc, grh, &mut attr) };
    if answer != 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's domain and a complete attribute.
    unsafe { ibv_create_ah(pd, &mut attr) }
}

/// Destroys an address handle. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: boxed by `ibv_create_ah`; the caller gives it up.
    let object = unsafe { Box::from_raw(ah.cast::<AhObject>()) };
    object.domain.detach();
    0
}

/// The Ethernet address and VLAN of the destination `attr`. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    _attr: *mut ibv_ah_attr,
    _eth_mac: *mut [u8; ETHERNET_LL_SIZE as usize],
    _vid: *mut u16,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    errno::status(Err(Errno::UNSUPPORTED))
}
