//! Packets from header and extents, as an adapter gathers them, are the packets that are built directly.

mod common;

use common::{files, small};
use millstream_fragment::mfp::{MfpError, Packet, Repr, assemble};
use millstream_fragment::packetize::{FileExtent, PacketizeError, Packetizer, Replay};
use millstream_fragment::stream::{Source, Stream};
use millstream_fragment::{Alignment, Fragment};
use proptest::prelude::*;

/// The packet built event by event, with a copy of each payload.
fn by_hand(source: &Source<'_>, replay: &Replay, first: u64, n_events: u32) -> Vec<u8> {
    let fragments: Vec<Fragment<'_>> = (first..first + u64::from(n_events))
        .filter_map(|running| {
            let position = source.find(replay.file_event(running)?)?;
            Some(Fragment { event: running, ..source.fragment(position)? })
        })
        .collect();
    let repr = Repr {
        source: source.id(),
        kind: source.kind(),
        first_event: first,
        n_events,
        n_fragments: fragments.len() as u32,
        alignment: source.alignment(),
    };
    let packetizer = Packetizer::new(*source, replay.clone());
    let mut packet = vec![0xA5; packetizer.max_total_len(n_events).unwrap() as usize];
    let len = assemble(&mut packet, repr, &fragments).unwrap();
    packet.truncate(len as usize);
    packet
}

fn gather(header: &[u8], extents: &[FileExtent], mapping: &[u8]) -> Vec<u8> {
    let mut packet = header.to_vec();
    for extent in extents {
        packet.extend(&mapping[extent.offset as usize..][..extent.len as usize]);
    }
    packet
}

proptest! {
    #[test]
    fn gathering_gives_the_packet(
        file in files(),
        base in prop_oneof![0..10_u64, Just(1 << 40)],
        skip in 0..40_u64,
        n_events in 1..60_u32,
    ) {
        let stream = file.stream();
        let replay = Replay::new(stream.events(), base).unwrap();
        let mut extents = Vec::new();
        for source in stream.sources() {
            let packetizer = Packetizer::new(source, replay.clone());
            let mut header = vec![0xA5; packetizer.max_header_len(n_events) as usize];
            let batch = packetizer.packet(base + skip, n_events, &mut header, &mut extents).unwrap();
            prop_assert!(extents.len() as u64 <= packetizer.max_extents(n_events));
            prop_assert!(extents.iter().all(|extent| extent.len > 0));
            let packet = gather(&header[..batch.header_len as usize], &extents, stream.mapping());
            prop_assert_eq!(packet.len(), batch.total_len as usize);
            prop_assert!(batch.total_len <= packetizer.max_total_len(n_events).unwrap());
            let parsed = Packet::new_checked(&packet).unwrap();
            prop_assert_eq!(parsed.header().n_fragments(), batch.n_fragments);
            prop_assert!(parsed.fragments().all(|fragment| fragment.is_intact()));
            prop_assert_eq!(packet, by_hand(&source, &replay, base + skip, n_events));
        }
    }
}

#[test]
fn a_batch_within_one_pass_is_one_extent() {
    let stream = small().stream();
    let source = stream.sources().next().unwrap();
    let packetizer = Packetizer::new(source, Replay::continuing(stream.events()).unwrap());
    let (mut header, mut extents) = ([0; 256], Vec::new());

    let batch = packetizer.packet(1000, 4, &mut header, &mut extents).unwrap();
    assert_eq!((batch.header_len, batch.total_len, batch.n_fragments), (128, 128 + 32, 3));
    assert_eq!(extents, [FileExtent { offset: 80, len: 32 }]);

    // 1001 and 1003, then 1004 and 1005, which are 1000 and 1001 again.
    let batch = packetizer.packet(1001, 5, &mut header, &mut extents).unwrap();
    assert_eq!(batch.n_fragments, 4);
    assert_eq!(extents, [FileExtent { offset: 88, len: 24 }, FileExtent { offset: 80, len: 24 }]);
    let packet = gather(&header[..batch.header_len as usize], &extents, stream.mapping());
    let packet = Packet::new_checked(&packet).unwrap();
    assert!(packet.fragments().map(|fragment| fragment.event).eq([1001, 1003, 1004, 1005]));

    // Only the missing event.
    let batch = packetizer.packet(1002, 1, &mut header, &mut extents).unwrap();
    assert_eq!((batch.total_len, batch.n_fragments, extents.len()), (64, 0, 0));
}

#[test]
fn empty_fragments_make_no_extent() {
    let stream = small().stream();
    let source = stream.sources().nth(1).unwrap();
    let packetizer = Packetizer::new(source, Replay::continuing(stream.events()).unwrap());
    let (mut header, mut extents) = ([0; 256], Vec::new());
    let batch = packetizer.packet(1000, 4, &mut header, &mut extents).unwrap();
    assert_eq!((batch.total_len, batch.n_fragments), (64, 1));
    assert_eq!(extents, []);
}

#[test]
fn the_list_of_extents_is_reused() {
    let stream = small().stream();
    let source = stream.sources().next().unwrap();
    let packetizer = Packetizer::new(source, Replay::continuing(stream.events()).unwrap());
    let mut header = [0; 4096];
    let mut extents = Vec::with_capacity(packetizer.max_extents(50) as usize);
    let (place, capacity) = (extents.as_ptr(), extents.capacity());
    for first in 1000..1100 {
        packetizer.packet(first, 50, &mut header, &mut extents).unwrap();
    }
    assert_eq!((extents.as_ptr(), extents.capacity()), (place, capacity));
    assert_eq!([0, 1, 2, 5, 6].map(|n| packetizer.max_extents(n)), [0, 1, 2, 2, 3]);
}

#[test]
fn events_outside_of_the_run_are_refused() {
    assert_eq!(Replay::new(5..5, 0), None);
    let stream = small().stream();
    let source = stream.sources().next().unwrap();
    let replay = Replay::new(stream.events(), 50).unwrap();
    assert_eq!(replay.file_event(49), None);
    assert_eq!(replay.file_event(50 + 9), Some(1001));
    let packetizer = Packetizer::new(source, replay);
    let (mut header, mut extents) = ([0; 4096], Vec::new());
    let mut batch =
        |first, n_events| packetizer.packet(first, n_events, &mut header, &mut extents).unwrap_err();
    assert_eq!(
        batch(49, 2).to_string(),
        "2 events from event 49 are outside of the run, which starts with event 50"
    );
    assert!(matches!(batch(u64::MAX, 1), PacketizeError::Events { .. }));
    assert!(matches!(batch(50, 0), PacketizeError::Packet(MfpError::Events { .. })));
    assert!(matches!(batch(50, 1000), PacketizeError::Packet(MfpError::Truncated { part: "header", .. })));
}

#[test]
fn a_packet_needs_no_stream_file_on_disk() {
    // The source may be in any registered memory.
    let mut file = small();
    file.alignment = Alignment::MAX;
    let bytes = file.bytes();
    let stream = Stream::parse("in memory", bytes.as_slice()).unwrap();
    let source = stream.sources().next().unwrap();
    let packetizer = Packetizer::new(source, Replay::continuing(stream.events()).unwrap());
    let (mut header, mut extents) = ([0; 4096], Vec::new());
    let batch = packetizer.packet(1000, 2, &mut header, &mut extents).unwrap();
    assert_eq!((batch.header_len, batch.total_len), (4096, 3 * 4096));
    assert_eq!(extents, [FileExtent { offset: 4096, len: 2 * 4096 }]);
}
