//! Whole packets: valid ones round-trip, others are rejected, and nothing panics.

use millstream_wire::{
    Error, Msn, Opcode, Packet, Pkey, Psn, Qkey, Qpn, Repr, Rkey, Service, Srqn, aeth, atomic_ack_eth,
    atomic_eth, bth, deth, ieth, imm_dt, reth, xrceth,
};
use proptest::prelude::*;

fn any_bth() -> impl Strategy<Value = bth::Repr> {
    let opcode = prop::sample::select(Opcode::ALL);
    (opcode, any::<[bool; 6]>(), any::<(u16, u32, u32)>()).prop_map(|(opcode, bits, (pkey, qp, psn))| {
        bth::Repr {
            opcode,
            solicited: bits[0],
            migrated: bits[1],
            pad: 0,
            pkey: Pkey::new(pkey),
            fecn: bits[2],
            becn: bits[3],
            dest_qp: Qpn::new(qp),
            ack_req: bits[4],
            selective_ack: bits[5],
            psn: Psn::new(psn),
        }
    })
}

/// A packet with the headers of its opcode, made from the given numbers.
fn with_headers(bth: bth::Repr, long: [u64; 3], short: [u32; 2], payload: &[u8]) -> Repr<'_> {
    let mut all = [0; 256];
    let full = Repr {
        xrceth: Some(xrceth::Repr { srq: Srqn::new(short[1]) }),
        deth: Some(deth::Repr { qkey: Qkey::new(short[0]), src_qp: Qpn::new(short[1]) }),
        reth: Some(reth::Repr { va: long[0], rkey: Rkey::new(short[0]), length: short[1] }),
        atomic_eth: Some(atomic_eth::Repr {
            va: long[0],
            rkey: Rkey::new(short[0]),
            swap_or_add: long[1],
            compare: long[2],
        }),
        aeth: Some(aeth::Repr { syndrome: short[0] as u8, msn: Msn::new(short[1]) }),
        atomic_ack_eth: Some(atomic_ack_eth::Repr { original: long[0] }),
        imm_dt: Some(imm_dt::Repr { data: short[0].to_ne_bytes() }),
        ieth: Some(ieth::Repr { rkey: Rkey::new(short[1]) }),
        ..Repr::new(bth, &[])
    };
    full.emit(&mut all);
    let len = Repr { payload: if bth.opcode == Opcode::CNP { &[0; 16] } else { &[] }, ..full }.buffer_len();
    let packet = Packet::new_checked(&all[..len]).expect("emitted");
    let seen = Repr::parse(&packet).expect("emitted");
    Repr {
        bth: seen.bth,
        xrceth: seen.xrceth,
        deth: seen.deth,
        reth: seen.reth,
        atomic_eth: seen.atomic_eth,
        aeth: seen.aeth,
        atomic_ack_eth: seen.atomic_ack_eth,
        imm_dt: seen.imm_dt,
        ieth: seen.ieth,
        payload,
    }
}

proptest! {
    #[test]
    fn packets_round_trip(
        bth in any_bth(),
        long: [u64; 3],
        short: [u32; 2],
        mut payload in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        match bth.opcode {
            Opcode::CNP => payload = vec![0; 16],
            opcode if !opcode.has_payload() => payload.clear(),
            _ => {}
        }
        let repr = with_headers(bth, long, short, &payload);
        let mut bytes = vec![0xa5; repr.buffer_len() + 3];
        repr.emit(&mut bytes);
        prop_assert_eq!(&bytes[repr.buffer_len()..], &[0xa5; 3], "nothing behind the packet is written");
        let packet = Packet::new_checked(&bytes[..repr.buffer_len()]).unwrap();
        let seen = Repr::parse(&packet).unwrap();
        prop_assert_eq!(seen.payload, &payload[..]);
        prop_assert_eq!(Repr { bth: bth::Repr { pad: 0, ..seen.bth }, ..seen }, repr);
        // A truncated packet is rejected, or has less payload.
        for len in 0..repr.buffer_len() {
            if let Ok(shorter) = Packet::new_checked(&bytes[..len]) {
                prop_assert!(shorter.payload().len() < payload.len());
            }
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..100), opcode: u8, known: bool) {
        let mut bytes = bytes;
        if let (true, [first, second, ..]) = (known, &mut bytes[..]) {
            *first = Opcode::ALL[usize::from(opcode) % Opcode::ALL.len()].to_byte();
            *second &= 0xf0;
        }
        if let Ok(packet) = Packet::new_checked(&bytes[..]) {
            let repr = Repr::parse(&packet).unwrap();
            let mut again = vec![0; repr.buffer_len()];
            repr.emit(&mut again);
            let again = Packet::new_checked(&again[..]).unwrap();
            prop_assert_eq!(Repr::parse(&again).unwrap(), repr);
        }
    }
}

