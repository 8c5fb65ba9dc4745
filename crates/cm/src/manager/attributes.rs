//! Queries of identifiers: addresses, path, and queue pair attributes.

use super::{EINVAL, Id, Manager, PACKET_LIFE_TIME, State};
use crate::abi::{
    AddrAnswer, AhAttr, MTU_4096, PathAnswer, PathRecord, QPT_RC, QPT_XRC_RECV, QPT_XRC_SEND, QpAttr,
    RouteAnswer, WirePath,
};
use crate::address::{LEN, encode_ib};
use crate::system::{ChannelId, System};
use crate::{Errno, Result};

const INIT: u32 = 1;
const RTR: u32 = 2;
const RTS: u32 = 3;

/// Bits of `enum ibv_qp_attr_mask`.
mod mask {
    pub(super) const STATE: u32 = 1;
    pub(super) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(super) const PKEY_INDEX: u32 = 1 << 4;
    pub(super) const PORT: u32 = 1 << 5;
    pub(super) const QKEY: u32 = 1 << 6;
    pub(super) const AV: u32 = 1 << 7;
    pub(super) const PATH_MTU: u32 = 1 << 8;
    pub(super) const TIMEOUT: u32 = 1 << 9;
    pub(super) const RETRY_CNT: u32 = 1 << 10;
    pub(super) const RNR_RETRY: u32 = 1 << 11;
    pub(super) const RQ_PSN: u32 = 1 << 12;
    pub(super) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(super) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(super) const SQ_PSN: u32 = 1 << 16;
    pub(super) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(super) const DEST_QPN: u32 = 1 << 20;
}

const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
const ACCESS_REMOTE_READ: u32 = 1 << 2;
const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;

const HOP_LIMIT: u8 = 64;
/// `IBV_RATE_100_GBPS`
const RATE: u8 = 16;
const DEFAULT_PKEY: u16 = 0xffff;
/// The device has no kernel index.
const NO_INDEX: u32 = u32::MAX;

impl Manager {
    /// The attributes for a transition of the identifier's queue pair to `state`.
    ///
    /// # Errors
    /// EINVAL while they are unknown, or for other states.
    pub fn qp_attributes(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
        state: u32,
    ) -> Result<QpAttr> {
        let id = self.id(channel, number)?;
        if !id.has_device() {
            return Err(EINVAL);
        }
        let mut attr = QpAttr { qp_state: state, port_num: 1, mask: mask::STATE, ..QpAttr::ZERO };
        if id.is_datagram() {
            attr.qkey = id.qkey;
            attr.mask |= mask::PKEY_INDEX | mask::PORT | mask::QKEY;
            return Ok(attr);
        }
        let connecting = !matches!(
            id.state,
            State::Idle | State::Bound | State::AddrResolved | State::RouteResolved | State::Listening
        );
        let answered = connecting && !matches!(id.state, State::ReqSent);
        let connection = &id.connection;
        match state {
            INIT => {
                attr.mask |= mask::ACCESS_FLAGS | mask::PKEY_INDEX | mask::PORT;
                if connecting {
                    attr.access = ACCESS_REMOTE_WRITE;
                    if connection.responder_resources != 0 {
                        attr.access |= ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
                    }
                }
            }
            RTR if answered => {
                attr.mask |= mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
                attr.path_mtu = mtu(connection).into();
                attr.dest_qp_num = connection.remote.qpn.get();
                attr.rq_psn = connection.psn.get();
                // A responder (the kernel's `cm_init_qp_rtr_attr`).
                if matches!(id.qp_type, QPT_RC | QPT_XRC_RECV) {
                    attr.mask |= mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER;
                    attr.max_dest_rd_atomic = connection.responder_resources;
                }
                attr.ah = self.address_vector(system, number);
            }
            RTS if answered => {
                attr.mask |= mask::SQ_PSN;
                attr.sq_psn = connection.remote.psn.get();
                // A requester (the kernel's `cm_init_qp_rts_attr`).
                if matches!(id.qp_type, QPT_RC | QPT_XRC_SEND) {
                    attr.mask |= mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
                    attr.retry_cnt = connection.retry_count;
                    attr.rnr_retry = connection.rnr_retry_count;
                    attr.max_rd_atomic = connection.initiator_depth;
                }
                if matches!(id.qp_type, QPT_RC | QPT_XRC_SEND | QPT_XRC_RECV) {
                    attr.mask |= mask::TIMEOUT;
                    attr.timeout = id.ack_timeout.unwrap_or(connection.timeout);
                }
            }
            _ => return Err(EINVAL),
        }
        Ok(attr)
    }

    /// The address vector of the identifier's peer.
    pub(super) fn address_vector(&mut self, system: &mut dyn System, number: u32) -> AhAttr {
        let Some(id) = self.ids.get(number) else { return AhAttr::ZERO };
        let (Some(src), Some(dst)) = (id.src, id.dst) else { return AhAttr::ZERO };
        address_vector_to(system, src.gid(), dst.gid(), id.tos)
    }

