//! A small file of each format, written from its specification, and the fragments it holds.

/// A file and its fragments: source, event, payload.
pub(crate) struct Sample {
    pub(crate) format: &'static str,
    pub(crate) file: Vec<u8>,
    pub(crate) fragments: Vec<(u32, u64, Vec<u8>)>,
}

pub(crate) fn all() -> Vec<Sample> {
    vec![
        hld(),
        midas(),
        mdf(),
        frd(),
        rdh(),
        evio(),
        evio_big_endian(),
        pcapng(),
        microslices(),
        microslice_alone(),
        msa(),
        tsa(),
        tsa_of_oldest_classes(),
    ]
}

/// Bytes under construction.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn le16(mut self, values: &[u16]) -> Self {
        values.iter().for_each(|value| self.0.extend(value.to_le_bytes()));
        self
    }

    fn le32(mut self, values: &[u32]) -> Self {
        values.iter().for_each(|value| self.0.extend(value.to_le_bytes()));
        self
    }

    fn le64(mut self, values: &[u64]) -> Self {
        values.iter().for_each(|value| self.0.extend(value.to_le_bytes()));
        self
    }

    fn be16(mut self, values: &[u16]) -> Self {
        values.iter().for_each(|value| self.0.extend(value.to_be_bytes()));
        self
    }

    fn be32(mut self, values: &[u32]) -> Self {
        values.iter().for_each(|value| self.0.extend(value.to_be_bytes()));
        self
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn pad(mut self, alignment: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self
    }
}

fn bytes() -> Bytes {
    Bytes::default()
}

/// A run of two events. The second has no block of board 0xe001.
fn hld() -> Sample {
    let record = |id: u32| bytes().le32(&[32, 0x30001, id, 0, 1, 2, 3, 0]).0;
    let mut file = record(0x10002);
    let mut fragments = Vec::new();
    for (sequence, boards) in [(7_u32, &[0xe000_u32, 0xe001][..]), (8, &[0xe000])] {
        let mut blocks = Vec::new();
        for board in boards {
            let words = board & 1 | 2;
            let block = bytes().be32(&[words << 16 | board]).be32(&[sequence; 3][..words as usize]).0;
            fragments.push((0x8000 << 16 | board, u64::from(sequence), block.clone()));
            blocks.extend(block);
        }
        let subevent_len = 16 + blocks.len() as u32;
        let subevent = bytes().be32(&[subevent_len, 0x20001, 0x8000, sequence]).0;
        // Subevents are padded to 8 bytes, within the event.
        let len = 32 + subevent_len.next_multiple_of(8);
        let header = bytes().le32(&[len, 0x30001, 0x2001, sequence, 1, 2, 3, 0]).0;
        fragments.push((0, u64::from(sequence), [header.clone(), subevent.clone()].concat()));
        file.extend(Bytes([header, subevent, blocks].concat()).pad(8).0);
    }
    file.extend(record(0x10003));
    Sample { format: "hld", file, fragments }
}

/// A begin of run, two events of banks with 16-bit and 32-bit headers, and an event of another id.
fn midas() -> Sample {
    let event = |id: u16, mask: u16, serial: u32, data: &[u8]| {
        bytes().le16(&[id, mask]).le32(&[serial, 0, data.len() as u32]).raw(data).0
    };
    let short =
        bytes().raw(b"ADC0").le16(&[4, 3]).raw(b"abc").pad(8).raw(b"TDC1").le16(&[6, 8]).raw(b"12345678").0;
    let aligned = bytes().raw(b"ADC0").le32(&[4, 5, 0]).raw(b"defgh").pad(8).0;
    let banks = |flags: u32, banks: &[u8]| bytes().le32(&[banks.len() as u32, flags]).raw(banks).0;
    let file = [
        event(0x8000, 0x494d, 12, b"<odb/>"),
        event(1, 1, 3, &banks(0x01, &short)),
        event(2, 1, 3, &banks(0x01, &short)),
        event(1, 1, 4, &banks(0x31, &aligned)),
        event(0x8001, 0x494d, 12, b"<odb/>"),
    ]
    .concat();
    let id = |name: &[u8; 4]| u32::from_be_bytes(*name);
    let fragments = vec![
        (id(b"ADC0"), 3, b"abc".to_vec()),
        (id(b"TDC1"), 3, b"12345678".to_vec()),
        (id(b"ADC0"), 4, b"defgh".to_vec()),
    ];
    Sample { format: "midas", file, fragments }
}

