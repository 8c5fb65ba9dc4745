//! Multi-fragment packets: built packets parse; all other bytes are refused.

mod common;

use common::alignments;
use millstream_fragment::mfp::{
    Header, HeaderBuilder, MfpError, Packet, Repr, assemble, capacity, peek_header_len,
};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use proptest::prelude::*;

/// Offset of the checksum, and end of the bytes that it does not cover.
const HEADER_CRC: usize = 44;

fn build(repr: Repr, fragments: &[Fragment<'_>]) -> Vec<u8> {
    let longest = fragments.iter().map(|fragment| fragment.payload.len()).max().unwrap_or(0);
    let room = capacity(repr.n_events, longest as u32, repr.alignment).unwrap();
    // Slots hold old data.
    let mut packet = vec![0xA5; room as usize];
    let len = assemble(&mut packet, repr, fragments).unwrap();
    packet.truncate(len as usize);
    packet
}

/// Two of three events, minimum alignment: header 128 (48 + 2 × 16, rounded up), payload 8 + 16.
fn small() -> Vec<u8> {
    let repr = Repr {
        source: SourceId(0x103),
        kind: SourceKind(1),
        first_event: 1_000_000_000_000,
        n_events: 3,
        n_fragments: 2,
        alignment: Alignment::MIN,
    };
    let first = repr.first_event;
    build(repr, &[Fragment::new(first, b"alpha"), Fragment::new(first + 2, b"gamma plus")])
}

fn forge(packet: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    packet[at..at + value.len()].copy_from_slice(value);
    seal(&mut packet, 128);
    packet
}

fn seal(packet: &mut [u8], header_len: usize) {
    let mut covered = packet[..header_len].to_vec();
    covered.drain(HEADER_CRC..HEADER_CRC + 4);
    packet[HEADER_CRC..HEADER_CRC + 4].copy_from_slice(&crc32fast::hash(&covered).to_le_bytes());
}

proptest! {
    #[test]
    fn what_is_built_is_read(
        alignment in alignments(),
        first_event in prop_oneof![any::<u32>().prop_map(u64::from), Just(u64::MAX - 40)],
        payloads in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..100)), 1..40),
        after in 0..100_usize,
    ) {
        let fragments: Vec<_> = (first_event..)
            .zip(&payloads)
            .filter_map(|(event, payload)| Some(Fragment::new(event, payload.as_ref()?)))
            .collect();
        let repr = Repr {
            source: SourceId(5),
            kind: SourceKind(6),
            first_event,
            n_events: payloads.len() as u32,
            n_fragments: fragments.len() as u32,
            alignment,
        };
        let mut bytes = build(repr, &fragments);
        let len = bytes.len();
        bytes.resize(len + after, 0x5A);
        let packet = Packet::new_checked(&bytes).unwrap();
        prop_assert_eq!(packet.header().repr(), repr);
        prop_assert_eq!(packet.header().total_len() as usize, len);
        prop_assert_eq!(packet.as_bytes(), &bytes[..len]);
        prop_assert_eq!(packet.fragments().collect::<Vec<_>>(), fragments);
        for (entry, fragment) in packet.header().entries().zip(packet.fragments()) {
            prop_assert!(entry.offset.is_multiple_of(alignment.get()));
            prop_assert!(fragment.is_intact());
        }
        // A copied header has the same content.
        let header_len = peek_header_len(&bytes[..48]).unwrap() as usize;
        let header = Header::new_checked(&bytes[..header_len], len as u64).unwrap();
        prop_assert!(header.entries().eq(packet.header().entries()));
        prop_assert!(Header::new_checked(&bytes[..header_len], len as u64 - 1).is_err());
    }

    #[test]
    fn random_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), known in 0..7_usize) {
        // Prefixes of a valid header, so that later checks are reached.
        let good = small();
        let upto = [0, 6, 8, 16, 48, 64, 128][known].min(bytes.len());
        bytes[..upto].copy_from_slice(&good[..upto]);
        if bytes.len() >= 128 {
            seal(&mut bytes, 128);
        }
        if let Ok(packet) = Packet::new_checked(&bytes) {
            let total: usize = packet.fragments().map(|fragment| fragment.payload.len()).sum();
            prop_assert!(total <= bytes.len());
        }
    }

    #[test]
    fn forged_words_never_panic(changes in prop::collection::vec((0..20_usize, any::<u32>()), 1..3)) {
        let mut packet = small();
        for (word, value) in changes {
            packet = forge(&packet, word * 4, &value.to_le_bytes());
        }
        if let Ok(packet) = Packet::new_checked(&packet) {
            prop_assert_eq!(packet.fragments().len(), packet.header().n_fragments() as usize);
        }
    }
}