    /// Answers QUERY_ROUTE.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such identifier.
    pub fn query_route(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
    ) -> Result<RouteAnswer> {
        let id = self.id(channel, number)?;
        let [src, dst] = [id.src, id.dst].map(|address| address.map_or([0; LEN], |a| a.encode()));
        let mut answer = RouteAnswer { src, dst, ibdev_index: NO_INDEX, ..RouteAnswer::ZERO };
        if !id.has_device() {
            return Ok(answer);
        }
        answer.node_guid = system.node_guid().to_be();
        answer.port_num = 1;
        let path = path(id);
        if has_path(id) {
            answer.num_paths = 1;
            answer.paths[0] = path;
        } else {
            let PathRecord { dgid, sgid, pkey, .. } = path;
            answer.paths[0] = PathRecord { dgid, sgid, pkey, ..PathRecord::ZERO };
        }
        Ok(answer)
    }

    /// Answers QUERY for addresses.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such identifier.
    pub fn query_addr(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
    ) -> Result<AddrAnswer> {
        let id = self.id(channel, number)?;
        let mut answer = AddrAnswer { ibdev_index: NO_INDEX, ..AddrAnswer::ZERO };
        if let Some(src) = id.src {
            answer.src[..LEN].copy_from_slice(&src.encode());
            answer.src_size = src.encoded_len();
        }
        if let Some(dst) = id.dst {
            answer.dst[..LEN].copy_from_slice(&dst.encode());
            answer.dst_size = dst.encoded_len();
        }
        with_device(system, id, &mut answer);
        Ok(answer)
    }

    /// Answers QUERY for GIDs.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the channel has no such identifier.
    pub fn query_gid(
        &mut self,
        system: &mut dyn System,
        channel: ChannelId,
        number: u32,
    ) -> Result<AddrAnswer> {
        let id = self.id(channel, number)?;
        let mut answer = AddrAnswer { ibdev_index: NO_INDEX, ..AddrAnswer::ZERO };
        let service = |port: u16| u64::from(id.space) << 16 | u64::from(port);
        if let Some(src) = id.src {
            answer.src = encode_ib(src.gid(), DEFAULT_PKEY, service(src.port));
            answer.src_size = 48;
        }
        if let Some(dst) = id.dst {
            answer.dst = encode_ib(dst.gid(), DEFAULT_PKEY, service(dst.port));
            answer.dst_size = 48;
        }
        with_device(system, id, &mut answer);
        Ok(answer)
    }

    /// Answers QUERY for paths.
    ///
    /// # Errors
    /// ENODEV before the device is known; ENOENT or EINVAL if the channel has no such identifier.
    pub fn query_path(&mut self, channel: ChannelId, number: u32) -> Result<PathAnswer> {
        /// IB_PATH_GMP, IB_PATH_PRIMARY, IB_PATH_OUTBOUND, IB_PATH_INBOUND_REVERSE: the general path.
        const FLAGS: u32 = 1 | 2 | 8 | 32;
        let id = self.id(channel, number)?;
        if !id.has_device() {
            return Err(Errno(libc::ENODEV));
        }
        if !has_path(id) {
            return Ok(PathAnswer::ZERO);
        }
        let path = path(id);
        /// Selector of an exact value.
        const EXACTLY: u8 = 2 << 6;
        let wire = WirePath {
            dgid: path.dgid,
            sgid: path.sgid,
            flow_hop: u32::from(path.hop_limit).to_be(),
            tclass: path.traffic_class,
            reversible_numpath: 1 << 7 | 1,
            pkey: DEFAULT_PKEY.to_be(),
            mtu: EXACTLY | mtu(&id.connection),
            rate: EXACTLY | path.rate,
            life_time: EXACTLY | path.packet_life_time,
            ..WirePath::ZERO
        };
        Ok(PathAnswer { num_paths: 1, flags: FLAGS, path: wire, ..PathAnswer::ZERO })
    }
}

/// The address vector from `src` to `dst`.
pub(super) fn address_vector_to(system: &mut dyn System, src: [u8; 16], dst: [u8; 16], tos: u8) -> AhAttr {
    AhAttr {
        dgid: dst,
        sgid_index: system.gid_index(&src).unwrap_or(0),
        hop_limit: HOP_LIMIT,
        traffic_class: tos,
        is_global: 1,
        port_num: 1,
        ..AhAttr::ZERO
    }
}

fn with_device(system: &mut dyn System, id: &Id, answer: &mut AddrAnswer) {
    if id.has_device() {
        answer.node_guid = system.node_guid().to_be();
        answer.port_num = 1;
        answer.pkey = DEFAULT_PKEY;
    }
}

/// Path MTU code of the connection.
fn mtu(connection: &super::Connection) -> u8 {
    if connection.mtu == 0 { MTU_4096 } else { connection.mtu }
}

/// Whether the route is known: after resolution, or for an incoming connection.
fn has_path(id: &Id) -> bool {
    id.dst.is_some() && !matches!(id.state, State::Idle | State::Bound | State::AddrResolved)
}

fn path(id: &Id) -> PathRecord {
    let gid = |address: Option<crate::address::Address>| address.map_or([0; 16], |address| address.gid());
    PathRecord {
        dgid: gid(id.dst),
        sgid: gid(id.src),
        reversible: 1,
        mtu: mtu(&id.connection).into(),
        pkey: DEFAULT_PKEY.to_be(),
        hop_limit: HOP_LIMIT,
        traffic_class: id.tos,
        numb_path: 1,
        mtu_selector: 2,
        rate_selector: 2,
        rate: RATE,
        packet_life_time_selector: 2,
        packet_life_time: id.ack_timeout.map_or(PACKET_LIFE_TIME, |code| code.saturating_sub(1)),
        ..PathRecord::ZERO
    }
}
