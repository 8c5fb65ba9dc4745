//! Captures of UDP datagrams (`.pcapng`), of front ends that send over Ethernet.
//!
//! Fragment: the payload of a datagram. Source: the destination port. Event: the position of the datagram among those of its
//! port, from 0. Other packets, datagrams in several IP fragments, and obsolete Packet Blocks are structure.

use std::collections::HashMap;
use std::ops::Range;

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
/// First bytes of files in the older format pcap: times in µs and ns, both byte orders.
const PCAP_MAGICS: [[u8; 4]; 4] =
    [[0xd4, 0xc3, 0xb2, 0xa1], [0xa1, 0xb2, 0xc3, 0xd4], [0x4d, 0x3c, 0xb2, 0xa1], [0xa1, 0xb2, 0x3c, 0x4d]];
const INTERFACE_DESCRIPTION: u32 = 1;
const OBSOLETE_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
/// Type, length, and the length again at the end.
const BLOCK: usize = 12;
const LINK_ETHERNET: u16 = 1;
const LINK_RAW_IP: u16 = 101;
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;

/// Destination port and payload of a UDP datagram; no payload if its length does not fit its header or its packet. A host
/// drops such a datagram.
type Datagram = (u16, Option<Range<usize>>);

pub(super) struct Pcapng;

/// Whether a file is in the older format pcap.
pub(crate) fn is_pcap(file: &[u8]) -> bool {
    PCAP_MAGICS.iter().any(|magic| file.starts_with(magic))
}

impl Format for Pcapng {
    fn name(&self) -> &'static str {
        "pcapng"
    }

    fn title(&self) -> &'static str {
        "Captures of UDP datagrams (Wireshark, tcpdump)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        file.starts_with(&SECTION_HEADER.to_le_bytes())
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        let mut capture = Capture::default();
        while !cursor.is_at_end() {
            capture.scan_block(&mut cursor, indexer)?;
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        format!("port {source}")
    }
}

#[derive(Default)]
struct Capture {
    /// The section's interfaces.
    interfaces: Vec<Interface>,
    /// Next event of each destination port.
    next: HashMap<u16, u64>,
}

#[derive(Clone, Copy)]
struct Interface {
    link: u16,
    /// Most bytes of a packet that are captured; 0: all.
    snap_len: u32,
}

impl Capture {
    fn scan_block(&mut self, cursor: &mut Cursor<'_>, indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let start = cursor.at();
        let kind = cursor.u32("block type")?;
        if kind == SECTION_HEADER {
            cursor.order = byte_order(cursor, start)?;
            self.interfaces.clear();
        } else if start == 0 {
            return Err(malformed(start, "block type", format!("{kind:#x}"), "a section header"));
        }
        let len = cursor.u32("block total length")? as usize;
        if len < BLOCK || !len.is_multiple_of(4) {
            return Err(malformed(start + 4, "block total length", len, "a multiple of 4 from 12"));
        }
        let mut body = cursor.split(len - BLOCK, "block total length")?;
        let again = cursor.u32("block total length at the end")? as usize;
        if again != len {
            return Err(malformed(cursor.at() - 4, "block total length at the end", again, len));
        }
        match kind {
            INTERFACE_DESCRIPTION => {
                let link = body.u16("link type")?;
                body.u16("reserved")?;
                self.interfaces.push(Interface { link, snap_len: body.u32("snap length")? });
            }
            OBSOLETE_PACKET => {
                indexer.structure("packet in an obsolete block (type 2)", start..cursor.at());
                return Ok(());
            }
            SIMPLE_PACKET | ENHANCED_PACKET => {
                let datagram = match kind {
                    SIMPLE_PACKET => self.simple_packet(&mut body)?,
                    _ => self.packet(&mut body)?,
                };
                match datagram {
                    Some((port, Some(payload))) => {
                        let event = self.next.entry(port).or_default();
                        indexer.structure("packet header", start..payload.start);
                        indexer.fragment(*event, u32::from(port), payload.clone());
                        indexer.structure("end of the packet", payload.end..cursor.at());
                        *event += 1;
                    }
                    Some((_, None)) => {
                        indexer.structure("UDP datagram of a wrong length", start..cursor.at())
                    }
                    None => indexer.structure("packet without UDP payload", start..cursor.at()),
                }
                return Ok(());
            }
            _ => {}
        }
        indexer.structure("block without a packet", start..cursor.at());
        Ok(())
    }

