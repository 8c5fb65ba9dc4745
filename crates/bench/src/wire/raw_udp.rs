//! Bare packets over the link, without a protocol: what a transport over UDP can reach at most.
//!
//! A server takes packets and says how many bytes have come; a client keeps so many bytes under way that neither
//! side waits and no buffer overflows.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_link::{Inbox, Link, MAX_BATCH, MAX_SEGMENTS, Origin, Outgoing, Udp, destination_qpn, icrc};

/// Blocks of queue pair numbers of the two sides.
const SERVER: u16 = 0x5e1;
const CLIENT: u16 = 0xc11;

/// Base transport header, kind, and a number.
const HEADER: usize = 12 + 4 + 8;
/// What a packet carries besides payload when a transport sends it: base transport header and ICRC.
const OVERHEAD: usize = 12 + 4;

const DATA: u32 = 1;
const RECEIVED: u32 = 2;
const PING: u32 = 3;
const END: u32 = 4;

/// Bytes under way, at most; far below the receiver's buffer where privilege makes that large.
const WINDOW: u64 = 2 << 20;
/// After so long without news what is under way counts as lost.
const LOST: Duration = Duration::from_millis(20);
/// A server whose client says nothing for so long ends.
const IDLE: Duration = Duration::from_secs(10);

/// How packets are sent.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Payload of each packet.
    pub payload: usize,
    /// Many packets in a buffer that the kernel splits.
    pub offload: bool,
    /// Seal each packet and check it.
    pub seal: bool,
}

struct Side {
    udp: Udp,
    inbox: Inbox,
    peer: u16,
    source: IpAddr,
    destination: IpAddr,
    manner: Manner,
}

impl Side {
    fn send(&self, packets: &mut [u8], len: usize) -> io::Result<usize> {
        if self.manner.seal {
            let flow = icrc::flow(self.source, self.udp.source_port(), self.destination)
                .ok_or(io::ErrorKind::InvalidInput)?;
            for (i, packet) in packets.chunks_mut(len).enumerate() {
                let index = if self.manner.offload { self.udp.identification(i) } else { 0 };
                icrc::seal(&flow, index, packet);
            }
        }
        let (source, destination) = (self.source, self.destination);
        let batch = |bytes| Outgoing { source, destination, interface: 0, tos: 2, segment: len, bytes };
        if self.manner.offload {
            return self.udp.send(&mut [batch(packets)]);
        }
        let mut batches: Vec<_> = packets.chunks_mut(len).map(batch).collect();
        let sent = self.udp.send(&mut batches)?;
        Ok(usize::from(sent != 0))
    }

    fn small(&self, kind: u32, number: u64) -> io::Result<usize> {
        let mut packet = packet(self.peer, kind, number, HEADER + icrc::MIN_PACKET - 12);
        let len = packet.len();
        self.send(&mut packet, len)
    }

    /// Receives what is there: kind, number, length of each packet.
    fn receive(&mut self, mut each: impl FnMut(&Origin, u32, u64, usize)) -> io::Result<bool> {
        let any = self.udp.receive(&mut self.inbox)? != 0;
        for received in self.inbox.received() {
            let origin = received.origin;
            let flow = icrc::flow(origin.source, origin.source_port, origin.destination);
            for (i, packet) in received.packets() {
                let right = !self.manner.seal
                    || flow.is_some_and(|flow| icrc::identification(&flow, i as u16, packet).is_some());
                if right && packet.len() >= HEADER && destination_qpn(packet).is_some() {
                    let kind = u32::from_be_bytes(packet[12..16].try_into().expect("four bytes"));
                    let number = u64::from_be_bytes(packet[16..24].try_into().expect("eight bytes"));
                    each(&origin, kind, number, packet.len());
                }
            }
        }
        Ok(any)
    }
}

/// A packet with an opcode that is left to manufacturers (IBTA volume 1, table 38).
fn packet(block: u16, kind: u32, number: u64, len: usize) -> Vec<u8> {
    let mut packet = vec![0; len];
    packet[0] = 0xc0;
    packet[5..8].copy_from_slice(&(u32::from(block) << 12).to_be_bytes()[1..]);
    packet[12..16].copy_from_slice(&kind.to_be_bytes());
    packet[16..24].copy_from_slice(&number.to_be_bytes());
    packet
}

fn join(block: u16) -> io::Result<Udp> {
    Udp::join(block).map_err(io::Error::other)
}