/// Two events; the header has seven words for trigger mask, run, orbit and bunch.
fn mdf() -> Sample {
    let bank = |kind: u8, source: u16, data: &[u8]| {
        bytes().le16(&[0xcbcb, 8 + data.len() as u16]).raw(&[kind, 0]).le16(&[source]).raw(data).pad(4).0
    };
    let event = |banks: &[u8]| {
        let size = 20 + 28 + banks.len() as u32;
        bytes().le32(&[size, size, size, 0]).raw(&[0, 0x37, 1, 0]).le32(&[1; 7]).raw(banks).0
    };
    let file =
        [event(&[bank(8, 0x101, b"velo"), bank(16, 0, b"odin!")].concat()), event(&bank(8, 0x101, b""))]
            .concat();
    let fragments = vec![
        (8 << 16 | 0x101, 0, b"velo".to_vec()),
        (16 << 16, 0, b"odin!".to_vec()),
        (8 << 16 | 0x101, 1, Vec::new()),
    ];
    Sample { format: "mdf", file, fragments }
}

/// A file header of version 2 and one event of each version.
fn frd() -> Sample {
    let fed = |id: u64, payload: u64| {
        let words = [5 << 60 | id << 8, payload, 0xa << 60 | 3 << 32];
        words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect::<Vec<u8>>()
    };
    let event = |version: [u16; 2], number: u32, payload: &[u8]| {
        let crc = crc32c(payload);
        bytes().le16(&version).le32(&[1, 2, number, payload.len() as u32, crc]).raw(payload).0
    };
    let first = [fed(1200, 11), fed(7, 12)].concat();
    let second = fed(1200, 13);
    let events = [event([5, 0], 40, &first), event([6, 0], 41, &second)].concat();
    let size = 32 + events.len() as u64;
    let file =
        bytes().raw(b"RAW_0002").le16(&[32, 0]).le32(&[2, 1, 2]).raw(&size.to_le_bytes()).raw(&events).0;
    let fragments = vec![(1200, 40, fed(1200, 11)), (7, 40, fed(7, 12)), (1200, 41, second)];
    Sample { format: "frd", file, fragments }
}

/// CRC-32C bit by bit (RFC 3720, B.4).
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

/// Two links, interleaved; the first has two pages in its first heartbeat frame.
fn rdh() -> Sample {
    let page = |front_end: u16, orbit: u32, next: u16, data: &[u8]| {
        bytes()
            .raw(&[7, 64])
            .le16(&[front_end])
            .raw(&[0, 32])
            .le16(&[0, next, 64 + data.len() as u16])
            .le32(&[0, 0, orbit])
            .raw(&[0; 40])
            .raw(data)
            .0
    };
    let pages = [
        page(1, 100, 80, b"first page"),
        page(2, 100, 64, b""),
        page(1, 100, 70, b"second"),
        page(1, 101, 80, b"next"),
    ];
    let mut file = Vec::new();
    for (page, len) in pages.iter().zip([80, 64, 70]) {
        file.extend(page);
        file.resize(file.len() - page.len() + len, 0);
    }
    file.extend(&pages[3]);
    let fragments = vec![
        (32 << 16 | 1, 100, [&pages[0][..], &pages[2]].concat()),
        (32 << 16 | 2, 100, pages[1].clone()),
        (32 << 16 | 1, 101, pages[3].clone()),
    ];
    Sample { format: "rdh", file, fragments }
}

/// A control event and two built events of two banks in one record; a trailer.
fn evio() -> Sample {
    let (file, fragments) = evio_file(|words| bytes().le32(words).0, |number| [number, 0]);
    Sample { format: "evio", file, fragments }
}

fn evio_big_endian() -> Sample {
    let (file, fragments) = evio_file(|words| bytes().be32(words).0, |number| [0, number]);
    Sample { format: "evio", file, fragments }
}

type Fragments = Vec<(u32, u64, Vec<u8>)>;

fn evio_file(emit: impl Fn(&[u32]) -> Vec<u8>, number: impl Fn(u32) -> [u32; 2]) -> (Vec<u8>, Fragments) {
    let header = |first: u32, events: u32, index: u32| {
        emit(&[first, 1, 14, events, index, 6, 0, 0xc0da_0100, 0, 0, 0, 0, 0, 0])
    };
    let bank = |tag: u32, kind: u32, data: &[u32]| {
        [&[1 + data.len() as u32, tag << 16 | kind << 8][..], data].concat()
    };
    let mut fragments = Fragments::new();
    let mut events = vec![bank(0xffd1, 1, &[5])];
    for event in [90_u32, 91] {
        let trigger = bank(0xff21, 0x20, &[&[0x010a_0002][..], &number(event)].concat());
        let crate1 = bank(3, 1, &[event, event]);
        for (tag, bank) in [(0xff21, &trigger), (3, &crate1)] {
            fragments.push((tag, u64::from(event), emit(bank)));
        }
        events.push(bank(0xff50, 0x10, &[trigger, crate1].concat()));
    }
    let index: Vec<u32> = events.iter().map(|event| event.len() as u32 * 4).collect();
    let body = events.concat();
    let words = 14 + index.len() as u32 + body.len() as u32;
    let file = [
        header(0x4556_494f, 1, 0),
        header(words, 3, index.len() as u32 * 4),
        emit(&index),
        emit(&body),
        header(14, 0, 0),
    ]
    .concat();
    (file, fragments)
}

