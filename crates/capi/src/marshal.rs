//! Copies between the kernel's layout of verbs structs (`rdma/ib_user_verbs.h`, `rdma/ib_user_sa.h`) and the
//! library's; librdmacm calls them for the answers of the kernel's connection manager.

use crate::sys::*;

fn address(kernel: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: kernel.grh.dgid },
            flow_label: kernel.grh.flow_label,
            sgid_index: kernel.grh.sgid_index,
            hop_limit: kernel.grh.hop_limit,
            traffic_class: kernel.grh.traffic_class,
        },
        dlid: kernel.dlid,
        sl: kernel.sl,
        src_path_bits: kernel.src_path_bits,
        static_rate: kernel.static_rate,
        is_global: kernel.is_global,
        port_num: kernel.port_num,
    }
}

/// Writes the address attributes at `src` to `dst`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_ah_attr_from_kern(dst: *mut ibv_ah_attr, src: *const ib_uverbs_ah_attr) {
    // SAFETY: the caller passes a readable `src` and a writable `dst`.
    unsafe { dst.write(address(&*src)) };
}

/// Writes the queue-pair attributes at `src` to `dst`. The kernel's struct has no `rate_limit`: `dst` keeps
/// its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_qp_attr_from_kern(dst: *mut ibv_qp_attr, src: *const ib_uverbs_qp_attr) {
    // SAFETY: the caller passes a readable `src` and a readable and writable `dst`.
    let (dst, src) = unsafe { (&mut *dst, &*src) };
    *dst = ibv_qp_attr {
        qp_state: src.qp_state,
        cur_qp_state: src.cur_qp_state,
        path_mtu: src.path_mtu,
        path_mig_state: src.path_mig_state,
        qkey: src.qkey,
        rq_psn: src.rq_psn,
        sq_psn: src.sq_psn,
        dest_qp_num: src.dest_qp_num,
        qp_access_flags: src.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: src.max_send_wr,
            max_recv_wr: src.max_recv_wr,
            max_send_sge: src.max_send_sge,
            max_recv_sge: src.max_recv_sge,
            max_inline_data: src.max_inline_data,
        },
        ah_attr: address(&src.ah_attr),
        alt_ah_attr: address(&src.alt_ah_attr),
        pkey_index: src.pkey_index,
        alt_pkey_index: src.alt_pkey_index,
        en_sqd_async_notify: src.en_sqd_async_notify,
        sq_draining: src.sq_draining,
        max_rd_atomic: src.max_rd_atomic,
        max_dest_rd_atomic: src.max_dest_rd_atomic,
        min_rnr_timer: src.min_rnr_timer,
        port_num: src.port_num,
        timeout: src.timeout,
        retry_cnt: src.retry_cnt,
        rnr_retry: src.rnr_retry,
        alt_port_num: src.alt_port_num,
        alt_timeout: src.alt_timeout,
        rate_limit: dst.rate_limit,
    };
}

/// Writes the path record at `src` to `dst`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_from_kern(
    dst: *mut ibv_sa_path_rec,
    src: *const ib_user_path_rec,
) {
    // SAFETY: the caller passes a readable `src`.
    let src = unsafe { &*src };
    let record = ibv_sa_path_rec {
        dgid: ibv_gid { raw: src.dgid },
        sgid: ibv_gid { raw: src.sgid },
        dlid: src.dlid,
        slid: src.slid,
        raw_traffic: src.raw_traffic.cast_signed(),
        flow_label: src.flow_label,
        hop_limit: src.hop_limit,
        traffic_class: src.traffic_class,
        reversible: src.reversible.cast_signed(),
        numb_path: src.numb_path,
        pkey: src.pkey,
        sl: src.sl,
        mtu_selector: src.mtu_selector,
        // One byte holds every MTU code; the kernel's field is wider for alignment only.
        mtu: src.mtu as u8,
        rate_selector: src.rate_selector,
        rate: src.rate,
        packet_life_time_selector: src.packet_life_time_selector,
        packet_life_time: src.packet_life_time,
        preference: src.preference,
    };
    // SAFETY: the caller passes a writable `dst`.
    unsafe { dst.write(record) };
}

/// Writes the path record at `src` to `dst`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_to_kern(dst: *mut ib_user_path_rec, src: *const ibv_sa_path_rec) {
    // SAFETY: the caller passes a readable `src`; every bit pattern of a GID's bytes is valid.
    let (src, dgid, sgid) = unsafe { (&*src, (*src).dgid.raw, (*src).sgid.raw) };
    let record = ib_user_path_rec {
        dgid,
        sgid,
        dlid: src.dlid,
        slid: src.slid,
        raw_traffic: src.raw_traffic.cast_unsigned(),
        flow_label: src.flow_label,
        reversible: src.reversible.cast_unsigned(),
        mtu: u32::from(src.mtu),
        pkey: src.pkey,
        hop_limit: src.hop_limit,
        traffic_class: src.traffic_class,
        numb_path: src.numb_path,
        sl: src.sl,
        mtu_selector: src.mtu_selector,
        rate_selector: src.rate_selector,
        rate: src.rate,
        packet_life_time_selector: src.packet_life_time_selector,
        packet_life_time: src.packet_life_time,
        preference: src.preference,
    };
    // SAFETY: the caller passes a writable `dst`.
    unsafe { dst.write(record) };
}
