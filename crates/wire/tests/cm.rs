//! Communication management messages: valid ones round-trip, others are rejected.

mod messages;

use messages::{all, req};
use millstream_wire::cm::{Addresses, Message, PortSpace, Req, service_id};
use millstream_wire::{Error, mad};
use proptest::prelude::*;

/// The message with its private data as received: padded with zeroes.
fn received(bytes: &[u8]) -> (u64, Message<'_>) {
    Message::parse(bytes).expect("emitted")
}

#[test]
fn messages_survive_the_way() {
    for message in all() {
        let bytes = message.emit(0x1122_3344_5566_7788);
        let (transaction, seen) = received(&bytes);
        assert_eq!(transaction, 0x1122_3344_5566_7788);
        assert_eq!(seen.emit(transaction), bytes, "{message:?}");
        // Identical except for the length of private data.
        let text =
            |message: &Message<'_>| format!("{message:?}").split("private: ").next().unwrap().to_owned();
        assert_eq!(text(&seen), text(&message));
    }
}

#[test]
fn message_errors_name_the_field() {
    let bytes = all()[0].emit(1);
    for len in 0..mad::LEN {
        assert!(matches!(Message::parse(&bytes[..len]), Err(Error::Truncated { .. })), "{len} bytes");
    }
    let refused = |at: usize, value: u8| {
        let mut bytes = bytes;
        bytes[at] = value;
        match Message::parse(&bytes) {
            Err(Error::Field { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(0, 2), "base version");
    assert_eq!(refused(1, 3), "class");
    assert_eq!(refused(2, 1), "class version");
    assert_eq!(refused(3, 0x81), "method");
    assert_eq!(refused(17, 0x19), "attribute");
    assert_eq!(refused(24 + 43, 2 << 1), "transport service type");
    assert_eq!(refused(24 + 50, 6 << 4), "path packet payload MTU");
}

#[test]
fn addresses_of_both_families_round_trip() {
    let pairs = [("10.0.0.1", "192.168.255.1"), ("fe80::1", "2001:db8::5")];
    for (source, destination) in pairs {
        let addresses = Addresses {
            source: source.parse().unwrap(),
            source_port: 40_000,
            destination: destination.parse().unwrap(),
        };
        let mut private = [0xaa; 56];
        addresses.emit(&mut private);
        assert_eq!(Addresses::parse(&private), Ok((addresses, &[0xaa; 20][..])));
        for len in 0..Addresses::LEN {
            assert!(Addresses::parse(&private[..len]).is_err());
        }
        private[1] = 0x50;
        assert!(matches!(
            Addresses::parse(&private),
            Err(Error::Field { field: "IP version", value: 5, .. })
        ));
    }
    assert_eq!(service_id(PortSpace::Tcp, 7471), 0x0106_1d2f);
}

proptest! {
    #[test]
    fn arbitrary_messages_do_not_panic(
        kind in 0_usize..9,
        noise in prop::collection::vec((24_usize..mad::LEN, any::<u8>()), 0..64),
    ) {
        let mut bytes = all()[kind].emit(7);
        for (at, value) in noise {
            bytes[at] = value;
        }
        if let Ok((transaction, message)) = Message::parse(&bytes) {
            let again = message.emit(transaction);
            prop_assert_eq!(Message::parse(&again).unwrap().1, message);
        }
    }

    #[test]
    fn oversized_numbers_are_truncated(retry: u8, mtu in 1_u8..6, label: u32, timeout: u8) {
        let Message::Req(req) = req() else { unreachable!() };
        let mut wide = req;
        (wide.retry_count, wide.mtu, wide.local_response_timeout) = (retry, mtu, timeout);
        wide.path.flow_label = label;
        let bytes = Message::Req(wide).emit(1);
        let (_, Message::Req(seen)) = received(&bytes) else { panic!() };
        prop_assert_eq!((seen.retry_count, seen.mtu, seen.local_response_timeout), (retry & 7, mtu, timeout & 31));
        prop_assert_eq!(seen.path.flow_label, label & 0xf_ffff);
        prop_assert_eq!(Req { private: req.private, retry_count: req.retry_count, mtu: req.mtu,
            local_response_timeout: req.local_response_timeout, path: req.path, ..seen }, req);
    }
}
