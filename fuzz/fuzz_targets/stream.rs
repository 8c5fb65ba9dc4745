//! Parses any bytes as a stream file. Accessors and batches of an accepted file must work.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millstream_fragment::mfp::{MfpError, Packet};
use millstream_fragment::packetize::PacketizeError;
use millstream_fragment::packetize::{Packetizer, Replay};
use millstream_fragment::stream::Stream;

fuzz_target!(|bytes: &[u8]| {
    let Ok(stream) = Stream::parse("fuzzed", bytes) else { return };
    let _ = stream.verify_payload();
    let events = stream.events();
    let replay = Replay::continuing(events.clone()).expect("an accepted file has events");
    let mut fragments = 0;
    for source in stream.sources() {
        assert_eq!(stream.source(source.id()).map(|found| found.name()), Some(source.name()));
        for (position, fragment) in source.fragments().enumerate() {
            assert_eq!(source.find(fragment.event), Some(position));
            assert!(fragment.payload.len() <= source.max_len() as usize);
            fragments += 1;
        }
        let packetizer = Packetizer::new(source, replay.clone());
        for (skip, n_events) in [(0, 1), (1, 3), (u64::MAX / 2, 20), (events.end - events.start - 1, 100)] {
            cut(&stream, &packetizer, events.start.saturating_add(skip), n_events);
        }
    }
    assert_eq!(stream.n_fragments(), fragments);
});

/// Gathers the packet of a batch like an adapter, and parses it.
fn cut(stream: &Stream<&[u8]>, packetizer: &Packetizer<'_>, first: u64, n_events: u32) {
    let (mut packet, mut extents) = (vec![0; packetizer.max_header_len(n_events) as usize], Vec::new());
    let batch = match packetizer.packet(first, n_events, &mut packet, &mut extents) {
        Ok(batch) => batch,
        Err(PacketizeError::Events { .. } | PacketizeError::Packet(MfpError::TooLong { .. })) => return,
        Err(error) => panic!("{error}"),
    };
    assert!(extents.len() as u64 <= packetizer.max_extents(n_events));
    packet.truncate(batch.header_len as usize);
    for extent in extents {
        packet.extend(&stream.mapping()[extent.offset as usize..][..extent.len as usize]);
    }
    let parsed = Packet::new_checked(&packet).expect("a batch is a sound packet");
    assert_eq!(parsed.as_bytes().len(), packet.len());
    assert_eq!(parsed.fragments().len(), batch.n_fragments as usize);
}
