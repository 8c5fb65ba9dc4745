//! Parses any bytes as a multi-fragment packet; an accepted packet equals the one rebuilt from its parts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millstream_fragment::Fragment;
use millstream_fragment::mfp::{FIXED_LEN, Header, Packet, assemble, peek_header_len};

fuzz_target!(|bytes: &[u8]| {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let header = packet.header();
    let header_len = peek_header_len(&bytes[..FIXED_LEN]).expect("an accepted packet has a header") as usize;
    let copied = Header::new_checked(&bytes[..header_len], bytes.len() as u64).expect("as in the packet");
    assert!(copied.entries().eq(header.entries()));

    let fragments: Vec<Fragment<'_>> = packet.fragments().collect();
    let mut again = vec![0; header.total_len() as usize];
    let len = assemble(&mut again, header.repr(), &fragments).expect("its parts fit together");
    assert_eq!(len, header.total_len());
    let again = Packet::new_checked(again).expect("the builder makes sound packets");
    assert_eq!(again.header().repr(), header.repr());
    assert!(again.fragments().eq(fragments));
});