/// Datagrams over IPv4, with a VLAN tag, in a Simple Packet Block, and over IPv6; a TCP packet; blocks that hold no packet that is read.
fn pcapng() -> Sample {
    let block = |kind: u32, body: &[u8]| {
        let body = bytes().raw(body).pad(4).0;
        let len = 12 + body.len() as u32;
        bytes().le32(&[kind, len]).raw(&body).le32(&[len]).0
    };
    let section = block(0x0a0d_0d0a, &bytes().le32(&[0x1a2b_3c4d]).le16(&[1, 0]).raw(&[0xff; 8]).0);
    let interface = |link: u16| block(1, &bytes().le16(&[link, 0]).le32(&[0]).0);
    let packet = |interface: u32, data: &[u8]| {
        let len = data.len() as u32;
        block(6, &bytes().le32(&[interface, 0, 0, len, len]).raw(data).0)
    };
    let simple = |data: &[u8]| block(3, &bytes().le32(&[data.len() as u32]).raw(data).0);
    let udp =
        |port: u16, payload: &[u8]| bytes().be16(&[9, port, 8 + payload.len() as u16, 0]).raw(payload).0;
    let ipv4 = |protocol: u8, data: &[u8]| {
        bytes()
            .raw(&[0x45, 0])
            .be16(&[20 + data.len() as u16, 0, 0])
            .raw(&[64, protocol])
            .raw(&[0; 10])
            .raw(data)
            .0
    };
    let ipv6 = |data: &[u8]| {
        bytes().raw(&[0x60, 0, 0, 0]).be16(&[data.len() as u16]).raw(&[17, 64]).raw(&[0; 32]).raw(data).0
    };
    let ethernet = |kind: &[u16], data: &[u8]| bytes().raw(&[0; 12]).be16(kind).raw(data).0;
    let file = [
        section,
        interface(1),
        interface(101),
        packet(0, &ethernet(&[0x0800], &ipv4(17, &udp(5000, b"one")))),
        packet(0, &ethernet(&[0x0800], &ipv4(6, &[0; 20]))),
        packet(0, &ethernet(&[0x8100, 5, 0x0800], &ipv4(17, &udp(5001, b"")))),
        packet(1, &ipv6(&udp(5000, b"two!"))),
        simple(&ethernet(&[0x0800], &ipv4(17, &udp(5000, b"three")))),
        // The obsolete Packet Block.
        block(2, &bytes().le16(&[0, 0]).le32(&[0, 0, 4, 4]).raw(b"data").0),
        // A name resolution block, which has no packet.
        block(4, &[0; 4]),
    ]
    .concat();
    let fragments = vec![
        (5000, 0, b"one".to_vec()),
        (5001, 0, Vec::new()),
        (5000, 1, b"two!".to_vec()),
        (5000, 2, b"three".to_vec()),
    ];
    Sample { format: "pcapng", file, fragments }
}

/// The class information of a Boost archive.
fn class(version: u32) -> Vec<u8> {
    bytes().raw(&[0]).le32(&[version]).0
}

/// The headers of a flesnet archive; `kind` is the archive type and, in the newest version, the compression.
fn archive(library: u16, kind: &[u32]) -> Vec<u8> {
    let string = |text: &str| bytes().le64(&[text.len() as u64]).raw(text.as_bytes()).0;
    string("serialization::archive")
        .into_iter()
        .chain(
            bytes()
                .le16(&[library])
                .raw(&[4, 8, 4, 8])
                .le32(&[1])
                .raw(&class(kind.len() as u32))
                .le32(kind)
                .0,
        )
        .chain(bytes().le64(&[1_700_000_000]).raw(&string("entry-node")).raw(&string("daq")).0)
        .collect()
}

/// A descriptor with the CRC of its content.
fn microslice(source: [u8; 2], equipment: u16, idx: u64, offset: u64, content: &[u8]) -> Vec<u8> {
    bytes()
        .raw(&[0xdd, 1])
        .le16(&[equipment, 1])
        .raw(&source)
        .le64(&[idx])
        .le32(&[crc32c(content), content.len() as u32])
        .le64(&[offset])
        .0
}

const STS: [u8; 2] = [0x10, 0x20];
const STS_A: u32 = 0x1020_000a;
const TOF: [u8; 2] = [0x60, 1];
const TOF_B: u32 = 0x6001_000b;

