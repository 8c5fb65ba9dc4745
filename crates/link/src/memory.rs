//! A link in memory, for tests of links that wrap others.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::Mutex;

use crate::datagram::{Outgoing, PacketInfo, RxBuffers};
use crate::{Counts, Link, icrc};

pub(crate) const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
pub(crate) const THERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
pub(crate) const SOURCE_PORT: u16 = 0xc123;

/// Stores sent packets with their IPv4 identification; receives the packets that a test put in.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) sent: Mutex<Vec<(u16, Vec<u8>)>>,
    pub(crate) calls: Mutex<usize>,
    pub(crate) coming: Mutex<VecDeque<(usize, Vec<u8>)>>,
}

impl Link for Memory {
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        *self.calls.lock().unwrap() += 1;
        for batch in &*batches {
            assert_eq!((batch.source, batch.destination), (HERE, THERE));
            let packets = batch.bytes.chunks(batch.segment).enumerate();
            self.sent.lock().unwrap().extend(packets.map(|(i, packet)| (i as u16, packet.to_vec())));
        }
        Ok(batches.len())
    }

    fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize> {
        inbox.filled.clear();
        while inbox.empty_slots() != 0
            && let Some((segment, bytes)) = self.coming.lock().unwrap().pop_front()
        {
            let info = PacketInfo {
                source: HERE,
                source_port: SOURCE_PORT,
                destination: THERE,
                interface: 1,
                tos: 0,
            };
            inbox.push(info, segment, &bytes);
        }
        Ok(inbox.filled.len())
    }

    fn source_port(&self) -> u16 {
        SOURCE_PORT
    }

    fn identification(&self, index: usize) -> u16 {
        index as u16
    }

    fn counts(&self) -> Counts {
        Counts::default()
    }
}

/// A batch of sealed packets of 40 bytes for queue pair 0x456789, numbered from `first`.
pub(crate) fn batch(first: u32, count: u32) -> Vec<u8> {
    let flow = icrc::flow(HERE, SOURCE_PORT, THERE).unwrap();
    let packet = |i: u32| {
        let mut packet = vec![0; 40];
        packet[0] = 0x04;
        packet[4..8].copy_from_slice(&0x45_6789u32.to_be_bytes());
        packet[12..16].copy_from_slice(&(first + i).to_be_bytes());
        icrc::seal(&flow, i as u16, &mut packet);
        packet
    };
    (0..count).flat_map(packet).collect()
}

pub(crate) fn send(link: &impl Link, bytes: &mut [u8]) {
    let batch = Outgoing { source: HERE, destination: THERE, interface: 0, tos: 0b10, segment: 40, bytes };
    assert_eq!(link.send(&mut [batch]).unwrap(), 1);
}

pub(crate) fn number(packet: &[u8]) -> u32 {
    u32::from_be_bytes(packet[12..16].try_into().unwrap())
}

/// Whether the packet's ICRC is correct for exactly this identification.
pub(crate) fn is_sealed(identification: u16, packet: &[u8]) -> bool {
    let flow = icrc::flow(HERE, SOURCE_PORT, THERE).unwrap();
    icrc::identification(&flow, identification, packet) == Some(identification)
}
