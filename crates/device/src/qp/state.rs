//! Queue pair states, the transitions between them and the attributes that each needs.

use std::time::Duration;

use millstream_quantity::{Psn, Qkey, Qpn};

use super::QpType;
use crate::errno::{Errno, Result};
use crate::timers::rnr_timer;

/// States (IBTA volume 1, figure 124), numbered as `enum ibv_qp_state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum QpState {
    /// Just created, or reset.
    #[default]
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained.
    Sqd = 4,
    /// Send queue error; not for reliable connections.
    Sqe = 5,
    /// Error: all requests are flushed.
    Err = 6,
}

impl QpState {
    /// From the verbs value.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Sqd, Self::Sqe, Self::Err]
            .get(raw as usize)
            .copied()
    }
}

/// Bits of `enum ibv_qp_attr_mask`.
pub mod attr {
    /// `IBV_QP_STATE`
    pub const STATE: u32 = 1;
    /// `IBV_QP_CUR_STATE`
    pub const CUR_STATE: u32 = 1 << 1;
    /// `IBV_QP_EN_SQD_ASYNC_NOTIFY`
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    /// `IBV_QP_ACCESS_FLAGS`
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    /// `IBV_QP_PKEY_INDEX`
    pub const PKEY_INDEX: u32 = 1 << 4;
    /// `IBV_QP_PORT`
    pub const PORT: u32 = 1 << 5;
    /// `IBV_QP_QKEY`
    pub const QKEY: u32 = 1 << 6;
    /// `IBV_QP_AV`
    pub const AV: u32 = 1 << 7;
    /// `IBV_QP_PATH_MTU`
    pub const PATH_MTU: u32 = 1 << 8;
    /// `IBV_QP_TIMEOUT`
    pub const TIMEOUT: u32 = 1 << 9;
    /// `IBV_QP_RETRY_CNT`
    pub const RETRY_CNT: u32 = 1 << 10;
    /// `IBV_QP_RNR_RETRY`
    pub const RNR_RETRY: u32 = 1 << 11;
    /// `IBV_QP_RQ_PSN`
    pub const RQ_PSN: u32 = 1 << 12;
    /// `IBV_QP_MAX_QP_RD_ATOMIC`
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    /// `IBV_QP_ALT_PATH`
    pub const ALT_PATH: u32 = 1 << 14;
    /// `IBV_QP_MIN_RNR_TIMER`
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    /// `IBV_QP_SQ_PSN`
    pub const SQ_PSN: u32 = 1 << 16;
    /// `IBV_QP_MAX_DEST_RD_ATOMIC`
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    /// `IBV_QP_PATH_MIG_STATE`
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    /// `IBV_QP_DEST_QPN`
    pub const DEST_QPN: u32 = 1 << 20;
}

/// The address vector of a queue pair (`struct ibv_ah_attr`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressVector {
    /// Whether a global route header is used. Ethernet requires it.
    pub is_global: bool,
    /// The peer's address.
    pub dgid: [u8; 16],
    /// Index of the source address in the GID table.
    pub sgid_index: u8,
    /// Flow label.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Destination local identifier, unused on Ethernet.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Source path bits, unused on Ethernet.
    pub src_path_bits: u8,
    /// Static rate.
    pub static_rate: u8,
    /// Port.
    pub port: u8,
}

/// Attributes of a queue pair, as in `struct ibv_qp_attr`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// The new state.
    pub state: QpState,
    /// The current state, as the caller knows it.
    pub cur_state: QpState,
    /// Whether to raise an event when the send queue has drained in SQD.
    pub en_sqd_async_notify: bool,
    /// `IBV_MTU_*`: 1 (256) to 5 (4096).
    pub path_mtu: u8,
    /// Path migration state, stored and reported only.
    pub path_mig_state: u8,
    /// Q_Key, UD only.
    pub qkey: Qkey,
    /// First expected packet sequence number (PSN).
    pub rq_psn: Psn,
    /// First packet sequence number (PSN) to send.
    pub sq_psn: Psn,
    /// Queue pair number of the peer.
    pub dest_qpn: Qpn,
    /// Remote access, `IBV_ACCESS_REMOTE_*`.
    pub access: u32,
    /// Address of the peer.
    pub path: AddressVector,
    /// Partition key index.
    pub pkey_index: u16,
    /// Outstanding READs and atomics as initiator.
    pub max_rd_atomic: u8,
    /// Outstanding READs and atomics as responder.
    pub max_dest_rd_atomic: u8,
    /// Code of the RNR NAK timer.
    pub min_rnr_timer: u8,
    /// Port.
    pub port: u8,
    /// Code of the local ACK timeout.
    pub timeout: u8,
    /// Retries after a timeout.
    pub retry_cnt: u8,
    /// Retries after an RNR NAK; 7 means infinite.
    pub rnr_retry: u8,
}

