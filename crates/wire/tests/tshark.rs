//! Compares every header with tshark's dissection. (Version 4.0 has neither MRA nor the SIDR messages.)

mod messages;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;

use millstream_wire::cm::{Addresses, Message};
use millstream_wire::icrc::Flow;
use millstream_wire::{
    CNP_PADDING, Headers, Msn, Opcode, Operation, Psn, Qkey, Qpn, Repr, Rkey, Service, Syndrome, UDP_PORT,
    aeth, atomic_ack_eth, atomic_eth, bth, deth, ieth, imm_dt, reth,
};
use serde_json::Value;

/// A capture file of IP packets (link type 101, raw IP).
fn pcap(packets: &[Vec<u8>]) -> Vec<u8> {
    let mut file = Vec::new();
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 101] {
        file.extend(word.to_le_bytes());
    }
    for (n, packet) in packets.iter().enumerate() {
        for word in [n as u32, 0, packet.len() as u32, packet.len() as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(packet);
    }
    file
}

/// A packet in UDP and IP, with its ICRC.
fn in_ip(source: IpAddr, destination: IpAddr, mut packet: Vec<u8>) -> Vec<u8> {
    let flow = Flow::new((source, 50_000), (destination, UDP_PORT)).unwrap();
    let covered = packet.len() - 4;
    let icrc = flow.icrc(&packet[..covered], 0);
    packet[covered..].copy_from_slice(&icrc);
    let len = packet.len() as u16 + 8;
    let mut bytes = Vec::new();
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            bytes.extend([0x45, 0]);
            bytes.extend((len + 20).to_be_bytes());
            bytes.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
            bytes.extend(source.octets());
            bytes.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            bytes.extend([0x60, 0, 0, 0]);
            bytes.extend(len.to_be_bytes());
            bytes.extend([17, 64]);
            bytes.extend(source.octets());
            bytes.extend(destination.octets());
        }
        _ => unreachable!("one family"),
    }
    for field in [50_000, UDP_PORT, len, 0] {
        bytes.extend(field.to_be_bytes());
    }
    bytes.extend(packet);
    bytes
}

/// tshark's dissection of a capture file; `None`, with the reason on the terminal, without tshark.
fn dissect(packets: &[Vec<u8>]) -> Option<Vec<Value>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packets.pcap");
    std::fs::write(&path, pcap(packets)).unwrap();
    let output = match Command::new("tshark").arg("-r").arg(&path).args(["-T", "json"]).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("not run: there is no tshark (make setup installs it)");
            return None;
        }
        output => output.unwrap(),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let packets: Value = serde_json::from_slice(&output.stdout).unwrap();
    Some(packets.as_array().unwrap().iter().map(|packet| packet["_source"]["layers"].clone()).collect())
}

/// The value of a field at any depth.
fn find<'a>(layers: &'a Value, field: &str) -> Option<&'a str> {
    match layers {
        Value::Object(members) => members
            .get(field)
            .and_then(Value::as_str)
            .or_else(|| members.values().find_map(|member| find(member, field))),
        Value::Array(members) => members.iter().find_map(|member| find(member, field)),
        _ => None,
    }
}

/// A number as tshark prints it.
fn number(layers: &Value, field: &str) -> u64 {
    let text = find(layers, field).unwrap_or_else(|| panic!("no {field} in {layers:#}"));
    parse(text).unwrap_or_else(|| panic!("{field} is {text}"))
}

fn parse(text: &str) -> Option<u64> {
    let text = text.replace([':', ' '], "");
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok().or_else(|| u64::from_str_radix(&text, 16).ok()),
    }
}

const PAYLOAD: &[u8] = b"seven b";