#[test]
fn the_small_packet_is_as_specified() {
    let packet = small();
    assert_eq!(packet.len(), 128 + 8 + 16);
    assert_eq!(&packet[..16], b"MFPK\x01\0\x08\0\x80\0\0\0\x98\0\0\0");
    assert_eq!(&packet[16..24], b"\x03\x01\0\0\x01\0\0\0");
    assert_eq!(packet[24..32], 1_000_000_000_000_u64.to_le_bytes());
    assert_eq!(&packet[32..44], b"\x03\0\0\0\x02\0\0\0\0\0\0\0");
    let entry = |delta: u32, payload: &[u8], offset: u32| {
        [delta, payload.len() as u32, crc32fast::hash(payload), offset].map(u32::to_le_bytes).concat()
    };
    assert_eq!(packet[48..64], entry(0, b"alpha", 128));
    assert_eq!(packet[64..80], entry(2, b"gamma plus", 136));
    assert_eq!(packet[80..128], [0; 48]);
    assert_eq!(&packet[128..], b"alpha\0\0\0gamma plus\0\0\0\0\0\0");
}

#[test]
fn a_packet_may_have_no_fragment() {
    let repr = Repr {
        source: SourceId(1),
        kind: SourceKind(1),
        first_event: 0,
        n_events: 8,
        n_fragments: 0,
        alignment: Alignment::CACHE_LINE,
    };
    let bytes = build(repr, &[]);
    assert_eq!(bytes.len(), 64);
    assert_eq!(Packet::new_checked(bytes).unwrap().fragments().len(), 0);
}

#[test]
fn every_truncation_is_refused() {
    let packet = small();
    for len in 0..packet.len() {
        let part = match len {
            0..48 => "fixed part of the header",
            48..128 => "header",
            _ => "packet",
        };
        let error = Packet::new_checked(&packet[..len]).unwrap_err();
        assert!(
            matches!(error, MfpError::Truncated { part: of, have, .. } if of == part && have == len as u64)
        );
    }
}

#[test]
fn a_damaged_header_byte_is_refused() {
    let packet = small();
    for at in 0..128 {
        let mut damaged = packet.clone();
        damaged[at] ^= 4;
        let error = Packet::new_checked(&damaged).unwrap_err();
        let expected = match at {
            0..4 => matches!(error, MfpError::Magic(_)),
            4..6 => matches!(error, MfpError::Version(_)),
            6..8 => matches!(error, MfpError::Alignment(_)),
            8..12 => matches!(error, MfpError::HeaderLen { .. }),
            // More fragments need a longer header, or more events.
            36..40 => matches!(error, MfpError::FragmentCount { .. }),
            _ => matches!(error, MfpError::HeaderCrc { .. }),
        };
        assert!(expected, "byte {at}: {error}");
    }
    let mut damaged = packet;
    damaged[136] ^= 4;
    let packet = Packet::new_checked(&damaged).unwrap();
    assert!(packet.fragments().map(|fragment| fragment.is_intact()).eq([true, false]));
}