    /// The UDP datagram of an Enhanced Packet Block.
    fn packet(&self, body: &mut Cursor<'_>) -> Result<Option<Datagram>, Malformed> {
        let at = body.at();
        let interface = body.u32("interface id")?;
        let link = self.interface(at, interface)?.link;
        body.u64("timestamp")?;
        let captured_at = body.at();
        let captured = body.u32("captured packet length")?;
        let original = body.u32("original packet length")?;
        if captured < original {
            return Err(malformed(
                captured_at,
                "captured packet length",
                captured,
                format!("{original}, the whole packet"),
            ));
        }
        datagram(body.split(captured as usize, "captured packet length")?, at, link)
    }

    /// The UDP datagram of a Simple Packet Block, which is of the first interface.
    fn simple_packet(&self, body: &mut Cursor<'_>) -> Result<Option<Datagram>, Malformed> {
        let at = body.at();
        let Interface { link, snap_len } = self.interface(at, 0)?;
        let original = body.u32("original packet length")?;
        if (1..original).contains(&snap_len) {
            let expected = format!("at most {snap_len}, the snap length of the interface: the whole packet");
            return Err(malformed(at, "original packet length", original, expected));
        }
        datagram(body.split(original as usize, "original packet length")?, at, link)
    }

    /// The interface with this id, which is at `at`.
    fn interface(&self, at: usize, id: u32) -> Result<Interface, Malformed> {
        let found = usize::try_from(id).ok().and_then(|id| self.interfaces.get(id));
        let expected = || format!("less than {}", self.interfaces.len());
        found.copied().ok_or_else(|| malformed(at, "interface id", id, expected()))
    }
}

/// The UDP datagram of a packet; its block begins at `at`.
fn datagram(mut packet: Cursor<'_>, at: usize, link: u16) -> Result<Option<Datagram>, Malformed> {
    packet.order = ByteOrder::Big;
    match link {
        LINK_ETHERNET => Ok(ethernet(&mut packet)),
        LINK_RAW_IP => Ok(ip(&mut packet)),
        _ => Err(malformed(at, "link type of the interface", link, "1 (Ethernet) or 101 (raw IP)")),
    }
}

fn byte_order(cursor: &Cursor<'_>, start: usize) -> Result<ByteOrder, Malformed> {
    let mut ahead = cursor.clone();
    ahead.order = ByteOrder::Little;
    ahead.u32("block total length")?;
    match ahead.u32("byte-order magic")? {
        BYTE_ORDER_MAGIC => Ok(ByteOrder::Little),
        swapped if swapped.swap_bytes() == BYTE_ORDER_MAGIC => Ok(ByteOrder::Big),
        other => Err(malformed(start + 8, "byte-order magic", format!("{other:#x}"), "0x1a2b3c4d")),
    }
}

fn ethernet(packet: &mut Cursor<'_>) -> Option<Datagram> {
    packet.take(12, "addresses").ok()?;
    let mut kind = packet.u16("ether type").ok()?;
    while matches!(kind, 0x8100 | 0x88a8) {
        packet.u16("VLAN tag").ok()?;
        kind = packet.u16("ether type").ok()?;
    }
    if matches!(kind, 0x0800 | 0x86dd) { ip(packet) } else { None }
}

fn ip(packet: &mut Cursor<'_>) -> Option<Datagram> {
    let start = packet.at();
    let first = packet.u8("version").ok()?;
    let mut datagram = match first >> 4 {
        4 => {
            packet.u8("type of service").ok()?;
            let total = usize::from(packet.u16("total length").ok()?);
            packet.u16("identification").ok()?;
            let fragment = packet.u16("fragment offset").ok()?;
            packet.u8("time to live").ok()?;
            let protocol = packet.u8("protocol").ok()?;
            let header = usize::from(first & 0xf) * 4;
            packet.take(header.checked_sub(packet.at() - start)?, "rest of the header").ok()?;
            // More fragments follow, or this is a later one.
            if protocol != UDP || fragment & 0x3fff != 0 {
                return None;
            }
            packet.split(total.checked_sub(header)?, "total length").ok()?
        }
        6 => {
            packet.take(3, "flow label").ok()?;
            let len = usize::from(packet.u16("payload length").ok()?);
            let next_header = packet.u8("next header").ok()?;
            packet.take(33, "hop limit and addresses").ok()?;
            if next_header != UDP {
                return None;
            }
            packet.split(len, "payload length").ok()?
        }
        _ => return None,
    };
    datagram.u16("source port").ok()?;
    let port = datagram.u16("destination port").ok()?;
    let len = usize::from(datagram.u16("length").ok()?);
    datagram.u16("checksum").ok()?;
    Some((port, len.checked_sub(UDP_HEADER).and_then(|len| datagram.take(len, "length").ok())))
}