/// Microslices of 1,280 µs of two equipments; the second one lacks the middle. Source, event, descriptor and content.
fn microslices_of_two_equipments() -> Vec<(u32, u64, Vec<u8>, &'static [u8])> {
    [
        (STS, 10, STS_A, 1000_u64, &b"first"[..]),
        (TOF, 11, TOF_B, 1000, b""),
        (STS, 10, STS_A, 1001, b"second!"),
        (STS, 10, STS_A, 1002, b"x"),
        (TOF, 11, TOF_B, 1002, b"hits"),
    ]
    .into_iter()
    .map(|(system, equipment, source, number, content)| {
        (source, number, microslice(system, equipment, number * 1_280_000, 77, content), content)
    })
    .collect()
}

fn microslices() -> Sample {
    let fragments: Fragments = microslices_of_two_equipments()
        .into_iter()
        .map(|(source, number, descriptor, content)| (source, number, [&descriptor, content].concat()))
        .collect();
    let file = fragments.iter().flat_map(|(_, _, microslice)| microslice.clone()).collect();
    Sample { format: "microslices", file, fragments }
}

/// One microslice without content and, its flag says, without checksum.
fn microslice_alone() -> Sample {
    let mut file = microslice(STS, 10, 7, 0, b"");
    file[4] = 0;
    file[16] = 9;
    Sample { format: "microslices", fragments: vec![(STS_A, 1, file.clone())], file }
}

fn msa() -> Sample {
    let mut file = [archive(10, &[1]), class(0), class(0)].concat();
    let mut fragments = Vec::new();
    for (source, number, descriptor, content) in microslices_of_two_equipments() {
        file.extend(bytes().raw(&descriptor).le64(&[content.len() as u64]).raw(content).0);
        fragments.push((source, number, [&descriptor, content].concat()));
    }
    Sample { format: "msa", file, fragments }
}

/// Descriptors, contents; offsets count from `origin`.
fn component(system: [u8; 2], equipment: u16, origin: u64, first: u64, contents: &[&[u8]]) -> Vec<u8> {
    let mut offset = origin;
    let mut descriptors = Vec::new();
    for (number, content) in (first..).zip(contents) {
        descriptors.extend(microslice(system, equipment, number, offset, content));
        offset += content.len() as u64;
    }
    [descriptors, contents.concat()].concat()
}

/// Two timeslices of two components, the second timeslice with a component without microslices.
fn timeslice_archive(
    headers: Vec<u8>,
    descriptor: impl Fn(u64, u32) -> Vec<u8>,
    component_descriptor: impl Fn(u64, usize, u64) -> Vec<u8>,
    versions: [u32; 2],
    timeslices: [u64; 2],
) -> (Vec<u8>, Fragments) {
    let sts = |first| component(STS, 10, 4096, first, &[b"one", b"", b"three"]);
    let tof = component(TOF, 11, 0, 5, &[b"hits"]);
    let mut fragments = Fragments::new();
    let mut file = headers;
    let contents = [vec![(STS_A, sts(5), 3), (TOF_B, tof, 1)], vec![(STS_A, sts(7), 3), (0, vec![], 0)]];
    for (first, (timeslice, components)) in timeslices.iter().zip(contents).enumerate() {
        // Only the first object of a class has a class information.
        let class = |version| if first == 0 { class(version) } else { Vec::new() };
        let count = components.len() as u64;
        file.extend(bytes().raw(&class(0)).raw(&class(versions[0])).raw(&descriptor(*timeslice, 2)).0);
        file.extend(bytes().raw(&class(0)).le64(&[count]).le32(&[0]).0);
        for (source, component, microslices) in &components {
            file.extend(bytes().le64(&[component.len() as u64]).raw(component).0);
            if *microslices > 0 {
                fragments.push((*source, *timeslice, component.clone()));
            }
        }
        file.extend(bytes().raw(&class(0)).le64(&[count]).le32(&[versions[1]]).raw(&class(versions[1])).0);
        for (_, component, microslices) in components {
            file.extend(component_descriptor(*timeslice, component.len(), microslices));
        }
    }
    (file, fragments)
}

fn tsa() -> Sample {
    let (file, fragments) = timeslice_archive(
        archive(18, &[0, 0]),
        |index, components| {
            bytes().le64(&[index, index * 100, 100]).le32(&[0]).le64(&[0]).le32(&[3, components]).0
        },
        |_, size, microslices| bytes().le64(&[0, 0, size as u64, microslices]).le32(&[1]).0,
        [2, 1],
        [400, 402],
    );
    Sample { format: "tsa", file, fragments }
}

/// The timeslice's number is in its components only.
fn tsa_of_oldest_classes() -> Sample {
    let (file, fragments) = timeslice_archive(
        archive(10, &[]),
        |_, components| bytes().le64(&[u64::MAX]).le32(&[1, components]).0,
        |number, size, microslices| bytes().le64(&[number, 0, size as u64, microslices]).0,
        [0, 0],
        [8, 9],
    );
    Sample { format: "tsa", file, fragments }
}