fn packet(opcode: Opcode) -> Vec<u8> {
    let nth = u32::from(opcode.to_byte());
    let bth = bth::Repr {
        solicited: nth.is_multiple_of(2),
        migrated: nth.is_multiple_of(3),
        becn: opcode == Opcode::CNP,
        ack_req: nth.is_multiple_of(5),
        ..bth::Repr::new(opcode, Qpn::new(0x10_0000 + nth), Psn::new(0xabcd00 + nth))
    };
    let payload = match opcode {
        Opcode::CNP => &[0; CNP_PADDING][..],
        opcode if opcode.operation() == Operation::AtomicWrite => &[7; 8],
        opcode if opcode.has_payload() => PAYLOAD,
        _ => &[],
    };
    let repr = Repr {
        deth: Some(deth::Repr { qkey: Qkey::new(0x1234_5678), src_qp: Qpn::new(0x654321) }),
        reth: Some(reth::Repr { va: 0x7f01_0203_0405_0607, rkey: Rkey::new(0xdead_beef), length: 0x1_0001 }),
        atomic_eth: Some(atomic_eth::Repr {
            va: 0x7f01_0203_0405_0608,
            rkey: Rkey::new(0xdead_bee0),
            swap_or_add: 0x1111_2222_3333_4444,
            compare: 0x5555_6666_7777_8888,
        }),
        aeth: Some(aeth::Repr {
            syndrome: Syndrome::RnrNak { timer_code: 12 }.to_byte(),
            msn: Msn::new(0x010203),
        }),
        atomic_ack_eth: Some(atomic_ack_eth::Repr { original: 0x0123_4567_89ab_cdef }),
        imm_dt: Some(imm_dt::Repr { data: [0xca, 0xfe, 0xba, 0xbe] }),
        ieth: Some(ieth::Repr { rkey: Rkey::new(0x0bad_f00d) }),
        ..Repr::new(bth, payload)
    };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut bytes);
    bytes
}

const V4: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))];
const V6: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2)),
];

#[test]
fn tshark_dissects_every_transport_header() {
    for [source, destination] in [V4, V6] {
        let packets: Vec<_> =
            Opcode::ALL.iter().map(|opcode| in_ip(source, destination, packet(*opcode))).collect();
        let Some(seen) = dissect(&packets) else { return };
        assert_eq!(seen.len(), packets.len());
        for (opcode, layers) in Opcode::ALL.iter().zip(&seen) {
            let nth = u64::from(opcode.to_byte());
            let is = |field: &str, value: u64| {
                assert_eq!(number(layers, &format!("infiniband.{field}")), value, "{field} of {opcode:?}");
            };
            is("bth.opcode", nth);
            is("bth.se", u64::from(nth.is_multiple_of(2)));
            is("bth.m", u64::from(nth.is_multiple_of(3)));
            is(
                "bth.padcnt",
                u64::from(
                    opcode.has_payload()
                        && *opcode != Opcode::CNP
                        && opcode.operation() != Operation::AtomicWrite,
                ),
            );
            is("bth.tver", 0);
            is("bth.p_key", 0xffff);
            is("bth.destqp", 0x10_0000 + nth);
            is("bth.a", u64::from(nth.is_multiple_of(5)));
            is("bth.psn", 0xabcd00 + nth);
            if opcode.service() == Service::Xrc || nth >= 0xc0 {
                // tshark 4.0 dissects the headers of XRC, and of manufacturers' opcodes, as payload.
                continue;
            }
            // tshark 4.0 lacks atomic WRITEs.
            let headers = opcode.headers();
            if headers.contains(Headers::RETH) && *opcode != Opcode::RC_ATOMIC_WRITE {
                is("reth.va", 0x7f01_0203_0405_0607);
                is("reth.r_key", 0xdead_beef);
                is("reth.dmalen", 0x1_0001);
            }
            if headers.contains(Headers::ATOMIC_ETH) {
                is("reth.va", 0x7f01_0203_0405_0608);
                is("reth.r_key", 0xdead_bee0);
                is("atomiceth.swapdt", 0x1111_2222_3333_4444);
                is("atomiceth.cmpdt", 0x5555_6666_7777_8888);
            }
            if headers.contains(Headers::AETH) {
                is("aeth.syndrome", 0x2c);
                is("aeth.msn", 0x010203);
            }
            if headers.contains(Headers::ATOMIC_ACK_ETH) {
                is("atomicacketh.origremdt", 0x0123_4567_89ab_cdef);
            }
            if headers.contains(Headers::DETH) {
                is("deth.q_key", 0x1234_5678);
                is("deth.srcqp", 0x654321);
            }
            if headers.contains(Headers::IMM_DT) {
                is("immdt", 0xcafe_babe);
            }
            if headers.contains(Headers::IETH) {
                is("ieth", 0x0bad_f00d);
            }
        }
    }
}

/// A communication management message as a packet.
fn managed(message: &Message<'_>) -> Vec<u8> {
    let bth = bth::Repr::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(0));
    let mad = message.emit(0x1122_3344_5566_7788);
    let deth = Some(deth::Repr { qkey: Qkey::new(0x8001_0000), src_qp: Qpn::GSI });
    let repr = Repr { deth, ..Repr::new(bth, &mad) };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut bytes);
    bytes
}