impl QpAttr {
    pub(super) fn merge(&mut self, new: &Self, mask: u32) {
        macro_rules! take {
            ($($bit:ident => $($field:ident),+;)*) => {
                $(if mask & attr::$bit != 0 { $(self.$field = new.$field.clone();)+ })*
            };
        }
        take! {
            STATE => state;
            ACCESS_FLAGS => access;
            PKEY_INDEX => pkey_index;
            PORT => port;
            QKEY => qkey;
            AV => path;
            PATH_MTU => path_mtu;
            TIMEOUT => timeout;
            RETRY_CNT => retry_cnt;
            RNR_RETRY => rnr_retry;
            RQ_PSN => rq_psn;
            SQ_PSN => sq_psn;
            MAX_QP_RD_ATOMIC => max_rd_atomic;
            MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
            MIN_RNR_TIMER => min_rnr_timer;
            DEST_QPN => dest_qpn;
            PATH_MIG_STATE => path_mig_state;
        }
    }

    /// EINVAL if a value that `mask` names is out of range.
    pub(super) fn check(&self, mask: u32, max_rd_atomic: u8) -> Result<()> {
        let named = |bit| mask & bit != 0;
        let wrong = (named(attr::PORT) && self.port != 1)
            || (named(attr::PKEY_INDEX) && self.pkey_index != 0)
            || (named(attr::PATH_MTU) && !(1..=5).contains(&self.path_mtu))
            || (named(attr::TIMEOUT) && self.timeout > 31)
            || (named(attr::RETRY_CNT) && self.retry_cnt > 7)
            || (named(attr::RNR_RETRY) && self.rnr_retry > 7)
            || (named(attr::MIN_RNR_TIMER) && rnr_timer(self.min_rnr_timer).is_err())
            || (named(attr::MAX_QP_RD_ATOMIC) && self.max_rd_atomic > max_rd_atomic)
            || (named(attr::MAX_DEST_RD_ATOMIC) && self.max_dest_rd_atomic > max_rd_atomic)
            || (named(attr::AV) && self.path.port > 1);
        if wrong { Err(Errno::INVAL) } else { Ok(()) }
    }

    /// The attributes of a connection that transitions to RTS, and those within SQD, change.
    pub(super) const OF_CONNECTION: u32 = attr::AV
        | attr::TIMEOUT
        | attr::RETRY_CNT
        | attr::RNR_RETRY
        | attr::MAX_QP_RD_ATOMIC
        | attr::MAX_DEST_RD_ATOMIC
        | attr::MIN_RNR_TIMER;

    /// The delay of an RNR NAK timer code.
    pub(crate) fn rnr_wait(code: u32) -> Duration {
        rnr_timer((code & 31) as u8).expect("five bits")
    }
}

/// A set of queue pair types, a bit each.
type QpTypes = u8;

const RC: QpTypes = 1 << QpType::Rc as u8;
const UC: QpTypes = 1 << QpType::Uc as u8;
const UD: QpTypes = 1 << QpType::Ud as u8;
/// XRC initiator and target: each has a part of a reliable connection's attributes (annex A14).
const XS: QpTypes = 1 << QpType::XrcSend as u8;
const XR: QpTypes = 1 << QpType::XrcRecv as u8;

struct Transition {
    kinds: QpTypes,
    from: QpState,
    to: QpState,
    required: u32,
    optional: u32,
}