#[test]
fn every_opcode_has_the_headers_of_its_name() {
    for &opcode in Opcode::ALL {
        let name = format!("{opcode:?}");
        let headers = opcode.headers();
        use millstream_wire::Headers as H;
        assert_eq!(headers.contains(H::IMM_DT), name.ends_with("_IMM"), "{name}");
        assert_eq!(headers.contains(H::IETH), name.ends_with("_INV"), "{name}");
        assert_eq!(headers.contains(H::DETH), name.starts_with("UD_"), "{name}");
        let rdma = ["WRITE_FIRST", "WRITE_ONLY", "READ_REQUEST", "ATOMIC_WRITE"];
        assert_eq!(headers.contains(H::RETH), rdma.iter().any(|r| name.contains(r)), "{name}");
        assert_eq!(Opcode::from_byte(opcode.to_byte()), Some(opcode));
    }
    assert_eq!(Opcode::RC_WRITE_ONLY_IMM.headers_len(), 20);
    assert_eq!(Opcode::RC_ATOMIC_ACKNOWLEDGE.headers_len(), 12);
    assert_eq!(Opcode::RC_SEND_LAST_IMM.with_service(Service::Uc), Some(Opcode::UC_SEND_LAST_IMM));
    assert_eq!(Opcode::RC_READ_REQUEST.with_service(Service::Uc), None);
}

#[test]
fn errors_name_the_invalid_field() {
    let mut bytes = [0; 16];
    bytes[0] = Opcode::RC_SEND_ONLY.to_byte();
    assert!(Packet::new_checked(bytes).is_ok(), "an empty message");
    bytes[1] = 0x10;
    assert_eq!(
        Packet::new_checked(bytes),
        Err(Error::Payload { opcode: 4, payload: 0, pad: 1 }),
        "padding of nothing"
    );
    bytes[1] = 0x01;
    assert_eq!(Packet::new_checked(bytes), Err(Error::Version(1)));
    bytes[..2].copy_from_slice(&[0x15, 0]);
    assert_eq!(Packet::new_checked(bytes), Err(Error::Opcode(0x15)));
    bytes[0] = 0x0c;
    assert_eq!(
        Packet::new_checked(bytes),
        Err(Error::Truncated { header: "packet", needed: 32, available: 16 })
    );
    assert_eq!(
        Packet::new_checked(&bytes[..11]),
        Err(Error::Truncated { header: "BTH", needed: 12, available: 11 })
    );
    let ack = [0x11, 0, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0x1f, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0];
    assert_eq!(
        Packet::new_checked(ack),
        Err(Error::Payload { opcode: 0x11, payload: 4, pad: 0 }),
        "an ACK with payload"
    );
}

#[test]
fn both_migration_states_are_accepted() {
    for flags in [0, 0x40] {
        let mut bytes = [0; 20];
        bytes[..2].copy_from_slice(&[0x11, flags]);
        assert_eq!(Packet::new_checked(bytes).unwrap().bth().migrated(), flags != 0);
    }
}