/// Every field, with an invalid value and a right checksum.
#[test]
fn every_invalid_field_is_named() {
    let packet = small();
    let cases: &[(usize, &[u8], &str)] = &[
        (6, &[4, 0], "alignment: alignment 4 is not a power of two from 8 to 4096"),
        (6, &[16, 0], "offset of fragment 1: found 136, expected 144"),
        (8, &[64], "header_len: found 64, expected 128"),
        (12, &[151], "total_len: found 151, expected 152"),
        (12, &[0, 0, 1], "total_len: found 65536, expected 152"),
        (
            24,
            &[255; 8],
            "n_events: 3 events from event 18446744073709551615: must be at least 1 without overflow",
        ),
        (32, &[0], "n_events: 0 events from event 1000000000000: must be at least 1 without overflow"),
        (32, &[2], "event_delta of fragment 1: found 2, expected 1 or more, below 2"),
        (36, &[1], "header_len: found 128, expected 64"),
        (36, &[4], "n_fragments: 4 fragments for 3 events"),
        (40, &[1], "reserved: found 0x1, expected 0"),
        (48, &[2], "event_delta of fragment 1: found 2, expected 3 or more, below 3"),
        (52, &[9], "offset of fragment 1: found 136, expected 144"),
        (52, &[255; 4], "packet of 4294967424 B: packets must be shorter than 4 GiB; use smaller batches"),
        (60, &[0], "offset of fragment 0: found 0, expected 128"),
        (64 + 12, &[255; 4], "offset of fragment 1: found 4294967295, expected 136"),
        (64 + 12, &[128], "offset of fragment 1: found 128, expected 136"),
        (64 + 4, &[0, 1], "total_len: found 152, expected 392"),
    ];
    for &(at, value, expected) in cases {
        let error = Packet::new_checked(forge(&packet, at, value)).unwrap_err();
        assert_eq!(error.to_string(), expected, "{value:?} at byte {at}");
    }
}

#[test]
fn the_builder_refuses_what_the_parser_refuses() {
    let repr = Repr {
        source: SourceId(1),
        kind: SourceKind(1),
        first_event: 100,
        n_events: 4,
        n_fragments: 2,
        alignment: Alignment::CACHE_LINE,
    };
    let mut buffer = [0; 128];
    let mut short = [0; 127];
    let error = HeaderBuilder::new(&mut short, repr).unwrap_err();
    assert_eq!(error, MfpError::Truncated { part: "header", need: 128, have: 127 });
    let error = HeaderBuilder::new(&mut buffer, Repr { n_fragments: 5, ..repr }).unwrap_err();
    assert_eq!(error, MfpError::FragmentCount { n_fragments: 5, n_events: 4 });
    let error = HeaderBuilder::new(&mut buffer, Repr { n_events: 0, n_fragments: 0, ..repr }).unwrap_err();
    assert_eq!(error, MfpError::Events { first_event: 100, n_events: 0 });

    let mut builder = HeaderBuilder::new(&mut buffer, repr).unwrap();
    for event in [99, 104, u64::MAX] {
        let error = builder.push(event, 0, 0).unwrap_err();
        assert!(matches!(error, MfpError::EventDelta { fragment: 0, .. }), "{error}");
    }
    assert_eq!(builder.push(101, 65, 0), Ok(128));
    assert!(matches!(builder.push(101, 0, 0), Err(MfpError::EventDelta { fragment: 1, earliest: 2, .. })));
    assert!(matches!(builder.push(102, u32::MAX, 0), Err(MfpError::TooLong { .. })));
    assert_eq!(builder.push(103, 1, 0), Ok(256));
    assert_eq!(builder.push(103, 1, 0), Err(MfpError::WrongFragmentCount { pushed: 3, n_fragments: 2 }));
    assert_eq!(builder.finish(), Ok(320));

    let mut builder = HeaderBuilder::new(&mut buffer, repr).unwrap();
    builder.push(100, 1, 0).unwrap();
    assert_eq!(builder.finish(), Err(MfpError::WrongFragmentCount { pushed: 1, n_fragments: 2 }));

    let mut room = [0; 191];
    let fragments = [Fragment::new(100, b"a"), Fragment::new(101, b"")];
    let error = assemble(&mut room, repr, &fragments).unwrap_err();
    assert_eq!(error, MfpError::Truncated { part: "packet", need: 192, have: 191 });
}