/// Transitions other than those to RESET and ERR, with required and optional attributes (IBTA volume 1, 11.2.5.2,
/// table 91).
#[rustfmt::skip]
const TRANSITIONS: &[Transition] = {
    use QpState::*;
    use attr::*;
    const fn row(kinds: QpTypes, from: QpState, to: QpState, required: u32, optional: u32) -> Transition {
        Transition { kinds, from, to, required, optional }
    }
    const PATH: u32 = ALT_PATH | PATH_MIG_STATE;
    &[
        row(RC | UC | XS | XR, Reset, Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
        row(UD,      Reset, Init, PKEY_INDEX | PORT | QKEY, 0),
        row(RC | UC | XS | XR, Init, Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
        row(UD,      Init, Init, 0, PKEY_INDEX | PORT | QKEY),
        row(RC | XR, Init, Rtr, AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
                                ALT_PATH | ACCESS_FLAGS | PKEY_INDEX),
        row(UC | XS, Init, Rtr, AV | PATH_MTU | DEST_QPN | RQ_PSN, ALT_PATH | ACCESS_FLAGS | PKEY_INDEX),
        row(UD,      Init, Rtr, 0, PKEY_INDEX | QKEY),
        row(RC,      Rtr, Rts, TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC,
                               CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER | PATH),
        row(XS,      Rtr, Rts, TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC,
                               CUR_STATE | ACCESS_FLAGS | PATH),
        row(XR,      Rtr, Rts, TIMEOUT | SQ_PSN, CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER | PATH),
        row(UC,      Rtr, Rts, SQ_PSN, CUR_STATE | ACCESS_FLAGS | PATH),
        row(UD,      Rtr, Rts, SQ_PSN, CUR_STATE | QKEY),
        row(RC | XR, Rts, Rts, 0, CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER | PATH),
        row(UC | XS, Rts, Rts, 0, CUR_STATE | ACCESS_FLAGS | PATH),
        row(UD,      Rts, Rts, 0, CUR_STATE | QKEY),
        row(RC | UC | UD | XS | XR, Rts, Sqd, 0, EN_SQD_ASYNC_NOTIFY),
        row(RC | XR, Sqd, Rts, 0, CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER | PATH),
        row(UC | XS, Sqd, Rts, 0, CUR_STATE | ACCESS_FLAGS | PATH),
        row(UD,      Sqd, Rts, 0, CUR_STATE | QKEY),
        row(RC,      Sqd, Sqd, 0, PORT | AV | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC | MAX_DEST_RD_ATOMIC
                                | CUR_STATE | ACCESS_FLAGS | PKEY_INDEX | MIN_RNR_TIMER | PATH),
        row(XS,      Sqd, Sqd, 0, PORT | AV | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC
                                | CUR_STATE | ACCESS_FLAGS | PKEY_INDEX | PATH),
        row(XR,      Sqd, Sqd, 0, PORT | AV | TIMEOUT | MAX_DEST_RD_ATOMIC
                                | CUR_STATE | ACCESS_FLAGS | PKEY_INDEX | MIN_RNR_TIMER | PATH),
        row(UC,      Sqd, Sqd, 0, AV | CUR_STATE | ACCESS_FLAGS | PKEY_INDEX | PATH),
        row(UD,      Sqd, Sqd, 0, PKEY_INDEX | QKEY),
        row(UC,      Sqe, Rts, 0, CUR_STATE | ACCESS_FLAGS),
        row(UD,      Sqe, Rts, 0, CUR_STATE | QKEY),
    ]
};

/// Attributes that only the other end of an XRC connection has. Programs set all of a reliable connection's
/// attributes at both ends; these are ignored, as in Linux.
pub(super) fn ignored_attributes(kind: QpType) -> u32 {
    match kind {
        QpType::XrcSend => attr::MAX_DEST_RD_ATOMIC | attr::MIN_RNR_TIMER,
        QpType::XrcRecv => attr::MAX_QP_RD_ATOMIC | attr::RETRY_CNT | attr::RNR_RETRY,
        QpType::Rc | QpType::Uc | QpType::Ud => 0,
    }
}

/// EINVAL unless the queue pair type has the transition, and `mask` names all required attributes. Other
/// attributes must be optional ones.
pub(super) fn check_transition(kind: QpType, from: QpState, to: QpState, mask: u32) -> Result<()> {
    let named = mask & !attr::STATE;
    if matches!(to, QpState::Reset | QpState::Err) {
        // RESET has no transition to ERR (table 91).
        let exists = to == QpState::Reset || from != QpState::Reset;
        return if exists && named & !attr::CUR_STATE == 0 { Ok(()) } else { Err(Errno::INVAL) };
    }
    let set = 1 << kind as u8;
    let transition = TRANSITIONS
        .iter()
        .find(|t| t.kinds & set != 0 && t.from == from && t.to == to)
        .ok_or(Errno::INVAL)?;
    let missing = transition.required & !named;
    let foreign = named & !(transition.required | transition.optional);
    if missing == 0 && foreign == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [QpType; 5] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcRecv];
    const STATES: [QpState; 7] =
        [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err];

    #[test]
    fn each_required_attribute_is_required_and_no_other_is_allowed() {
        for (t, kind) in TRANSITIONS.iter().flat_map(|t| KINDS.map(|kind| (t, kind))) {
            if t.kinds & (1 << kind as u8) == 0 {
                continue;
            }
            assert_eq!(check_transition(kind, t.from, t.to, t.required | attr::STATE), Ok(()));
            for bit in 0..21 {
                let bit = 1u32 << bit;
                if t.required & bit != 0 {
                    assert!(
                        check_transition(kind, t.from, t.to, t.required & !bit).is_err(),
                        "{:?}->{:?}",
                        t.from,
                        t.to
                    );
                } else if bit != attr::STATE {
                    let allowed = t.optional & bit != 0;
                    assert_eq!(check_transition(kind, t.from, t.to, t.required | bit).is_ok(), allowed);
                }
            }
        }
    }

    #[test]
    fn every_state_can_be_reset_and_all_but_reset_can_fail() {
        for from in STATES {
            assert!(check_transition(QpType::Rc, from, QpState::Reset, attr::STATE).is_ok());
            assert_eq!(
                check_transition(QpType::Rc, from, QpState::Err, attr::STATE).is_ok(),
                from != QpState::Reset
            );
        }
    }

    #[test]
    fn transitions_that_skip_a_state_are_refused() {
        let all = u32::MAX;
        for (from, to) in [
            (QpState::Reset, QpState::Rtr),
            (QpState::Reset, QpState::Rts),
            (QpState::Init, QpState::Rts),
            (QpState::Rts, QpState::Rtr),
            (QpState::Err, QpState::Init),
            (QpState::Err, QpState::Rts),
        ] {
            for kind in KINDS {
                assert!(check_transition(kind, from, to, all).is_err());
                assert!(check_transition(kind, from, to, 0).is_err());
            }
        }
    }
}