#[test]
fn tshark_dissects_cm_messages() {
    let mut messages = messages::all();
    let mut private = [0x55; 92];
    let addresses = Addresses { source: V4[0], source_port: 40_000, destination: V4[1] };
    addresses.emit(&mut private);
    if let Message::Req(req) = &mut messages[0] {
        req.private = &private;
    }
    let packets: Vec<_> = messages.iter().map(|message| in_ip(V4[0], V4[1], managed(message))).collect();
    let Some(seen) = dissect(&packets) else { return };
    for (message, layers) in messages.iter().zip(&seen) {
        let is = |field: &str, value: u64| {
            assert_eq!(number(layers, &format!("infiniband.{field}")), value, "{field} of {message:?}");
        };
        is("mad.baseversion", 1);
        is("mad.mgmtclass", 7);
        is("mad.classversion", 2);
        is("mad.method", 3);
        is("mad.transactionid", 0x1122_3344_5566_7788);
        match message {
            Message::Req(_) => {
                is("cm.req", 0x0102_0304);
                is("cm.req.serviceid", 0x0106_1d2f);
                is("cm.req.localcaguid", 0x1122_3344_5566_7788);
                is("cm.req.localqpn", 0xab_cdef);
                is("cm.req.responderres", 3);
                is("cm.req.initdepth", 5);
                is("cm.req.remoteresptout", 20);
                is("cm.req.localresptout", 19);
                is("cm.req.transpsvctype", 0);
                is("cm.req.e2eflowctrl", 1);
                is("cm.req.startpsn", 0x12_3456);
                is("cm.req.retrcount", 7);
                is("cm.req.rnrretrcount", 6);
                is("cm.req.pkey", 0xffff);
                is("cm.req.pppmtu", 5);
                is("cm.req.maxcmretr", 15);
                is("cm.req.srq", 1);
                is("cm.req.ext_transport", 0);
                is("cm.req.prim_locallid", 0xffff);
                // tshark 4.0 splits the word of flow label and packet rate differently from the specification
                // (12.6.5: 20, 6 and 6 bits) and the kernel (CM_REQ_PRIMARY_FLOW_LABEL).
                is("cm.req.prim_tfcclass", 0x20);
                is("cm.req.prim_hoplim", 64);
                is("cm.req.prim_sl", 3);
                is("cm.req.prim_subnetlocal", 1);
                is("cm.req.prim_localacktout", 18);
                is("cm.req.ip_cm.majv", 0);
                is("cm.req.ip_cm.ipv", 4);
                is("cm.req.ip_cm.sport", 40_000);
                assert_eq!(find(layers, "infiniband.cm.req.ip_cm.sip4"), Some("10.0.0.1"));
                assert_eq!(find(layers, "infiniband.cm.req.ip_cm.dip4"), Some("10.0.0.2"));
                let gids = ["infiniband.cm.req.prim_localgid_ipv4", "infiniband.cm.req.prim_remotegid_ipv4"];
                assert_eq!(gids.map(|field| find(layers, field)), [Some("10.0.0.1"), Some("10.0.0.2")]);
            }
            Message::Rep(_) => {
                is("cm.rep", 0x0102_0304);
                is("cm.rep.remotecommid", 0x0506_0708);
                is("cm.rep.localqkey", 0x8001_0000);
                is("cm.rep.localqpn", 0x12);
                is("cm.rep.localeecn", 0x3400);
                is("cm.rep.startpsn", 0xfe_dcba);
                is("cm.rep.respres", 9);
                is("cm.rep.initdepth", 8);
                is("cm.rep.tgtackdelay", 15);
                is("cm.rep.failoveracc", 1);
                is("cm.rep.e2eflowctrl", 1);
                is("cm.rep.rnrretrcount", 7);
                is("cm.rep.srq", 1);
                is("cm.rep.localcaguid", 0x8877_6655_4433_2211);
            }
            Message::Rej { .. } => {
                is("cm.rej.localcommid", 0x0102_0304);
                is("cm.rej.remotecommid", 0x0506_0708);
                is("cm.rej.msgrej", 0);
                is("cm.rej.rejinfolen", 3);
                is("cm.rej.reason", 28);
            }
            Message::Rtu { .. } => is("cm.rtu.remotecommid", 0x0506_0708),
            Message::Dreq { .. } => {
                is("cm.dreq.localcommid", 0x0102_0304);
                is("cm.dreq.remotecommid", 0x0506_0708);
                is("cm.req.remoteqpneecn", 0x12_3456);
            }
            Message::Drep { .. } => is("cm.drsp.localcommid", 0x0102_0304),
            Message::Mra { .. } => is("mad.attributeid", 0x11),
            Message::SidrReq { .. } => is("mad.attributeid", 0x17),
            Message::SidrRep { .. } => is("mad.attributeid", 0x18),
        }
    }
}
