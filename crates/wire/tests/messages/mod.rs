//! One communication management message of each type.

use millstream_wire::cm::{Message, MessageType, Path, Rep, Req, Transport, reason};
use millstream_wire::{Pkey, Psn, Qkey, Qpn};

pub(crate) fn req() -> Message<'static> {
    Message::Req(Req {
        local_id: 0x0102_0304,
        service_id: 0x0106_1d2f,
        ca_guid: 0x1122_3344_5566_7788,
        qkey: Qkey::new(0),
        qpn: Qpn::new(0xab_cdef),
        responder_resources: 3,
        initiator_depth: 5,
        remote_response_timeout: 20,
        local_response_timeout: 19,
        transport: Transport::Rc,
        flow_control: true,
        psn: Psn::new(0x12_3456),
        retry_count: 7,
        rnr_retry_count: 6,
        pkey: Pkey::DEFAULT,
        mtu: 5,
        max_cm_retries: 15,
        srq: true,
        path: Path {
            local_lid: 0xffff,
            remote_lid: 0xffff,
            local_gid: 0xffff_0a00_0001,
            remote_gid: 0xffff_0a00_0002,
            flow_label: 0x1_2345,
            packet_rate: 2,
            traffic_class: 0x20,
            hop_limit: 64,
            service_level: 3,
            subnet_local: true,
            ack_timeout: 18,
        },
        private: b"a request's private data",
    })
}

pub(crate) fn all() -> Vec<Message<'static>> {
    let (local_id, remote_id) = (0x0102_0304, 0x0506_0708);
    vec![
        req(),
        Message::Mra {
            local_id,
            remote_id,
            message_type: MessageType::Rep,
            service_timeout: 21,
            private: b"wait",
        },
        Message::Rej {
            local_id,
            remote_id,
            message_type: MessageType::Req,
            reason: reason::CONSUMER,
            additional: &[1, 2, 3],
            private: b"no",
        },
        Message::Rep(Rep {
            local_id,
            remote_id,
            qkey: Qkey::new(0x8001_0000),
            qpn: Qpn::new(0x00_0012),
            eecn: Qpn::new(0x00_3400),
            psn: Psn::new(0xfe_dcba),
            responder_resources: 9,
            initiator_depth: 8,
            target_ack_delay: 15,
            failover: 1,
            flow_control: true,
            rnr_retry_count: 7,
            srq: true,
            ca_guid: 0x8877_6655_4433_2211,
            private: b"yes",
        }),
        Message::Rtu { local_id, remote_id, private: b"ready" },
        Message::Dreq { local_id, remote_id, remote_qpn: Qpn::new(0x12_3456), private: b"bye" },
        Message::Drep { local_id, remote_id, private: b"" },
        Message::SidrReq {
            request_id: 0xcafe_f00d,
            pkey: Pkey::DEFAULT,
            service_id: 0x0111_0007,
            private: b"where",
        },
        Message::SidrRep {
            request_id: 0xcafe_f00d,
            status: 0,
            qpn: Qpn::new(0x77_7777),
            service_id: 0x0111_0007,
            qkey: Qkey::new(0x0123_4567),
            additional: &[],
            private: b"here",
        },
    ]
}