/// Answers one client until it ends.
///
/// # Errors
/// What the link reports; TimedOut if no client says anything.
pub fn serve(manner: Manner) -> io::Result<()> {
    let unknown = IpAddr::from([0, 0, 0, 0]);
    let mut side = Side {
        udp: join(SERVER)?,
        inbox: Inbox::new(16),
        peer: CLIENT,
        source: unknown,
        destination: unknown,
        manner,
    };
    let (mut bytes, mut heard) = (0u64, Instant::now());
    loop {
        let (mut from, mut ping, mut end) = (None, None, false);
        let any = side.receive(|origin, kind, number, len| {
            from = Some((origin.destination, origin.source));
            match kind {
                DATA => bytes += (len - OVERHEAD) as u64,
                PING => ping = Some(number),
                END => end = true,
                _ => {}
            }
        })?;
        if end {
            return Ok(());
        }
        if let Some((source, destination)) = from {
            (side.source, side.destination) = (source, destination);
            match ping {
                Some(number) => side.small(PING, number)?,
                None => side.small(RECEIVED, bytes)?,
            };
        }
        if any {
            heard = Instant::now();
        } else if heard.elapsed() > IDLE {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn client(source: IpAddr, destination: IpAddr, manner: Manner) -> io::Result<Side> {
    let mut side =
        Side { udp: join(CLIENT)?, inbox: Inbox::new(16), peer: SERVER, source, destination, manner };
    // The server may not be there yet.
    let deadline = Instant::now() + IDLE;
    loop {
        side.small(PING, u64::MAX)?;
        std::thread::sleep(Duration::from_millis(5));
        let mut there = false;
        side.receive(|_, kind, _, _| there |= kind == PING)?;
        if there {
            return Ok(side);
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn end(side: &Side) -> io::Result<()> {
    (0..3).try_for_each(|_| side.small(END, 0).map(drop))
}

/// Sends for a time; bytes of payload a second that arrived.
///
/// # Errors
/// What the link reports; TimedOut if nobody answers.
pub fn bandwidth(source: IpAddr, destination: IpAddr, manner: Manner, time: Duration) -> io::Result<f64> {
    let mut side = client(source, destination, manner)?;
    let len = manner.payload + OVERHEAD;
    let count = (MAX_BATCH / len).clamp(1, MAX_SEGMENTS);
    let mut batch: Vec<u8> = (0..count as u64).flat_map(|i| packet(SERVER, DATA, i, len)).collect();
    let payload = (count * manner.payload) as u64;
    let (mut sent, mut arrived, mut lost) = (0u64, 0u64, 0u64);
    // What warms up is not counted.
    let (warm, mut start) = (Instant::now() + time / 4, None);
    let mut news = Instant::now();
    loop {
        if sent - lost - arrived <= WINDOW {
            sent += payload * side.send(&mut batch, len)? as u64;
        }
        let before = arrived;
        side.receive(|_, kind, number, _| {
            if kind == RECEIVED {
                arrived = arrived.max(number);
            }
        })?;
        let now = Instant::now();
        if arrived != before {
            news = now;
        } else if now - news > LOST {
            (lost, news) = (sent - arrived, now);
        }
        match start {
            None if now >= warm => start = Some((now, arrived)),
            Some((began, first)) if now - began >= time => {
                end(&side)?;
                return Ok((arrived - first) as f64 / (now - began).as_secs_f64());
            }
            _ => {}
        }
    }
}

/// Half the median time of a round trip, in seconds.
///
/// # Errors
/// What the link reports; TimedOut if nobody answers.
pub fn latency(source: IpAddr, destination: IpAddr, manner: Manner, rounds: usize) -> io::Result<f64> {
    let mut side = client(source, destination, manner)?;
    let mut times = Vec::with_capacity(rounds);
    for number in 0..(rounds + rounds / 10) as u64 {
        let began = Instant::now();
        side.small(PING, number)?;
        loop {
            let mut back = false;
            side.receive(|_, kind, came, _| back |= kind == PING && came == number)?;
            let took = began.elapsed();
            if back {
                if number >= rounds as u64 / 10 {
                    times.push(took.as_secs_f64() / 2.0);
                }
                break;
            }
            if took > LOST {
                break;
            }
        }
    }
    end(&side)?;
    crate::median(&times).ok_or_else(|| io::ErrorKind::TimedOut.into())
}
